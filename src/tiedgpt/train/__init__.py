"""Training: `train` for a whole run, `Trainer` for its loop, and a state that survives.

The public names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.train.fast import fast_training
    from tiedgpt.train.loop import Trainer
    from tiedgpt.train.options import TrainOptions
    from tiedgpt.train.run import train
    from tiedgpt.train.tune_options import TuneOptions

__all__ = ["TrainOptions", "Trainer", "TuneOptions", "fast_training", "train"]
_PLACES = {
    "TrainOptions": "tiedgpt.train.options",
    "Trainer": "tiedgpt.train.loop",
    "TuneOptions": "tiedgpt.train.tune_options",
    "fast_training": "tiedgpt.train.fast",
    "train": "tiedgpt.train.run",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tiedgpt.train' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)

"""Training: the plan, the trainer, and a state that survives.

The public names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.train.fast import fast_training
    from tiedgpt.train.trainer import Trainer

__all__ = ["Trainer", "fast_training"]
_PLACES = {"Trainer": "tiedgpt.train.trainer", "fast_training": "tiedgpt.train.fast"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tiedgpt.train' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)

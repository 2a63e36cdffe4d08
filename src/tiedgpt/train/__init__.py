"""Training: the plan, the loop, and a state that survives.

`fast_training` is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.train.fast import fast_training

__all__ = ["fast_training"]


def __getattr__(name: str) -> Any:
    if name != "fast_training":
        raise AttributeError(f"module 'tiedgpt.train' has no attribute {name!r}")
    return import_module("tiedgpt.train.fast").fast_training

"""Generating text: sampling, and the engine that decodes sequences in the slots of a session."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiedgpt.infer.engine import Engine as Engine
    from tiedgpt.infer.options import GenerationConfig as GenerationConfig
    from tiedgpt.infer.scoring import Scored as Scored
    from tiedgpt.infer.sequence import Completion as Completion
    from tiedgpt.infer.sequence import Token as Token
    from tiedgpt.infer.worker import ClosedError as ClosedError
    from tiedgpt.infer.worker import Generation as Generation
    from tiedgpt.infer.worker import QueueFullError as QueueFullError

_HOMES = {
    "ClosedError": "worker",
    "Completion": "sequence",
    "Engine": "engine",
    "Generation": "worker",
    "GenerationConfig": "options",
    "QueueFullError": "worker",
    "Scored": "scoring",
    "Token": "sequence",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiedgpt.infer' has no attribute {name!r}")
    return getattr(import_module(f"tiedgpt.infer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

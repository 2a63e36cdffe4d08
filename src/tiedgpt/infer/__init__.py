"""Generating text: sampling, and the engine that decodes sequences in the slots of a session."""

from tiedgpt.infer.engine import Engine
from tiedgpt.infer.options import GenerationConfig
from tiedgpt.infer.scoring import Scored
from tiedgpt.infer.sequence import Completion, Token
from tiedgpt.infer.worker import ClosedError, Generation, QueueFullError

__all__ = [
    "ClosedError",
    "Completion",
    "Engine",
    "Generation",
    "GenerationConfig",
    "QueueFullError",
    "Scored",
    "Token",
]

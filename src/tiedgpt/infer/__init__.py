"""Generating text: sampling, and the engine that prefills prompts and decodes token by token."""

from tiedgpt.infer.engine import Completion, Engine
from tiedgpt.infer.sampling import Sampling

__all__ = ["Completion", "Engine", "Sampling"]

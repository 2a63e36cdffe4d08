"""Generating text: sampling, and the engine that decodes sequences in the slots of a session."""

from tiedgpt.infer.continuation import Completion
from tiedgpt.infer.engine import Engine
from tiedgpt.infer.request import Request
from tiedgpt.infer.sampling import Sampling
from tiedgpt.infer.scheduler import Scheduler
from tiedgpt.infer.scoring import Scored

__all__ = ["Completion", "Engine", "Request", "Sampling", "Scheduler", "Scored"]

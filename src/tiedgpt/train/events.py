"""The events of a training run, as `train` and `Trainer.run` yield them."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.values import Plan
from tiedgpt.train.step.loss import Model
from tiedgpt.train.step.optim.groups import ParameterGroup
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.tasks.publisher import Publisher
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.task import Score

T = TypeVar("T")
Line = Mapping[str, Any]
"""The line that an event adds to metrics.jsonl; {} for none."""


@dataclass(frozen=True)
class Note:
    """A message for the user before the first step."""

    text: str


@dataclass(frozen=True)
class Encoded:
    """Progress of the encoding of texts."""

    done: int
    """Number of encoded characters, or of bytes of a large text."""
    total: int


@dataclass(frozen=True)
class AlreadyFinished:
    """An earlier call finished the run at `path`."""

    path: Path


@dataclass(frozen=True)
class Planned:
    """The plan of the run, before the model is built."""

    directory: RunDirectory
    options: RunOptions
    config: GPTConfig
    data: Data
    plan: Plan
    publisher: Publisher
    """The publisher of the trained model."""
    device: torch.device
    n_processes: int


@dataclass(frozen=True)
class Started:
    """The model is built; earlier calls trained `step` steps."""

    model: Model
    groups: list[ParameterGroup]
    step: int
    notes: list[str]


@dataclass(frozen=True)
class Stepped:
    """A training step, counted from 1."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    units: int
    """Number of tokens or examples trained on so far."""
    units_per_second: float
    line: Line = field(default_factory=dict, kw_only=True, repr=False)


@dataclass(frozen=True)
class Skipped:
    """A step without an update, because its loss or gradient was not finite."""

    step: int
    why: str
    skipped_in_all: int
    line: Line = field(default_factory=dict, kw_only=True, repr=False)


@dataclass(frozen=True)
class Replanned:
    """A new plan for the remaining steps."""

    step: int
    plan: Plan
    notes: list[str]
    line: Line = field(default_factory=dict, kw_only=True, repr=False)


@dataclass(frozen=True)
class Evaluated:
    """An evaluation on held-out data, with a sample."""

    step: int
    score: Score
    metrics: dict[str, float]
    """The score in metrics.jsonl."""
    sample: str
    line: Line = field(default_factory=dict, kw_only=True, repr=False)


@dataclass(frozen=True)
class Scored:
    """Progress of the final score."""

    batches: int
    total: int


@dataclass(frozen=True)
class Ended:
    """The end of the run, or a requested stop after the state was saved."""

    step: int
    finished: bool
    score: Score | None
    """Final score of the weights in model/; None if the run was stopped."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The score in metrics.jsonl."""
    sample_nats: float = math.nan
    """Loss of these weights on the part of the data that evaluations score."""
    notes: list[str] = field(default_factory=list)
    scored: int | None = None
    """Number of tokens or examples in the final score; None: all held-out data."""
    line: Line = field(default_factory=dict, kw_only=True, repr=False)


Event = (
    Note
    | Encoded
    | AlreadyFinished
    | Planned
    | Started
    | Stepped
    | Skipped
    | Replanned
    | Evaluated
    | Scored
    | Ended
)


def report(steps: Generator[tuple[int, int], None, T]) -> Generator[Encoded, None, T]:
    """Yield the progress of a generator as events; return its value."""
    with closing(steps):
        while True:
            try:
                progress = next(steps)
            except StopIteration as end:
                value: T = end.value
                return value
            yield Encoded(*progress)

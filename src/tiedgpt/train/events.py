"""The events of a training run, as `train` and `Trainer.run` yield them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from tiedgpt.train.dataset import Data
from tiedgpt.train.objective import Model, Objective, Score
from tiedgpt.train.optim.groups import Group
from tiedgpt.train.planning import Plan

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tiedgpt.train.options import TrainOptions
    from tiedgpt.train.storage import RunDirectory


@dataclass(frozen=True)
class Note:
    """A message for the user before the first step."""

    text: str


@dataclass(frozen=True)
class AlreadyFinished:
    """An earlier call finished the run at `path`."""

    path: Path


@dataclass(frozen=True)
class Planned:
    """The plan of the run, before the model is built."""

    directory: RunDirectory
    options: TrainOptions
    objective: Objective
    data: Data
    plan: Plan
    device: torch.device
    n_processes: int


@dataclass(frozen=True)
class Started:
    """The model is built; earlier calls trained `step` steps."""

    model: Model
    groups: list[Group]
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
    measured: dict[str, float] = field(default_factory=dict)
    """Results of `machine.Measures`, in the steps that it measures."""

    def metrics(self, unit: str) -> dict[str, float]:
        """Return the line of metrics.jsonl."""
        line = asdict(self)
        units, speed = line.pop("units"), line.pop("units_per_second")
        measured = line.pop("measured")
        return line | {unit: units, f"{unit}_per_second": speed} | measured


@dataclass(frozen=True)
class Skipped:
    """A step without an update, because its loss or gradient was not finite."""

    step: int
    why: str
    skipped_in_all: int


@dataclass(frozen=True)
class Replanned:
    """A new plan for the remaining steps."""

    step: int
    plan: Plan
    notes: list[str]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation on held-out data, with a sample."""

    step: int
    score: Score
    metrics: dict[str, float]
    """The score in metrics.jsonl."""
    sample: str


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


Event = (
    Note | AlreadyFinished | Planned | Started | Stepped | Skipped | Replanned | Evaluated | Ended
)

"""Everything that is decided before the first step, so that a run is a function of it."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

import tiedgpt
from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, TiedGPTError
from tiedgpt.train.machine import describe
from tiedgpt.train.optim import RULES
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.schedule import Growth, Rule, Schedule, learning_rate

if TYPE_CHECKING:
    from tiedgpt.train.parallel import World

SCHEDULES = get_args(Schedule)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's numbers; with the data and the seed they decide every weight."""

    steps: int
    batch_size: int
    """Sequences in a step."""
    micro_batch: int
    """Sequences computed at a time."""
    optimizer: Rule
    """Of the blocks' matrices."""
    lr: float
    warmup: int
    """Steps of warm-up."""
    weight_decay: float
    grad_clip: float
    dtype: str
    seed: int
    eval_every: int
    """Steps between evaluations on a part of the validation text."""
    eval_batches: int
    """Batches of that part; the last evaluation takes all, up to two million tokens."""
    save_every: int
    skip_limit: int = 10
    """Steps that are not finite, of the last 200, that end the run."""
    patience: int | None = None
    """Evaluations without improvement that end the run."""
    schedule: Schedule = "linear"
    cooldown: int = 0
    """Last steps, in which the rate of wsd falls."""
    batch_warmup: int = 0
    """First steps, in which the batch grows."""
    length_warmup: int = 0
    """First steps, in which the rows of a batch grow."""
    untie_at: int | None = None
    """Steps after which W only reads, and a head that begins as its copy predicts."""
    memory: int | None = None
    """Bytes that training may take in all, where that was asked for."""
    recompute: str = "off"
    """Whether "blocks" are computed again in backward; the same bits."""
    compile: str = "off"
    """Whether blocks are compiled, "on" or "off"."""

    def __post_init__(self) -> None:
        whole = (
            *("steps", "batch_size", "micro_batch", "eval_every", "eval_batches", "save_every"),
            *("skip_limit", *(["patience"] if self.patience is not None else [])),
        )
        from_0 = (
            *("warmup", "seed", "cooldown", "batch_warmup", "length_warmup"),
            *(["untie_at"] if self.untie_at is not None else []),
        )
        least = dict.fromkeys(whole, 1) | dict.fromkeys(from_0, 0)
        sound = (
            all(type(getattr(self, name)) is int for name in least)
            and all(getattr(self, name) >= n for name, n in least.items())
            and self.schedule in SCHEDULES
            and all(type(x) in (int, float) for x in (self.lr, self.weight_decay, self.grad_clip))
            and self.dtype in DTYPES
            and self.optimizer in RULES
            and self.recompute in ("off", "blocks")
            and self.compile in ("on", "off")
            and (self.memory is None or (type(self.memory) is int and self.memory >= 1))
        )
        if not sound:
            raise CorruptInputError(f"no training goes by this plan: {self}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        return learning_rate(
            step,
            peak=self.lr,
            warmup=self.warmup,
            steps=self.steps,
            schedule=self.schedule,
            cooldown=self.cooldown,
        )

    def growth(self, row_units: int) -> Growth:
        """Return the shapes of the batches; `row_units` are the tokens of a whole row."""
        return Growth(
            batch_size=self.batch_size,
            micro_batch=self.micro_batch,
            row_units=row_units,
            batch_warmup=self.batch_warmup,
            length_warmup=self.length_warmup,
        )

    def untied(self, step: int) -> bool:
        """Whether the state after `step` steps has the head that the run makes on its way."""
        return self.untie_at is not None and step > self.untie_at

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matrix products, where it is not the weights' own."""
        return None if self.dtype == "fp32" else DTYPES[self.dtype]


def record(
    options: TrainOptions,
    config: GPTConfig,
    plan: Plan,
    counted: dict[str, dict[str, Any]],
    text_digest: str | None = None,
    world: World | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the tables of run.toml; `counted` are those that tell what the data holds."""
    processes = {}
    if world is not None and world.size > 1:
        parallel = "fsdp" if world.holders > 1 else "ddp"
        processes = {"processes": {"number": world.size, "parallel": parallel}}
    return {
        "options": asdict(options),
        "model": asdict(config),
        "training": asdict(plan),
        "text": {"sha256": text_digest},
        **counted,
        **processes,
        "machine": describe(),
        "versions": {
            "tiedgpt": tiedgpt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
        },
    }


def recorded(tables: dict[str, Any]) -> tuple[GPTConfig, Plan]:
    """Return the config and the plan that `record` wrote."""
    try:
        return GPTConfig(**tables["model"]), Plan(**tables["training"])
    except (KeyError, TypeError, TiedGPTError) as error:
        raise CorruptInputError(f"run.toml is damaged: {error}; give another --out") from None

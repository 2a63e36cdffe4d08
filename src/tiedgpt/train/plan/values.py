"""The values that planning passes: a plan, facts about the data, and the machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_type_hints

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError

if TYPE_CHECKING:
    import torch

Dtype = Literal["fp32", "bf16"]
Recompute = Literal["off", "blocks"]
Schedule = Literal["linear", "wsd", "cosine"]
Keep = Literal["best", "last"]
COUNTS = "steps", "batch_size", "micro_batch", "eval_every", "eval_batches", "save_every"
"""Fields that are at least 1."""
COSINE_FLOOR = 0.1
"""Share of the peak at which cosine ends: Brown et al. 2020, appendix B; Hoffmann et al. 2022."""
MIN_TEXT_BYTES = 16
_read_types = cache(get_type_hints)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run; with the data and the seed they decide every weight."""

    steps: int
    batch_size: int
    """Sequences in a step."""
    micro_batch: int
    """Sequences computed at a time."""
    optimizer: str
    """Optimizer of the blocks' matrices: a name in `optim.OPTIMIZERS`."""
    lr: float
    warmup: int
    """Steps of warm-up."""
    weight_decay: float
    grad_clip: float
    dtype: Dtype
    seed: int
    eval_every: int
    """Steps between evaluations on a part of the validation text."""
    eval_batches: int
    """Number of micro-batches in that part."""
    save_every: int
    patience: int | None = None
    """Number of evaluations without improvement that ends the run; None: a rising loss ends it."""
    can_end_early: bool = True
    """Whether validation may end the run before its last step."""
    keep: Keep = "best"
    """Which weights are published."""
    schedule: Schedule = "linear"
    cooldown: int = 0
    """Number of last steps in which the rate of wsd decays."""
    memory: int | None = None
    """Memory limit of the process in bytes (--memory)."""
    recompute: Recompute = "off"
    """"blocks": activation checkpointing, with the same bits."""
    compile: Literal["on", "off"] = "off"
    """Whether blocks are compiled."""
    threads: int | None = None
    """CPU threads, if they were asked for or measured to be faster than the default."""
    minutes: float | None = None
    """Duration that decides the number of steps, or None."""
    final_batches: int | None = None
    """Micro-batches of the final score, or None for all held-out data."""
    size: str = ""
    """Name of the size of a fresh model."""
    reason: str = ""
    """Reason for the chosen size or number of steps."""
    since: int = 0
    """Number of steps done by an earlier plan."""

    def __post_init__(self) -> None:
        kinds = _read_types(Plan)
        sound = all(_fits(getattr(self, name), kind) for name, kind in kinds.items())
        numbers = [value for value in vars(self).values() if isinstance(value, (int, float))]
        sound = sound and all(0 <= number < math.inf for number in numbers) and self.minutes != 0
        if not sound or any(getattr(self, name) < 1 for name in COUNTS):
            raise CorruptInputError(f"invalid plan: {self}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        It rises linearly to `lr` in `warmup` steps. Then `schedule` decides:
        - linear: decays to 0 after the last step (Bergsma et al. 2025, arXiv 2502.15938);
        - wsd: stays constant, then decays linearly to 0 over the last `cooldown` steps (Hägele et
          al. 2024, arXiv 2405.18392);
        - cosine: decays along half a cosine wave to a tenth of the peak (Brown et al. 2020).
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        falling = self.steps - self.warmup
        if self.schedule == "cosine":
            wave = (1 + math.cos(math.pi * (step - self.warmup) / max(1, falling))) / 2
            return self.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * wave)
        if self.schedule == "wsd":
            falling = self.cooldown
        return self.lr * min(1.0, (self.steps - step) / max(1, falling))

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of matmuls under autocast, or None for fp32."""
        import torch  # not for `--help`

        return None if self.dtype == "fp32" else torch.bfloat16


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of this type, of one of several, or one of a `Literal`."""
    kinds = get_args(kind) or (kind,)
    return value in kinds or type(value) in kinds or (type(value) is int and float in kinds)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Numbers about the data and the trained parameters that a plan depends on."""

    unit: str = "examples"
    """tokens or examples."""
    row_units: int = 1
    """Units in a row of a batch."""
    row_tokens: int = 1
    """Tokens in the longest row."""
    epoch_rows: int = 1
    held_out_rows: float = 0.0
    """Rows of the final evaluation."""
    n_examples: int = 0
    """Number of training examples, or 0 for text."""
    n_held_out: float = math.inf
    text_tokens: int | None = None
    """Tokens of the training text, or None for examples."""
    text_bytes: int = MIN_TEXT_BYTES
    n_trained: int | None = None
    """Number of trained parameters, or None for all."""
    predicts_tokens: bool = True
    """Whether the head predicts tokens of the vocabulary."""

    @property
    def memorizes(self) -> bool:
        """Whether the examples are so few that none is held out."""
        return self.n_examples > 0 and self.n_held_out == 0

    def with_context(self, context: int) -> Self:
        """Return the facts of the same text in rows of another context."""
        assert self.text_tokens is not None
        return replace(
            self,
            row_units=context,
            row_tokens=context,
            epoch_rows=max(1, -(-(self.text_tokens - 1) // context)),
            held_out_rows=self.held_out_rows * self.row_tokens / context,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device that trains, as a plan sees it; of several processes the share of one."""

    tokens_per_second: Callable[[GPTConfig, Plan], float]
    """Training speed of all processes together, measured or given."""
    device: str = "cpu"
    dtype: Dtype = "fp32"
    """Fastest dtype of matmuls."""
    free_bytes: float = math.inf
    """Memory that this process may take in addition to `used_bytes`."""
    used_bytes: int = 0
    """Memory of the program before training."""
    threads: int | None = None
    """CPU threads, if they were asked for or measured to be faster than the default."""
    missing_compiler: str | None = None
    """Reason why torch.compile cannot be used, or None."""
    compile_seconds: Callable[[], float] = lambda: 0.0
    """Seconds that compiling the blocks takes: as measured, or expected before that."""
    n_processes: int = 1
    n_shards: int = 1
    """Processes that share each matrix (FSDP2)."""

    @property
    def is_cpu(self) -> bool:
        """Whether a CPU trains."""
        return self.device.startswith("cpu")

    @property
    def is_gpu(self) -> bool:
        """Whether a CUDA GPU trains."""
        return self.device.startswith("cuda")

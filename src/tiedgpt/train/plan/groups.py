"""The options that `train` and `tune` share, in groups. No torch: `--help` reads this.

Each group is declared once: `DataOptions`, `NetworkOptions`, `TimeOptions`, `OptimizationOptions`,
`ComputeOptions`. `RunOptions` consists of all of them. The groups alone are never compared or
printed, so they have no methods for it.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.options import argument, flag, option
from tiedgpt.signatures import check_fields
from tiedgpt.train.plan.values import Facts, Keep, Schedule
from tiedgpt.train.step.optim import OPTIMIZERS

MAX_VOCABULARY = 1 << 16
AUTO = "auto"
DEFAULT_COOLDOWN = 0.4
"""Hägele et al. 2024 (arXiv 2405.18392), section 4: longer cooldowns gain little."""
START_RATE = 6.25e-5 * 768
"""Peak learning rate with a model to start from, times the width: 6.25e-5 at a width of 768, as
Radford et al. 2018, section 4.1."""
READING = ("text_field", "encoding", "quoting", "keep_end_of_text")
"""Options that say how text is read."""
DURATIONS = ("steps", "minutes", "epochs")
"""Options of the training duration; at most one is given."""
EVALUATIONS_PER_RUN = 10
"""Number of evaluations in a run, not counting the final one."""
Recipe = Literal["train", "tune"]


class Duration(NamedTuple):
    """Training duration: minutes, epochs or steps."""

    unit: str
    """One of `DURATIONS`."""
    amount: float
    least_steps: int = 1
    """Minimum number of steps; more epochs are trained over few examples."""


def _as_text(value: Any) -> Any:
    """Return the text of a path, or any other value unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


BYTES = {"": 1e9, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bytes(text: str) -> int:
    """Return the bytes in "2" (GB), "2GB", "800MB" or "1.5 g"; `UserError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(match[1]) * BYTES[match[2]]) if match else 0
    if size < 1:
        raise UserError(
            f"--memory must be a size, got {text!r}",
            hint="give gigabytes, as 2 or 1.5, or a size, as 800MB",
        )
    return size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FileOptions:
    """How files of data are read."""

    encoding: str = option(
        "auto",
        "Encoding of text that is not UTF-8: cp1252, utf-16, ...; auto: guess it, with a note.",
        "data",
    )
    quoting: bool = option(
        True, "Take quotes in .csv and .tsv for text: each line is a row.", "data"
    )

    @property
    def file_reading(self) -> dict[str, Any]:
        """Return the options of `tiedgpt.data.documents` for files of any kind."""
        return {"encoding": self.encoding, "quoting": self.quoting}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataOptions(FileOptions):
    """The training data and how they are read."""

    GROUP: ClassVar = "data"
    data: tuple[str, ...] = argument(
        "Files of text, .jsonl, .csv, .tsv or .parquet, also compressed; folders, globs, - for "
        "standard input, hf:OWNER/NAME[:SPLIT] of the hub, or a directory of `tiedgpt data "
        "prepare`; default: Python's own docs.",
        default=(),
    )
    val: str | None = option(None, "Validate on this data.", metavar="DATA")
    text_field: str = option(
        "text", "The field of records (.jsonl, .csv, ...) that holds the text.", metavar="NAME"
    )
    keep_end_of_text: bool = option(
        False, "Take <|endoftext|> in text files for text; by itself it separates documents."
    )

    @property
    def reading(self) -> dict[str, Any]:
        """Return the options of `tiedgpt.data.documents`."""
        return {name: getattr(self, name) for name in READING}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NetworkOptions:
    """Changes to the model that is trained."""

    GROUP: ClassVar = "model"
    context: int | None = option(None, "Tokens per sequence.", least=1)
    freeze: str | None = option(
        None,
        "Parameters to freeze, separated by commas: wte, h.0, h.*.attn, body (all but the "
        "head). +h.11 is trained again; the last match decides.",
    )
    dropout: float | None = option(
        None, "Dropout of embeddings and residual branches.", least=0, below=1
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TimeOptions:
    """Training duration and evaluations."""

    GROUP: ClassVar = "time"
    minutes: float | None = option(None, "Train for about this many minutes.", short="m", above=0)
    steps: int | None = option(None, "Train for this many steps instead.", least=1)
    epochs: float | None = option(
        None, "Train for this many passes over the data instead.", above=0
    )
    eval_every: int | None = option(None, "Steps between evaluations.", least=1)
    patience: int | None = option(
        None, "Stop after this many evaluations without improvement.", least=1
    )
    keep: Keep = option(
        "best",
        "best: keep the weights with the best validation loss; last: train all steps and keep "
        "the last weights.",
    )
    score: Literal["auto", "all"] = option(
        "auto",
        "Held-out data for the final score; auto: as much as 2 % of the training time allows; "
        "all: everything.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OptimizationOptions:
    """The optimizer, its learning rate, and the order of the data."""

    GROUP: ClassVar = "optimization"
    seed: int = option(0, "Seed of the initial weights and of the order of the data.", least=0)
    batch_size: int | None = option(None, "Sequences per step.", short="b", least=1)
    optimizer: str = option(
        AUTO,
        "Optimizer of the blocks' matrices; AdamW trains all other parameters.",
        choices=lambda: (AUTO, *OPTIMIZERS),
    )
    lr: float | None = option(None, "Peak learning rate.", above=0)
    warmup: float = option(
        0.05, "Share of the steps in which the learning rate rises to its peak.", least=0, most=1
    )
    schedule: Schedule = option(
        "linear",
        "Learning rate after the warm-up: linear decays to 0; wsd stays constant, then decays "
        "to 0; cosine decays to a tenth.",
    )
    cooldown: float = option(
        DEFAULT_COOLDOWN,
        "With --schedule wsd: share of the steps in which the learning rate decays.",
        least=0,
        most=1,
    )
    weight_decay: float | None = option(
        None, "Weight decay of the blocks' matrices; W, norms and biases have none.", least=0
    )
    grad_clip: float = option(1.0, above=0)
    """Clip the gradient to this norm."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ComputeOptions:
    """How a step is computed."""

    GROUP: ClassVar = "memory and speed"
    micro_batch: int | None = option(
        None,
        "Sequences computed at a time (gradient accumulation); default: what fits, at most "
        "8,192 tokens, on a GPU 65,536.",
        least=1,
    )
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto",
        "dtype of the matmuls; auto: bf16 where this device computes in it. Weights stay in fp32.",
    )
    device: str = option(
        "auto", "Device to train on: cpu, cuda, cuda:1, mps; auto: a GPU if there is one."
    )
    memory: str | None = option(
        None,
        "Memory limit of a process, as 2 (GB) or 800MB; decides --micro-batch; default: no limit.",
        metavar="SIZE",
    )
    recompute: Literal["auto", "off", "blocks"] = option(
        "auto",
        "blocks: activation checkpointing (recompute blocks in backward); auto: if --memory "
        "needs it.",
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Compile the blocks with torch.compile; auto: only on a GPU, if it saves more time than "
        "it takes. Results are not bit-identical to uncompiled training.",
    )


def _format(value: Any, default: Any) -> str:
    if isinstance(value, bool):
        return "not given" if value == default else "given"
    if value in (None, ()):
        return "not given"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class RunOptions(  # the help lists the options of the last one first
    ComputeOptions, OptimizationOptions, TimeOptions, NetworkOptions, DataOptions, ABC
):
    """Options of a run: `TrainOptions` or `TuneOptions`.

    An option that is not given has a default that depends on the data, the time and the machine.
    """

    GROUP: ClassVar = "model"
    recipe: ClassVar[Recipe]
    """The verb of the command line."""
    start: str | None = None
    """The model to start from."""
    sample_prompt: str | None = None
    """Prompt of the samples that are shown at evaluations."""

    def __post_init__(self) -> None:
        data: Any = [self.data] if isinstance(self.data, (str, os.PathLike)) else self.data
        if isinstance(data, (list, tuple)):
            object.__setattr__(self, "data", tuple(map(_as_text, data)))
        for name in {"val", "start", "tokenizer"} & vars(self).keys():
            object.__setattr__(self, name, _as_text(getattr(self, name)))
        check_fields(self)
        self.check()
        if self.memory is not None:
            parse_bytes(self.memory)
        self.check_conflicts()

    def check(self) -> None:
        """Raise `UserError` for missing data and for several durations."""
        if sum(getattr(self, name) is not None for name in DURATIONS) > 1:
            raise UserError("give only one of --minutes, --steps and --epochs")

    def check_conflicts(self) -> None:
        """Raise `UserError` for options that exclude or need each other."""
        if self.keep == "last" and self.patience is not None:
            raise UserError(
                f"--patience {self.patience} is for --keep best",
                hint="--keep last trains all steps",
            )
        if self.schedule != "wsd" and self.cooldown != DEFAULT_COOLDOWN:
            raise UserError(f"--cooldown {self.cooldown} is for --schedule wsd")
        if self.schedule == "wsd" and self.warmup + self.cooldown > 1:
            raise UserError(
                f"--warmup {self.warmup} and --cooldown {self.cooldown} add up to more than 1"
            )

    def record(self) -> dict[str, Any]:
        """Return the options by name, as run.toml holds them."""
        return {"recipe": self.recipe} | asdict(self)

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """Name what differs between these options and those of an earlier command."""
        verb = recorded.get("recipe", "train")
        if verb != self.recipe:
            return [f"it was begun by `tiedgpt {verb}`"]
        differences = []
        for each in fields(self):
            now, then = getattr(self, each.name), recorded.get(each.name, each.default)
            then = tuple(then) if isinstance(then, list) else then
            if now != then and not (now in (None, ()) and then in (None, ())):
                was, is_ = (_format(value, each.default) for value in (then, now))
                differences.append(f"{flag(each)} was {was} and is {is_}")
        return differences

    @property
    def chooses(self) -> bool:
        """Whether the size of a fresh model is to be chosen: see `size.py`."""
        return False

    @property
    @abstractmethod
    def tokenizer_source(self) -> str | None:
        """The tokenizer's directory, file or hub name, or "char"; None: a BPE is trained."""

    @property
    def duration(self) -> Duration:
        """The training duration."""
        durations = ((unit, getattr(self, unit)) for unit in DURATIONS)
        return next((Duration(*x) for x in durations if x[1] is not None), self.default_duration)

    @property
    @abstractmethod
    def default_duration(self) -> Duration:
        """The duration without --steps, --minutes and --epochs."""

    @property
    @abstractmethod
    def evaluations(self) -> int:
        """Number of evaluations in a run, not counting the final one."""

    @property
    @abstractmethod
    def run_suffix(self) -> str:
        """End of the name of a run: the size, the task, or "tuned"."""

    @abstractmethod
    def start_dropout(self, *, memorizes: bool) -> float | None:
        """Return the dropout of a model to start from; None: the model's own."""

    def plan_fields(self, config: GPTConfig, facts: Facts) -> dict[str, Any]:
        """Return the fields of a plan that options decide."""
        defaults = self.plan_defaults(config, facts)
        options = {name: getattr(self, name, None) for name in defaults}
        return {n: defaults[n] if x in (None, AUTO) else x for n, x in options.items()}

    @abstractmethod
    def plan_defaults(self, config: GPTConfig, facts: Facts) -> dict[str, Any]:
        """Return these fields for options that are not given."""

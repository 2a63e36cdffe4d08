"""The options of `train` and `tune` that do not decide the weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from tiedgpt.errors import UserError
from tiedgpt.infer.generation_config import MAX_THREADS, require_positive
from tiedgpt.options import option
from tiedgpt.train.store.metrics import TrackerName

PROCESSES = "TORCHELASTIC_RUN_ID"
"""Environment variables that torchrun sets for its processes."""


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Options of `train` and `tune` that do not decide the weights."""

    GROUP: ClassVar = "output"
    out: str | None = option(
        None,
        "The run's directory; default: runs/NAME-1, or -2 and so on for other options.",
        metavar="PATH",
        short="o",
    )
    track: TrackerName | None = option(None, "Also send the metrics to this tracker.")
    verbose: bool = option(
        False,
        "Also show the schedule, the parameter groups and the start's seconds.",
        short="v",
    )
    format: Literal["human", "json"] = option(
        "human", "json: one object with the result, on stdout.", short="f"
    )
    parallel: Literal["ddp", "fsdp"] | None = option(
        None,
        "With torchrun: ddp keeps the whole model in each process, fsdp shards it; default: ddp.",
        "memory and speed",
    )

    dry_run: bool = option(
        False, "Only show the plan: memory by part, tokens, epochs, time; nothing is trained."
    )
    threads: int | None = option(
        None,
        "Number of CPU threads; default: the cores that this process may use, or one thread if "
        "that is faster on a busy machine.",
        "memory and speed",
    )

    def __post_init__(self) -> None:
        if self.threads is not None:
            require_positive("threads", self.threads, MAX_THREADS)
        if self.dry_run and PROCESSES in os.environ:
            raise UserError(
                "--dry-run is for one process",
                hint="docs/guides/scale.md has the arithmetic for several",
            )
        if not self.dry_run and (PROCESSES in os.environ or self.parallel is not None):
            from tiedgpt.train.distributed import require_launch

            require_launch(self.parallel)

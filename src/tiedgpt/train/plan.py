"""Everything that is decided before the first step, so that a run is a function of it."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

import tiedgpt
from tiedgpt.core.config import GPTConfig
from tiedgpt.data import EncodedCorpus
from tiedgpt.errors import CorruptInputError
from tiedgpt.train.optim import Rule
from tiedgpt.train.options import TrainOptions

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
    """Batches of that part; the last evaluation takes the whole."""
    save_every: int

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matrix products, where it is not the weights' own."""
        return None if self.dtype == "fp32" else DTYPES[self.dtype]


def record(
    options: TrainOptions, config: GPTConfig, plan: Plan, encoded: EncodedCorpus
) -> dict[str, dict[str, Any]]:
    """Return the tables of run.toml."""
    return {
        "options": asdict(options),
        "model": asdict(config),
        "training": asdict(plan),
        "train_text": asdict(encoded.train),
        "val_text": asdict(encoded.val),
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
    except (KeyError, TypeError) as error:
        raise CorruptInputError(f"run.toml is damaged: {error}") from None

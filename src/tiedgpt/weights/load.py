"""Read a GPT: headers and shapes first, then each tensor once.

SOURCE is a directory, a file in any known format, a hub name, or a model of transformers in memory.

    source.checkpoint (source.py)   tensors, config and claim of a file
    source.gpt                      our names, our layout, config fields
    decide_tie (decision.py)        -> TieDecision: one matrix or two
    check_gpt (gpt.py)              -> CheckedGPT: a config, and the tensors of its parameters
    build_model                     -> GPT; each tensor is read once

Shapes are checked before any tensor is read, except when two matrices must be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import EMBEDDING, TIE_KEY
from tiedgpt.weights.decision import decide_tie
from tiedgpt.weights.gpt import CheckedGPT, check_gpt
from tiedgpt.weights.source import Source

MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Progress = Callable[[int, int], None]
"""Function of the number of bytes read and their total."""


class CheckpointWarning(UserWarning):
    """A note on the interpretation of a checkpoint: an assumption, rounding, equal matrices."""


@dataclass(frozen=True)
class Loaded:
    """A model, its source, and notes on the interpretation of the checkpoint."""

    model: GPT
    source: Source
    path: Path
    layout: str
    """Container and names of the tensors: "safetensors, transformers gpt2"."""
    dtype: str
    """Type of W in the file: float32, Q8_0, "int8 panels"."""
    n_bytes: int
    """Size of the tensors in the file."""
    notes: tuple[str, ...]


def load(
    source: str | os.PathLike[str] | nn.Module,
    *,
    resolve: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    others: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
    input_name: str | None = None,
    output_name: str | None = None,
    **config: Any,
) -> Loaded:
    """Load a model with notes; see `GPT.from_pretrained`.

    `others(name)` selects tensors, by our names, that do not belong to the language model, such as
    a classifier on it: they are left out. `input_name` and `output_name` are those of `audit`.
    """
    if dtype is not None and dtype not in MODEL_DTYPES:
        raise UserError(f"dtype={dtype!r} is none of {', '.join(map(str, MODEL_DTYPES))}")
    source = Source.of(source, revision=revision, cache_dir=cache_dir)
    checkpoint = source.checkpoint
    try:
        gpt = source.gpt
        if others is not None:
            gpt = replace(gpt, tensors={n: t for n, t in gpt.tensors.items() if not others(n)})
        decision = decide_tie(
            checkpoint,
            gpt.tensors,
            is_tied=config.get(TIE_KEY),
            input_name=input_name,
            output_name=output_name,
        )
        checked = check_gpt(checkpoint, gpt, decision.choose(resolve), config)
    except CorruptInputError as error:
        if checkpoint.in_memory:  # no file is damaged
            raise UserError(str(error)) from None
        raise
    model, rounded = build_model(checked, dtype, progress)
    equal = decision.reason if resolve is None and decision.kind == "tied, stored twice" else ""
    return Loaded(
        model,
        source,
        path=Path(checkpoint.source),
        layout=checked.layout,
        dtype=checked.tensors[EMBEDDING].dtype,
        n_bytes=checked.n_bytes,
        notes=tuple(filter(None, (*checked.notes, equal, rounded))),
    )


def build_model(
    checked: CheckedGPT, dtype: torch.dtype | None, progress: Progress | None
) -> tuple[GPT, str]:
    """Return a model of the tensors, each read once, and a note on rounded numbers.

    All tensors get `dtype`; the default is the embedding's own.
    """
    with torch.device("meta"):
        model = GPT(checked.config)
    state: dict[str, Tensor] = {}
    rounded: list[str] = []
    n_done = 0
    for name in (EMBEDDING, *(name for name in checked.tensors if name != EMBEDDING)):
        stored = checked.tensors[name]
        tensor = stored.tensor()
        common = dtype or state.get(EMBEDDING, tensor).dtype
        state[name] = tensor.to(common)
        coarser = dtype is None and torch.promote_types(tensor.dtype, common) != common
        if coarser and not torch.equal(state[name].to(tensor.dtype), tensor):
            rounded.append(name)
        n_done += stored.n_bytes
        if progress is not None:
            progress(n_done, checked.n_bytes)
    model.load_state_dict(state, assign=True)
    model.foreign_config = dict(checked.foreign)
    if not rounded:
        return model.eval(), ""
    finer = checked.tensors[rounded[0]].dtype
    return model.eval(), (
        f"{len(rounded)} tensors, such as {rounded[0]} in {finer}, were rounded to "
        f"{str(common).removeprefix('torch.')}, {EMBEDDING}'s type; dtype=torch.{finer} "
        "(--precision) keeps them"
    )

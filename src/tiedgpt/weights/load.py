"""Read a GPT: headers and shapes first, then each tensor once.

SOURCE is a directory, a file in any known format, a hub name, or a model of transformers in memory.

    open_checkpoint (sources.py)    SOURCE -> Checkpoint: the file's tensors and claims
    to_gpt (checkpoint.py)          -> GPTCheckpoint: our names, our layout, config fields
    decide_tie (decision.py)        one matrix or two
    _matrices                       the one or two matrices that the model has
    checks.py                       its config, and the shapes of all tensors
    _build                          a `GPT` with each tensor read once

Shapes are checked before any tensor is read, except when two matrices must be compared.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import (
    EMBEDDING,
    HEAD,
    TIE_KEY,
    Checkpoint,
    Claim,
    shapes,
    to_gpt,
)
from tiedgpt.weights.checks import build_config, check_tensors
from tiedgpt.weights.decision import TieDecision, decide_tie
from tiedgpt.weights.roles import assign_roles
from tiedgpt.weights.sources import open_checkpoint, open_module
from tiedgpt.weights.tensors import StoredTensor

Source = str | os.PathLike[str] | nn.Module
MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
RESOLUTION_OF = {"input": "keep-input", "output": "keep-output", "both": "untie"}
"""What `tie fix` keeps of two matrices -> the `resolve` that loads them so."""
RESOLUTIONS = (*RESOLUTION_OF.values(), "tie")

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


class CheckpointWarning(UserWarning):
    """A note on how a checkpoint was understood: an assumption, rounding, two equal matrices."""


@dataclass(frozen=True)
class Loaded:
    """A model, where it came from, and notes on how the checkpoint was understood."""

    model: GPT
    path: Path
    layout: str
    """The format and whose names: "safetensors, transformers gpt2"."""
    dtype: str
    """The type of W in the file: float32, Q8_0, "int8 panels"."""
    n_bytes: int
    """Of its tensors in the file."""
    notes: tuple[str, ...]


def load_model(source: Source, **options: Any) -> GPT:
    """Load a model and warn (`CheckpointWarning`) of every note; see `GPT.from_pretrained`."""
    loaded = load(source, **options)
    for note in loaded.notes:
        warnings.warn(f"{loaded.path}: {note}", CheckpointWarning, stacklevel=3)
    return loaded.model


def load(
    source: Source,
    *,
    resolve: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    others: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
    **config: Any,
) -> Loaded:
    """Load a model with notes; see `GPT.from_pretrained`.

    `others(name)` says which tensors, by our names, belong to something beside the language model,
    such as a classifier on it: they are left out.
    """
    if dtype is not None and dtype not in MODEL_DTYPES:
        raise UserError(f"dtype={dtype!r} is none of {', '.join(map(str, MODEL_DTYPES))}")
    if isinstance(source, nn.Module):
        checkpoint = open_module(source)
    else:
        checkpoint = open_checkpoint(source, revision=revision, cache_dir=cache_dir)
    path = Path(checkpoint.source)
    try:
        gpt = to_gpt(checkpoint)
        tensors = {name: t for name, t in gpt.tensors.items() if not (others and others(name))}
        decision = _decide_tie(checkpoint, tensors, config.get(TIE_KEY))
        both = _matrices(decision, checkpoint, resolve)
        tensors = {n: t for n, t in tensors.items() if n not in (EMBEDDING, HEAD)} | both
        built, dropped = build_config(path, gpt, tensors, config)
        check_tensors(path, tensors, shapes(built), checkpoint.files)
    except CorruptInputError as error:
        if checkpoint.in_memory:  # no file is damaged
            raise UserError(str(error)) from None
        raise
    guesses = (note for name, note in gpt.guesses.items() if name not in {*config, *gpt.fields})
    model, rounded = _build(built, tensors, dtype, progress)
    model.foreign_config = dict(gpt.foreign)
    n_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    equal = decision.reason if resolve is None and decision.kind == "tied, stored twice" else ""
    notes = (*gpt.notes, *guesses, equal, dropped, rounded)
    layout = f"{checkpoint.container}, {gpt.layout}"
    return Loaded(
        model, path, layout, tensors[EMBEDDING].dtype, n_bytes, tuple(filter(None, notes))
    )


def _decide_tie(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], is_tied: bool | None = None
) -> TieDecision:
    """Return the decision about tensors by our names; the caller's word fills in for the file's.

    Raises `CorruptInputError` where neither of the two matrices is there, or one is no matrix.
    """
    both = tensors.get(EMBEDDING), tensors.get(HEAD)
    for name, matrix in zip((EMBEDDING, HEAD), both, strict=True):
        if matrix is not None and not (len(matrix.shape) == 2 and all(matrix.shape)):
            shape = f"must be a matrix (V, D), got {matrix.shape}"
            raise CorruptInputError(f"{checkpoint.source}: {name} {shape}")
    if both == (None, None):
        raise CorruptInputError(
            f"{checkpoint.source}: {EMBEDDING} is missing or no matrix; this is no GPT"
        )
    if is_tied is not None:
        claimed = checkpoint.claim.is_tied
        if claimed not in (None, is_tied):
            raise UserError(f"{TIE_KEY}={is_tied} contradicts the file: {checkpoint.claim.source}")
        checkpoint = replace(checkpoint, claim=Claim(is_tied, f"{TIE_KEY}={is_tied} is given"))
    return decide_tie(checkpoint, assign_roles(checkpoint, *both))


def _matrices(
    decision: TieDecision, checkpoint: Checkpoint, resolve: str | None
) -> dict[str, StoredTensor]:
    """Return the one or two matrices that the model has, by our names.

    `resolve` overrides the decision: "tie" has one matrix read and predict, "untie" keeps two, and
    "keep-input" and "keep-output" make one of two. Raises `CorruptInputError` where the file
    contradicts itself, `UserError` where `resolve` does not apply.
    """
    roles, source = decision.roles, checkpoint.source
    if resolve is not None and resolve not in RESOLUTIONS:
        raise UserError(
            f"must be one of {', '.join(RESOLUTIONS)}, got {resolve!r}", option="resolve"
        )
    if resolve == "untie" and roles.pair is None:
        raise UserError(
            f'{source} holds one matrix, and "untie" needs two', hint="load it, then untie it"
        )
    if resolve == "tie" and roles.pair is not None and not roles.is_shared:
        raise UserError(f"{source} holds two matrices", hint='choose "keep-input" or "keep-output"')
    is_choice = resolve in ("tie", "untie") or (resolve is not None and roles.pair is not None)
    if decision.model is None and not is_choice:
        raise CorruptInputError(f"{source}: {decision.reason}", hint=_remedy(decision, checkpoint))
    if resolve == "untie" or (resolve is None and decision.model == "untied"):
        assert roles.pair is not None
        return dict(zip((EMBEDDING, HEAD), roles.pair, strict=True))
    keep_output = resolve == "keep-output" and roles.output is not None
    return {EMBEDDING: roles.output if keep_output and roles.output else roles.matrix}


def _remedy(decision: TieDecision, checkpoint: Checkpoint) -> str:
    """Return what can be done about a checkpoint that is not loaded as it is."""
    if decision.roles.pair is None or decision.roles.is_shared:
        return 'resolve="tie" (--resolve tie) lets the one matrix read and predict'
    command = f"`{decision.command}` writes a copy that loads"
    if checkpoint.in_memory:
        command = "tiedgpt.tie.tie(model) makes them one"
    if not decision.choices:
        return command
    options = " or ".join(f'resolve="{RESOLUTION_OF[choice]}"' for choice in decision.choices)
    return f"choose {options} (--resolve); {command}"


def _build(
    config: GPTConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> tuple[GPT, str]:
    """Fill a model with the tensors, each read once; without `dtype` the embedding's holds for all.

    A note tells where that rounds numbers.
    """
    with torch.device("meta"):
        model = GPT(config)
    state: dict[str, Tensor] = {}
    rounded: list[str] = []
    done, whole = 0, sum(tensor.n_bytes for tensor in tensors.values())
    for name in sorted(tensors, key=lambda name: name != EMBEDDING):
        tensor = tensors[name].tensor()
        own, common = tensor.dtype, dtype or state.get(EMBEDDING, tensor).dtype
        state[name] = tensor.to(common)
        coarser = dtype is None and torch.promote_types(own, common) != common
        if coarser and not torch.equal(state[name].to(own), tensor):
            rounded.append(name)
        done += tensors[name].n_bytes
        if progress is not None:
            progress(done, whole)
    model.load_state_dict(state, assign=True)
    if not rounded:
        return model.eval(), ""
    finer = tensors[rounded[0]].dtype
    return model.eval(), (
        f"{len(rounded)} tensors, such as {rounded[0]} in {finer}, were rounded to "
        f"{str(common).removeprefix('torch.')}, {EMBEDDING}'s type; dtype=torch.{finer} "
        "(--precision) keeps them"
    )

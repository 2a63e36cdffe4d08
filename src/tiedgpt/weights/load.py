"""Read a GPT: headers and shapes first, then each tensor once.

SOURCE is a directory, a file in any known format, a hub name, or a model of transformers in memory.

    open_checkpoint (opening.py)        SOURCE -> Checkpoint: the file's tensors and claims
    as_gpt (checkpoint.py)              -> GPTCheckpoint: our names, our layout, config fields
    choose_matrices (head_policy.py)    one matrix or two
    load (here)                         checks everything, reads, returns a `GPT` in eval mode

Shapes are checked before any tensor is read, except when two matrices must be compared.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, GPTCheckpoint, as_gpt, shapes
from tiedgpt.weights.head_policy import choose_matrices
from tiedgpt.weights.huggingface import FIELDS, drop_foreign_ids, read_module
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.tensors import StoredTensor, by_storage, printable

Source = str | os.PathLike[str] | nn.Module
MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
"""Fields that the caller may change: the file says how it was trained, not how it must run."""
OTHER_HEADS = ("score.", "classifier.", "multiple_choice_head.", "qa_outputs.")
"""How the tensors of classifiers on a GPT begin; `tiedgpt.heads` loads them."""
SLACK_BYTES = 1 << 20
MAX_NAME = 200

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
        checkpoint = read_module(source)
    else:
        checkpoint = open_checkpoint(source, revision=revision, cache_dir=cache_dir)
    path = Path(checkpoint.source)
    try:
        gpt = as_gpt(checkpoint)
        tensors = {name: t for name, t in gpt.tensors.items() if not (others and others(name))}
        built, notes = _choose(path, gpt, tensors, config, resolve)
        _check_tensors(path, tensors, shapes(built), checkpoint.files)
    except CorruptInputError as error:
        if checkpoint.format == "module":  # no file is damaged
            raise UserError(str(error)) from None
        raise
    model, rounded = _build(built, tensors, dtype, progress)
    model.foreign_config = dict(gpt.foreign)
    n_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    return Loaded(model, path, f"{checkpoint.format}, {gpt.layout}", n_bytes, (*notes, *rounded))


def _choose(
    path: Path,
    gpt: GPTCheckpoint,
    tensors: dict[str, StoredTensor],
    given: Mapping[str, Any],
    resolve: str | None,
) -> tuple[GPTConfig, tuple[str, ...]]:
    """Return the config and notes; `tensors` is left with the matrices that the model has."""
    for name in tensors:
        if name.startswith(OTHER_HEADS):
            raise UserError(
                f"{path} is a classifier on a GPT (it has {printable(name)[:MAX_NAME]}), not a "
                "language model: load it with tiedgpt.heads, such as "
                "SequenceClassifier.from_pretrained"
            )
    fields = dict(gpt.fields)
    for name, value in given.items():
        if name not in FIELDS:
            raise UserError(f"{name!r} is no field of a config; there are {', '.join(FIELDS)}")
        if fields.setdefault(name, value) != value and name not in DROPOUTS:
            raise UserError(f"{name}={value!r} contradicts the file, which says {fields[name]!r}")
    fields |= given
    guesses = tuple(note for name, note in gpt.guesses.items() if note and name not in fields)
    matrices = choose_matrices(
        path,
        claim=fields.get("tie_word_embeddings"),
        embedding=tensors.pop(EMBEDDING, None),
        head=tensors.pop(HEAD, None),
        resolve=resolve,
    )
    pair = {EMBEDDING: matrices.embedding, HEAD: matrices.head}
    tensors |= {name: tensor for name, tensor in pair.items() if tensor is not None}
    fields["tie_word_embeddings"] = matrices.head is None
    config = _config(path, dict(gpt.assumed) | fields, tensors)
    for name, value in given.items():
        if name != "tie_word_embeddings" and getattr(config, name) != value:
            raise UserError(
                f"{name}={value!r} contradicts the weights, which have {getattr(config, name)!r}"
            )
    return config, (*gpt.notes, *guesses, *matrices.notes)


def _config(path: Path, fields: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> GPTConfig:
    """Return the config; where `fields` and the weights differ on a size, weights decide."""
    for name, sizes in ((EMBEDDING, ("vocab_size", "n_embd")), ("wpe.weight", ("n_positions",))):
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != 2:
            raise CorruptInputError(f"{path}: {name} is missing or no matrix; this is no GPT")
        fields |= dict(zip(sizes, shape, strict=False))
    layers = {int(match[1]) for name in tensors if (match := re.match(r"h\.(\d{1,6})\.", name))}
    last = max(layers, default=-1)
    n_layer = fields.setdefault("n_layer", last + 1)
    if not n_layer == len(layers) == last + 1:
        raise CorruptInputError(
            f"{path} says n_layer={n_layer!r}, the weights have {len(layers)} layers, of which "
            f"h.{last} is the last: layers are missing, or too many"
        )
    if "n_head" not in fields:
        raise UserError(
            f"{path} does not say how many heads it has, and shapes do not tell: give n_head "
            "(--n-head)"
        )
    inner = tensors.get("h.0.mlp.c_fc.weight")
    if inner is not None and len(inner.shape) == 2 and inner.shape[0] != 4 * fields["n_embd"]:
        fields["n_inner"] = inner.shape[0]
    fields.setdefault("bias", any(name.endswith(".bias") for name in tensors))
    drop_foreign_ids(fields)
    try:
        return GPTConfig(**fields)
    except UserError as error:
        raise CorruptInputError(f"{path} describes no GPT: {error}") from None


def _check_tensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    files: tuple[Path, ...],
) -> None:
    """Every parameter is there once, in its shape, and nothing else is.

    Together they may take twice the files' bytes, where a matrix was saved once and is wanted
    twice. What takes more are rows that repeat, or one place under many names.
    """
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"{printable(name)[:MAX_NAME]} is not a GPT's")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} is {tensor.shape}, not {expected[name]}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CorruptInputError(f"{path} does not fit its config: {'; '.join(problems[:3])}{more}")
    for tensor in tensors.values():
        tensor.require_decodable()
    there = sum(file.stat().st_size for file in files)
    wanted = sum(tensor.n_bytes for tensor in tensors.values())
    if files and wanted > 2 * there + SLACK_BYTES:
        largest = max(tensors, key=lambda name: tensors[name].n_bytes)
        raise CorruptInputError(
            f"{path} lies: its tensors, such as {largest} of shape {tensors[largest].shape}, would "
            f"take {wanted:,} bytes, and its files have {there:,}"
        )


class _NoDraws(TorchFunctionMode):
    """Leaves random draws out: on the meta device they are nothing, and cost seconds of imports."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_):
            return args[0]
        if func in (nn.init.normal_, nn.init.kaiming_uniform_):  # they would draw out of our sight
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _build(
    config: GPTConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> tuple[GPT, tuple[str, ...]]:
    """Fill a model with the tensors, each read once; without `dtype` the embedding's holds for all.

    A note tells where that rounds numbers. Two tensors that lie on the same bytes of a file get
    memory of their own: what is trained as two must not move as one.
    """
    with torch.device("meta"), _NoDraws():
        model = GPT(config)
    groups = by_storage(tensors.values())
    shared = {id(stored) for group in groups if len(group) > 1 for stored in group}
    state: dict[str, Tensor] = {}
    rounded: list[str] = []
    done, whole = 0, sum(tensor.n_bytes for tensor in tensors.values())
    for name in sorted(tensors, key=lambda name: name != EMBEDDING):
        tensor = tensors[name].tensor()
        own, common = tensor.dtype, dtype or state.get(EMBEDDING, tensor).dtype
        state[name] = tensor.to(common, copy=id(tensors[name]) in shared)
        coarser = dtype is None and torch.promote_types(own, common) != common
        if coarser and not torch.equal(state[name].to(own), tensor):
            rounded.append(name)
        done += tensors[name].n_bytes
        if progress is not None:
            progress(done, whole)
    model.load_state_dict(state, assign=True)
    if not rounded:
        return model.eval(), ()
    finer = tensors[rounded[0]].dtype
    return model.eval(), (
        f"{len(rounded)} tensors, such as {rounded[0]} in {finer}, were rounded to "
        f"{str(common).removeprefix('torch.')}, {EMBEDDING}'s type; dtype=torch.{finer} "
        "(--precision) keeps them",
    )

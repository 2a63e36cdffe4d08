"""Read a GPT: headers and shapes first, then each tensor once.

Only two matrices that must be compared are read before every shape was checked.

SOURCE is a directory, a file in any known format, or a hub name (`opening.py`); what is in it is
found under our names (`found.py`), and becomes a `GPT` in eval mode here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import GPTCheckpoint, LazyTensor, as_gpt
from tiedgpt.weights.config_json import FIELDS, drop_foreign_ids
from tiedgpt.weights.head_policy import choose_matrices
from tiedgpt.weights.names import EMBEDDING, HEAD, shapes
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.tensors import by_storage, printable

MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


SLACK_BYTES = 1 << 20
MAX_NAME = 200

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True)
class Loaded:
    """A model, where it came from, and what is worth telling about it."""

    model: GPT
    path: Path
    layout: str
    """The format and whose names: "safetensors, transformers gpt2"."""
    n_bytes: int
    """Of its tensors in the file."""
    notes: tuple[str, ...]


def load_model(
    source: str | os.PathLike[str],
    *,
    resolve: str | None = None,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> GPT:
    """Load a model; see `GPT.from_pretrained`."""
    return load(source, resolve=resolve, dtype=dtype, **config).model


def load(
    source: str | os.PathLike[str],
    *,
    resolve: str | None = None,
    dtype: torch.dtype | None = None,
    others: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
    **config: Any,
) -> Loaded:
    """Load a model and say what was found; see `GPT.from_pretrained`.

    `others(name)` says which tensors, by our names, belong to something beside the language model,
    such as a classifier on it: they are left out.
    """
    if dtype is not None and dtype not in MODEL_DTYPES:
        raise UserError(f"dtype={dtype!r} is none of {', '.join(map(str, MODEL_DTYPES))}")
    checkpoint = open_checkpoint(source)
    path = Path(checkpoint.source)
    gpt = as_gpt(checkpoint)
    files = {name: t for name, t in gpt.tensors.items() if others is None or not others(name)}
    supplied = _supply(gpt.fields, config)
    matrices = choose_matrices(
        path,
        claim=supplied.get("tie_word_embeddings"),
        embedding=files.get(EMBEDDING),
        head=files.get(HEAD),
        resolve=resolve,
    )
    for name, tensor in ((EMBEDDING, matrices.embedding), (HEAD, matrices.head)):
        files.pop(name, None)
        if tensor is not None:
            files[name] = tensor
    supplied["tie_word_embeddings"] = matrices.head is None
    built = _config(path, supplied, files, gpt)
    for name, value in config.items():
        if name != "tie_word_embeddings" and getattr(built, name) != value:
            raise UserError(
                f"{name}={value!r} contradicts the weights, which have {getattr(built, name)!r}"
            )
    _check_tensors(path, files, shapes(built))
    _check_size(path, files, checkpoint.files)
    model, rounded = _build(built, files, dtype, progress)
    guesses = (note for name, note in gpt.guesses.items() if name not in supplied)
    notes = (*gpt.notes, *guesses, *matrices.notes, *rounded)
    model.foreign_config = dict(gpt.foreign)
    return Loaded(
        model, path, f"{checkpoint.format}, {gpt.layout}",
        sum(tensor.stored.n_bytes for tensor in files.values()), notes,
    )  # fmt: skip


def _supply(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Add what the caller gives to what the file says; they must not disagree."""
    for name, value in given.items():
        if name not in FIELDS:
            raise UserError(f"{name!r} is no field of a config; there are {', '.join(FIELDS)}")
        if name in fields and fields[name] != value:
            raise UserError(f"{name}={value!r} contradicts the file, which says {fields[name]!r}")
    return {**fields, **given}


def _config(
    path: Path, fields: dict[str, Any], tensors: dict[str, LazyTensor], gpt: GPTCheckpoint
) -> GPTConfig:
    """Return the config; where what the file says and its weights differ on a size, weights decide.

    What neither they nor the caller says is what such a file means where it is silent.
    """
    fields = dict(fields)
    for name, sizes in ((EMBEDDING, ("vocab_size", "n_embd")), ("wpe.weight", ("n_positions", ""))):
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != 2:
            raise CorruptInputError(f"{path}: {name} is missing or no matrix; this is no GPT")
        fields |= {size: n for size, n in zip(sizes, shape, strict=True) if size}
    layers = {int(match[1]) for name in tensors if (match := re.match(r"h\.(\d{1,6})\.", name))}
    in_file = len(layers)
    if layers != set(range(in_file)):
        gap = next(layer for layer in range(in_file) if layer not in layers)
        raise CorruptInputError(
            f"{path}: layers are missing: there is an h.{max(layers)} and no h.{gap}"
        )
    told = fields.setdefault("n_layer", in_file)
    if told != in_file:
        fewer = type(told) is int and told < in_file
        odd = f"h.{told} is one too many" if fewer else f"h.{in_file} is missing"
        raise CorruptInputError(
            f"{path}: its config says n_layer={told!r}, the weights have {in_file}: {odd}"
        )
    fields = {**gpt.assumed, **fields}
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
    path: Path, tensors: dict[str, LazyTensor], expected: dict[str, tuple[int, ...]]
) -> None:
    """Every parameter is there once, in its shape, and nothing else is."""
    problems = (
        [f"{name} is missing" for name in expected if name not in tensors]
        + [
            f"{printable(name)[:MAX_NAME]} is not a GPT's"
            for name in tensors
            if name not in expected
        ]
        + [
            f"{name} is {tensor.shape}, not {expected[name]}"
            for name, tensor in tensors.items()
            if name in expected and tensor.shape != expected[name]
        ]
    )
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CorruptInputError(f"{path} does not fit its config: {'; '.join(problems[:3])}{more}")
    for tensor in tensors.values():
        tensor.require_readable()


def _check_size(path: Path, tensors: dict[str, LazyTensor], files: tuple[Path, ...]) -> None:
    """Refuse tensors that are more than the files: rows that repeat, one place under many names.

    Twice as much is a matrix that was saved once and is wanted twice.
    """
    there = sum(file.stat().st_size for file in files)
    wanted = sum(tensor.stored.n_bytes for tensor in tensors.values())
    if files and wanted > 2 * there + SLACK_BYTES:
        largest = max(tensors, key=lambda name: tensors[name].stored.n_bytes)
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
        return func(*args, **(kwargs or {}))


def _build(
    config: GPTConfig,
    tensors: dict[str, LazyTensor],
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> tuple[GPT, tuple[str, ...]]:
    """Fill a model with the tensors, each read once; the embedding's dtype holds for all.

    What that rounds is told in a note.

    Where two lie on the same bytes of the file, each gets memory of its own: what is trained as two
    must not move as one.
    """
    with torch.device("meta"), _NoDraws():
        model = GPT(config)
    state: dict[str, Tensor] = {}
    rounded: list[str] = []
    asked = dtype is not None
    shared = {
        id(stored)
        for group in by_storage(tensor.stored for tensor in tensors.values()) if len(group) > 1
        for stored in group
    }  # fmt: skip
    done, whole = 0, sum(tensor.n_bytes for tensor in tensors.values())
    for name in (EMBEDDING, *(name for name in tensors if name != EMBEDDING)):
        tensor = tensors[name].read()
        dtype = tensor.dtype if dtype is None else dtype
        state[name] = tensor.to(dtype, copy=id(tensors[name].stored) in shared)
        if torch.promote_types(tensor.dtype, dtype) != dtype:
            again = state[name].to(tensor.dtype)
            rounded += [name] if not torch.equal(again, tensor) else []
        done += tensors[name].n_bytes
        if progress is not None:
            progress(done, whole)
    model.load_state_dict(state, assign=True)
    if not rounded:
        return model.eval(), ()
    held, kept = tensors[rounded[0]].stored.dtype, str(dtype).removeprefix("torch.")
    why = "" if asked else f", {EMBEDDING}'s type; dtype=torch.{held} (--precision) keeps them"
    return model.eval(), (
        f"{len(rounded)} tensors, such as {rounded[0]} in {held}, were rounded to {kept}{why}",
    )

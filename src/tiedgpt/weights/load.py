"""Read a GPT: headers and shapes first, then each tensor once.

SOURCE is a directory, a file in any known format, a hub name, or a model of transformers in memory.

    open_checkpoint (opening.py)        SOURCE -> Checkpoint: the file's tensors and claims
    as_gpt (checkpoint.py)              -> GPTCheckpoint: our names, our layout, config fields
    load (here)                         one matrix or two; checks all, reads, builds a `GPT`

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
from tiedgpt.weights.comparison import compare
from tiedgpt.weights.formats.transformers import FIELDS, drop_foreign_ids, read_module
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.tensors import StoredTensor, printable

Source = str | os.PathLike[str] | nn.Module
MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
RESOLUTIONS = ("untie", "keep-input", "keep-output", "tie")
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
        claim = config.get("tie_word_embeddings", gpt.fields.get("tie_word_embeddings"))
        equal = choose_matrices(path, claim, tensors, resolve)
        built, dropped = _config(path, gpt, tensors, config)
        _check_tensors(path, tensors, shapes(built), checkpoint.files)
    except CorruptInputError as error:
        if checkpoint.format == "module":  # no file is damaged
            raise UserError(str(error)) from None
        raise
    guesses = (note for name, note in gpt.guesses.items() if name not in {*config, *gpt.fields})
    model, rounded = _build(built, tensors, dtype, progress)
    model.foreign_config = dict(gpt.foreign)
    n_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    notes = (*gpt.notes, *guesses, equal, dropped, rounded)
    layout = f"{checkpoint.format}, {gpt.layout}"
    return Loaded(model, path, layout, n_bytes, tuple(filter(None, notes)))


def choose_matrices(
    path: Path, claim: bool | None, tensors: dict[str, StoredTensor], resolve: str | None
) -> str:
    """Leave in `tensors` the matrices that the model has: one reads, and a second may predict.

    The claim (config.json's, or the format's) comes first. `resolve` overrides it:

        claim           the file holds       the model is                    resolve
        untied          two                  untied, even if they are equal  keep-input, keep-output
        untied          one                  an error: one is missing        tie
        tied, or none   one                  tied
        tied, or none   two, equal           tied, with a note               untie
        tied, or none   two, different       an error with numbers           untie, keep-input,
                                                                             keep-output

    Returns the note. Raises `CorruptInputError` where the file contradicts itself, `UserError`
    where `resolve` does not apply.
    """
    if resolve is not None and resolve not in RESOLUTIONS:
        raise UserError(
            f"must be one of {', '.join(RESOLUTIONS)}, got {resolve!r}", option="resolve"
        )
    both = {name: tensors.pop(name) for name in (EMBEDDING, HEAD) if name in tensors}
    for name, matrix in both.items():
        if len(matrix.shape) != 2 or not all(matrix.shape):
            raise CorruptInputError(f"{path}: {name} must be a matrix (V, D), got {matrix.shape}")
    if len(both) < 2:
        if resolve == "untie":
            raise UserError(
                f'{path} holds one matrix, and "untie" needs two', hint="load it, then untie it"
            )
        if claim is False and resolve != "tie":
            raise CorruptInputError(
                f"{path} claims that the head is not tied, and "
                f"{'wte.weight' if HEAD in both else 'lm_head.weight'} is missing",
                hint='resolve="tie" (--resolve tie) lets the one matrix read and predict',
            )
        for matrix in both.values():
            tensors[EMBEDDING] = matrix
        return ""
    embedding, head = both[EMBEDDING], both[HEAD]
    if embedding.shape != head.shape:
        turned = embedding.shape == head.shape[::-1]
        raise CorruptInputError(
            f"{path}: wte.weight is {embedding.shape} and lm_head.weight is {head.shape}: both "
            f"need a row for each token{'; one is transposed: `tiedgpt tie fix` turns it' * turned}"
        )
    if resolve == "tie":
        raise UserError(f"{path} holds two matrices", hint='choose "keep-input" or "keep-output"')
    tensors[EMBEDDING] = head if resolve == "keep-output" else embedding
    if resolve == "untie" or (claim is False and resolve is None):
        tensors[HEAD] = head
    if resolve or HEAD in tensors or embedding.is_view_of(head):
        return ""
    comparison = compare(embedding, head)
    if comparison is not None and comparison.equal:
        return "wte.weight and lm_head.weight are equal: tied"
    why = "its config claims one matrix" if claim else "nothing says that the head is untied"
    raise CorruptInputError(
        f"{path} holds two matrices, and {why}: wte.weight and lm_head.weight "
        f"{comparison or 'cannot be compared'}",
        hint='choose resolve="untie", "keep-input" or "keep-output" (--resolve)',
    )


def _config(
    path: Path, gpt: GPTCheckpoint, tensors: Mapping[str, StoredTensor], given: Mapping[str, Any]
) -> tuple[GPTConfig, str]:
    """Return the config, and a note. On sizes the weights decide; `given` only fills in."""
    for name in tensors:
        if name.startswith(OTHER_HEADS):
            raise UserError(
                f"{path} is a classifier on a GPT (it has {printable(name)[:MAX_NAME]}), not a "
                "language model",
                hint="load it with tiedgpt.heads, such as SequenceClassifier.from_pretrained",
            )
    fields = dict(gpt.fields)
    for name, sizes in ((EMBEDDING, ("vocab_size", "n_embd")), ("wpe.weight", ("n_positions",))):
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != 2:
            raise CorruptInputError(f"{path}: {name} is missing or no matrix; this is no GPT")
        fields |= dict(zip(sizes, shape, strict=False))
    inner = tensors.get("h.0.mlp.c_fc.weight")
    if inner is not None and len(inner.shape) == 2 and inner.shape[0] != 4 * fields["n_embd"]:
        fields["n_inner"] = inner.shape[0]
    fields.setdefault("bias", any(name.endswith(".bias") for name in tensors))
    layers = {int(match[1]) for name in tensors if (match := re.match(r"h\.(\d{1,6})\.", name))}
    last = max(layers, default=-1)
    n_layer = fields.setdefault("n_layer", last + 1)
    if not n_layer == len(layers) == last + 1:
        raise CorruptInputError(
            f"{path} says n_layer={n_layer!r}, the weights have {len(layers)} layers, of which "
            f"h.{last} is the last: layers are missing, or too many"
        )
    for name, value in given.items():
        if name not in FIELDS:
            raise UserError(
                f"{name!r} is no field of a config", hint=f"there are {', '.join(FIELDS)}"
            )
        if fields.get(name, value) != value and name not in DROPOUTS:
            raise UserError(f"{name}={value!r} contradicts the file, which has {fields[name]!r}")
    fields = dict(gpt.assumed) | fields | dict(given) | {"tie_word_embeddings": HEAD not in tensors}
    if "n_head" not in fields:
        raise UserError(
            f"{path} does not say how many heads it has, and shapes do not tell",
            hint="give n_head (--n-head)",
        )
    note = drop_foreign_ids(fields)
    try:
        return GPTConfig(**fields), note
    except UserError as error:
        if any(name in str(error) for name in given):  # the argument is wrong, not the file
            raise UserError(f"{path}: {error}") from None
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
        raise CorruptInputError(
            f"{path} lies: its tensors, such as wte.weight of shape {tensors[EMBEDDING].shape}, "
            f"would take {wanted:,} bytes, and its files have {there:,}"
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
) -> tuple[GPT, str]:
    """Fill a model with the tensors, each read once; without `dtype` the embedding's holds for all.

    A note tells where that rounds numbers.
    """
    with torch.device("meta"), _NoDraws():
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

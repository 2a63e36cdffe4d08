"""Check a GPT under our names and in our layout: a config, and a tensor for each parameter.

No tensor is read here, and no torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, TIE_KEY, Checkpoint, GPTCheckpoint
from tiedgpt.weights.tensors import StoredTensor, printable
from tiedgpt.weights.wrappers import OTHER_HEADS

DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
"""Fields that the caller may change: the file states how it was trained, not how it must run."""
SLACK_BYTES = 1 << 20
MAX_NAME_LENGTH = 200


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of `GPT(config)` by our names, without torch."""
    d, inner = config.n_embd, config.inner_dim
    block: dict[str, tuple[int, ...]] = {
        "ln_1": (d,),
        "attn.c_attn": (3 * d, d),
        "attn.c_proj": (d, d),
        "ln_2": (d,),
        "mlp.c_fc": (inner, d),
        "mlp.c_proj": (d, inner),
    }
    all_shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, d),
        "wpe.weight": (config.n_positions, d),
    }
    names = {f"h.{n}.{module}": s for n in range(config.n_layer) for module, s in block.items()}
    if config.norm == "pre":
        names["ln_f"] = (d,)
    for name, shape in names.items():
        all_shapes[f"{name}.weight"] = shape
        if config.bias:
            all_shapes[f"{name}.bias"] = shape[:1]
    if not config.tie_word_embeddings:
        all_shapes[HEAD] = (config.vocab_size, d)
    return all_shapes


@dataclass(frozen=True)
class CheckedGPT:
    """A GPT whose config and tensors fit each other: it can be built."""

    config: GPTConfig
    tensors: dict[str, StoredTensor]
    """The tensor of each parameter by our names, in its shape."""
    n_bytes: int
    """Size of the tensors in the file."""
    foreign: Mapping[str, Any]
    """Keys of its config that do not change the computation."""
    layout: str
    """Container, and origin of the names: "safetensors, transformers gpt2"."""
    notes: tuple[str, ...]
    """Notes on assumed values and on tensors or ids that were left out."""


def check_gpt(
    checkpoint: Checkpoint,
    gpt: GPTCheckpoint,
    matrices: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
) -> CheckedGPT:
    """Return the config of a GPT and the tensors of all its parameters.

    `matrices` are W, and the head's own if it has one, by our names; `config` are the caller's
    fields. Raises `CorruptInputError` unless the tensors are those of a GPT, `UserError` if an
    argument contradicts the file or does not apply.
    """
    path = Path(checkpoint.source)
    tensors = {n: t for n, t in gpt.tensors.items() if n not in (EMBEDDING, HEAD)}
    body = {tensor.name: name for name, tensor in tensors.items()}
    for name, matrix in matrices.items():
        if matrix.name in body:
            raise UserError(f"{path}: {matrix.name} is {body[matrix.name]} and cannot be {name}")
        tensors[name] = matrix
    built, dropped = _build_config(path, gpt, tensors, config)
    n_bytes = _check_tensors(path, tensors, shapes(built), checkpoint.files)
    guesses = (note for name, note in gpt.guesses.items() if name not in {*config, *gpt.fields})
    return CheckedGPT(
        config=built,
        tensors=tensors,
        n_bytes=n_bytes,
        foreign=gpt.foreign,
        layout=f"{checkpoint.container}, {gpt.layout}",
        notes=(*gpt.notes, *guesses, *dropped),
    )


def _build_config(
    path: Path, gpt: GPTCheckpoint, tensors: Mapping[str, StoredTensor], extra: Mapping[str, Any]
) -> tuple[GPTConfig, list[str]]:
    """Return the config and a note on dropped ids, if any were.

    The weights decide the numbers of rows. `extra` only adds fields that the file does not state.
    """
    for name in tensors:
        if name.startswith(OTHER_HEADS):
            raise UserError(
                f"{path} is a classifier on a GPT (it has {printable(name)[:MAX_NAME_LENGTH]}), "
                "not a language model",
                hint="label texts with `tiedgpt classify`, measure it with `tiedgpt eval MODEL "
                "LINES.jsonl`, or load it in Python with tiedgpt.heads",
            )
    fields = {name: value for name, value in gpt.fields.items() if name != TIE_KEY}
    for name, sizes in ((EMBEDDING, ("vocab_size", "n_embd")), ("wpe.weight", ("n_positions",))):
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) != 2:
            raise CorruptInputError(f"{path}: {name} is missing or no matrix; this is no GPT")
        if "n_embd" in sizes and fields.get("n_embd", shape[1]) != shape[1]:
            raise CorruptInputError(
                f"{path} says n_embd={fields['n_embd']!r}, and rows of {name} have {shape[1]} "
                "numbers: the config or the weights belong to another model"
            )
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
    for name, value in extra.items():
        if name not in GPTConfig.__dataclass_fields__:
            hint = f"there are {', '.join(GPTConfig.__dataclass_fields__)}"
            raise UserError(f"{name!r} is no field of a config", hint=hint)
        if fields.get(name, value) != value and name not in DROPOUTS:
            raise UserError(f"{name}={value!r} contradicts the file, which has {fields[name]!r}")
    fields = dict(gpt.assumed) | fields | dict(extra) | {TIE_KEY: HEAD not in tensors}
    if "n_head" not in fields:
        raise UserError(
            f"{path} does not say how many heads it has, and shapes do not tell",
            hint="give n_head (--n-head)",
        )
    notes = _drop_foreign_ids(fields)
    try:
        return GPTConfig(**fields), notes
    except UserError as error:
        if any(name in str(error) for name in extra):  # the argument is wrong, not the file
            raise UserError(f"{path}: {error}") from None
        raise CorruptInputError(f"{path} describes no GPT: {error}") from None


def _drop_foreign_ids(fields: dict[str, Any]) -> list[str]:
    """Keep one special id of each kind, inside the vocabulary; return notes on the others.

    transformers' default, 50256, lies outside small vocabularies. Of a list the first id is the
    model's own.
    """
    dropped, notes = [], []
    for name in ("bos_token_id", "eos_token_id"):
        value = fields.get(name)
        ids = value if isinstance(value, list) else [value]
        outside = [id for id in ids if type(id) is int and not 0 <= id < fields["vocab_size"]]
        dropped += [f"{name}={id}" for id in outside]
        inside = [id for id in ids if id not in outside]
        if len(inside) > 1:
            others = ", ".join(map(str, inside[1:]))
            notes.append(f"{name} is {inside[0]}, the first of several; {others} is no {name} here")
        fields[name] = inside[0] if inside else None
    if dropped:
        vocabulary = f"outside this model's vocabulary of {fields['vocab_size']} tokens: dropped"
        notes.append(f"{' and '.join(dropped)} {vocabulary}")
    return notes


def _check_tensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    files: tuple[Path, ...],
) -> int:
    """Return the bytes of the tensors; `CorruptInputError` unless they are the expected ones.

    Together they may take twice the bytes of the files: a matrix that was saved once may be used
    twice. Tensors that take more repeat rows, or use one place under many names.
    """
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"{printable(name)[:MAX_NAME_LENGTH]} is not a GPT's")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} is {tensor.shape}, not {expected[name]}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CorruptInputError(f"{path} does not fit its config: {'; '.join(problems[:3])}{more}")
    for tensor in tensors.values():
        if not tensor.is_decodable:
            raise tensor.decoding_error()
    there = sum(file.stat().st_size for file in files)
    total = sum(tensor.n_bytes for tensor in tensors.values())
    if files and total > 2 * there + SLACK_BYTES:
        raise CorruptInputError(
            f"{path} contradicts its own size: its tensors, such as wte.weight of shape "
            f"{tensors[EMBEDDING].shape}, would take {total:,} bytes, and its files have {there:,}"
        )
    return total

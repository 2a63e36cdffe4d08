"""Check a GPT's config and tensors before any tensor is read, without torch.

check_gpt        -> GPTConfig and the tensors of its parameters, each in its shape
find_load_error  -> the error of loading a GPT, for audits
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import (
    EMBEDDING,
    HEAD,
    TIE_KEY,
    GPTCheckpoint,
    shapes,
    to_gpt,
)
from tiedgpt.weights.decision import TieDecision, choose_matrices
from tiedgpt.weights.tensors import StoredTensor, printable

DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
"""Fields that the caller may change: the file states how it was trained, not how it must run."""
OTHER_HEADS = ("score.", "classifier.", "multiple_choice_head.", "qa_outputs.")
"""Prefixes of the tensors of classifiers on a GPT; `tiedgpt.heads` loads them."""
SLACK_BYTES = 1 << 20
MAX_NAME_LENGTH = 200


def check_gpt(
    gpt: GPTCheckpoint, decision: TieDecision, resolve: str | None, config: Mapping[str, Any]
) -> tuple[GPTConfig, dict[str, StoredTensor], str]:
    """Return the config, the tensors of all parameters by our names, and a note on dropped ids.

    `config` are the caller's fields. Raises `CorruptInputError` unless the tensors are those of a
    GPT, `UserError` if an argument contradicts the file or does not apply.
    """
    path = Path(decision.checkpoint.source)
    tensors = {n: t for n, t in gpt.tensors.items() if n not in (EMBEDDING, HEAD)}
    body = {tensor.name: name for name, tensor in tensors.items()}
    for name, matrix in choose_matrices(decision, resolve).items():
        if matrix.name in body:
            raise UserError(f"{path}: {matrix.name} is {body[matrix.name]} and cannot be {name}")
        tensors[name] = matrix
    built, note = _build_config(path, gpt, tensors, config)
    _check_tensors(path, tensors, shapes(built), decision.checkpoint.files)
    return built, tensors, note


def find_load_error(decision: TieDecision) -> str | None:
    """Return the error of loading a file that claims to be a GPT and whose tie is sound.

    Returns None for files of other architectures, and for files that load once the caller adds
    missing fields, such as `n_head`.
    """
    checkpoint = decision.checkpoint
    format = checkpoint.format
    if checkpoint.in_memory or format is None or not format.detect_checkpoint(checkpoint):
        return None
    try:
        gpt = to_gpt(checkpoint)
        has_heads = "n_head" in {**gpt.assumed, **gpt.fields}
        check_gpt(gpt, decision, None, {} if has_heads else {"n_head": 1})
    except CorruptInputError as error:
        return error.problem()
    except UserError:
        return None
    return None


def _build_config(
    path: Path, gpt: GPTCheckpoint, tensors: Mapping[str, StoredTensor], extra: Mapping[str, Any]
) -> tuple[GPTConfig, str]:
    """Return the config and a note on dropped ids.

    The weights decide the numbers of rows. `extra` only adds fields that the file does not state.
    """
    for name in tensors:
        if name.startswith(OTHER_HEADS):
            raise UserError(
                f"{path} is a classifier on a GPT (it has {printable(name)[:MAX_NAME_LENGTH]}), "
                "not a language model",
                hint="label texts with `tiedgpt classify`, or load it in Python with tiedgpt.heads",
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
    note = _drop_foreign_ids(fields)
    try:
        return GPTConfig(**fields), note
    except UserError as error:
        if any(name in str(error) for name in extra):  # the argument is wrong, not the file
            raise UserError(f"{path}: {error}") from None
        raise CorruptInputError(f"{path} describes no GPT: {error}") from None


def _drop_foreign_ids(fields: dict[str, Any]) -> str:
    """Drop special ids outside the vocabulary (transformers' default 50256); return a note."""
    dropped = []
    for name in ("bos_token_id", "eos_token_id"):
        value = fields.get(name)
        if isinstance(value, list):  # some configs list several ends; the first is the model's own
            fields[name] = value = value[0] if value else None
        if type(value) is int and not 0 <= value < fields["vocab_size"]:
            fields[name] = None
            dropped.append(f"{name}={value}")
    outside = f"outside this model's vocabulary of {fields['vocab_size']} tokens: dropped"
    return f"{' and '.join(dropped)} {outside}" if dropped else ""


def _check_tensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    files: tuple[Path, ...],
) -> None:
    """Raise `CorruptInputError` unless the tensors are exactly the expected parameters.

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

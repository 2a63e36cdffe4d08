"""Write a corrected copy of a checkpoint: the number of matrices and the claim agree in it.

    fix("broken-model", "fixed-model", keep="input")

The source is only read. A GPT is loaded with the resolution that `keep` means and saved as a model
directory; for any other architecture, its tensors are copied without the second matrix. The copy
appears after it was opened again and judged sound, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from tiedgpt.errors import CheckFailedError, TiedGPTError, UserError
from tiedgpt.files import replacing, require_room, write_json, writing
from tiedgpt.runtime import to_json_data
from tiedgpt.signatures import checked
from tiedgpt.tie.audits import Audit, examine, open_source
from tiedgpt.tie.findings import format_shape
from tiedgpt.tie.vocabulary import resize_vocab
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint
from tiedgpt.weights.comparison import count_nonzero_rows
from tiedgpt.weights.containers import open_container, write_safetensors
from tiedgpt.weights.convert import write_copy
from tiedgpt.weights.decision import Keep, TieDecision
from tiedgpt.weights.load import MODEL_DTYPES, load
from tiedgpt.weights.roles import Roles, is_transposed
from tiedgpt.weights.source import Source
from tiedgpt.weights.tensors import StoredTensor

SAME_WEIGHTS = "it was loaded, and its weights are the source's"
NOT_RUN = "its matrices were audited, and all its tensors are the source's byte for byte"
MODEL_FILES = tuple(
    "tokenizer* vocab* merges.txt *.model special_tokens_map.json added_tokens.json "
    "generation_config.json preprocessor* chat_template* *.md LICENSE*".split()
)
"""Files of a model directory that belong to the model, besides its weights and config."""


@dataclass(frozen=True, repr=False)
class Repair:
    """The actions of a fix, and the audits before and after."""

    source: str
    dest: str
    actions: tuple[str, ...]
    check: str
    """How the copy was compared with its source."""
    before: Audit
    after: Audit

    @property
    def explain(self) -> str:
        """The audits and the actions in plain words."""
        return (
            f"{self.source}: {self.before.verdict}; {'; '.join(self.actions)}. "
            f"{self.dest} is {self.after.verdict}; {self.check}. The source is untouched."
        )

    def __str__(self) -> str:
        return self.explain

    __repr__ = __str__

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        audits = {"before": self.before.as_dict(), "after": self.after.as_dict()}
        return to_json_data(self) | audits | {"explain": self.explain}


@dataclass(frozen=True)
class CopyMatrices:
    """The matrices over the vocabulary in a copy."""

    resolve: str
    """The `resolve` with which the source is loaded."""
    matrices: dict[str, StoredTensor]
    """The input matrix, and the output matrix of an untied model, by their names in the copy."""
    actions: tuple[str, ...] = ()
    vocab_size: int | None = None
    """The new `vocab_size` of config.json; None leaves it."""

    @property
    def config(self) -> dict[str, Any]:
        """The new values of config.json."""
        claim: dict[str, Any] = {TIE_KEY: len(self.matrices) == 1}
        return claim if self.vocab_size is None else claim | {"vocab_size": self.vocab_size}


@checked
def fix(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    keep: Keep | None = None,
    input_name: str | None = None,
    output_name: str | None = None,
) -> Repair:
    """Write a corrected copy of a checkpoint as a new model directory.

    Equal copies become one matrix, a transposed matrix is turned, padding on one side is cut, and
    config.json's claim becomes true. If the two matrices differ, `keep` names the side whose
    numbers stay, or "both": then the config says untied. A GPT is written as transformers' GPT-2;
    a safetensors or torch file of another architecture keeps its names.

    Raises `UserError` if a choice is missing, there is nothing to fix, or `dest` exists,
    `CorruptInputError` for a GPT that does not load, and `CheckFailedError` if the copy is not
    sound. Then nothing is written.
    """
    if keep is not None and keep not in get_args(Keep):
        raise UserError(
            f"must be one of {', '.join(map(repr, get_args(Keep)))}, got {keep!r}", option="keep"
        )
    dest = Path(dest)
    opened = open_source(source)
    _check_dest(dest, opened.path)
    names: dict[str, Any] = {"input_name": input_name, "output_name": output_name}
    decision = opened.decide(**names)
    before, copy = examine(opened, decision), _choose_matrices(opened.checkpoint, decision, keep)
    is_gpt = _is_complete_gpt(opened)
    with replacing(dest) as temporary:
        if is_gpt:
            after = _save_gpt(opened, copy, temporary, names)
        else:
            after = _copy_tensors(opened, decision.roles, copy, temporary, names)
        _copy_files_beside(opened, temporary)
        if after.verdict != ("tied" if copy.config[TIE_KEY] else "untied as claimed"):
            raise CheckFailedError(f"{dest} was not written: it would be {after.verdict}")
    after = replace(after, source=str(dest))
    check = SAME_WEIGHTS if is_gpt else NOT_RUN
    return Repair(str(opened.path), str(dest), copy.actions, check, before, after)


# Decide what to write


def _choose_matrices(
    checkpoint: Checkpoint, decision: TieDecision, keep: Keep | None
) -> CopyMatrices:
    """Return what to write; `UserError` if there is nothing to fix or a choice is missing."""
    source, roles = checkpoint.source, decision.roles
    _require_fixable(checkpoint, decision)
    if keep is None and decision.choices:
        options = " or ".join(f"--keep {choice}" for choice in decision.choices)
        raise UserError(
            f"{source}: {decision.reason}",
            hint=f"choose whose numbers stay, with {options} (keep= in Python)",
        )
    is_untied = decision.checkpoint.claim.is_tied is False
    if roles.pair is None or roles.is_shared:
        copy = _keep_one(checkpoint, roles, keep)
    elif keep == "both" or (keep is None and is_untied):
        if roles.extra_rows or not roles.has_one_width:
            raise UserError(f"{source}: {decision.reason}", hint="keep one of the two")
        copy = CopyMatrices("untie", {matrix.name: matrix for matrix in roles.pair})
    else:
        copy = _make_one(checkpoint, roles, keep)
    actions = [*copy.actions]
    for matrix in copy.matrices.values():
        if matrix.name in roles.transposed:
            actions.append(f"{matrix.name} is transposed to {format_shape(matrix.shape)}")
    claim = copy.config[TIE_KEY]
    if claim is is_untied:  # the old claim is the opposite
        actions.append(f"config.json now says {TIE_KEY}: {str(claim).lower()}")
    is_wasteful = decision.kind == "tied, stored twice" or roles.input is None
    if not actions or (decision.is_sound and keep is None and not is_wasteful):
        has_two = roles.pair is not None and decision.kind != "tied"
        choice = "--keep input or --keep output makes one matrix of the two" if has_two else None
        raise UserError(f"{source} is {decision.kind}: nothing to mend", hint=choice)
    return replace(copy, actions=tuple(actions))


def _require_fixable(checkpoint: Checkpoint, decision: TieDecision) -> None:
    source, roles = checkpoint.source, decision.roles
    if roles.unreadable:
        raise UserError(
            f"{source}: {roles.unreadable[0].name} predicts and is not read here (quantized, or "
            "in parts)",
            hint="fix the checkpoint it was made from",
        )
    if decision.is_turned_copy:
        raise UserError(
            f"{source} is {decision.kind}: nothing to mend; its program stores "
            f"{roles.transposed[0]} transposed, as a matrix of its own, and needs both",
            hint="fix the checkpoint it was made from, or the model in memory (tiedgpt.tie.tie)",
        )
    if decision.kind == "no head":
        raise UserError(
            f"{source} does not predict tokens (no head)", hint="there is no tie to fix"
        )
    if roles.output is not None and roles.output.name in roles.transposed:
        if not checkpoint.any_layout and is_transposed(checkpoint, roles.matrix) is None:
            raise UserError(
                f"{source}: {roles.matrix.name} or {roles.output.name} is transposed, and nothing "
                "tells which is (V, D)",
                hint=(
                    "say vocab_size and n_embd (or hidden_size), two different numbers, in a "
                    "config.json beside it"
                ),
            )


def _keep_one(checkpoint: Checkpoint, roles: Roles, keep: Keep | None) -> CopyMatrices:
    """Keep the one matrix, under the name of the embedding that the family's loaders look for."""
    matrix, source = roles.matrix, checkpoint.source
    if keep == "both":
        raise UserError(
            f"{source} holds one matrix, {matrix.name}",
            hint="there is no head to keep beside it, and none is made up",
        )
    if roles.input is not None:
        return CopyMatrices("tie", {matrix.name: matrix})
    for name in checkpoint.tensors:
        for position, token in (("wpe", "wte"), ("positions_embed", "tokens_embed")):
            if name.endswith(f"{position}.weight"):
                name = name.replace(position, token)
                action = f"the one matrix, {matrix.name}, is called {name}, where loaders look"
                return CopyMatrices("tie", {name: matrix}, (action,))
    raise UserError(
        f"{source} holds only {matrix.name}, and the name of its family's embedding is not known "
        "here",
        hint="rename it yourself",
    )


def _make_one(checkpoint: Checkpoint, roles: Roles, keep: Keep | None) -> CopyMatrices:
    """Make one of two matrices (V, D), (V', D): equal ones, or with the numbers `keep` names."""
    assert roles.pair is not None
    (reads, head), vocabulary = roles.pair, checkpoint.vocabulary
    if keep == "output" and not roles.has_one_width:
        raise UserError(
            f"{checkpoint.source}: {head.name} {format_shape(head.shape)} has another width than "
            f"{reads.name}",
            hint=f"--keep input drops {head.name}",
        )
    is_short = vocabulary is not None and reads.shape[0] < min(vocabulary, head.shape[0])
    use_head = keep == "output" or (keep is None and is_short)
    matrix = head if use_head else reads
    rows = matrix.shape[0]
    if roles.extra_rows and vocabulary is not None:
        rows = min(rows, vocabulary)
    if use_head and vocabulary is not None and rows < vocabulary:
        raise UserError(
            f"{checkpoint.source}: {head.name} has {rows:,} rows for a vocabulary of "
            f"{vocabulary:,}: it scores something other than tokens, and tying to it would lose "
            "them",
            hint="--keep input drops it",
        )
    _require_nothing_else(checkpoint, roles, head, rows)
    does = "has its numbers and predicts" if use_head else "predicts as well"
    actions = [f"{head.name} is dropped; {reads.name} {does}"]
    for long in (reads, head) if roles.has_one_width else ():
        if (n := long.shape[0]) > rows:
            readable = long.is_decodable
            nonzero = count_nonzero_rows(long, rows) if readable else "unknown how many"
            lost = f"the last {n - rows:,} rows of {long.name}, {rows} to {n - 1}"
            actions.append(f"{lost}, go ({nonzero} of them not zero)")
    new_size = rows if roles.extra_rows and vocabulary not in (None, rows) else None
    if new_size is not None:
        actions.append(f"config.json now says vocab_size: {rows}, not {vocabulary}")
    resolve = "keep-output" if use_head else "keep-input"
    return CopyMatrices(resolve, {reads.name: matrix.first_rows(rows)}, tuple(actions), new_size)


def _require_nothing_else(
    checkpoint: Checkpoint, roles: Roles, head: StoredTensor, rows: int
) -> None:
    """Refuse to change the rows of a head that has more than a matrix, such as a bias."""
    n_rows, module = head.shape[0], head.name.rpartition(".")[0] or "final_logits_bias"
    places = (f"{module}.", f"{module.rpartition('.')[0]}.bias", "final_logits_bias")
    for name, tensor in checkpoint.tensors.items():
        if n_rows != rows and name.startswith(places):
            if n_rows in tensor.shape and name not in (head.name, roles.matrix.name):
                raise UserError(
                    f"{name} {format_shape(tensor.shape)} belongs to the {n_rows:,} rows of "
                    f"{head.name}, and {rows:,} are kept",
                    hint="cut or fill it yourself first",
                )


# Write it


def _check_dest(dest: Path, source: Path) -> None:
    with writing(dest):
        taken = dest.exists() or dest.is_symlink()
    if taken:
        raise UserError(f"{dest} exists: a mended copy is written to a new place, never over one")
    home = source.parent if source.name.endswith(".index.json") else source
    if home.is_dir() and dest.resolve().is_relative_to(home.resolve()):
        raise UserError(f"{dest} lies inside {home}: the source is left untouched")


def _is_complete_gpt(source: Source) -> bool:
    """Whether the file is a GPT that states its number of heads, or is of a format for GPTs only.

    A file that does not state it is copied like any other architecture.
    """
    format = source.checkpoint.format
    if format is None or format.open is not open_container:
        return True
    try:
        gpt = source.gpt
    except TiedGPTError:
        return False
    return format.detect_checkpoint(source.checkpoint) and "n_head" in {**gpt.assumed, **gpt.fields}


def _save_gpt(
    source: Source, copy: CopyMatrices, directory: Path, names: Mapping[str, Any]
) -> Audit:
    """Load a GPT, save it for transformers and compare the two; return the copy's audit."""
    dtypes = {getattr(torch, tensor.dtype, None) for tensor in source.checkpoint.tensors.values()}
    floats = [dtype for dtype in MODEL_DTYPES if dtype in dtypes]
    widest = reduce(torch.promote_types, floats) if len(floats) > 1 else None
    loaded = load(source, resolve=copy.resolve, dtype=widest, **names)
    rows = next(iter(copy.matrices.values())).shape[0]
    if loaded.model.config.vocab_size > rows:
        resize_vocab(loaded.model, rows)
    try:
        tokenizer = source.tokenizer
    except TiedGPTError:
        tokenizer = None
    _, written = write_copy(loaded, directory, "transformers", tokenizer=tokenizer)
    return examine(written, written.decide())


def _copy_tensors(
    source: Source, roles: Roles, copy: CopyMatrices, directory: Path, names: Mapping[str, Any]
) -> Audit:
    """Write the source's tensors by their names, with the copy's matrices and claim; audit them."""
    checkpoint = source.checkpoint
    matrices = [t.name for t in (roles.input, roles.output, *roles.aliases) if t is not None]
    copies = {n: t for n, t in checkpoint.tensors.items() if n not in matrices} | copy.matrices
    require_room(directory.parent, sum(tensor.n_bytes for tensor in copies.values()))
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", copies, {"format": "pt"})
    write_json(directory / "config.json", {**checkpoint.config, **copy.config})
    written = Source(directory)
    for name, original in copies.items():
        pairs = zip(written.checkpoint.tensors[name].blocks(), original.blocks(), strict=True)
        if not all(np.array_equal(block, expected) for block, expected in pairs):
            raise CheckFailedError(f"{name} was not written: the copy holds other bytes")
    reads, *_, predicts = [*copy.matrices] * 2
    new_names = {
        "input_name": names["input_name"] and reads,
        "output_name": names["output_name"] and predicts,
    }
    return examine(written, written.decide(**new_names))


def _copy_files_beside(source: Source, directory: Path) -> None:
    """Copy the model's other files, such as its tokenizer and card."""
    path = source.path
    home = path if path.is_dir() else path.parent
    if not (path.is_dir() or (home / "config.json").is_file()):
        return  # a lone file
    weights = [file.name for file in source.checkpoint.files]
    for file in home.iterdir():
        belongs = any(fnmatchcase(file.name, pattern) for pattern in MODEL_FILES)
        if file.is_file() and belongs and file.name not in weights:
            (directory / file.name).write_bytes(source.read(file))

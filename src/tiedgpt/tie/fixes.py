"""Write a corrected copy of a checkpoint: one matrix where one is meant, and a claim that is true.

    fix("broken-model", "fixed-model", keep="input")

The source is only read. The copy is a model directory. It is audited before it appears, and it
appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.files import replacing, require_room, write_json, writing
from tiedgpt.tie.audits import Audit, checkpoint_of, examine
from tiedgpt.tie.findings import size
from tiedgpt.weights.checkpoint import TIE_KEY, Checkpoint
from tiedgpt.weights.comparison import Comparison, nonzero_rows
from tiedgpt.weights.decision import decide_tie
from tiedgpt.weights.roles import Roles, find_roles, lies_transposed
from tiedgpt.weights.safetensors_file import write_safetensors
from tiedgpt.weights.tensors import StoredTensor

Keep = Literal["input", "output", "both"]
GO_ALONG = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "preprocessor*", "chat_template*", "*.md",
    "LICENSE*",
)  # fmt: skip
"""Files of a model directory that belong to the model, besides its weights and config."""


@dataclass(frozen=True)
class Repair:
    """What was done, and the audits before and after."""

    source: str
    dest: str
    actions: tuple[str, ...]
    before: Audit
    after: Audit

    @property
    def explain(self) -> str:
        """What was done, in plain words."""
        return (
            f"{self.source} was {self.before.verdict}; {'; '.join(self.actions)}. "
            f"{self.dest} is {self.after.verdict}. The source is untouched."
        )

    def __str__(self) -> str:
        return self.explain

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        audits = {"before": self.before.as_dict(), "after": self.after.as_dict()}
        return vars(self) | audits | {"actions": list(self.actions), "explain": self.explain}


class Plan(NamedTuple):
    """What the copy holds for the matrices over the vocabulary."""

    tensors: dict[str, StoredTensor]
    """The matrices by their names in the copy."""
    config: dict[str, Any]
    """What config.json must say."""
    actions: list[str]


def fix(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    keep: Keep | None = None,
    input_name: str | None = None,
    output_name: str | None = None,
) -> Repair:
    """Write a corrected copy of a safetensors or torch checkpoint as a new model directory.

    Equal copies become one matrix, a transposed matrix is turned, padding on one side is cut, and
    config.json's claim becomes what is there. If the two matrices differ, `keep` says whose
    numbers both sides get, or "both": they stay two and the config says so. Raises `UserError` if
    a choice is missing, there is nothing to fix, `dest` exists, or the format is only read here.
    """
    if keep is not None and keep not in get_args(Keep):
        raise UserError(
            f"must be one of {', '.join(map(repr, get_args(Keep)))}, got {keep!r}", option="keep"
        )
    dest = Path(dest)
    checkpoint = checkpoint_of(source)
    if checkpoint.format is not None and not checkpoint.format.can_fix:
        raise UserError(
            f"{checkpoint.source} is {checkpoint.container}, which is audited but not written here",
            hint=(
                "fix the checkpoint that it was converted from or exported from, and convert "
                "that again"
            ),
        )
    _check_dest(dest, Path(checkpoint.source))
    roles = find_roles(checkpoint, input_name=input_name, output_name=output_name)
    decision = decide_tie(checkpoint, roles)
    before = examine(checkpoint, decision)
    plan = _plan(checkpoint, roles, before, keep)
    matrices = [t.name for t in (roles.input, roles.output, *roles.aliases) if t is not None]
    copies = {n: t for n, t in checkpoint.tensors.items() if n not in matrices}
    copies |= plan.tensors
    require_room(dest.parent, sum(copy.n_bytes for copy in copies.values()))
    with replacing(dest) as temporary:
        temporary.mkdir()
        write_safetensors(temporary / "model.safetensors", copies, {"format": "pt"})
        write_json(temporary / "config.json", {**checkpoint.config, **plan.config})
        for file in _beside(checkpoint):
            shutil.copyfile(file, temporary / file.name)
        after = _audit_copy(temporary, dest, plan, input_name, output_name)
    return Repair(str(checkpoint.source), str(dest), tuple(plan.actions), before, after)


# Decide what to write


def _plan(checkpoint: Checkpoint, roles: Roles, audit: Audit, keep: str | None) -> Plan:
    """Return what to write; `UserError` if there is nothing to fix or a choice is missing."""
    source, untied = checkpoint.source, checkpoint.claim.is_tied is False
    if roles.unreadable:
        raise UserError(
            f"{source}: {roles.unreadable[0].name} predicts and is not read here (quantized, or "
            "in parts)",
            hint="fix the checkpoint it was made from",
        )
    if audit.verdict == "no head":
        raise UserError(
            f"{source} does not predict tokens (no head)", hint="there is no tie to fix"
        )
    if roles.output is not None and roles.output.name in roles.transposed:
        if lies_transposed(checkpoint, roles.matrix) is None:
            raise UserError(
                f"{source}: {roles.matrix.name} or {roles.output.name} is transposed, and nothing "
                "tells which is (V, D)",
                hint=(
                    "say vocab_size and n_embd (or hidden_size), two different numbers, in a "
                    "config.json beside it"
                ),
            )
    two = roles.fits and (keep == "both" or (untied and keep is None))
    if roles.pair is None or roles.shared:
        plan = _plan_one(checkpoint, roles, keep)
    elif two and not roles.extra_rows:
        plan = Plan({matrix.name: matrix for matrix in roles.pair}, {TIE_KEY: False}, [])
    else:
        plan = _plan_tie(checkpoint, roles, *roles.pair, audit.comparison, keep)
    kept = [copy for copy in plan.tensors.values() if copy.name in roles.transposed]
    plan.actions.extend(f"{copy.name} is transposed to {size(copy.shape)}" for copy in kept)
    claim = plan.config[TIE_KEY]
    if claim is untied:  # the old claim is the opposite
        plan.actions.append(f"config.json now says {TIE_KEY}: {str(claim).lower()}")
    if not plan.actions:
        choice = '; keep="input" or keep="output" makes one matrix of the two' if untied else ""
        raise UserError(f"{source} is {audit.verdict}: nothing to mend{choice}")
    return plan


def _plan_one(checkpoint: Checkpoint, roles: Roles, keep: str | None) -> Plan:
    """Keep the one matrix, under the name of the embedding that the family's loaders look for."""
    matrix, source = roles.matrix, checkpoint.source
    if keep == "both":
        raise UserError(
            f"{source} holds one matrix, {matrix.name}",
            hint="there is no head to keep beside it, and none is made up",
        )
    if roles.input is not None:
        return Plan({matrix.name: matrix}, {TIE_KEY: True}, [])
    for name in checkpoint.tensors:
        for position, token in (("wpe", "wte"), ("positions_embed", "tokens_embed")):
            if name.endswith(f"{position}.weight"):
                name = name.replace(position, token)
                action = f"the one matrix, {matrix.name}, is called {name}, where loaders look"
                return Plan({name: matrix}, {TIE_KEY: True}, [action])
    raise UserError(
        f"{source} holds only {matrix.name}, and the name of its family's embedding is not known "
        "here",
        hint="rename it yourself",
    )


def _plan_tie(
    checkpoint: Checkpoint,
    roles: Roles,
    reads: StoredTensor,
    head: StoredTensor,
    comparison: Comparison | None,
    keep: str | None,
) -> Plan:
    """Make one of two matrices (V, D), (V', D): equal ones, or with the numbers `keep` names."""
    source, vocabulary, extra = checkpoint.source, checkpoint.vocabulary, roles.extra_rows
    shapes = f"{reads.name} {size(reads.shape)} and {head.name} {size(head.shape)}"
    if keep == "both" or (keep != "input" and not roles.fits):
        raise UserError(
            f"{source}: {shapes} have different rows or widths and cannot be of one vocabulary: "
            f'keep="input" drops {head.name}'
        )
    is_untied = checkpoint.claim.is_tied is False
    equal = comparison is not None and comparison.equal and not is_untied
    sure = equal and not (extra and vocabulary is None)
    if keep is None and not sure:
        raise UserError(
            f"{source}: {shapes} {comparison or 'could not be compared'}",
            hint=(
                'choose whose numbers stay, keep="input" or keep="output", or keep="both" to '
                "declare them untied"
            ),
        )
    missing = vocabulary is not None and reads.shape[0] < min(vocabulary, head.shape[0])
    use_head = keep == "output" or (keep is None and missing)
    kept = head if use_head else reads
    rows = kept.shape[0]
    if extra and vocabulary is not None:
        rows = min(rows, vocabulary)
    if use_head and vocabulary is not None and rows < vocabulary:
        raise UserError(
            f"{source}: {head.name} has {rows:,} rows for a vocabulary of {vocabulary:,}: it "
            "scores something other than tokens, and tying to it would lose them; "
            'keep="input" drops it'
        )
    _require_nothing_else(checkpoint, roles, head, rows)
    does = "has its numbers and predicts" if use_head else "predicts as well"
    actions = [f"{head.name} is dropped; {reads.name} {does}"]
    for matrix in (reads, head) if roles.fits else ():
        if (n := matrix.shape[0]) > rows:
            nonzero = nonzero_rows(matrix, rows, n) if matrix.is_decodable else "unknown how many"
            lost = f"the last {n - rows:,} rows of {matrix.name}, {rows} to {n - 1}"
            actions.append(f"{lost}, go ({nonzero} of them not zero)")
    config: dict[str, Any] = {TIE_KEY: True}
    if extra and vocabulary not in (None, rows):
        config["vocab_size"] = rows
        actions.append(f"config.json now says vocab_size: {rows}, not {vocabulary}")
    return Plan({reads.name: kept.row_range(0, rows)}, config, actions)


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
                    f"{name} {size(tensor.shape)} belongs to the {n_rows:,} rows of {head.name}, "
                    f"and {rows:,} are kept",
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


def _beside(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that go along with the weights: tokenizer, card."""
    path = Path(checkpoint.source)
    home = path if path.is_dir() else path.parent
    if not (path.is_dir() or (home / "config.json").is_file()):
        return []  # a lone file
    weights = [file.name for file in checkpoint.files]
    files = [file for file in home.iterdir() if file.is_file() and file.name not in weights]
    return [file for file in files if any(fnmatchcase(file.name, name) for name in GO_ALONG)]


def _audit_copy(
    directory: Path, dest: Path, plan: Plan, input_name: str | None, output_name: str | None
) -> Audit:
    """Audit what was written; a copy that is not sound never appears."""
    copy = checkpoint_of(directory)
    names = [name if name in copy.tensors else None for name in (input_name, output_name)]
    roles = find_roles(copy, input_name=names[0], output_name=names[1])
    after = examine(copy, decide_tie(copy, roles))
    wanted = "tied" if plan.config[TIE_KEY] else "untied as claimed"
    if after.verdict != wanted:
        raise CheckFailedError(
            f"{dest} was not written: the mended copy would be {after.verdict}, not {wanted}"
        )
    return replace(after, source=str(dest))

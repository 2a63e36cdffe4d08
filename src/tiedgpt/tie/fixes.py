"""Write a corrected copy of a checkpoint: one matrix where one is meant, and a claim that is true.

    fix("broken-model", "fixed-model", keep="input")

The source is only read. The copy is a model directory. It is audited before it appears, and it
appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.tie.audits import Audit, checkpoint_of, examine
from tiedgpt.tie.findings import megabytes, size
from tiedgpt.tie.roles import Roles, find_roles, lies_transposed
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.comparison import nonzero_rows
from tiedgpt.weights.opening import CLAIM
from tiedgpt.weights.safetensors_file import Copy, write_safetensors
from tiedgpt.weights.tensors import StoredTensor, printable

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
    bytes_before: int
    bytes_after: int

    @property
    def explain(self) -> str:
        """What was done, in plain words."""
        return (
            f"{self.source} was {self.before.verdict}; {'; '.join(self.actions)}. "
            f"{self.dest} is {self.after.verdict}, {megabytes(self.bytes_after)} of weights where "
            f"there were {megabytes(self.bytes_before)}. The source is untouched."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        audits = {"before": self.before.as_dict(), "after": self.after.as_dict()}
        return vars(self) | audits | {"actions": list(self.actions), "explain": self.explain}


@dataclass
class Plan:
    """What the copy holds for the matrices over the vocabulary."""

    tensors: dict[str, Copy]
    """The matrices, and vectors with one entry per token, by their names in the copy."""
    tied: bool
    actions: list[str]
    rows: int | None = None
    """V in the copy, if config.json's vocab_size must change."""


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
        raise UserError(f"keep must be one of {', '.join(map(repr, get_args(Keep)))}, got {keep!r}")
    dest = Path(dest)
    checkpoint = checkpoint_of(source)
    if checkpoint.format in ("GGUF", "ONNX", "packed"):
        raise UserError(
            f"{checkpoint.source} is {checkpoint.format}, which is audited but not written here: "
            "fix the checkpoint that it was converted from or exported from, and convert that again"
        )
    _check_dest(dest, Path(checkpoint.source))
    roles = find_roles(checkpoint, input_name=input_name, output_name=output_name)
    before = examine(checkpoint, roles)
    plan = _plan(checkpoint, replace(roles, output_transposed=before.transposed), before, keep)
    copies = _copies(checkpoint, roles, plan)
    for copy in copies.values():
        _ = copy.format_name  # refuses a type that cannot be written, before anything is
    beside, left = _beside(checkpoint)
    if left:
        listed = ", ".join(printable(name) for name in left[:8]) + (", ..." if left[8:] else "")
        plan.actions.append(f"not copied, since no loader needs it: {listed}")
    if not checkpoint.config:
        plan.actions.append(f"no config.json lies beside it: the new one holds {CLAIM} alone")
    n_bytes = sum(copy.n_bytes for copy in copies.values())
    require_room(dest.parent, n_bytes + sum(file.stat().st_size for file in beside))
    with replacing(dest) as temporary:
        temporary.mkdir()
        write_safetensors(temporary / "model.safetensors", copies, {"format": "pt"})
        _write_config(temporary / "config.json", checkpoint, plan)
        for file in beside:
            shutil.copyfile(file, temporary / file.name)
        after = _audit_copy(temporary, dest, plan, input_name, output_name)
    weights = [file for file in checkpoint.files if file.suffix != ".json"]
    return Repair(
        source=str(checkpoint.source),
        dest=str(dest),
        actions=tuple(plan.actions),
        before=before,
        after=after,
        bytes_before=sum(file.stat().st_size for file in weights),
        bytes_after=(dest / "model.safetensors").stat().st_size,
    )


# Decide what to write


def _plan(checkpoint: Checkpoint, roles: Roles, audit: Audit, keep: str | None) -> Plan:
    """Return what to write; `UserError` if there is nothing to fix or a choice is missing."""
    source, untied = checkpoint.source, checkpoint.claim is False
    if roles.unreadable:
        raise UserError(
            f"{source}: {roles.unreadable[0].name} predicts and is not read here (quantized, or in "
            "parts): fix the checkpoint it was made from"
        )
    if audit.verdict == "no head":
        raise UserError(f"{source} does not predict tokens (no head): there is no tie to fix")
    turned = {roles.matrix.name} if roles.input_transposed else set()
    if roles.pair is None or roles.shared:
        plan = _plan_one(checkpoint, roles, keep)
    else:
        reads, predicts = roles.pair
        head = predicts
        if roles.output_transposed:
            head = predicts.turned()
            turned.add(head.name)
            if lies_transposed(checkpoint, reads) is None:
                raise UserError(
                    f"{source}: {reads.name} {size(reads.shape)} or {head.name} is transposed, "
                    "and nothing tells which is (V, D): say vocab_size and n_embd (or "
                    "hidden_size), two different numbers, in a config.json beside it"
                )
        if roles.fits and (keep == "both" or (untied and keep is None)):
            if roles.extra_rows:
                raise UserError(
                    f"{reads.name} {size(reads.shape)} and {head.name} {size(head.shape)} have "
                    "different rows: two matrices of one vocabulary cannot; keep one of them, "
                    'keep="input" or keep="output"'
                )
            plan = Plan({reads.name: Copy(reads), head.name: Copy(head)}, False, [])
        else:
            plan = _plan_tie(checkpoint, roles, reads, head, audit, keep)
    for copy in plan.tensors.values():
        if copy.tensor.name in turned:
            plan.actions.append(
                f"{copy.tensor.name} is transposed to {size(copy.shape)}, a token in each row"
            )
    if untied is plan.tied:
        plan.actions.append(f"config.json says {CLAIM}: {str(plan.tied).lower()}")
    if not plan.actions:
        choice = '; keep="input" or keep="output" makes one matrix of the two'
        raise UserError(
            f"{source} is {audit.verdict}: nothing to mend{'' if plan.tied else choice}"
        )
    return plan


def _plan_one(checkpoint: Checkpoint, roles: Roles, keep: str | None) -> Plan:
    """Keep the one matrix, under the name of the embedding that the family's loaders look for."""
    matrix = roles.matrix
    if keep == "both":
        raise UserError(
            f"{checkpoint.source} holds one matrix, {matrix.name}: there is no head to keep beside "
            "it, and none is made up"
        )
    if roles.input is not None:
        return Plan({matrix.name: Copy(matrix)}, True, [])
    names = [name for name in checkpoint.tensors if name != matrix.name]
    if not any(re.match(r"(transformer\.)?h\.\d+\.", name) for name in names):
        raise UserError(
            f"{checkpoint.source} holds only {matrix.name}, and the name of its family's embedding "
            "is not known here: rename it yourself"
        )
    openai = any("positions_embed" in name for name in names)
    name = "tokens_embed.weight" if openai else "wte.weight"
    if any(name.startswith("transformer.") for name in names):
        name = f"transformer.{name}"
    action = f"the one matrix, {matrix.name}, is called {name}, where loaders look"
    return Plan({name: Copy(matrix)}, True, [action])


def _plan_tie(
    checkpoint: Checkpoint,
    roles: Roles,
    reads: StoredTensor,
    head: StoredTensor,
    audit: Audit,
    keep: str | None,
) -> Plan:
    """Make one of two matrices (V, D), (V', D): equal ones, or with the numbers `keep` names."""
    if not roles.fits and keep != "input":
        raise UserError(
            f"{head.name} {size(head.shape)} does not fit {reads.name} {size(reads.shape)} and "
            'cannot be its tie: keep="input" drops it'
        )
    chosen = keep or _lossless_choice(checkpoint, roles, reads, head, audit)
    kept, vocabulary = reads if chosen == "input" else head, checkpoint.vocabulary
    rows = kept.shape[0]
    if roles.extra_rows and vocabulary is not None:
        rows = min(rows, vocabulary)
    if chosen == "output" and vocabulary is not None and rows < vocabulary:
        raise UserError(
            f"{checkpoint.source}: {head.name} has {rows:,} rows for a vocabulary of "
            f"{vocabulary:,}: it scores something other than tokens, and tying to it would lose "
            'them; keep="input" drops it'
        )
    cut = _vectors_of_the_head(checkpoint, head, rows)
    if cut and not roles.fits:
        raise UserError(f"{min(cut)} belongs to {head.name}, which would be dropped")
    does = "predicts as well" if chosen == "input" else "has its numbers and predicts"
    actions = [f"{head.name} is dropped; {reads.name} {does}"]
    actions += [f"{name} is cut to {rows:,} numbers" for name in cut]
    for matrix in (reads, head):
        n_lost = matrix.shape[0] - rows
        if roles.fits and n_lost > 0:
            filled = "not looked into"
            if matrix.is_decodable:
                filled = f"{nonzero_rows(matrix, rows, rows + n_lost):,} of them not zero"
            lost = f"{rows} to {matrix.shape[0] - 1}"
            actions.append(f"the last {n_lost:,} rows of {matrix.name}, {lost}, go ({filled})")
    plan = Plan({reads.name: Copy(kept, rows), **cut}, True, actions)
    if roles.extra_rows and vocabulary is not None and rows != vocabulary:
        plan.rows = rows
        actions.append(f"config.json says vocab_size: {rows}, not {vocabulary}")
    return plan


def _lossless_choice(
    checkpoint: Checkpoint, roles: Roles, reads: StoredTensor, head: StoredTensor, audit: Audit
) -> str:
    """Return whose numbers to keep if that loses no token's row; otherwise ask."""
    comparison, extra, rows = audit.comparison, roles.extra_rows, reads.shape[0]
    if comparison is None or not comparison.equal:
        raise UserError(
            f"{checkpoint.source}: {reads.name} and {head.name} "
            f"{comparison or 'could not be compared'}: choose whose numbers stay, "
            'keep="input" or keep="output", or keep="both" to declare them untied'
        )
    if extra > 0 and checkpoint.vocabulary is not None:
        return "output" if checkpoint.vocabulary > rows else "input"
    if extra <= 0 or (head.is_decodable and not nonzero_rows(head, rows, rows + extra)):
        return "input"
    raise UserError(
        f"{checkpoint.source}: {head.name} has {extra:,} rows more than {reads.name}, they are "
        'not zero, and no config.json tells vocab_size: keep="output" keeps them, keep="input" '
        "drops them"
    )


def _vectors_of_the_head(checkpoint: Checkpoint, head: StoredTensor, rows: int) -> dict[str, Copy]:
    """Cut what has a number for each row of the head; `UserError` if that cannot be done."""
    n_rows, module = head.shape[0], head.name.rpartition(".")[0]
    places = (module, module.rpartition(".")[0]) if module else ()
    found: dict[str, Copy] = {}
    for name, tensor in checkpoint.tensors.items():
        near = name.rpartition(".")[0] in places or name.endswith("final_logits_bias")
        same = name == head.name or (len(tensor.shape) == 2 and tensor.is_view_of(head))
        if n_rows == rows or not near or same or n_rows not in tensor.shape:
            continue
        if len(tensor.shape) != 1 or n_rows < rows:
            raise UserError(
                f"{name} {size(tensor.shape)} belongs to the {n_rows:,} rows of {head.name}, "
                f"and {rows:,} are kept: cut or fill it yourself first"
            )
        found[name] = Copy(tensor, rows)
    return found


# Write it


def _check_dest(dest: Path, source: Path) -> None:
    if dest.exists() or dest.is_symlink():
        raise UserError(f"{dest} exists: a mended copy is written to a new place, never over one")
    home = source.parent if source.name.endswith(".index.json") else source
    if home.is_dir() and dest.resolve().is_relative_to(home.resolve()):
        raise UserError(f"{dest} lies inside {home}: the source is left untouched")


def _copies(checkpoint: Checkpoint, roles: Roles, plan: Plan) -> dict[str, Copy]:
    """Return what the new file holds, in the order of the old one."""
    matrices = {t.name for t in (roles.input, roles.output, *roles.aliases) if t is not None}
    copies = {name: copy for name, copy in plan.tensors.items() if name not in checkpoint.tensors}
    for name, tensor in checkpoint.tensors.items():
        if name in plan.tensors or name not in matrices:
            copies[name] = plan.tensors.get(name, Copy(tensor))
    return copies


def _write_config(path: Path, checkpoint: Checkpoint, plan: Plan) -> None:
    """Write the config with the true claim; a config of several models says it of the text's."""
    config = dict(checkpoint.config)
    for key, value in ((CLAIM, plan.tied), ("vocab_size", plan.rows)):
        inner = config.get("text_config")
        if value is None:
            continue
        if key not in config and isinstance(inner, dict) and key in inner:
            config["text_config"] = inner | {key: value}
        else:
            config[key] = value
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _beside(checkpoint: Checkpoint) -> tuple[list[Path], list[str]]:
    """Return the files that go along with the weights (tokenizer, card), and the other names."""
    path = Path(checkpoint.source)
    home = path if path.is_dir() else path.parent
    if not (path.is_dir() or (home / "config.json").is_file()):
        return [], []  # a lone file
    weights = {file.name for file in checkpoint.files} | {"config.json"}
    others = [file for file in sorted(home.iterdir()) if file.name not in weights]
    wanted = [
        file for file in others
        if file.is_file() and any(fnmatchcase(file.name, pattern) for pattern in GO_ALONG)
    ]  # fmt: skip
    return wanted, [file.name for file in others if file not in wanted]


def _audit_copy(
    directory: Path, dest: Path, plan: Plan, input_name: str | None, output_name: str | None
) -> Audit:
    """Audit what was written; a copy that is not sound never appears."""
    copy = checkpoint_of(directory)
    names = [name if name in copy.tensors else None for name in (input_name, output_name)]
    after = examine(copy, find_roles(copy, input_name=names[0], output_name=names[1]))
    wanted = "tied" if plan.tied else "untied as claimed"
    if after.verdict != wanted:
        raise CheckFailedError(
            f"{dest} was not written: the mended copy would be {after.verdict}, not {wanted}"
        )
    return replace(after, source=str(dest))

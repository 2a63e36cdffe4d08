"""Write a mended copy of a checkpoint: one matrix where one is meant, and a claim that is true.

    fix("broken-model", "mended-model", keep="input")

The source is only read. The copy is a model directory that appears whole or not at all; it is
audited before it appears.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.tie.auditing import Audit, examine
from tiedgpt.tie.candidates import Roles, find_roles
from tiedgpt.tie.explanations import megabytes
from tiedgpt.tie.repair_plan import Plan, plan_repair
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.formats.safetensors_file import write_safetensors
from tiedgpt.weights.opening import CLAIM, open_checkpoint
from tiedgpt.weights.tensor_copy import Copy
from tiedgpt.weights.tensors import printable

Keep = Literal["input", "output", "both"]
GO_ALONG = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "preprocessor*", "chat_template*", "*.md",
    "LICENSE*",
)  # fmt: skip
"""What of a model directory belongs to the model besides its weights and config."""
INSTEAD = {
    "GGUF": "mend the checkpoint that it was converted from, and convert that again",
    "ONNX": "mend the model that it was exported from, and export that again on one initializer",
    "packed": "mend the checkpoint that it was packed from, and pack that again "
    "(tiedgpt convert SOURCE DEST --to packed)",
}


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
        return {
            "source": self.source,
            "dest": self.dest,
            "actions": list(self.actions),
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "explain": self.explain,
        }


def fix(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    keep: Keep | None = None,
    input_name: str | None = None,
    output_name: str | None = None,
) -> Repair:
    """Write a mended copy of a safetensors or torch checkpoint as a new model directory.

    Equal copies become one matrix, a transposed head is put right, padding of one side is cut, and
    config.json's claim becomes what is there. Where the two matrices differ, `keep` says whose
    numbers both ends get, or "both": they stay two and the config says so. Raises `UserError` where
    a choice is missing, nothing is to be mended, `dest` exists, or the format is only read here.
    """
    if keep is not None and keep not in get_args(Keep):
        raise UserError(f"keep={keep!r} is none of {', '.join(map(repr, get_args(Keep)))}")
    dest = Path(dest)
    checkpoint = open_checkpoint(source)
    if checkpoint.format in INSTEAD:
        raise UserError(
            f"{checkpoint.source} is {checkpoint.format}, which is audited but not written here: "
            f"{INSTEAD[checkpoint.format]}"
        )
    home = _home(checkpoint)
    _check_dest(dest, Path(checkpoint.source))
    roles = find_roles(checkpoint, input_name=input_name, output_name=output_name)
    before = examine(checkpoint, input_name=input_name, output_name=output_name)
    plan = plan_repair(checkpoint, roles, before, keep)
    copies = _copies(checkpoint, roles, plan)
    n_bytes = sum(copy.n_bytes for copy in copies.values())
    for copy in copies.values():
        _ = copy.format_name  # refuses a type that cannot be written, before anything is
    beside, left = _beside(home, checkpoint)
    actions = plan.actions
    if left:
        listed = ", ".join(printable(name) for name in left[:8]) + (", ..." if left[8:] else "")
        actions += (f"not copied, since no loader needs it: {listed}",)
    if not checkpoint.config:
        actions += (f"no config.json lies beside the file: the new one holds {CLAIM} alone",)
    n_bytes += sum(file.stat().st_size for file in beside)
    require_room(dest.parent, n_bytes)
    with replacing(dest) as temporary:
        temporary.mkdir()
        write_safetensors(temporary / "model.safetensors", copies, {"format": "pt"})
        _write_config(temporary / "config.json", checkpoint, plan)
        for file in beside:
            shutil.copyfile(file, temporary / file.name)
        after = _check(temporary, dest, plan, input_name=input_name, output_name=output_name)
    return Repair(
        source=str(checkpoint.source),
        dest=str(dest),
        actions=actions,
        before=before,
        after=after,
        bytes_before=sum(
            file.stat().st_size for file in checkpoint.files if file.suffix != ".json"
        ),
        bytes_after=(dest / "model.safetensors").stat().st_size,
    )


def _home(checkpoint: Checkpoint) -> Path | None:
    """Return the model directory that the weights lie in, or None for a lone file."""
    path = Path(checkpoint.source)
    if path.is_dir():
        return path
    return path.parent if (path.parent / "config.json").is_file() else None


def _check_dest(dest: Path, source: Path) -> None:
    if dest.exists() or dest.is_symlink():
        raise UserError(f"{dest} exists: a mended copy is written to a new place, never over one")
    home = source.parent if source.name.endswith(".index.json") else source
    if home.is_dir() and dest.resolve().is_relative_to(home.resolve()):
        raise UserError(f"{dest} lies inside {home}: the source is left untouched")


def _copies(checkpoint: Checkpoint, roles: Roles, plan: Plan) -> dict[str, Copy]:
    """Return what the new file holds, in the order of the old one."""
    dropped = {tensor.name for tensor in (roles.input, roles.output, *roles.others) if tensor}
    copies: dict[str, Copy] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in dropped:
            copies |= {new: copy for new, copy in plan.matrices.items() if new == name}
        else:
            copies[name] = plan.matrices.get(name, Copy(tensor))
    return {**{new: copy for new, copy in plan.matrices.items() if new not in copies}, **copies}


def _write_config(path: Path, checkpoint: Checkpoint, plan: Plan) -> None:
    config = dict(checkpoint.config)
    inner = config.get("text_config")
    if CLAIM not in config and isinstance(inner, dict) and CLAIM in inner:
        config["text_config"] = inner | {CLAIM: plan.tied}
    else:
        config[CLAIM] = plan.tied
    if plan.rows is not None:
        if "vocab_size" in config:
            config["vocab_size"] = plan.rows
        else:  # told by the text model's part
            config["text_config"] = {**config["text_config"], "vocab_size": plan.rows}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _beside(home: Path | None, checkpoint: Checkpoint) -> tuple[list[Path], list[str]]:
    """Return what goes along with the weights (tokenizer, card), and the names of what does not."""
    if home is None:
        return [], []
    weights = {file.name for file in checkpoint.files} | {"config.json"}
    others = [file for file in sorted(home.iterdir()) if file.name not in weights]
    wanted = [
        file for file in others
        if file.is_file() and any(fnmatchcase(file.name, pattern) for pattern in GO_ALONG)
    ]  # fmt: skip
    return wanted, [file.name for file in others if file not in set(wanted)]


def _check(directory: Path, dest: Path, plan: Plan, **names: str | None) -> Audit:
    """Audit what was written; what is not sound never appears."""
    opened = open_checkpoint(directory)
    known = {key: name for key, name in names.items() if name in opened.tensors}
    after = examine(opened, **known)
    wanted = "tied" if plan.tied else "untied as claimed"
    if after.verdict != wanted:
        raise CheckFailedError(
            f"{dest} was not written: the mended copy would be {after.verdict}, not {wanted}"
        )
    return Audit(**(vars(after) | {"source": str(dest)}))

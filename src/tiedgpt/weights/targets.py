"""The formats that are written: their precisions, their places, what each can hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tiedgpt.errors import UserError
from tiedgpt.files import writing

TOLERANCES = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 5e-2, "q8_0": 5e-2, "int8": 5e-2, "int4": 0.35}
"""Root mean square of the logits' differences over that of the logits, by the precision written."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISION_OF = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Target:
    """A format that can be written."""

    precisions: tuple[str, ...]
    suffix: str = ""
    """Of a file; "": a directory is written."""
    bundled: str = ""
    """Where DEST has another suffix, the file's name in a directory with config and tokenizer."""
    holds_tokenizer: bool = False
    options: tuple[str, ...] = ()
    default: str = ""
    """The precision where none is asked for; "": the model's own, where it is one of these."""
    writer: str = ""
    """module:function in this package, of `write(model, path, *, tokenizer, precision, progress,
    **options)`; "": the module of the format's name, and `write`."""

    def is_directory(self, path: Path) -> bool:
        """Whether a directory is written at `path`."""
        return not self.suffix or (bool(self.bundled) and path.suffix != self.suffix)


TARGETS = {
    "transformers": Target(
        ("fp32", "fp16", "bf16"),
        holds_tokenizer=True,
    ),
    "gguf": Target(
        ("fp32", "fp16", "bf16", "q8_0"),
        suffix=".gguf", holds_tokenizer=True, options=("duplicate_head", "approximate_gelu"),
        writer="gguf_write:write",
    ),
    "onnx": Target(
        ("fp32", "fp16", "bf16"),
        suffix=".onnx", bundled="model.onnx", writer="writers.onnx:write_onnx",
    ),
    "nanogpt": Target(
        ("fp32", "fp16", "bf16"), suffix=".pt", options=("approximate_gelu",),
        writer="writers.nanogpt:write_nanogpt",
    ),
    "llmc": Target(("fp32", "bf16"), suffix=".bin", options=("approximate_gelu",)),
    "packed": Target(
        ("int8", "int4", "bf16", "fp32"), holds_tokenizer=True, default="int8",
        writer="packed_write:write",
    ),
}  # fmt: skip


def choose(to: str, precision: str | None, dtype: torch.dtype) -> tuple[Target, str]:
    """Return the target, and the precision: by default its own, the weights' `dtype`, or fp32."""
    if to not in TARGETS:
        raise UserError(f"{to!r} is no format that is written here; there are {', '.join(TARGETS)}")
    target = TARGETS[to]
    if precision is None:
        own = target.default or PRECISION_OF.get(dtype, "fp32")
        precision = own if own in target.precisions else "fp32"
    if precision not in target.precisions:
        others = [name for name, other in TARGETS.items() if precision in other.precisions]
        raise UserError(
            f"{to} is not written in {precision!r} here; there are {', '.join(target.precisions)}"
            + (f"; {precision} is of --to {' and '.join(others)}" if others else "")
        )
    return target, precision


def format_of(path: Path) -> str:
    """Return the format that the name of a file or directory stands for."""
    return next((to for to, t in TARGETS.items() if t.suffix == path.suffix), "transformers")


def require_place(path: Path, to: str, *, overwrite: bool = False) -> None:
    """Raise `UserError` where something is at `path` that would be lost, or it is no name."""
    if path.name in ("", ".."):
        raise UserError(f"{path} names nothing new: give DEST a name")
    with writing(path):
        directory, there = TARGETS[to].is_directory(path), path.exists()
        if directory and there and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} is there already: give a directory that is new or empty")
        if not directory and path.is_dir():
            raise UserError(f"{path} is a directory: give the name of a file")
        if not directory and there and not path.is_file():
            raise UserError(f"{path} is no file that could be replaced: give another name")
        if not directory and there and not overwrite:
            raise UserError(f"{path} is there already: give another name, or --overwrite")

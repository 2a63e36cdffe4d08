"""From any format to another, and the proof that nothing was lost on the way.

SOURCE is loaded, written to a hidden place beside DEST, opened again and compared; only what passed
is moved to DEST. In a format of the same precision every weight must come back bit for bit; in a
coarser one the logits must stay within a tolerance that is stated.
"""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tiedgpt.core.model import GPT
from tiedgpt.errors import CheckFailedError, CorruptInputError, UserError
from tiedgpt.files import remove, sync, writing
from tiedgpt.text import Tokenizer
from tiedgpt.weights.checkpoint import Checkpoint, as_gpt
from tiedgpt.weights.evidence import Evidence
from tiedgpt.weights.load import Loaded, Progress, load
from tiedgpt.weights.names import EMBEDDING, HEAD, TIEDGPT
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.save import save_model, write_description
from tiedgpt.weights.targets import DTYPES, TARGETS, TOLERANCES, Target, choose, require_place
from tiedgpt.weights.tensors import by_storage

HEADERS_AND_VOCABULARY = 16 << 20
"""Bytes beside tensors that a file of a small model may well have."""
SAMPLE = "The same matrix reads and predicts: 2 + 2 = 4, naïve café, \n\tand so on."


@dataclass(frozen=True)
class Written:
    """What was written, and how it compares."""

    path: Path
    n_bytes: int
    """Of the file, or of all files in the directory."""
    matrix_bytes: int
    """Of W in it."""
    copies: int
    """How often W, or a head's matrix of the same size, stands in it."""
    exact: bool
    """Whether every weight came back bit for bit."""
    difference: float
    """Root mean square of the logits' differences over that of the logits."""
    tolerance: float
    with_tokenizer: bool
    notes: tuple[str, ...]
    """What opening it again had to tell."""


def convert(
    loaded: Loaded,
    path: Path,
    to: str,
    *,
    tokenizer: Tokenizer | None,
    precision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Written:
    """Write a model that was loaded to `path` in the format `to`, and prove it.

    `precision` None keeps the model's own where the format has it, else takes fp32. Raises
    `UserError`, before anything is written, for what the format cannot express or where `path` is
    taken; `CheckFailedError` where what was written is not the model: then `path` is as before.
    """
    target, precision = choose(to, precision, loaded.model.wte.weight.dtype)
    require_place(path, to, overwrite=overwrite)
    for name in options:
        if name not in target.options:
            raise UserError(f"{name} is no option of {to}")
    model, name = loaded.model, path.name
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model rows for "
            f"{model.config.vocab_size:,}: they do not belong together; name another (--tokenizer)"
        )
    before = Evidence.of(model)
    hidden = path.parent / f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    _sweep(path)
    try:
        with writing(path):
            hidden.mkdir(parents=True)
            _write(model, hidden / name, to, tokenizer, precision, progress, options)
        written = _compare(before, hidden / name, target, tokenizer, precision, loaded)
        with writing(path):
            _move(hidden, path, overwrite)
    finally:
        remove(hidden)
    return Written(path, **written)


def _sweep(path: Path) -> None:
    """Remove what a conversion to the same place left that was killed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        pid = left.name.rpartition(".tmp-")[2].partition("-")[0]
        try:
            os.kill(int(pid), 0)  # raises where there is no such process
        except ProcessLookupError:
            remove(left)
        except (ValueError, OSError):  # not one of ours, or another user's
            continue


def _write(
    model: GPT,
    path: Path,
    to: str,
    tokenizer: Tokenizer | None,
    precision: str,
    progress: Progress | None,
    options: dict[str, Any],
) -> None:
    target, place = TARGETS[to], path
    directory = target.is_directory(path)
    if directory and target.bundled:
        write_description(model, path, DTYPES[precision])
        place = path / target.bundled
    if to == "transformers":
        save_model(model, path, DTYPES[precision])
    else:
        module, _, function = (target.writer or f"{to}:write").partition(":")
        writer: Callable[..., None] = getattr(import_module(f"tiedgpt.weights.{module}"), function)
        inside = None if directory else tokenizer
        writer(model, place, tokenizer=inside, precision=precision, progress=progress, **options)
    if directory and tokenizer is not None:
        tokenizer.save_pretrained(path)


def _move(hidden: Path, path: Path, overwrite: bool) -> None:
    """Put what was proven in its place, the file that names the others last."""
    made = sorted(hidden.iterdir(), key=lambda file: file.name == path.name)
    for file in made:
        place = path.parent / file.name
        if place.exists() and not place.is_dir() and not overwrite:
            raise UserError(f"{place} is there already: give another name, or --overwrite")
    for file in made:
        for part in [file, *file.rglob("*")] if file.is_dir() else [file]:
            sync(part)
        os.replace(file, path.parent / file.name)
    sync(path.parent)


def _compare(
    before: Evidence,
    path: Path,
    target: Target,
    tokenizer: Tokenizer | None,
    precision: str,
    loaded: Loaded,
) -> dict[str, Any]:
    """Open what was written; return the facts of `Written`, or raise `CheckFailedError`."""
    try:
        again = load(path)
        checkpoint = open_checkpoint(path)
        carried = target.holds_tokenizer or target.is_directory(path)
        if carried and tokenizer is not None:
            again_tokenizer, sample = Tokenizer.from_pretrained(path), _sample(tokenizer)
            if again_tokenizer.encode(sample) != tokenizer.encode(sample):
                raise CheckFailedError(f"{path.name}: its tokenizer gives other ids: not kept")
    except CorruptInputError as error:
        raise CheckFailedError(f"what was written cannot be read again: {error}") from None
    after = Evidence.of(again.model, before.ids)
    names = before.digests.keys() | after.digests.keys()  # zeros for biases that are not there
    exact = all(before.digests.get(name, b"") == after.digests.get(name, b"") for name in names)
    apart = (after.logits - before.logits).square().mean().sqrt()
    difference = float(apart / before.logits.square().mean().sqrt().clamp_min(1e-30))
    tolerance = TOLERANCES[precision]
    written = DTYPES.get(precision)  # None: quantized
    coarser = written is None or torch.promote_types(before.dtype, written) != written
    if not (exact or (coarser and difference <= tolerance)):
        raise CheckFailedError(
            f"{path.name} does not hold the model: logits differ by {difference:.2g} of their "
            f"size, {tolerance:g} is allowed; it is not kept"
        )
    copies, matrix_bytes = _copies(checkpoint)
    return {
        "n_bytes": _size(path), "matrix_bytes": matrix_bytes, "copies": copies,
        "exact": exact, "difference": difference, "tolerance": tolerance,
        "with_tokenizer": carried and tokenizer is not None,
        "notes": _notes(loaded, again),
    }  # fmt: skip


def _notes(loaded: Loaded, again: Loaded) -> tuple[str, ...]:
    """Return what opening it again had to tell, and what other tools make of it."""
    notes = [note for note in again.notes if note not in loaded.notes]
    before, after = (each.model.config.activation_function for each in (loaded, again))
    if before != after:
        notes.append(f"the model was trained with {before}; what reads this file computes {after}")
    if again.layout.endswith(TIEDGPT.name):
        notes.append("transformers has no class for this model and refuses it; tiedgpt loads it")
    return tuple(notes)


def _sample(tokenizer: Tokenizer) -> str:
    """Return a text to compare tokenizers on; of a vocabulary without its characters, tokens."""
    try:
        tokenizer.encode(SAMPLE)
        return SAMPLE
    except UserError:
        ids = [id for id, n in enumerate(tokenizer.byte_lengths().tolist()) if n][:256]
        return tokenizer.decode(ids)


def _copies(checkpoint: Checkpoint) -> tuple[int, int]:
    """Count the places of W and of matrices like it, unlisted bytes included; and W's bytes."""
    tensors = as_gpt(checkpoint).tensors
    matrices = [tensors[name].stored for name in (EMBEDDING, HEAD) if name in tensors]
    copies = len(by_storage(matrices))
    listed = sum(group[0].n_bytes for group in by_storage(checkpoint.tensors.values()))
    whole = sum(file.stat().st_size for file in checkpoint.files)
    one = matrices[0].n_bytes
    unlisted = (whole - listed) // one if one > HEADERS_AND_VOCABULARY else 0
    return copies + unlisted, one


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else path.parent.iterdir()
    return sum(file.stat().st_size for file in files if file.is_file())

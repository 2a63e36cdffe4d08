"""Convert a model to another format, and check that nothing was lost.

SOURCE is loaded, written to a hidden place beside DEST, opened again and compared; then the copy is
moved to DEST. In a format of the same precision every weight must come back bit for bit; in a
coarser one the logits must stay within a stated tolerance.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.errors import CheckFailedError, CorruptInputError, UserError
from tiedgpt.files import is_running, reading, remove, sync, write_json, writing
from tiedgpt.text import Tokenizer
from tiedgpt.weights.checkpoint import Writer
from tiedgpt.weights.formats.transformers.writer import descriptions, save_tokenizer
from tiedgpt.weights.load import Loaded, Progress, load
from tiedgpt.weights.parameters import PRECISIONS
from tiedgpt.weights.registry import suffixes, writer_named, writers
from tiedgpt.weights.source import Source, open_tokenizer

TOLERANCES = {
    "fp32": 2e-5, "fp16": 1e-2, "bf16": 5e-2, "q8_0": 5e-2, "int8": 5e-2, "int4": 0.35,
    "q5_1": 0.2, "q5_0": 0.2, "q4_1": 0.35, "q4_0": 0.35,
}  # fmt: skip
"""Root mean square of the logits' differences over that of the logits, by the precision written."""
CHAT = ("chat_template.jinja", "generation_config.json")
"""Files beside a model, with which it chats."""
SAMPLE = "The same matrix reads and predicts: 2 + 2 = 4, naïve café, \n\tand so on."
N_SEQUENCES, N_TOKENS = 2, 48
"""Shape of the ids on which logits are compared."""


@dataclass(frozen=True)
class Written:
    """Facts about a written file, and its difference from the model."""

    path: Path
    n_bytes: int
    """Size of the file, or of all files in the directory."""
    matrix_bytes: int
    """Size of W in it."""
    copies: int
    """Number of matrices over the vocabulary: W, and a head's own."""
    exact: bool
    """Whether every weight came back bit for bit."""
    difference: float
    """Root mean square of the logits' differences over that of the logits."""
    tolerance: float
    with_tokenizer: bool
    notes: tuple[str, ...]
    """Notes from opening it again."""


def format_of(path: Path) -> str:
    """Return the name of the format that DEST's suffix stands for; without one, a directory's.

    Raises `UserError` for a suffix that no format has.
    """
    suffix = "" if path.suffix[1:].isdigit() else path.suffix  # model-v1.5 is a directory
    names = [name for name, writer in writers().items() if writer.suffix == suffix]
    if names:
        return names[0]
    all_suffixes = [writer.suffix for writer in writers().values() if writer.suffix]
    matches = get_close_matches(suffix, all_suffixes, n=1)
    advice = f"did you mean {path.stem}{matches[0]}? " if matches else ""
    raise UserError(
        f"{path}: {suffix} is the suffix of no format; known are {', '.join(all_suffixes)}",
        hint=f"{advice}for a directory, leave it out or name its format (--to)",
    )


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
    """Write a loaded model to `path` in the format `to`, open it again and compare the two.

    `precision` None keeps the model's precision if the format supports it, else uses fp32. Raises
    `UserError`, before anything is written, for a model that the format cannot express or a `path`
    that exists, `CheckFailedError` if the written model differs: then `path` is unchanged.
    """
    writer = writer_named(to)
    for option in options:
        if option not in writer.options:
            raise UserError(f"{option} is no option of {to}")
    _chosen_precision(to, writer, precision, loaded.model.wte.weight.dtype)
    require_place(path, to, overwrite=overwrite)
    _require_tokenizer_fits(tokenizer, loaded.model)
    chat = _read_chat(loaded)
    if chat and "chat_template" in writer.options:
        with reading(loaded.path / CHAT[0], "chat template"):
            options["chat_template"] = chat[CHAT[0]].decode().replace("\r\n", "\n")
        options["end_ids"] = loaded.source.end_ids
    _remove_leftovers(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{path.name}.tmp-{os.getpid()}-"
        with TemporaryDirectory(prefix=prefix, dir=path.parent) as hidden:
            output = Path(hidden, path.name)
            written, _ = write_copy(
                loaded, output, to, tokenizer=tokenizer, precision=precision, progress=progress,
                **options,
            )  # fmt: skip
            for name, data in chat.items() if writer.is_directory(path) else ():
                (output / name).write_bytes(data)
            _move(Path(hidden), path, overwrite)
    return replace(written, path=path)


def _read_chat(loaded: Loaded) -> dict[str, bytes]:
    """Return the files with which a model chats, by name; {} without a chat template."""
    files = [loaded.path / name for name in CHAT]
    if not files[0].is_file():
        return {}
    with reading(loaded.path, "directory of a model"):
        return {file.name: loaded.source.read(file) for file in files if file.is_file()}


def write_copy(
    loaded: Loaded,
    path: Path,
    to: str,
    *,
    tokenizer: Tokenizer | None,
    precision: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Written, Source]:
    """Write a model to a new path and compare the copy; return the facts and the copy's source.

    Arguments and errors are those of `convert`.
    """
    model, writer = loaded.model, writer_named(to)
    _require_tokenizer_fits(tokenizer, model)
    precision = _chosen_precision(to, writer, precision, model.wte.weight.dtype)
    is_directory, target = writer.is_directory(path), path
    if is_directory and writer.bundled:
        target = path / writer.bundled
        for file, description in descriptions(model, PRECISIONS[precision]).items():
            write_json(path / file, description)
    inside = None if is_directory else tokenizer
    notes = writer.write(
        model, target, precision=precision, tokenizer=inside, progress=progress, **options
    )
    if is_directory and tokenizer is not None:
        save_tokenizer(tokenizer, model.config, path)
    stored = tokenizer if writer.holds_tokenizer or is_directory else None
    copy, precisions = Source(path), (precision, options.get("w_precision") or precision)
    written = _compare(loaded, copy, stored, precisions)
    return replace(written, notes=(*written.notes, *(notes or ()))), copy


def _require_tokenizer_fits(tokenizer: Tokenizer | None, model: GPT) -> None:
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model rows for "
            f"{model.config.vocab_size:,}: they do not belong together",
            hint="name another (--tokenizer)",
        )


def _chosen_precision(to: str, writer: Writer, precision: str | None, dtype: torch.dtype) -> str:
    """Return the precision to write: the one asked for, the weights' own, or fp32."""
    if precision is None:
        current = [name for name, torch_dtype in PRECISIONS.items() if torch_dtype == dtype]
        names = [writer.default, *current, "fp32"]
        return next(name for name in names if name in writer.precisions)
    if precision not in writer.precisions:
        others = [name for name, other in writers().items() if precision in other.precisions]
        raise UserError(
            f"{to} is not written in {precision!r} here; there are {', '.join(writer.precisions)}"
            + (f"; {precision} is of --to {' and '.join(others)}" if others else "")
        )
    return precision


def require_place(path: Path, to: str, *, overwrite: bool) -> None:
    """Raise `UserError` if `path` exists and would be lost, or has no name."""
    if path.name in ("", ".."):
        raise UserError(f"{path} names nothing new", hint="give DEST a name")
    if not writer_named(to).is_directory(path):
        _require_file_place(path, overwrite=overwrite)
        return
    if path.suffix in suffixes():
        raise UserError(
            f"{to} writes a directory, and {path} has a file's suffix", hint="leave it out"
        )
    with writing(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(
                f"{path} is there already", hint="give a directory that is new or empty"
            )


def _require_file_place(path: Path, *, overwrite: bool) -> None:
    with writing(path):
        if path.exists() and not path.is_file():
            raise UserError(
                f"{path} is no file that could be replaced", hint="give the name of a file"
            )
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already", hint="give another name, or --overwrite")


def _remove_leftovers(path: Path) -> None:
    """Remove the files of a killed conversion to the same place."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        pid = leftover.name.rpartition(".tmp-")[2].partition("-")[0]
        if pid.isdecimal() and not is_running(int(pid)):
            remove(leftover)


def _move(hidden: Path, path: Path, overwrite: bool) -> None:
    """Put the checked files in their place, the file that names the others last."""
    files = sorted(hidden.iterdir(), key=lambda file: file.name == path.name)
    for file in files:
        if file.name != path.name:
            _require_file_place(path.parent / file.name, overwrite=overwrite)
    for file in files:
        for item in [file, *file.rglob("*")]:
            sync(item)
        os.replace(file, path.parent / file.name)
    sync(path.parent)


def _compare(
    loaded: Loaded, copy: Source, tokenizer: Tokenizer | None, precisions: tuple[str, ...]
) -> Written:
    """Open the written model again, and raise `CheckFailedError` if it is another one.

    The coarsest of its precisions determines the tolerance.
    """
    try:
        again, path = load(copy), copy.path
        if tokenizer is not None:
            again_tokenizer, sample = open_tokenizer(copy), _sample(tokenizer)
            if again_tokenizer.encode(sample) != tokenizer.encode(sample):
                raise CheckFailedError(f"{path.name}: its tokenizer gives other ids: not kept")
    except CorruptInputError as error:
        raise CheckFailedError(f"what was written cannot be read again: {error}") from None
    parameters, copied = (dict(x.model.named_parameters()) for x in (loaded, again))
    names = parameters.keys() | copied.keys()
    exact = all(are_equal(parameters.get(name), copied.get(name)) for name in names)
    logits = _logits(loaded.model)
    apart = (_logits(again.model) - logits).square().mean().sqrt()
    difference = float(apart / logits.square().mean().sqrt().clamp_min(1e-30))
    tolerance = max(TOLERANCES[precision] for precision in precisions)
    written = [PRECISIONS.get(precision) for precision in precisions]  # None: quantized
    dtype = loaded.model.wte.weight.dtype
    coarser = any(new is None or torch.promote_types(dtype, new) != new for new in written)
    if not (exact or (coarser and difference <= tolerance)):
        raise CheckFailedError(
            f"{path.name} does not hold the model: logits differ by {difference:.2g} of their "
            f"size, {tolerance:g} is allowed; it is not kept"
        )
    roles = copy.decide().roles
    files = path.rglob("*") if path.is_dir() else path.parent.iterdir()
    return Written(
        path,
        n_bytes=sum(file.stat().st_size for file in files if file.is_file()),
        matrix_bytes=roles.matrix.n_bytes,
        copies=1 if roles.pair is None or roles.is_shared else 2,
        exact=exact,
        difference=difference,
        tolerance=tolerance,
        with_tokenizer=tokenizer is not None,
        notes=_notes(loaded, again),
    )


def are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two parameters are equal bit for bit; a missing one counts as zeros."""
    bits = [
        parameter.detach()
        .to("cpu", torch.promote_types(parameter.dtype, torch.float32))  # 16 bits fit exactly
        .contiguous()
        .view(torch.uint8)
        for parameter in (a, b)
        if parameter is not None
    ]
    return torch.equal(*bits) if len(bits) > 1 else not bits[0].any()


def _logits(model: GPT) -> Tensor:
    """Return a model's logits on some ids, on the CPU, in fp32 or its own wider type."""
    config, dtype = model.config, model.wte.weight.dtype
    generator = torch.Generator().manual_seed(0)
    shape = (N_SEQUENCES, min(N_TOKENS, config.n_positions))
    ids = torch.randint(config.vocab_size, shape, generator=generator, device="cpu")
    try:
        with torch.inference_mode():
            wide = model.to(torch.promote_types(dtype, torch.float32))
            return wide(ids.to(wide.wte.weight.device)).cpu()
    finally:
        model.to(dtype)  # exact: every value came from this type


def _notes(loaded: Loaded, again: Loaded) -> tuple[str, ...]:
    """Return notes on opening it again, and on how other tools compute it."""
    notes = [note for note in again.notes if note not in loaded.notes]
    before, after = (x.model.config.activation_function for x in (loaded, again))
    if before != after:
        notes.append(f"the model was trained with {before}; what reads this file computes {after}")
    return tuple(notes)


def _sample(tokenizer: Tokenizer) -> str:
    """Return a text to compare tokenizers on; of a vocabulary without its characters, tokens."""
    try:
        tokenizer.encode(SAMPLE)
        return SAMPLE
    except UserError:
        return tokenizer.decode(tokenizer.byte_lengths().nonzero()[0][:256].tolist())

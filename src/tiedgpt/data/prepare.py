"""Texts of any size as token shards, in units that any number of processes encode.

    prepare_data(preparation, DIR)  begins in DIR or goes on there; preparation.py divides the texts
    encode_unit(DIR, 17)            makes DIR/000017/, with shards and counts, by one rename

    DIR/tokenizer/, prepare.json     written first: what a unit is, and how it is encoded
    DIR/000000/, DIR/000001/, ...    the units; one that is there is complete
    DIR/manifest.json                written last: sizes and sha256 of everything

The bytes of a unit are the same whoever encodes it, in whichever order, before or after a kill. A
worker holds a document in memory at a time, and never a unit.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tiedgpt.data.corpus import FileCorpus
from tiedgpt.data.encode import (
    MANIFEST,
    Counts,
    EncodedCorpus,
    open_encoded,
    require_both_sides,
    write_shards,
)
from tiedgpt.data.preparation import Plan, Preparation
from tiedgpt.data.shards import require_vocabulary
from tiedgpt.data.split import SIDES
from tiedgpt.errors import CheckFailedError, TiedGPTError, UserError
from tiedgpt.files import (
    PREPARE,
    lock_file,
    read_json,
    remove,
    remove_leftovers,
    replacing,
    write_json,
    writing,
)

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

TOKENIZER, UNIT, LOCK = "tokenizer", "unit.json", ".lock"
TOKENIZER_CHARACTERS = 200_000_000
"""A vocabulary is learned from this much text; more changes it little and takes long."""
VOCABULARY = 8192
"""The size of a vocabulary that is learned, unless another is asked for."""
Encode = Callable[[Path, Sequence[int]], Iterator[int]]
"""Encodes units of a directory by number, and yields the number of each as it is done."""


def prepare_data(
    preparation: Preparation,
    directory: str | Path,
    tokenizer: Tokenizer | str = "bpe",
    *,
    vocab_size: int = VOCABULARY,
    encode: Encode | None = None,
    part: tuple[int, int] = (1, 1),
    progress: Callable[[int, int], None] | None = None,
) -> EncodedCorpus | None:
    """Encode files into a directory, or go on there; return what it holds once it is complete.

    The tokenizer is one, or "bpe" or "char" to make it of the text. `encode` is how units are
    encoded: `in_processes(4)`, `on_ray("auto")`; else here, one by one. With `part` (i, n) it
    is every n-th unit only, from the i-th: other processes encode the others, and the last to end
    completes the directory. `progress` is called with the bytes of files done, and in all.

    Raises:
        UserError: the directory was begun with other files or options, or is another's; or as
            `documents` raises.
        CorruptInputError: a file is damaged, or changed while it was read.
        NoRoomError: the disk is full; what is done stays.
    """
    directory, (index, n_parts) = Path(directory), part
    with _lock(directory, wait=n_parts > 1) as lock:
        if (directory / PREPARE).exists():
            plan = preparation.open_plan(directory, describe_tokenizer(tokenizer, vocab_size))
        else:
            plan = _begin(preparation, directory, tokenizer, vocab_size)
        if n_parts > 1:  # the units are independent; only beginning is not
            lock.close()
        own = range(index - 1, len(plan.units), n_parts)
        missing = [number for number in own if not is_done(directory, number)]
        total = sum(plan.units[number].n_bytes for number in own)
        done = total - sum(plan.units[number].n_bytes for number in missing)
        if progress is not None:
            progress(done, total)
        for number in (encode or encode_here)(directory, missing):
            done += plan.units[number].n_bytes
            if progress is not None:
                progress(done, total)
        if not all(is_done(directory, number) for number in range(len(plan.units))):
            return None
        preparation.require_same_sources()
        if n_parts == 1:
            return _finish(directory, plan, preparation)
    with _lock(directory, wait=True):  # several parts may have ended at once
        return _finish(directory, plan, preparation)


@contextmanager
def _lock(directory: Path, *, wait: bool) -> Iterator[IO[str]]:
    """Keep others out of a directory, which is made, while the block runs or the lock is open."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir() if ".tmp-" not in path.name}
        if PREPARE not in names and names - {LOCK, TOKENIZER}:
            raise UserError(f"{directory} is not empty", hint="give --out a new directory")
        lock = (directory / LOCK).open("a")
    with lock:
        if not lock_file(lock, wait=wait):
            raise UserError(f"{directory} is in use by another process", hint="wait for it")
        yield lock


def _begin(
    preparation: Preparation, directory: Path, tokenizer: Tokenizer | str, vocab_size: int
) -> Plan:
    """Write the tokenizer and the plan of a directory, and return the plan."""
    from tiedgpt.text import Tokenizer

    description = describe_tokenizer(tokenizer, vocab_size)
    if tokenizer == "char":
        tokenizer = Tokenizer.characters(preparation.texts())
    elif isinstance(tokenizer, str):
        tokenizer = Tokenizer.train(preparation.sample(TOKENIZER_CHARACTERS), vocab_size)
    require_vocabulary(len(tokenizer))
    remove(directory / TOKENIZER)  # what a kill left of it
    tokenizer.save_pretrained(directory / TOKENIZER)
    plan = replace(preparation.plan, tokenizer=description)
    write_json(directory / PREPARE, asdict(plan))
    return plan


def describe_tokenizer(tokenizer: Tokenizer | str, vocab_size: int = VOCABULARY) -> str:
    """Return what tells a tokenizer, or one that is to be made, from others."""
    if isinstance(tokenizer, str):
        return f"bpe of {vocab_size:,}" if tokenizer == "bpe" else tokenizer
    return f"that with the sha256 {hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]}"


def encode_here(directory: Path, numbers: Sequence[int]) -> Iterator[int]:
    """Encode units of a directory in this process; yield the number of each that is done."""
    for number in numbers:
        encode_unit(directory, number)
        yield number


def encode_unit(directory: str | Path, number: int) -> None:
    """Encode one unit of a directory that was begun, unless that is done.

    Raises as `prepare_data`; then nothing of the unit is left.
    """
    place = _unit_path(Path(directory), number)
    if is_done(Path(directory), number):
        return
    for path in (place, *place.parent.glob(f".{place.name}.tmp-*")):
        remove(path)
    mtime_ns = os.stat(Path(directory, PREPARE)).st_mtime_ns
    plan, tokenizer = _read_plan_and_tokenizer(directory, mtime_ns)
    unit = plan.units[number]
    corpus = plan.corpus(unit)
    with replacing(place) as temporary:
        temporary.mkdir()
        counts = write_shards(plan.split(unit, corpus), tokenizer, temporary)
        record: dict[str, Any] = {side: asdict(counts[side]) for side in SIDES}
        record["files"] = {path.name: _identify(path) for path in sorted(temporary.iterdir())}
        record["remarks"] = corpus.remarks()
        write_json(temporary / UNIT, record)


@functools.lru_cache(1)
def _read_plan_and_tokenizer(directory: str | Path, mtime_ns: int) -> tuple[Plan, Tokenizer]:
    """Return what encoding needs; it is read once, unless the plan's file changes."""
    from tiedgpt.text import Tokenizer

    return Plan.read(Path(directory)), Tokenizer.from_pretrained(Path(directory) / TOKENIZER)


def _unit_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}"


def _identify(path: Path) -> tuple[int, str]:
    """Return a file's size and its sha256."""
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def is_done(directory: Path, number: int) -> bool:
    """Whether a unit of a directory is there, with files of the sizes that they were written in."""
    place = _unit_path(directory, number)
    try:
        files = read_json(place / UNIT)["files"]
        return all((place / name).stat().st_size == size for name, (size, _) in files.items())
    except (TiedGPTError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return False


def _finish(directory: Path, plan: Plan, preparation: Preparation) -> EncodedCorpus:
    """Write the manifest of a directory whose units are all there."""
    counts = dict.fromkeys(SIDES, Counts())
    tokenizer = sorted((directory / TOKENIZER).iterdir())
    files = {f"{TOKENIZER}/{path.name}": _identify(path) for path in tokenizer}
    remarks = FileCorpus("")
    for each in preparation.remarks:
        remarks.add_remarks(each)
    for number in range(len(plan.units)):
        place = _unit_path(directory, number)
        record = read_json(place / UNIT)
        counts = {side: counts[side] + Counts(**record[side]) for side in SIDES}
        files |= {f"{place.name}/{name}": identity for name, identity in record["files"].items()}
        remarks.add_remarks(record["remarks"])
    require_both_sides(counts)
    manifest: dict[str, Any] = {side: asdict(counts[side]) for side in SIDES}
    manifest |= {"reading": plan.reading, "tokenizer": plan.tokenizer}
    manifest["sources"] = [source.identity for source in plan.sources]
    write_json(directory / MANIFEST, manifest | {"files": files, "notes": remarks.notes()})
    remove_leftovers(directory)
    return open_encoded(directory)


def require_complete(directory: Path) -> None:
    """Raise `UserError` for a directory that has no manifest yet."""
    if not (directory / MANIFEST).exists():
        raise UserError(f"{directory} is not complete", hint="`tiedgpt data prepare` goes on there")


def read_notes(directory: str | Path) -> list[str]:
    """Return what is worth telling of the texts in a complete directory."""
    return list(read_json(Path(directory) / MANIFEST)["notes"])


def verify_data(
    directory: str | Path, progress: Callable[[int, int], None] | None = None
) -> EncodedCorpus:
    """Read every file of a complete directory again, and compare it with the manifest.

    `progress` is called with the bytes done, and in all. Raises `CheckFailedError` where a file is
    missing or has changed, `UserError` where the directory is not complete.
    """
    directory = Path(directory)
    require_complete(directory)
    listed = read_json(directory / MANIFEST)["files"].items()
    files = {name: (size, sha256) for name, (size, sha256) in listed}
    wrong, done, total = [], 0, sum(size for size, _ in files.values())
    for name, identity in files.items():
        path = directory / name
        if not path.is_file() or _identify(path) != identity:
            wrong.append(name)
        done += identity[0]
        if progress is not None:
            progress(done, total)
    if wrong:
        units = sorted({name.partition("/")[0] for name in wrong})
        raise CheckFailedError(
            f"{directory}: {len(wrong):,} of {len(files):,} files are missing or have changed: "
            f"{', '.join(wrong[:3])}{', ...' * (len(wrong) > 3)}",
            hint=f"delete {', '.join(units[:3])}{', ...' * (len(units) > 3)} in it, and give the "
            "command that prepared it again",
        )
    return open_encoded(directory)

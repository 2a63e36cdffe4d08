"""Encode texts of any size as token shards, in parts, by any number of processes.

    plan = plan_preparation(["texts"])     the sources, and the parts that they are divided into
    prepare_data(plan, DIR, workers=8)     encodes the parts that are not in DIR yet

    DIR/prepared.json       written first: the sources and the options
    DIR/tokenizer/
    DIR/000000/, ...        the parts, each made by one rename: shards and part.json
    DIR/manifest.json       written last: counts, and size and sha256 of every file

The bytes of a part depend on the plan and the tokenizer alone. A worker holds one document in
memory at a time. The JSON files contain the sha256 of their own content.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from tiedgpt.data.corpus import FileCorpus, documents
from tiedgpt.data.encode import (
    SIDES,
    TARGET_SHARE,
    Counts,
    EncodedCorpus,
    Side,
    Split,
    identify,
    open_encoded,
    plan_split,
    read_sealed,
    write_manifest,
    write_sealed,
    write_shards,
)
from tiedgpt.data.encodings import PEEK_BYTES, has_lines
from tiedgpt.data.readers import (
    DECOMPRESSORS,
    DELIMITERS,
    PARQUET,
    Section,
    count_row_groups,
    ending,
    has_records,
)
from tiedgpt.data.remarks import Remarks
from tiedgpt.data.shards import require_vocabulary
from tiedgpt.errors import (
    CheckFailedError,
    CorruptInputError,
    NoRoomError,
    TiedGPTError,
    UserError,
)
from tiedgpt.files import PREPARED, list_some, remove, remove_leftovers, replacing, writing
from tiedgpt.runtime import exhaust
from tiedgpt.signatures import checked

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

TOKENIZER, RECORD = "tokenizer", "part.json"
OWN_NAMES = re.compile(r"\d{6,}|tokenizer|manifest\.json|prepared\.json|\..*\.tmp-.*")
"""Names of the files and directories in a prepared directory."""
TOKENIZER_CHARACTERS = 200_000_000
"""Characters of text that a vocabulary is trained on; more takes long and changes it little."""
VOCAB_SIZE = 8192
"""Default size of a vocabulary that is trained."""
LARGE_BYTES = 64_000_000
"""Size from which a text is split by a threshold of digests, and long documents are cut."""
PARTS, MIN_PART_BYTES, MAX_PART_BYTES = 32, 1 << 16, 256 << 20
"""Number of parts to aim at, and the size of the smallest and the largest part."""
HELD_OUT_BYTES = 64_000_000
"""Maximum size of the validation side of a large text."""
Progress = Callable[[str, int, int], None]
"""Receives the stage (tokenizer, merging, encoding, verifying), the bytes done and their total."""


def _ignore(stage: str, done: int, total: int) -> None:
    """Show no progress."""


class Source(NamedTuple):
    """A file, or a data set of the hub. It has changed if any field has."""

    name: str
    size: int
    mtime_ns: int
    side: Side


class InputPart(NamedTuple):
    """Some files, or a section of a large one: the work of one process."""

    side: Side
    corpus: FileCorpus
    rules: Split
    """The split of all parts, without their documents."""
    n_bytes: int

    def open(self) -> tuple[FileCorpus, Split]:
        """Return the documents with new remarks, and the same documents with their sides."""
        corpus, validation = replace(self.corpus, remarks=Remarks()), self.rules.validation
        if self.side == "train":
            return corpus, replace(self.rules, corpus=corpus, validation=validation)
        return corpus, replace(self.rules, corpus=(), validation=corpus)


@dataclass(frozen=True)
class Preparation:
    """The sources of a preparation, and the parts that they are divided into."""

    data: dict[Side, Sequence[str]]
    reading: dict[str, Any]
    """The options of `documents`."""
    sources: list[Source]
    parts: list[InputPart]
    n_bytes: int
    """Estimated size of the training text."""
    remarks: Remarks
    """Remarks on the names of the files; those on their content belong to the parts."""
    notes: tuple[str, ...] = ()

    def facts(self, tokenizer: str) -> dict[str, Any]:
        """Return everything that the bytes of the parts depend on, as JSON has it."""
        facts = {"reading": self.reading, "tokenizer": tokenizer, "parts": len(self.parts)}
        return {**facts, "sources": [[*source] for source in self.sources]}

    def sample(self, characters: int, progress: Progress = _ignore) -> Iterator[str]:
        """Yield training texts from all parts, at most `characters` together."""
        parts = [piece for piece in self.parts if piece.side == "train"]
        total = min(characters, self.n_bytes)
        for number, piece in enumerate(parts, 1):
            rest = characters // len(parts)
            for side, document in piece.open()[1]:
                if side == "train":
                    yield document.text[:rest]
                    rest -= len(document.text)
                if rest <= 0:
                    break
            progress("tokenizer", total * number // len(parts), total)
        progress("merging", total, total)

    def texts(self) -> Iterator[str]:
        """Yield all texts of both sides."""
        for piece in self.parts:
            yield from (document.text for document in piece.open()[0])


@checked
def plan_preparation(
    data: Sequence[str],
    *,
    val: str | None = None,
    text_field: str = "text",
    encoding: str = "auto",
    quoting: bool = True,
    keep_end_of_text: bool = False,
) -> Preparation:
    """Divide files into parts, and decide how they are split; the options are `documents`'s.

    Texts of less than `LARGE_BYTES` are read once to split them exactly. Raises `UserError` if a
    source is missing or is not a regular file.
    """
    reading: dict[str, Any] = {
        "text_field": text_field,
        "encoding": encoding,
        "keep_end_of_text": keep_end_of_text,
        **({} if quoting else {"quoting": False}),  # a run's digest of its data
    }
    names: dict[Side, Sequence[str]] = {"train": data}
    if val is not None:
        names["val"] = [val]
    corpora, sources = _open(names, reading)
    remarks = Remarks()
    for corpus in corpora.values():
        remarks.add(corpus.remarks.to_json())
    n_bytes = corpora["train"].estimate_bytes()
    is_large = n_bytes >= LARGE_BYTES
    corpora = {side: replace(corpus, in_parts=is_large) for side, corpus in corpora.items()}
    share = min(TARGET_SHARE, HELD_OUT_BYTES / n_bytes) if is_large else None
    split = plan_split(corpora["train"], corpora.get("val"), share=share)
    if is_large and val is not None:  # equal documents are not searched, only equal files
        validation = {*map(os.path.realpath, corpora["val"].paths)}
        equal = [path for path in corpora["train"].paths if os.path.realpath(path) in validation]
        split = replace(split, left_out=(*equal,))
    target = min(MAX_PART_BYTES, max(MIN_PART_BYTES, sum(s.size for s in sources) // PARTS))
    rules = replace(split, corpus=(), validation=None if val is None else (), left_out=())
    parts = []
    for side, corpus in corpora.items():
        sizes = {source.name: source.size for source in sources if source.side == side}
        for piece, size in _divide(corpus, sizes, target):
            parts.append(InputPart(side, piece, rules, size))
    return Preparation(names, reading, sources, parts, n_bytes, remarks, tuple(split.notes()))


def _open(
    names: Mapping[Side, Sequence[str]], reading: dict[str, Any]
) -> tuple[dict[Side, FileCorpus], list[Source]]:
    """Return the documents of each side, and their sources; raise `UserError` for a pipe."""
    corpora = {side: documents(sources, **reading) for side, sources in names.items()}
    sources = []
    for side, corpus in corpora.items():
        for path in corpus.paths:
            if path in corpus.hub:
                sources.append(Source(path, corpus.hub[path].n_bytes, 0, side))
            elif not os.path.isfile(path):
                name = "standard input" if path == "-" else path
                raise UserError(f"{name} is no file", hint="write what is to be prepared to one")
            elif has_records(path) or corpus.is_text(path):
                status = os.stat(path)
                sources.append(Source(path, status.st_size, status.st_mtime_ns, side))
    return corpora, sources


def _divide(
    corpus: FileCorpus, sizes: dict[str, int], target: int
) -> Iterator[tuple[FileCorpus, int]]:
    """Yield consecutive small files together, sections of large ones, and their size."""
    paths, n_bytes = list[str](), 0
    for path, size in sizes.items():
        sections = _list_sections(path, size, corpus, target)
        if paths and (sections or n_bytes + size > target):
            yield corpus.select(paths), n_bytes
            paths, n_bytes = [], 0
        for section in sections:
            yield corpus.select([path], section), size // len(sections)
        if not sections:
            paths.append(path)
            n_bytes += size
    if paths:
        yield corpus.select(paths), n_bytes


def _list_sections(path: str, size: int, corpus: FileCorpus, target: int) -> list[Section]:
    """Return the sections that a file is divided into; none if it is read whole."""
    if path in corpus.hub:
        n_shards = corpus.hub[path].count_shards()
        return [(index, n_shards) for index in range(n_shards)]
    n_sections = -(-size // target)
    is_stream = PurePath(path).suffix.lower() in DECOMPRESSORS or ending(path) in DELIMITERS
    if n_sections < 2 or is_stream:
        return []
    with open(path, "rb") as file:
        if ending(path) == PARQUET:
            size = count_row_groups(file, path)
        elif not (corpus.in_parts or has_records(path)):
            return []
        elif not has_lines(file.read(PEEK_BYTES), corpus.encoding):
            return []
    n_sections = min(n_sections, size)
    cuts = [number * size // n_sections for number in range(n_sections + 1)]
    return [*pairwise(cuts)] if n_sections > 1 else []


@checked
def prepare_data(
    plan: Preparation,
    directory: str | Path,
    tokenizer: Tokenizer | str = "bpe",
    *,
    vocab_size: int = VOCAB_SIZE,
    workers: int = 1,
    ray: str | None = None,
    task: tuple[int, int] = (1, 1),
    progress: Progress | None = None,
) -> EncodedCorpus | None:
    """Encode the missing parts of a directory; return the corpus if the directory is complete.

    `tokenizer` "bpe" or "char" trains one on the text. `workers` is the number of processes; `ray`
    the address of a Ray cluster that sees the files ("auto", or "local" to start one). `task`
    (i, n) selects every n-th part from the i-th. Other tasks encode the other parts, and the last
    task completes the directory.

    Raises:
        UserError: the directory was begun with other files or options, or holds something else.
        CorruptInputError: a file is damaged, or changed while it was read.
        NoRoomError: the disk is full, or a process was killed; the same command continues.
    """
    show = progress or _ignore
    steps = prepare_parts(
        plan, Path(directory), tokenizer, vocab_size, workers=workers, ray=ray, task=task,
        progress=show,
    )  # fmt: skip
    return exhaust(steps, lambda done: show("encoding", *done))


def prepare_parts(
    plan: Preparation,
    directory: Path,
    tokenizer: Tokenizer | str,
    vocab_size: int = VOCAB_SIZE,
    *,
    workers: int,
    ray: str | None = None,
    task: tuple[int, int] = (1, 1),
    progress: Progress = _ignore,
) -> Generator[tuple[int, int], None, EncodedCorpus | None]:
    """Do what `prepare_data` does; yield (encoded bytes, their total) after each part.

    `progress` shows the training of a tokenizer.
    """
    index, n_parts = task
    facts = plan.facts(describe_tokenizer(tokenizer, vocab_size))
    _begin(directory, facts)
    if n_parts == 1:
        remove_leftovers(directory)
    _write_tokenizer(plan, directory, tokenizer, vocab_size, progress)
    files = [identify(path) for path in sorted((directory / TOKENIZER).iterdir())]
    identity = hashlib.sha256(json.dumps([facts, files]).encode()).hexdigest()
    numbers = range(index - 1, len(plan.parts), n_parts)
    missing = [number for number in numbers if _read_part(directory, number, identity) is None]
    total = sum(plan.parts[number].n_bytes for number in numbers)
    done = total - sum(plan.parts[number].n_bytes for number in missing)
    tasks = [(os.getcwd(), directory, number, plan.parts[number], identity) for number in missing]
    yield done, total
    for number in _run(tasks, workers, ray):
        done += plan.parts[number].n_bytes
        yield done, total
    pins = plan.remarks.pins
    again = {side: [pins.get(name, name) for name in names] for side, names in plan.data.items()}
    if problem := _find_change(plan.sources, _open(again, plan.reading)[1]):
        raise CorruptInputError(
            f"{problem} while it was read", hint="prepare the data in a new directory"
        )
    records = [_read_part(directory, number, identity) for number in range(len(plan.parts))]
    if None in records:
        return None
    return _finish(directory, plan, [record for record in records if record is not None])


def describe_tokenizer(tokenizer: Tokenizer | str, vocab_size: int = VOCAB_SIZE) -> str:
    """Return words that distinguish a tokenizer, or one to be trained, from others."""
    if isinstance(tokenizer, str):
        return f"bpe of {vocab_size:,}" if tokenizer == "bpe" else tokenizer
    return f"that with the sha256 {hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]}"


def is_prepared(sources: Iterable[str]) -> bool:
    """Return whether one of the sources is a prepared directory."""
    return any((Path(source) / PREPARED).is_file() for source in sources)


def is_begun(directory: Path, plan: Preparation, tokenizer: Tokenizer) -> bool:
    """Return whether a directory was begun with this plan and this tokenizer."""
    try:
        return read_sealed(directory / PREPARED) == plan.facts(describe_tokenizer(tokenizer))
    except TiedGPTError:
        return False


def _begin(directory: Path, facts: dict[str, Any]) -> None:
    """Write the facts of a preparation; raise `UserError` if the directory has others."""
    path = directory / PREPARED
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        names = [name for name in os.listdir(directory) if not OWN_NAMES.fullmatch(name)]
    if not path.exists():
        if names:
            raise UserError(f"{directory} is not empty", hint="give --out a new directory")
        write_sealed(path, facts)
    recorded = read_sealed(path)
    then, now = (
        {"quoting": True, **record["reading"], "tokenizer": record["tokenizer"]}
        for record in (recorded, facts)
    )
    for name in now:
        if then.get(name) != now[name]:
            raise UserError(
                f"is {now[name]}, and {directory} was begun with {then.get(name)}",
                hint="give another --out",
                option=name,
            )
    if recorded != facts:
        problem = _find_change(recorded["sources"], facts["sources"]) or "the division changed"
        raise UserError(
            f"{problem} since {directory} was begun", hint="prepare the data in a new directory"
        )


def _find_change(then: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> str:
    """Return in words how two lists of sources differ; "" if they do not."""
    before, after = ({(s[0], s[3]): [*s] for s in sources} for sources in (then, now))
    for key in [*before, *after]:
        if before.get(key) != after.get(key):
            verb = "is new" if key not in before else "changed" if key in after else "is gone"
            return f"{key[0]} {verb}"
    return "" if [*before] == [*after] else "the order of the files changed"


def _write_tokenizer(
    plan: Preparation,
    directory: Path,
    tokenizer: Tokenizer | str,
    vocab_size: int,
    progress: Progress,
) -> None:
    """Train or copy the tokenizer of a directory if it is not there."""
    from tiedgpt.text import Tokenizer

    output = directory / TOKENIZER
    if not output.is_dir():
        if tokenizer == "char":
            tokenizer = Tokenizer.characters(plan.texts())
        elif isinstance(tokenizer, str):
            tokenizer = Tokenizer.train(plan.sample(TOKENIZER_CHARACTERS, progress), vocab_size)
        require_vocabulary(len(tokenizer))
        try:
            with replacing(output) as temporary:
                tokenizer.save_pretrained(temporary)
        except UserError:
            if not output.is_dir():  # another task of an array may have been first
                raise


def _run(tasks: Sequence[tuple[Any, ...]], workers: int, ray: str | None) -> Iterator[int]:
    """Encode the parts, and yield their numbers in the order of completion."""
    if ray is None and min(workers, len(tasks)) < 2:
        yield from (_encode_part(*task) for task in tasks)
        return
    from joblib import Parallel, delayed, parallel_config  # 5 MB that one process does not need

    if ray is not None:
        try:
            import ray as cluster
            from ray.util.joblib import register_ray

            cluster.init(ray, ignore_reinit_error=True, log_to_driver=False)
        except ImportError:
            hint = "pip install 'tiedgpt[ray]'"
            raise UserError("--ray needs the package ray", hint=hint) from None
        except (ConnectionError, ValueError, RuntimeError) as error:
            hint = "`ray start` starts a cluster"
            raise UserError(f"--ray {ray}: {error}", hint=hint) from None
        register_ray()
        with parallel_config(backend="ray"):
            yield from Parallel(n_jobs=-1, batch_size=1)(delayed(_encode_part)(*t) for t in tasks)
        return
    pool = Parallel(min(workers, len(tasks)), batch_size=1, return_as="generator_unordered")
    try:
        yield from pool(delayed(_encode_part)(*task) for task in tasks)
    except BrokenProcessPool:
        raise NoRoomError(
            "a process that encodes was killed, perhaps for the memory that it took",
            hint="the same command continues; give fewer --workers",
        ) from None


def _encode_part(cwd: str, directory: Path, number: int, piece: InputPart, identity: str) -> int:
    """Encode a part of a directory; return its number. An exception leaves nothing behind."""
    os.chdir(cwd)  # which a node of a cluster does not share
    output = directory / f"{number:06d}"
    if _read_part(directory, number, identity) is not None:
        return number
    remove(output)
    try:
        with replacing(output) as temporary:
            temporary.mkdir()
            corpus, split = piece.open()
            tokenizer = _load_tokenizer(directory, identity)
            counts, corpus.remarks.special_tokens = exhaust(
                write_shards(split, tokenizer, temporary)
            )
            files = {path.name: identify(path) for path in sorted(temporary.iterdir())}
            record = {"identity": identity, "counts": {s: asdict(counts[s]) for s in SIDES}}
            record |= {"files": files, "remarks": corpus.remarks.to_json()}
            write_sealed(temporary / RECORD, record)
    except UserError:
        if _read_part(directory, number, identity) is None:  # else another process was first
            raise
    return number


@functools.lru_cache(1)
def _load_tokenizer(directory: Path, identity: str) -> Tokenizer:
    from tiedgpt.text import Tokenizer

    return Tokenizer.from_pretrained(directory / TOKENIZER)


def _read_part(directory: Path, number: int, identity: str) -> dict[str, Any] | None:
    """Return the record of a part whose files are all there; None for any other."""
    output = directory / f"{number:06d}"
    try:
        record = read_sealed(output / RECORD)
        sizes = {output / name: size for name, (size, _) in record["files"].items()}
        is_there = all(path.stat().st_size == size for path, size in sizes.items())
    except (TiedGPTError, OSError):
        return None
    return record if is_there and record["identity"] == identity else None


def _finish(directory: Path, plan: Preparation, records: Sequence[dict[str, Any]]) -> EncodedCorpus:
    """Write the manifest of a directory that has all parts."""
    paths = [directory / PREPARED, *sorted((directory / TOKENIZER).iterdir())]
    counts, remarks = dict.fromkeys(SIDES, Counts()), Remarks()
    remarks.add(plan.remarks.to_json())
    files = dict[str, list[int | str]]()
    for number, record in enumerate(records):
        output = directory / f"{number:06d}"
        for side in SIDES:
            counts[side] += Counts(**record["counts"][side])
        files |= {f"{output.name}/{name}": identity for name, identity in record["files"].items()}
        remarks.add(record["remarks"])
        paths.append(output / RECORD)
    files |= {path.relative_to(directory).as_posix(): identify(path) for path in paths}
    write_manifest(directory, counts, files, [*plan.notes, *remarks.notes()])
    remove_leftovers(directory)
    return open_encoded(directory)


@checked
def verify_data(directory: str | Path, progress: Progress | None = None) -> EncodedCorpus:
    """Read every file of a complete directory, and compare it with the manifest.

    Raises `CheckFailedError` if a file is missing or has changed, `UserError` if the directory is
    not complete.
    """
    directory = Path(directory)
    try:
        encoded = open_encoded(directory)
    except CorruptInputError as error:
        raise CheckFailedError(error.message, hint=error.hint) from None
    files = encoded.files
    damaged, done, total = list[str](), 0, sum(size for size, _ in files.values())
    for name, identity in files.items():
        path = directory / name
        if not path.is_file() or identify(path) != identity:
            damaged.append(name)
        done += identity[0]
        (progress or _ignore)("verifying", done, total)
    if damaged:
        names = list_some(damaged)
        delete = list_some(sorted({name.partition("/")[0] for name in damaged}))
        raise CheckFailedError(
            f"{directory}: {len(damaged):,} of {len(files):,} files are missing or have changed: "
            f"{names}",
            hint=f"delete {delete} in it, and give the command that prepared it again",
        )
    for side in SIDES:
        encoded.open_shards(side)
    return encoded

"""Documents from files, folders, globs, hub data sets and standard input.

`documents` turns the sources of a command line into a corpus, which can be iterated any number of
times and holds one document in memory at a time. `readers.py` reads each format.
"""

import contextlib
import functools
import glob
import hashlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from tiedgpt.data.encodings import PEEK_BYTES, decode, has_lines, is_binary, require_encoding
from tiedgpt.data.hub import HUB, HubData, find_data
from tiedgpt.data.readers import (
    DECOMPRESSORS,
    LARGEST_LINE,
    PARQUET,
    Section,
    cut_text,
    ending,
    has_records,
    open_section,
    open_stream,
    read_records,
)
from tiedgpt.data.records import is_example
from tiedgpt.data.remarks import (
    STDIN,
    Remarks,
    find_json,
    format_conversion,
    format_endings,
    printable,
)
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import PREPARED, list_some, suggest_path
from tiedgpt.signatures import checked
from tiedgpt.text.bpe import END_OF_TEXT

CACHES = ("__pycache__", "node_modules", "venv", "site-packages")
"""Folders of other programs, which are not searched."""
MARKERS = ("run.toml", PREPARED, "CACHEDIR.TAG")
"""Files that identify a training run, prepared data and a cache, which are not searched."""
NOT_TEXT = tuple(".json .arrow .xlsx .npy .npz .pdf .docx .zip .tar .tgz .7z".split())
"""Endings of files that are never read as text."""
URL = re.compile(r"(https?|ftp|s3|gs)://", re.IGNORECASE)
HUB_URL = re.compile(r"https?://huggingface\.co/datasets/([\w.-]+/[\w.-]+)/?$")
"""The page of a data set of the hub."""
COMPRESSION = 4
"""Estimated ratio of a text's size to that of its compressed file."""


@dataclass(frozen=True)
class Document:
    """One text, independent of all others."""

    name: str
    """Origin for messages: a path, `path:line` or `<stdin>`."""
    text: str

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the text's UTF-8 bytes."""
        return hashlib.sha256(self.text.encode()).digest()


Corpus = Iterable[Document]
"""Documents that can be iterated more than once, each time the same in the same order."""


@dataclass
class FileCorpus:
    """The documents of files; `documents` creates it."""

    text_field: str
    paths: dict[str, bool] = field(default_factory=dict)
    """Files and hub sources, and whether the user named each; a file found in a folder may be
    skipped, a named one must be text."""
    encoding: str = "auto"
    """Encoding of files that are not UTF-8."""
    quoting: bool = True
    """Whether quotes in .csv and .tsv surround fields, which may then hold several lines."""
    keep_end_of_text: bool = False
    """Whether `<|endoftext|>` in a text file is ordinary text."""
    remarks: Remarks = field(default_factory=Remarks)
    """Facts about the files, collected while they are listed and read."""
    streams: dict[str, bytes] = field(default_factory=dict, repr=False)
    """The bytes of pipes and standard input, which can be read only once."""
    hub: dict[str, HubData] = field(default_factory=dict)
    """The data sets of the hub among `paths`."""
    in_parts: bool = False
    """Whether a long text is read as several documents, so that memory stays flat."""
    section: Section | None = None
    """The section to read of the only file; None for all of it."""
    may_be_blank: bool = False
    """Whether a corpus without any text is valid."""
    only_records: bool = False
    """Whether named files with another ending hold lines of JSON, and others are left out."""

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that are not blank, in the order of the sources.

        Raises:
            UserError: a file cannot be read, or no document has any text.
            CorruptInputError: a named file is not text in UTF-8, or a line of a `.jsonl` is wrong.
        """
        blank = True
        self.remarks.unread_fields.clear()
        for location, record in self.records(f'{{"{self.text_field}": ...}}'):
            text = record.get(self.text_field)
            self.remarks.unread_fields.count(record, (self.text_field,))
            if not isinstance(text, str):
                problem = f"must be a string, got {text!r:.40}"
                if self.text_field not in record:
                    problem = f"is missing; there are {', '.join(map(repr, record)) or 'none'}"
                hint = "`tiedgpt train` and `tune` read another field with --text-field"
                if is_example(record):
                    hint = "train on prompts and replies with `tiedgpt tune`"
                raise CorruptInputError(
                    f"{location}: the field {self.text_field!r} {problem}", hint=hint
                )
            if text.strip():
                blank = False
                yield Document(location, text)
        if blank and not self.may_be_blank:
            names = ", ".join(map(printable, list(self.paths)[:3]))
            reason, hint = "every document is empty", "name files with text"
            if self.remarks.unread:
                reason = f"{format_endings(self.remarks.unread)} is not read"
                hint = f'text files are read, and .jsonl with {{"{self.text_field}": ...}} lines'
            raise UserError(f"no text in {names}: {reason}", hint=hint)

    def records(
        self, expected: str, on_bad: Callable[[CorruptInputError], None] | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (place, record) for each record of the files.

        A document of a text file is a record with its text in `text_field`. `expected` describes a
        line of .jsonl in messages. `on_bad` receives the error of each bad line, which is skipped.
        Raises the errors of iteration.
        """
        for path in self.paths:
            if path in self.hub:
                yield from self.hub[path].records(self.section)
                continue
            name, is_text = printable(path), not has_records(path)
            if is_text and self.only_records:
                if not self.paths[path]:
                    self.remarks.unread.add(name)
                    continue
                is_text = False
            try:
                if is_text and not self.is_text(path):
                    continue
                with self._open(path) as raw, open_stream(raw, name) as file:
                    if is_text:
                        yield from self._read_text(file, path)
                        continue
                    row_groups = self.section if ending(path) == PARQUET else None
                    if self.section is not None and row_groups is None and self.section[0]:
                        name = f"from byte {self.section[0]:,} of {name}"
                    long_rows = list[int]()
                    yield from read_records(
                        file,
                        name,
                        expected,
                        encoding=self.encoding,
                        quoting=self.quoting,
                        on_bad=on_bad,
                        on_long_row=long_rows.append,
                        row_groups=row_groups,
                    )
                    if long_rows:
                        self.remarks.long_rows[name] = len(long_rows), long_rows[0]
            except OSError as error:
                raise _unreadable(name, error) from error

    def select(self, paths: Iterable[str], section: Section | None = None) -> "FileCorpus":
        """Return a corpus of some of the paths, or of a section of one, without remarks."""
        return replace(
            self,
            paths={path: self.paths[path] for path in paths},
            section=section,
            may_be_blank=True,
            remarks=Remarks(),
            streams={},
        )

    def estimate_bytes(self) -> int:
        """Return the approximate bytes of text; pipes and standard input count as none."""
        n_bytes = sum(COMPRESSION * data.n_bytes for data in self.hub.values())
        for path in filter(os.path.isfile, self.paths):
            is_compressed = Path(path).suffix.lower() in (*DECOMPRESSORS, PARQUET)
            n_bytes += os.path.getsize(path) * (COMPRESSION if is_compressed else 1)
        return n_bytes

    @property
    def has_records(self) -> bool:
        """Whether a source holds records with fields."""
        return any(path in self.hub or has_records(path) for path in self.paths)

    @property
    def separator(self) -> str:
        """The text between documents of a text file; "" for none."""
        return "" if self.keep_end_of_text else END_OF_TEXT

    def _read_text(self, file: BinaryIO, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the documents of a text file; with `in_parts`, several for each long one."""
        name, head = printable(path), file.read(PEEK_BYTES)
        if self.section is None and (records := find_json(head)):
            self.remarks.json_texts[name] = records
        if self.in_parts and has_lines(head, self.encoding):
            pieces = cut_text(file, self.separator.encode(), head)
            for location, text in self._read_pieces(pieces, path):
                yield location, {self.text_field: text}
            return
        if not is_binary(head, self.encoding):
            head += file.read(LARGEST_LINE if self.in_parts else -1)
        if self.in_parts and len(head) > LARGEST_LINE:
            raise CorruptInputError(f"{name} is too large for UTF-16", hint="write it as UTF-8")
        decoded = self._decode(head, path)
        if decoded is None:
            return
        texts = {name: decoded}
        if not self.keep_end_of_text and END_OF_TEXT in decoded:
            stripped = (text.strip("\n") for text in decoded.split(END_OF_TEXT))
            texts = {
                f"{name}, document {number}": text
                for number, text in enumerate(filter(str.strip, stripped), 1)
            }
            self.remarks.separated[name] = len(texts)
        for location, text in texts.items():
            yield location, {self.text_field: text}

    def _read_pieces(
        self, pieces: Iterable[tuple[bytes, bool]], path: str
    ) -> Iterator[tuple[str, str]]:
        """Yield (place, text) of the pieces of a file, and count its documents."""
        name, n_documents, is_separated = printable(path), 0, False
        for number, (data, is_ended) in enumerate(pieces, 1):
            text = self._decode(data, path) or ""
            is_separated = is_separated or is_ended
            if self.separator:
                text = text.strip("\n")
            if text.strip():
                n_documents += 1
                yield f"{name}, part {number}", text
        if is_separated:
            counts = self.remarks.separated
            counts[name] = counts.get(name, 0) + n_documents

    def _decode(self, data: bytes, path: str) -> str | None:
        """Return the text of a file's bytes; None if the file is skipped."""
        name = printable(path)
        text, encoding = decode(data, name, self.encoding, is_named=self.paths[path])
        if text is None:
            skipped_binary = is_binary(data, self.encoding)
            (self.remarks.binary if skipped_binary else self.remarks.skipped).add(name)
        elif encoding not in ("utf-8-sig", self.encoding):
            self.remarks.guessed[name] = encoding
        return text

    def is_text(self, path: str) -> bool:
        """Return whether a file's name is that of text; raise `UserError` for a named file."""
        if ending(path) not in NOT_TEXT:
            return True
        if self.paths[path]:
            problem = f"as a {ending(path)} file is no plain text"
            hint = f'write its texts as {{"{self.text_field}": ...}}, one on each line of .jsonl'
            if path.lower().endswith(".json"):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    if records := find_json(file.read(PEEK_BYTES)):
                        problem, hint = f"it holds {records}", format_conversion(path, records)
            raise UserError(f"{printable(path)} is not read: {problem}", hint=hint)
        self.remarks.unread.add(printable(path))
        return False

    def _open(self, path: str) -> BinaryIO:
        if path != STDIN and os.path.isfile(path):
            file = open(path, "rb")
            if self.section is None or ending(path) == PARQUET:
                return file
            return open_section(
                file, self.section, b"" if has_records(path) else self.separator.encode()
            )
        if path not in self.streams:
            is_stdin = path == STDIN
            if is_stdin and sys.stdin is None:
                raise UserError("standard input is closed", hint="name a file in place of -")
            self.streams[path] = sys.stdin.buffer.read() if is_stdin else Path(path).read_bytes()
        return io.BufferedReader(io.BytesIO(self.streams[path]))


@checked
def documents(
    sources: Sequence[str],
    *,
    text_field: str = "text",
    encoding: str = "auto",
    quoting: bool = True,
    keep_end_of_text: bool = False,
    only_records: bool = False,
) -> FileCorpus:
    """Return the documents of files, folders, globs, `hf:` data sets and `-` (standard input).

    A text file is one document, or several, separated by `<|endoftext|>` and newlines around it,
    unless `keep_end_of_text`. A `.jsonl`, `.csv`, `.tsv` or `.parquet` file has a document in each
    record, in the field `text_field`. All of them may be compressed: `.gz`, `.bz2`, `.xz`, `.zst`.
    Folders are searched recursively, in sorted order, without hidden files, caches and binary
    files; files in them that are not UTF-8 are listed in `.remarks.skipped`. A file that is reached
    twice is read once. Names are checked now, contents when the documents are iterated.

    A text file is UTF-8, or else in `encoding`; "auto" guesses the encoding of a named file. With
    `only_records`, a named file with another ending holds lines of JSON. Without `quoting`, each
    line of a table is a row, and a quote in it is text.

    Raises:
        UserError: a source is missing, a glob matches nothing, a folder has no files, or Python
            does not know the encoding.
    """
    require_encoding(encoding)
    corpus = FileCorpus(
        text_field,
        encoding=encoding,
        quoting=quoting,
        keep_end_of_text=keep_end_of_text,
        only_records=only_records,
    )
    reached: dict[str, str] = {}
    for source in [sources] if isinstance(sources, str) else sources:
        if source.startswith(HUB) and not os.path.exists(source):
            data = find_data(source)
            corpus.hub[data.name] = data
            corpus.paths[data.name] = True
            if data.name != source:
                corpus.remarks.pins[source] = data.name
            continue
        if URL.match(source) and not os.path.lexists(source):
            hint = f"download it first: curl -LO {shlex.quote(source)}"
            if match := HUB_URL.match(source):
                hint = f"name the data set of the hub: {HUB}{match[1]}"
            raise UserError(f"{source} is an address, and only files are read", hint=hint)
        named = source == STDIN or (os.path.exists(source) and not os.path.isdir(source))
        for path in [source] if named else _search(source):
            if not named and not os.path.isfile(path):
                corpus.remarks.skipped.add(path)  # a dangling link, a pipe
                continue
            first = reached.setdefault(path if path == STDIN else os.path.realpath(path), path)
            corpus.paths[first] = named or corpus.paths.get(first, False)
    if not corpus.paths:
        problem, hint = "no data was named", "give a text file, a folder, a glob or - for stdin"
        if missing := sorted(corpus.remarks.skipped):
            names = list_some([*map(_describe_special, missing)])
            problem, hint = f"no file to read: {names}", "check the name"
        raise UserError(problem, hint=hint)
    return corpus


def _describe_special(path: str) -> str:
    """Return a description of a path that names no file."""
    if os.path.islink(path):
        target = os.readlink(path)
        return f"{printable(path)} is a link to {printable(target)}, which is missing"
    return f"{printable(path)} is no regular file"


def _search(source: str) -> list[str]:
    """Return the files of a folder or a glob. Links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise _unreadable(error.filename, error) from error

    is_folder = os.path.isdir(source)
    matches = [source] if is_folder else sorted(glob.glob(source, recursive=True))
    paths = [path for path in matches if not os.path.isdir(path)]
    for folder in filter(os.path.isdir, matches):
        for directory, folders, files in os.walk(folder, onerror=fail):
            if not {*MARKERS}.isdisjoint(files):
                folders.clear()
                continue
            searched = (name for name in folders if not name.startswith(".") and name not in CACHES)
            folders[:] = sorted(searched)
            visible = sorted(name for name in files if not name.startswith("."))
            paths += [os.path.join(directory, name) for name in visible]
    if not paths and is_folder:
        raise UserError(f"the folder {source!r} has no text files", hint="name one that has")
    if not paths:
        check = f"check the name (the current folder is {os.getcwd()})"
        raise UserError(f"no file matches {source!r}", hint=suggest_path(source) or check)
    return paths


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(
        f"cannot read {printable(path)}: {error.strerror or error}", hint="check the file"
    )

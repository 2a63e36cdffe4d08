"""Documents from files, folders, globs, `.jsonl` files and standard input.

The sources of the command line come in. A corpus goes out, which can be iterated any number of
times and holds one document in memory at a time.
"""

import glob
import io
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from tiedgpt.errors import CorruptInputError, UserError

STDIN = "-"
PEEK = 65536  # bytes at the beginning of a file that are searched for signs of a binary format
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Document:
    """One text. No token of another document continues it."""

    name: str
    """Where it comes from, for messages: a path, `path:line`, `<stdin>`."""
    text: str


class Corpus(Protocol):
    """Documents that can be iterated more than once, each time the same in the same order."""

    def __iter__(self) -> Iterator[Document]: ...


@dataclass(frozen=True, slots=True)
class _Source:
    path: str
    named: bool
    """Named by the user: a binary file is an error. Found in a folder or by a glob: skipped."""


@dataclass
class FileCorpus:
    """The documents of files; made by `documents`."""

    sources: list[_Source]
    text_field: str
    skipped: set[str] = field(default_factory=set)
    """Paths that were left out because they are binary or not regular files."""
    streams: dict[str, bytes] = field(default_factory=dict, repr=False)
    """The bytes of pipes and standard input, which can be read only once."""

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that are not blank, in the order of the sources.

        Raises:
            UserError: a file cannot be read, or no document has any text.
            CorruptInputError: a file is not UTF-8, is binary, or a line of a `.jsonl` is wrong.
        """
        blank = True
        for source in self.sources:
            if not source.named and source.path in self.skipped:
                continue
            for document in self._read(source):
                if document.text.strip():
                    blank = False
                    yield document
        if blank:
            names = ", ".join(_printable(source.path) for source in self.sources[:3])
            raise UserError(f"no text in {names}: every document is empty; name files with text")

    def _read(self, source: _Source) -> Iterator[Document]:
        name = _printable(source.path)
        try:
            with self._open(source.path) as file:
                if source.path.lower().endswith(".jsonl"):
                    yield from _read_lines(file, self.text_field, name)
                    return
                data = file.read()
        except OSError as error:
            raise _unreadable(source.path, error) from error
        try:
            text = _decode(data, name)
        except CorruptInputError:
            if source.named:
                raise
            self.skipped.add(source.path)
            return
        yield Document(name, text.replace("\r\n", "\n"))

    def _open(self, path: str) -> BinaryIO:
        if path != STDIN and os.path.isfile(path):
            return open(path, "rb")
        if path not in self.streams:
            stdin = path == STDIN
            self.streams[path] = sys.stdin.buffer.read() if stdin else Path(path).read_bytes()
        return io.BytesIO(self.streams[path])


def documents(sources: Sequence[str], *, text_field: str = "text") -> FileCorpus:
    """Return the documents of files, folders, globs and `-` (standard input).

    A text file is one document. A `.jsonl` file has one document per line, in the field
    `text_field`. Folders are searched recursively, in sorted order, without hidden files; their
    binary files are listed in `.skipped`. A file that is reached twice is read once. Names are
    checked now, contents when the documents are iterated.

    Raises:
        UserError: a source is missing, a glob matches nothing, or a folder has no text files.
    """
    if isinstance(sources, str):
        sources = [sources]
    corpus = FileCorpus([], text_field)
    reached: set[str] = set()
    for source in sources:
        for file in _resolve(source, corpus.skipped):
            key = STDIN if file.path == STDIN else os.path.realpath(file.path)
            if key not in reached:
                reached.add(key)
                corpus.sources.append(file)
    if not corpus.sources:
        raise UserError("no data was named: give a text file, a folder, a glob or - for stdin")
    return corpus


def _resolve(source: str, skipped: set[str]) -> list[_Source]:
    """Return the files that a source stands for."""
    if source == STDIN:
        return [_Source(STDIN, named=True)]
    if not source or "\0" in source:
        raise UserError(f"{source!r} is not a file name: name a text file, a folder, a glob or -")
    name = _printable(source)
    if os.path.isdir(source):
        paths = _search(source, skipped)
        problem = f"the folder {name} has no text files: name one that has"
    elif os.path.exists(source):
        return [_Source(source, named=True)]
    elif any(sign in source for sign in "*?["):
        matches = sorted(glob.glob(source, recursive=True))
        paths = [path for path in matches if _is_text(path, skipped)]
        for folder in filter(os.path.isdir, matches):
            paths += _search(folder, skipped)
        problem = f"the glob {name} matches no text file: check the pattern"
    else:
        paths = []
        problem = f"{name} does not exist: check the name (the current folder is {os.getcwd()})"
    if not paths:
        raise UserError(problem)
    return [_Source(path, named=False) for path in paths]


def _search(folder: str, skipped: set[str]) -> list[str]:
    """Return the text files below a folder, sorted. Links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise _unreadable(error.filename or folder, error) from error

    paths = []
    for directory, folders, files in os.walk(folder, onerror=fail):
        if "run.toml" in files:  # the directory of a training run holds no training text
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = sorted(name for name in files if not name.startswith("."))
        candidates = [os.path.join(directory, name) for name in visible]
        paths += [path for path in candidates if _is_text(path, skipped)]
    return paths


def _is_text(path: str, skipped: set[str]) -> bool:
    """Return whether a path is a text file. Other files are added to `skipped`, folders are not."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return False
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                start = file.read(PEEK)
            if b"\0" not in start and not start.startswith(b"%PDF-"):
                return True
    except FileNotFoundError:  # a dangling link
        pass
    except OSError as error:
        raise _unreadable(path, error) from error
    skipped.add(path)
    return False


def _decode(data: bytes, name: str) -> str:
    """Return the text of UTF-8 bytes without the byte order mark."""
    if data.startswith(UTF16_MARKS):
        raise CorruptInputError(
            f"{name} is UTF-16, not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8 FILE > NEW`"
        )
    if (nul := data.find(b"\0")) >= 0:
        raise CorruptInputError(
            f"{name} looks binary (a NUL at byte {nul}): name text files in UTF-8"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + len(BYTE_ORDER_MARK) * data.startswith(BYTE_ORDER_MARK)
        raise CorruptInputError(
            f"{name} is not UTF-8: byte 0x{data[offset]:02x} at offset {offset}; convert it with "
            "`iconv -f ENCODING -t UTF-8 FILE > NEW` (often ENCODING is LATIN1 or CP1252)"
        ) from None


def _read_lines(file: BinaryIO, text_field: str, name: str) -> Iterator[Document]:
    """Yield the documents of a `.jsonl` file."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            place = f"{name}:{number}"
            yield Document(place, _text_of_line(line, text_field, place))


def _text_of_line(line: bytes, text_field: str, place: str) -> str:
    """Return the text of one line of a `.jsonl` file."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise CorruptInputError(f"{place}: not UTF-8 (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise CorruptInputError(f"{place}: not a JSON object on one line ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        keys = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise CorruptInputError(f"{place}: no string in the field {text_field!r}; it holds {keys}")
    text: str = record[text_field]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorruptInputError(
            f"{place}: half a surrogate pair at character {error.start} of {text_field!r}"
        ) from None
    return text


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"cannot read {_printable(path)}: {error.strerror or error}; check the file")


def _printable(path: str) -> str:
    """Return a path that can be printed, also where its bytes are not UTF-8."""
    return "<stdin>" if path == STDIN else path.encode(errors="replace").decode()

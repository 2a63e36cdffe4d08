"""Documents from what the user names: files, folders, globs, `.jsonl` and standard input.

Sources (strings of the command line) come in; a corpus, which can be iterated as often as one
likes and holds one document in memory at a time, goes out.
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
from typing import Protocol

from tiedgpt.errors import CorruptInputError, UserError

STDIN = "-"
PEEK = 65536  # bytes of a folder's file that are searched for signs of a binary format
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is read as one: tokens of another document never continue it."""

    name: str
    """Where it comes from, for people: a path, `path:line`, `<stdin>`."""
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
    """Paths that were left out because they are binary or no regular files."""
    streams: dict[str, bytes] = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that are not blank, in the order of the sources.

        Raises:
            UserError: a file cannot be read, or no document has any text.
            CorruptInputError: a file is not UTF-8, is binary, or a line of a `.jsonl` is wrong.
        """
        blank = True
        for source in self.sources:
            if source.named or source.path not in self.skipped:
                for document in self._read(source):
                    if document.text.strip():
                        blank = False
                        yield document
        if blank:
            names = ", ".join(_shown(source.path) for source in self.sources[:3])
            raise UserError(f"no text in {names}: every document is empty; name files with text")

    def _read(self, source: _Source) -> Iterator[Document]:
        if source.path.lower().endswith(".jsonl"):
            yield from self._read_lines(source)
            return
        data = self._bytes(source.path)
        if b"\0" in data and not source.named:
            self.skipped.add(source.path)
            return
        try:
            text = _decode(data, source.path)
        except CorruptInputError:
            if source.named:
                raise
            self.skipped.add(source.path)  # found by searching: compressed, or of another encoding
            return
        yield Document(_shown(source.path), text.replace("\r\n", "\n"))

    def _bytes(self, path: str) -> bytes:
        """Return a file's bytes; a pipe or standard input can be read only once and is kept."""
        if path in self.streams:
            return self.streams[path]
        try:
            if path == STDIN:
                return self.streams.setdefault(path, sys.stdin.buffer.read())
            data = Path(path).read_bytes()
            if not os.path.isfile(path):
                self.streams[path] = data
            return data
        except OSError as error:
            raise _unreadable(path, error) from error

    def _read_lines(self, source: _Source) -> Iterator[Document]:
        try:
            whole = os.path.isfile(source.path)  # a pipe is read once, and kept
            opened = open(source.path, "rb") if whole else io.BytesIO(self._bytes(source.path))
            with opened as file:
                for number, line in enumerate(file, start=1):
                    place = f"{_shown(source.path)}:{number}"
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    if line.strip():
                        yield Document(place, _text_of_line(line, self.text_field, place))
        except OSError as error:
            raise _unreadable(source.path, error) from error


def documents(sources: Sequence[str], *, text_field: str = "text") -> FileCorpus:
    """Return the documents of files, folders (searched through, sorted), globs and `-` (stdin).

    A text file is one document; a `.jsonl` file has one a line, in the field `text_field`. Hidden
    files of a folder are passed over; binary ones are collected in `.skipped`. A file reached
    twice is taken once. Names are checked now, contents when the documents are iterated.

    Raises:
        UserError: a source is missing, a glob matches nothing, or a folder has no text files.
    """
    if isinstance(sources, str):
        sources = [sources]
    corpus = FileCorpus([], text_field)
    reached: set[str] = set()
    for source in sources:
        for found in _resolve(source, corpus.skipped):
            key = STDIN if found.path == STDIN else os.path.realpath(found.path)
            if key not in reached:
                reached.add(key)
                corpus.sources.append(found)
    if not corpus.sources:
        raise UserError("no data was named: give a text file, a folder, a glob or - for stdin")
    return corpus


def _resolve(source: str, skipped: set[str]) -> list[_Source]:
    """Return the files that a source stands for."""
    if source == STDIN:
        return [_Source(STDIN, named=True)]
    if not source or "\0" in source:
        raise UserError(f"{source!r} is no file name: name a text file, a folder, a glob or -")
    if os.path.isdir(source):
        return _search(source, skipped)
    if os.path.exists(source):
        return [_Source(source, named=True)]
    if not any(sign in source for sign in "*?["):
        raise UserError(
            f"{_shown(source)} does not exist: check the name (we are in {os.getcwd()})"
        )
    matches = sorted(glob.glob(source, recursive=True))
    files = [_Source(path, named=False) for path in matches if _is_text(path, skipped)]
    for path in filter(os.path.isdir, matches):
        files += _search(path, skipped, may_be_empty=True)
    if not files:
        raise UserError(f"the glob {_shown(source)} matches no text file: check the pattern")
    return files


def _search(folder: str, skipped: set[str], *, may_be_empty: bool = False) -> list[_Source]:
    """Return the text files below a folder, sorted; links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise _unreadable(error.filename or folder, error) from error

    found = []
    for directory, folders, files in os.walk(folder, onerror=fail):
        if "run.toml" in files:  # a training run: its model, metrics and tokens are no text
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = os.path.join(directory, name)
            if not name.startswith(".") and _is_text(path, skipped):
                found.append(_Source(path, named=False))
    if not found and not may_be_empty:
        raise UserError(f"the folder {_shown(folder)} has no text files: name one that has")
    return found


def _is_text(path: str, skipped: set[str]) -> bool:
    """Return whether a path found by searching is a text file; note it when it is another file."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return False
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                start = file.read(PEEK)
            if b"\0" not in start and not start.startswith(b"%PDF-"):
                return True
    except FileNotFoundError:  # a link to nowhere
        pass
    except OSError as error:
        raise _unreadable(path, error) from error
    skipped.add(path)
    return False


def _decode(data: bytes, path: str) -> str:
    """Return the text of UTF-8 bytes without the byte order mark."""
    if data.startswith(UTF16_MARKS):
        raise CorruptInputError(
            f"{_shown(path)} is UTF-16, not UTF-8: convert it with "
            f"`iconv -f UTF-16 -t UTF-8 FILE > NEW`"
        )
    if (nul := data.find(b"\0")) >= 0:
        raise CorruptInputError(
            f"{_shown(path)} looks binary (a NUL at byte {nul}): name text files in UTF-8"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + 3 * data.startswith(b"\xef\xbb\xbf")
        raise CorruptInputError(
            f"{_shown(path)} is not UTF-8: byte 0x{data[offset]:02x} at offset {offset}; convert "
            f"it with `iconv -f ENCODING -t UTF-8 FILE > NEW` (often ENCODING is LATIN1 or CP1252)"
        ) from None


def _text_of_line(line: bytes, text_field: str, place: str) -> str:
    """Return the text of one line of a `.jsonl` file."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise CorruptInputError(f"{place}: not UTF-8 (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise CorruptInputError(f"{place}: not a JSON object on one line ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        held = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise CorruptInputError(f"{place}: no string in the field {text_field!r}; it holds {held}")
    text: str = record[text_field]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorruptInputError(
            f"{place}: half a surrogate pair at character {error.start} of {text_field!r}"
        ) from None
    return text


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"cannot read {_shown(path)}: {error.strerror or error}; check the file")


def _shown(path: str) -> str:
    """Return a path that can be printed, whatever bytes it is made of."""
    return "<stdin>" if path == STDIN else path.encode(errors="replace").decode()

"""Documents from files, folders, globs and standard input; `readers.py` knows the endings.

The sources of the command line come in. A corpus goes out, which can be iterated any number of
times and holds one document in memory at a time.
"""

import contextlib
import glob
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tiedgpt.data.hub import HUB, fetch_data
from tiedgpt.data.readers import (
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
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import PREPARE
from tiedgpt.text.codec import END_OF_TEXT

STDIN = "-"
CACHES = ("__pycache__", "node_modules", "venv", "site-packages")
"""Folders of other programs, which are not searched."""
MARKS = {
    b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}  # fmt: skip
"""Byte order marks; UTF-32's first, which begins as UTF-16's does."""
MARKERS = ("run.toml", PREPARE, "CACHEDIR.TAG")
"""Files that tell a training run, prepared data and a cache, which are not searched."""
NOT_TEXT = (
    ".json", ".arrow", ".xlsx", ".npy", ".npz", ".pdf", ".docx", ".zip", ".tar", ".tgz", ".7z",
)  # fmt: skip
"""Endings of files with other things than text, which are not trained on as if they were."""
SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
"""Half of a character, encoded as if it were one: UTF-8 forbids it."""
ENCODINGS = (
    "cp1252", "cp1251", "cp1253", "koi8_r", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr",
)  # fmt: skip
"""What is taken for possible where the encoding of text is guessed."""
PEEK = 65536  # bytes at the beginning of a file; one with a NUL among them is not read on


@dataclass(frozen=True, slots=True)
class Document:
    """One text. No token of another document continues it."""

    name: str
    """Where it comes from, for messages: a path, `path:line`, `<stdin>`."""
    text: str


Corpus = Iterable[Document]
"""Documents that can be iterated more than once, each time the same in the same order."""


@dataclass
class FileCorpus:
    """The documents of files; made by `documents`."""

    text_field: str
    paths: dict[str, bool] = field(default_factory=dict)
    """Each file, and whether it was named: then it must be text. If it was found, it may be not."""
    encoding: str = "auto"
    """Of files that are not UTF-8."""
    keep_end_of_text: bool = False
    """Whether `<|endoftext|>` in a text file is text like any other."""
    separated: dict[str, int] = field(default_factory=dict)
    """Text files in which it separates documents, and how many there are."""
    skipped: set[str] = field(default_factory=set)
    """Paths found in folders that were left out: in another encoding, or not regular files."""
    unread: set[str] = field(default_factory=set)
    """Paths found in folders that were left out for their ending, such as .pdf."""
    guessed: dict[str, str] = field(default_factory=dict)
    """The encodings of named files that are not UTF-8."""
    streams: dict[str, bytes] = field(default_factory=dict, repr=False)
    """The bytes of pipes and standard input, which can be read only once."""
    names: dict[str, str] = field(default_factory=dict)
    """What files of the hub are called in messages, in place of their paths in its cache."""
    pins: list[tuple[str, str]] = field(default_factory=list)
    """Sources of the hub without a revision, and with the one that they were found at."""
    in_parts: bool = False
    """Whether a long text is read in parts, each a document; else a document is read whole."""
    section: Section | None = None
    """What is read of the only file, where that is not all."""
    may_be_blank: bool = False
    """Whether there may be no text at all."""

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that are not blank, in the order of the sources.

        Raises:
            UserError: a file cannot be read, or no document has any text.
            CorruptInputError: a named file is not text in UTF-8, or a line of a `.jsonl` is wrong.
        """
        blank = True
        for place, record in self.records(f'{{"{self.text_field}": ...}}'):
            text = record.get(self.text_field)
            if not isinstance(text, str):
                problem = f"must be a string, got {text!r:.40}"
                if self.text_field not in record:
                    problem = f"is missing; there are {', '.join(map(repr, record)) or 'none'}"
                hint = "`tiedgpt train` and `tune` read another field with --text-field"
                if {"prompt", "messages", "conversations"} & record.keys():
                    hint = "train on prompts and replies with `tiedgpt tune`"
                raise CorruptInputError(
                    f"{place}: the field {self.text_field!r} {problem}", hint=hint
                )
            if text.strip():
                blank = False
                yield Document(place, text)
        if blank and not self.may_be_blank:
            names = ", ".join(map(_printable, list(self.paths)[:3]))
            why, hint = "every document is empty", "name files with text"
            if self.unread:
                why = f"{_endings(self.unread)} is not read"
                hint = f'text files are read, and .jsonl with {{"{self.text_field}": ...}} lines'
            raise UserError(f"no text in {names}: {why}", hint=hint)

    def records(
        self, expected: str, on_bad: Callable[[CorruptInputError], None] | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (place, record) for each record of files that have them (`readers.py`).

        A document of a text file is a record with its text in `text_field`. Raises as iteration
        does; `on_bad` is given the error of a bad line of .jsonl, which is passed over then.
        """
        for path in self.paths:
            name = self.name(path)
            try:
                if not has_records(path) and not self.is_text(path, name):
                    continue
                with self._open(path) as raw, open_stream(raw, name) as file:
                    if not has_records(path):
                        yield from self._read_text(file, path, name)
                        continue
                    encoding = "utf-8-sig" if self.encoding == "auto" else self.encoding
                    groups = self.section if ending(path) == PARQUET else None
                    if self.section is not None and groups is None and self.section[0]:
                        name = f"from byte {self.section[0]:,} of {name}"
                    yield from read_records(
                        file, name, expected, encoding=encoding, on_bad=on_bad, row_groups=groups
                    )
            except OSError as error:
                raise _unreadable(name, error) from error

    def name(self, path: str) -> str:
        """Return what a file is called in messages."""
        return self.names.get(path) or _printable(path)

    @property
    def mark(self) -> str:
        """What separates documents in text files; "" for nothing."""
        return "" if self.keep_end_of_text else END_OF_TEXT

    def has_lines(self, head: bytes) -> bool:
        """Return whether a text with this beginning may be cut at newlines: it is no UTF-16."""
        is_plain = self.encoding == "auto" or "\n".encode(self.encoding) == b"\n"
        return is_plain and not head.startswith(tuple(MARKS)) and not self._binary(head)

    def _read_text(
        self, file: BinaryIO, path: str, name: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the documents of a text file, whole, or the long ones in parts."""
        head = file.read(PEEK)
        if self.in_parts and self.has_lines(head):
            for place, part in self._read_parts(cut_text(file, self.mark.encode(), head), path):
                yield place, {self.text_field: part}
            return
        if not self._binary(head):
            head += file.read(LARGEST_LINE if self.in_parts else -1)
        if self.in_parts and len(head) > LARGEST_LINE:
            raise CorruptInputError(f"{name} is too large for UTF-16", hint="write it as UTF-8")
        text = self._decode(head, path, name)
        for place, part in [] if text is None else self._separate(name, text):
            yield place, {self.text_field: part}

    def _read_parts(
        self, parts: Iterable[tuple[bytes, bool]], path: str
    ) -> Iterator[tuple[str, str]]:
        """Yield (place, text) of what `cut_text` cuts a file into; counts its documents."""
        name, n_documents, is_marked = self.name(path), 0, False
        for number, (data, is_ended) in enumerate(parts, 1):
            text = self._decode(data, path, name) or ""
            is_marked = is_marked or is_ended
            if self.mark:
                text = text.strip("\n")
            if text.strip():
                n_documents += 1
                yield f"{name}, part {number}", text
        if is_marked:
            self.separated[name] = self.separated.get(name, 0) + n_documents

    def _decode(self, data: bytes, path: str, name: str) -> str | None:
        """Return the text of bytes of a file; None where it is left out."""
        text = None if self._binary(data) else self._text(data, path, name)
        if text is not None:
            return text.replace("\r\n", "\n")
        if self.paths[path]:
            which = "" if self.encoding == "auto" else f", nor in {self.encoding}"
            raise CorruptInputError(
                f"{name} is not text in UTF-8{which}",
                hint="name text files, or their --encoding (often cp1252 or utf-16)",
            )
        if not self._binary(data):
            self.skipped.add(name)
        return None

    def _separate(self, name: str, text: str) -> list[tuple[str, str]]:
        """Return (place, text) of the documents of a text file, without the marks between them."""
        if self.keep_end_of_text or END_OF_TEXT not in text:
            return [(name, text)]
        parts = [part.strip("\n") for part in text.split(END_OF_TEXT)]
        parts = [part for part in parts if part.strip()]
        self.separated[name] = len(parts)
        return [(f"{name}, document {n}", part) for n, part in enumerate(parts, 1)]

    def remarks(self) -> dict[str, Any]:
        """Return what `notes` are made of, as JSON can hold it."""
        left_out = {"skipped": sorted(self.skipped), "unread": sorted(self.unread)}
        how = {"separated": {**self.separated}, "guessed": {**self.guessed}}
        return {"pins": [*self.pins], **how, **left_out}

    def add_remarks(self, remarks: dict[str, Any]) -> None:
        """Add the remarks on other files, or on other sections of the same."""
        for name, count in remarks["separated"].items():
            self.separated[name] = self.separated.get(name, 0) + count
        self.guessed |= remarks["guessed"]
        self.pins += remarks["pins"]
        self.skipped |= {*remarks["skipped"]}
        self.unread |= {*remarks["unread"]}

    def notes(self) -> list[str]:
        """Return what is worth telling of the files read: how, and what was left out."""
        notes = [
            f"{n} is read as {how}; --encoding names another" for n, how in self.guessed.items()
        ]
        notes += [f"{source} is {name}, which names this revision" for source, name in self.pins]
        where = {f"{name} has": count for name, count in self.separated.items()}
        if len(where) > 3:
            where = {f"{len(where):,} files have": sum(where.values())}
        notes += [
            f"{n} {count:,} document{'s' * (count != 1)}, separated by {END_OF_TEXT}; "
            "--keep-end-of-text takes it for text"
            for n, count in where.items()
        ]
        reasons = {
            "not text in UTF-8": self.skipped,
            f"as {_endings(self.unread)} is not read": self.unread,
        }
        for why, paths in reasons.items():
            names = ", ".join(sorted(paths)[:3]) + ", ..." * (len(paths) > 3)
            files = f"{len(paths):,} file{'s' * (len(paths) > 1)}"
            notes += [f"left out {files}, {why}: {names}"] if paths else []
        return notes

    def is_text(self, path: str, name: str) -> bool:
        """Return whether a file's name is that of text; of a named one, raise `UserError`."""
        if ending(path) not in NOT_TEXT:
            return True
        if self.paths[path]:
            raise UserError(
                f"{name} is not read, as a {ending(path)} file is no plain text",
                hint=f'write its texts as {{"{self.text_field}": ...}}, one on each line of .jsonl',
            )
        self.unread.add(name)
        return False

    def _binary(self, data: bytes) -> bool:
        return b"\0" in data and not data.startswith(tuple(MARKS)) and self.encoding == "auto"

    def _text(self, data: bytes, path: str, name: str) -> str | None:
        """Return the text of bytes in UTF-8, marked UTF-16 or UTF-32, or in `encoding`.

        Raises `CorruptInputError` for a named file that is UTF-8 but for encoded surrogates.
        """
        marks = (encoding for mark, encoding in MARKS.items() if data.startswith(mark))
        encodings = [next(marks, "utf-8-sig")]
        if self.encoding != "auto":
            encodings.insert(0 if b"\0" in data else 1, self.encoding)
        elif self.paths[path]:
            _require_no_surrogate(data, name)
            encodings += _guess_encoding(data)
        for encoding in encodings:
            try:
                text = data.decode(encoding)
            except UnicodeError:
                continue
            if encoding not in ("utf-8-sig", self.encoding):
                self.guessed[name] = encoding
            return text
        return None

    def _open(self, path: str) -> BinaryIO:
        if path != STDIN and os.path.isfile(path):
            file = open(path, "rb")
            if self.section is None or ending(path) == PARQUET:
                return file
            return open_section(
                file, self.section, b"" if has_records(path) else self.mark.encode()
            )
        if path not in self.streams:
            stdin = path == STDIN
            if stdin and sys.stdin is None:
                raise UserError("standard input is closed", hint="name a file in place of -")
            self.streams[path] = sys.stdin.buffer.read() if stdin else Path(path).read_bytes()
        return io.BytesIO(self.streams[path])


def documents(
    sources: Sequence[str],
    *,
    text_field: str = "text",
    encoding: str = "auto",
    keep_end_of_text: bool = False,
) -> FileCorpus:
    """Return the documents of files, folders, globs, `hf:` data sets and `-` (standard input).

    A text file is one document, or several, separated by `<|endoftext|>` and newlines around it,
    unless that is to be kept as text. A `.jsonl`, `.csv`, `.tsv` or `.parquet` file has a document
    in each record, in the field `text_field`. All of them may be compressed: `.gz`, `.bz2`, `.xz`,
    `.zst`. Folders are searched recursively, in sorted order, without hidden files, caches
    and binary files; files in them that are not UTF-8 are listed in `.skipped`. A file that is
    reached twice is read once. Names are checked now, contents when the documents are iterated.

    A text file is UTF-8, or else in `encoding`; "auto" guesses that of a file that was named.

    Raises:
        UserError: a source is missing, a glob matches nothing, or a folder has no files; or Python
            knows no such encoding.
    """
    if encoding != "auto":
        _require_encoding(encoding)
    corpus = FileCorpus(text_field, encoding=encoding, keep_end_of_text=keep_end_of_text)
    reached: dict[str, str] = {}
    for source in [sources] if isinstance(sources, str) else sources:
        if source.startswith(HUB) and not os.path.exists(source):
            data = fetch_data(source)
            corpus.names |= data.names
            corpus.paths |= dict.fromkeys(data.names, True)
            corpus.pins += [] if data.pin == source else [(source, data.pin)]
            continue
        named = source == STDIN or (os.path.exists(source) and not os.path.isdir(source))
        for path in [source] if named else _search(source):
            if not named and not os.path.isfile(path):
                corpus.skipped.add(path)  # a dangling link, a pipe
                continue
            first = reached.setdefault(path if path == STDIN else os.path.realpath(path), path)
            corpus.paths[first] = named or corpus.paths.get(first, False)
    if not corpus.paths:
        raise UserError(
            "no data was named", hint="give a text file, a folder, a glob or - for stdin"
        )
    return corpus


def _search(source: str) -> list[str]:
    """Return the files that a folder or a glob stands for. Links to folders are not followed."""
    is_folder = os.path.isdir(source)
    matches = [source] if is_folder else sorted(glob.glob(source, recursive=True))
    paths = [path for path in matches if not os.path.isdir(path)]
    for folder in filter(os.path.isdir, matches):
        for directory, folders, files in os.walk(folder, onerror=_fail):
            if not {*MARKERS}.isdisjoint(files):
                folders.clear()
                continue
            shown = (name for name in folders if not name.startswith(".") and name not in CACHES)
            folders[:] = sorted(shown)
            visible = sorted(name for name in files if not name.startswith("."))
            paths += [os.path.join(directory, name) for name in visible]
    if not paths and is_folder:
        raise UserError(f"the folder {source!r} has no text files", hint="name one that has")
    if not paths:
        raise UserError(
            f"no file matches {source!r}",
            hint=f"check the name (the current folder is {os.getcwd()})",
        )
    return paths


def _fail(error: OSError) -> None:
    raise _unreadable(error.filename, error) from error


def _require_encoding(encoding: str) -> None:
    """Raise `UserError` unless Python decodes text in it."""
    try:
        b"a".decode(encoding)
    except UnicodeError:  # it does, though not this byte: UTF-16 has two for a character
        return
    except (LookupError, ValueError):
        raise UserError(
            f"--encoding {encoding}: Python knows no such encoding",
            hint="give one such as utf-8, utf-16 or cp1252",
        ) from None


def _require_no_surrogate(data: bytes, name: str) -> None:
    """Raise `CorruptInputError` for bytes that are UTF-8 but for encoded surrogates."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if SURROGATE.match(data, error.start) is None:
            return
        with contextlib.suppress(UnicodeDecodeError):
            data.decode(errors="surrogatepass")
            raise CorruptInputError(
                f"{name} is not valid UTF-8: at byte {error.start:,} it has a surrogate, half of a "
                "character",
                hint="remove it, or write the file again as UTF-8",
            ) from None


def _guess_encoding(data: bytes) -> list[str]:
    """Return the encoding of text that is not UTF-8, by what is frequent; [] for other bytes."""
    high = len(data) - len(data.translate(None, bytes(range(128, 256))))
    if high == 0 or data.startswith(b"\xef\xbb\xbf"):  # it is UTF-8, or says so
        return []
    if high <= len(data) / 4:
        return ["cp1252"]  # western: few of its letters are beyond ASCII
    from charset_normalizer import from_bytes

    best = from_bytes(data[: 4 * PEEK], cp_isolation=list(ENCODINGS)).best()
    return [] if best is None else [best.encoding]


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(
        f"cannot read {_printable(path)}: {error.strerror or error}", hint="check the file"
    )


def _endings(paths: Iterable[str]) -> str:
    """Return the endings of names of files: `.csv`, or `.csv or .zip`."""
    return " or ".join(sorted({os.path.splitext(path)[1].lower() for path in paths}))


def _printable(path: str) -> str:
    """Return a path that can be printed, also where its bytes are not UTF-8."""
    return "<stdin>" if path == STDIN else path.encode(errors="replace").decode()

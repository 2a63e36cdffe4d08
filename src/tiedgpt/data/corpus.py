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

from tiedgpt.data.readers import ending, has_records, open_stream, read_records
from tiedgpt.errors import CorruptInputError, UserError

STDIN = "-"
CACHES = ("__pycache__", "node_modules", "venv", "site-packages")
"""Folders of other programs, which are not searched."""
MARKS = {
    b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}  # fmt: skip
"""Byte order marks; UTF-32's first, which begins as UTF-16's does."""
NOT_TEXT = (
    ".json", ".arrow", ".xlsx", ".npy", ".npz", ".pdf", ".docx", ".zip", ".tar", ".tgz", ".7z",
)  # fmt: skip
"""Endings of files with other things than text, which are not trained on as if they were."""
END_OF_TEXT = "<|endoftext|>"
"""What separates documents in a text file, as GPT-2's data and the tools around it have it."""
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
        if blank:
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
            name = _printable(path)
            try:
                if not self._require_text(path, name):
                    continue
                with self._open(path) as raw, open_stream(raw, name) as file:
                    if has_records(path):
                        encoding = "utf-8-sig" if self.encoding == "auto" else self.encoding
                        yield from read_records(
                            file, name, expected, encoding=encoding, on_bad=on_bad
                        )
                        continue
                    data = file.read(PEEK)
                    if not self._binary(data):
                        data += file.read()
            except OSError as error:
                raise _unreadable(path, error) from error
            text = None if self._binary(data) else self._text(data, path, name)
            if text is not None:
                for place, part in self._separate(name, text.replace("\r\n", "\n")):
                    yield place, {self.text_field: part}
            elif self.paths[path]:
                which = "" if self.encoding == "auto" else f", nor in {self.encoding}"
                raise CorruptInputError(
                    f"{name} is not text in UTF-8{which}",
                    hint="name text files, or their --encoding (often cp1252 or utf-16)",
                )
            elif not self._binary(data):
                self.skipped.add(path)

    def _separate(self, name: str, text: str) -> list[tuple[str, str]]:
        """Return (place, text) of the documents of a text file, without the marks between them."""
        if self.keep_end_of_text or END_OF_TEXT not in text:
            return [(name, text)]
        parts = [part.strip("\n") for part in text.split(END_OF_TEXT)]
        parts = [part for part in parts if part.strip()]
        self.separated[name] = len(parts)
        return [(f"{name}, document {n}", part) for n, part in enumerate(parts, 1)]

    def notes(self) -> list[str]:
        """Return what is worth telling of the files read: how, and what was left out."""
        found = [
            f"{n} is read as {how}; --encoding names another" for n, how in self.guessed.items()
        ]
        found += [
            f"{n} has {count:,} document{'s' * (count != 1)}, separated by {END_OF_TEXT}; "
            "--keep-end-of-text takes it for text"
            for n, count in self.separated.items()
        ]
        reasons = {
            "not text in UTF-8": self.skipped,
            f"as {_endings(self.unread)} is not read": self.unread,
        }
        for why, paths in reasons.items():
            names = ", ".join(sorted(paths)[:3]) + ", ..." * (len(paths) > 3)
            files = f"{len(paths):,} file{'s' * (len(paths) > 1)}"
            found += [f"left out {files}, {why}: {names}"] if paths else []
        return found

    def _require_text(self, path: str, name: str) -> bool:
        """Return whether a file's name is that of text; of a named one, raise `UserError`."""
        if ending(path) not in NOT_TEXT:
            return True
        if self.paths[path]:
            raise UserError(
                f"{name} is not read, as a {ending(path)} file is no plain text",
                hint=f'write its texts as {{"{self.text_field}": ...}}, one on each line of .jsonl',
            )
        self.unread.add(path)
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
            return open(path, "rb")
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
    """Return the documents of files, folders, globs and `-` (standard input).

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
            if "run.toml" in files or "CACHEDIR.TAG" in files:  # a training run, or a cache
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

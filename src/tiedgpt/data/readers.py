"""Files of records, and compressed files: how each is opened and read, by its ending.

    open_stream(file, name)      the bytes of a file, decompressed where its ending says so
    read_records(name, ...)      the records of .jsonl, .csv, .tsv and .parquet files
    cut_text(file, mark)         a text of any size in documents, or in parts of one

A large file is read in sections, by several processes: `.jsonl` and text files in ranges of bytes
that end where a line or a document ends (`open_section`), Parquet in ranges of row groups.

Damaged and truncated files are a `CorruptInputError` with the file's name; a reader that needs a
package which is not installed says which extra brings it.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import chain, count
from pathlib import PurePath
from typing import IO, Any, AnyStr, BinaryIO, cast

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import JSON_LINES, read_json_lines, reading

BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
"""Encodings by byte order mark; UTF-32 comes first because its mark begins like that of UTF-16."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Endings of tables in text, whose first line names the columns."""
PARQUET = ".parquet"
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are held at a time."""
LARGEST_LINE = 1 << 28
"""Maximum bytes of a line of .jsonl, and characters of a field of a table."""
LARGEST_PART = 1 << 20
"""Bytes of a document in a text that is read in parts; of longer ones each part is a document."""
FETCH_AGAIN = "fetch or make it again"
GIVE_ENCODING = "give its --encoding (often cp1252 or utf-16)"
OnBad = Callable[[CorruptInputError], None] | None
Section = tuple[int, int]
"""From where a file is read, and up to where: in bytes, or in row groups of a Parquet file."""


class SectionFile(io.RawIOBase):
    """The bytes of an open file from `start` to `stop`."""

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        self._file, self._left = file, max(0, stop - start)
        file.seek(start)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; return how many bytes, 0 at the end."""
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        """Close the file, too."""
        self._file.close()
        super().close()


DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda file: io.BufferedReader(
        _import("pyarrow", ".zst").CompressedInputStream(file, "zstd")
    ),
}


def ending(path: str) -> str:
    """Return the ending of a file's format: ".csv" for "a.CSV.gz"."""
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if suffixes and suffixes[-1] in DECOMPRESSORS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def has_records(path: str) -> bool:
    """Return whether a file's name says that it holds records with fields."""
    return ending(path) in (*JSON_LINES, *DELIMITERS, PARQUET)


@contextlib.contextmanager
def open_stream(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """Give the bytes of a file, decompressed; raises as the module says while it is read."""
    opened = DECOMPRESSORS.get(PurePath(name).suffix.lower())
    if opened is None:
        yield file
        return
    with reading(name, "compressed file", FETCH_AGAIN):
        yield cast(BinaryIO, opened(file))


def open_section(file: BinaryIO, section: Section, mark: bytes = b"") -> BinaryIO:
    """Open the lines, or the documents, that begin in a section of a file, in bytes.

    Every line or document is in exactly one section, for any division of the file.
    """
    size = file.seek(0, os.SEEK_END)
    start, stop = (_find_cut(file, at, size, mark) for at in section)
    return io.BufferedReader(SectionFile(file, start, stop))


def _find_cut(file: BinaryIO, at: int, size: int, mark: bytes) -> int:
    """Return the first position from `at`, in bytes, where a line or a document begins.

    A document begins after a mark, or, without one nearby, after a newline or at a character.
    """
    if at <= 0 or at >= size:
        return max(0, min(at, size))
    if not mark:
        file.seek(at - 1)
        while (line := file.readline(LARGEST_PART)) and not line.endswith(b"\n"):
            pass
        return file.tell()
    start = max(0, at - len(mark))
    file.seek(start)
    near = file.read(LARGEST_PART)
    if (found_at := near.find(mark)) >= 0:
        return start + found_at + len(mark)
    newline = near.find(b"\n", at - start - 1)
    return start + (newline + 1 if newline >= 0 else _find_character(near, at - start))


def cut_text(file: BinaryIO, mark: bytes, head: bytes = b"") -> Iterator[tuple[bytes, bool]]:
    """Yield the documents of a text, `head` and the rest of a file, and whether a mark ended each.

    One of more than `LARGEST_PART` bytes is yielded in parts, cut after a newline if there is one.
    """
    rest = b""
    while block := head or file.read(LARGEST_PART):
        head = b""
        *documents, rest = (rest + block).split(mark) if mark else [rest + block]
        yield from ((document, True) for document in documents)
        while len(rest) > LARGEST_PART:
            newline = rest.rfind(b"\n", 0, LARGEST_PART)
            cut = newline + 1 if newline >= 0 else _find_character(rest, LARGEST_PART)
            yield rest[:cut], False
            rest = rest[cut:]
    yield rest, False


def _find_character(data: bytes, at: int) -> int:
    """Return where the first character of UTF-8 begins from `at` on."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def count_row_groups(file: BinaryIO, name: str) -> int:
    """Return the number of a Parquet file's row groups; `CorruptInputError` for a damaged one."""
    with reading(name, "Parquet file", FETCH_AGAIN):
        return int(_import("pyarrow.parquet", PARQUET).ParquetFile(file).num_row_groups)


def read_records(
    file: BinaryIO,
    name: str,
    expected: str,
    *,
    encoding: str,
    quoting: bool,
    on_bad: OnBad,
    on_long_row: Callable[[int], None],
    row_groups: Section | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) for each record of an open file, of lines of JSON by default.

    `expected` describes a line of .jsonl in messages. `on_bad` receives the error of each bad line,
    which is skipped. `row_groups` selects row groups of a Parquet file. A line of another file is
    in UTF-8, or else in `encoding`. `on_long_row` receives the line where each row of several lines
    begins; there are none without `quoting`.
    """
    suffix = ending(name)
    if suffix == PARQUET:
        yield from _read_parquet(file, name, row_groups)
        return
    lines, decode = _open_lines(file, name, encoding)
    if suffix in DELIMITERS:
        rows = csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE
        dialect = {"delimiter": DELIMITERS[suffix], "quoting": rows}
        yield from _read_table(map(decode, lines), name, dialect, on_long_row)
    else:
        yield from read_json_lines(lines, name, expected, on_bad, decode)


def _open_lines(
    file: BinaryIO, name: str, encoding: str
) -> tuple[Iterator[bytes], Callable[[bytes], str]]:
    """Return the lines of a file, and the function that decodes one or raises `UserError`."""
    head = cast(io.BufferedReader, file).peek(4)
    marked = (marked for mark, marked in BYTE_ORDER_MARKS.items() if head.startswith(mark))
    if encoding == "auto":
        encoding = next(marked, "utf-8")
    if "\n".encode(encoding) != b"\n":
        return _transcode(file, name, encoding), bytes.decode

    def decode(line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError:
            with contextlib.suppress(UnicodeDecodeError):
                return line.decode(encoding)
        if encoding == "utf-8":
            raise UserError("no text in UTF-8", hint=GIVE_ENCODING)
        raise UserError(f"no text in UTF-8, nor in {encoding}", hint="give another --encoding")

    return _lines(file, name), decode


def _transcode(file: BinaryIO, name: str, encoding: str) -> Iterator[bytes]:
    """Yield the lines of a file in UTF-8, from an encoding whose newline is another byte."""
    text = io.TextIOWrapper(file, encoding, newline="\n")
    try:
        for line in _lines(text, name):
            yield line.encode()
    except UnicodeError:  # also where a file that is to be UTF-16 has no byte order mark
        raise CorruptInputError(
            f"{name} is not in {encoding.upper()}", hint="give another --encoding, or none"
        ) from None
    finally:
        text.detach()


def _lines(file: IO[AnyStr], name: str) -> Iterator[AnyStr]:
    """Yield the lines of a file; raise `CorruptInputError` for one above `LARGEST_LINE`."""
    for number in count(1):
        line = file.readline(LARGEST_LINE + 1)
        if len(line) > LARGEST_LINE:
            raise CorruptInputError(f"{name}:{number}: a line of more than {LARGEST_LINE:,} bytes")
        if not line:
            return
        yield line


def _read_table(
    lines: Iterator[str],
    name: str,
    dialect: Mapping[str, Any],
    on_long_row: Callable[[int], None],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) for each row of a table; its place is the row's first line."""
    csv.field_size_limit(LARGEST_LINE)
    pieces = chain.from_iterable(  # an old file ends its lines with "\r"
        io.StringIO(line, newline="") if "\r" in line else (line,) for line in _without_mark(lines)
    )
    rows = csv.reader(pieces, strict=True, **dialect)
    columns, first_line = list[str](), 1
    try:
        for row in rows:
            location = f"{name}:{first_line}"
            if rows.line_num > first_line:
                on_long_row(first_line)
            first_line = rows.line_num + 1
            if not columns:
                columns = row
                _require_distinct(columns, name)
            elif row and len(row) != len(columns):
                raise CorruptInputError(
                    f"{location}: the line does not have the {len(columns)} fields of the first "
                    "line",
                    hint="the first line names the columns",
                )
            elif row:
                yield location, dict(zip(columns, row, strict=True))
    except csv.Error as error:
        raise CorruptInputError(f"{name}:{first_line}: {error}") from None
    except UserError as error:
        line = rows.line_num + 1
        raise CorruptInputError(f"{name}:{line}: {error.problem()}", hint=error.hint) from None


def _without_mark(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines without a byte order mark before the first."""
    for first_line in lines:
        yield first_line.removeprefix("\ufeff")
        yield from lines


def _read_parquet(
    file: BinaryIO, name: str, row_groups: Section | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with reading(name, "Parquet file", FETCH_AGAIN):
        if not file.seekable() or PurePath(name).suffix.lower() != PARQUET:
            file = io.BytesIO(file.read())
        table = _import("pyarrow.parquet", PARQUET).ParquetFile(file)
        _require_distinct(table.schema_arrow.names, name)
        groups = range(*row_groups or (0, table.num_row_groups))
        if row_groups is not None:
            number = sum(table.metadata.row_group(n).num_rows for n in range(row_groups[0]))
        for batch in table.iter_batches(PARQUET_ROWS, row_groups=groups):
            for record in batch.to_pylist():
                number += 1
                yield f"{name}:{number}", record


def _require_distinct(columns: Iterable[str], name: str) -> None:
    """Raise `CorruptInputError` where two columns have one name, which could be either's."""
    twice = [column for column, times in Counter(columns).items() if column and times > 1]
    if twice:
        raise CorruptInputError(
            f"{name} has several columns with the name {twice[0]!r}", hint="rename them"
        )


def _import(module: str, suffix: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(
            f"{suffix} files need the package {package}", hint="pip install 'tiedgpt[data]'"
        ) from None

"""Atomic writes of files and directories, and checked reading of JSON.

Like `errors`, this imports nothing heavy and everyone may import it.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from tiedgpt.errors import CorruptInputError, NoRoomError, TiedGPTError, UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Parsed = TypeVar("Parsed")
PREPARED = "prepared.json"
"""Name of the file that identifies a directory of prepared data, complete or not."""
OPENING = "opening.json"
"""Name of the file in a model's directory with the text that the page opens with."""
JSON_LINES = (".jsonl", ".ndjson")
"""Endings of files with a JSON object in each line."""


def exists(path: Path) -> bool:
    """Return whether a path exists.

    Raises `OSError` for a name that is too long or a folder that may not be read, which
    `Path.exists` reports as missing from Python 3.14 on.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def model_directory(path: Path) -> Path:
    """Return the directory of the model in a run's directory; any other path is returned as is."""
    is_run = path.is_dir() and not (path / "config.json").exists() and (path / "model").is_dir()
    return path / "model" if is_run else path


def missing_run(path: Path) -> UserError | None:
    """Return the error for a path that does not exist in a folder of runs; None for other folders.

    A path without a folder is looked for in runs/.
    """
    folder = path.parent if len(path.parts) > 1 else Path("runs")
    names = [file.parent.name for file in folder.glob("*/run.toml")]
    if not names:
        return None
    similar = [name for name in names if name.startswith(path.name)]
    similar = similar or difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = (
        f"did you mean {folder / similar[0]}?"
        if similar
        else f"{folder} has {', '.join(sorted(names))}"
    )
    return UserError(f"there is no run {path}", hint=hint)


def suggest_path(path: str) -> str:
    """Return "did you mean ...?" for the path most similar to a missing one, or ""."""
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError, ValueError):
        return suggest(name, os.listdir(folder or "."), folder)
    return ""


def suggest(name: str, names: Iterable[str], folder: str = "") -> str:
    """Return "did you mean ...?" for the most similar of other names, or ""."""
    near = difflib.get_close_matches(name, [*names], n=1, cutoff=0.7)
    return f"did you mean {os.path.join(folder, near[0])}?" if near and near[0] != name else ""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; sync and rename it when the block succeeds.

    The parent directory is created. If the block fails, the temporary file or directory is removed
    and `path` is unchanged. A full disk raises `NoRoomError`. A file replaces a file; for a
    directory, `path` must not exist.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            for file in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
                sync(file)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            remove(temporary)


@contextlib.contextmanager
def reading(path: Path | str, what: str, hint: str | None = None) -> Iterator[None]:
    """Turn every exception of a format's reader into one of our errors.

    `what` names the expected file: "ONNX file". A file that the system cannot read raises
    `UserError`; any other exception but Python's `MemoryError` means damaged content and becomes a
    `CorruptInputError` with the hint.
    """
    try:
        yield
    except TiedGPTError:
        raise
    except Exception as error:
        if type(error) is MemoryError:  # libraries have their own, for sizes that a file claims
            raise
        if isinstance(error, OSError) and error.errno:
            raise UserError(
                f"{path}: cannot be read ({error.strerror})", hint="check the file"
            ) from None
        why = " ".join(str(error).split()) or type(error).__name__
        why = "".join(c if c.isprintable() else repr(c)[1:-1] for c in why[:200])
        raise CorruptInputError(f"{path} is damaged or no {what}: {why}", hint=hint) from None


def sync(path: Path) -> None:
    """Flush a file or the entries of a directory to the disk, where the system can."""
    if os.name != "posix" and path.is_dir():
        return
    flags = os.O_RDONLY if os.name == "posix" else os.O_RDWR  # Windows syncs what it may write
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_running(pid: int) -> bool:
    """Whether there is a process of this number; True where asking would end it (on Windows)."""
    with contextlib.suppress(PermissionError):  # another user's
        try:
            if os.name == "posix":
                os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def remove(path: Path) -> None:
    """Delete a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk into `NoRoomError` and any other failure to write into `UserError`."""
    try:
        yield
    except TiedGPTError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoRoomError(
                f"no room on the disk for {path}", hint="free some space or write elsewhere"
            ) from error
        why = error.strerror or error
        raise UserError(f"cannot write {path}: {why}", hint="check the path") from error


def lock_file(file: IO[str]) -> bool:
    """Lock an open file until it is closed; return whether the lock was obtained."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return fcntl is None


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files of killed processes that were inside `replacing`."""
    for path in directory.glob(".*.tmp-*"):
        remove(path)


def format_bytes(n_bytes: float) -> str:
    """Return a number of bytes as people write it: 512 bytes, 12.3 MB, 250 MB, 2.5 GB."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:,.1f} GB"
    return f"{round(n_bytes / 1e6, 1):g} MB" if n_bytes >= 50_000 else f"{n_bytes:,.0f} bytes"


def format_count(count: float, noun: str) -> str:
    """Return a count with its noun: `1 minute`, `2,400 documents`."""
    return f"1 {noun}" if count == 1 else f"{count:,.10g} {noun}s"


def list_some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names with commas between them, and ", ..." if there are more."""
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])


def require_room(directory: Path, n_bytes: int) -> None:
    """Raise `NoRoomError` where less than `n_bytes` are free, before anything is written."""
    parent = directory.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < n_bytes:
        raise NoRoomError(
            f"{directory} needs {format_bytes(n_bytes)}, {format_bytes(free)} are free",
            hint="free some",
        )


def beside(path: Path, name: str, *, links: bool = False) -> Path:
    """Return the path of a file that another file names; both must be in one directory.

    Unless `links`, a link out of it is followed only into the blobs of a Hugging Face cache. Raises
    `CorruptInputError` for a path, for such a link, and where there is no such file.
    """
    directory = path if path.is_dir() else path.parent
    printable = name[:80].encode("unicode_escape").decode()
    try:
        there = bool(name) and Path(name).name == name and (directory / name).is_file()
    except (OSError, ValueError):  # too long, a zero byte, a lone surrogate
        there = False
    if not there:
        raise CorruptInputError(f"{path} names the file {printable!r}, which is not beside it")
    if not links and leads_out(directory, directory / name):
        raise CorruptInputError(f"{path} names the file {printable!r}, a link out of its directory")
    return directory / name


def leads_out(directory: Path, file: Path) -> bool:
    """Whether a file in a directory is a link to elsewhere, other than to a hub cache's blobs."""
    home, lies = directory.resolve(), file.resolve()
    blobs = home.parent.parent / "blobs"  # beside snapshots/REVISION
    in_cache = home.parent.name == "snapshots" and lies.parent == blobs
    return not (lies.is_relative_to(home) or in_cache)


def read_json(path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, Any]:
    """Return the object in a JSON file; anything else is a `CorruptInputError`."""
    try:
        value = json.loads(read(path).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptInputError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptInputError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_json_lines(
    lines: Iterable[bytes],
    name: str,
    expected: str,
    on_bad: Callable[[CorruptInputError], None] | None = None,
    decode: Callable[[bytes], str] = bytes.decode,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`name:number`, object) for each line of a `.jsonl` file; skip blank lines.

    `lines` is the file, opened as bytes: only a newline ends a line. (`splitlines` would also
    divide lines within a string, at U+2028.) Messages call the content of a line `expected`.
    `on_bad` is called with the error of a bad line, which is then skipped. `decode` may raise
    `UserError`.

    Raises:
        CorruptInputError: a line is not a JSON object of valid Unicode, or gives a field twice.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark
        if not line.strip():
            continue
        location = f"{name}:{number}"
        try:
            record = decoder.decode(decode(line))
            if not isinstance(record, dict):
                raise ValueError(f"got a JSON {type(record).__name__}")
            if b"\\u" in line:  # escapes may spell half a surrogate pair, which is not Unicode
                json.dumps(record, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            problem, hint = f"not a JSON object ({error}); a line is {expected}", None
            if number == 1 and line.startswith(b"["):
                hint = "jq -c '.[]' makes lines of a JSON array"
            if isinstance(error, UserError):
                problem, hint = error.problem(), error.hint
            bad = CorruptInputError(f"{location}: {problem}", hint=hint)
            if on_bad is None:
                raise bad from None
            on_bad(bad)
        else:
            yield location, record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a list of fields; raise `UserError` for a repeated name."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"the field {twice[:80]!r} is given twice", hint="keep one of them")
    return record


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, which end at a newline, or at a carriage return and a newline."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def parse_json_lines(
    path: Path, expected: str, parse: Callable[[dict[str, Any], str], Parsed]
) -> Iterator[Parsed]:
    """Yield parse(object, `path:number`) for each line of a `.jsonl` file.

    Raises the errors of `parse_records`, and `UserError` for an unreadable file.
    """
    with reading(path, "file of JSON lines"), path.open("rb") as file:
        yield from parse_records(read_json_lines(file, str(path), expected), expected, parse)


def parse_records(
    records: Iterable[tuple[str, dict[str, Any]]],
    expected: str,
    parse: Callable[[dict[str, Any], str], Parsed],
) -> Iterator[Parsed]:
    """Yield parse(record, place) for each record with its place.

    `parse` raises `UserError`, `TypeError` or `ValueError` for a bad record, which becomes a
    `CorruptInputError` with its place and `expected`.
    """
    for origin, record in records:
        try:
            parsed = parse(record, origin)
        except (UserError, TypeError, ValueError) as error:
            raise CorruptInputError(f"{origin}: {error}; a line is {expected}") from None
        yield parsed


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, atomically."""
    with replacing(path) as temporary:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        # A lone surrogate, which JSON can hold and UTF-8 cannot, stays the escape that it was.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")

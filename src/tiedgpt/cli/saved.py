"""Results kept in a file as they are made, so that an interrupted command goes on."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json_lines, reading, writing

S = TypeVar("S")


def resume(
    path: Path | None, facts: dict[str, Any], kind: type[S], later: Callable[[int], Iterator[S]]
) -> tuple[list[S], Iterator[S]]:
    """Return the scores that a file holds, and an iterator of those after them.

    `later(n)` yields the scores but for the first n; they are kept in the file as they come.
    Without a path there is nothing to resume. Raises `UserError` for a file with other facts,
    `CorruptInputError` for one that holds no such results.
    """
    if path is None:
        return [], later(0)
    saved = _read_scores(path, facts, kind)
    return saved, _keep(path, facts, later(len(saved)))


def _read_scores(path: Path, facts: dict[str, Any], kind: type[S]) -> list[S]:
    """Return the scores that a file of `resume` holds; none where there is no file.

    A last line that was cut off is dropped, in the file as well; it may be the first one, with the
    facts.
    """
    with reading(path, "file of results"):
        text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    lines = [line for _, line in read_json_lines(io.BytesIO(whole), str(path), "a result")]
    if not lines and not _first_line(facts).startswith(text):
        raise CorruptInputError(f"{path} holds no results", hint="name another file, or delete it")
    first, *rest = lines or [facts]
    try:
        scores = [kind(**line) for line in rest]
    except TypeError as error:
        raise CorruptInputError(
            f"{path} holds no results of this edition ({error})",
            hint="name another file, or delete it",
        ) from None
    if first != facts:
        raise UserError(
            f"{path} holds other results (model, data or options differ)",
            hint="name another file, or delete it",
        )
    if len(whole) < len(text):
        with writing(path):
            os.truncate(path, len(whole))
    return scores


def _keep(path: Path, facts: dict[str, Any], scores: Iterable[S]) -> Iterator[S]:
    """Append each score to a file and pass it on; a new file begins with the facts."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    with file:
        line = "" if file.tell() else _first_line(facts).decode()
        for score in scores:
            line += json.dumps(asdict(score)) + "\n"  # type: ignore[call-overload]
            with writing(path):
                print(line, end="", file=file, flush=True)
            line = ""
            yield score


def _first_line(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts).encode() + b"\n"

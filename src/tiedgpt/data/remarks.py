"""Facts about the files of a corpus that the user should know, and their words."""

import contextlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiedgpt.data.records import UnreadFields, describe_kind
from tiedgpt.files import format_count, list_some
from tiedgpt.text.bpe import END_OF_TEXT

STDIN = "-"
FIRST_RECORD = re.compile(r"\s*(\[\s*)?(?=\{)")
"""The text before the first record of JSON; with a group for an array of records."""


@dataclass
class Remarks:
    """Facts about the files of a corpus that the user should know."""

    pins: dict[str, str] = field(default_factory=dict)
    """Hub sources without a revision, and the same sources with the resolved revision."""
    guessed: dict[str, str] = field(default_factory=dict)
    """Encodings of named files that are not UTF-8."""
    separated: dict[str, int] = field(default_factory=dict)
    """Number of documents of each text file that contains `<|endoftext|>`."""
    skipped: set[str] = field(default_factory=set)
    """Paths in folders that are not UTF-8 or not regular files."""
    unread: set[str] = field(default_factory=set)
    """Paths in folders that were left out because of their ending, such as .pdf."""
    binary: set[str] = field(default_factory=set)
    """Paths in folders that were left out because they hold a NUL byte."""
    json_texts: dict[str, str] = field(default_factory=dict)
    """Text files that hold JSON records, and a description of these."""
    unread_fields: UnreadFields = field(default_factory=UnreadFields)
    """Number of records with each field that is not read."""

    special_tokens: Counter[str] = field(default_factory=Counter)
    """Number of times that the texts spell each special token of the tokenizer."""
    long_rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number of rows of several lines in each table, and the line of the first."""

    def to_json(self) -> dict[str, Any]:
        """Return the remarks with lists in place of sets."""
        return {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in vars(self).items()
        }

    def add(self, remarks: dict[str, Any]) -> None:
        """Add the output of `to_json` of other files, or of other sections of the same files."""
        for name, count in remarks["separated"].items():
            self.separated[name] = self.separated.get(name, 0) + count
        self.guessed |= remarks["guessed"]
        self.pins |= remarks["pins"]
        self.skipped |= {*remarks["skipped"]}
        self.unread |= {*remarks["unread"]}
        self.binary |= {*remarks["binary"]}
        self.json_texts |= remarks["json_texts"]
        self.unread_fields.update(remarks["unread_fields"])
        self.special_tokens.update(remarks["special_tokens"])
        self.long_rows |= remarks["long_rows"]

    def notes(self) -> list[str]:
        """Return the remarks in words."""
        notes = [
            f"{name} is read as {encoding}; --encoding names another"
            for name, encoding in self.guessed.items()
        ]
        notes += [
            f"{source} is {pin}, which names this revision" for source, pin in self.pins.items()
        ]
        separated = {f"{name} has": count for name, count in self.separated.items()}
        if len(separated) > 3:
            separated = {f"{len(separated):,} files have": sum(separated.values())}
        notes += [
            f"{name} {format_count(count, 'document')}, separated by {END_OF_TEXT}; "
            "--keep-end-of-text treats it as ordinary text"
            for name, count in separated.items()
        ]
        notes += [
            f"{name} holds {records}, and is read as text; {format_conversion(name, records)}"
            for name, records in [*self.json_texts.items()][:3]
        ]
        reasons = {"not text in UTF-8": self.skipped, "binary": self.binary}
        if self.unread:
            reasons[f"as {format_endings(self.unread)} is not read"] = self.unread
        for reason, paths in reasons.items():
            names = list_some(sorted(paths))
            files = format_count(len(paths), "file")
            notes += [f"left out {files}, {reason}: {names}"] if paths else []
        notes += [
            f"{name} has {'1 row' if count == 1 else f'{count:,} rows'} of several lines, inside "
            f"quotes (the first in line {line:,}); --no-quoting takes quotes for text"
            for name, (count, line) in [*self.long_rows.items()][:3]
        ]
        notes += note_special_tokens(self.special_tokens)
        return notes + self.unread_fields.notes()


def special_token_finder(tokenizer: Any) -> Callable[[str], list[str]]:
    """Return a function that lists the special tokens that a text spells."""
    tokens = sorted(tokenizer.special_tokens, key=len, reverse=True)  # the longest match counts
    if not tokens:
        return lambda text: []
    return re.compile("|".join(map(re.escape, tokens))).findall


def note_special_tokens(counts: Mapping[str, int]) -> list[str]:
    """Return a note on special tokens that texts spell, if there are any."""
    if not counts:
        return []
    named = ", ".join(f"{token} ({count:,})" for token, count in [*counts.items()][:3])
    more = ", ..." if len(counts) > 3 else ""
    return [f"special tokens that the texts spell are read as ordinary text: {named}{more}"]


def find_json(head: bytes) -> str:
    """Return a description of the JSON records at the beginning of a text; "" for other text."""
    text = head.decode("utf-8-sig", errors="ignore")
    start = FIRST_RECORD.match(text)
    if start is None:
        return ""
    with contextlib.suppress(ValueError, RecursionError):
        record, end = json.JSONDecoder().raw_decode(text, start.end())
        rest = text[end:].lstrip(" \t\r")
        if start[1] and rest.startswith((",", "\n", "]")):
            return f"a JSON array of {describe_kind(record)}"
        if rest.startswith("\n") and "\n" not in text[start.end() : end]:
            return f"{describe_kind(record)} in lines of JSON"
    return ""


def format_conversion(name: str, records: str) -> str:
    """Return how to make .jsonl of a file with the records that `find_json` found."""
    if name == printable(STDIN):
        return "to read its records, save them in a .jsonl file, one on each line, and name it"
    target = shlex.quote(f"{os.path.splitext(name)[0]}.jsonl")
    command = "jq -c '.[]' {} > {}" if "array" in records else "mv {} {}"
    return f"to read its records: {command.format(shlex.quote(name), target)}"


def format_endings(paths: Iterable[str]) -> str:
    """Return the endings of file names: `.csv`, or `.csv or .zip`."""
    return " or ".join(sorted({os.path.splitext(path)[1].lower() for path in paths}))


def printable(path: str) -> str:
    """Return a path that can be printed even if its bytes are not UTF-8."""
    return "<stdin>" if path == STDIN else path.encode(errors="replace").decode()

"""How records are read and their texts become ids, the same in training and afterwards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer


def read_text(record: Mapping[str, Any], field: str) -> str:
    """Return the text in a field; `UserError` where there is none, or it is blank."""
    value = record.get(field)
    if not isinstance(value, str):
        held = ", ".join(map(repr, record)) or "nothing"
        raise UserError(f"no string in the field {field!r}; it holds {held}")
    if not value.strip():
        raise UserError(f"the field {field!r} is empty")
    return value


def read_list(record: Mapping[str, Any], field: str) -> list[Any]:
    """Return the list in a field; `UserError` where there is none, or it is empty."""
    value = record.get(field)
    if not isinstance(value, list) or not value:
        raise UserError(f"no list in the field {field!r}")
    return value


def read_texts(record: Mapping[str, Any], field: str) -> list[str]:
    """Return the list of texts in a field; `UserError` where one is no text, or blank."""
    values = read_list(record, field)
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{value!r} in {field!r} is no text")
    return values


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the ids of words, and where each word's last token is, the first to have seen it."""
    ids, last = list[int](), list[int]()
    for at, word in enumerate(words):
        ids += tokenizer.encode(f" {word}" if at else word)
        last.append(len(ids) - 1)
    return ids, last


def choice_texts(text: str, choices: Sequence[str]) -> tuple[str, ...]:
    """Return a text with each of its continuations."""
    spaced = text[-1].isspace()
    return tuple(text + ("" if spaced or c[0].isspace() else " ") + c for c in choices)


def question_text(question: str, context: str) -> tuple[str, int]:
    """Return a question and the text to find its answer in, and where that begins in it."""
    return f"{question}\n{context}", len(question) + 1


def find_token_spans(
    ids: Sequence[int], tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the first and the last token that have a byte of characters [start, end).

    Raises `UserError` where the tokens are not the text byte for byte.
    """
    starts = token_starts(ids, tokenizer, text)
    for start, end in spans:
        first, after = len(text[:start].encode()), len(text[:end].encode())
        yield bisect_right(starts, first) - 1, bisect_right(starts, after - 1) - 1


def find_characters(starts: Sequence[int], text: str, first: int, last: int) -> tuple[int, int]:
    """Return the characters [start, end) of tokens, without blanks at the ends.

    `starts` are those of `token_starts`.
    """
    data = text.encode()
    begin = starts[first]
    end = starts[last + 1] if last + 1 < len(starts) else len(data)
    start = len(data[:begin].decode(errors="ignore"))
    stop = len(text) - len(data[end:].decode(errors="ignore"))
    while start < stop and text[start].isspace():
        start += 1
    while stop > start and text[stop - 1].isspace():
        stop -= 1
    return start, stop


def token_starts(ids: Sequence[int], tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the byte at which each token begins; `UserError` if they are not the text."""
    pieces = [tokenizer.token_bytes(id) for id in ids]
    if b"".join(pieces) != text.encode():
        raise UserError("the tokenizer does not keep this text as it is: no place can be found")
    return list(accumulate(map(len, pieces[:-1]), initial=0))

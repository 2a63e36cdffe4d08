"""Examples for fine-tuning: `.jsonl` lines -> ids and a mask of the trained ones.

The fields of a line determine its kind, which must be the same for all lines of a run:

    {"text": ...}                                         every token is trained
    {"prompt": ..., "completion": ...}                    the completion is trained
    {"messages": [{"role": ..., "content": ...}, ...]}    the replies are trained

The first two end on the tokenizer's end of text, which is trained. A text file is one `text`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tiedgpt.data.corpus import FileCorpus
from tiedgpt.data.templates import CHATML, Piece, Template, encode_pieces, read_template
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text.bpe import END_OF_TEXT

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

ExampleType = Literal["text", "completion", "messages"]
FIELDS: list[tuple[set[str], ExampleType]] = [
    ({"text"}, "text"),
    ({"prompt", "completion"}, "completion"),
    ({"messages"}, "messages"),
    ({"conversations"}, "messages"),
]
"""A field that is null counts as absent."""
EXPECTED = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'
ROLES = {"human": "user", "gpt": "assistant"}
"""Names of roles in `conversations`."""
REMARKS = {
    "skipped": "bad lines that were skipped",
    "dropped": "examples longer than the context, dropped",
    "cut": "examples longer than the context, cut",
    "space": "prompts that end in a space, which should begin the completion instead",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One example, encoded."""

    location: str
    """Origin: `path:line`."""
    ids: list[int]
    """(N,)"""
    counted: list[bool]
    """(N,): whether a token is trained. The first never is, since nothing precedes it."""
    turns: int = 1
    """Number of replies, trained or not."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A problem of some examples."""

    count: int
    first: str
    """Place of the first one, with the error of a skipped line."""


class ExampleReader:
    """The examples of files, encoded; it can be iterated any number of times.

    The attribute `tokenizer` adds the special tokens of the kind; the model then needs rows for
    them (`tie.add_tokens`). `template` may be the tokenizer's directory, whose template is read,
    with ChatML as the default. `remarks` counts the problems of the last iteration by the names in
    `REMARKS`; `max_turns` is the largest number of replies in an example.

    Raises:
        UserError: an example is longer than `context`, with `too_long="error"`; or none is left.
        CorruptInputError: a line is no example, nothing in it is trained, or it is of another kind
            than the first. `skip_bad` counts such lines instead, except those of another kind.
    """

    def __init__(
        self,
        corpus: FileCorpus,
        tokenizer: Tokenizer,
        *,
        template: Template | Path = CHATML,
        context: int | None = None,
        too_long: Literal["drop", "cut", "error"] = "drop",
        skip_bad: bool = False,
    ) -> None:
        if context is not None and context < 2:
            raise UserError(f"context must be at least 2 tokens, got {context}")
        self.corpus, self.context, self.template = corpus, context, CHATML
        self.too_long, self.skip_bad = too_long, skip_bad
        self.remarks: dict[str, Remark] = {}
        self.max_turns = 0
        self.kind: ExampleType = next(self._records())[1]
        needed = [END_OF_TEXT] if tokenizer.eos_token_id is None else []
        if self.kind == "messages":
            chosen = template if isinstance(template, Template) else read_template(template)
            self.template = chosen or CHATML
            needed += self.template.tokens
        self.tokenizer = tokenizer.with_special_tokens(needed)

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples in the order of the files."""
        self.remarks, self.max_turns = {}, 0
        n_examples = 0
        for location, _, record in self._records():
            try:
                example = self._encode(location, record)
            except UserError as error:
                self._bad(CorruptInputError(f"{location}: {error}"))
                continue
            if (fitting := self._fitting(example)) is not None:
                n_examples += 1
                self.max_turns = max(self.max_turns, fitting.turns)
                yield fitting
        if not n_examples:
            raise UserError(f"no example is left to train on: {'; '.join(self.notes())}")

    def notes(self) -> list[str]:
        """Return the remarks in words."""
        return [
            f"{REMARKS[name]}: {r.count:,} (first: {r.first})" for name, r in self.remarks.items()
        ]

    def _records(self) -> Iterator[tuple[str, ExampleType, dict[str, Any]]]:
        """Yield the lines with their kind, which is the same for all."""
        first: tuple[str, ExampleType] | None = None
        for location, record in self.corpus.records(EXPECTED, self._bad):
            try:
                example_type = _find_type(record)
            except UserError as error:
                self._bad(CorruptInputError(f"{location}: {error}; a line is {EXPECTED}"))
                continue
            first = first or (location, example_type)
            if example_type != first[1]:
                raise CorruptInputError(
                    f"{location} is of the kind {example_type}, and {first[0]} of the kind "
                    f"{first[1]}",
                    hint="put each kind into its own file",
                )
            yield location, example_type, record
        if first is None:
            why = "; ".join(self.notes()) or "every file is empty"
            raise UserError(f"no line is an example ({why}): a line is {EXPECTED}")

    def _encode(self, location: str, record: Mapping[str, Any]) -> Example:
        turns = 1
        if self.kind == "messages":
            messages = list(_messages(record))
            pieces = list(self.template.pieces(messages))
            turns = self.template.count_turns(messages)
        else:
            names = ("text",) if self.kind == "text" else ("prompt", "completion")
            pieces = [Piece(_string(record, name), counted=name != "prompt") for name in names]
            pieces.append(Piece(END_OF_TEXT, True, True))
            if self.kind == "completion" and pieces[0].text.endswith(" "):
                self._remark("space", location)
        ids, counted = encode_pieces(pieces, self.tokenizer)
        if not any(counted[1:]):
            raise UserError("nothing in it is trained: it has no reply, or no text")
        return Example(location, ids, counted, turns)

    def _fitting(self, example: Example) -> Example | None:
        """Return the example if it fits the context, what fits of it, or None."""
        room, location = self.context, example.location
        if room is None or len(example.ids) <= room:
            return example
        if self.too_long == "error":
            raise UserError(
                f"{location} has {len(example.ids):,} tokens, and the context {room:,}",
                hint="give a longer context, or too_long='cut' (--too-long cut)",
            )
        cut = self.too_long == "cut" and any(example.counted[1:room])
        self._remark("cut" if cut else "dropped", location)
        if not cut:
            return None
        return Example(location, example.ids[:room], example.counted[:room], example.turns)

    def _bad(self, error: CorruptInputError) -> None:
        if not self.skip_bad:
            hint = "--skip-bad skips and counts such lines"
            raise CorruptInputError(error.message, hint=hint) from None
        self._remark("skipped", str(error))

    def _remark(self, name: str, where: str) -> None:
        before = self.remarks.get(name, Remark(0, where))
        self.remarks[name] = Remark(before.count + 1, before.first)


def _find_type(record: Mapping[str, Any]) -> ExampleType:
    present = {name for name, value in record.items() if value is not None}
    kinds = [example_type for fields, example_type in FIELDS if fields <= present]
    if len(kinds) != 1:
        named = " and ".join(kinds) or "none"
        raise UserError(f"its fields are of {named} of the kinds: {', '.join(map(repr, record))}")
    return kinds[0]


def _string(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise UserError(f"{name!r} must be a string, got {type(value).__name__}")
    return value


def _messages(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield role, content and `train` of each message of a line."""
    listed = record.get("messages")
    listed = record.get("conversations") if listed is None else listed
    if not isinstance(listed, list) or not all(isinstance(message, dict) for message in listed):
        raise UserError("its messages must be a list of objects")
    for message in listed:
        role, content = ("role", "content") if "role" in message else ("from", "value")
        name, train = _string(message, role), message.get("train")
        if train is not None and not isinstance(train, bool):
            raise UserError(f"'train' must be true or false, got {train!r}")
        text = _string(message, content)
        yield {"role": ROLES.get(name, name), "content": text, "train": train}


@dataclass(frozen=True)
class EncodedExamples:
    """Examples one after another in memory, 5 bytes a token."""

    ids: NDArray[np.uint32]
    """(N,)"""
    counted: NDArray[np.bool_]
    """(N,): whether a token is trained."""
    ends: NDArray[np.int64]
    """(n,): where each example ends."""

    @classmethod
    def gather(cls, examples: Iterable[Example]) -> EncodedExamples:
        """Return the examples of a reader."""
        ids, counted, ends = array("I"), bytearray(), array("q")
        for example in examples:
            ids.extend(example.ids)
            counted.extend(example.counted)
            ends.append(len(ids))
        mask = np.frombuffer(counted, np.bool_)
        return cls(np.frombuffer(ids, np.uint32), mask, np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def example(self, number: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Return the ids and the mask of one, both (N,)."""
        start = int(self.ends[number - 1]) if number else 0
        here = slice(start, int(self.ends[number]))
        return self.ids[here], self.counted[here]

"""Examples for fine-tuning: `.jsonl` lines -> ids and a mask of the trained ones.

The fields of a line determine its kind (`records.py`), which is the same for all lines of a run:

    text          every token is trained
    completion    the completion is trained, and the prompt before it is not
    messages      the replies are trained

The first two begin with the tokenizer's `begin_ids` and end on its end of text, which is
trained; a chat template is the whole text of `messages`. A text file is one `text`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tiedgpt.data.corpus import FileCorpus
from tiedgpt.data.records import (
    EXPECTED,
    ExampleType,
    Message,
    UnreadFields,
    find_type,
    parse_record,
)
from tiedgpt.data.remarks import note_special_tokens, special_token_finder
from tiedgpt.data.templates import CHATML, Piece, Template, encode_pieces
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.options import read_number
from tiedgpt.signatures import wrong_type
from tiedgpt.text.bpe import END_OF_TEXT

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

REMARKS = {
    "skipped": "bad lines that were skipped",
    "dropped": "examples longer than the context, dropped",
    "cut": "examples longer than the context, cut",
    "space": "prompts that end in a space, which should begin the completion instead",
    "no reply": "messages marked to be trained that are not replies, and are not trained",
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
    system: str | None = None
    """The system message at its beginning."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A problem of some examples."""

    count: int
    first: str
    """Place of the first one, with the error of a skipped line."""


class ExampleReader:
    """The encoded examples of files, to be iterated any number of times.

    The attribute `tokenizer` adds the special tokens of the kind; the model then needs rows for
    them (`tie.add_tokens`). `template` may be a function that reads the tokenizer's, which is used
    without its default system message, and ChatML is the default. `remarks` counts the problems of
    the last iteration by the names in `REMARKS`, `unread` the fields that were not read, and
    `special_tokens` the special tokens that texts spell, which are ordinary text. `max_turns` is
    the largest number of replies in an example; `default_system` is the system message with which
    all examples begin, if it is one.

    Raises:
        UserError: an example is longer than `context`, with `too_long="error"`; none is left; or a
            line is of another kind than the first.
        CorruptInputError: a line is no example, or nothing in it is trained. `skip_bad` counts such
            lines instead.
    """

    def __init__(
        self,
        corpus: FileCorpus,
        tokenizer: Tokenizer,
        *,
        template: Template | Callable[[], Template | None] = CHATML,
        context: int | None = None,
        too_long: Literal["drop", "cut", "error"] = "drop",
        skip_bad: bool = False,
    ) -> None:
        if not hasattr(corpus, "records"):
            raise wrong_type("ExampleReader", "corpus", "FileCorpus", corpus)
        if context is not None:
            context = read_number("context", context, int, least=2)
        self.corpus, self.context, self.template = corpus, context, CHATML
        self.too_long, self.skip_bad = too_long, skip_bad
        self.remarks: dict[str, Remark] = {}
        self.unread, self.special_tokens = UnreadFields(), Counter[str]()
        self.max_turns = 0
        self.default_system: str | None = None
        self.kind: ExampleType = next(self._records())[1]
        needed = [END_OF_TEXT] if tokenizer.eos_token_id is None else []
        if self.kind == "messages":
            if isinstance(template, Template):
                self.template = template
            else:
                stored = template() or CHATML
                self.template = replace(stored, default_system=None)
            needed += self.template.tokens
        self.tokenizer = tokenizer.with_special_tokens(needed)
        self._find_special_tokens = special_token_finder(self.tokenizer)

    def __iter__(self) -> Iterator[Example]:
        """Yield the examples in the order of the files."""
        self.remarks, self.max_turns = {}, 0
        self.unread, self.special_tokens = UnreadFields(), Counter[str]()
        systems, n_examples = set[str | None](), 0
        for location, _, record in self._records():
            try:
                example = self._encode(location, record)
            except UserError as error:
                self._bad(_locate(error, location))
                continue
            if (fitting := self._fitting(example)) is not None:
                n_examples += 1
                self.max_turns = max(self.max_turns, fitting.turns)
                if len(systems) < 2:
                    systems.add(fitting.system)
                yield fitting
        self.default_system = systems.pop() if len(systems) == 1 else None
        if not n_examples:
            raise UserError(f"no example is left to train on: {'; '.join(self.notes())}")

    def notes(self) -> list[str]:
        """Return the remarks on the examples and on their files, in words."""
        return [
            f"{REMARKS[name]}: {r.count:,} (first: {r.first})" for name, r in self.remarks.items()
        ] + [
            *self.corpus.remarks.notes(),
            *note_special_tokens(self.special_tokens),
            *self.unread.notes(),
        ]

    def _records(self) -> Iterator[tuple[str, ExampleType, dict[str, Any]]]:
        """Yield the lines with their kind, which is the same for all."""
        first: tuple[str, ExampleType] | None = None
        for location, record in self.corpus.records(EXPECTED, self._bad):
            try:
                example_type = find_type(record)
            except UserError as error:
                self._bad(_locate(error, location), is_first=first is None)
                continue
            first = first or (location, example_type)
            if example_type != first[1]:
                raise UserError(
                    f"{location} is of the kind {example_type}, and {first[0]} of the kind "
                    f"{first[1]}",
                    hint="put each kind into its own file",
                )
            yield location, example_type, record
        if first is None:
            why = "; ".join(self.notes()) or "every file is empty"
            raise UserError(f"no line is an example ({why}): a line is {EXPECTED}")

    def _encode(self, location: str, record: Mapping[str, Any]) -> Example:
        parsed, turns, system = parse_record(record, self.template.roles), 1, None
        self.unread.update(parsed.unread)
        for text in (*parsed.texts, *(message.content for message in parsed.messages)):
            self.special_tokens.update(self._find_special_tokens(text))
        if self.kind == "messages":
            messages = list(map(asdict, parsed.messages))
            pieces = list(self.template.pieces(messages))
            turns, system = self.template.count_turns(messages), self.template.default_system
            if messages and messages[0]["role"] == "system":
                system = messages[0]["content"]
            if any(self._is_no_reply(message) for message in parsed.messages):
                self._remark("no reply", location)
        else:
            *prompt, trained = parsed.texts
            pieces = [Piece(text, False) for text in prompt]
            pieces += [Piece(trained, True), Piece(END_OF_TEXT, True, True)]
            if prompt and prompt[0].endswith(" "):
                self._remark("space", location)
        ids, counted = encode_pieces(pieces, self.tokenizer)
        if self.kind != "messages":
            begin = self.tokenizer.begin_ids
            ids, counted = [*begin, *ids], [False] * len(begin) + counted
        if not any(counted[1:]):
            raise UserError("nothing in it is trained: it has no text, or no reply to train")
        return Example(location, ids, counted, turns, system)

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
        return replace(example, ids=example.ids[:room], counted=example.counted[:room])

    def _bad(self, error: CorruptInputError, *, is_first: bool = False) -> None:
        """Raise the error of a line, or count it. `is_first`: skipping may leave no line."""
        if not self.skip_bad:
            skip = [] if is_first and error.hint else ["--skip-bad skips and counts such lines"]
            hint = "; ".join([error.hint, *skip] if error.hint else skip)
            raise CorruptInputError(error.message, hint=hint) from None
        self._remark("skipped", str(error))

    def _is_no_reply(self, message: Message) -> bool:
        return bool(message.train) and not self.template.roles[message.role].counted

    def _remark(self, name: str, where: str) -> None:
        before = self.remarks.get(name, Remark(0, where))
        self.remarks[name] = Remark(before.count + 1, before.first)


def _locate(error: UserError, location: str) -> CorruptInputError:
    return CorruptInputError(f"{location}: {error.problem()}", hint=error.hint)


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

"""Multiple choice and cloze: the share of examples whose right answer is the likeliest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiedgpt.data.corpus import FileCorpus
from tiedgpt.data.records import is_example
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.evaluate.intervals import Interval, share_interval
from tiedgpt.evaluate.texts import require_tokenizer
from tiedgpt.files import parse_records
from tiedgpt.infer import Engine
from tiedgpt.infer.prompts import split_choices
from tiedgpt.signatures import checked

CONTEXTS = ("context", "prompt", "question")
EXPECTED = (
    '{"context": .., "choices": .., "answer": ..}, {"context": .., "completion": ..} or '
    '{"text": ..}'
)


@dataclass(frozen=True)
class ChoiceExample:
    """A context, the choices that may follow it, and the index of the right one."""

    context: str
    choices: tuple[str, ...]
    """A single choice is a cloze."""
    answer: int = 0
    location: str = field(default="", compare=False, repr=False)
    """Origin for messages: `path:line`."""


@dataclass(frozen=True)
class ExampleScore:
    """Log-probabilities of the choices of an example."""

    logprobs: list[float]
    lengths: list[int]
    """Length of each choice in characters."""
    is_greedy: list[bool]
    """Whether greedy decoding writes the choice."""
    answer: int
    is_cut: bool
    """Whether the beginning of a long context was omitted."""

    @property
    def chosen(self) -> int:
        """The likeliest choice."""
        return max(range(len(self.logprobs)), key=self.logprobs.__getitem__)

    @property
    def chosen_by_length(self) -> int:
        """The choice with the highest log-probability per character."""
        means = [p / max(1, n) for p, n in zip(self.logprobs, self.lengths, strict=True)]
        return max(range(len(means)), key=means.__getitem__)


@dataclass(frozen=True)
class ExamplesScore:
    """Accuracy on several examples."""

    scores: Sequence[ExampleScore]

    @property
    def is_cloze(self) -> bool:
        """Whether all examples are clozes."""
        return all(len(score.logprobs) == 1 for score in self.scores)

    @property
    def n_right(self) -> int:
        """Number of examples with a right choice, or a cloze that greedy decoding completes."""
        if self.is_cloze:
            return sum(score.is_greedy[0] for score in self.scores)
        return sum(score.chosen == score.answer for score in self.scores)

    @property
    def accuracy(self) -> float:
        """The share of `n_right`."""
        return self.n_right / len(self.scores)

    @property
    def interval(self) -> Interval:
        """95 % interval of `accuracy`."""
        return share_interval(self.n_right, len(self.scores))

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        n = len(self.scores)
        answers = [score.logprobs[score.answer] for score in self.scores]
        result = {
            "accuracy": self.accuracy,
            "accuracy_interval": self.interval,
            "examples": n,
            "answer_nats": -math.fsum(answers) / n,
            "contexts_cut": sum(score.is_cut for score in self.scores),
        }
        if not self.is_cloze:
            n_right = sum(score.chosen_by_length == score.answer for score in self.scores)
            result["accuracy_by_length"] = n_right / n
            result["accuracy_by_length_interval"] = share_interval(n_right, n)
            result["chance"] = math.fsum(1 / len(score.logprobs) for score in self.scores) / n
        return result


@checked
def read_examples(corpus: FileCorpus) -> list[ChoiceExample] | list[str]:
    """Return the examples in files of records, or, where each record has a `text`, these texts.

    A record is {"context": .., "choices": [..], "answer": index}, {"context": .., "completion": ..}
    or {"text": ..}; `prompt` and `question` are other names of `context`. All are of one kind; null
    is absent, and blank texts are skipped. The corpus counts fields that are not read. Raises
    `CorruptInputError` with the record's place.
    """
    examples = list[ChoiceExample | str]()

    def parse(record: dict[str, Any], location: str) -> ChoiceExample | str:
        record = {name: value for name, value in record.items() if value is not None}
        example = _example(record, location)
        name, expected = _name(example), _name(examples[0] if examples else example)
        if name != expected:
            raise ValueError(f"{name} after {expected}: a file holds one kind")
        corpus.remarks.unread_fields.count(record, _fields_read(record))
        return example

    for example in parse_records(corpus.records(EXPECTED), EXPECTED, parse):
        if not isinstance(example, str) or example.strip():
            examples.append(example)
    if not examples:
        raise CorruptInputError(f"{', '.join(corpus.paths)} holds no example")
    return examples  # type: ignore[return-value]


def _fields_read(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that `_example` reads of a record."""
    if "text" in record:
        return ("text",)
    context = next(name for name in CONTEXTS if name in record)
    return (context, "completion") if "completion" in record else (context, "choices", "answer")


def _name(example: ChoiceExample | str) -> str:
    if isinstance(example, str):
        return "a text"
    return "a completion" if len(example.choices) == 1 else "a multiple choice"


def _example(fields: dict[str, Any], location: str) -> ChoiceExample | str:
    """Return the example of a line; raise ValueError for a bad one."""
    if "text" in fields:
        return _text(fields, "text")
    context = next((_text(fields, name) for name in CONTEXTS if name in fields), None)
    if context is None:
        fields_named = ", ".join(map(repr, fields)) or "none"
        problem = f"no `text`, `context`, `prompt` or `question`, its fields: {fields_named}"
        if is_example(fields):
            problem += "; write the question as `context` and the reply as `completion`"
        raise ValueError(problem)
    if "completion" in fields:
        return ChoiceExample(context, (_text(fields, "completion"),), location=location)
    choices, answer = fields.get("choices"), fields.get("answer")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("needs `completion`, or `choices`, a list of at least two texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("each of the `choices` must be a text that is not empty")
    if answer is None:
        raise ValueError("needs `answer`, the index of the right choice")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"`answer` must be from 0 to {len(choices) - 1}, got {answer!r}")
    return ChoiceExample(context, tuple(choices), answer, location)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or (name == "completion" and not value):
        raise ValueError(f"`{name}` must be a text, got {value!r}")
    return value


@checked
def score_examples(engine: Engine, examples: Iterable[ChoiceExample]) -> Iterator[ExampleScore]:
    """Yield the score of each example, in batches.

    All examples are encoded first; `UserError` names one that cannot be scored. A shared context is
    read once. If a row is longer than n_positions + 1, the beginning of its context is omitted.
    """
    encoded = [_encode(engine, example) for example in examples]
    longest = engine.runner.config.n_positions + 1
    for first in range(0, len(encoded), 2 * engine.n_slots):
        group = encoded[first : first + 2 * engine.n_slots]
        pairs = [(ids, example.n_context) for example in group for ids in example.rows]
        scored = iter(
            engine.score(
                [ids[n:] for ids, n in pairs],
                [ids[max(0, len(ids) - longest) : n] for ids, n in pairs],
            )
        )
        for example, rows, _ in group:
            choices = [next(scored) for _ in rows]
            yield ExampleScore(
                [choice.total for choice in choices],
                [len(choice) for choice in example.choices],
                [choice.is_greedy for choice in choices],
                example.answer,
                max(map(len, rows)) > longest,
            )


class EncodedExample(NamedTuple):
    """An example as ids: a row of context and choice for each choice."""

    example: ChoiceExample
    rows: list[list[int]]
    n_context: int
    """Number of ids at the beginning of each row that are not scored."""


def _encode(engine: Engine, example: ChoiceExample) -> EncodedExample:
    """Return an example's ids; raise `UserError` with its location for a long choice."""
    config, tokenizer = engine.runner.config, require_tokenizer(engine)
    try:
        rows, n_context = split_choices(example.choices, example.context, config, tokenizer)
        longest = max(map(len, rows)) - n_context
        if longest > config.n_positions:
            raise UserError(
                f"a choice has {longest} tokens, the model's context {config.n_positions}"
            )
    except UserError as error:
        location = f"{example.location}: " if example.location else ""
        raise UserError(location + error.problem(), hint=error.hint) from None
    return EncodedExample(example, rows, n_context)

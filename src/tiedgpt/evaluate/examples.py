"""Multiple choice and cloze: how often is the right answer the likeliest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.evaluate.intervals import Interval, share_interval
from tiedgpt.evaluate.texts import beginning_of, require_tokenizer
from tiedgpt.files import reading
from tiedgpt.infer import Engine
from tiedgpt.infer.prompts import split_context

CONTEXTS = ("context", "prompt", "question")


@dataclass(frozen=True)
class Example:
    """A context, the texts that may follow it, and which of them is right."""

    context: str
    choices: tuple[str, ...]
    """One, if it is a cloze."""
    answer: int = 0


@dataclass(frozen=True)
class ExampleScore:
    """How likely each choice was."""

    logprobs: list[float]
    lengths: list[int]
    """Of the choices, in characters."""
    is_greedy: list[bool]
    """Whether greedy decoding writes the choice."""
    answer: int
    is_cut: bool
    """Whether the context was too long: its beginning was left out."""

    @property
    def chosen(self) -> int:
        """The likeliest choice."""
        return max(range(len(self.logprobs)), key=self.logprobs.__getitem__)

    @property
    def chosen_by_length(self) -> int:
        """The choice that is likeliest a character, which does not favour short ones."""
        means = [p / max(1, n) for p, n in zip(self.logprobs, self.lengths, strict=True)]
        return max(range(len(means)), key=means.__getitem__)


@dataclass(frozen=True)
class ExamplesScore:
    """How often the right answer was chosen."""

    scores: Sequence[ExampleScore]

    @property
    def is_cloze(self) -> bool:
        """Whether each example has one text, which greedy decoding must write."""
        return all(len(score.logprobs) == 1 for score in self.scores)

    @property
    def n_right(self) -> int:
        """Examples whose answer is the likeliest choice, or what is written in a cloze."""
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


def read_examples(path: Path) -> list[Example] | list[str]:
    """Read a .jsonl file: examples, or, where each line has a `text`, these texts.

    A line is {"context": .., "choices": [..], "answer": index} or {"context": .., "completion": ..}
    or {"text": ..}; `prompt` and `question` are other names of `context`. All lines are of one
    kind; an empty line is skipped. Raises `CorruptInputError` with the line's number.
    """
    found = list[Example | str]()
    with reading(path, "UTF-8 text"):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_example(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise CorruptInputError(f"{path}, line {number}: {error}") from None
        if _kind(found[-1]) != _kind(found[0]):
            raise CorruptInputError(
                f"{path}, line {number}: {_kind(found[-1])} after {_kind(found[0])}: a file holds "
                "one kind"
            )
    if not found:
        raise CorruptInputError(f"{path} holds no example")
    return found  # type: ignore[return-value]


def _kind(example: Example | str) -> str:
    if isinstance(example, str):
        return "a text"
    return "a completion" if len(example.choices) == 1 else "a multiple choice"


def _example(fields: Any) -> Example | str:
    """Return what a line says; raise ValueError."""
    if not isinstance(fields, dict):
        raise ValueError("not an object of fields")
    if "text" in fields:
        return _text(fields, "text")
    context = next((_text(fields, name) for name in CONTEXTS if name in fields), None)
    if context is None:
        raise ValueError("no `text`, `context`, `prompt` or `question`")
    if "completion" in fields:
        return Example(context, (_text(fields, "completion"),))
    choices, answer = fields.get("choices"), fields.get("answer")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("needs `completion`, or `choices`, a list of at least two texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("each of the `choices` must be a text that is not empty")
    if answer is None:
        raise ValueError("needs `answer`, the index of the right choice")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"`answer` must be from 0 to {len(choices) - 1}, got {answer!r}")
    return Example(context, tuple(choices), answer)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or (name in ("text", "completion") and not value):
        raise ValueError(f"`{name}` must be a text, got {value!r}")
    return value


def score_examples(engine: Engine, examples: Iterable[Example]) -> Iterator[ExampleScore]:
    """Yield how likely each example's choices are, some examples at a time.

    A context that the choices share is read once. Where context and choice are longer than the
    model's context by more than a token, the context's beginning is left out.
    """
    tokenizer = require_tokenizer(engine)
    some, longest = iter(examples), engine.runner.config.n_positions + 1
    while group := list(islice(some, 2 * engine.slots)):
        if not all(example.context for example in group):
            beginning_of(engine)  # which an empty context is
        pairs = [
            split_context(choice, example.context, engine.runner.config, tokenizer)
            for example in group
            for choice in example.choices
        ]
        for ids, n_context in pairs:
            if len(ids) - n_context >= longest:
                raise UserError(
                    f"a choice has {len(ids) - n_context} tokens, the model's context {longest - 1}"
                )
        scored = iter(
            engine.score(
                [ids[n:] for ids, n in pairs],
                [ids[max(0, len(ids) - longest) : n] for ids, n in pairs],
            )
        )
        lengths = iter(len(ids) for ids, _ in pairs)
        for example in group:
            its = [next(scored) for _ in example.choices]
            yield ExampleScore(
                [each.total for each in its],
                [len(choice) for choice in example.choices],
                [each.is_greedy for each in its],
                example.answer,
                max(next(lengths) for _ in its) > longest,
            )

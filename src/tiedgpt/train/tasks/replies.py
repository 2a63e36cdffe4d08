"""Examples with replies: conversations or pairs in, a GPT out that answers.

Only the replies are trained. Batches are packed examples (`data/packing.py`).
"""

from __future__ import annotations

import functools
import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import (
    IGNORED,
    TEMPLATES,
    EncodedExamples,
    Example,
    ExampleReader,
    PackedBatches,
    Template,
    documents,
    read_template,
    write_template,
)
from tiedgpt.errors import UserError
from tiedgpt.files import OPENING, write_json
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer
from tiedgpt.train.plan.options import TuneOptions
from tiedgpt.train.step.loss import Arrays
from tiedgpt.train.tasks.language import SAMPLE_TOKENS, LanguageModelling
from tiedgpt.train.tasks.published_text import TextPublisher, merge_copy
from tiedgpt.train.tasks.publisher import Publisher, Showcase
from tiedgpt.train.tasks.rows import Data, Rows, Sources
from tiedgpt.train.tasks.task import Pretrained, Score
from tiedgpt.weights.source import open_tokenizer

HELD_OUT, AT_LEAST, AT_MOST = 20, 50, 10
"""One example in 20 is held out, or 50 if these are at most one in 10."""
FIRST_WORDS = 3
LONGEST_PROMPT = 60
"""Characters of a question that is proposed unchanged in a further command."""
SEARCHED_QUESTIONS = 100
"""Number of validation examples that are searched for a short question."""
FEW = 100
"""With fewer different examples, all are trained on and none is held out."""


class ReplySources(Sources, Rows):
    """The examples of the options, encoded as they are read. A part is held out, by content.

    Raises `UserError` or `CorruptInputError`, with file and line, for an invalid example, and if no
    example is left to train or to validate on.
    """

    tokenizer: Tokenizer
    """With the special tokens that the examples need."""
    adds_tokens = True

    def __init__(self, options: TuneOptions, start: Pretrained) -> None:
        tokenizer, source = open_tokenizer(start.source), start.source
        self.context = options.context or start.n_positions
        stored = partial(read_template, source.path, source.read)
        template = TEMPLATES[options.template] if options.template else stored

        def open_reader(data: Sequence[str], tokenizer: Tokenizer) -> ExampleReader:
            return ExampleReader(
                documents(data, **options.file_reading, keep_end_of_text=options.keep_end_of_text),
                tokenizer,
                template=template,
                context=self.context,
                too_long=options.too_long,
                skip_bad=options.skip_bad,
            )

        reader = open_reader(options.data, tokenizer)
        train, held_out = EncodedExamples.gather(reader), None
        self.notes, self.tokenizer = reader.notes(), reader.tokenizer
        if options.val is not None:
            validation = open_reader([options.val], self.tokenizer)
            if validation.kind != reader.kind:
                raise UserError(f"--val {options.val} has examples of another kind than the data")
            held_out = EncodedExamples.gather(validation)
            self.notes += [f"--val: {note}" for note in validation.notes()]
        self.train, self.held_out, self.holds_out = _split(train, held_out)
        self.memorizes = not self.holds_out
        if not self.holds_out:
            self.notes.append(
                f"fewer than {FEW} different examples ({len(self.held_out):,}): all are trained on "
                "and none is held out; this score measures memorization, not new prompts; --val "
                "names examples to validate on"
            )
        self.new_ids = tuple(range(len(tokenizer), len(self.tokenizer)))
        self.packing = options.packing != "off"
        if options.lora and self.new_ids and {"wte", "head"} & {*options.adapter_targets}:
            self.notes.append(
                "PEFT's format has no place for adapters of W beside whole new rows: the merged "
                "model is written, and no adapter"
            )
        self.template: Template | None = None
        self.max_turns = reader.max_turns
        if reader.kind == "messages":
            self.template = replace(
                reader.template, max_turns=reader.max_turns, default_system=reader.default_system
            )
            if reader.default_system is not None:
                system = shorten(reader.default_system, LONGEST_PROMPT, placeholder=" ...")
                self.notes.append(
                    f"every conversation begins with the system message {system!r}: the model's "
                    "conversations will, too, unless another is given"
                )
        elif reader.kind == "completion":
            self.notes.append(
                "lines with prompt and completion tune a model for `tiedgpt generate`; for "
                '`tiedgpt chat`, write {"messages": [...]} lines'
            )

    def digest(self) -> str:
        """Return a sha256 of all examples, which detects changed data."""
        total = hashlib.sha256()
        for side in (self.train, self.held_out):
            for array in (side.ends, side.ids, side.counted):
                total.update(len(array).to_bytes(8, "little") + array.tobytes())
        return total.hexdigest()

    @override
    def rows(self, tokenizer: Tokenizer, directory: Path) -> Rows:
        return self

    @override
    def at(self, context: int) -> ReplyData:
        """Return rows of ids, targets and `document_starts`, each (B, T)."""
        return self._data

    @functools.cached_property
    def _data(self) -> ReplyData:

        def pack(side: EncodedExamples, batch_size: int = 1, seed: int = 0) -> PackedBatches:
            sizes = {"batch_size": batch_size, "n_positions": self.context}
            return PackedBatches(side, **sizes, seed=seed, packing=self.packing)

        validation = pack(self.held_out)

        def held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
            rows = validation.n_rows()
            rows = rows if n_batches is None else min(rows, n_batches * batch_size)
            for at in range(0, rows, batch_size):
                yield validation.rows(at, min(batch_size, rows - at))

        sides = {"train_examples": self.train, "val_examples": self.held_out}
        counts = {
            name: {
                "examples": len(side),
                "tokens": len(side.ids),
                "trained": int(side.counted.sum()),
            }
            for name, side in sides.items()
        }
        counts["train_examples"]["max_turns"] = self.max_turns
        counts["val_examples"]["held_out"] = self.holds_out
        train, n_held_out = counts["train_examples"], len(self.held_out) if self.holds_out else 0
        more = f"{n_held_out:,} more to validate on" if n_held_out else "validated on the same ones"
        return ReplyData(
            batches=lambda batch_size, seed: pack(self.train, batch_size, seed).batch,
            held_out=held_out,
            unit="tokens",
            row_units=self.context,
            row_tokens=self.context,
            epoch_rows=pack(self.train).n_rows(),
            held_out_rows=float(validation.n_rows()),
            n_examples=len(self.train),
            n_held_out=n_held_out,
            counts=counts,
            description={
                "examples": f"{train['examples']:,}, {train['tokens']:,} tokens, of which "
                f"{train['trained'] / train['tokens']:.0%} are trained; {more}",
                "tokens": f"{self.tokenizer.kind} vocabulary of {len(self.tokenizer):,}",
            },
            notes=self.notes,
            tokenizer=self.tokenizer,
            new_ids=self.new_ids,
            template=self.template,
            question=self._find_question(),
            examples=self.train,
            validation=self.held_out,
        )

    def _find_question(self) -> str | None:
        """Return a short message of a validation example, of data that are conversations."""
        if self.template is not None:
            for number in range(min(len(self.held_out), SEARCHED_QUESTIONS)):
                _, text = _read_prompt(self.held_out, number, self.tokenizer, self.template)
                if _is_short(text):
                    return text
        return None


def _read_prompt(
    examples: EncodedExamples, number: int, tokenizer: Tokenizer, template: Template | None
) -> tuple[list[int], str]:
    """Return an example's prompt up to its first reply, and the question in it."""
    ids, counted = examples.example(number % len(examples))
    prompt = ids[: max(1, int(np.argmax(counted)))].tolist()
    question = tokenizer.decode(id for id in prompt if id != tokenizer.eos_token_id)
    if template is not None:
        question = template.last_question(question)
    return prompt, question.strip()


def _is_short(question: str) -> bool:
    """Whether a question fits on a line."""
    return 0 < len(question) <= LONGEST_PROMPT and question.isprintable()


def _split(
    examples: EncodedExamples, held_out: EncodedExamples | None
) -> tuple[EncodedExamples, EncodedExamples, bool]:
    """Return the training examples, the validation examples, and whether these are held out.

    Equal examples are on the same side. Fewer than `FEW` are all on both sides.
    """
    digests = _digests(examples)
    order = sorted(set(digests))
    n = len(order)
    first = {digest: number for number, digest in reversed([*enumerate(digests)])}
    if held_out is None and n < FEW:
        return examples, _select(examples, [first[digest] for digest in order]), False
    apart = set(order[: max(1, n // HELD_OUT, min(AT_LEAST, n // AT_MOST))])
    if held_out is not None:
        apart = set(_digests(held_out))
    train = [number for number, digest in enumerate(digests) if digest not in apart]
    if not train:
        raise UserError(
            f"of {n} different examples none is left to train on beside those held out",
            hint="give more",
        )
    if held_out is None:
        held_out = _select(examples, [first[digest] for digest in order if digest in apart])
    return _select(examples, train), held_out, True


def _digests(examples: EncodedExamples) -> list[bytes]:
    pairs = map(examples.example, range(len(examples)))
    return [hashlib.sha256(ids.tobytes() + mask.tobytes()).digest() for ids, mask in pairs]


def _select(examples: EncodedExamples, numbers: Sequence[int]) -> EncodedExamples:
    pairs = map(examples.example, numbers)
    return EncodedExamples.gather(Example("", ids.tolist(), mask.tolist()) for ids, mask in pairs)


@dataclass(frozen=True, kw_only=True)
class ReplyData(Data):
    """Examples with replies, several in a row."""

    tokenizer: Tokenizer
    template: Template | None
    """How messages become text."""
    question: str | None
    """A validation example's message, with which the page's conversation begins."""
    examples: EncodedExamples
    validation: EncodedExamples


class Replies(LanguageModelling):
    """Predict the replies of examples; a batch has ids, targets, document starts (B, T)."""

    @override
    def read(self) -> ReplySources:
        assert isinstance(self.options, TuneOptions) and self.start is not None
        return ReplySources(self.options, self.start)

    @override
    def loss(self, model: GPT, batch: Sequence[Tensor]) -> Tensor:
        """Return the mean loss () of the trained tokens."""
        ids, targets, document_starts = batch
        return model.loss(ids, targets, document_starts=document_starts)

    @override
    def n_targets(self, batch: Arrays) -> tuple[int, ...]:
        """Return the number of trained tokens in some rows."""
        return (int((batch[1] != IGNORED).sum()),)

    @override
    def score(self, data: Data, sums: Sequence[float]) -> Score:
        """Return nats a trained token; bits per byte compare models on whole texts."""
        return Score(super().score(data, sums).nats)

    @override
    def sample(self, model: GPT, data: Any, step: int, seed: int) -> str:
        """Return the reply to a held-out prompt, a different one at each step."""
        return " <- ".join(reply_to(merge_copy(model), data, data.validation, step))

    @override
    def publisher(self, config: GPTConfig, data: Any) -> Publisher:
        source = None if self.start is None else self.start.source
        return ReplyPublisher(config, data, self.options, source)


def reply_to(
    model: GPT, data: ReplyData, examples: EncodedExamples, number: int
) -> tuple[str, str]:
    """Return the reply of a merged model to an example's prompt, and the prompt's question."""
    prompt, question = _read_prompt(examples, number, data.tokenizer, data.template)
    ends = [] if data.template is None else data.template.end_ids(data.tokenizer)
    engine = Engine(model, tokenizer=data.tokenizer, slots=1)
    reply = engine.generate(prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0, stop_ids=ends)
    return reply.text, question


class ReplyPublisher(TextPublisher):
    """A model that replies."""

    data: ReplyData

    @override
    def publish(self, model: GPT, directory: Path) -> None:
        """Write the model as `TextPublisher` does, its template, and a question for the page."""
        super().publish(model, directory)
        if self.data.template is not None:
            write_template(self.data.template, self.tokenizer, directory)
        if self.data.question is not None:
            write_json(directory / OPENING, {"question": self.data.question})

    @override
    def show(self, run: Path, model: Path) -> Showcase:
        """Return replies of the published model to prompts of both sides."""
        data, gpt = self.data, Engine(model, backend="torch", slots=1).model
        sides = {"trained on": data.examples, "held out": data.validation}
        samples, question = dict[str, str](), ""
        for side, examples in [*sides.items()][: 1 if data.memorizes else 2]:
            for number in range(min(2, len(examples))):
                reply, question = reply_to(gpt, data, examples, number)
                samples[f"reply to {question!r}, {side}"] = reply.rstrip()
        if not _is_short(question):
            question = " ".join(question.split()[:FIRST_WORDS])
        here = shlex.quote(str(run))
        use = f"generate {here} --prompt={shlex.quote(question)}"
        if data.template is not None:
            use = f"chat {here}"
        return Showcase(samples=[*samples.items()], commands=[use, *self.commands(run)])

"""What a run is tuned on: examples as ids, on two sides, for the model that is tuned."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tiedgpt.data import (
    TEMPLATES,
    EncodedExamples,
    Example,
    ExampleReader,
    Template,
    documents,
    is_json_lines,
)
from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Pretrained
from tiedgpt.train.tune_options import TuneOptions
from tiedgpt.weights.sources import local_directory

HELD_OUT, AT_LEAST, AT_MOST = 20, 50, 10
"""One example in 20 is held out, but 50 where that is not more than one in 10."""
FEW = 100
"""Fewer different examples are all trained on: the score of a handful held out says nothing."""


@dataclass(frozen=True)
class ExampleSet:
    """Examples as ids, those to train on and those held out, for the model that is tuned."""

    start: Pretrained
    tokenizer: Tokenizer
    """With the special tokens that the examples need."""
    template: Template | None
    new_ids: tuple[int, ...]
    train: EncodedExamples
    held_out: EncodedExamples
    context: int
    packing: bool
    """Whether a row has several examples."""
    holds_out: bool
    """Whether `held_out` are other examples than those that are trained on."""
    notes: list[str]

    def digest(self) -> str:
        """Return a sha256 of everything, to know changed data by."""
        whole = hashlib.sha256()
        for side in (self.train, self.held_out):
            for array in (side.ends, side.ids, side.counted):
                whole.update(len(array).to_bytes(8, "little") + array.tobytes())
        return whole.hexdigest()


def has_examples(options: TuneOptions) -> bool:
    """Return whether lines of .jsonl have replies; `CorruptInputError` where the first has none."""
    if options.packing == "on":
        return True
    corpus = documents(options.data)
    of_text = options.text_field != TuneOptions.text_field
    if of_text or not any(map(is_json_lines, corpus.paths)):
        return False
    reader = ExampleReader(corpus, Tokenizer.characters(["a"]), skip_bad=options.skip_bad)
    return reader.kind != "text"


def read_example_set(options: TuneOptions) -> ExampleSet:
    """Read the examples that options name; without --val a part is held out, by what it says.

    Raises `UserError` or `CorruptInputError`, with file and line, for what is no example, and where
    nothing is left to train or to validate on.
    """
    assert options.start is not None
    tokenizer, context = Tokenizer.from_pretrained(options.start), options.context
    context = context or Pretrained(options.start, keep_head=True).n_positions
    template = TEMPLATES[options.template] if options.template else local_directory(options.start)

    def reader(data: Sequence[str], tokenizer: Tokenizer) -> ExampleReader:
        return ExampleReader(
            documents(data, encoding=options.encoding),
            tokenizer,
            template=template,
            context=context,
            too_long=options.too_long,
            skip_bad=options.skip_bad,
        )

    of_train = reader(options.data, tokenizer)
    train, given = EncodedExamples.gather(of_train), None
    notes, whole = of_train.notes(), of_train.tokenizer
    if options.val is not None:
        of_val = reader([options.val], whole)
        if of_val.kind != of_train.kind:
            raise UserError(f"--val {options.val} has examples of another kind than the data")
        given = EncodedExamples.gather(of_val)
        notes += [f"--val: {note}" for note in of_val.notes()]
    train, held_out, holds_out = _split(train, given)
    if not holds_out:
        notes.append(
            f"{len(held_out):,} different examples are few: all are trained on and none is held "
            "out, so the validation score says how well they are memorized, and not how well "
            "others are answered; --val names examples to validate on"
        )
    start = Pretrained(options.start, keep_head=True, n_tokens=len(whole))
    new_ids = tuple(range(len(tokenizer), len(whole)))
    used = of_train.template if of_train.kind == "messages" else None
    packing = options.packing != "off"
    return ExampleSet(
        start, whole, used, new_ids, train, held_out, context, packing, holds_out, notes
    )


def _split(
    examples: EncodedExamples, held_out: EncodedExamples | None
) -> tuple[EncodedExamples, EncodedExamples, bool]:
    """Return what is trained on, what is validated on, and whether that is held out.

    Equal examples are on the same side. Of fewer than `FEW` all are on both.
    """
    digests = _digests(examples)
    order = sorted(set(digests))
    n = len(order)
    first = {each: number for number, each in reversed([*enumerate(digests)])}
    if held_out is None and n < FEW:
        return examples, _chosen(examples, [first[each] for each in order]), False
    chosen = set(order[: max(1, n // HELD_OUT, min(AT_LEAST, n // AT_MOST))])
    if held_out is not None:
        chosen = set(_digests(held_out))
    train = [number for number, each in enumerate(digests) if each not in chosen]
    if not train:
        raise UserError(
            f"of {n} different examples none is left to train on beside those held out",
            hint="give more",
        )
    if held_out is None:
        held_out = _chosen(examples, [first[each] for each in order if each in chosen])
    return _chosen(examples, train), held_out, True


def _digests(examples: EncodedExamples) -> list[bytes]:
    each = map(examples.example, range(len(examples)))
    return [hashlib.sha256(ids.tobytes() + mask.tobytes()).digest() for ids, mask in each]


def _chosen(examples: EncodedExamples, numbers: Sequence[int]) -> EncodedExamples:
    each = map(examples.example, numbers)
    return EncodedExamples.gather(Example("", ids.tolist(), mask.tolist()) for ids, mask in each)

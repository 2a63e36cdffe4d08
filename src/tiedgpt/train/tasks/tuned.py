"""Fine-tuning as a task: all of a model, or low-rank adapters on it, on text or on examples.

A task on texts is language modelling; one on examples has batches of packed examples, of which the
replies are trained (`data/packing.py`). With adapters a checkpoint holds them alone, and the model
under them is read again from where the run started.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

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
    write_template,
)
from tiedgpt.errors import UserError
from tiedgpt.evaluate.perplexity import totals
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Arrays
from tiedgpt.train.options import TuneOptions
from tiedgpt.train.plan import Plan
from tiedgpt.train.task import Task
from tiedgpt.train.tasks.language import SAMPLE_TOKENS, LanguageModelling, what_predicts
from tiedgpt.tune import freeze, lora, merge, save_adapter
from tiedgpt.tune.adapters import BLOCKS
from tiedgpt.weights.hub import local_directory

if TYPE_CHECKING:
    from tiedgpt.train.sources import Pretrained

HELD_OUT, AT_LEAST, AT_MOST = 20, 50, 10
"""One example in 20 is held out, but 50 where that is not more than one in 10."""


class Tuned(Task):
    """What is the same for texts and examples: adapters, and what is published."""

    start: Pretrained
    rank: int | None = None
    """Of the adapters; None: there are none."""
    targets: Sequence[str] = BLOCKS
    new_ids: tuple[int, ...] = ()
    """Tokens that the model did not have; their rows are trained whole."""
    template: Template | None = None
    """How messages became text."""

    def choose(self, options: TuneOptions) -> None:
        """Train what the options say, and say so in the notes."""
        self.rank, self.frozen = options.lora, options.freeze or ""
        self.targets = (options.lora_targets or ",".join(BLOCKS)).split(",")
        if self.rank or self.frozen:
            with torch.device("meta"):
                self.notes.append(str(self._choose(GPT(self.config))))
        if self.rank and not self.in_peft_format():
            self.notes.append(
                "PEFT's format has no place for adapters of W beside whole new rows: the merged "
                "model is written, and no adapter"
            )

    def _choose(self, model: GPT) -> Any:
        if self.rank is None:
            return freeze(model, self.frozen)
        return lora(model, self.rank, self.targets, tokens=self.new_ids)

    def build(self) -> GPT:
        """Return a GPT; under adapters with the weights that it starts from."""
        model = GPT(self.config)
        if self.rank is not None and not model.wte.weight.is_meta:
            self.start.put_into(model)
        self._choose(model)
        return model

    def begin(self, model: Any) -> None:
        """Before the first step: put the weights of `start` into the model."""
        if self.rank is None:
            super().begin(model)

    def state_to_save(self, model: Any) -> Mapping[str, Tensor]:
        """Return all parameters, or the adapters alone."""
        every = super().state_to_save(model)
        if self.rank is None:
            return every
        return {name: tensor for name, tensor in every.items() if tensor.requires_grad}

    def plain(self, model: GPT) -> GPT:
        """Return the model as it is without adapters: merged, in a copy."""
        if self.rank is None:
            return model
        merged = copy.deepcopy(model)
        merge(merged)
        return merged

    def sample(self, model: GPT, plan: Plan, step: int) -> str:
        """Return what the merged model writes."""
        return super().sample(self.plain(model), plan, step)

    def publish(self, model: GPT, directory: Path) -> None:
        """Write the merged model, its tokenizer and its template; and beside it the adapter."""
        super().publish(self.plain(model), directory)
        if self.template is not None and self.tokenizer is not None:
            write_template(self.template, self.tokenizer, directory)
        if self.in_peft_format():
            save_adapter(model, directory.parent / "adapter", base=self.start.source)

    def in_peft_format(self) -> bool:
        """Whether PEFT's file format can hold the adapters: not W's together with whole rows."""
        return self.rank is not None and not (self.new_ids and {"wte", "head"} & {*self.targets})


class TunedText(Tuned, LanguageModelling):
    """Predict each next token of a text; see `task.Task`."""


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
    notes: list[str]

    def digest(self) -> str:
        """Return a sha256 of everything, to know changed data by."""
        whole = hashlib.sha256()
        for side in (self.train, self.held_out):
            for array in (side.ends, side.ids, side.counted):
                whole.update(len(array).to_bytes(8, "little") + array.tobytes())
        return whole.hexdigest()


def read_example_set(
    options: TuneOptions, start_of: Callable[[str, int], Pretrained]
) -> ExampleSet:
    """Read the examples that options name; without --val a part is held out, by what it says.

    `start_of` opens the model to tune with so many tokens at least. Raises `UserError` or
    `CorruptInputError`, with file and line, for what is no example, and where nothing is left to
    train or to validate on.
    """
    assert options.start is not None
    tokenizer, context = Tokenizer.from_pretrained(options.start), options.context
    context = context or start_of(options.start, 0).gpt.config.n_positions
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
    train, held_out = _split(train, given)
    start = start_of(options.start, len(whole))
    new_ids = tuple(range(len(tokenizer), len(whole)))
    used = of_train.template if of_train.kind == "messages" else None
    return ExampleSet(start, whole, used, new_ids, train, held_out, context, notes)


def _split(
    examples: EncodedExamples, held_out: EncodedExamples | None
) -> tuple[EncodedExamples, EncodedExamples]:
    """Return what is trained on and what is held out; equal examples are on the same side."""
    digests = _digests(examples)
    order = sorted(set(digests))
    n = len(order)
    chosen = set(order[: max(1, n // HELD_OUT, min(AT_LEAST, n // AT_MOST))])
    if held_out is not None:
        chosen = set(_digests(held_out))
    train = [number for number, each in enumerate(digests) if each not in chosen]
    if not train:
        raise UserError(
            f"of {n} different examples none is left to train on beside those held out: give more"
        )
    if held_out is None:
        first = {each: number for number, each in reversed([*enumerate(digests)])}
        held_out = _chosen(examples, [first[each] for each in order if each in chosen])
    return _chosen(examples, train), held_out


def _digests(examples: EncodedExamples) -> list[bytes]:
    each = map(examples.example, range(len(examples)))
    return [hashlib.sha256(ids.tobytes() + mask.tobytes()).digest() for ids, mask in each]


def _chosen(examples: EncodedExamples, numbers: Sequence[int]) -> EncodedExamples:
    each = map(examples.example, numbers)
    return EncodedExamples.gather(Example("", ids.tolist(), mask.tolist()) for ids, mask in each)


@dataclass(frozen=True)
class ReplyScore:
    """What the replies held out cost a model."""

    nats: float
    """Mean cross-entropy a trained token, in nats."""
    tokens: int


class TunedExamples(Tuned):
    """Predict the replies of examples; a batch is ids, targets and `first`, each (B, T)."""

    unit = "tokens"
    tokenizer: Tokenizer

    def __init__(self, examples: ExampleSet, config: GPTConfig) -> None:
        super().__init__(config, examples.tokenizer, examples.context, examples.start)
        self.examples, self.notes = examples, [*examples.notes]
        self.new_ids, self.template = examples.new_ids, examples.template
        self._held_out = self._packed(examples.held_out, 1, 0)
        self.row_units = self.context
        self.epoch_rows = self._packed(examples.train, 1, 0).n_rows()
        self.held_out_rows = float(self._held_out.n_rows())
        sides = {"train_examples": examples.train, "val_examples": examples.held_out}
        self.counted = {
            name: {
                "examples": len(side),
                "tokens": len(side.ids),
                "trained": int(side.counted.sum()),
            }
            for name, side in sides.items()
        }

    def _packed(self, side: EncodedExamples, batch_size: int, seed: int) -> PackedBatches:
        return PackedBatches(side, batch_size=batch_size, n_positions=self.context, seed=seed)

    def loss(self, model: GPT, batch: Sequence[Tensor]) -> Tensor:
        """Return the mean loss () of the trained tokens."""
        ids, targets, first = batch
        return model.loss(ids, targets, first=first)

    def n_targets(self, batch: Arrays) -> tuple[int, ...]:
        """Return how many tokens of some rows are trained."""
        return (int((batch[1] != IGNORED).sum()),)

    def batches(self, plan: Plan) -> Callable[[int], Arrays]:
        """Return the batch of each step; an epoch has every example once, in its own order."""
        return self._packed(self.examples.train, plan.batch_size, plan.seed).batch

    def evaluate(self, model: GPT, plan: Plan, n_batches: int | None = None) -> ReplyScore:
        """Score the replies held out."""
        size, rows = plan.micro_batch, self._held_out.n_rows()
        rows = rows if n_batches is None else min(rows, n_batches * size)
        batches = (self._held_out.rows(at, min(size, rows - at)) for at in range(0, rows, size))

        def measure(batch: tuple[Tensor, ...]) -> Sequence[float]:
            counted = int((batch[1] != IGNORED).sum())
            return float(self.loss(model, batch)) * counted, counted

        nats, tokens = totals(model, batches, measure, autocast=plan.autocast)
        return ReplyScore(nats / tokens, int(tokens))

    def sample(self, model: GPT, plan: Plan, step: int) -> str:
        """Return the reply to a prompt held out, to another one at each step."""
        return " <- ".join(self.reply(self.plain(model), step))

    def reply(self, model: GPT, number: int) -> tuple[str, str]:
        """Return what a model without adapters replies to a prompt held out, and the prompt."""
        held_out = self.examples.held_out
        ids, counted = held_out.example(number % len(held_out))
        prompt = ids[: max(1, int(np.argmax(counted)))].tolist()
        ends = [] if self.template is None else self.template.end_ids(self.tokenizer)
        engine = Engine(model, tokenizer=self.tokenizer, slots=1)
        said = engine.generate(prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0, stop_ids=ends)
        return said.text, self.tokenizer.decode(prompt)

    def describe(self, config: GPTConfig | None = None) -> dict[str, str]:
        """Return how many examples there are, how much of them is trained, and what predicts."""
        train = self.counted["train_examples"]
        share = train["trained"] / train["tokens"]
        return {
            "examples": f"{train['examples']:,}, {train['tokens']:,} tokens, of which {share:.0%} "
            f"are trained; {len(self.examples.held_out):,} more to validate on",
            "tokens": self.vocabulary(),
            "predicts": what_predicts(config or self.config),
        }

"""Fine-tuning as a task: all of a model, or low-rank adapters on it, on text or on examples.

A task on texts is language modelling; one on examples has batches of packed examples, of which the
replies are trained (`data/packing.py`). With adapters a checkpoint holds them alone, and the model
under them is read again from where the run started.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import (
    IGNORED,
    EncodedExamples,
    PackedBatches,
    Template,
    write_template,
)
from tiedgpt.evaluate.perplexity import totals
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Arrays, Pretrained, Task
from tiedgpt.train.objectives.example_set import ExampleSet
from tiedgpt.train.objectives.language import SAMPLE_TOKENS, LanguageModelling, what_predicts
from tiedgpt.train.plan import Plan
from tiedgpt.train.tune_options import TuneOptions
from tiedgpt.tune import freeze, lora, merge, save_adapter
from tiedgpt.tune.adapters import BLOCKS


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
        """Train what the options say."""
        self.rank = options.lora
        self.targets = (options.lora_targets or ",".join(BLOCKS)).split(",")
        if self.rank and not self.in_peft_format():
            self.notes.append(
                "PEFT's format has no place for adapters of W beside whole new rows: the merged "
                "model is written, and no adapter"
            )

    def build(self) -> GPT:
        """Return a GPT; under adapters with the weights that it starts from."""
        model = GPT(self.config)
        if self.rank is not None and not model.wte.weight.is_meta:
            self.start.put_into(model)
        if self.rank is None:
            freeze(model, self.frozen)
        else:
            lora(model, self.rank, self.targets, tokens=self.new_ids)
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
class ReplyScore:
    """What the replies held out cost a model."""

    nats: float
    """Mean cross-entropy a trained token, in nats."""


class TunedExamples(Tuned):
    """Predict the replies of examples; a batch is ids, targets and `first`, each (B, T)."""

    unit = "tokens"
    tokenizer: Tokenizer

    def __init__(self, examples: ExampleSet, config: GPTConfig) -> None:
        super().__init__(config, examples.tokenizer, examples.context, examples.start)
        self.examples, self.notes = examples, [*examples.notes]
        self.new_ids, self.template = examples.new_ids, examples.template
        self._held_out = self._packed(examples.held_out, 1, 0)
        self.n_examples = len(examples.train)
        self.n_held_out = len(examples.held_out) if examples.holds_out else 0
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
        packing = self.examples.packing
        return PackedBatches(
            side, batch_size=batch_size, n_positions=self.context, seed=seed, packing=packing
        )

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
        return ReplyScore(nats / tokens)

    def sample(self, model: GPT, plan: Plan, step: int) -> str:
        """Return the reply to a prompt held out, to another one at each step."""
        return " <- ".join(self.reply(self.plain(model), self.examples.held_out, step))

    def reply(self, model: GPT, examples: EncodedExamples, number: int) -> tuple[str, str]:
        """Return what a model without adapters replies to an example's prompt, and its question."""
        ids, counted = examples.example(number % len(examples))
        prompt = ids[: max(1, int(np.argmax(counted)))].tolist()
        ends = [] if self.template is None else self.template.end_ids(self.tokenizer)
        engine = Engine(model, tokenizer=self.tokenizer, slots=1)
        said = engine.generate(prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0, stop_ids=ends)
        question = self.tokenizer.decode(id for id in prompt if id != self.tokenizer.eos_token_id)
        if self.template is not None:
            question = self.template.last_message(question)
        return said.text, question.strip()

    def describe(self, config: GPTConfig | None = None) -> dict[str, str]:
        """Return how many examples there are, how much of them is trained, and what predicts."""
        train = self.counted["train_examples"]
        share = train["trained"] / train["tokens"]
        more = f"{len(self.examples.held_out):,} more to validate on"
        more = more if self.examples.holds_out else "validated on the same ones"
        return {
            "examples": f"{train['examples']:,}, {train['tokens']:,} tokens, of which {share:.0%} "
            f"are trained; {more}",
            "tokens": self.vocabulary(),
            "predicts": what_predicts(config or self.config),
        }

"""Language modelling as a task: token shards in, a GPT out that generates."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import Batches, Shards, in_order, open_encoded
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.evaluate.perplexity import Score, score
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer
from tiedgpt.train.objective import Arrays, Pretrained, Task
from tiedgpt.train.options import format_count
from tiedgpt.train.plan import Plan
from tiedgpt.train.storage import RunDirectory
from tiedgpt.tune import freeze

SAMPLE_TOKENS = 48
FINAL_EVALUATION_TOKENS = 2_000_000


class LanguageModelling(Task):
    """Predict each next token of a text; see `task.Task`."""

    unit = "tokens"
    tokenizer: Tokenizer
    sample_prompt = ""
    """What samples begin with."""

    def __init__(
        self,
        run: RunDirectory,
        config: GPTConfig,
        tokenizer: Tokenizer,
        *,
        context: int | None = None,
        start: Pretrained | None = None,
    ) -> None:
        super().__init__(config, tokenizer, context, start)
        self.encoded = encoded = open_encoded(run.data)
        self.counted = {"train_text": asdict(encoded.train), "val_text": asdict(encoded.val)}
        self._train = _open_shards(run.data, "train", encoded.train.tokens)
        self._held_out = _open_shards(run.data, "val", encoded.val.tokens)
        lengths = tokenizer.byte_lengths()  # a model may have more rows than there are tokens
        self._byte_lengths = np.pad(lengths, (0, max(0, config.vocab_size - len(lengths))))
        self.text_tokens = encoded.train.tokens
        self._count_rows()

    def _count_rows(self) -> None:
        self.row_units = self.row_tokens = self.context
        self.epoch_rows = max(1, -(-(self.encoded.train.tokens - 1) // self.context))
        self.held_out_rows = min(self.encoded.val.tokens, FINAL_EVALUATION_TOKENS) / self.context

    def with_config(self, config: GPTConfig) -> Self:
        """Return this task for another config; `UserError` where the text is too short for it."""
        task = super().with_config(config)
        task._count_rows()
        task.require_enough()
        return task

    def require_enough(self) -> None:
        """Raise `UserError` for text shorter than the context."""
        tokens = self.encoded.train.tokens
        if tokens < self.context + 1:
            raise UserError(
                f"the training text has {tokens:,} tokens and the context is {self.context}",
                hint=f"use --context below {tokens} or more text",
            )
        if self.encoded.val.tokens < 2:
            raise UserError(
                f"the validation text has {self.encoded.val.tokens} tokens, too few to predict one",
                hint="use more text, or give --val",
            )

    def build(self) -> GPT:
        """Return a GPT with fresh weights."""
        model = GPT(self.config)
        freeze(model, self.frozen)
        return model

    def batches(self, plan: Plan) -> Callable[[int], Arrays]:
        """Return (ids, targets) of each step, each (B, T)."""
        sizes = {"batch_size": plan.batch_size, "n_positions": self.context}
        return Batches(self._train, **sizes, seed=plan.seed).batch

    def evaluate(self, model: GPT, plan: Plan, n_batches: int | None = None) -> Score:
        """Score validation text; all of it, up to two million tokens.

        A part, and what is beyond that limit, is windows spread evenly: always the same.
        """
        if n_batches is None:
            n_batches = max(1, FINAL_EVALUATION_TOKENS // self.context // plan.micro_batch)
        sizes = {"batch_size": plan.micro_batch, "n_positions": self.context}
        part = in_order(self._held_out, **sizes, at_most=n_batches * plan.micro_batch)
        return score(model, part, self._byte_lengths, autocast=plan.autocast)

    def metrics(self, score: Score) -> dict[str, float]:
        """Return nats a token and bits per byte."""
        return {"val_loss": score.nats, "val_bits_per_byte": score.bits_per_byte}

    def describe(self, config: GPTConfig | None = None) -> dict[str, str]:
        """Return how much text there is, in which tokens, and what predicts them."""
        train, val = self.encoded.train, self.encoded.val
        of = f"{format_count(val.documents, 'document')}, " if train.documents > 1 else ""
        documents = format_count(train.documents, "document")
        return {
            "text": f"{documents}, {train.utf8_bytes / 1e6:.2f} MB, "
            f"{train.tokens:,} tokens; to validate on: {of}{val.tokens:,} tokens",
            "tokens": f"{self.vocabulary()}, {train.utf8_bytes / max(1, train.tokens):.2f} bytes a "
            "token",
            "predicts": what_predicts(config or self.config),
        }

    def words(self) -> str:
        """Return three words that follow each other in the validation text, or its beginning."""
        n = min(2000, len(self._held_out))
        text = self.tokenizer.decode(self._held_out.read(0, n).tolist())
        found = re.search(r"(?<=\s)[^\W\d_]+( [^\W\d_]+){2}(?=\s)", text)
        return found[0] if found else " ".join(text.split())[:12]

    def sample(self, model: GPT, plan: Plan, step: int) -> str:
        """Return how the model begins a text."""
        engine = Engine(model, tokenizer=self.tokenizer, slots=1)
        prompt = self.sample_prompt
        room = max(1, self.config.n_positions - SAMPLE_TOKENS)
        start = self.tokenizer.encode(prompt)[-room:] or [self.config.bos_token_id or 0]
        written = engine.generate(
            start, max_new_tokens=SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=plan.seed
        )
        return prompt + written.text


def what_predicts(config: GPTConfig) -> str:
    """Return in words which matrix predicts."""
    shape = f"{config.vocab_size:,} x {config.n_embd}"
    if config.tie_word_embeddings:
        return f"one matrix of {shape} counted once: it reads and predicts"
    return f"a matrix of {shape} reads and another predicts"


def _open_shards(directory: Path, side: str, tokens: int) -> Shards:
    """Open a side; it holds what was counted when it was written."""
    shards = Shards.in_directory(directory, side)
    if len(shards) != tokens:
        raise CorruptInputError(
            f"{directory} holds {len(shards):,} {side} tokens and {tokens:,} were written: shards "
            "are missing or changed",
            hint="train in another --out",
        )
    return shards

"""Language modelling: predict each next token of a text, with all parameters or with adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.evaluate.perplexity import measure_text
from tiedgpt.infer import Engine
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.options import TuneOptions
from tiedgpt.train.step.loss import Model
from tiedgpt.train.tasks.published_text import TextPublisher, merge_copy
from tiedgpt.train.tasks.publisher import Publisher
from tiedgpt.train.tasks.rows import Data, Sources
from tiedgpt.train.tasks.task import Score, Task
from tiedgpt.train.tasks.texts import open_texts
from tiedgpt.tune import freeze, lora

SAMPLE_TOKENS = 48


@dataclass(frozen=True)
class TextScore(Score):
    """The score of a text."""

    bits_per_byte: float
    """Loss in bits per UTF-8 byte; it does not depend on the tokenizer."""


class LanguageModelling(Task):
    """Predict each next token of a text.

    With adapters, a checkpoint holds only these, and their model is read again from `start`; the
    merged model is published.
    """

    def __init__(self, options: RunOptions | None = None) -> None:
        super().__init__(options)
        tuning = self.options if isinstance(self.options, TuneOptions) else None
        self.rank = None if tuning is None else tuning.lora
        self.targets = () if tuning is None else tuning.adapter_targets
        self.saves_frozen = self.rank is None

    @override
    def read(self) -> Sources:
        """Open the texts of the options, or Python's documentation."""
        return open_texts(self.options, self.tokenizer_source)

    @override
    def build(self, config: GPTConfig, data: Data) -> GPT:
        """Return a GPT with fresh weights, or with adapters and the weights of `start`."""
        model = GPT(config)
        if self.rank is not None:
            if not model.wte.weight.is_meta:
                super().begin(model, data)
            lora(model, self.rank, self.targets, tokens=data.new_ids)
        elif self.options.freeze:
            freeze(model, self.options.freeze)
        return model

    @override
    def begin(self, model: Model, data: Data) -> None:
        """Put the weights of `start` into the model before the first step, if `build` has not."""
        if self.rank is None:
            super().begin(model, data)

    @override
    def measure(self, model: GPT, data: Data, batch: tuple[Tensor, ...]) -> Sequence[float]:
        # a model may have more rows than there are tokens
        lengths = data.byte_lengths
        padding = max(0, model.config.vocab_size - len(lengths))
        return measure_text(model, batch, np.pad(lengths, (0, padding)))

    @override
    def score(self, data: Data, sums: Sequence[float]) -> Score:
        """Return nats a token and bits per byte."""
        nats, tokens, n_bytes = sums
        return TextScore(nats / max(tokens, 1), nats / math.log(2) / max(n_bytes, 1))

    @override
    def sample(self, model: GPT, data: Any, step: int, seed: int) -> str:
        """Return the prompt of samples, continued by the model."""
        engine = Engine(merge_copy(model), tokenizer=data.tokenizer, slots=1)
        room = max(1, model.config.n_positions - SAMPLE_TOKENS)
        sample_prompt = self.options.sample_prompt or ""
        prompt = data.tokenizer.encode_document(sample_prompt)[-room:]
        completion = engine.generate(
            prompt or [model.config.bos_token_id or 0],
            max_new_tokens=SAMPLE_TOKENS,
            temperature=0.8,
            top_k=50,
            seed=seed,
        )
        return sample_prompt + completion.text

    @override
    def publisher(self, config: GPTConfig, data: Any) -> Publisher:
        source = None if self.start is None else self.start.source
        return TextPublisher(config, data, self.options, source)

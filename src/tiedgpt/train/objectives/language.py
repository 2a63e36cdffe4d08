"""Language modelling: predict each next token of a text, with all parameters or with adapters."""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import Shards, Template, open_encoded, write_template
from tiedgpt.data.encode import note_split_characters
from tiedgpt.errors import TiedGPTError
from tiedgpt.evaluate.perplexity import Score, score
from tiedgpt.files import remove, replacing, split_lines
from tiedgpt.infer import Engine
from tiedgpt.runtime import eval_mode
from tiedgpt.text import Tokenizer
from tiedgpt.text.bpe import END_OF_TEXT
from tiedgpt.train.dataset import Data, TextData, TextSources, open_text, open_texts
from tiedgpt.train.objective import Model, ModelSetup, Objective, Showcase
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.storage import OPENING, RunDirectory
from tiedgpt.tune import freeze, lora, merge, save_adapter
from tiedgpt.tune.adapters import BLOCKS
from tiedgpt.weights.formats.transformers import TIEDGPT, model_type_of

SAMPLE_TOKENS = 48
FINAL_SAMPLE_TOKENS, FINAL_SAMPLE_LINES = 160, 8
ACCURACY_TOKENS = 2_000
"""Number of held-out tokens in the accuracy."""
OPENING_TOKENS, OPENING_SENTENCES = 20_000, 100
"""Numbers of held-out tokens and sentences that are searched for the page's opening."""
MIN_OPENING_CHARACTERS = 30
SENTENCE = re.compile(r"(?:[.!?]\s+|\n)([^\W\d_a-z][^\n*.!?]{30,160})")
WORD = re.compile(r" [^\W\d_]{3,}")


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters, the only trained parameters of their model."""

    rank: int
    targets: tuple[str, ...]
    new_ids: tuple[int, ...] = ()
    """Tokens that the model did not have; their rows are trained whole."""

    @classmethod
    def from_options(cls, options: TrainOptions, new_ids: tuple[int, ...] = ()) -> Adapters | None:
        """Return the adapters that the options ask for, or None."""
        if options.lora is None:
            return None
        targets = (options.lora_targets or ",".join(BLOCKS)).split(",")
        return cls(options.lora, tuple(targets), new_ids)

    @property
    def has_peft_format(self) -> bool:
        """Whether PEFT's file format can hold them: not adapters of W beside whole new rows."""
        return not (self.new_ids and {"wte", "head"} & {*self.targets})


@dataclass(eq=False)
class LanguageModelling(Objective):
    """Predict each next token of a text.

    With adapters, a checkpoint holds only these, and their model is read again from `start`; the
    merged model is published.
    """

    tokenizer: Tokenizer
    adapters: Adapters | None = None
    template: Template | None = None
    """How messages become text."""
    sample_prompt: str = ""
    """Prompt of samples."""

    @classmethod
    def open(cls, options: TrainOptions) -> TextSources:
        """Open the texts of the options, or Python's documentation."""
        return open_texts(options)

    @classmethod
    def make(
        cls, sources: Any, run: RunDirectory, options: TrainOptions, setup: ModelSetup
    ) -> tuple[Self, Data]:
        """Return a language model, and the shards to train it on."""
        shards, notes = sources.shards(run), sources.notes(run)
        if options.start is None:
            notes += note_split_characters(open_encoded(shards), setup.tokenizer)
        context = options.context or setup.config.n_positions
        data = open_text(shards, setup.tokenizer, context, notes)
        if not options.chooses:  # --size auto chooses a short enough context
            data.require_enough()
        adapters, prompt = Adapters.from_options(options), options.sample_prompt or ""
        return cls(*setup, adapters=adapters, sample_prompt=prompt), data

    def build(self) -> GPT:
        """Return a GPT with fresh weights, or with adapters and the weights of `start`."""
        model = GPT(self.config)
        if self.adapters is None:
            if self.frozen:
                freeze(model, self.frozen)
            return model
        assert self.start is not None
        if not model.wte.weight.is_meta:
            self.start.put_into(model)
        lora(model, self.adapters.rank, self.adapters.targets, tokens=self.adapters.new_ids)
        return model

    def begin(self, model: Model) -> None:
        """Put the weights of `start` into the model before the first step, if `build` has not."""
        if self.adapters is None:
            super().begin(model)

    def state_to_save(self, model: Model) -> Mapping[str, Tensor]:
        """Return all parameters, or the adapters alone."""
        tensors = super().state_to_save(model)
        if self.adapters is None:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}

    @functools.cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """The bytes of each token; a model may have more rows than there are tokens."""
        lengths = self.tokenizer.byte_lengths()
        return np.pad(lengths, (0, max(0, self.config.vocab_size - len(lengths))))

    def score(self, model: GPT, batches: Iterable[Any], autocast: torch.dtype | None) -> Any:
        """Score text, in nats a token and bits per byte."""
        return score(model, batches, self.byte_lengths, autocast=autocast)

    def metrics(self, score: Score) -> dict[str, float]:
        """Return nats a token and bits per byte."""
        return {"val_loss": score.nats, "val_bits_per_byte": score.bits_per_byte}

    def sample(self, model: GPT, data: Any, step: int, seed: int) -> str:
        """Return the prompt of samples, continued by the model."""
        engine = Engine(self.merge(model), tokenizer=self.tokenizer, slots=1)
        room = max(1, self.config.n_positions - SAMPLE_TOKENS)
        prompt = self.tokenizer.encode_document(self.sample_prompt)[-room:]
        completion = engine.generate(
            prompt or [self.config.bos_token_id or 0],
            max_new_tokens=SAMPLE_TOKENS,
            temperature=0.8,
            top_k=50,
            seed=seed,
        )
        return self.sample_prompt + completion.text

    def merge(self, model: GPT) -> GPT:
        """Return the model without adapters: merged, in a copy."""
        if self.adapters is None:
            return model
        merged = copy.deepcopy(model)
        merge(merged)
        return merged

    def describe(self, config: GPTConfig) -> str:
        """Return in words which matrix predicts."""
        shape = f"{config.vocab_size:,} x {config.n_embd}"
        if config.tie_word_embeddings:
            return f"one matrix of {shape} counted once: it reads and predicts"
        return f"a matrix of {shape} reads and another predicts"

    @property
    def transformers_class(self) -> str | None:
        """The class of transformers that loads the published model, or None."""
        return None if model_type_of(self.config) is TIEDGPT else "AutoModelForCausalLM"

    def show(self, directory: RunDirectory, data: TextData, options: TrainOptions) -> Showcase:
        """Return texts of the published model from one or two prompts, and its accuracy."""
        first, second = data.find_prompts(self.tokenizer)
        prompt = options.sample_prompt or (second if options.data else "Return a new")
        samples, engine = [], Engine(directory.model, backend="torch", slots=1)
        for number, begin in enumerate(dict.fromkeys((first, prompt))):
            text = engine.generate(
                begin or [self.config.bos_token_id or 0],
                max_new_tokens=min(FINAL_SAMPLE_TOKENS, self.config.n_positions),
                temperature=0.7,
                top_p=0.92,
                seed=number,
                context_end="slide",
            ).text
            title = f"sample {number + 1}" + (f": from {begin!r}" if begin else "")
            lines = split_lines(f"{begin}{text}".strip())
            samples.append((title, "\n".join(lines[:FINAL_SAMPLE_LINES])))
        ids = data.validation.read(0, min(ACCURACY_TOKENS, len(data.validation))).tolist()
        ranks = engine.score(ids).ranks
        accuracy = f"predicts {ranks.count(1) / len(ranks):.0%} of {len(ranks):,} held-out tokens"
        commands = self.commands(directory, prompt)
        return Showcase(samples=samples, accuracy=accuracy, commands=commands)

    def commands(self, directory: RunDirectory, prompt: str) -> list[str]:
        """Return further commands for the published model."""
        here = shlex.quote(str(directory.path))
        generate = f"generate {here} --prompt={shlex.quote(prompt)}"
        return [generate, f"export {here} page.html", f"tie show {here}"]

    def publish(self, model: GPT, directory: Path) -> None:
        """Write the merged model, its tokenizer, opening and template, and the adapter."""
        merged = self.merge(model)
        super().publish(merged, directory)
        write_opening(merged, self.tokenizer, directory)
        if self.template is not None:
            write_template(self.template, self.tokenizer, directory)
        if self.adapters is not None and self.adapters.has_peft_format:
            assert self.start is not None
            save_adapter(model, directory.parent / "adapter", base=self.start.source)


def write_opening(model: GPT, tokenizer: Tokenizer, directory: Path) -> None:
    """Write opening.json into a run's model directory, or remove it if no text is suitable.

    An opening is the beginning of a held-out sentence whose next token is the model's first choice.
    The best is followed by a whole word, if any is, and has the highest score: the log probability
    of the next token plus the mean of those before.
    """
    remove(directory / OPENING)
    try:
        shards = Shards.in_directory(directory.parent / "data", "val")
        held_out = shards.read(0, min(len(shards), OPENING_TOKENS))
    except (TiedGPTError, OSError):
        return  # the held-out data are no text
    held_out_text = tokenizer.decode(held_out.tolist()).replace(END_OF_TEXT, "\n")
    best_score, opening = (False, float("-inf")), None
    for sentence in SENTENCE.findall(held_out_text)[:OPENING_SENTENCES]:
        ids = tokenizer.encode(sentence)[: model.config.n_positions]
        with eval_mode(model), torch.inference_mode():
            logits = model(torch.tensor([ids], device=model.wte.weight.device))[0, :-1].float()
        targets = torch.tensor(ids[1:], device=logits.device)
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu()
        for at in (logits.argmax(-1) == targets).nonzero()[:, 0].tolist():
            text, token = tokenizer.decode(ids[: at + 1]), tokenizer.decode([ids[at + 1]])
            if len(text) < MIN_OPENING_CHARACTERS or tokenizer.encode(text) != ids[: at + 1]:
                continue
            rest = sentence[len(text + token) :]
            is_word = bool(WORD.fullmatch(token)) and not rest[:1].isalnum()
            score = is_word, float(logprobs[at] + logprobs[: max(at, 1)].mean())
            if score > best_score:
                best_score, opening = score, {"text": text, "next": token}
    if opening is not None:
        with replacing(directory / OPENING) as temporary:
            temporary.write_text(json.dumps(opening), encoding="utf-8")

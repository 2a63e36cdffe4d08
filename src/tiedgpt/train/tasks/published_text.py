"""A language model in its run's directory: its files, its texts, and the page's opening."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path

import torch
from typing_extensions import override

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import Shards
from tiedgpt.errors import TiedGPTError
from tiedgpt.files import OPENING, remove, replacing, split_lines
from tiedgpt.infer import Engine
from tiedgpt.runtime import eval_mode
from tiedgpt.text import Tokenizer
from tiedgpt.text.bpe import END_OF_TEXT
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.tasks.publisher import Publisher, Showcase
from tiedgpt.train.tasks.rows import Data
from tiedgpt.train.tasks.texts import TextData
from tiedgpt.tune import merge, save_adapter
from tiedgpt.tune.adapters import adapted_layers
from tiedgpt.weights.formats.transformers import TIEDGPT, model_type_of
from tiedgpt.weights.source import Source

FINAL_SAMPLE_TOKENS, FINAL_SAMPLE_LINES = 160, 8
ACCURACY_TOKENS = 2_000
"""Number of held-out tokens in the accuracy."""
OPENING_TOKENS, OPENING_SENTENCES = 20_000, 100
"""Numbers of held-out tokens and sentences that are searched for the page's opening."""
MIN_OPENING_CHARACTERS = 30
SENTENCE = re.compile(r"(?:[.!?]\s+|\n)([^\W\d_a-z][^\n*.!?]{30,160})")
WORD = re.compile(r" [^\W\d_]{3,}")


def merge_copy(model: GPT) -> GPT:
    """Return the model, or a merged copy of one with adapters."""
    if not adapted_layers(model):
        return model
    merged = copy.deepcopy(model)
    merge(merged)
    return merged


class TextPublisher(Publisher):
    """A language model; one with adapters is merged."""

    tokenizer: Tokenizer
    data: Data

    def __init__(
        self, config: GPTConfig, data: Data, options: RunOptions, start: Source | None = None
    ) -> None:
        super().__init__(config, data.tokenizer, "a language model")
        self.data, self.options, self.start = data, options, start

    @override
    def describe(self) -> str:
        """Return in words which matrix predicts."""
        shape = f"{self.config.vocab_size:,} x {self.config.n_embd}"
        if self.config.tie_word_embeddings:
            return f"one matrix of {shape} counted once: it reads and predicts"
        return f"a matrix of {shape} reads and another predicts"

    @property
    @override
    def transformers_class(self) -> str | None:
        return None if model_type_of(self.config) is TIEDGPT else "AutoModelForCausalLM"

    @override
    def publish(self, model: GPT, directory: Path) -> None:
        """Write the merged model, its tokenizer and opening, and the adapter."""
        merged = merge_copy(model)
        super().publish(merged, directory)
        write_opening(merged, self.tokenizer, directory)
        layers = adapted_layers(model).values()
        has_peft_format = all(layer.lora_A is None or layer.lora_rows is None for layer in layers)
        if layers and has_peft_format:
            save_adapter(model, directory.parent / "adapter", base=self.start)

    @override
    def show(self, run: Path, model: Path) -> Showcase:
        """Return texts from one or two prompts, and the accuracy."""
        data = self.data
        assert isinstance(data, TextData)
        first, second = data.find_prompts()
        prompt = self.options.sample_prompt or (second if self.options.data else "Return a new")
        samples, engine = [], Engine(model, backend="torch", slots=1)
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
        generate = f"generate {shlex.quote(str(run))} --prompt={shlex.quote(prompt)}"
        commands = [generate, *self.commands(run)]
        return Showcase(samples=samples, accuracy=accuracy, commands=commands)

    def commands(self, run: Path) -> list[str]:
        """Return further commands for every published language model."""
        here = shlex.quote(str(run))
        return [f"export {here} page.html", f"tie show {here}"]


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

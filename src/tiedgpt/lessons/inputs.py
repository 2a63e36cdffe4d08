"""The model of a lesson and the text that it reads. Lessons do not change the model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.data import Shards
from tiedgpt.errors import UserError
from tiedgpt.inspect.inputs import open_model, piece
from tiedgpt.plots.table import visible
from tiedgpt.runtime import eval_mode
from tiedgpt.text import Tokenizer
from tiedgpt.tie import audit, untie
from tiedgpt.tie.audits import Audit
from tiedgpt.tie.heads import copy_sharing
from tiedgpt.weights.source import Source, tokenizer_for

TEXT = "The result is a list of the words in the string. If there are none, the list is empty."
MAX_TOKENS = 32
"""Maximum length of the text of a lesson."""
N_SAMPLES = 16
"""Number of samples of a run's validation text; a lesson reads one."""
WORD_WIDTH, LINE_WIDTH = 16, 69
"""Maximum columns of a token and of the text."""
VOCABULARY, STEPS, BATCH, HELD_OUT = 512, 120, 8, 2048
"""The tiny model's vocabulary size, training steps, batch size and number of held-out tokens."""


Progress = Callable[[str, int, int], None]
"""Receives the name of a training, its steps done and their number."""


@dataclass
class LessonInput:
    """A model in memory, its description, and the ids (T,) that it reads."""

    module: nn.Module
    about: str
    tokenizer: Tokenizer | None
    ids: Tensor
    is_random: bool = False
    """Whether the ids are random, because no text could be encoded."""
    progress: Progress | None = None
    trains: bool = False
    """Whether lessons may train tiny models."""

    @cached_property
    def audit(self) -> Audit:
        """The model's tie audit."""
        return audit(self.module)

    @property
    def reads(self) -> str:
        """Name of the input embedding parameter."""
        return self.audit.matrices[0].names[0]

    @property
    def predicts(self) -> str | None:
        """Name of the output head parameter; None for a head without one."""
        last = self.audit.matrices[-1]
        return last.names[-1] if "predicts" in last.roles else None

    @property
    def tied(self) -> bool:
        """Whether one parameter is both."""
        return len(self.audit.matrices) == 1 and self.predicts is not None

    @property
    def weight(self) -> Tensor:
        """The input embedding (V, D)."""
        return self.module.get_parameter(self.reads).detach()

    @cached_property
    def gpt(self) -> GPT:
        """The model as a GPT. Raises `UserError` for another module."""
        if isinstance(self.module, GPT):
            return self.module
        return GPT.from_pretrained(self.module, resolve=None if self.tied else "untie").eval()

    def with_two_matrices(self) -> nn.Module:
        """Return a copy that shares its parameters; tied, with a copy of W as its head."""
        twin = copy_sharing(self.module)
        if self.tied and isinstance(twin, GPT):
            untie(twin)
        elif self.tied and self.predicts is not None:
            owner, _, name = self.predicts.rpartition(".")
            setattr(twin.get_submodule(owner), name, nn.Parameter(self.weight.clone()))
        return twin

    def describe(self) -> dict[str, Any]:
        """Return the fields of a lesson that describe the model and the text."""
        size = "{} x {}".format(*self.audit.matrices[0].shape)
        does = [f"{' = '.join(m.names)} {' and '.join(m.roles)}" for m in self.audit.matrices]
        no_words = "the tokenizer cannot encode the text" if self.tokenizer else "no tokenizer"
        random = f"{no_words}: the text is random ids, so probabilities and losses mean little"
        text = ""
        if self.tokenizer is not None and not self.is_random:  # without a last half of a character
            text = visible("".join(map(self.tokenizer.stream().push, self.ids)), LINE_WIDTH)
        return {
            "model": self.about,
            "matrices": f"{'; '.join(does)} ({size})",
            "text": text,
            "partial": [random] if self.is_random else [],
        }

    def logits(
        self, module: nn.Module | None = None, changed: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Return the logits (T, V) of a module, with `changed` parameters."""
        module, ids = module or self.module, self.ids[None]
        out = torch.func.functional_call(module, changed or {}, (ids,))
        out = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
        if not isinstance(out, Tensor) or out.shape[:2] != ids.shape:
            raise UserError(f"{type(module).__name__} does not turn ids (B, T) into logits")
        return out[0].float()

    def state(self) -> Tensor:
        """Return h (T, D), the input of the head."""
        return self.gpt.body(self.ids[None])[0].float()

    def loss(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy () of logits (T, V), in nats."""
        return F.cross_entropy(logits[:-1], self.ids[1:])

    def word(self, id: Any) -> str:
        """Return a token's printable text."""
        return visible(self.piece(id), WORD_WIDTH)

    def piece(self, id: Any) -> str:
        """Return a token's text."""
        return piece(self.tokenizer, int(id))


def open_lesson_input(
    model: Any, tokenizer: Any, text: str | None, progress: Progress | None
) -> LessonInput:
    """Open the model and the text of a lesson; see `explain`."""
    if model is None:
        model, tokenizer, _ = tiny_model(progress=progress)
        about = f"a tiny GPT, trained just now for {STEPS} steps on Python's docstrings"
    elif isinstance(model, (str, os.PathLike)):
        model = Source.of(model)
        about = str(model)
    else:
        about = f"{type(model).__name__} in memory"
    words = tokenizer_for(model, tokenizer)
    samples = _sample_validation(model) if text is None and tokenizer is None else []
    if not isinstance(model, nn.Module):
        model, _ = open_model(model, words)
    about += f": {sum(parameter.numel() for parameter in model.parameters()):,} parameters"
    size = audit(model).matrices[0].shape[0]
    length = min(MAX_TOKENS, getattr(getattr(model, "config", None), "n_positions", MAX_TOKENS))
    device = next(model.parameters()).device
    samples = [
        ids[:length].to(device) for ids in samples if len(ids) >= 4 and int(ids.max()) < size
    ]
    if samples:
        about += ", reading a typical part of its run's validation text"
        return _read_typical(
            LessonInput(model, about, words, samples[0], progress=progress), samples
        )
    ids = _encode(words, text, size, length)
    is_random = ids is None
    if ids is None:
        ids = torch.randint(
            size, (length,), generator=torch.Generator().manual_seed(0), device="cpu"
        )
    return LessonInput(model, about, words, ids.to(device), is_random, progress)


def _sample_validation(model: Any) -> list[Tensor]:
    """Return `N_SAMPLES` samples of a run's validation ids; [] for other models."""
    if not isinstance(model, Source) or not any((model.given_path / "data").glob("val_*.bin")):
        return []
    directory = model.given_path / "data"
    shards = Shards.in_directory(directory, "val")
    apart = max(MAX_TOKENS, len(shards) // N_SAMPLES)
    starts = range(0, max(1, len(shards) - MAX_TOKENS + 1), apart)
    samples = (shards.read(start, min(start + MAX_TOKENS, len(shards))) for start in starts)
    return [torch.from_numpy(ids.astype(np.int64)) for ids in samples]


@torch.no_grad()
def _read_typical(inputs: LessonInput, samples: list[Tensor]) -> LessonInput:
    """Return the inputs with the sample of median loss."""
    losses = []
    with eval_mode(inputs.module):
        for inputs.ids in samples:
            losses.append(float(inputs.loss(inputs.logits())))
    inputs.ids = samples[sorted(range(len(samples)), key=losses.__getitem__)[len(samples) // 2]]
    return inputs


def _encode(words: Tokenizer | None, text: str | None, size: int, length: int) -> Tensor | None:
    """Return the first ids of the text, or of TEXT; None if TEXT cannot be encoded."""
    if words is None and text is not None:
        raise UserError("a text needs a tokenizer, and the model has none", hint="give it")
    try:
        ids = words.encode(TEXT if text is None else text)[:length] if words else None
    except UserError:
        if text is not None:
            raise
        ids = None
    if ids is not None and (len(ids) < 4 or max(ids) >= size):
        raise UserError(
            f"the text must have 4 tokens or more, all among the model's {size:,}",
            hint="give a longer one, or the model's own tokenizer",
        )
    return None if ids is None else torch.tensor(ids, device="cpu")


class Tiny(NamedTuple):
    """A GPT trained in seconds."""

    model: GPT
    tokenizer: Tokenizer
    loss: float
    """Held-out loss in nats."""


_tiny_models: dict[bool, Tiny] = {}
"""Trained models, by whether they are tied."""


def tiny_model(*, tied: bool = True, progress: Progress | None = None) -> Tiny:
    """Return a GPT of two layers, trained on the docstrings of Python's types on the first call."""

    def report(done: int) -> None:
        if progress is not None:
            name = f"training {'a tied' if tied else 'an untied'} tiny GPT on Python's docstrings"
            progress(name, done, STEPS)

    if tied not in _tiny_models:
        _tiny_models[tied] = _train_tiny(tied, report)
    report(STEPS)
    return _tiny_models[tied]


def _train_tiny(tied: bool, report: Callable[[int], None]) -> Tiny:
    """Train a GPT without any effect on torch's random stream."""
    report(0)
    types = (str, bytes, bytearray, list, dict, set, frozenset, int, float, tuple, memoryview)
    docs = {inspect.getdoc(getattr(type, name)): None for type in types for name in dir(type)}
    text = "\n\n".join(filter(None, docs))
    tokenizer = Tokenizer.train([text], VOCABULARY)
    ids = torch.tensor(tokenizer.encode(text), device="cpu")
    seen, held_out = ids[:-HELD_OUT], ids[-HELD_OUT:]
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_head": 4}
    config = GPTConfig.preset("nano", **sizes, tie_word_embeddings=tied)
    draws = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        for step in range(STEPS):
            starts = torch.randint(len(seen) - 64, (BATCH, 1), generator=draws, device="cpu")
            ids = seen[starts + torch.arange(65, device="cpu")]
            optimizer.param_groups[0]["lr"] = 3e-3 * min((step + 1) / 10, (STEPS - step) / 100, 1)
            optimizer.zero_grad()
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            report(step + 1)
    model.zero_grad()
    with torch.no_grad():
        rows = held_out[: HELD_OUT // 65 * 65].view(-1, 65)
        loss = float(model.eval().loss(rows[:, :-1], rows[:, 1:]))
    return Tiny(model, tokenizer, loss)

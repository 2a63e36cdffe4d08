"""The topics of `explain`, and a lesson: its text, and every number in it by name. No torch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tiedgpt.errors import TiedGPTError
from tiedgpt.plots.table import aligned
from tiedgpt.runtime import to_json_data

WIDTH = 79
EQUATION = "h_0 = U W_e + W_p,  h_l = block(h_{l-1}),  P(u) = softmax(h_n W_e^T)"
SYMBOLS = (
    "U: the tokens as one-hot rows; W_e: the matrix W, in the code wte.weight, whose rows are e; "
    "W_p: the positions, wpe.weight; h_n: the last state (Radford et al. 2018, eq. 2)"
)


@dataclass(frozen=True)
class Topic:
    """A question that brings people here."""

    question: str
    places: tuple[str, ...]
    """Code that answers it: "core/FILE: NAME, NAME"."""
    commands: tuple[str, ...]
    """Commands that measure more."""


TOPICS = {
    "tie": Topic(
        "Is the output head the same matrix as the input embedding, or only the same shape?",
        (
            "core/embedding.py: TiedEmbedding.forward, TiedEmbedding.unembed",
            "core/model.py: GPT.states, GPT.logits",
        ),
        (
            "tiedgpt tie show MODEL",
            "tiedgpt tie audit FILE",
            "tiedgpt inspect learn MODEL --untied --text ...",
        ),
    ),
    "head": Topic(
        "Why is lm_head not a parameter of its own? Does tuning the head tune the embedding?",
        ("core/embedding.py: TiedEmbedding.unembed", "core/model.py: GPT.logits"),
        (
            "tiedgpt inspect gradient-split MODEL --text ...",
            "tiedgpt inspect learn MODEL --train head --text ...",
        ),
    ),
    "parameters": Topic(
        "Why does replacing the head turn 124,439,808 parameters into 163,037,184? And back?",
        ("core/config.py: GPTConfig.parameter_count", "core/model.py: GPT.__init__"),
        (
            "tiedgpt tie show MODEL",
            "tiedgpt tie fix MODEL DEST",
            "tiedgpt inspect learn MODEL --untied --train head --text ...",
        ),
    ),
    "positions": Topic(
        "Why does training predict at all N positions while generation uses only the last?",
        ("core/model.py: GPT.loss", "core/layers.py: Attention.attend", "core/cache.py: KVCache"),
        ("tiedgpt inspect positions MODEL --text ...",),
    ),
    "norms": Topic(
        "How can one matrix do both? What does the norm of a row mean on either side?",
        ("core/embedding.py: TiedEmbedding.forward, TiedEmbedding.unembed",),
        ("tiedgpt inspect vocabulary MODEL", "tiedgpt inspect dot MODEL --text ..."),
    ),
    "body": Topic(
        "What is the body, what is the head, and how do I put another head on the body?",
        ("core/model.py: GPT.body, GPT.logits, GPT.states",),
        ("tiedgpt train --task ...", "tiedgpt inspect lens MODEL --text ..."),
    ),
    "tuning": Topic(
        "If I fine-tune or freeze the head, what happens to the embedding? What does LoRA move?",
        ("tune/adapters.py: lora, LoRAEmbedding.unembed", "tune/freezing.py: freeze"),
        ("tiedgpt tune DATA --from MODEL --lora 8", "tiedgpt tune DATA --freeze wte"),
    ),
    "loss": Topic(
        "What is the loss, and what does it do to the rows of the matrix?",
        ("core/loss.py: chunked_cross_entropy", "core/model.py: GPT.head_loss"),
        ("tiedgpt eval MODEL DATA", "tiedgpt inspect positions MODEL --text ..."),
    ),
}


@dataclass
class Lesson:
    """A question and its answer; `print` it."""

    topic: str
    question: str
    places: tuple[str, ...] = ()
    """Code that answers the question."""
    commands: tuple[str, ...] = ()
    """Commands that measure more."""
    model: str = ""
    """Description of the measured model."""
    matrices: str = ""
    """Names of the matrices that read and predict."""
    text: str = ""
    """Beginning of the text."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """All measured numbers by name."""
    blocks: list[str] = field(default_factory=list)
    """Paragraphs and tables, in lines of at most 79 columns."""
    partial: list[str] = field(default_factory=list)
    """Measurements that failed, with the reason."""

    def say(self, text: str, **numbers: Any) -> None:
        """Add a paragraph; `{name}` stands for one of the numbers so far, or a word kept whole."""
        self.numbers |= numbers
        named = self.numbers.items()
        unbroken = {n: x.replace(" ", "\xa0") if isinstance(x, str) else x for n, x in named}
        filled = textwrap.fill(text.format(**unbroken), WIDTH, break_on_hyphens=False)
        self.blocks.append(filled.replace("\xa0", " "))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table; a column `>name` is aligned to the right."""
        self.blocks.append(textwrap.indent("\n".join(aligned(columns, rows)), "  "))

    @contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """Omit a part that this model does not support, and record the reason."""
        try:
            yield
        except TiedGPTError as error:
            self.partial.append(f"{what}: {error}")

    def to_json(self) -> str:
        """Return everything but the text as one JSON object; NaN as null."""
        values = to_json_data(self)
        del values["blocks"]
        return json.dumps(values, ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        title = textwrap.fill(f"{self.topic}: {self.question}", WIDTH)
        facts = _align_labels(
            [("model", [self.model]), ("matrix", [self.matrices]), ("text", [self.text])]
        )
        left_out = [("left out", [why]) for why in self.partial]
        equation = [EQUATION, SYMBOLS] if self.places else []
        more = [("equation", equation), ("code", self.places), ("more", self.commands)]
        return "\n\n".join(
            filter(None, (title, facts, *self.blocks, _align_labels([*left_out, *more])))
        )

    __repr__ = __str__


def _align_labels(facts: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return facts in a column beside their labels, without those that are empty."""
    lines = []
    for label, texts in facts:
        wrapped = [line for text in texts for line in textwrap.wrap(text, WIDTH - 10)]
        labels = [label, *[""] * len(wrapped)]
        lines += [f"{name:<9} {line}" for name, line in zip(labels, wrapped, strict=False)]
    return "\n".join(lines)

"""The topics of `explain`: the question of each, its lesson, and the commands that go further."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import UserError
from tiedgpt.lessons.lesson import Lesson

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Topic:
    """A question that brings people here."""

    question: str
    module: str
    """The file of `lessons` that has the function of the topic's name."""
    places: tuple[str, ...]
    """Where the answer is in the code: "core/FILE: FUNCTION"."""
    commands: tuple[str, ...]
    """What measures more."""


EMBEDDING = ("core/embedding.py: TiedEmbedding.forward", "core/embedding.py: TiedEmbedding.unembed")
TOPICS = {
    "tie": Topic(
        "Is the output head the same matrix as the input embedding, or only the same shape?",
        "matrix",
        (*EMBEDDING, "core/model.py: GPT.states", "core/model.py: GPT.logits"),
        ("tiedgpt tie show MODEL", "tiedgpt tie audit FILE"),
    ),
    "head": Topic(
        "Why is lm_head not a parameter of its own? Does tuning the head tune the embedding?",
        "matrix",
        (EMBEDDING[1], "core/model.py: GPT.logits", "core/loss.py: linear_cross_entropy"),
        ("tiedgpt inspect gradient-split MODEL --text ...",),
    ),
    "parameters": Topic(
        "Why does replacing the head turn 124,439,808 parameters into 163,037,184? And back?",
        "matrix",
        ("core/config.py: GPTConfig.parameter_count", "core/model.py: GPT.__init__"),
        ("tiedgpt tie show MODEL", "tiedgpt tie fix SOURCE DEST"),
    ),
    "positions": Topic(
        "Why does training predict at all N positions while generation uses only the last?",
        "network",
        ("core/model.py: GPT.loss", "core/layers.py: Attention.attend", "core/cache.py: KVCache"),
        ("tiedgpt inspect positions MODEL --text ...",),
    ),
    "norms": Topic(
        "How can one matrix do both? What does the norm of a row mean on either side?",
        "network",
        (*EMBEDDING, "core/model.py: GPT.body"),
        ("tiedgpt inspect vocabulary MODEL", "tiedgpt inspect dot MODEL --text ..."),
    ),
    "loss": Topic(
        "What is the loss, and what does it do to the rows of the matrix?",
        "network",
        ("core/loss.py: linear_cross_entropy", "core/model.py: GPT.head_loss"),
        ("tiedgpt eval MODEL", "tiedgpt inspect positions MODEL --text ..."),
    ),
    "body": Topic(
        "What is the body, what is the head, and how do I put another head on the body?",
        "network",
        ("core/model.py: GPT.body", "core/model.py: GPT.logits", "core/model.py: GPT.states"),
        ("tiedgpt train --task ...", "tiedgpt inspect lens MODEL --text ..."),
    ),
}


def explain(
    topic: str | None = None,
    model: nn.Module | str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    text: str | None = None,
) -> Lesson:
    """Return a lesson, measured on a live model; print it, or take its `numbers`.

    `topic` is one of TOPICS; None lists them. `model` is a `tiedgpt.GPT`, transformers' GPT-2 or
    any torch module that turns ids (B, T) into logits (B, T, V), a path, a run directory or a hub
    name; None trains a tiny GPT on Python's docstrings first, in seconds. `tokenizer` is ours, a
    path, or transformers'. A part that cannot be measured is left out, and the lesson says why.

    Raises `UserError` for an unknown topic, and a model or text that cannot be used.
    """
    if topic is None:
        return _overview()
    if topic not in TOPICS:
        raise UserError(f"no topic {topic!r}: choose one of {', '.join(TOPICS)}")
    about = TOPICS[topic]
    subject = import_module("tiedgpt.lessons.subject").open_subject(model, tokenizer, text)
    lesson = Lesson(topic, about.question, about.places, about.commands)
    with subject.measured(lesson):
        getattr(import_module(f"tiedgpt.lessons.{about.module}"), topic)(subject, lesson)
    return lesson


def _overview() -> Lesson:
    lesson = Lesson("explain", "The six questions that bring people here, and what answers each")
    names = [name for name in TOPICS if name != "loss"]
    for label, name in zip(
        ["1.", "2.", "3.", "4.", "5.", "6.", "And"], [*names, "loss"], strict=True
    ):
        commands = [f"tiedgpt explain {name}", *TOPICS[name].commands]
        lesson.list(f"{label} {TOPICS[name].question}", commands)
    lesson.say(
        "A lesson runs on the model that you name, on the newest run in runs/, or on a tiny model "
        'that is trained first, in seconds. In Python: tiedgpt.explain("tie", model).'
    )
    return lesson

"""Measure the lesson of a topic, or list the topics. Only a lesson imports torch."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import UserError
from tiedgpt.lessons.lesson import TOPICS, WIDTH, Lesson
from tiedgpt.runtime import eval_mode

if TYPE_CHECKING:
    from torch import nn


def explain(
    topic: str | None = None,
    model: nn.Module | str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    text: str | None = None,
    train: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Lesson:
    """Return a lesson, measured on a live model; print it, or take its `numbers`.

    `topic` is one of TOPICS; None lists them. `model` is a `tiedgpt.GPT`, transformers' GPT-2 or
    any torch module that turns ids (B, T) into logits (B, T, V), a path, a run directory or a hub
    name; None trains a tiny GPT on Python's docstrings first, in seconds. `tokenizer` is ours, a
    path, or transformers'. Parts that cannot be measured, as most of a module that is not a GPT,
    are left out, and the lesson says why. `train` also trains two tiny GPTs, tied and untied, for
    the topic "head". `progress` is called with the name of a training, its steps done and their
    number.

    Raises `UserError` for an unknown topic, and a model or text that cannot be used.
    """
    if topic is None:
        return _overview()
    if not isinstance(topic, str) or topic not in TOPICS:
        raise UserError(f"no topic {topic!r}", hint=f"choose one of {', '.join(TOPICS)}")
    about = TOPICS[topic]
    from tiedgpt.lessons import topics  # torch, which listing the topics does not need
    from tiedgpt.lessons.inputs import open_lesson_input

    inputs = open_lesson_input(model, tokenizer, text, progress)
    inputs.trains = train or model is None
    lesson = Lesson(topic, about.question, about.places, about.commands, **inputs.describe())
    with eval_mode(inputs.module):
        getattr(topics, topic)(inputs, lesson)
    return lesson


def _overview() -> Lesson:
    lesson = Lesson("explain", "questions about GPTs, and the commands that answer them")
    for number, (name, topic) in enumerate(TOPICS.items(), start=1):
        question = textwrap.fill(f"{number}. {topic.question}", WIDTH, subsequent_indent="   ")
        commands = [f"tiedgpt explain {name}", *topic.commands]
        lesson.blocks.append("\n     ".join([question, *commands]))
    lesson.say(
        "A lesson runs on the model that you name, else on the newest run in runs/, else on a "
        'tiny model that is trained first, in seconds. In Python: tiedgpt.explain("tie", model).'
    )
    return lesson

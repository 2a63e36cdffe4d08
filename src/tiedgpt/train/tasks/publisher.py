"""Descriptions, files and samples of a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiedgpt.core.config import GPTConfig
from tiedgpt.text import Tokenizer
from tiedgpt.train.step.loss import body_of
from tiedgpt.weights.formats.transformers.writer import save_tokenizer


@dataclass(frozen=True, kw_only=True)
class Showcase:
    """Samples of a published model, and what to do with it next."""

    samples: Sequence[tuple[str, str]] = ()
    """Titles and texts."""
    accuracy: str = ""
    """The score of a baseline, or how often the model is right, in words."""
    commands: Sequence[str] = ()
    """Further commands of `tiedgpt`."""
    python: str = ""
    """Code that uses the model."""


class Publisher:
    """The description, the files and the use of a task's trained model."""

    def __init__(self, config: GPTConfig, tokenizer: Tokenizer | None, task: str) -> None:
        self.config, self.tokenizer, self.task = config, tokenizer, task

    def describe(self) -> str:
        """Return a description of the matrix or the head that predicts."""
        return f"trained as {self.task}"

    @property
    def transformers_class(self) -> str | None:
        """The class of transformers that loads the published model, or None."""
        return None

    def publish(self, model: Any, directory: Path) -> None:
        """Write the model as a Hugging Face directory, with its tokenizer."""
        model.save_pretrained(directory)
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, body_of(model).config, directory)

    def show(self, run: Path, model: Path) -> Showcase:
        """Return samples of the published model of a run, and the next commands."""
        return Showcase()

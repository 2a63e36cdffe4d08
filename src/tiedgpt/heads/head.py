"""The base of all heads: a body, the loss as a sum of means, loading and saving.

A head is stored in a Hugging Face directory of transformers' layout: config.json with the head's
class in `architectures`, and the tensors of body and head under transformers' names.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.loss import cross_entropy
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.heads.inputs import pad, read_text
from tiedgpt.signatures import checked, require_type
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.formats.transformers import TIEDGPT, model_type_of
from tiedgpt.weights.formats.transformers.writer import (
    OUR_CARD,
    describe,
    tensors_of,
    write_directory,
)
from tiedgpt.weights.load import load
from tiedgpt.weights.source import Source
from tiedgpt.weights.torch_file import stored_tensor
from tiedgpt.weights.wrappers import BODY_PREFIX, OTHER_HEADS


class Head(nn.Module):
    """A GPT, `gpt`, with further modules on the body's states (B, T, D).

    A subclass defines `architecture`, `head_tensors`, `forward` and `losses`. Its parameters and
    config keys have the names of transformers' class.
    """

    gpt: GPT
    architecture: ClassVar[str]
    """Name of transformers' class without the family: "ForSequenceClassification"."""
    predicts_tokens: ClassVar[bool] = False
    """Whether the head over the vocabulary is also used."""
    head_tensors: ClassVar[tuple[str, ...]] = ()
    """Names of the head's tensors in a file, a matrix (N, D) first."""
    keeps_end: ClassVar[bool] = False
    """Whether a long text is cut to its end, and not to its beginning."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        if not hasattr(gpt, "body"):
            name, got = type(self).__name__, type(gpt).__name__
            raise UserError(f"{name} takes a GPT, got {got}; {name}.fresh(source, ...) loads one")
        if gpt.head is not None and not self.predicts_tokens:
            raise UserError(
                f"{type(self).__name__} has no place for the model's head over the vocabulary",
                hint="set model.head = None in a copy, or use .fresh(source)",
            )
        self.gpt = gpt

    def losses(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Return the means, each (), whose sum is the loss.

        The last tensors of a batch are the targets, one for each mean; -100 is not counted.
        """
        raise UserError(f"{type(self).__name__} has no loss: it predicts nothing")

    def loss(self, *batch: Tensor) -> Tensor:
        """Return the loss, (), in nats; the arguments are those of `losses`."""
        return torch.stack(self.losses(*batch)).sum()

    def _linear(self, n_outputs: int, *, bias: bool) -> nn.Linear:
        """Return a fresh linear layer (..., D) -> (..., n_outputs): N(0, 0.02), bias 0."""
        weight = self.gpt.wte.weight
        layer = nn.Linear(
            weight.shape[1], n_outputs, bias=bias, device=weight.device, dtype=weight.dtype
        )
        nn.init.normal_(layer.weight, std=0.02)
        if bias:
            nn.init.zeros_(layer.bias)
        return layer

    def config_entries(self) -> dict[str, Any]:
        """Return the head's entries in config.json."""
        return {}

    @classmethod
    def options_from(cls, config: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
        """Return the constructor's options from a config.json and the rows of `own[0]`.

        Raises `UserError`, naming the key, for a value that is not supported.
        """
        return {}

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has this head; by default, whether it has its tensors."""
        return any(name in checkpoint.tensors for name in cls.head_tensors)

    @classmethod
    @checked
    def fresh(
        cls, source: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Any
    ) -> Self:
        """Put a new head, N(0, 0.02), on the body of the GPT at `source`, in eval mode.

        `options` are the constructor's (`labels=[...]`). Another head in the source is ignored.
        """
        return cls(load_body(source, dtype=dtype, keep_head=cls.predicts_tokens), **options).eval()

    @classmethod
    @checked
    def from_pretrained(
        cls, source: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Any
    ) -> Self:
        """Load a body with its head from a Hugging Face directory or hub name, in eval mode.

        `options` are the constructor's and override the file's. Raises `UserError` for a file
        without this head (see `fresh`), `CorruptInputError` for one that is damaged.
        """
        source = Source.of(source)
        checkpoint = source.checkpoint
        if cls.head_tensors and not cls.matches(checkpoint):
            raise UserError(
                f"{checkpoint.source} has no {cls.head_tensors[0]}, so it is not a {cls.__name__}: "
                f"{cls.__name__}.fresh(...) puts a new head on its body"
            )
        gpt = load_body(source, dtype=dtype, keep_head=cls.predicts_tokens)
        stored = {name: t for name, t in checkpoint.tensors.items() if name in cls.head_tensors}
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        wrong = CorruptInputError(
            f"{checkpoint.source}: {cls.__name__} takes tensors of other shapes than {shapes}"
        )
        rows = [shape[0] for shape in shapes.values() if shape[1:] == (gpt.config.n_embd,)]
        if cls.head_tensors and not any(rows):
            raise wrong
        options = cls.options_from(checkpoint.config, max(rows, default=0)) | options
        head = cls(gpt, **options)
        if shapes != {name: head.get_parameter(name).shape for name in cls.head_tensors}:
            raise wrong
        for tensor in stored.values():
            if not tensor.is_decodable:
                raise tensor.decoding_error()
        state = {name: tensor.tensor() for name, tensor in stored.items()}
        head.load_state_dict(state, strict=False)
        return head.eval()

    @checked
    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory that transformers' class loads unchanged."""
        gpt = self.gpt
        model_type = model_type_of(gpt.config)
        prefix = "" if self.head_tensors else BODY_PREFIX  # transformers' bare body has none
        tensors = {name.removeprefix(prefix): t for name, t in tensors_of(gpt).items()}
        tensors |= {
            name: stored_tensor(name, self.get_parameter(name)) for name in self.head_tensors
        }
        name = self._class_name(gpt.config)
        description = describe(gpt) | self.config_entries() | {"architectures": [name]}
        if description.get("pad_token_id") is None:  # transformers finds the last token by it
            description["pad_token_id"] = gpt.config.eos_token_id
        library = "tiedgpt" if model_type is TIEDGPT else "transformers"
        use = f"{self.home()}.{type(self).__name__}.from_pretrained(directory)"
        card = f"---\nlibrary_name: {library}\n---\n# {name}\n\n{OUR_CARD}\n\nLoad it: `{use}`\n"
        write_directory(directory, tensors, {"config.json": description}, card)

    @classmethod
    def home(cls) -> str:
        """Return the module to import the class from."""
        return "tiedgpt.heads" if cls.__module__.startswith("tiedgpt.") else cls.__module__

    @classmethod
    def class_in_transformers(cls, config: GPTConfig) -> str | None:
        """Return the name of transformers' class for the saved directory, or None."""
        return None if model_type_of(config) is TIEDGPT else cls._class_name(config)

    @classmethod
    def _class_name(cls, config: GPTConfig) -> str:
        """Return the name with the family: GPT2ForSequenceClassification."""
        return model_type_of(config).architecture.removesuffix("LMHeadModel") + cls.architecture


class AnsweringHead(Head, ABC):
    """A head with an answer to texts, for `predict`, `tiedgpt classify` and `tiedgpt eval`.

    A subclass defines the abstract methods. The others are those of a head that reads one text and
    predicts one name or index.
    """

    record_fields: ClassVar[Mapping[str, str]] = {"text": ".."}
    """Fields of a record to answer, and their values in messages."""
    predicts_numbers: bool = False
    """Whether the answer is numbers, which are scored by their error."""

    def read_texts(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the texts of a record; raise `UserError` for a wrong field."""
        return (read_text(record, "text"),)

    def compute_logits(self, examples: Sequence[Sequence[list[int]]]) -> Iterable[Tensor]:
        """Return the logits (N,) of each example, from the ids of its texts."""
        return self(*pad([ids for (ids,) in examples], device=self.gpt.wte.weight.device))

    @abstractmethod
    def answer(self, logits: Tensor) -> dict[str, Any]:
        """Return the answer with float32 logits (N,): `predicted`, and probabilities if any."""

    @abstractmethod
    def describe(self, record: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
        """Return a record and its answer in a line of words."""

    @abstractmethod
    def expected_fields(self) -> Mapping[str, str]:
        """Return the fields of the right answer in a labelled line, and their values in messages.

        Raises `UserError` if no answer is right or wrong.
        """

    @abstractmethod
    def read_expected(self, record: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
        """Return the field that has the right answer, and the answer in the form of `decide`.

        Raises `UserError` for a wrong one.
        """

    def decide(self, logits: Tensor) -> tuple[Any, ...]:
        """Return the predicted names, index or numbers with float32 logits (N,)."""
        predicted = self.answer(logits)["predicted"]
        return tuple(predicted.values()) if isinstance(predicted, dict) else (predicted,)

    def targets(self, expected: tuple[Any, ...]) -> Sequence[float]:
        """Return the targets of `criterion`, from a right answer in the form of `decide`."""
        return expected

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss (), of logits (B, N) and the targets of `losses`."""
        return cross_entropy(logits, targets)


def take_tensors(head: Head, batch: Sequence[Tensor], names: str) -> Sequence[Tensor]:
    """Return the tensors of a batch; `UserError` unless there is one for each of the names."""
    if len(batch) != len(names.split(", ")):
        raise UserError(f"the loss of {type(head).__name__} takes {names}, got {len(batch)} values")
    for name, value in zip(names.split(", "), batch, strict=True):
        require_type(f"{type(head).__name__}.loss()", name, value, Tensor)
    return batch


def load_body(source: str | os.PathLike[str], *, dtype: torch.dtype | None, keep_head: bool) -> GPT:
    """Load the GPT under any head; `keep_head` keeps an untied head over the vocabulary."""
    source = Source.of(source)
    checkpoint = source.checkpoint
    # A file with a body only has no matrix that predicts, even if its config claims one.
    is_body_alone = checkpoint.usage.headless and "lm_head.weight" not in checkpoint.tensors
    gpt = load(
        source,
        resolve="tie" if is_body_alone else None,
        dtype=dtype,
        others=lambda name: name.startswith(OTHER_HEADS),
    ).model
    if gpt.head is not None and not keep_head:
        gpt.head = None
        gpt.config = replace(gpt.config, tie_word_embeddings=True)
    return gpt

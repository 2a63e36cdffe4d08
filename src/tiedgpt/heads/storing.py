"""Heads to and from Hugging Face directories: the body as `weights/` knows it, and a few tensors.

config.json          the body's, with the head's class in `architectures` and its labels
model.safetensors    the body's tensors under transformers' names, and the head's own
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import plain_matrix
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import replacing, require_room, write_json
from tiedgpt.weights.checkpoint import LazyTensor
from tiedgpt.weights.config_json import config_json
from tiedgpt.weights.formats.safetensors_file import Stored, write_safetensors
from tiedgpt.weights.load import Loaded, load
from tiedgpt.weights.names import (
    GPT1,
    GPT2,
    HEAD,
    TIEDGPT,
    ModelType,
    is_transposed,
    model_type_of,
    to_file,
)
from tiedgpt.weights.opening import open_checkpoint
from tiedgpt.weights.save import OUR_CARD, zero_biases
from tiedgpt.weights.tensors import StoredTensor

if TYPE_CHECKING:
    from tiedgpt.heads.head import Head

H = TypeVar("H", bound="Head")
OWN_TENSORS = ("score.", "classifier.", "multiple_choice_head.", "qa_outputs.")
"""How the names of tensors begin that belong to a head."""
CLASS_OF_LANGUAGE_MODELS = "LMHeadModel"
ON_GPT1 = ("ForSequenceClassification", "DoubleHeadsModel", "Model")
"""The classes that transformers has for GPT-1; for GPT-2 it has all."""


def load_body(
    source: str | os.PathLike[str], *, dtype: torch.dtype | None = None, keep_head: bool = False
) -> Loaded:
    """Load the GPT under any head; heads stay behind, that over the vocabulary unless it is kept.

    A file of a body alone has no matrix that predicts, whatever its config claims of it.
    """
    checkpoint = open_checkpoint(source)
    alone = checkpoint.headless and to_file(HEAD, TIEDGPT) not in checkpoint.tensors
    resolve = "tie" if alone else None
    loaded = load(
        checkpoint.source,
        resolve=resolve,
        dtype=dtype,
        others=lambda name: name.startswith(OWN_TENSORS),
    )
    gpt = loaded.model
    if gpt.head is not None and not keep_head:
        gpt.head = None
        gpt.config = replace(gpt.config, tie_word_embeddings=True)
    return loaded


def load_head(
    cls: type[H],
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> H:
    """Load a body and its head; `options` are the constructor's and win over the file's."""
    checkpoint = open_checkpoint(source)
    missing = [name for name in cls.own if name not in checkpoint.tensors]
    if missing and len(missing) == len(cls.own):
        raise UserError(
            f"{checkpoint.source} has no {missing[0]}, so it is no {cls.__name__}: "
            f"{cls.__name__}.fresh(...) puts a new head on its body"
        )
    if missing:
        raise CorruptInputError(f"{checkpoint.source}: {missing[0]} is missing")
    stored = {name: checkpoint.tensors[name] for name in cls.own}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    _require_matrices(checkpoint.source, shapes)
    chosen = cls.options_from(checkpoint.config, shapes) | dict(options)
    gpt = load_body(checkpoint.source, dtype=dtype, keep_head=cls.predicts_tokens).model
    head = cls(gpt, **chosen)
    _fill(head, stored, checkpoint.source)
    return head.eval()


def _require_matrices(source: Path | str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if len(shape) != (2 if name.endswith(".weight") else 1) or not all(shape):
            kind = "matrix" if name.endswith(".weight") else "vector"
            raise CorruptInputError(f"{source}: {name} of shape {shape} is no {kind}")


@torch.no_grad()
def _fill(head: Head, stored: Mapping[str, StoredTensor], source: Path | str) -> None:
    """Read the head's own tensors into it."""
    parameters = dict(head.named_parameters())
    for name, tensor in stored.items():
        parameter = parameters[name]
        if tensor.shape != tuple(parameter.shape):
            raise CorruptInputError(
                f"{source}: {name} is {tensor.shape}, not {tuple(parameter.shape)}"
            )
        parameter.copy_(LazyTensor(tensor).read())


def save_head(head: Head, directory: str | os.PathLike[str]) -> None:
    """Write config.json, model.safetensors and a model card; see `Head.save_pretrained`."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; give a directory to save the model in")
    gpt, config = head.gpt, head.gpt.config
    if gpt.head is not None and plain_matrix(gpt.head) is None:
        raise UserError(
            f"a head of {type(gpt.head).__name__} over the vocabulary cannot be written: it is a "
            "matrix (V, D) without bias in every file"
        )
    model_type = model_type_of(config)
    dtype = gpt.wte.weight.dtype
    description = config_json(config, gpt.foreign_config, str(dtype).removeprefix("torch."))
    description |= {"architectures": [architecture(type(head), model_type)]} | head.description()
    if description.get("pad_token_id") is None:  # transformers finds the last token by it
        description["pad_token_id"] = config.eos_token_id
    tensors = _tensors(head, model_type)
    require_room(directory, sum(tensor.n_bytes for tensor in tensors.values()))
    with replacing(directory / "model.safetensors") as temporary:
        write_safetensors(temporary, tensors, {"format": "pt"})
    write_json(directory / "config.json", description)
    card = directory / "README.md"
    if not card.exists() or OUR_CARD in card.read_text(encoding="utf-8", errors="replace"):
        with replacing(card) as temporary:
            temporary.write_text(_card(head, model_type), encoding="utf-8")


def _tensors(head: Head, model_type: ModelType) -> dict[str, Stored]:
    """Return what is written, by the names that transformers' class gives it."""
    config = head.gpt.config
    body = dict(head.gpt.named_parameters())
    if model_type is not TIEDGPT:
        body |= zero_biases(config, head.gpt.wte.weight.dtype)  # type: ignore[arg-type]
    tensors = {}
    for name, tensor in body.items():
        theirs = to_file(name, model_type)
        if not head.own:  # a body alone has no prefix
            theirs = theirs.removeprefix(model_type.prefix)
        tensors[theirs] = Stored(tensor, transposed=is_transposed(name))
    parameters = dict(head.named_parameters())
    return tensors | {name: Stored(parameters[name]) for name in head.own}


def class_in_transformers(cls: type[Head], config: GPTConfig) -> str | None:
    """Return the name of the class that loads what is saved, or None where there is none."""
    model_type = model_type_of(config)
    known = model_type is GPT2 or (model_type is GPT1 and cls.architecture in ON_GPT1)
    return architecture(cls, model_type) if known else None


def architecture(cls: type[Head], model_type: ModelType) -> str:
    """Return the name of transformers' class: GPT2ForSequenceClassification."""
    family = model_type.architecture.removesuffix(CLASS_OF_LANGUAGE_MODELS)
    return family + cls.architecture


def _card(head: Head, model_type: ModelType) -> str:
    config = head.gpt.config
    count = sum(parameter.numel() for parameter in head.parameters())
    return f"""---
library_name: {"tiedgpt" if model_type is TIEDGPT else "transformers"}
tags: [{model_type.name}]
---
# {architecture(type(head), model_type)}

{OUR_CARD}

{count:,} parameters: a GPT of {config.n_layer} blocks of width {config.n_embd} with {config.n_head}
heads and {config.n_positions} positions, and what scores its states.

Load it with `tiedgpt.heads.{type(head).__name__}.from_pretrained(directory)`.
"""

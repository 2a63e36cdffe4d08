"""Write a Hugging Face directory that transformers loads unchanged, one copy of a tied matrix."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import format_count, replacing, require_room, write_json, writing
from tiedgpt.signatures import checked
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.containers import write_safetensors
from tiedgpt.weights.formats.transformers import (
    CONV1D,
    TIEDGPT,
    config_json,
    model_type_of,
    to_file,
)
from tiedgpt.weights.parameters import PRECISIONS, gpt_parameters, zero_biases
from tiedgpt.weights.tensors import StoredTensor
from tiedgpt.weights.torch_file import stored_tensor

OUR_CARD = "<!-- written by tiedgpt: a later save writes it anew; remove this line to keep it -->"


@checked
def save_model(
    model: GPT, directory: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> None:
    """Write config.json, generation_config.json, model.safetensors and a model card.

    dtype None is the model's own; with another, the model stays unchanged. Tied, the file has no
    `lm_head.weight`. Raises `UserError`, before anything is written, for a model that
    does not match its config: adapters, parametrizations, other parameters, or a larger head.
    """
    tensors = tensors_of(model, dtype)
    write_directory(directory, tensors, descriptions(model, dtype), model_card(model.config))


def tensors_of(model: GPT, dtype: torch.dtype | None = None) -> dict[str, StoredTensor]:
    """Return a model's tensors under transformers' names, with zeros for missing biases."""
    model_type = model_type_of(model.config)
    parameters = gpt_parameters(model, "a Hugging Face directory")
    if model_type is not TIEDGPT:  # transformers knows no model without biases
        parameters |= zero_biases(model.config, model.wte.weight.dtype)
    return {
        to_file(name, model_type): stored_tensor(
            name, parameter.T if CONV1D.fullmatch(name) else parameter, dtype=dtype
        )
        for name, parameter in parameters.items()
    }


def write_directory(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, StoredTensor],
    described: Mapping[str, object],
    card: str,
) -> None:
    """Write model.safetensors, JSON files by name and a card, unless one was edited.

    Raises `UserError` where `directory` is a file, `NoRoomError` before a disk is too full.
    """
    directory = Path(directory)
    card_path = directory / "README.md"
    with writing(directory):
        if directory.exists() and not directory.is_dir():
            raise UserError(f"{directory} is a file", hint="give a directory to save the model in")
    with writing(card_path):
        edited = card_path.exists() and OUR_CARD not in card_path.read_text("utf-8", "replace")
    require_room(directory, sum(tensor.n_bytes for tensor in tensors.values()))
    with replacing(directory / "model.safetensors") as temporary:
        write_safetensors(temporary, tensors, {"format": "pt"})
    for name, description in described.items():
        write_json(directory / name, description)
    if not edited:
        with replacing(card_path) as temporary:
            temporary.write_text(card, encoding="utf-8")


def write(model: GPT, path: Path, *, precision: str, **_: Any) -> tuple[str, ...]:
    """Write the directory `path` in "fp32", "fp16" or "bf16"; return notes."""
    save_model(model, path, PRECISIONS[precision])
    if model_type_of(model.config) is not TIEDGPT:
        return ()
    return ("transformers has no class for this model and refuses it; tiedgpt loads it",)


def save_tokenizer(tokenizer: Tokenizer, config: GPTConfig, directory: Path) -> None:
    """Write the tokenizer of a model, with the most tokens that the model takes at once."""
    tokenizer.save_pretrained(directory)
    settings = tokenizer.config() | {"model_max_length": config.n_positions}
    write_json(directory / "tokenizer_config.json", settings)


def describe(model: GPT, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the model's config.json; `UserError` if it cannot be written."""
    dtype_name = str(dtype or model.wte.weight.dtype).removeprefix("torch.")
    description = config_json(model.config, model.foreign_config, dtype_name)
    try:
        json.dumps(description).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"the model's foreign_config cannot be written: {error}") from None
    return description


def descriptions(model: GPT, dtype: torch.dtype | None) -> dict[str, dict[str, Any]]:
    """Return config.json and generation_config.json by name; `UserError` as `describe`."""
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")}
    generation = {"_from_model_config": True} | {k: v for k, v in ids.items() if v is not None}
    return {"config.json": describe(model, dtype), "generation_config.json": generation}


def peculiarities(config: GPTConfig) -> str:
    """Return what sets a model apart from GPT-2, each after a comma; "" for GPT-2 itself."""
    differences = {
        "norms after the sublayers": config.norm == "post",
        "no biases": not config.bias,
        f"attention windows {config.attention_windows}": config.attention_windows is not None,
        config.activation_function: config.activation_function != "gelu_new",
    }
    return "".join(f", {text}" for text, differs in differences.items() if differs)


def model_card(config: GPTConfig) -> str:
    """Return a short model card with the model's shape and the call that loads it."""
    tie = "the head predicts with a matrix of its own"
    if config.tie_word_embeddings:
        size = f"{config.vocab_size:,} x {config.n_embd}"
        tie = f"one matrix of {size} reads and predicts, counted once"
    library = "transformers"
    loads = " or with transformers\n(`AutoModelForCausalLM.from_pretrained(directory)`)."
    if model_type_of(config) is TIEDGPT:
        library, loads = "tiedgpt", ";\ntransformers has no class that computes it."
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags: [{model_type_of(config).name}]
---
# A GPT

{OUR_CARD}

{config.parameter_count():,} parameters; {tie}.
{format_count(config.n_layer, "block")} of width {config.n_embd} with
{format_count(config.n_head, "head")}; {config.n_positions} positions{peculiarities(config)}.

Load it with `tiedgpt` (`GPT.from_pretrained(directory)`){loads}
"""

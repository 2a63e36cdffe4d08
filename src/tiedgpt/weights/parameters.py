"""Check a model for every writer: it must have the parameters of a plain GPT and no others.

Parameters inside torch's wrappers (compiled or checkpointed blocks, DDP) are found under the
module's own names. Everything else is refused by name before a byte is written.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Program
from tiedgpt.weights.gpt import shapes
from tiedgpt.weights.wrappers import WRAPPERS

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ADDED = {
    r"lora_|\.base_layer\.|modules_to_save": "belongs to an adapter: merge it first "
    "(tiedgpt.tune.merge)",
    r"parametrizations\.": "is parametrized: call torch.nn.utils.parametrize."
    "remove_parametrizations first",
    r"_orig$": "is pruned: call torch.nn.utils.prune.remove first",
}
"""Origins of foreign parameters, by their names."""
GELUS = ("gelu", "gelu_new")
MEANINGS = {
    "attention_windows": "dense attention",
    "n_inner": "MLPs of width 4 D",
    "tie_word_embeddings": "one matrix that reads and predicts",
}
"""Meaning of values that fields must have in some programs."""
HOOKS = (
    "forward",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes of a module by which it may compute something else."""


def head_matrix(head: nn.Module) -> Tensor | None:
    """Return the matrix (V, D) of a head that is h W^T and nothing more, else None."""
    if any(vars(head).get(name) for name in HOOKS) or getattr(head, "bias", None) is not None:
        return None
    if type(head) is nn.Linear and [name for name, _ in head.named_parameters()] == ["weight"]:
        return head.weight
    return None


def parameters_for(
    program: Program, model: GPT, *, approximate_gelu: bool = False
) -> dict[str, Tensor]:
    """Return the parameters to write, by our names.

    Raises `UserError`, before anything is written, for a model that the program cannot compute; the
    error names the field. The exact GELU and its tanh form differ by less than 0.0005 everywhere:
    `approximate_gelu` lets a model of one be run with the other.
    """
    parameters, config = gpt_parameters(model, program.name), model.config
    others = (field for field in dataclasses.fields(config) if not program.supports(field.name))
    for name, value in ((field.name, field.default) for field in others):
        got, remedy = getattr(config, name), None
        if name == "activation_function":
            value = program.activation
            if got in GELUS and value in GELUS:
                remedy = (
                    "approximate_gelu=True (--approximate-gelu) writes it; its logits differ a "
                    "little"
                )
        if name == "tie_word_embeddings":
            remedy = (
                'load it with resolve="keep-input" or "keep-output" (--resolve), or tie(model), '
                "to have one matrix"
            )
        is_close = name == "activation_function" and approximate_gelu and remedy is not None
        is_default_width = name == "n_inner" and got == 4 * config.n_embd
        if got != value and not is_close and not is_default_width:
            raise UserError(
                f"{name}={got!r} cannot be written: {program.name} has only "
                f"{MEANINGS.get(name, repr(value))}",
                hint=remedy,
            )
    return parameters


def gpt_parameters(model: GPT, whose: str) -> dict[str, Tensor]:
    """Return the model's parameters by name, in the order of `gpt.shapes`.

    `whose` names the format in messages. Raises `UserError` for a head that is not a matrix (V, D),
    for parameters that are missing, added, of another shape than the config says, or without data.
    """
    if model.head is not None and head_matrix(model.head) is None:
        raise UserError(
            f"a head of {type(model.head).__name__} cannot be written: {whose} has a matrix (V, D) "
            "without bias"
        )
    if (model.head is None) != model.config.tie_word_embeddings:
        calls = "tie(model), untie(model) or replace_head(model, model.head) of tiedgpt.tie"
        raise UserError(
            "the model's head and config.tie_word_embeddings disagree", hint=f"use {calls}"
        )
    named = model.named_parameters(remove_duplicate=False)
    parameters: dict[str, Tensor] = {WRAPPERS.sub("", name): p for name, p in named}
    expected = shapes(model.config)
    for name in [*(name for name in parameters if name not in expected), *expected]:
        if problem := _problem(name, parameters.get(name), expected.get(name)):
            raise UserError(f"this model cannot be written for {whose}: {name} {problem}")
    if parameters.get(HEAD) is parameters[EMBEDDING]:
        raise UserError("the head holds W itself while the config says untied: call tie(model)")
    return {name: parameters[name] for name in expected}


def _problem(name: str, parameter: Tensor | None, expected: tuple[int, ...] | None) -> str:
    if expected is None:
        reasons = (reason for pattern, reason in ADDED.items() if re.search(pattern, name))
        return next(reasons, "is not a GPT's: merge or remove it")
    if parameter is None:
        return "is missing"
    if tuple(parameter.shape) != expected:
        return f"is {tuple(parameter.shape)}, its config says {expected}"
    if parameter.is_meta:
        return "has no data (it is on the meta device)"
    if hasattr(parameter, "full_tensor"):
        return "is one process's shard: gather the model first"
    return ""


def zero_biases(config: GPTConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return zeros for the biases that a model does not have, by our names."""
    present = shapes(config)
    complete = shapes(replace(config, bias=True)).items()
    return {
        n: torch.zeros(shape, dtype=dtype, device="cpu")
        for n, shape in complete
        if n not in present
    }


def convert_tensor(name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in `dtype`, contiguous on the CPU; `UserError` where fp16 overflows."""
    tensor = parameter.detach().cpu()
    result = tensor.to(dtype).contiguous()
    if dtype is torch.float16 and bool((result.isinf() & ~tensor.isinf()).any()):
        raise UserError(f"{name} has numbers beyond float16's 65,504", hint="write bf16 or fp32")
    return result

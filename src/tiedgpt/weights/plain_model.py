"""What the GGUF and ONNX writers require of a model: the parameters of a plain GPT, no others."""

from __future__ import annotations

import torch
from torch import Tensor

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.weights.names import shapes
from tiedgpt.weights.save import require_plain_head

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def plain_parameters(model: GPT, whose: str) -> dict[str, Tensor]:
    """Return the model's parameters by name, in the order of `names.shapes`.

    `whose` names the format in messages. Raises `UserError` for a head that is not a matrix (V, D),
    for parameters that are missing, added, of another shape than the config says, or without data.
    """
    require_plain_head(model, whose)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    expected = shapes(model.config)
    for name in [*expected, *parameters]:
        problem = ""
        if name not in expected:
            problem = "is not a GPT's: merge or remove it"
        elif name not in parameters:
            problem = "is missing"
        elif tuple(parameters[name].shape) != expected[name]:
            shape = tuple(parameters[name].shape)
            problem = f"is {shape}, its config says {expected[name]}"
        elif parameters[name].is_meta:
            problem = "has no data (it is on the meta device)"
        if problem:
            raise UserError(f"this model cannot be written for {whose}: {name} {problem}")
    return {name: parameters[name] for name in expected}


def converted(name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in `dtype`, contiguous on the CPU; `UserError` where fp16 overflows."""
    tensor = parameter.detach().cpu()
    result = tensor.to(dtype).contiguous()
    if dtype is torch.float16 and bool((result.isinf() & ~tensor.isinf()).any()):
        raise UserError(f"{name} has numbers beyond float16's 65,504: write bf16 or fp32")
    return result

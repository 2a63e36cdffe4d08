"""Find out whether W predicts, and find matrices (V, D) inside the head of a GPT.

A plain head h W^T needs no module, so `model.head` has the value None. Inside a larger head
(dropout before it, a bias after it) `Unembed` calls the embedding's `unembed`. It has no matrix of
its own, so nothing can untie it.
"""

from __future__ import annotations

import copy
from textwrap import shorten
from typing import TypeVar

import torch
from torch import Tensor, nn

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.runtime import eval_mode
from tiedgpt.signatures import require_type

Module = TypeVar("Module", bound=nn.Module)


class Unembed(nn.Module):
    """Predict with an embedding's matrix from inside a head: h W^T, or h W^T + b.

    The embedding is not registered here: it keeps its one name in the model that owns it.
    """

    wte: TiedEmbedding
    """The module that owns W."""

    def __init__(self, wte: TiedEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.__dict__["wte"] = wte  # an assignment would register it
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """W, (V, D), the embedding's own."""
        return self.wte.weight

    def forward(self, h: Tensor) -> Tensor:
        """Predict: h (..., D) -> logits (..., V)."""
        logits = self.wte.unembed(h)
        return logits if self.bias is None else logits + self.bias

    def extra_repr(self) -> str:
        """Return the name and shape of the matrix for `print(model)`."""
        return f"{tuple(self.weight.shape)}, predicts with the rows of wte.weight"


def require_gpt(model: object) -> GPT:
    """Return the model if it is an unsharded, unadapted `tiedgpt.GPT`; else raise `UserError`."""
    if isinstance(model, GPT) and type(model.wte.weight) is nn.Parameter:
        for name, child in (("wte", model.wte), ("head", model.head or nn.Identity())):
            if any("lora_" in key for key, _ in child.named_parameters()):
                raise UserError(
                    f"{name} has an adapter", hint="merge it first (tiedgpt.tune.merge)"
                )
        return model
    require_type("the function", "model", model, nn.Module)
    assert isinstance(model, nn.Module)
    require_no_gpt_inside(model)
    raise UserError(
        f"{type(model).__name__} is no tiedgpt.GPT, or wte.weight is sharded or wrapped: change "
        "the GPT before that; of these functions only `tie` changes other modules"
    )


def require_no_gpt_inside(module: nn.Module) -> None:
    """Raise `UserError` for a module around a `tiedgpt.GPT`, which is to be changed itself."""
    for name, child in module.named_modules():
        if isinstance(child, GPT) and child is not module:
            holder = type(module).__name__
            raise UserError(f"the GPT is model.{name} inside {holder}: change that one")


def is_tied(model: GPT) -> bool:
    """Whether W predicts: through `wte`, or as a parameter of the head under a second name."""
    return predicts_through_wte(model) or bool(find_second_names(model))


def predicts_through_wte(model: GPT) -> bool:
    """Whether W predicts through `wte`: without a head, or through an `Unembed` in it."""
    return model.head is None or bool(find_unembeds(model))


def find_unembeds(model: GPT) -> dict[str, Unembed]:
    """Return the modules in the head that predict with `model.wte`, by name."""
    parts = dict(model.named_modules())
    return {n: m for n, m in parts.items() if isinstance(m, Unembed) and m.wte is model.wte}


def find_second_names(model: GPT) -> list[str]:
    """Return the names of parameters in the head that are `wte.weight` under a second name."""
    parameters = (model.head or nn.Identity()).named_parameters("head", remove_duplicate=False)
    return [name for name, parameter in parameters if parameter is model.wte.weight]


def find_head_layers(model: GPT) -> dict[str, nn.Linear]:
    """Return the linear layers D -> V in the head, by their names in the model."""
    shape, head = model.wte.weight.shape, model.head or nn.Identity()
    parts = dict(head.named_modules(prefix="head"))
    return {n: m for n, m in parts.items() if isinstance(m, nn.Linear) and m.weight.shape == shape}


@torch.no_grad()
def require_logits(model: GPT, head: nn.Module) -> None:
    """Call a head with zeros (1, 1, D); raise `UserError` unless it returns logits (1, 1, V)."""
    size, width = model.wte.weight.shape
    h = model.wte.weight.new_zeros(1, 1, width)
    try:
        with eval_mode(head):
            logits = head(h)
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        problem = f"got {got}; resize the vocabulary before a head is put in"
    except Exception as error:
        got, problem = None, (str(error) or type(error).__name__).splitlines()[0]
    if got != (1, 1, size):
        raise UserError(
            f"{format_module(head)} must turn h (1, 1, {width}) of {h.dtype} on {h.device} into "
            f"logits (1, 1, {size}): {problem}"
        )


def copy_sharing(module: Module) -> Module:
    """Return a copy of a module that has the same Parameter objects."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in module.parameters()})


def format_module(module: nn.Module) -> str:
    """Return torch's text of a module in one line."""
    return shorten(str(module), 200)

"""A `GPT` in torch -> a packed model, one tensor converted at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.layers import MLP, Attention, Block
from tiedgpt.core.model import GPT, plain_matrix
from tiedgpt.core.product import Product
from tiedgpt.errors import UserError
from tiedgpt.weights.names import shapes
from tiedgpt.weights.packed.model import PackedModel, pack_model
from tiedgpt.weights.packed.panels import Form

MODULES = {
    GPT, TiedEmbedding, Block, Attention, MLP, Product, nn.Linear, nn.Embedding, nn.LayerNorm,
    nn.Dropout, nn.Identity, nn.ModuleList,
}  # fmt: skip


class _Arrays(Mapping[str, NDArray[Any]]):
    """A model's parameters as float32 arrays, made when they are asked for."""

    def __init__(self, model: GPT) -> None:
        self._parameters = dict(model.named_parameters())

    def __getitem__(self, name: str) -> NDArray[Any]:
        parameter = self._parameters[name].detach()
        array: NDArray[Any] = parameter.to("cpu", torch.float32).numpy()
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def is_plain(model: GPT) -> bool:
    """Whether a model computes what its config says and nothing more: no adapters, a plain head."""
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    own = model.head is not None
    return (
        found == shapes(model.config)
        and {type(module) for module in model.modules()} <= MODULES
        and own is not model.config.tie_word_embeddings
        and not (own and plain_matrix(model.head) is None)  # type: ignore[arg-type]
    )


def pack_gpt(model: GPT, precision: Form) -> PackedModel:
    """Pack a model, which stays as it is.

    Raises `UserError` for one that is not plain, or whose weights are not finite.
    """
    if not is_plain(model):
        raise UserError(
            "a model with adapters, other modules or another head than its config's is not packed: "
            "merge what was added, or compute it with torch"
        )
    return pack_model(model.config, _Arrays(model), precision)

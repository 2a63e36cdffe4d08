"""The one place where the fast ways are switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.layers import Attention
from tiedgpt.core.model import GPT
from tiedgpt.train.fast.attention import ShortAttention
from tiedgpt.train.fast.embedding import SparseReading, dense_gradient
from tiedgpt.train.fast.linear import LeanLinear

SUBSTITUTES: dict[type[nn.Module], type[nn.Module]] = {
    Attention: ShortAttention,
    nn.Linear: LeanLinear,
    TiedEmbedding: SparseReading,
}


@contextmanager
def fast_training(model: nn.Module) -> Iterator[None]:
    """Compute training steps of a model in the fast ways; forward and backward belong inside.

    `model` is a GPT, or has one as `gpt`. The embedding and the blocks' layers change their class
    while the block lasts; whatever is parametrized, adapted or replaced stays as it is. Second
    derivatives and `torch.func` may raise torch's error inside.
    """
    gpt: Any = getattr(model, "gpt", model)
    modules = list(gpt.h.modules())
    if isinstance(model, GPT) and model.head is None and type(model.wte.weight) is nn.Parameter:
        modules.append(model.wte)  # FSDP2's W has another type
    changed = [module for module in modules if type(module) in SUBSTITUTES]
    with ExitStack() as stack:
        for module in changed:
            stack.callback(setattr, module, "__class__", type(module))
            module.__class__ = SUBSTITUTES[type(module)]
        stack.enter_context(dense_gradient(gpt.wte))
        yield

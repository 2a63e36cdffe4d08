"""The one place where the fast ways are switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from tiedgpt.core.layers import Attention
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.train.fast.attention import ShortAttention
from tiedgpt.train.fast.linear import LeanLinear
from tiedgpt.train.fast.substitute import Substitute

SUBSTITUTES: dict[type[nn.Module], type[Substitute]] = {
    Attention: ShortAttention,
    nn.Linear: LeanLinear,
}


@contextmanager
def fast_training(model: nn.Module) -> Iterator[None]:
    """Compute training steps of a model in the fast ways; forward and backward belong inside.

    `model` is a GPT, or has one as `gpt`. The layers of its blocks change their class while the
    block lasts; whatever is parametrized, adapted or replaced stays as it is. Second derivatives
    and `torch.func` may raise torch's error inside. Raises `UserError` for any other module.
    """
    gpt = getattr(model, "gpt", model)
    if not isinstance(gpt, GPT):
        raise UserError(f"fast_training takes a GPT or a head on one, got {type(model).__name__}")
    with ExitStack() as stack:
        for module in gpt.h.modules():
            plain = type(module)
            if plain in SUBSTITUTES:
                module.__class__ = SUBSTITUTES[plain]
                assert isinstance(module, Substitute)
                stack.callback(module.put_back, plain)
        yield

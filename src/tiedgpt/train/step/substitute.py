"""Modules whose class is changed for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, SupportsIndex

from torch import nn
from typing_extensions import override

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError


class Substitute(nn.Module):
    """Base of the substitutes: copies and pickles of such a module are of the plain class."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).__bases__[-1],), *reduced[2:]


@contextmanager
def substitute(
    model: nn.Module, table: Mapping[type[nn.Module], type[Substitute]]
) -> Iterator[None]:
    """Give a model and the layers of its blocks other classes inside the block.

    `model` is a GPT, or has one as `gpt`; `UserError` for any other module. Parametrized, adapted
    or replaced layers keep their class.
    """
    gpt = model if isinstance(model, GPT) else getattr(model, "gpt", None)
    if not isinstance(gpt, GPT):
        raise UserError(f"fast_training takes a GPT or a head on one, got {type(model).__name__}")
    with ExitStack() as stack:
        for module in (gpt, gpt.drop, *gpt.h.modules()):
            original = type(module)
            base = original.__bases__[-1] if hasattr(original, "unshard") else original
            if base in table:
                new: type[nn.Module] = table[base]
                if base is not original:  # FSDP2's class of a sharded module
                    new = type(original.__name__, (new, original), {})
                module.__class__ = new
                stack.callback(_put_back, module, original, new)
        yield


def _put_back(module: nn.Module, original: type[nn.Module], substituted: type[nn.Module]) -> None:
    """Restore a module's original class, also as a base of a class added meanwhile."""
    if type(module) is substituted:
        module.__class__ = original
    elif substituted in (bases := type(module).__bases__):  # parametrized or sharded inside
        type(module).__bases__ = tuple(original if b is substituted else b for b in bases)


def _new(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)

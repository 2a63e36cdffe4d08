"""Which parameters are one: compared by the memory that they hold, not by their names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import Tensor, nn


def storage_key(tensor: Tensor) -> Hashable:
    """Return what two tensors have in common exactly when they begin in the same memory.

    Works on the meta device too. Valid as long as the tensor lives.
    """
    try:
        if tensor.numel():
            return id(tensor.untyped_storage()), tensor.storage_offset()
    except (NotImplementedError, RuntimeError):  # sharded and wrapped tensors have no storage
        pass
    return id(tensor)


def count(parameters: Iterable[Tensor]) -> int:
    """Return how many numbers the parameters hold, memory that several share counted once."""
    return sum({storage_key(parameter): parameter.numel() for parameter in parameters}.values())


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, kept alive so that they can be compared with later ones."""
    return dict(module.named_parameters())

"""Which parameters are one: compared by the memory that they hold, not by their names."""

from __future__ import annotations

from collections.abc import Hashable

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


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters, memory that several names share counted once."""
    return sum({storage_key(p): p.numel() for p in module.parameters()}.values())

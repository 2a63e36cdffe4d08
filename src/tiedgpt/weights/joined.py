"""Tensors that follow each other as one: the queries, keys and values that a project keeps apart.

Nothing is read when they are joined; a block that is asked for is read from the parts over which it
lies.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tiedgpt.weights.stored import Native, Read, Storage, StoredTensor


def joined(name: str, parts: list[StoredTensor]) -> StoredTensor | None:
    """Return vectors or matrices, joined along their first axis; None unless they are alike."""
    first = parts[0]
    alike = {(part.shape, part.dtype, part.read is None) for part in parts}
    if len(alike) > 1 or len(first.shape) not in (1, 2):
        return None
    n_bytes = sum(part.n_bytes for part in parts)
    return replace(
        first, name=name, shape=(len(parts) * first.shape[0], *first.shape[1:]), n_bytes=n_bytes,
        storage=Storage(tuple(part.storage for part in parts), 0, n_bytes), strides=None,
        read=None if first.read is None else _reader(parts),
    )  # fmt: skip


def _reader(parts: list[StoredTensor]) -> Read:
    """Read across tensors of one shape that follow each other along their first axis."""
    length, axis = parts[0].shape[0], len(parts[0].shape) == 1

    def read(first: int, end: int, left: int, right: int) -> Native:
        blocks = []
        start, stop = (left, right) if axis else (first, end)
        for at, part in enumerate(parts):
            a, b = max(start - at * length, 0), min(stop - at * length, length)
            if a < b:
                blocks.append(part.native(0, 1, a, b) if axis else part.native(a, b, left, right))
        return np.concatenate(blocks, axis=1 if axis else 0)

    return read

"""A stored tensor on its way into a safetensors file: exact bytes, a block in memory at a time.

A copy may take fewer rows than there are, or the transpose; its bytes are never decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiedgpt.errors import UserError
from tiedgpt.weights.formats.safetensors_file import ITEM_BYTES, TORCH_NAMES
from tiedgpt.weights.tensors import BLOCK_BYTES, Native, StoredTensor

NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()} | {
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Copy:
    """A tensor to be copied: all of it; of a matrix, its transpose or its first `rows` rows."""

    tensor: StoredTensor
    transposed: bool = False
    rows: int | None = None

    @property
    def format_name(self) -> str:
        """Safetensors' name of its type; `UserError` where it has none."""
        name = NAMES.get(self.tensor.dtype, self.tensor.dtype.upper())
        if name not in ITEM_BYTES:
            raise UserError(
                f"{self.tensor.name} is {self.tensor.dtype}, which safetensors does not hold"
            )
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the new file."""
        shape = self.tensor.shape[::-1] if self.transposed else self.tensor.shape
        return shape if self.rows is None else (self.rows, *shape[1:])

    @property
    def n_bytes(self) -> int:
        """The bytes it takes in the new file."""
        whole = self.tensor.n_bytes
        if self.rows is None or not self.tensor.count:
            return whole
        all_rows = self.tensor.shape[1] if self.transposed else self.tensor.shape[0]
        return whole // all_rows * self.rows

    def _pieces(self, rows: int, columns: int) -> Iterator[Native]:
        """Yield rows that are wider than a block in pieces."""
        step = max(1, BLOCK_BYTES // max(1, self.tensor.n_bytes // self.tensor.count))
        for row in range(rows):
            for left in range(0, columns, step):
                yield self.tensor.native(row, row + 1, left, min(columns, left + step))

    def blocks(self) -> Iterator[Native]:
        """Yield the bytes in order, a few megabytes at a time."""
        if not self.tensor.count:
            return
        if len(self.tensor.shape) == 1:
            yield self.tensor.native(0, 1, 0, self.shape[0])
            return
        rows, columns = self.tensor.matrix_shape
        if self.transposed:
            rows, columns = columns, rows
        end = rows if self.rows is None else self.rows
        step = max(1, BLOCK_BYTES * rows // self.tensor.n_bytes)
        if not self.transposed and step == 1:
            yield from self._pieces(end, columns)
            return
        for start in range(0, end, step):
            stop = min(end, start + step)
            if self.transposed:
                yield self.tensor.native(0, columns, start, stop).T
            else:
                yield self.tensor.native(start, stop)

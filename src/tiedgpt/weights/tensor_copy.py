"""A stored tensor copied into a safetensors file: exact bytes, a block in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiedgpt.errors import UserError
from tiedgpt.weights.safetensors_file import ITEM_BYTES, TORCH_NAMES
from tiedgpt.weights.tensors import BLOCK_BYTES, Native, StoredTensor

NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()} | {
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Copy:
    """A tensor to be copied, or only its first `rows` rows. Its bytes are never decoded."""

    tensor: StoredTensor
    rows: int | None = None

    @property
    def format_name(self) -> str:
        """The name of its type in safetensors; `UserError` if it has none."""
        name = NAMES.get(self.tensor.dtype, self.tensor.dtype.upper())
        if name not in ITEM_BYTES:
            raise UserError(
                f"{self.tensor.name} is {self.tensor.dtype}, which safetensors does not hold"
            )
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the new file."""
        return self.tensor.shape if self.rows is None else (self.rows, *self.tensor.shape[1:])

    @property
    def n_bytes(self) -> int:
        """The bytes it takes in the new file."""
        if self.rows is None or not self.tensor.count:
            return self.tensor.n_bytes
        return self.tensor.n_bytes // self.tensor.shape[0] * self.rows

    def blocks(self) -> Iterator[Native]:
        """Yield the bytes in order, a few megabytes at a time."""
        tensor = self.tensor
        if not tensor.count:
            return
        if len(tensor.shape) == 1:
            yield tensor.native(0, 1, 0, self.shape[0])
            return
        rows, columns = tensor.matrix_shape
        end = rows if self.rows is None else self.rows
        step = BLOCK_BYTES * rows // tensor.n_bytes
        if step > 1:
            for start in range(0, end, step):
                yield tensor.native(start, min(end, start + step))
            return
        width = max(1, BLOCK_BYTES * tensor.count // tensor.n_bytes)  # rows wider than a block
        for row in range(end):
            for left in range(0, columns, width):
                yield tensor.native(row, row + 1, left, min(columns, left + width))

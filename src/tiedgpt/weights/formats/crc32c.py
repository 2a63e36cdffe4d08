"""CRC-32C (Castagnoli; RFC 3720, B.4), the checksum of TensorFlow's files, at memory's speed.

A checksum is the remainder of the bytes, taken as a polynomial over GF(2), after division by

    P = x^32 + x^28 + x^27 + ... + x^6 + 1      (0x82F63B78, bits reversed)

P divides x^5685 + x^1362 + x^426 + 1, and so the s-th power of that for s = 8 and s = 64: squaring
over GF(2) only doubles the exponents. Thus the item (a byte, or a word of 64 bits) at index j can
be taken out when it is added, by XOR, to the items at j + 5685 - 1362, j + 5685 - 426 and j + 5685:
the remainder stays the same, and thousands of items move at once. What is left at the end, 5,685
bytes, goes byte by byte through the usual table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x82F63B78
DEGREE = 5685
MIDDLE = (1362, 426)
STEP = DEGREE - MIDDLE[0]
"""How many neighbours can be taken out at once: none of them is added to another."""
MASK_DELTA = 0xA282EAD8


def _table() -> list[int]:
    """Return the remainder of every byte, followed by 32 zero bits."""
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ POLYNOMIAL * (value & 1) for value in table]
    return table


_TABLE = _table()


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the checksum of `data`, or of what had the checksum `before` followed by `data`."""
    return crc32c_in_place(np.frombuffer(data, np.uint8).copy(), before)


def crc32c_in_place(data: NDArray[np.uint8], before: int = 0) -> int:
    """Do as `crc32c`, and destroy `data`: contiguous bytes that nobody needs any more."""
    register = before ^ 0xFFFFFFFF
    if len(data) >= 4:
        data[:4] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)
        register = 0
        words = data[: len(data) & ~7].view(np.uint64) if _is_aligned(data) else data[:0]
        data = data[_fold(words) * 8 :]
        data = data[_fold(data) :]
    for byte in data.tobytes():
        register = _TABLE[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


def _is_aligned(data: NDArray[np.uint8]) -> bool:
    return data.ctypes.data % 8 == 0


def _fold(items: NDArray[Any]) -> int:
    """Add the first items into the rest, but for the last `DEGREE`; return how many."""
    for start in range(0, n_folded := max(0, len(items) - DEGREE), STEP):
        stop = min(start + STEP, n_folded)
        chunk = items[start:stop]
        for exponent in (*MIDDLE, 0):
            ahead = DEGREE - exponent
            items[start + ahead : stop + ahead] ^= chunk
    return n_folded


def masked(checksum: int) -> int:
    """Return a checksum as TensorFlow stores it: turned by 15 bits, plus a constant.

    So that the checksum of bytes that hold checksums is no special case (crc32c.h of LevelDB).
    """
    turned = checksum >> 15 | checksum << 17 & 0xFFFFFFFF
    return turned + MASK_DELTA & 0xFFFFFFFF

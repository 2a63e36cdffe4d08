"""CRC-32C: the published values, the algebra behind the speed, and every way to cut the bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt.weights.formats import crc32c as module
from tiedgpt.weights.formats.crc32c import DEGREE, MIDDLE, crc32c, crc32c_in_place, masked


def bit_by_bit(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ 0x82F63B78 * (register & 1)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, B.4, and the value by which a CRC is known
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"", 0),
        (b"a", 0xC1D04330),
    ],
)
def test_published_values(data, expected):
    assert crc32c(data) == bit_by_bit(data) == expected


def test_the_sparse_polynomial_is_a_multiple():
    def remainder(exponent: int) -> int:
        value = 1
        for _ in range(exponent):
            value <<= 1
            if value >> 32:
                value ^= 0x11EDC6F41
        return value

    total = remainder(DEGREE) ^ 1
    for exponent in MIDDLE:
        total ^= remainder(exponent)
    assert total == 0


SIZES = [0, 1, 3, 4, 5, 7, 8, 63, DEGREE - 1, DEGREE, DEGREE + 1, DEGREE + module.STEP + 3]
SIZES += [8 * DEGREE - 1, 8 * DEGREE + 8, 8 * (DEGREE + module.STEP) + 13, 250_001]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_as_bit_by_bit(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert crc32c(data.tobytes()) == bit_by_bit(data.tobytes())
    shifted = np.concatenate([data[:1], data])[min(1, size) :]  # not on a word's boundary
    assert crc32c_in_place(shifted.copy()[:size]) == bit_by_bit(data.tobytes())
    room = np.empty(size + 1, np.uint8)
    room[1:] = data
    assert crc32c_in_place(room[1:]) == bit_by_bit(data.tobytes())


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=80), st.data())
def test_pieces_make_the_whole(data, draw):
    cut = draw.draw(st.integers(0, len(data)))
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_the_mask_is_leveldbs():
    first = crc32c(b"foo")  # its own test: masking changes it, and twice is not back
    assert masked(first) != first
    assert masked(0) == 0xA282EAD8
    assert masked(1 << 15) == 0xA282EAD9

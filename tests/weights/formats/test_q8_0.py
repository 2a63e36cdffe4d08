"""Q8_0: the bytes that ggml's reference makes, and back."""

import warnings

import numpy as np
import pytest

from tiedgpt.weights.formats.q8_0 import BLOCK_BYTES, quantize
from tiedgpt.weights.tensors import decode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-3, 1.0, 300.0, 1e6])
def test_bytes_are_those_of_the_reference(scale):
    rows = np.random.default_rng(3).standard_normal((200, 96)).astype(np.float32) * scale
    theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    assert quantize(rows).tobytes() == theirs.tobytes()


def test_halves_are_rounded_away_from_zero_and_what_is_just_below_is_not():
    edges = [127.0, 0.5, -0.5, 1.5, -1.5, 0.49999997, -0.49999997, 126.5, -126.5, 0.0, -0.0, 2.5]
    rows = np.zeros((1, 32), np.float32)
    rows[0, : len(edges)] = edges
    stored = quantize(rows)
    assert stored[0, 2:].view(np.int8)[: len(edges)].tolist() == [
        127, 1, -1, 2, -2, 0, 0, 127, -127, 0, 0, 3,
    ]  # fmt: skip
    theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    assert stored.tobytes() == theirs.tobytes()


def test_zeros_stay_zeros_and_so_does_what_is_too_small_for_a_scale():
    rows = np.zeros((2, 64), np.float32)
    rows[1] = 1e-39
    stored = quantize(rows)
    assert stored.shape == (2, 64 // 32 * BLOCK_BYTES)
    assert not decode(stored, "Q8_0").any()


def test_no_number_moves_by_more_than_half_a_step():
    rows = np.random.default_rng(4).standard_normal((50, 64)).astype(np.float32)
    back = decode(quantize(rows), "Q8_0")
    largest = np.abs(rows.reshape(50, 2, 32)).max(-1, keepdims=True)
    assert (np.abs(back - rows).reshape(50, 2, 32) <= largest * (0.5 / 127 + 2e-3)).all()

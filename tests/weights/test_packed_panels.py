"""What a matrix becomes in panels, and what they stand for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt.errors import UserError
from tiedgpt.weights.formats.packed.panels import (
    PRECISIONS,
    from_bf16,
    layouts,
    pack,
    padded,
    to_bf16,
    unpack,
)

matrices = st.builds(
    lambda rows, width, seed, size: np.random.default_rng(seed).normal(0, size, (rows, width)),
    st.integers(1, 130), st.integers(1, 130), st.integers(0, 99), st.sampled_from([1e-6, 1, 1e6]),
).map(lambda matrix: matrix.astype(np.float32))  # fmt: skip


@settings(max_examples=25)
@given(matrices)
def test_what_panels_stand_for_is_near_the_matrix(matrix):
    row = np.abs(matrix).max(axis=1, keepdims=True)
    bounds = {"fp32": 0, "bf16": np.abs(matrix) / 256, "int8": row / 250, "int4": 0.3 * row}
    for form in PRECISIONS:
        panels = pack(matrix, form)
        assert panels.precision == form
        laid_out = ((a.shape, a.dtype) for a in (panels.weights, panels.scales))
        assert tuple(laid_out) == layouts(form, *matrix.shape)
        back = unpack(panels)
        assert back.shape == matrix.shape
        assert (np.abs(back - matrix) <= bounds[form]).all()


@settings(max_examples=25)
@given(matrices)
def test_packing_what_panels_stand_for_again_changes_no_number(matrix):
    for form in PRECISIONS:
        panels = pack(matrix, form)
        again = pack(unpack(panels), form)
        np.testing.assert_array_equal(unpack(again), unpack(panels))
        if form != "int4":  # where a scale may change its sign with its numbers
            np.testing.assert_array_equal(again.weights, panels.weights)
            np.testing.assert_array_equal(again.scales, panels.scales)


def test_rounding_to_bf16_is_torchs():
    values = torch.randn(1000).mul(10.0 ** torch.randint(-9, 9, (1000,)))
    expected = values.to(torch.bfloat16)
    bits = to_bf16(values.numpy())
    np.testing.assert_array_equal(from_bf16(bits), expected.float().numpy())


def test_rows_of_zeros_stay_zeros_and_padding_is_zero():
    matrix = np.zeros((3, 5), np.float32)
    matrix[1] = 1
    for form in PRECISIONS:
        panels = pack(matrix, form)
        np.testing.assert_array_equal(unpack(panels), matrix)
        panels = type(panels)(panels.weights, panels.scales, padded(3), padded(5))
        assert unpack(panels).sum() == 5


def test_what_is_not_finite_or_no_form_is_refused():
    with pytest.raises(UserError, match="finite"):
        pack(np.array([[1, np.nan]], np.float32), "int8")
    with pytest.raises(UserError, match="int3"):
        pack(np.ones((1, 1), np.float32), "int3")


@pytest.mark.parametrize("size", [1e-45, 2e-43, 1e-39, 1e-37])
def test_rows_too_small_for_a_scale_are_zeros(size):
    matrix = np.full((3, 5), size, np.float32)
    with np.errstate(all="raise", under="ignore"):
        again = unpack(pack(matrix, "int8"))
    assert np.abs(again - matrix).max() <= size

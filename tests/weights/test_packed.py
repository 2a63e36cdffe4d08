"""A packed directory opens unchanged, and damaged files are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig

from tests.models import random_gpt
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.containers import read_safetensors
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.packed import FILE, find_packed, open_packed
from tiedgpt.weights.formats.packed.panels import (
    PRECISIONS,
    from_bf16,
    layouts,
    pack,
    padded,
    to_bf16,
    unpack,
)
from tiedgpt.weights.formats.packed.writer import pack_gpt, save_packed
from tiedgpt.weights.load import load

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")

KINDS = [
    {},
    {"bias": False, "norm": "post", "attention_windows": (0, 4)},
    {"tie_word_embeddings": False, "n_embd": 33, "n_head": 3, "n_inner": 70},
]


@pytest.fixture
def packed(tiny, tmp_path):
    save_packed(pack_gpt(tiny, "int8"), tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_array_is_memory_mapped_at_its_offset(tiny, tmp_path, precision, changes):
    model = pack_gpt(random_gpt(5, **changes), precision)
    save_packed(model, tmp_path / "x", {"summary_type": "cls_index"})
    again = open_packed(tmp_path / "x")
    assert (again.config, again.precision) == (model.config, precision)
    assert again.arrays.keys() == model.arrays.keys()
    for name, array in again.arrays.items():
        np.testing.assert_array_equal(array, model.arrays[name])
        assert not array.size or not array.flags.writeable
        assert array.ctypes.data % 64 == 0 or not array.size
    assert load(tmp_path / "x").model.foreign_config["summary_type"] == "cls_index"


@pytest.mark.parametrize("changes", KINDS)
def test_any_reader_of_safetensors_reads_it_and_each_tensor_is_aligned(tiny, tmp_path, changes):
    save_packed(pack_gpt(random_gpt(5, **changes), "int4"), tmp_path)
    entries, _ = read_safetensors(OpenFile(tmp_path / FILE))
    assert {e.storage.start % 64 for name, e in entries.items() if name != "padding"} == {0}
    with safe_open(tmp_path / FILE, "np") as file:
        assert set(file.keys()) == entries.keys()
        assert file.metadata() == {
            "format": "tiedgpt-packed", "version": "1", "precision": "int4",
        }  # fmt: skip


def test_transformers_refuses_it(packed):
    with pytest.raises((ValueError, KeyError), match="tiedgpt-packed"):
        AutoConfig.from_pretrained(packed)


@pytest.mark.parametrize("changes", KINDS)
def test_other_tools_get_the_dequantized_weights(tmp_path, changes):
    save_packed(pack_gpt(random_gpt(5, **changes), "int8"), tmp_path / "int8")
    loaded = load(tmp_path / "int8")
    assert "become float32" in loaded.notes[0]
    twice = pack_gpt(loaded.model, "int8")
    first = open_packed(tmp_path / "int8")
    assert all(np.array_equal(twice.arrays[name], first.arrays[name]) for name in first.arrays)


def test_a_packed_directory_is_detected_by_directory_and_file(packed, tmp_path):
    assert find_packed(packed) == find_packed(packed / FILE) == packed
    assert find_packed(tmp_path) is None
    assert find_packed("gpt2") is None


def test_a_model_in_use_is_unchanged_when_its_file_is_replaced(tiny, packed):
    model, before = open_packed(packed), (packed / FILE).stat().st_ino
    copies = {name: array.copy() for name, array in model.arrays.items()}
    save_packed(pack_gpt(random_gpt(5), "int8"), packed)
    assert (packed / FILE).stat().st_ino != before
    model.require_whole()
    for name, array in model.arrays.items():
        np.testing.assert_array_equal(array, copies[name])
    assert not np.array_equal(open_packed(packed).arrays["wpe"], copies["wpe"])


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        (b'"version":"1"', b'"version":"2"', UserError, "version 2"),
        (b'"precision":"int8"', b'"precision":"int9"', CorruptInputError, "int9"),
        (b'"wpe"', b'"wxe"', CorruptInputError, "does not hold the arrays"),
        (b'"shape":[3,2,2,32]', b'"shape":[3,2,4,16]', CorruptInputError, "not hold the arrays"),
        (b'{"dtype":"F32","shape":[24,', b'{"dtype":"I32","shape":[24,', CorruptInputError, "hold"),
    ],
)
def test_a_contradicting_file_is_refused(packed, old, new, error, says):
    content = (packed / FILE).read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    (packed / FILE).write_bytes(content.replace(old, new))
    with pytest.raises(error, match=says):
        open_packed(packed)


def test_a_file_rewritten_by_another_tool_is_refused(packed):
    content = (packed / FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" "
    header += b" " * (-len(header) % 64)  # 8 bytes beside a multiple of 64
    (packed / FILE).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(CorruptInputError, match="multiple of 64"):
        open_packed(packed)


def test_only_models_are_packed_and_nothing_is_overwritten(tiny, tmp_path):
    with pytest.raises(UserError, match="holds no packed model"):
        open_packed(tmp_path)
    tiny.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds another model"):
        save_packed(pack_gpt(tiny, "int8"), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        save_packed(pack_gpt(tiny, "int8"), tmp_path / "file")


def test_weights_that_are_not_numbers_are_named(tiny):
    with torch.no_grad():
        tiny.h[1].mlp.c_fc.weight[3, 4] = torch.inf
    with pytest.raises(UserError, match=r"h\.1\.mlp\.c_fc\.weight"):
        pack_gpt(tiny, "int8")


matrices = st.builds(
    lambda rows, width, seed, size: np.random.default_rng(seed).normal(0, size, (rows, width)),
    st.integers(1, 130), st.integers(1, 130), st.integers(0, 99), st.sampled_from([1e-6, 1, 1e6]),
).map(lambda matrix: matrix.astype(np.float32))  # fmt: skip


@settings(max_examples=25)
@given(matrices)
def test_dequantized_panels_are_close_to_the_matrix(matrix):
    row = np.abs(matrix).max(axis=1, keepdims=True)
    bounds = {"fp32": 0, "bf16": np.abs(matrix) / 256, "int8": row / 250, "int4": 0.3 * row}
    for precision in PRECISIONS:
        panels = pack(matrix, precision)
        assert panels.precision == precision
        laid_out = ((a.shape, a.dtype) for a in (panels.weights, panels.scales))
        assert tuple(laid_out) == layouts(precision, *matrix.shape)
        back = unpack(panels)
        assert back.shape == matrix.shape
        assert (np.abs(back - matrix) <= bounds[precision]).all()


@settings(max_examples=25)
@given(matrices)
def test_packing_dequantized_panels_again_is_exact(matrix):
    for precision in PRECISIONS:
        panels = pack(matrix, precision)
        again = pack(unpack(panels), precision)
        np.testing.assert_array_equal(unpack(again), unpack(panels))
        if precision != "int4":  # where a scale may change its sign with its numbers
            np.testing.assert_array_equal(again.weights, panels.weights)
            np.testing.assert_array_equal(again.scales, panels.scales)


def test_rounding_to_bf16_equals_torchs():
    values = torch.randn(1000).mul(10.0 ** torch.randint(-9, 9, (1000,)))
    expected = values.to(torch.bfloat16)
    bits = to_bf16(values.numpy())
    np.testing.assert_array_equal(from_bf16(bits), expected.float().numpy())


def test_rows_of_zeros_stay_zeros_and_padding_is_zero():
    matrix = np.zeros((3, 5), np.float32)
    matrix[1] = 1
    for precision in PRECISIONS:
        panels = pack(matrix, precision)
        np.testing.assert_array_equal(unpack(panels), matrix)
        panels = type(panels)(panels.weights, panels.scales, padded(3), padded(5))
        assert unpack(panels).sum() == 5


def test_non_finite_weights_and_unknown_precisions_are_refused():
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

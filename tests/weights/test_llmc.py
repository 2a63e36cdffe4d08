"""llm.c's checkpoints: what the header says is checked before anything is made of it."""

import struct

import numpy as np
import pytest

from tests.weights.llmc_files import HEADER, write_checkpoint
from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.formats.llmc import count, parameters
from tiedgpt.weights.sources import open_checkpoint

SIZES = {"T": 6, "V": 5, "L": 2, "H": 2, "C": 4, "Vp": 8}


@pytest.mark.parametrize("version", [1, 3, 5])
def test_tensors_lie_where_the_format_puts_them(tmp_path, version):
    path = tmp_path / "model.bin"
    sizes = SIZES | ({"Vp": 5} if version == 1 else {})
    numbers = write_checkpoint(path, version, **sizes)
    checkpoint = open_checkpoint(path)
    assert checkpoint.container == "llm.c"
    assert checkpoint.config["vocab_size"] == 5 and checkpoint.config["num_heads"] == 2
    assert len(checkpoint.tensors) == 2 + 2 * 12 + 2
    for name, tensor in checkpoint.tensors.items():
        expected = numbers[name][:5] if name == "wte.weight" else numbers[name]
        assert tensor.shape == expected.shape
        found = tensor.rows(0, tensor.matrix_shape[0]).reshape(tensor.shape)
        assert np.array_equal(found, expected), name


def test_the_count_by_formula_is_that_of_the_tensors():
    sizes = (3, 8, 40, 5)
    assert count(*sizes) == sum(int(np.prod(shape)) for _, shape in parameters(*sizes))


def header(*numbers: int, body: int = 0) -> bytes:
    return struct.pack(HEADER, *numbers, *[0] * (256 - len(numbers))) + bytes(body)


MAGIC = 20240326
HOSTILE = {
    "nothing": b"",
    "only the magic": struct.pack("<i", MAGIC),
    "another magic": header(20240520, 3, 6, 5, 2, 2, 4, 8),
    "big-endian": struct.pack(">256i", MAGIC, 3, 6, 5, 2, 2, 4, 8, *[0] * 248),
    "a version of its past": header(MAGIC, 2, 6, 5, 2, 2, 4, 0),
    "bfloat16 of its past, also called 3": header(MAGIC, 3, 6, 5, 2, 2, 4, 0),
    "a version of its future": header(MAGIC, 9, 6, 5, 2, 2, 4, 8),
    "no layers": header(MAGIC, 3, 6, 5, 0, 2, 4, 8),
    "a negative width": header(MAGIC, 3, 6, 5, 2, 2, -4, 8),
    "less rows than tokens": header(MAGIC, 3, 6, 5, 2, 2, 4, 4),
    "sizes beyond every disk": header(MAGIC, 3, *[2**31 - 1] * 6),
    "layers beyond every memory": header(MAGIC, 5, 1, 1, 2**31 - 1, 1, 1, 1),
    "no body": header(MAGIC, 3, 6, 5, 2, 2, 4, 8),
    "a body too long": header(MAGIC, 3, 6, 5, 2, 2, 4, 8, body=10_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name, tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CorruptInputError, match=r"x\.bin"):
        open_checkpoint(path)

"""llm.c's checkpoints: the header is checked first, then they load as the GPT-2 that they are."""

import struct

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.tie.checkpoints import state_of, their_gpt2, write_llmc
from tiedgpt import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.load import load
from tiedgpt.weights.sources import open_checkpoint

SMALL = {"T": 6, "V": 5, "L": 2, "H": 2, "C": 4, "Vp": 8}


@pytest.mark.parametrize("version", [1, 3, 5])
def test_tensors_lie_at_the_formats_offsets(tmp_path, version):
    path = tmp_path / "model.bin"
    sizes = SMALL | ({"Vp": 5} if version == 1 else {})
    numbers = write_llmc(path, version, **sizes)
    checkpoint = open_checkpoint(path)
    assert checkpoint.container == "llm.c"
    assert checkpoint.config["vocab_size"] == 5 and checkpoint.config["num_heads"] == 2
    assert len(checkpoint.tensors) == 2 + 2 * 12 + 2
    for name, tensor in checkpoint.tensors.items():
        expected = numbers[name][:5] if name == "wte.weight" else numbers[name]
        assert tensor.shape == expected.shape
        rows = tensor.rows(0, tensor.matrix_shape[0]).reshape(tensor.shape)
        assert np.array_equal(rows, expected), name


def header(*numbers: int, body: int = 0) -> bytes:
    return struct.pack("<256i", *numbers, *[0] * (256 - len(numbers))) + bytes(body)


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


SIZES = {"T": 24, "V": 97, "L": 2, "H": 4, "C": 32, "Vp": 128}


@pytest.mark.parametrize("version", [1, 3])
def test_logits_match_transformers(tmp_path, version, ids):
    model = their_gpt2()
    sizes = SIZES | ({"Vp": 97} if version == 1 else {})
    write_llmc(tmp_path / "model.bin", version, state_of(model), **sizes)
    loaded = load(tmp_path / "model.bin")
    config = loaded.model.config
    assert loaded.layout == "llm.c, llm.c"
    assert config.vocab_size == 97 and config.n_head == 4 and config.tie_word_embeddings
    assert config.activation_function == "gelu_new"
    with torch.no_grad():
        assert_close(loaded.model(ids), model(ids).logits, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_read_bit_by_bit(tmp_path):
    numbers = write_llmc(tmp_path / "model.bin", 5, state_of(their_gpt2()), **SIZES)
    model = GPT.from_pretrained(tmp_path / "model.bin")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        expected = torch.from_numpy(numbers[name])[: len(parameter)]
        assert torch.equal(parameter.float(), expected), name


def test_arguments_and_heads_that_contradict_the_format_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    write_llmc(path, 3, **SIZES)
    for name, value in {"n_head": 2, "activation_function": "gelu", "bias": False}.items():
        with pytest.raises(UserError, match=f"{name}={value!r} contradicts"):
            GPT.from_pretrained(path, **{name: value})
    write_llmc(path, 3, **(SIZES | {"H": 5}))
    with pytest.raises(CorruptInputError, match="n_head=5"):
        GPT.from_pretrained(path)

"""GGUF and its tokenizer: read as llama.cpp's library reads them; hostile files are refused."""

import json
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tie.checkpoints import GGUF_SIZES, gguf_tensors, write_gguf
from tiedgpt import GPT, Tokenizer
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.checkpoint import QUANTIZED
from tiedgpt.weights.formats.gguf import to_ours, to_theirs
from tiedgpt.weights.formats.gguf.vocabulary import read_tokenizer
from tiedgpt.weights.gpt import shapes
from tiedgpt.weights.load import load
from tiedgpt.weights.sources import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf


@pytest.mark.parametrize("kind", QUANTIZED)
def test_every_quantized_type_is_decoded_like_the_gguf_package(tmp_path, kind):
    ggml = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[ggml]
    raw = np.random.default_rng(1).integers(0, 256, (20, 2 * size), np.uint8)
    path = tmp_path / "a.gguf"
    info = tensor(sizes=(2 * block, 20), kind=int(ggml))
    body = info + bytes(-(24 + len(info)) % 32) + raw.tobytes()
    path.write_bytes(header(n_tensors=1, body=body))
    ours = open_checkpoint(path).tensors["w"]
    assert (ours.shape, ours.dtype, ours.n_bytes) == ((20, 2 * block), kind, raw.nbytes)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, ggml)
    assert np.array_equal(ours.rows(0, 20), expected, equal_nan=True)
    assert np.array_equal(ours.rows(3, 5), expected[3:5], equal_nan=True)


def test_only_quantized_types_need_the_package(tiny, tmp_path, monkeypatch):
    floats = their_file(tmp_path / "f.gguf", tiny, "BF16")
    quantized = their_file(tmp_path / "q.gguf", tiny, "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert GPT.from_pretrained(floats).config.n_head == 4
    why = r"quantized GGUF tensors needs the package gguf .*'tiedgpt\[formats\]'"
    with pytest.raises(UserError, match=why):
        GPT.from_pretrained(quantized)


def header(n_tensors=0, n_pairs=0, body=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(name=b"w", sizes=(32, 4), kind=0, offset=0) -> bytes:
    body = text(name) + struct.pack("<I", len(sizes))
    return body + b"".join(struct.pack("<Q", n) for n in sizes) + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "nothing": b"",
    "only the magic": b"GGUF",
    "another magic": b"GGUX" + bytes(30),
    "the first version": header(version=1),
    "big-endian": header(version=3 << 24),
    "more tensors than bytes": header(n_tensors=2**62),
    "more pairs than bytes": header(n_pairs=2**62),
    "a huge key": header(n_pairs=1, body=text(b"k", 2**63) + bytes(40)),
    "a huge array": header(
        n_pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(40)
    ),
    "a huge array of texts": header(
        n_pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(40)
    ),
    "an unknown kind": header(n_pairs=1, body=text(b"k") + struct.pack("<I", 99) + bytes(40)),
    "arrays without end": header(
        n_pairs=1, body=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50
    ),
    "a key twice": header(n_pairs=2, body=(text(b"k") + struct.pack("<II", 4, 1)) * 2),
    "a claim that is a number": header(
        n_pairs=1, body=text(b"tiedgpt.tie_word_embeddings") + struct.pack("<II", 4, 1)
    ),
    "an alignment of nothing": header(
        n_pairs=1, body=text(b"general.alignment") + struct.pack("<II", 4, 0)
    ),
    "data cut off": header(n_tensors=1, body=tensor() + bytes(100)),
    "a product that overflows": header(n_tensors=1, body=tensor(sizes=(2**40, 2**40))),
    "an offset past the end": header(n_tensors=1, body=tensor(offset=2**50) + bytes(1000)),
    "too many dimensions": header(n_tensors=1, body=text(b"w") + struct.pack("<I", 2**31)),
    "a row that is no block": header(n_tensors=1, body=tensor(sizes=(31, 4), kind=8) + bytes(999)),
    "a tensor twice": header(n_tensors=2, body=tensor(sizes=(1,)) * 2 + bytes(1000)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CorruptInputError, match=r"x\.gguf"):
        open_checkpoint(path)


def test_an_unknown_type_is_listed_and_not_read(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(header(n_tensors=1, body=tensor(kind=77)))
    stored_tensor = open_checkpoint(path).tensors["w"]
    assert (stored_tensor.shape, stored_tensor.dtype, stored_tensor.is_decodable) == (
        (4, 32),
        "ggml type 77",
        False,
    )


def test_a_name_of_megabytes_is_refused_and_a_long_text_is_skipped(tmp_path):
    long = bytes(70_000)
    for name, body in {"key": text(long) + struct.pack("<II", 4, 1), "name": tensor(long)}.items():
        n_pairs = int(name == "key")
        path = tmp_path / name
        path.write_bytes(header(n_tensors=1 - n_pairs, n_pairs=n_pairs, body=body))
        with pytest.raises(CorruptInputError, match=f"{name} is damaged"):
            open_checkpoint(path)
    value = text(b"note") + struct.pack("<I", 8) + text(long)
    (tmp_path / "value").write_bytes(header(n_pairs=1, body=value))
    assert open_checkpoint(tmp_path / "value").config == {"note": ""}


# As a GPT


def their_file(path: Path, model: GPT, kind: str = "F32", *, leave=(), more=None, **values) -> Path:
    """Write a model as their converter does, with their library; `kind` holds for matrices."""
    tensors = gguf_tensors(dict(model.named_parameters())) | (more or {})
    tensors = {name: array for name, array in tensors.items() if name not in leave}
    sizes = GGUF_SIZES | {"block_count": model.config.n_layer}
    return write_gguf(path, tensors, kind=kind, **sizes | values)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
def test_a_file_of_llama_cpp_is_read_like_the_gguf_package(kind, tiny, ids, tmp_path):
    path = their_file(tmp_path / "a.gguf", tiny, kind)
    model = GPT.from_pretrained(path, dtype=torch.float32)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = model.get_parameter(to_ours(tensor.name)).detach().numpy()
        assert np.array_equal(ours, expected.reshape(ours.shape)), tensor.name
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert GPT.from_pretrained(path).wte.weight.dtype is dtype
    assert model.head is None and model.config.layer_norm_epsilon == 1e-5
    if kind == "F32":
        assert torch.equal(model(ids), tiny(ids))


def test_quantized_tensors_are_reported(tiny, tmp_path):
    assert any("Q8_0" in note for note in load(their_file(tmp_path / "a", tiny, "Q8_0")).notes)
    assert load(their_file(tmp_path / "b", tiny)).notes == ()


def test_other_architectures_are_refused_by_name(tiny, tmp_path):
    for name in ("llama", "gptneox", "starcoder"):
        with pytest.raises(UserError, match=name):
            GPT.from_pretrained(their_file(tmp_path / name, tiny, architecture=name))


def test_types_that_the_gguf_package_cannot_decode_are_refused(tiny, tmp_path):
    path = their_file(tmp_path / "a.gguf", tiny, "F16")
    content = path.read_bytes()
    info = text(b"token_embd.weight") + struct.pack("<IQQI", 2, 32, 97, 1)
    assert info in content
    path.write_bytes(content.replace(info, info[:-4] + struct.pack("<I", 9)))  # Q8_1
    with pytest.raises(UserError, match=r"token_embd\.weight is Q8_1, which is not read"):
        GPT.from_pretrained(path)


def test_other_attention_is_refused(tiny, tmp_path):
    for pairs, named in (
        ({"head_count_kv": 2}, "head_count_kv=2"),
        ({"key_length": 16}, "key_length=16"),
        ({"causal_attention": False}, "causal=False"),
    ):
        with pytest.raises(UserError, match=named):
            GPT.from_pretrained(their_file(tmp_path / named, tiny, **pairs))
    same = {"head_count_kv": 4, "key_length": 8, "causal_attention": True}
    assert GPT.from_pretrained(their_file(tmp_path / "same", tiny, **same))


def test_the_number_of_heads_is_required_and_never_guessed(tiny, ids, tmp_path):
    path = their_file(tmp_path / "a.gguf", tiny, head_count=None)
    with pytest.raises(UserError, match="n_head"):
        GPT.from_pretrained(path)
    assert torch.equal(GPT.from_pretrained(path, n_head=4)(ids), tiny(ids))


def test_a_parameter_under_two_names_is_refused(tiny, tmp_path):
    more = {"wte.weight": np.ones((97, 32), np.float32)}
    with pytest.raises(CorruptInputError, match="parameter twice, under two names"):
        GPT.from_pretrained(their_file(tmp_path / "c", tiny, more=more))


def test_names_convert_both_ways_and_match_the_gguf_package(tiny_config):
    names = gguf.TENSOR_NAMES
    of_gpt2 = {
        names[tensor].format(bid=bid)
        for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GPT2]
        for bid in range(tiny_config.n_layer)
    }
    peer = {name: to_theirs(name) for name in [*shapes(tiny_config), "head.weight"]}
    assert {name.rpartition(".")[0] for name in peer.values()} == of_gpt2
    assert all(to_ours(name) == ours for ours, name in peer.items())


TEXTS = [
    "the quick brown fox, the lazy dog. It's 1234 o'clock; über-ähnlich 🚀🚀 \n\n  tab\t. " * 20
]
SAMPLE = "The fox's 12 naïve dogs  \n\n jump 🚀\tüber <|endoftext|> it'll"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 320)


def their_vocabulary(path: Path, tokenizer: Tokenizer, **changes) -> Path:
    """Write the tokenizer with llama.cpp's library; a changed key of None is left out."""
    stored = json.loads(tokenizer.to_json())
    tokens = [""] * len(tokenizer)
    for token, id in stored["model"]["vocab"].items():
        tokens[id] = token
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for added in stored["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL
    values = {
        "architecture": "gpt2",
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": tokens,
        "token_types": types,
        "token_merges": [" ".join(merge) for merge in stored["model"]["merges"]],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    for name, change in changes.items():
        values[name] = change(values[name]) if callable(change) else change
    return write_gguf(path, {}, name=None, array=None, **values)


def test_ids_equal_those_of_the_written_tokenizer(tokenizer, tmp_path):
    read = read_tokenizer(their_vocabulary(tmp_path / "a.gguf", tokenizer))
    assert (len(read), read.bos_token_id, read.eos_token_id) == (
        len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id,
    )  # fmt: skip
    for allow in (False, True):
        ids = tokenizer.encode(SAMPLE, allow_special=allow)
        assert read.encode(SAMPLE, allow_special=allow) == ids
        assert read.decode(ids) == SAMPLE
    assert [read.token_bytes(id) for id in range(len(read))] == [
        tokenizer.token_bytes(id) for id in range(len(tokenizer))
    ]


def test_files_without_a_pretokenizer_name_use_gpt2s(tokenizer, tmp_path):
    read = read_tokenizer(their_vocabulary(tmp_path / "a", tokenizer, tokenizer_pre=None))
    assert read.encode(SAMPLE) == tokenizer.encode(SAMPLE)


def test_an_end_token_of_ordinary_type_is_special(tokenizer, tmp_path):
    read = read_tokenizer(their_vocabulary(tmp_path / "a", tokenizer, token_types=None))
    assert read.encode("<|endoftext|>", allow_special=True) == [tokenizer.eos_token_id]


def test_unused_rows_are_not_tokens_and_user_tokens_are_found_in_text(tokenizer, tmp_path):
    size = len(tokenizer)
    path = their_vocabulary(
        tmp_path / "a", tokenizer,
        token_list=lambda tokens: [*tokens, "[PAD1]", "<user>", "[PAD2]"],
        token_types=lambda types: [*types, 5, 4, 5],
    )  # fmt: skip
    read = read_tokenizer(path)
    assert len(read) == size + 2
    assert read.encode("a<user>b")[1] == size + 1
    with pytest.raises(UserError, match="outside the vocabulary"):
        read.decode([size])


REFUSED = {
    "holds no tokenizer": {"tokenizer_model": None},
    "model is 'no_vocab'": {"tokenizer_model": "no_vocab"},
    "model is 'llama'": {"tokenizer_model": "llama"},
    "split 'llama-bpe'": {"tokenizer_pre": "llama-bpe"},
    "split 'None'": {"tokenizer_pre": None, "architecture": "starcoder"},
    "lacks some of the 256 bytes": {"token_list": lambda t: [token + "x" for token in t]},
}


@pytest.mark.parametrize("why", REFUSED)
def test_other_tokenizers_are_refused_by_name(why, tokenizer, tmp_path):
    with pytest.raises(UserError, match=why):
        read_tokenizer(their_vocabulary(tmp_path / "a", tokenizer, **REFUSED[why]))


DAMAGED = {
    "tokens is missing": {"token_list": None},
    "merges is missing": {"token_merges": None},
    "no type of its own": {"token_types": lambda types: types[:-1]},
    "occurs twice": {"token_list": lambda tokens: [*tokens[:-1], tokens[0]]},
    "empty": {"token_list": lambda tokens: [*tokens[:-1], ""]},
    "'alone' is not of two tokens": {"token_merges": lambda merges: [*merges, "alone"]},
    "'z z' is not of two tokens": {"token_merges": lambda merges: [*merges, "z z"]},
    "eos_token_id=9999": {"eos_token_id": 9999},
}


@pytest.mark.parametrize("why", DAMAGED)
def test_damaged_vocabularies_are_refused(why, tokenizer, tmp_path):
    with pytest.raises(CorruptInputError, match=why):
        read_tokenizer(their_vocabulary(tmp_path / "a", tokenizer, **DAMAGED[why]))


def test_numbers_in_place_of_texts_are_refused(tokenizer, tmp_path):
    path = their_vocabulary(tmp_path / "a", tokenizer)
    key = b"tokenizer.ggml.token_type"
    content = path.read_bytes()
    at = content.index(key) + len(key)
    assert struct.unpack_from("<II", content, at) == (9, 5)
    length = struct.unpack_from("<Q", content, at + 8)[0]
    scalars = content[:at] + struct.pack("<Ii", 5, 1) + content[at + 16 + 4 * length :]
    path.write_bytes(scalars)
    with pytest.raises(CorruptInputError, match="token_type is missing or no array"):
        read_tokenizer(path)

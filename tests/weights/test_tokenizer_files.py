"""The tokenizer that comes with each kind of checkpoint is found by content; no pickle is run."""

import collections
import datetime
import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.text import Tokenizer
from tiedgpt.weights.convert import convert
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.nanogpt import MAX_META_BYTES, PICKLED_DICT, read_data_pickle
from tiedgpt.weights.load import load

TEXT = "to be, or not to be\n"


def meta_of(text: str, **changes: object) -> dict:
    """The content of meta.pkl as nanoGPT's data/shakespeare_char/prepare.py writes it."""
    stoi = {character: id for id, character in enumerate(sorted(set(text)))}
    itos = {id: character for character, id in stoi.items()}
    return {"vocab_size": len(stoi), "itos": itos, "stoi": stoi} | changes


def write_meta(folder: Path, meta: object, protocol: int = 4) -> Path:
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    return folder


@pytest.fixture
def weights(tmp_path) -> dict[str, Path]:
    """A file of weights of each kind, under names that say nothing."""
    tensors = {"w": np.zeros(3, dtype=np.float32)}
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "st")
    torch.save({"model": state}, tmp_path / "zip")
    torch.save({"model": state}, tmp_path / "old", _use_new_zipfile_serialization=False)
    (tmp_path / "llmc").write_bytes(struct.pack("<8i", 20240326, 3, 24, 97, 3, 4, 32, 128))
    (tmp_path / "model.onnx").write_bytes(b"\x08\x08")
    (tmp_path / "model.ckpt.index").write_bytes(b"\0")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return {file.name: file for file in tmp_path.iterdir()}


@pytest.mark.parametrize("protocol", range(6))
def test_nanogpts_characters_keep_their_ids(tmp_path, protocol):
    write_meta(tmp_path, meta_of(TEXT + "é👍"), protocol)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    stoi = meta_of(TEXT + "é👍")["stoi"]
    assert (tokenizer.kind, len(tokenizer)) == ("char", len(stoi))
    assert tokenizer.encode(TEXT) == [stoi[character] for character in TEXT]
    assert tokenizer.decode(tokenizer.encode(TEXT + "é👍")) == TEXT + "é👍"
    assert tokenizer.bos_token_id is tokenizer.eos_token_id is None
    with pytest.raises(UserError, match="is not in this character vocabulary"):
        tokenizer.encode("z")


def test_ids_in_any_order_are_kept_and_saved(tmp_path):
    stoi = {"b": 2, "a": 0, "\n": 1}
    meta = {"vocab_size": 3, "stoi": stoi, "itos": {id: c for c, id in stoi.items()}}
    tokenizer = Tokenizer.from_pretrained(write_meta(tmp_path, meta))
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, Tokenizer.from_pretrained(tmp_path / "saved")):
        assert each.encode("ab\nba") == [0, 2, 1, 2, 0]
        assert (len(each), each.eos_token_id) == (3, None)


def test_any_file_of_weights_stands_for_its_directory(weights, tmp_path):
    for file in weights.values():
        with pytest.raises(UserError, match="nor does its directory"):
            Tokenizer.from_pretrained(file)
    write_meta(tmp_path, meta_of(TEXT))
    for file in (*weights.values(), tmp_path / "meta.pkl"):
        assert Tokenizer.from_pretrained(file).kind == "char"
    Tokenizer.characters(["abc"]).save_pretrained(tmp_path)
    for file in weights.values():
        assert len(Tokenizer.from_pretrained(file)) == 4, "tokenizer.json comes first"


def test_meta_of_another_name_is_detected_by_content(tmp_path):
    write_meta(tmp_path, meta_of(TEXT)).joinpath("meta.pkl").rename(tmp_path / "characters")
    assert Tokenizer.from_pretrained(tmp_path / "characters").kind == "char"


@pytest.mark.parametrize(
    "meta",
    [
        {}, {"stoi": {}}, {"stoi": 3}, 7, {"stoi": {"a": 0, "b": 0}}, {"stoi": {"a": 0, "b": 2}},
        {"stoi": {"a": -1}}, {"stoi": {"a": 2**300}}, {"stoi": {"a": "0"}}, {"stoi": {"a": {}}},
        {"stoi": {0: 0}}, {"stoi": {"\ud800": 0}}, meta_of(TEXT, vocab_size=3),
        meta_of(TEXT, vocab_size="x"), meta_of(TEXT, itos={}), meta_of(TEXT, itos=5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [0, 4])
def test_impossible_vocabularies_are_refused(tmp_path, meta, protocol):
    with pytest.raises(CorruptInputError, match=r"meta\.pkl.* stoi") as error:
        Tokenizer.from_pretrained(write_meta(tmp_path, meta, protocol))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_vocabulary_of_words_is_refused_by_name(tmp_path):
    meta = {"stoi": {"to": 0, "be\n" * 50: 1}}
    with pytest.raises(UserError, match="gives an id to 'to', which is not one character"):
        Tokenizer.from_pretrained(write_meta(tmp_path, meta))


def test_trained_model_of_gpt2s_vocabulary_says_what_to_do(tmp_path):
    torch.save({"model": {}}, tmp_path / "ckpt.pt")
    for source in (tmp_path, tmp_path / "ckpt.pt"):
        with pytest.raises(UserError, match=r"from_pretrained\('gpt2'\)") as error:
            Tokenizer.from_pretrained(source)
        assert "meta.pkl" in str(error.value) and len(str(error.value)) < 600


def test_the_only_gguf_file_of_a_directory_supplies_the_tokenizer(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "saved")
    GPT(
        GPTConfig(vocab_size=len(tokenizer), n_positions=8, n_embd=8, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "saved")
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "model.gguf"
    convert(load(tmp_path / "saved"), path, "gguf", tokenizer=tokenizer)
    shutil.copy(path, path.with_suffix(""))
    for source in (path.parent, path, path.with_suffix("")):
        assert Tokenizer.from_pretrained(source).encode(TEXT) == tokenizer.encode(TEXT)
    shutil.copy(path, path.with_name("q8.gguf"))
    with pytest.raises(UserError, match=r"holds 2 tokenizers \(model\.gguf, q8\.gguf\): name one"):
        Tokenizer.from_pretrained(path.parent)


# A pickle of plain values is read, and no pickle is ever run.

characters = st.characters(exclude_categories=["Cs"])
vocabularies = st.dictionaries(characters, st.integers(-(2**70), 2**70), max_size=400)


def read(tmp_path, content: bytes):
    file = tmp_path / "meta.pkl"
    file.write_bytes(content)
    return read_data_pickle(OpenFile(file))


@pytest.mark.parametrize("protocol", range(6))
@given(stoi=vocabularies)
@settings(max_examples=15)
def test_any_vocabulary_comes_back(tmp_path_factory, protocol, stoi):
    meta = {"stoi": stoi, "itos": {id: character for character, id in stoi.items()}}
    content = pickle.dumps(meta, protocol)
    assert read(tmp_path_factory.getbasetemp(), content) == meta and PICKLED_DICT.match(content)


class Runs:
    """Pickled, it calls something when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class HasState:
    def __init__(self):
        self.state = 1


def payloads(canary: str) -> dict[str, bytes]:
    """Programs that would make the file `canary`, and values that are not plain."""
    make = f"open({canary!r}, 'w').close()"
    touch = f"touch {canary}"
    quoted, sound = canary.encode(), pickle.dumps(meta_of(TEXT))
    return {
        "os.system": pickle.dumps({"stoi": Runs(os.system, touch)}),
        "os.system as a key": pickle.dumps({Runs(os.system, touch): 1}),
        "exec": pickle.dumps({"stoi": Runs(exec, make)}, 2),
        "eval": pickle.dumps({"stoi": Runs(eval, make)}, 5),
        "open": pickle.dumps({"stoi": Runs(open, canary, "w")}, 0),
        "mkdir after the dict": sound[:-1] + b"cos\nmkdir\n(V" + quoted + b"\ntR.",
        "mkdir before the dict": b"cos\nmkdir\n(V" + quoted + b"\ntR0" + sound,
        "INST": b"(V" + quoted + b"\nios\nmkdir\n.",
        "OBJ": b"(cos\nmkdir\nV" + quoted + b"\no.",
        "STACK_GLOBAL": b"\x80\x04}\x8c\x02os\x8c\x05mkdir\x93\x8c"
        + bytes([len(quoted)])
        + quoted
        + b"\x85R.",
        "NEWOBJ": pickle.dumps({"stoi": HasState()}),
        "BUILD": pickle.dumps({"stoi": HasState()}, 1),
        "an extension's code": b"\x80\x02}\x82\x01.",
        "a persistent id": b"\x80\x02}X\x01\x00\x00\x00aQ.",
        "OrderedDict": pickle.dumps(collections.OrderedDict(a=1)),
        "a date": pickle.dumps({"a": datetime.date(2024, 1, 1)}),
        "a list": pickle.dumps({"a": [1]}),
        "a tuple": pickle.dumps({"a": (1, 2)}),
        "a set": pickle.dumps({"a": {1}}),
        "bytes": pickle.dumps({"a": b"x"}),
        "a number with a fraction": pickle.dumps({"a": 1.5}),
        "a bytearray": pickle.dumps({"a": bytearray(b"x")}, 5),
        "None": pickle.dumps({"a": None}),
    }


@pytest.mark.parametrize("name", payloads("x"))
def test_other_pickles_create_and_run_nothing(tmp_path, name):
    canary = tmp_path / "canary"
    with pytest.raises(CorruptInputError) as error:
        read(tmp_path, payloads(str(canary))[name])
    assert "never run" in str(error.value) and "\n" not in str(error.value)
    assert not canary.exists()


def test_the_payloads_of_this_test_run_in_pickle(tmp_path):
    for name, content in payloads(str(tmp_path / "x")).items():
        if name in ("os.system", "mkdir after the dict", "INST", "OBJ", "STACK_GLOBAL"):
            pickle.loads(content)
            assert (tmp_path / "x").exists(), name
            made = tmp_path / "x"
            made.rmdir() if made.is_dir() else made.unlink()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04}(X" + struct.pack("<I", 2**32 - 1) + b"ab.",
        b"\x80\x04}(\x8d" + struct.pack("<Q", 2**63) + b"ab.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"L" + b"9" * 100_000 + b"L\n.",
        b"}" * 100_000,
        b"(" * 4_000_000,
        b"(" * 100_000 + b"d" * 100_000 + b".",
        b"}" * 1000 + b"s." * 1000,
        b"}}s.",
        b"}00.",
        b"g5\n.",
        b"s.",
        b"u.",
        b"d.",
        b".",
        b"",
    ],
)
def test_false_lengths_and_empty_stacks_are_refused(tmp_path, content):
    with pytest.raises(CorruptInputError):
        read(tmp_path, content)


def test_a_file_far_too_large_or_a_directory_is_not_read(tmp_path):
    with (tmp_path / "meta.pkl").open("wb") as opened:
        opened.truncate(MAX_META_BYTES + 1)
    with pytest.raises(CorruptInputError, match="too many"):
        read_data_pickle(OpenFile(tmp_path / "meta.pkl"))
    with pytest.raises(UserError, match="cannot be read"):
        read_data_pickle(OpenFile(tmp_path))

"""A pickle of plain values is read, and no pickle is ever run."""

import collections
import datetime
import os
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.formats.nanogpt import MAX_META_BYTES, PICKLED_DICT, read_data_pickle

META = {
    "vocab_size": 4,
    "itos": {0: "\n", 1: "a", 2: "é", 3: "👍"},
    "stoi": {"\n": 0, "a": 1, "é": 2, "👍": 3},
}
CANARY = "canary"

characters = st.characters(exclude_categories=["Cs"])
vocabularies = st.dictionaries(characters, st.integers(-(2**70), 2**70), max_size=400)


def read(tmp_path, content: bytes):
    file = tmp_path / "meta.pkl"
    file.write_bytes(content)
    return read_data_pickle(file)


@pytest.mark.parametrize("protocol", range(6))
@given(stoi=vocabularies)
@settings(max_examples=15)
def test_any_vocabulary_comes_back(tmp_path_factory, protocol, stoi):
    meta = {"stoi": stoi, "itos": {id: character for character, id in stoi.items()}}
    folder = tmp_path_factory.getbasetemp()
    content = pickle.dumps(meta, protocol)
    assert read(folder, content) == meta and PICKLED_DICT.match(content)


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
    quoted = canary.encode()
    return {
        "os.system": pickle.dumps({"stoi": Runs(os.system, touch)}),
        "os.system as a key": pickle.dumps({Runs(os.system, touch): 1}),
        "exec": pickle.dumps({"stoi": Runs(exec, make)}, 2),
        "eval": pickle.dumps({"stoi": Runs(eval, make)}, 5),
        "open": pickle.dumps({"stoi": Runs(open, canary, "w")}, 0),
        "mkdir after the dict": pickle.dumps(META)[:-1] + b"cos\nmkdir\n(V" + quoted + b"\ntR.",
        "mkdir before the dict": b"cos\nmkdir\n(V" + quoted + b"\ntR0" + pickle.dumps(META),
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
    canary = tmp_path / CANARY
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


def test_a_file_far_too_large_is_not_read(tmp_path):
    file = tmp_path / "meta.pkl"
    with file.open("wb") as opened:
        opened.truncate(MAX_META_BYTES + 1)
    with pytest.raises(CorruptInputError, match="too many"):
        read_data_pickle(file)


def test_a_file_that_cannot_be_read_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_data_pickle(tmp_path)

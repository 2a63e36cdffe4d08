"""The tokenizer inside a GGUF file: every id as it stands there, or a refusal by name."""

import json
import struct
import warnings
from pathlib import Path

import pytest

from tiedgpt import Tokenizer
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.formats.gguf.vocabulary import read_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gguf

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
    writer = gguf.GGUFWriter(path, values.pop("architecture"))
    for name, value in values.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def test_ids_are_those_of_the_tokenizer_that_was_written(tokenizer, tmp_path):
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


def test_files_from_before_the_split_had_a_name_are_gpt2s(tokenizer, tmp_path):
    read = read_tokenizer(their_vocabulary(tmp_path / "a", tokenizer, tokenizer_pre=None))
    assert read.encode(SAMPLE) == tokenizer.encode(SAMPLE)


def test_an_end_that_is_typed_as_ordinary_is_special_all_the_same(tokenizer, tmp_path):
    read = read_tokenizer(their_vocabulary(tmp_path / "a", tokenizer, token_types=None))
    assert read.encode("<|endoftext|>", allow_special=True) == [tokenizer.eos_token_id]


def test_unused_rows_are_no_tokens_and_user_tokens_are_found_in_text(tokenizer, tmp_path):
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


def test_numbers_where_texts_should_be_are_refused(tokenizer, tmp_path):
    path = their_vocabulary(tmp_path / "a", tokenizer)
    key = b"tokenizer.ggml.token_type"
    whole = path.read_bytes()
    at = whole.index(key) + len(key)
    assert struct.unpack_from("<II", whole, at) == (9, 5)
    length = struct.unpack_from("<Q", whole, at + 8)[0]
    scalars = whole[:at] + struct.pack("<Ii", 5, 1) + whole[at + 16 + 4 * length :]
    path.write_bytes(scalars)
    with pytest.raises(CorruptInputError, match="token_type is missing or no array"):
        read_tokenizer(path)

"""llm.c's tokenizer files, built byte by byte as its `write_tokenizer` does."""

import struct

import pytest

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.formats.llmc import read_tokens

TOKENS = [b"a", b"\xff", b"ab", b"<|endoftext|>", b"x" * 255]


def written(tokens, version=2, end=3, n_tokens=None, magic=20240328) -> bytes:
    count = len(tokens) if n_tokens is None else n_tokens
    header = struct.pack("<4i", magic, version, count, end)
    return header.ljust(1024, b"\0") + b"".join(bytes([len(t)]) + t for t in tokens)


def read(tmp_path, content: bytes):
    file = tmp_path / "gpt2_tokenizer.bin"
    file.write_bytes(content)
    return read_tokens(file)


def test_tokens_and_the_end_of_text_come_back(tmp_path):
    assert read(tmp_path, written(TOKENS)) == (TOKENS, 3)


def test_version_1_means_gpt2s_end_of_text_and_says_nothing_of_others(tmp_path):
    assert read(tmp_path, written(TOKENS, version=1, end=0))[1] is None
    assert read(tmp_path, written(TOKENS, version=1, end=2))[1] == 2
    many = [struct.pack(">H", number) for number in range(50_257)]
    assert read(tmp_path, written(many, version=1, end=0))[1] == 50_256


@pytest.mark.parametrize(
    "content",
    [
        written(TOKENS, magic=20240326),
        written(TOKENS)[:1000],
        written(TOKENS, version=3),
        written(TOKENS, end=5),
        written(TOKENS, end=-1),
        written(TOKENS, n_tokens=0),
        written([], n_tokens=0),
        written(TOKENS, n_tokens=-5),
        written(TOKENS, n_tokens=2**31 - 1),
        written(TOKENS, n_tokens=6),
        written(TOKENS, n_tokens=4),
        written([b"a", b"", b"bcd"], end=0),
        written([b"a", b"b", b"a"], end=0),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, content):
    with pytest.raises(CorruptInputError, match=r"gpt2_tokenizer\.bin is damaged or no ") as error:
        read(tmp_path, content)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_tokens(tmp_path / "none")

"""Merges that a file left out are found again from the order of the tokens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiedgpt.errors import CorruptInputError
from tiedgpt.text import Tokenizer
from tiedgpt.text.bpe import BYTE_ALPHABET
from tiedgpt.text.merges import tokenizer_of_tokens

BYTES = [bytes([byte]) for byte in range(256)]


def written_merges(tokens):
    return json.loads(tokenizer_of_tokens(tokens, "here").to_str())["model"]["merges"]


def test_merges_of_a_trained_vocabulary_are_found_again(bpe, corpus):
    tokens = [bpe.token_bytes(id) for id in range(len(bpe))]
    assert written_merges(tokens) == json.loads(bpe._rust.to_str())["model"]["merges"]
    again = Tokenizer(tokenizer_of_tokens(tokens, "here"))
    assert again.encode(corpus) == bpe.encode(corpus)
    assert again.encode("a<|endoftext|>", allow_special=True)[-1] == again.eos_token_id == 999


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(st.sampled_from("aab c"), min_size=2)), size=st.integers(257, 280))
def test_merges_of_any_trained_vocabulary_are_found_again(texts, size):
    trained = Tokenizer.train(texts, size)
    tokens = [trained.token_bytes(id) for id in range(len(trained))]
    assert written_merges(tokens) == json.loads(trained._rust.to_str())["model"]["merges"]


def test_merges_of_gpt2_are_found_again(gpt2_folder):
    ids = json.loads((gpt2_folder / "encoder.json").read_text(encoding="utf-8"))
    byte_of = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}
    tokens = [bytes(byte_of[character] for character in token) for token in ids]
    assert list(ids.values()) == list(range(50_257))
    lines = (gpt2_folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    assert written_merges(tokens) == [line.split(" ") for line in lines]
    assert Tokenizer(tokenizer_of_tokens(tokens, "here")).eos_token_id == 50_256


@pytest.mark.parametrize("token", [b"abc", b"<\xff>", b"<a b>"])
def test_token_that_no_merge_makes_is_refused(token):
    with pytest.raises(CorruptInputError, match=r"here: token 256, .* is not made of two tokens"):
        tokenizer_of_tokens([*BYTES, token], "here")


def test_tokens_far_too_long_are_refused_before_they_are_merged():
    tokens = [b"a" * 255 + str(number).encode() for number in range(2000)]
    with pytest.raises(CorruptInputError, match="far longer"):
        tokenizer_of_tokens(tokens, "here")

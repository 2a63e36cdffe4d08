"""tiktoken encodes only if it gives the ids of `tokenizers`."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import models

from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer
from tiedgpt.text.bpe import BYTE_ALPHABET, LONG_TEXT, byte_level_tokenizer, tiktoken_twin

Merges = list[tuple[str, str]]


def vocabulary_of(merges: Merges, *more: str) -> dict[str, int]:
    tokens = [*BYTE_ALPHABET, *(left + right for left, right in merges), *more]
    return {token: id for id, token in enumerate(dict.fromkeys(tokens))}


def stored(merges: Merges, *more: str) -> dict[str, Any]:
    model = models.BPE(vocab=vocabulary_of(merges, *more), merges=merges)
    state: dict[str, Any] = json.loads(byte_level_tokenizer(model).to_str())
    return state


def naive_ids(state: dict[str, Any], text: str) -> list[int]:
    """Return tiktoken's ids without checking that tiktoken agrees with `tokenizers`."""
    ranks = {
        bytes(BYTE_ALPHABET.index(character) for character in token): id
        for token, id in state["model"]["vocab"].items()
    }
    encoding = tiktoken.Encoding(
        "naive", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )
    return encoding.encode_ordinary(text)


def setting(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


def ids_against_the_order_of_merges(state: dict[str, Any]) -> None:
    state["model"]["vocab"] |= {"ab": 257, "bc": 256}


def whole_piece_without_a_merge(state: dict[str, Any]) -> None:
    state["model"]["vocab"]["abc"] = 257
    state["model"]["ignore_merges"] = True


DIGITS = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
BYTES_ONLY = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
}  # fmt: skip
ANOTHER_REGEX = {"type": "Sequence", "pretokenizers": [DIGITS, BYTES_ONLY]}
FOUND_IN_TEXT = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
FOUND_IN_TEXT |= {"id": 257, "content": "ab"}
TWICE = [("b", "c"), ("a", "b"), ("ab", "c"), ("bc", "d"), ("a", "bc")]
DIFFERING = {
    "id order": ([("a", "b"), ("b", "c")], ids_against_the_order_of_merges, "abc"),
    "pair without a merge": ([("b", "c"), ("a", "b"), ("ab", "c")], None, "abc"),
    "token made twice": (TWICE, None, "abcd"),
    "ignore_merges": ([("a", "b")], whole_piece_without_a_merge, "abcx"),
    "dropout": ([("a", "b")], setting("model", "dropout", value=1.0), "ab"),
    "prefix space": ([("Ġ", "a")], setting("pre_tokenizer", "add_prefix_space", value=True), "a"),
    "no regex": ([("a", "Ġ")], setting("pre_tokenizer", value=BYTES_ONLY), "a b"),
    "another regex": ([("1", "2")], setting("pre_tokenizer", value=ANOTHER_REGEX), "12"),
    "lower case": ([("a", "b")], setting("normalizer", value={"type": "Lowercase"}), "AB"),
    "added token": (
        [("x", "a"), ("a", "b")],
        setting("added_tokens", value=[FOUND_IN_TEXT]),
        "xab",
    ),
}
"""Merges, a change of the stored tokenizer, and a text whose ids tiktoken would change."""


@pytest.mark.parametrize("name", DIFFERING)
def test_tokenizers_encodes_where_tiktoken_would_differ(tmp_path, name):
    merges, change, text = DIFFERING[name]
    state = stored(merges)
    if change is not None:
        change(state)
    rust = tokenizers.Tokenizer.from_str(json.dumps(state))
    assert naive_ids(state, text) != rust.encode(text).ids  # the case is a real one
    assert tiktoken_twin(rust) is None

    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    ours = Tokenizer.from_pretrained(tmp_path)
    for long_text in (text, (text + "\n") * LONG_TEXT):
        assert ours.encode(long_text) == rust.encode(long_text).ids
        assert ours.encode_array(long_text).tolist() == rust.encode(long_text).ids


@pytest.mark.parametrize("unknown", [None, "no such token", "?"])
def test_vocabulary_without_some_byte_has_no_twin(tmp_path, unknown):
    state = stored([("a", "b")])
    del state["model"]["vocab"]["q"]
    state["model"]["unk_token"] = unknown
    rust = tokenizers.Tokenizer.from_str(json.dumps(state))
    assert tiktoken_twin(rust) is None

    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.encode("ab" * LONG_TEXT) == rust.encode("ab" * LONG_TEXT).ids
    if unknown == "?":
        assert ours.encode("aqb") == rust.encode("a?b").ids
    else:  # `tokenizers` would leave the q out and say nothing
        with pytest.raises(UserError, match="character 'q' at position 1 "):
            ours.encode("aqb")


@pytest.mark.parametrize(
    "change",
    [
        setting("model", "dropout", value=1e-9),  # would differ once in a long while
        setting("model", "unk_token", value="a"),
        setting("model", "byte_fallback", value=True),
    ],
)
def test_a_vocabulary_without_proof_of_agreement_has_no_twin(change):
    state = stored([("x", "y")])
    change(state)
    assert tiktoken_twin(tokenizers.Tokenizer.from_str(json.dumps(state))) is None


def test_unreachable_token_is_never_given():
    state = stored([("a", "b")], "abc")  # in the vocabulary, but no merge makes it
    rust = tokenizers.Tokenizer.from_str(json.dumps(state))
    twin = tiktoken_twin(rust)
    assert naive_ids(state, "abcx") != rust.encode("abcx").ids
    assert twin is not None
    assert twin.encode_ordinary("abcx abc") == rust.encode("abcx abc").ids


pieces = st.text(st.sampled_from("ab"), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None)
@given(
    merges=st.lists(st.tuples(pieces, pieces), max_size=7, unique=True),
    order=st.randoms(use_true_random=False),
    shuffled=st.booleans(),
)
def test_twin_of_any_merges_agrees_on_every_short_text(merges, order, shuffled):
    made: set[str] = set("ab")
    usable = []
    for left, right in merges:
        if left in made and right in made:
            usable.append((left, right))
            made.add(left + right)
    vocabulary = vocabulary_of(usable)
    if shuffled:
        order.shuffle(usable)
    rust = byte_level_tokenizer(models.BPE(vocab=vocabulary, merges=usable))
    twin = tiktoken_twin(rust)
    if twin is None:
        return
    for length in range(1, 8):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            assert twin.encode_ordinary(text) == rust.encode(text).ids


def test_pieces_are_cut_alike_at_every_kind_of_character():
    # A letter, a digit and a sign each merge with the first byte of what follows in their piece.
    probes = "a1!"
    merges = [(probe, byte) for probe in probes for byte in BYTE_ALPHABET]
    rust = byte_level_tokenizer(models.BPE(vocab=vocabulary_of(merges), merges=merges))
    twin = tiktoken_twin(rust)
    assert twin is not None
    # Both lower planes but surrogates; above them, letters come in a few blocks: every 16th.
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 16)]
    text = "".join(f"{probe}{chr(point)}" for point in points for probe in probes)
    for start in range(0, len(text), 60_000):
        part = text[start : start + 60_000]
        assert twin.encode_ordinary(part) == rust.encode(part).ids

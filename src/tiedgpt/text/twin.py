"""A byte-level BPE of `tokenizers` -> the tiktoken encoding with the same ids, or None.

tiktoken merges the adjacent pair whose *concatenation* has the lowest id; `tokenizers` the adjacent
pair whose *merge* comes first in a list. The ids are the same if

1. the text is cut into the same pieces: exactly ByteLevel with GPT-2's regex, no prefix space, no
   normalizer, no added token that is found in ordinary text, and every byte has a token;
2. nothing but merges decides: no dropout, no whole-piece look-up (ignore_merges), no affixes;
3. the tokens that merges make have ids that strictly increase in the order of the merges, so that
   "lowest id" is "first merge", and no token is made by two merges;
4. every byte and every token made by a merge, alone as a piece, is encoded as itself.

Why 4 is enough. Let X and Y be adjacent, in a state that `tokenizers` reaches, and let XY = T be a
token. No merge has crossed the ends of T, and both choose by (rank, leftmost), so what happened
inside T is what happens when T is encoded alone, whose state is now [X, Y] too. That ends as [T],
and from [X, Y] only the merge (X, Y) leads there: it is in the list. So both see the same pairs, in
the same order, at every step. (tiktoken's look-up of a whole piece gives [T] as well.)
"""

import itertools
import json
from typing import Any

import tiktoken
import tokenizers

from tiedgpt.text.bpe import BYTE_ALPHABET

# GPT-2's regex as tiktoken writes it: possessive where that cannot change the match.
_GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_PLAIN_MODEL: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "ignore_merges": False,
    "byte_fallback": False,
    "unk_token": None,
}


def tiktoken_twin(rust: tokenizers.Tokenizer) -> tiktoken.Encoding | None:
    """The tiktoken encoding that gives the ids of `rust` on every text, or None if none is sure to.

    Takes about 0.2 s for GPT-2's 50,257 tokens.
    """
    stored = json.loads(rust.to_str())
    model = stored["model"]
    if not _cuts_like_gpt2(stored) or not _only_merges_decide(model):
        return None
    ids = _ids_of_bytes_and_merges(model)
    if ids is None or not all(_is_encoded_as_itself(rust, token, id) for token, id in ids.items()):
        return None
    byte_of = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}
    ranks = {bytes(byte_of[character] for character in token): id for token, id in ids.items()}
    return tiktoken.Encoding(
        "tiedgpt", pat_str=_GPT2_PIECES, mergeable_ranks=ranks, special_tokens={}
    )


def _cuts_like_gpt2(stored: dict[str, Any]) -> bool:
    cutter = stored["pre_tokenizer"] or {}
    return (
        cutter.get("type") == "ByteLevel"
        and cutter.get("use_regex") is True
        and cutter.get("add_prefix_space") is False
        and stored["normalizer"] is None
        and all(token["special"] for token in stored["added_tokens"])
    )


def _only_merges_decide(model: dict[str, Any]) -> bool:
    # An affix may be stored as "" and then does nothing.
    return all((model[key] or None) == (plain or None) for key, plain in _PLAIN_MODEL.items())


def _ids_of_bytes_and_merges(model: dict[str, Any]) -> dict[str, int] | None:
    """Every token that can come out, with its id; None if 1 or 3 above does not hold."""
    vocabulary: dict[str, int] = model["vocab"]
    if not all(character in vocabulary for character in BYTE_ALPHABET):
        return None
    made = [left + right for left, right in model["merges"]]
    made_ids = [vocabulary[token] for token in made]
    if any(later <= earlier for earlier, later in itertools.pairwise(made_ids)):
        return None
    ids = {token: vocabulary[token] for token in [*BYTE_ALPHABET, *made]}
    alphabet = set(BYTE_ALPHABET)
    if not all(alphabet.issuperset(token) for token in ids):
        return None
    return ids


def _is_encoded_as_itself(rust: tokenizers.Tokenizer, token: str, id: int) -> bool:
    pieces = rust.model.tokenize(token)
    return len(pieces) == 1 and pieces[0].id == id

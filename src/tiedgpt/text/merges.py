"""A byte-level vocabulary without its merges -> the merges, from the order of the tokens.

Files made for decoding alone (llm.c's) leave the merges out. They can be found again where ids were
given in the order of the merges, as in every vocabulary that GPT-2's way of training makes: the
merge that made a token is the pair that is left of its bytes when all earlier merges are done.
"""

import itertools
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import models

from tiedgpt.errors import CorruptInputError
from tiedgpt.text.bpe import BYTE_ALPHABET, byte_level_tokenizer
from tiedgpt.text.directory import SPECIAL

# Merging a token takes the square of its length. GPT-2's take 2.5 million in all, and 0.3 s; of
# what is no BPE, no more than seconds.
_WORK = 20_000_000
_NONE = 1 << 62  # the rank of a pair that is no token


def tokenizer_of_tokens(tokens: Sequence[bytes], where: str) -> tokenizers.Tokenizer:
    """The byte-level BPE of these tokens, which lie in the order of their merges, by their ids.

    All 256 bytes must be among them. A token that no merge makes is a special one if it looks like
    it, as `<|endoftext|>`; else it is a CorruptInputError, which names `where`.
    """
    merges, unmade = merges_in_order(tokens, where)
    vocabulary = {as_characters(token): id for id, token in enumerate(tokens)}
    specials = []
    for token in unmade:
        text = token.decode("utf-8", errors="replace")
        if not SPECIAL.fullmatch(text) or text not in vocabulary:
            raise CorruptInputError(
                f"{where}: token {tokens.index(token)}, {token!r}, is not made of two tokens "
                f"before it, as a BPE's are; get the file again from where it came from"
            )
        specials.append(text)
    written = [(as_characters(left), as_characters(right)) for left, right in merges]
    rust = byte_level_tokenizer(models.BPE(vocab=vocabulary, merges=written))
    rust.add_special_tokens(specials)
    return rust


def merges_in_order(
    tokens: Sequence[bytes], where: str
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """The merges that make the tokens, in their order; and the tokens that no merge makes.

    Raises CorruptInputError, which names `where`, for tokens that are far longer than a BPE's.
    """
    if sum(len(token) ** 2 for token in tokens) > _WORK:
        raise CorruptInputError(
            f"{where}: its tokens are far longer than those of a BPE; get the file again from "
            f"where it came from"
        )
    ranks: dict[bytes, int] = {}  # of the tokens that merging can have made by now
    merges, unmade = [], []
    for rank, token in enumerate(tokens):
        if len(token) > 1:
            pair = _parts(token, ranks)
            if len(pair) > 2:
                unmade.append(token)
                continue
            merges.append((pair[0], pair[1]))
        ranks[token] = rank
    return merges, unmade


def as_characters(token: bytes) -> str:
    """A token's bytes as files write them, in BYTE_ALPHABET."""
    return "".join(BYTE_ALPHABET[byte] for byte in token)


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What is left of a token's bytes when they are merged as far as `ranks` goes; at least two."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, _NONE) for left, right in itertools.pairwise(parts)]
        best = min(pairs)
        if best == _NONE:
            return parts
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts

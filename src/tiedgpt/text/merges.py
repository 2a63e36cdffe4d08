"""The merges of a byte-level vocabulary, recovered from the order of its tokens.

Files made only for decoding (llm.c's) leave the merges out. They can be recovered where ids were
given in the order of the merges, as GPT-2's training does: the merge that made a token is the pair
that remains of its bytes after all earlier merges.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import models

from tiedgpt.errors import CorruptInputError
from tiedgpt.text.bpe import BYTE_ALPHABET, byte_level_tokenizer
from tiedgpt.text.codec import SPECIAL

MAX_WORK = 20_000_000
"""The sum of the tokens' squared lengths, to which the time is proportional; GPT-2's is 2.5 million
and takes 0.3 s."""


def tokenizer_of_tokens(tokens: Sequence[bytes], where: str) -> tokenizers.Tokenizer:
    """The byte-level BPE with these tokens, of which the 256 bytes are some, in their order.

    A token that no merge makes must look like a special token, such as `<|endoftext|>`; if it does
    not, or the tokens are far longer than a BPE's, raises CorruptInputError with `where`.
    """
    if sum(len(token) ** 2 for token in tokens) > MAX_WORK:
        raise CorruptInputError(
            f"{where}: its tokens are far longer than those of a BPE",
            hint="download the file again",
        )
    merges: list[tuple[str, str]] = []
    specials: list[str] = []
    ranks: dict[bytes, int] = {}  # of the tokens made so far
    vocabulary = {_as_characters(token): id for id, token in enumerate(tokens)}
    for id, token in enumerate(tokens):
        parts = _merged(token, ranks)
        if len(parts) == 2:
            merges.append((_as_characters(parts[0]), _as_characters(parts[1])))
        if len(parts) <= 2:
            ranks[token] = id
            continue
        text = token.decode("utf-8", errors="replace")
        if not SPECIAL.fullmatch(text) or text not in vocabulary:
            raise CorruptInputError(
                f"{where}: token {id}, {token!r}, is not made of two tokens before it, as a BPE's "
                "are",
                hint="download the file again",
            )
        specials.append(text)
    rust = byte_level_tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    rust.add_special_tokens(specials)
    return rust


def _as_characters(token: bytes) -> str:
    return "".join(BYTE_ALPHABET[byte] for byte in token)


def _merged(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """A token's bytes, merged until two parts are left or no pair of parts is in `ranks`."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        pairs = [left + right for left, right in itertools.pairwise(parts)]
        best = min(pairs, key=lambda pair: ranks.get(pair, math.inf))
        if best not in ranks:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [best]
    return parts

"""The part of a tokenizer that depends on its kind of vocabulary."""

import re

import numpy as np
import tokenizers
from numpy.typing import NDArray

END_OF_TEXT = "<|endoftext|>"
SPECIAL = re.compile(r"<.*>|\[.*\]|madeupword\d+")
"""Special tokens, which no merge makes: <|endoftext|>, <s>, [PAD]; and fairseq's padding."""

Ids = list[int] | NDArray[np.uint32]
"""(N,) ids, as they come from the library that encodes."""


class Codec:
    """Base of `ByteLevelBPE`, `LowerCaseBPE` and `Characters`. No method knows special tokens."""

    kind: str

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        self._rust = rust

    @staticmethod
    def reads(rust: tokenizers.Tokenizer) -> bool:
        """Whether `rust` is of this kind."""
        raise NotImplementedError

    def encode(self, text: str, at: int = 0) -> Ids:
        """`text` -> (N,) ids; `at` is the position of `text` in the input, for errors."""
        raise NotImplementedError

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes of a token of the vocabulary."""
        return token.encode()

    def word_ends(self) -> set[int]:
        """Return the ids whose last byte is a space that is dropped at the end of a text."""
        return set()

"""llm.c's `gpt2_tokenizer.bin`: the bytes of every token, in the order of their ids.

256 int32 (the magic number, a version, the number of tokens and, from version 2 on, the id that
ends a text), then for each token a byte with its length and its bytes; little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError

MAGIC = struct.pack("<i", 20240328)
_HEADER = 1024  # bytes
_LARGEST = 1 << 20  # tokens
_GPT2_SIZE = 50_257  # version 1 was written of GPT-2's vocabulary alone, whose last id ends a text
_AGAIN = "get the file again from where it came from"


@dataclass(frozen=True)
class StoredTokens:
    """What such a file says."""

    tokens: list[bytes]
    """The bytes of each id."""
    end_of_text: int | None
    """The id that ends a text; None where the file does not say."""


def read_llmc_tokenizer(file: Path) -> StoredTokens:
    """Return the tokens of a file that begins with MAGIC.

    Raises CorruptInputError for a file that is cut short, has more than it says, or another
    version; UserError if it cannot be read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = opened.read(_HEADER)
            if len(header) < _HEADER or header[:4] != MAGIC:
                raise CorruptInputError(f"{file}: no header of llm.c's tokenizers; {_AGAIN}")
            _, version, n_tokens, named = struct.unpack_from("<4i", header)
            if version not in (1, 2):
                raise CorruptInputError(f"{file}: version {version} is neither 1 nor 2; {_AGAIN}")
            if not 0 < n_tokens <= _LARGEST or not 2 * n_tokens <= size - _HEADER <= 256 * n_tokens:
                raise CorruptInputError(
                    f"{file}: {n_tokens} tokens cannot lie in {size} bytes; {_AGAIN}"
                )
            content = opened.read(256 * n_tokens + 1)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check the file") from error
    tokens = _tokens(content, n_tokens, file)
    end_of_text: int | None = named
    if version == 1 and not named:
        end_of_text = n_tokens - 1 if n_tokens == _GPT2_SIZE else None
    if end_of_text is not None and not 0 <= end_of_text < n_tokens:
        raise CorruptInputError(
            f"{file}: id {end_of_text} is to end a text, and there are {n_tokens} tokens; {_AGAIN}"
        )
    return StoredTokens(tokens, end_of_text)


def _tokens(content: bytes, n_tokens: int, file: Path) -> list[bytes]:
    tokens, at = [], 0
    for id in range(n_tokens):
        end = at + 1 + content[at] if at < len(content) else at
        if end > len(content) or end <= at + 1:
            raise CorruptInputError(f"{file}: token {id} is empty or cut short; {_AGAIN}")
        tokens.append(content[at + 1 : end])
        at = end
    if at < len(content):
        raise CorruptInputError(f"{file}: goes on after its {n_tokens} tokens; {_AGAIN}")
    if len(set(tokens)) < n_tokens:
        raise CorruptInputError(f"{file}: two ids have the same token; {_AGAIN}")
    return tokens

"""A vocabulary in the form that llguidance takes.

llguidance asks its tokenizer for three things: `tokens`, the bytes of each id (an id without bytes
is never allowed); the id that ends a text; and the ids of a text, which it uses where only one text
can follow.
"""

from __future__ import annotations

import functools

import llguidance

from tiedgpt.errors import UserError
from tiedgpt.text import Tokenizer


@functools.lru_cache(maxsize=4)
def token_trie(tokenizer: Tokenizer, end: int, vocab_size: int) -> llguidance.LLTokenizer:
    """Return the trie over a model's V ids; ids without text are never allowed."""
    return llguidance.LLTokenizer(_Vocabulary(tokenizer, end, vocab_size))


class _Vocabulary(llguidance.TokenizerWrapper):
    def __init__(self, tokenizer: Tokenizer, end: int, vocab_size: int) -> None:
        lengths = tokenizer.byte_lengths()
        self.tokens = [
            tokenizer.token_bytes(id) if id < len(lengths) and lengths[id] else b""
            for id in range(vocab_size)
        ]
        self._ids = {token: id for id, token in enumerate(self.tokens) if token and id != end}
        self._longest = max(map(len, self._ids))
        self.tokens[end] = b"<end>"
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id, self.special_token_ids = end, None, [end]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text. It must not raise: an exception would end the program."""
        raw = text.encode()
        try:
            ids = self._tokenizer.encode(text)
        except UserError:
            ids = []
        if b"".join(self.tokens[id] for id in ids) == raw:
            return ids
        return self._greedy(raw)  # the tokenizer added a space, or does not know a character

    def _greedy(self, raw: bytes) -> list[int]:
        """Return the longest matching token at each position, until none matches."""
        ids, at = [], 0
        while at < len(raw):
            ends = range(min(len(raw), at + self._longest), at, -1)
            end = next((end for end in ends if raw[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[raw[at:end]])
            at = end
        return ids

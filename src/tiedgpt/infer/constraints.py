"""Constrained decoding: the text matches a regular expression, a JSON schema, or a grammar.

Before each choice, the logits of tokens that the constraint forbids become -inf; the end of text is
forbidden until the text is complete. llguidance (the extra `constrain`) computes the allowed tokens
from their bytes. The other logits do not change, as in Willard and Louf 2023, "Efficient Guided
Generation for Large Language Models" (arXiv 2307.09702).

A text that runs out of tokens or context is not complete: its `finish_reason` is not "stop".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.filters import Array
from tiedgpt.infer.prompts import common_prefix
from tiedgpt.text import Tokenizer

if TYPE_CHECKING:
    import llguidance

WHITESPACE = {"whitespace_pattern": " "}
"""JSON has at most one space between two parts, unless a schema's "x-guidance" says otherwise."""


def matcher_for(constraint: Mapping[str, Any], tokenizer: Tokenizer, config: GPTConfig) -> Matcher:
    """Return the compiled constraint for a vocabulary.

    `constraint` is one of these by its name: a `regex` in Rust's syntax (no look-around, no
    back-references; digits are 0 to 9); a `json_schema` as JSON text or a dictionary ({} is any
    JSON); a `grammar` in Lark's syntax, which begins with the rule `start`.

    Raises `UserError` if the extra `constrain` is not installed, the constraint is not valid, no
    text of this vocabulary meets it, or the vocabulary cannot be constrained exactly.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise UserError(
            "regex, json_schema and grammar need llguidance",
            hint="pip install 'tiedgpt[constrain]'",
        ) from None
    end = config.eos_token_id
    if tokenizer.kind not in ("bpe", "char"):
        raise UserError(
            f"the text of a token of kind {tokenizer.kind} depends on those beside it: regex, "
            "json_schema and grammar cannot be kept exactly with them",
            hint="use a model with a byte-level BPE or characters",
        )
    if end is None or end >= len(tokenizer):
        raise UserError(
            "regex, json_schema and grammar need a token that ends the text, and the model has "
            "none",
            hint="give its config an eos_token_id that its tokenizer has",
        )
    [(name, value)] = constraint.items()
    trie = _token_trie(tokenizer, end, config.vocab_size)
    try:
        start = LLMatcher(trie, _lark(name, value, tokenizer), log_level=0)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"must be valid text: {error}", option=name) from None
    if not start.is_error():
        start.compute_bitmask()
    if start.is_error():
        raise UserError(f"cannot be met: {_reason(start)}", option=name)
    return Matcher(start, name)


@functools.lru_cache(maxsize=4)
def _token_trie(tokenizer: Tokenizer, end: int, vocab_size: int) -> llguidance.LLTokenizer:
    """Return the trie over a model's V ids; ids without text are never allowed."""
    from llguidance import LLTokenizer

    return LLTokenizer(_Vocabulary(tokenizer, end, vocab_size))  # type: ignore[arg-type]


class _Vocabulary:
    """A vocabulary as llguidance takes it: the bytes of each id, the end, and the ids of a text.

    It uses the ids of a text where only one text can follow.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, end: int, vocab_size: int) -> None:
        lengths = tokenizer.byte_lengths()
        self.tokens = [
            tokenizer.token_bytes(id) if id < len(lengths) and lengths[id] else b""
            for id in range(vocab_size)
        ]
        self._ids = {token: id for id, token in enumerate(self.tokens) if token and id != end}
        self._longest = max(map(len, self._ids))
        self.tokens[end] = b"<end>"
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
        ids, at = [], 0  # the tokenizer added a space, or does not know a character
        while at < len(raw):
            ends = range(min(len(raw), at + self._longest), at, -1)
            end = next((end for end in ends if raw[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[raw[at:end]])  # the longest that matches
            at = end
        return ids


def _lark(name: str, value: Any, tokenizer: Tokenizer) -> str:
    """Write the constraint as llguidance reads it."""
    from llguidance import LLMatcher, regex_to_lark

    if name == "regex":
        pattern = f"/(?:{regex_to_lark(value, 'd')})/"
        if tokenizer.kind == "char":  # only what these characters can finish may be begun
            is_text = tokenizer.byte_lengths() > 0
            characters = [tokenizer.token_bytes(int(id)).decode() for id in is_text.nonzero()[0]]
            alphabet = "".join(rf"\x{{{ord(character):x}}}" for character in characters)
            pattern += f" & /[{alphabet}]*/"
        return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {pattern}")
    if name == "grammar":
        return LLMatcher.grammar_from_lark(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"is not JSON: {error}", option="json_schema") from None
    if not isinstance(value, Mapping):
        raise UserError(f"must be a JSON object, got {value!r}", option="json_schema")
    return LLMatcher.grammar_from_json_schema(
        dict(value),
        defaults=WHITESPACE,  # type: ignore[arg-type]
    )


class Matcher:
    """A `Processor` that forbids the tokens that break a constraint; see `matcher_for`.

    It serves any number of texts in turn: it goes back to the common prefix with the text before,
    and reads the rest, at about a microsecond a token.
    """

    def __init__(self, start: llguidance.LLMatcher, name: str) -> None:
        self._start, self._machine, self._name = start, start.deep_copy(), name
        self._text: list[int] = []  # the ids that the machine has read

    def copy(self) -> Matcher:
        """Return a matcher for the same constraint and another text."""
        return Matcher(self._start, self._name)

    def __call__(self, ids: Sequence[int], n_prompt: int, logits: Array) -> Array:
        """Return logits (V,) with -inf for each token that is not allowed.

        Raises `UserError` if none is: the vocabulary lacks a character that must follow.
        """
        self._go_to(ids[n_prompt:])
        packed = np.frombuffer(self._machine.compute_bitmask(), dtype=np.uint8)
        if self._machine.is_error():
            raise UserError(
                f"no token of the vocabulary continues the constraint ({self._failure()})",
                hint="allow other text, or use a vocabulary with the characters that it needs",
            )
        allowed = np.unpackbits(packed, bitorder="little")[: len(logits)]
        return np.where(allowed, logits, np.float32(-np.inf))

    def _failure(self) -> str:
        """Return why the machine failed, and replace it: a failure is permanent."""
        reason = _reason(self._machine)
        self._machine, self._text = self._start.deep_copy(), []
        return reason

    def _go_to(self, text: Sequence[int]) -> None:
        """Bring the machine to the state in which it has read exactly these ids."""
        same = common_prefix(self._text, text)
        self._machine.rollback(len(self._text) - same)
        taken = self._machine.try_consume_tokens(list(text[same:]))
        if self._machine.is_error():
            raise UserError(f"takes too much work: {self._failure()}", option=self._name)
        self._text = list(text[: same + taken])
        if len(self._text) < len(text):
            raise UserError(
                f"id {text[same + taken]} was drawn where the constraint forbids it: another "
                "processor allowed it again"
            )


def _reason(machine: llguidance.LLMatcher) -> str:
    """Return the machine's error as one sentence, without the parser's excerpt."""
    lines = machine.get_error().partition("<state>")[0].strip().splitlines()
    errors = [line.strip() for line in lines if line.strip().startswith("error: ")]
    return (errors or lines)[-1 if errors else 0].removeprefix("error: ")[:400]

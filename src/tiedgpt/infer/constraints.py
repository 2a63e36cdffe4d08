"""Text that must have a form: a regular expression, a JSON schema, or a grammar.

Before each token, those that cannot go on towards that form get the score -inf; the end of the text
is one of them until the form is complete. Which tokens can go on, llguidance says (the extra
`constrain`), from the bytes that each token stands for. The scores of what is allowed are left as
they were, as in Willard and Louf 2023, "Efficient Guided Generation for Large Language Models"
(arXiv 2307.09702).

A text that runs out of tokens or context has begun the form and not completed it: its
`finish_reason` is not "stop".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.filters import Array
from tiedgpt.text import Tokenizer

if TYPE_CHECKING:
    import llguidance

WHITESPACE = {"whitespace_pattern": " "}
"""In JSON, at most one blank between two parts; a schema's own "x-guidance" overrules it."""


def matcher_for(form: Mapping[str, Any], tokenizer: Tokenizer, config: GPTConfig) -> Matcher:
    """Compile a constraint for a vocabulary; return what keeps texts to it.

    `form` holds one of these by its name: a `regex` in Rust's syntax (no look-around, no
    back-references; digits are 0 to 9); a `json_schema` as JSON text or a dictionary ({} is any
    JSON); a `grammar` in Lark's syntax, which begins with the rule `start`.

    Raises UserError if the extra `constrain` is not installed, the constraint is no valid one,
    no text of this vocabulary meets it, or the vocabulary cannot be constrained exactly.
    """
    try:
        from llguidance import LLMatcher

        from tiedgpt.infer.token_trie import token_trie
    except ImportError:
        raise UserError(
            "regex, json_schema and grammar need llguidance",
            hint="pip install 'tiedgpt[constrain]'",
        ) from None
    end = config.eos_token_id
    if tokenizer.kind == "gpt1":
        raise UserError(
            "GPT-1's tokens do not say whether a blank follows: regex, json_schema and grammar "
            "cannot be kept exactly with them",
            hint="use a model with a byte-level BPE or characters",
        )
    if end is None or end >= len(tokenizer):
        raise UserError(
            "regex, json_schema and grammar need a token that ends the text, and the model has "
            "none",
            hint="give its config an eos_token_id that its tokenizer has",
        )
    [(name, value)] = form.items()
    trie = token_trie(tokenizer, end, config.vocab_size)
    try:
        start = LLMatcher(trie, _lark(name, value, tokenizer), log_level=0)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"is no text, or has what cannot be text: {error}", option=name) from None
    if not start.is_error():
        start.compute_bitmask()
    if start.is_error():
        raise UserError(f"cannot be met: {_reason(start)}", option=name, hint="correct it")
    return Matcher(start, name)


def _lark(name: str, value: Any, tokenizer: Tokenizer) -> str:
    """Write the constraint as llguidance reads it."""
    from llguidance import LLMatcher, regex_to_lark

    if name == "regex":
        pattern = f"/(?:{regex_to_lark(value, 'd')})/"
        if tokenizer.kind == "char":  # only what these characters can finish may be begun
            known = "".join(rf"\x{{{ord(letter):x}}}" for letter in _characters(tokenizer))
            pattern += f" & /[{known}]*/"
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
    """Rules out what a text's constraint forbids; a `Processor`. Made by `matcher_for`.

    It serves any number of texts in turn: it goes back to where a text parts from the one before,
    and reads on from there, at about a microsecond a token.
    """

    def __init__(self, start: llguidance.LLMatcher, name: str) -> None:
        self._start, self._machine, self._name = start, start.deep_copy(), name
        self._text: list[int] = []  # what the machine has read

    def fresh(self) -> Matcher:
        """Return another for the same constraint, for a text of its own."""
        return Matcher(self._start, self._name)

    def __call__(self, ids: Sequence[int], n_prompt: int, logits: Array) -> Array:
        """Return logits (V,) with -inf for each token that must not follow.

        Raises UserError where none may: the vocabulary lacks a character that has to follow.
        """
        self._go_to(ids[n_prompt:])
        packed = np.frombuffer(self._machine.compute_bitmask(), dtype=np.uint8)
        if self._machine.is_error():
            raise UserError(
                "no token of the vocabulary goes on towards what was asked for "
                f"({self._failure()})",
                hint="allow other text, or use a vocabulary with the characters that it needs",
            )
        allowed = np.unpackbits(packed, bitorder="little")[: len(logits)]
        return np.where(allowed, logits, np.float32(-np.inf))

    def _failure(self) -> str:
        """Return why the machine failed, and begin anew: it would stay like that."""
        reason = _reason(self._machine)
        self._machine, self._text = self._start.deep_copy(), []
        return reason

    def _go_to(self, text: Sequence[int]) -> None:
        """Let the machine have read exactly this."""
        pairs = enumerate(zip(self._text, text, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(self._text), len(text)))
        self._machine.rollback(len(self._text) - same)
        taken = self._machine.try_consume_tokens(list(text[same:]))
        if self._machine.is_error():
            raise UserError(f"takes too much work: {self._failure()}", option=self._name)
        self._text = list(text[: same + taken])
        if len(self._text) < len(text):
            raise UserError(
                f"id {text[same + taken]} came where what was asked for forbids it: another "
                "processor allowed it again; let the constraint be the last"
            )


def _reason(machine: llguidance.LLMatcher) -> str:
    """Return what is wrong in one sentence, without the parser's picture of the place."""
    lines = machine.get_error().partition("<state>")[0].strip().splitlines()
    errors = [line.strip() for line in lines if line.strip().startswith("error: ")]
    return (errors or lines)[-1 if errors else 0].removeprefix("error: ")[:400]


def _characters(tokenizer: Tokenizer) -> list[str]:
    """The characters of a vocabulary of characters."""
    is_text = tokenizer.byte_lengths() > 0
    return [tokenizer.token_bytes(id).decode() for id in range(len(tokenizer)) if is_text[id]]

r"""Log-probabilities in OpenAI's forms, with arrays of ids from which no entry is lost.

OpenAI's `top_logprobs` of completions is keyed by the tokens' texts. Part of a character is written
`bytes:\xe2\x80`; where two ids have the same text the second is written `token_id:N`. Beside
them are `token_ids`, `top_token_ids` and `top_token_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.infer import Completion, Token
from tiedgpt.infer.sequence import Likeliest
from tiedgpt.serve.streams import Choice
from tiedgpt.text import Tokenizer

LOWEST = -9999.0
"""OpenAI's value for a logprob of minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class Entry:
    """One token with its logprob; None for the first of a prompt, which nothing predicts."""

    id: int
    offset: int
    logprob: float | None
    top: Likeliest = ()  # type: ignore[assignment]


@dataclass(frozen=True)
class TokenNames:
    """How tokens are written: their text, or their ids where the model has no tokenizer."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def of(self, id: int) -> str:
        """Return the text of a token, its bytes, or its id."""
        data = self.bytes(id)
        if data is None or self.as_ids:
            return f"token_id:{id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, id: int) -> bytes | None:
        """Return the bytes of a token, or None."""
        try:
            return None if self.tokenizer is None else self.tokenizer.token_bytes(id)
        except UserError:
            return None

    def text(self, done: Completion) -> str:
        """Return a completion's text; without a tokenizer, its ids separated by spaces."""
        return done.text if self.tokenizer is not None else " ".join(map(str, done.ids))

    def piece(self, token: Token, *, is_first: bool) -> str:
        """Return the text that a token adds to the completion."""
        if self.tokenizer is not None:
            return token.text
        return f"{token.id}" if is_first else f" {token.id}"

    def offsets(self, ids: Sequence[int], n_added: int = 0) -> list[int]:
        """Return where each token's text begins, in characters, after `n_added` without text."""
        decoder = None if self.tokenizer is None else self.tokenizer.stream(None)
        offsets, start = [0] * n_added, 0
        for id in ids[n_added:]:
            offsets.append(start)
            start += len(decoder.push(id)) if decoder is not None else 0
        return offsets


def completion_logprobs(entries: Sequence[Entry], names: TokenNames, n_top: int) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/completions."""
    tops = [_with_own(entry) if n_top else [] for entry in entries]
    return {
        "tokens": [names.of(entry.id) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_by_text(top, names) if top else None for top in tops] if n_top else None,
        "text_offset": [entry.offset for entry in entries],
        "token_ids": [entry.id for entry in entries],
        "top_token_ids": [[id for id, _ in top] for top in tops],
        "top_token_logprobs": [[_finite(logprob) for _, logprob in top] for top in tops],
    }


def chat_logprobs(entries: Sequence[Entry], names: TokenNames) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/chat/completions."""

    def token(id: int, logprob: float | None) -> dict[str, Any]:
        data = names.bytes(id)
        return {
            "token": names.of(id),
            "logprob": _finite(logprob),
            "bytes": None if data is None else list(data),
            "token_id": id,
        }

    return {
        "content": [
            token(entry.id, entry.logprob)
            | {"top_logprobs": [token(id, logprob) for id, logprob in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_entries(choice: Choice, scored: Completion | Token, names: TokenNames) -> list[Entry]:
    """Return the prompt's tokens.

    The first has no logprob, as nothing predicts it, nor have those that a timeout left unread.
    """
    ids, offsets = choice.prompt_ids, names.offsets(choice.prompt_ids, choice.n_added)
    n_unread = len(ids) - 1 - len(scored.prompt_logprobs)
    logprobs = [None, *scored.prompt_logprobs, *[None] * n_unread]
    tops = [[], *(scored.prompt_top_logprobs or [[]] * (len(ids) - 1 - n_unread)), *[[]] * n_unread]
    return [Entry(*row) for row in zip(ids, offsets, logprobs, tops, strict=True)]


def token_entry(choice: Choice, token: Token) -> Entry:
    """Return the entry of a new token."""
    return Entry(token.id, len(choice.echo) + token.offset, token.logprob, token.top_logprobs)


def _with_own(entry: Entry) -> Likeliest:
    """Return the likeliest, and the token itself, whose logprob is the very same number."""
    if entry.logprob is None:
        return []
    pair = (entry.id, entry.logprob)
    top = [pair if id == entry.id else (id, logprob) for id, logprob in entry.top]
    return top if pair in top else [*top, pair]


def _by_text(top: Likeliest, names: TokenNames) -> dict[str, float]:
    logprobs: dict[str, float] = {}
    for id, logprob in top:
        name = names.of(id)
        logprobs[f"token_id:{id}" if name in logprobs else name] = max(logprob, LOWEST)
    return logprobs


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)

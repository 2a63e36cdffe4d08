r"""Log-probabilities in OpenAI's forms, with arrays of ids from which no entry is lost.

OpenAI's `top_logprobs` of completions is keyed by the tokens' texts. Part of a character is written
`bytes:\xe2\x80`; where two ids have the same text the second is written `token_id:N`. Beside
them are `token_ids`, `top_token_ids` and `top_token_logprobs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.infer import Completion, Token
from tiedgpt.infer.sequence import Likeliest
from tiedgpt.serve.texts import Wanted
from tiedgpt.text import Tokenizer

LEAST = -9999.0
"""What OpenAI's API writes for a logprob of minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class Entry:
    """One token with its logprob; None for the first of a prompt, which nothing predicts."""

    id: int
    offset: int
    logprob: float | None
    top: Likeliest = ()  # type: ignore[assignment]
    recorded: list[float] | None = None


@dataclass(frozen=True)
class Names:
    """What tokens are called."""

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
        """Return the bytes of a token; None where there are none."""
        try:
            return None if self.tokenizer is None else self.tokenizer.token_bytes(id)
        except UserError:
            return None

    def offsets(self, ids: Iterable[int], *, start: int = 0, after: int | None = None) -> list[int]:
        """Return where each token's text begins, in characters, if the first begins at `start`."""
        found, decoder = [], None if self.tokenizer is None else self.tokenizer.stream(after)
        for id in ids:
            found.append(start)
            start += len(decoder.push(id)) if decoder is not None else 0
        return found


def for_completion(entries: Sequence[Entry], names: Names, n_top: int) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/completions."""
    tops = [_with_own(entry) if n_top else [] for entry in entries]
    found: dict[str, Any] = {
        "tokens": [names.of(entry.id) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_keyed(top, names) if top else None for top in tops] if n_top else None,
        "text_offset": [entry.offset for entry in entries],
        "token_ids": [entry.id for entry in entries],
        "top_token_ids": [[id for id, _ in top] for top in tops],
        "top_token_logprobs": [[_finite(logprob) for _, logprob in top] for top in tops],
    }
    if any(entry.recorded is not None for entry in entries):
        rows = [entry.recorded and [max(x, LEAST) for x in entry.recorded] for entry in entries]
        found["logprob_token_ids"] = rows
    return found


def for_chat(entries: Sequence[Entry], names: Names) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/chat/completions."""

    def described(id: int, logprob: float | None) -> dict[str, Any]:
        data = names.bytes(id)
        return {
            "token": names.of(id),
            "logprob": _finite(logprob),
            "bytes": None if data is None else list(data),
            "token_id": id,
        }

    return {
        "content": [
            described(entry.id, entry.logprob)
            | {"top_logprobs": [described(id, logprob) for id, logprob in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_entries(text: Wanted, scored: Completion | Token, names: Names) -> list[Entry]:
    """Return the prompt's tokens; the first has no logprob, as nothing predicts it."""
    tops = scored.prompt_top_logprobs or [[]] * len(scored.prompt_logprobs)
    offsets = names.offsets(text.ids)
    rows = zip(text.ids[1:], offsets[1:], scored.prompt_logprobs, tops, strict=True)
    return [Entry(text.ids[0], 0, None), *(Entry(*row) for row in rows)]


def new_entries(text: Wanted, names: Names, start: int = 0) -> list[Entry]:
    """Return the new tokens, of which the last may have ended the text and be none of it."""
    done = text.result
    offsets = names.offsets(done.ids, start=start, after=text.ids[-1])
    offsets = [min(offset, start + len(done.text)) for offset in offsets]
    tops = done.top_logprobs or [[]] * len(done.ids)
    recorded = text.recorder.rows if text.recorder is not None else [None] * len(done.ids)
    rows = zip(done.ids, offsets, done.logprobs, tops, recorded, strict=False)
    return [Entry(*row) for row in rows]


def _with_own(entry: Entry) -> Likeliest:
    """Return the likeliest, and the token itself, whose logprob is the very same number."""
    if entry.logprob is None:
        return []
    own = (entry.id, entry.logprob)
    top = [own if id == entry.id else (id, logprob) for id, logprob in entry.top]
    return top if own in top else [*top, own]


def _keyed(top: Likeliest, names: Names) -> dict[str, float]:
    found: dict[str, float] = {}
    for id, logprob in top:
        name = names.of(id)
        found[f"token_id:{id}" if name in found else name] = max(logprob, LEAST)
    return found


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)

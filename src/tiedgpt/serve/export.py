"""The page as one file, with the answers for one text inside.

A file holds at most `MAX_BYTES` of answers: first those of the first views, last those for other
positions. A view whose answer is missing says so.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import UserError
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.serve.assets import in_one_file
from tiedgpt.serve.page_data import Source, describe_model, inspect_model, token_texts

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.text import Tokenizer

MAX_BYTES = 24_000_000
Body = dict[str, Any]


def export(
    model: GPT,
    tokenizer: Tokenizer | None,
    text: str | list[int],
    *,
    name: str,
    source: Source | None = None,
) -> str:
    """Return the page as HTML that needs no server, with the answers for a text or its ids.

    `name` is the model's, `source` where it lies. Raises `UserError` as `inspect.positions`.
    """
    subject: Body = {"text": text} if isinstance(text, str) else {"ids": text}
    found = inspect_model(INSPECTIONS["positions"], model, tokenizer, None, {"text": text})
    ids = json.loads(found)["ids"]
    answers = {
        "state": json.dumps(subject | {"pin": len(ids) - 1}),
        "/inspect/model null": describe_model(name, model, tokenizer, source),
        "/inspect/pieces null": token_texts(tokenizer, model.config.vocab_size),
    }
    left = MAX_BYTES
    for function, body in _requests(subject, ids, model.config.n_layer):
        options = dict(body)
        if given := options.pop("ids", None) or options.get("text"):
            options["text"] = given
        with contextlib.suppress(UserError):  # a single token has no loss, an odd head no rows
            answer = inspect_model(INSPECTIONS[function], model, tokenizer, source, options)
            left -= len(answer.encode())
            if left < 0:
                break
            answers[f"/inspect/{function} {_json(body)}"] = answer
    return in_one_file(answers)


def _requests(subject: Body, ids: list[int], n_layer: int) -> Iterator[tuple[str, Body]]:
    """Yield the requests of the views: an inspection, and its body with the keys in their order."""
    most = INSPECTIONS["lens"].max_tokens or len(ids)
    short = subject if len(ids) <= most else {"ids": ids[:most]}
    last = len(ids) - 1
    yield "positions", subject | {"top": 10}
    yield "dot", subject | {"position": last, "top": 10}
    yield "random_head", subject
    yield "gradient_split", subject
    yield "vocabulary", {}
    yield "lens", short | {"top": 5, "position": min(last, most - 1)}
    for layer in range(n_layer):
        yield "attention", short | {"layer": layer}
    yield "ablate", short
    yield "positions", subject | {"top": 1, "poke": last, "poke_with": None}
    for id in dict.fromkeys(ids):
        yield "neighbours", {"token": id, "top": 10}
    for position in reversed(range(last)):
        if position < most - 1:
            yield "lens", short | {"top": 5, "position": position}
        yield "dot", subject | {"position": position, "top": 10}


def _json(body: Body) -> str:
    """Return a body as JavaScript writes it."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))

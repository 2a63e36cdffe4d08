"""A model as one HTML file: page, tokenizer and weights, which compute in the browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import UserError
from tiedgpt.files import format_bytes
from tiedgpt.inspect.predictions import positions
from tiedgpt.inspect.rows import vocabulary
from tiedgpt.inspect.run_files import shards_in
from tiedgpt.serve.assets import in_one_file
from tiedgpt.serve.page_data import describe_model, directory_name
from tiedgpt.serve.page_model import (
    WIDTHS,
    choose_precision,
    pack_model,
    page_ledger,
    page_tensors,
    round_weights,
)
from tiedgpt.tie import ledger
from tiedgpt.weights.source import Source

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.data.templates import Template
    from tiedgpt.text import Tokenizer

MAX_BYTES = 50_000_000
"""Default maximum size of a file: browsers open larger ones slowly."""
BASE64 = 4 / 3
"""Characters for a byte."""
SENT = ("matrices", "parameters", "tied")
"""Fields of a model's description that the page computes with."""


def export(
    model: GPT,
    tokenizer: Tokenizer | None,
    text: str | list[int],
    *,
    name: str,
    source: Source | None = None,
    template: Template | None = None,
    precision: str = "auto",
    max_bytes: int = MAX_BYTES,
) -> str:
    """Return the page as HTML that computes with the model, and opens with a text or its ids.

    `name` is the model's, `source` where it lies. `precision` is of the matrices: "fp32", "fp16",
    "int8" (by rows), or "auto" (int8 above 500,000 parameters); the page shows what the model
    computes with these. Raises `UserError` for a file above `max_bytes`, a model that is not a
    plain GPT or a tokenizer that the page does not have, and as `inspect.positions` for the text.
    """
    precision = choose_precision(model, precision)
    size = int(model.config.parameter_count() * WIDTHS[precision] * BASE64)
    if size > max_bytes:
        raise UserError(
            f"the page would have about {format_bytes(size)}, more than {format_bytes(max_bytes)}",
            hint="tiedgpt serve shows the same page from a server, and tiedgpt convert --to gguf "
            "writes a file for llama.cpp; --max-size allows a larger page",
        )
    tensors = page_tensors(model, precision)
    rounded = round_weights(model, tensors)
    description = describe_model(
        name,
        model,
        tokenizer,
        source,
        template=template,
        counted=page_ledger(ledger(model), tensors),
    )
    info = json.loads(description) | {"precision": precision}
    weights = pack_model(
        tensors,
        model,
        tokenizer,
        template,
        info={key: info[key] for key in SENT},
        counts=_counts(rounded, tokenizer, source),
    )
    inputs = {"text": text} if isinstance(text, str) else {"ids": text}
    answers = {"state": json.dumps(inputs), "/inspect/model null": json.dumps(info)}

    options = inputs | {"top": 10}
    key = json.dumps(options, ensure_ascii=False, separators=(",", ":"))
    # the first view, before the weights are decoded
    answers[f"/inspect/positions {key}"] = positions(rounded, tokenizer, text, top=10).to_json()
    return in_one_file(answers, weights)


def _counts(model: GPT, tokenizer: Tokenizer | None, source: Source | None) -> dict[str, Any]:
    """Return what `vocabulary` tells of a run's counts, which the page has no text to count in."""
    nothing: dict[str, Any] = {"spearman": {}, "interval": {}, "slope": {}}
    nothing |= {"ln_count": None, "r2_heldout": None}
    if source is None or not shards_in(source.given_path):
        return {"count": None, "counted_in": None, "matrices": [nothing, nothing]}
    rows = vocabulary(model, tokenizer, counts=str(source.given_path), own_rank_rows=0)
    found = json.loads(rows.to_json())
    matrices = [{name: matrix[name] for name in nothing} for matrix in found["matrices"]]
    for matrix in matrices:
        if matrix["ln_count"] is not None:
            matrix["ln_count"] = [round(value, 4) for value in matrix["ln_count"]]
    return {"count": found["count"], "counted_in": directory_name(source), "matrices": matrices}

"""The data of the page as JSON: inspections, the model with its file and run, its tokens."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiedgpt
from tiedgpt.data import Shards
from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.files import format_bytes
from tiedgpt.inspect.registry import INSPECTIONS, Inspection
from tiedgpt.inspect.run_files import stored_opening
from tiedgpt.plots.panel import smoothed
from tiedgpt.runtime import to_json_data
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.metrics import read_history
from tiedgpt.weights.source import Source

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.data.templates import Template
    from tiedgpt.text import Tokenizer
    from tiedgpt.tie.ledgers import Ledger

MAX_POINTS = 1000
"""Points of a curve, evenly spaced; the last is always there."""


def inspect_model(
    inspection: Inspection,
    model: GPT,
    tokenizer: Tokenizer | None,
    source: Source | None,
    options: dict[str, Any],
) -> str:
    """Return the JSON of an inspection; a run as the source has defaults of its options.

    The result has the name of the run without its path.
    """
    defaults = {} if source is None else inspection.defaults_of(source, tokenizer)
    result: Any = inspection.function(model, tokenizer, **(defaults | options))
    if source is not None and "counts" in defaults:
        result = replace(result, counted_in=directory_name(source))
    return str(result.to_json())


def directory_name(source: Source) -> str:
    """Return the name of the directory or file at a path, which may be no UTF-8."""
    return os.fsencode(source.given_path.resolve().name).decode(errors="replace")


def describe_model(
    name: str,
    model: GPT,
    tokenizer: Tokenizer | None,
    source: Source | None,
    *,
    path: Source | None = None,
    template: Template | None = None,
    beside: str | None = None,
    counted: Ledger | None = None,
) -> str:
    """Return the config, the ledger, each matrix in memory and on disk, and the run's curves.

    The file and the run are null without `source`, the path of the model. `path` is the source
    for clients on this machine: others do not see the path, nor held-out text except the opening
    that training stored. `beside` is the name of the second model. `counted` replaces the ledger.
    """
    from tiedgpt.inspect.vocab_matrices import vocab_matrices
    from tiedgpt.tie import ledger
    from tiedgpt.tie.heads import is_tied

    config, counted = model.config, counted or ledger(model)
    opening: str | list[int] | None = None if source is None else stored_opening(source, tokenizer)
    if opening is None and path is not None:
        opening = opening_text(path, tokenizer)
    limits = {each.name: each.max_tokens for each in INSPECTIONS.values()}
    most = {name: min(n, config.n_positions) for name, n in limits.items() if n is not None}
    description = {
        "name": name,
        "source": None if path is None else str(path),
        "version": tiedgpt.__version__,
        "config": asdict(config),
        "vocab_size": config.vocab_size,
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "parameters": counted.total,
        "tied": is_tied(model),
        "matrices": [
            {"name": matrix.name, "does": matrix.does} for matrix in vocab_matrices(model)
        ],
        "ledger": counted.as_dict(),
        "stored": None if source is None else _stored_matrices(source),
        "run": None if source is None else _run_curves(source.given_path),
        "tokenizer": tokenizer is not None,
        "opening": opening,
        "chat": None if template is None else _describe_chat(template, source, tokenizer),
        "beside": beside,
        "most_tokens": most,
    }
    return json.dumps(to_json_data(description), allow_nan=False)  # ASCII: a path may be no UTF-8


def _describe_chat(
    template: Template, source: Source | None, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the facts about a chat template that the page's conversation shows."""
    return {
        "single": template.max_turns == 1,
        "system": template.default_system,
        "question": None if source is None else stored_opening(source, tokenizer, "question"),
    }


def opening_text(
    source: str | os.PathLike[str], tokenizer: Tokenizer | None
) -> str | list[int] | None:
    """Return held-out text of a run that breaks off inside a sentence; None without a run.

    It is the text that training stored, or else the first sentence of the held-out tokens; without
    a tokenizer it is their ids.
    """
    source = Source.of(source)
    if (stored := stored_opening(source, tokenizer)) is not None:
        return stored
    try:
        shards = Shards.in_directory(source.given_path / "data", "val")
        ids = shards.read(0, min(4000, len(shards))).tolist()
    except (TiedGPTError, OSError):
        return None
    if tokenizer is None:
        return ids[:12] or None
    text = tokenizer.decode(ids).replace("<|endoftext|>", "\n")
    for start in (r"[.!?]\s+([A-Z]", r"(?:[.!?]\s+|\n)(\w", r"(\S"):
        if found := re.search(start + r"[^\n*]{30,80}\w) \w", text):
            return found[1]
    return None


def _stored_matrices(source: Source) -> dict[str, Any] | None:
    """Return the audit of the file, with the file's name for each matrix."""
    from tiedgpt.tie.audits import examine

    try:
        audit = examine(source, source.decide())
    except TiedGPTError:  # the model loaded, so this is a format whose matrices have no names
        return None
    matrices = []
    for matrix in audit.as_dict()["matrices"]:
        path = str(source.checkpoint.tensors[matrix["names"][0]].storage.place)
        file = path if Path(path).is_file() else audit.source
        matrices.append(matrix | {"file": Path(file).name})
    return {"format": audit.format, "verdict": audit.verdict, "matrices": matrices}


def _run_curves(run: Path) -> dict[str, Any] | None:
    """Return the data and the curves of a run, or None for another directory."""
    with contextlib.suppress(UserError):
        history, curves = read_history(run), dict[str, Any]()
        for key in history.columns:
            xs, ys = history.series(key, "tokens")
            ys = smoothed(ys) if key == "loss" or key.startswith("grad_norm") else ys
            step = -(-len(xs) // MAX_POINTS) or 1
            curves[key] = {"x": xs[::-step][::-1], "y": ys[::-step][::-1]}
        facts = {"unit": history.unit, "finished": history.finished, "data": _describe_data(run)}
        return facts | {"curves": curves}
    return None


def _describe_data(run: Path) -> str | None:
    """Return the names and the size of a run's training data, without paths."""
    tables = RunDirectory(run).read_record()
    if not tables:
        return None
    sources = tables["options"].get("data", ())
    names = [name if name.startswith("hf:") else Path(name).name for name in sources]
    data = ", ".join(names) or "the documentation of Python"
    n_bytes = tables.get("train_text", {}).get("utf8_bytes")
    return f"{data}: {format_bytes(n_bytes)} of text" if n_bytes else data


def token_texts(tokenizer: Tokenizer | None, size: int) -> str:
    """Return the text of every token, as `inspect` writes it."""
    from tiedgpt.inspect.inputs import piece

    return json.dumps({"pieces": [piece(tokenizer, id) for id in range(size)]}, ensure_ascii=False)

"""The model card of a run: the model, its scores and run.toml's tables, without paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from tiedgpt.files import format_count, replacing
from tiedgpt.heads import Head
from tiedgpt.train.step.loss import Model, body_of, predicts_tokens
from tiedgpt.train.store.directory import RunDirectory, format_toml
from tiedgpt.train.tasks.registry import find_record
from tiedgpt.weights.formats.transformers import TIEDGPT, model_type_of
from tiedgpt.weights.formats.transformers.writer import OUR_CARD

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def write_card(
    run: RunDirectory,
    model: Model,
    description: Mapping[str, str],
    scores: Mapping[str, Any] | None,
) -> None:
    """Write model/README.md, unless a person has edited it.

    `scores` is the final line of metrics.jsonl; None: not scored yet. A run without a record, which
    was trained from Python, keeps the short card of `save_pretrained`.
    """
    tables, path = run.read_record(), run.model / "README.md"
    is_edited = path.exists() and OUR_CARD not in path.read_text(encoding="utf-8", errors="replace")
    if not tables or is_edited:
        return
    from huggingface_hub import ModelCard, ModelCardData  # 0.1 s, after the last step

    config, options = body_of(model).config, tables["options"]
    model_type, start = model_type_of(config), options.get("start")
    front = ModelCardData(
        library_name="tiedgpt" if model_type is TIEDGPT else "transformers",
        pipeline_tag=find_record(options).pipeline,
        tags=list(dict.fromkeys((model_type.name, "tiedgpt"))),
        base_model=start if _is_hub_name(start) else None,
    )
    tie = description.get("predicts", "")
    if predicts_tokens(model):
        tie = f"**{'Tied' if config.tie_word_embeddings else 'Untied'}**: {tie}"
    count = sum(parameter.numel() for parameter in model.parameters())
    data = "\n".join(f"- {key}: {text}" for key, text in description.items() if key != "predicts")
    card = ModelCard(f"""---
{front.to_yaml()}
---

# {run.path.resolve().name}

{OUR_CARD}

A GPT of {format_count(config.n_layer, "block")} of width {config.n_embd} with
{format_count(config.n_head, "head")} and {config.n_positions} positions: {count:,} parameters.
{tie}.

{_describe_scores(tables, scores)}

{data}

```python
{_describe_use(model)}
```

## Training

```toml
{format_toml({**tables, "options": _without_paths(options)})}```
""")
    with replacing(path) as temporary:
        card.save(temporary)


def _describe_use(model: Model) -> str:
    """Return code that loads the model."""
    config = body_of(model).config
    use = "from tiedgpt.infer import Engine\nEngine(directory).generate(prompt).text"
    transformers = None if model_type_of(config) is TIEDGPT else "AutoModelForCausalLM"
    if isinstance(model, Head):
        head = type(model).__name__
        use = f"from {model.home()} import {head}\nmodel = {head}.from_pretrained(directory)"
        transformers = model.class_in_transformers(config)
    if transformers:
        use += f"\n# or: transformers.{transformers}.from_pretrained(directory)"
    return use


def _describe_scores(tables: Mapping[str, Any], scores: Mapping[str, Any] | None) -> str:
    """Return a sentence with the final scores and the data that they were measured on."""
    if scores is None:
        planned = format_count(tables["training"]["steps"], "step")
        return f"Not scored: training was stopped (planned: {planned})."
    names = {"val_loss": f"loss ({find_record(tables['options']).loss_unit})"}
    measured = (
        f"{names.get(key, key.removeprefix('val_').replace('_', ' '))} **{value:.4f}**"
        for key, value in scores.items()
        if key.startswith("val_")
    )
    amount, data, remark = "all", "held-out data", ""
    if tables.get("val_examples", {}).get("held_out") is False:
        data, remark = "examples that it was trained on", "; it measures memorization"
    if "scored" in scores:
        counts_tokens = "tokens" in tables.get("train_examples", {"tokens": 0})
        unit = "token" if counts_tokens else "example"
        amount = f"{format_count(scores['scored'], unit)} of the"
    text = f"Score: {', '.join(measured)}, on {amount} {data}{remark}. "
    text += f"Trained for {format_count(scores['step'], 'step')}."
    if "best_step" in scores:
        text += f" The weights are those of step {scores['best_step']:,}."
    return text


def _without_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the names of files and directories in place of their paths."""
    named = dict(options)
    for name in ("start", "tokenizer"):
        if named.get(name) and not _is_hub_name(named[name]):
            named[name] = PurePath(named[name]).name
    sources = [*options.get("data", ()), *filter(None, [options.get("val")])]
    names = [source if source.startswith("hf:") else PurePath(source).name for source in sources]
    if options.get("val"):
        named["val"] = names.pop()
    return named | {"data": names}


def _is_hub_name(source: str | None) -> bool:
    """Return whether a model or tokenizer is one of the hub, and no path."""
    if source is None or source.startswith("runs/") or Path(source).exists():
        return False
    return HUB_NAME.fullmatch(source) is not None

"""The model card that a run writes: what was trained, on what, how well, and how to do it again.

Every number comes from run.toml, from metrics.jsonl, from `Data.description` or from the model.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import get_annotations
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from tiedgpt.files import replacing
from tiedgpt.heads import Head
from tiedgpt.options import flag, is_argument
from tiedgpt.train.metrics import History, parse_history
from tiedgpt.train.objective import Model, body_of, predicts_tokens
from tiedgpt.train.objectives import LABELLED
from tiedgpt.train.options import AUTO, SIZES, TrainOptions
from tiedgpt.train.storage import RunDirectory
from tiedgpt.train.tune_options import TuneOptions
from tiedgpt.weights.formats.transformers import TIEDGPT, model_type_of
from tiedgpt.weights.formats.transformers.writer import OUR_CARD

SCORES = {"val_loss": "loss (nats)", "val_bits_per_byte": "bits per byte"}
PLANNED = ("steps", "batch_size", "micro_batch", "optimizer", "lr", "dtype", "compile")
"""Numbers of the plan that a command can give, whatever a machine would have chosen."""
SHARES = ("warmup", "cooldown")
"""Numbers of the plan that a command gives as shares of the steps."""
EVALUATIONS_SHOWN = 12


def write_card(
    run: RunDirectory,
    model: Model,
    description: Mapping[str, str],
    last: Mapping[str, Any] | None,
) -> None:
    """Write model/README.md, unless someone has written their own over it.

    `last` is the line of the last evaluation, which is about to close metrics.jsonl; None for a run
    that stopped. A run without a record (trained from Python) keeps the short card.
    """
    tables, path = run.read_record(), run.model / "README.md"
    edited = path.exists() and OUR_CARD not in path.read_text(encoding="utf-8", errors="replace")
    if not tables or edited:
        return
    text = run.metrics.read_text(encoding="utf-8", errors="replace") if run.metrics.exists() else ""
    if last is not None:
        text += json.dumps(last) + "\n"
    metrics = parse_history(run.path.resolve().name, text)
    with replacing(path) as temporary:
        model_card(metrics, tables, model, description).save(temporary)


def model_card(
    metrics: History, tables: Mapping[str, Any], model: Model, description: Mapping[str, str]
) -> ModelCard:
    """Return the card of a run with these metrics and this record, as `described`."""
    options, training = tables["options"], tables["training"]
    task = options.get("task", "lm")
    kind, start = model_type_of(body_of(model).config), options.get("start")
    front = ModelCardData(
        library_name="tiedgpt" if kind is TIEDGPT else "transformers",
        pipeline_tag=LABELLED[task].pipeline if task in LABELLED else "text-generation",
        tags=list(dict.fromkeys((kind.name, "tiedgpt"))),
        base_model=start if start and not Path(start).exists() else None,
    )
    return ModelCard(f"""---
{front.to_yaml()}
---

# {metrics.name}

{OUR_CARD}

{_describe_model(model, description.get("predicts", ""))}

## Data

{_format_facts(_describe_data(tables, description))}

## Result

{_describe_result(metrics, training["steps"])}

## Training

{_format_facts(_describe_training(metrics, tables))}

The command:

```console
$ {command(tables)}
```

Here it meant {training["steps"]:,} steps. With all that was chosen, the same run on any machine:

```console
$ {exact_command(tables)}
```{_explain_replan(tables)}

## Use

```python
{_describe_use(model)}
```
""")


def command(tables: Mapping[str, Any]) -> str:
    """Return the command of a run as it was given, without where it was written."""
    return _spell(tables, {})


def exact_command(tables: Mapping[str, Any]) -> str:
    """Return the command that trains this run again, on whatever machine: steps for minutes."""
    plan = tables["training"]
    numbers = {name: plan[name] for name in PLANNED if name in plan}
    if plan.get("minutes") is not None:  # the time decided it
        numbers["eval_every"] = plan["eval_every"]
    timeless = {"minutes": None, "epochs": None}
    return _spell(tables, _list_choices(tables) | numbers | _list_shares(tables) | timeless)


def _spell(tables: Mapping[str, Any], decided: Mapping[str, Any]) -> str:
    """Return the command of the options of a run, and of what was decided."""
    options, processes = tables["options"], tables.get("processes")
    kind = TuneOptions if "too_long" in options else TrainOptions
    words = ["tiedgpt"]
    if processes:
        words = ["torchrun", "--nproc-per-node", str(processes["number"]), "-m", "tiedgpt"]
    words += ["train" if kind is TrainOptions else "tune", *map(str, options.get("data") or ())]
    words += ["--parallel", processes["parallel"]] if processes else []
    for field in sorted(fields(kind), key=lambda field: field.name not in get_annotations(kind)):
        value = (options | decided).get(field.name, field.default)
        if "help" not in field.metadata or is_argument(field) or value in (None, field.default):
            continue
        words += [flag(field)] if isinstance(value, bool) else [flag(field), str(value)]
    return shlex.join(words)


def _explain_replan(tables: Mapping[str, Any]) -> str:
    """Return what the exact command does not repeat of a run that was planned again."""
    if not (since := tables["training"].get("since")):
        return ""
    return (
        f"\n\nThis run was planned again after step {since:,}. Until then its learning rate "
        "followed an earlier plan, which this command does not repeat."
    )


def _list_choices(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `--size auto` decided, as options; nothing where the size was given."""
    options, config, size = tables["options"], tables["model"], tables["training"].get("size")
    if not size or options.get("size", AUTO) != AUTO or options.get("task", "lm") != "lm":
        return {}
    shape, chosen = SIZES[size], {"size": size}
    if options.get("tokenizer", "bpe") == "bpe":
        chosen["vocab_size"] = config["vocab_size"]
    if config["n_positions"] != shape.n_positions:
        chosen["context"] = config["n_positions"]
    if config["resid_pdrop"] != shape.dropout:
        chosen["dropout"] = config["resid_pdrop"]
    return chosen


def _list_shares(tables: Mapping[str, Any]) -> dict[str, float]:
    """Return the options that are shares of the steps, where the plan has other numbers.

    So it is where the steps were planned again, or a run went on for more of them. All are given
    then: together they must not be more than the steps.
    """
    options, plan = tables["options"], tables["training"]
    steps = plan["steps"]
    counts = {name: plan[name] for name in SHARES if name in plan}
    if options.get("schedule") != "wsd":
        counts.pop("cooldown", None)
    asked = {name: options.get(name, getattr(TrainOptions, name)) for name in counts}
    if all(round(asked[name] * steps) == count for name, count in counts.items()):
        return {}
    return {name: _exact_share(count, steps) for name, count in counts.items()}


def _exact_share(count: int, steps: int) -> float:
    """Return the shortest number that is this count as a share of the steps."""
    shares = (round(count / steps, digits) for digits in range(2, 17))
    return next(share for share in shares if round(share * steps) == count)


def _describe_model(model: Model, predicts: str) -> str:
    """Return the model's shape and what predicts."""
    gpt = body_of(model)
    config, count = gpt.config, sum(parameter.numel() for parameter in model.parameters())
    if not predicts_tokens(model):
        tie = predicts
    elif gpt.head is None:
        untied = count + gpt.wte.weight.numel()
        tie = f"**Tied**: {predicts}; an untied model would have {untied:,}"
    else:
        tie = f"**Untied**: {predicts}"
    return (
        f"A GPT of {config.n_layer} blocks of width {config.n_embd} with {config.n_head} heads and "
        f"{config.n_positions} positions: {count:,} parameters.\n{tie}."
    )


def _describe_data(
    tables: Mapping[str, Any], description: Mapping[str, str]
) -> dict[str, str | None]:
    options, python = tables["options"], tables["versions"]["python"]
    names = ", ".join(f"`{Path(name).name}`" for name in options.get("data") or ())
    labels = tables.get("train_examples", {}).get("labels", ())
    return {
        "data": names or f"the documentation inside Python {python}",
        "validated on": f"`{Path(options['val']).name}`" if options.get("val") else None,
        **{name: text for name, text in description.items() if name != "predicts"},
        "labels": ", ".join(f"`{label}`" for label in labels),
        "sha256": tables.get("text", {}).get("sha256"),
        "started from": options.get("start"),
    }


def _describe_result(metrics: History, steps: int) -> str:
    """Return the scores: of all that was held out, and of a part of it as training went on."""
    keys = [key for key in metrics.columns if key.startswith("val_")]
    if not keys:
        return f"Not validated yet: training was stopped at step {metrics.step:,} of {steps:,}."
    names = [SCORES.get(key, key.removeprefix("val_").replace("_", " ")) for key in keys]
    sentences = []
    if metrics.finished:
        scores = (
            f"{name} **{metrics.last(key):.4f}**" for key, name in zip(keys, names, strict=True)
        )
        sentences.append(f"On all that was held out: {', '.join(scores)}.")
    else:
        sentences.append(f"Training was stopped at step {metrics.step:,} of {steps:,}.")
    if (best := metrics.last("best_step")) is not None:
        sentences.append(f"The weights are those of step {best:,.0f}, which validated best.")
    evaluations = sorted(metrics.columns[keys[0]])
    every = -(-len(evaluations) // EVALUATIONS_SHOWN)
    rows = [
        (f"{n:,}", *(f"{metrics.columns[key][n]:.4f}" for key in keys))
        for n in evaluations[::-every]
    ]
    table = _format_table(("step", *names), rows[::-1])
    return f"{' '.join(sentences)}\n\nOn a part of it, as training went on:\n\n{table}"


def _describe_training(metrics: History, tables: Mapping[str, Any]) -> dict[str, str | None]:
    plan, peak = tables["training"], metrics.last("machine_memory_bytes")
    numbers = {**plan, **tables.get("machine", {})}
    return {
        metrics.unit: f"{metrics.units:,} in {metrics.step:,} steps of {plan['batch_size']} rows",
        "time in steps": f"{metrics.seconds:,.1f} s",
        "steps without a finite loss": f"{metrics.skipped:,}" if metrics.skipped else None,
        **{name.replace("_", " "): str(value) for name, value in numbers.items()},
        "peak memory": None if peak is None else f"{peak / 1e9:.2f} GB",
        "versions": ", ".join(f"{name} {each}" for name, each in tables["versions"].items()),
    }


def _describe_use(model: Model) -> str:
    """Return how the model is loaded."""
    config, name = body_of(model).config, type(model).__name__
    if isinstance(model, Head):
        theirs = model.class_in_transformers(config)
        ours = f"from tiedgpt.heads import {name}\nmodel = {name}.from_pretrained(directory)"
    else:
        theirs = None if model_type_of(config) is TIEDGPT else "AutoModelForCausalLM"
        ours = "from tiedgpt.infer import Engine\nEngine(directory).generate(prompt).text"
    return ours + (f"\n# or: transformers.{theirs}.from_pretrained(directory)" if theirs else "")


def _format_facts(facts: Mapping[str, str | None]) -> str:
    """Return facts by name as a table, without those that say nothing."""
    return _format_table(("", ""), [(name, text) for name, text in facts.items() if text])


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(c.replace('|', chr(92) + '|') for c in line)} |" for line in lines
    )

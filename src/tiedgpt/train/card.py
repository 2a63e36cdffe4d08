"""The model card that a run writes: what was trained, on what, how well, and how to do it again.

Every number comes from run.toml, from metrics.jsonl or from the model itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.files import replacing
from tiedgpt.heads import Head
from tiedgpt.train.history import History, history
from tiedgpt.train.objective import Model, body_of, predicts_tokens
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.run_directory import RunDirectory
from tiedgpt.weights.huggingface import TIEDGPT, model_type_of
from tiedgpt.weights.save import OUR_CARD

PIPELINES = {
    "lm": "text-generation", "classify": "text-classification", "tag": "token-classification",
    "choose": "multiple-choice", "answer": "question-answering",
}  # fmt: skip
SCORES = {"val_loss": "loss (nats)", "val_bits_per_byte": "bits per byte"}
PLANNED = ("steps", "batch_size", "micro_batch", "optimizer", "lr", "dtype", "compile")
"""Numbers of the plan that a command can give, whatever a machine would have chosen."""
EVALUATIONS_SHOWN = 12


def write_card(run: RunDirectory, model: Model, last: Mapping[str, Any] | None) -> None:
    """Write model/README.md, unless someone has written their own over it.

    `last` is the line of the last evaluation, which is about to close metrics.jsonl; None for a run
    that stopped. A run without a record (trained from Python) keeps the short card.
    """
    tables, path = run.read_record(), run.model / "README.md"
    if not tables:
        return
    if path.exists() and OUR_CARD not in path.read_text(encoding="utf-8", errors="replace"):
        return
    text = run.metrics.read_text(encoding="utf-8", errors="replace") if run.metrics.exists() else ""
    if last is not None:
        text += json.dumps(last) + "\n"
    with replacing(path) as temporary:
        card = model_card(history(run.path.resolve().name, text), tables, model)
        temporary.write_text(card, encoding="utf-8")


def model_card(found: History, tables: Mapping[str, Any], model: Model) -> str:
    """Return the card of a run with these metrics and this record."""
    config, untied_at = body_of(model).config, tables["training"].get("untie_at")
    parts = (
        _front(tables["options"], config),
        f"# {found.name}\n\n{OUR_CARD}\n\n{_what(model, config, untied_at)}",
        f"## Data\n\n{_table(_data(tables, model))}",
        f"## Result\n\n{_result(found, tables)}",
        f"## Training\n\n{_table(_training(found, tables))}\n\nThe same again:\n\n"
        f"```console\n$ {command(tables)}\n```",
        f"## Use\n\n```python\n{_use(model, config)}\n```",
    )
    return "\n\n".join(parts) + "\n"


def command(tables: Mapping[str, Any]) -> str:
    """Return the command that trains this run again, on whatever machine: steps for minutes."""
    options, plan = dict(tables["options"]), tables["training"]
    given = {name: plan[name] for name in PLANNED if name in plan} | {"minutes": None}
    parts, processes = ["tiedgpt"], tables.get("processes")
    if processes:
        parts = ["torchrun", "--nproc-per-node", str(processes["number"]), "-m", "tiedgpt"]
    parts += ["train", *map(str, options.get("data") or ())]
    parts += ["--parallel", processes["parallel"]] if processes else []
    for option in fields(TrainOptions):
        value = given.get(option.name, options.get(option.name, option.default))
        if option.name == "data" or value in (None, option.default):
            continue
        flag = f"--{option.name.replace('_', '-')}"
        if isinstance(value, bool):
            parts.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            parts += [flag, str(value)]
    return shlex.join(parts)


def _front(options: Mapping[str, Any], config: GPTConfig) -> str:
    """Return what the Hugging Face hub reads."""
    kind = model_type_of(config)
    start = options.get("start")
    data = ModelCardData(
        library_name="tiedgpt" if kind is TIEDGPT else "transformers",
        pipeline_tag=PIPELINES[options.get("task", "lm")],
        tags=[kind.name] if kind is TIEDGPT else [kind.name, "tiedgpt"],
        base_model=start if start and not Path(start).exists() else None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _what(model: Model, config: GPTConfig, untied_at: int | None) -> str:
    gpt = body_of(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    shape = f"{config.vocab_size:,} x {config.n_embd}"
    if not predicts_tokens(model):
        tie = f"The matrix of {shape} reads tokens; a {type(model).__name__} head scores the states"
    elif gpt.head is None:
        tie = (
            f"**Tied**: one matrix of {shape} reads tokens and predicts them, and is counted once; "
            f"with a head of its own the model would have {count + gpt.wte.weight.numel():,}"
        )
    elif untied_at is not None:
        tie = (
            f"**Untied** after {untied_at:,} steps: one matrix of {shape} read tokens and "
            "predicted them; since then it only reads, and another, at first its copy, predicts"
        )
    else:
        tie = f"**Untied**: a matrix of {shape} reads tokens and another predicts them"
    return (
        f"A GPT of {config.n_layer} blocks of width {config.n_embd} with {config.n_head} heads and "
        f"{config.n_positions} positions: {count:,} parameters.\n{tie}."
    )


def _data(tables: Mapping[str, Any], model: Model) -> dict[str, str]:
    options = tables["options"]
    python = tables["versions"]["python"]
    names = ", ".join(f"`{Path(name).name}`" for name in options.get("data") or ())
    rows = {"data": names or f"the documentation inside Python {python}"}
    if options.get("val"):
        rows["validated on"] = f"`{Path(options['val']).name}`"
    for side, what in (("train", "trained on"), ("val", "held out")):
        for kind in ("text", "examples"):
            counts = tables.get(f"{side}_{kind}", {})
            said = [f"{v:,} {k.replace('utf8_', '')}" for k, v in counts.items() if type(v) is int]
            if said:
                rows[what] = ", ".join(said)
    if labels := tables.get("train_examples", {}).get("labels"):
        rows["labels"] = ", ".join(f"`{label}`" for label in labels)
    if digest := tables.get("text", {}).get("sha256"):
        rows["sha256"] = f"`{digest}`"
    rows["vocabulary"] = f"{tables['model']['vocab_size']:,} tokens ({options['tokenizer']})"
    if options.get("start"):
        rows["started from"] = f"`{options['start']}`"
    return rows


def _result(found: History, tables: Mapping[str, Any]) -> str:
    steps = tables["training"]["steps"]
    state = "" if found.finished else f" Training was stopped at step {found.step:,} of {steps:,}."
    keys = [key for key in found.columns if key.startswith("val_")]
    if not keys:
        return f"Not validated yet.{state}"
    if (best := found.last("best_step")) is not None:
        state += f" The weights are those of step {best:,.0f}, which validated best."
    names = [SCORES.get(key, key.removeprefix("val_").replace("_", " ")) for key in keys]
    shown = sorted(found.columns[keys[0]])
    every = -(-len(shown) // EVALUATIONS_SHOWN)
    rows = ["| step | " + " | ".join(names) + " |", "|---:|" + "---:|" * len(names)]
    for step in shown[::-1][::every][::-1]:
        values = (found.columns[key].get(step) for key in keys)
        rows.append(f"| {step:,} | " + " | ".join(map(_number, values)) + " |")
    table = "\n".join(rows)
    if not found.finished:
        return f"On a part of what was held out:{state}\n\n{table}"
    finals = zip(names, (found.final.get(key) for key in keys), strict=True)
    whole = ", ".join(f"{name} **{_number(value)}**" for name, value in finals)
    return (
        f"On all that was held out: {whole}.{state}\n\n"
        f"On a part of it, as training went on:\n\n{table}"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _training(found: History, tables: Mapping[str, Any]) -> dict[str, str]:
    plan, versions, machine = tables["training"], tables["versions"], tables.get("machine", {})
    rows = {
        found.unit: f"{found.units:,} in {found.step:,} steps of {plan['batch_size']} rows",
        "time in steps": f"{found.seconds:,.1f} s",
    }
    if found.skipped:
        rows["skipped"] = f"{found.skipped:,} steps, whose loss or gradient was not finite"
    shown = ("steps", "batch_size")
    rows |= {
        name.replace("_", " "): str(value) for name, value in plan.items() if name not in shown
    }
    if (peak := found.last("machine_memory_bytes")) is not None:
        rows["peak memory"] = f"{peak / 1e9:.2f} GB"
    rows["machine"] = ", ".join(f"{v} {k}" if k == "cores" else str(v) for k, v in machine.items())
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {name: value for name, value in rows.items() if value}


def _use(model: Model, config: GPTConfig) -> str:
    """Return how the model is loaded."""
    if isinstance(model, GPT):
        known = model_type_of(config) is not TIEDGPT
        theirs = "AutoModelForCausalLM" if known else None
        lines = [
            "from tiedgpt.infer import Engine",
            "Engine(directory).generate(prompt, max_new_tokens=n).text",
        ]
    else:
        assert isinstance(model, Head)
        theirs = model.class_in_transformers(config)
        name = type(model).__name__
        lines = [
            f"from tiedgpt.heads import {name}",
            f"model = {name}.from_pretrained(directory)",
        ]
    if theirs is not None:
        lines.append(f"# or: transformers.{theirs}.from_pretrained(directory)")
    return "\n".join(lines)


def _table(rows: Mapping[str, str]) -> str:
    lines = (f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items())
    return "\n".join(("| | |", "|---|---|", *lines))

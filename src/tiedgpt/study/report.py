"""The report of a study: Markdown with figures beside it, and the same as one HTML file."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent

import numpy as np
from markdown_it import MarkdownIt

from tiedgpt.files import replacing
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Line, Panel
from tiedgpt.study import training
from tiedgpt.study.comparison import Study, over_seeds, with_interval
from tiedgpt.study.models import LSTM_SCALE, NAMES

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Tied against untied</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 1rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: .8rem }}
th, td {{ border-bottom: 1px solid #8888; padding: .25rem .6rem; white-space: nowrap }}
pre {{ border: 1px solid #8888; padding: .6rem .8rem; white-space: pre-wrap }}
img {{ width: 100% }}
@media (prefers-color-scheme: dark) {{ img {{ filter: invert(.93) hue-rotate(180deg) }} }}
</style>
{body}</html>
"""
TEXT = """# Tied against untied

**{conclusion}**

{models}

Differences are taken seed by seed, because the models share the data and the order of batches. All
intervals are Student's 95 % intervals over the seeds {study.seeds}; tables show a mean +- half of
its interval. They say how much depends on the first weights and on that order. Another text, size,
rate or budget may give another result.

## The loss during training

Measured on the same part of the validation text at every point.

{losses}

## The loss by frequency of the token that is predicted

The {n_seen:,} tokens that occur in the training text, in ten groups of as many tokens: group 1
holds the most frequent. Above 0 the tied GPT is better. One interval in twenty misses.

{deciles}

## Norms of the rows against frequency

The mean norm in each of the ten groups. Adding one vector to all rows of the matrix that predicts
changes no probability, but every norm. So the mean row is subtracted first; raw norms are shown
beside that.

{norms}

## The gradient of W from reading and from predicting

In the tied GPT the two parts are added up; in an untied one each goes to its own matrix.
`tiedgpt.inspect.gradient_split` measures them on a few windows of validation text.

{gradients}

## Samples

{samples}

## How it was done

- Text: {n_train:,} tokens to train on, {n_val:,} held out to validate on; a byte-level BPE of
  {config.vocab_size:,} tokens, learned from the training text.
- Budget: {study.setting.steps:,} steps of {training.BATCH_SIZE} rows of {config.n_positions} tokens
  for every model. With one seed all models see the same batches in the same order.
- Shapes: {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, no dropout. The
  untied GPT of equal size is narrower. The LSTM has two layers of as many units as that size gives.
- First weights: an untied head is a copy of W. With one seed the tied GPT and its untied copy
  compute the same function before the first step, so what differs later is due to the tie. The GPT
  of equal size has weights of its own; the LSTM's W is the tied GPT's times {lstm_scale:g}.
- Optimizer: AdamW, betas {training.BETAS}, no weight decay, gradients clipped at {training.CLIP:g}.
  The rate rises to {training.LR:g} in {training.WARMUP:.0%} of the steps and falls to 0. One rate
  serves all models; each may have a better one.
"""
GPTS = "tied", "untied", "untied-equal"
Series = dict[str, np.ndarray]
"""Lines by name: (S, n) a number for each seed and place of the axis."""


def write_report(study: Study, out: Path) -> None:
    """Write report.md, its figures and report.html into a directory."""
    setting, steps = study.setting, study.values("tied", "curve", "step")[0]
    counts = setting.by_decile(setting.seen, setting.counts[setting.seen])

    def values(names: Iterable[str], *keys: str) -> Series:
        return {NAMES[name]: study.values(name, *keys) for name in names}

    def differences(names: Iterable[str], *keys: str) -> Series:
        return {NAMES[name]: study.differences(name, *keys) for name in names}

    def norms(kind: str) -> Series:
        return {
            f"{NAMES[name]}: {does}": study.values(name, kind, does)
            for name in ("tied", "untied", "lstm")
            for does in study.runs[name][0][kind]
        }

    losses = {
        "loss, nats a token": values(NAMES, "curve", "loss"),
        "loss less the tied GPT's": differences(GPTS, "curve", "loss"),
    }
    deciles = {
        "loss, nats a token": values(NAMES, "by_decile"),
        "loss less the tied GPT's": differences(GPTS, "by_decile"),
        "the same of the LSTM": differences(("tied", "lstm"), "by_decile"),
    }
    gradients = {
        "|predict| / (|read| + |predict|)": values(GPTS, "curve", "predict_share"),
        "cosine of the two": values(GPTS, "curve", "cosine"),
    }
    by_count = {"centred norm": norms("centred"), "raw norm": norms("raw")}
    groups, figures = range(1, training.GROUPS + 1), out / "figures"
    text = TEXT.format(
        study=study,
        config=setting.config,
        training=training,
        lstm_scale=LSTM_SCALE,
        conclusion=study.conclusion(),
        models=_table(*study.table()),
        losses=_shown(figures / "loss.svg", "step", steps, losses),
        n_seen=len(setting.seen),
        deciles=_shown(figures / "deciles.svg", "group", groups, deciles),
        norms=_shown(figures / "norms.svg", "mean count", counts, by_count, log_x=True),
        gradients=_shown(figures / "gradient.svg", "step", steps, gradients),
        samples="\n\n".join(_sample(name, study) for name in NAMES),
        n_train=len(setting.train),
        n_val=setting.targets.sum(),
    )
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    page = PAGE.format(body=re.sub(r'src="figures/(\w+\.svg)"', partial(_data, figures), body))
    for name, content in {"report.md": text, "report.html": page}.items():
        with replacing(out / name) as temporary:
            temporary.write_text(content, encoding="utf-8")


def _shown(
    path: Path, x_label: str, xs: Sequence[float], panels: dict[str, Series], *, log_x: bool = False
) -> str:
    """Save a figure of panels; return the Markdown that shows it and its numbers."""
    drawn, parts = [], [f"![{', '.join(panels)}](figures/{path.name})"]
    for title, series in panels.items():
        lines, cells = [], [[f"{x:,.0f}" for x in xs]]
        for color, (label, numbers) in enumerate(series.items()):
            means, low, high = zip(*map(over_seeds, numbers.T), strict=True)
            lines.append(Line(label, xs, means, color, marked=True, low=low, high=high))
            cells.append([with_interval(values) for values in numbers.T])
        drawn.append(Panel(title, x_label, tuple(lines), log_x=log_x))
        table = _table((x_label, *series), zip(*cells, strict=True))
        parts.append(f"**{title}**\n\n{table}")
    save_figure(drawn, path, "mean and 95 % interval over the seeds")
    return "\n\n".join(parts)


def _data(figures: Path, link: re.Match[str]) -> str:
    """Return a figure in place of a link to it."""
    return f'src="data:image/svg+xml;base64,{b64encode((figures / link[1]).read_bytes()).decode()}"'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, all but its first column aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sample(name: str, study: Study) -> str:
    """Return what a model wrote as a block of Markdown that shows it as it is."""
    text = study.runs[name][0]["sample"].strip() or "(nothing)"
    clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return f"{NAMES[name]}:\n\n{indent(clean, '    ')}"

"""The report of a study: Markdown with figures beside it, and one HTML file that holds all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from markdown_it import MarkdownIt

from tiedgpt.evaluate.intervals import Interval, t_interval
from tiedgpt.files import replacing
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Line, Panel
from tiedgpt.study.comparison import Study
from tiedgpt.study.models import LSTM_SCALE, NAMES
from tiedgpt.study.training import BETAS, CLIP, GROUPS, WARMUP, Data, Numbers

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Tied against untied</title>
<style>
:root {{ color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #c9c9c9 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e8e8; --paper: #16181b; --line: #4a4d52 }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: .8rem }}
th, td {{ border-bottom: 1px solid var(--line); padding: .25rem .6rem; white-space: nowrap }}
pre {{ border: 1px solid var(--line); padding: .6rem .8rem; white-space: pre-wrap }}
blockquote {{ border-left: 4px solid #0072b2; margin: 1rem 0; padding: .1rem 1rem }}
svg {{ width: 100%; height: auto; fill: var(--ink) }}
</style>
</head>
<body>
{body}</body>
</html>
"""
TEXT = """# Tied against untied

> {conclusion}

The interval is Student's, over the seeds: {seeds}. Differences are taken seed by seed, because the
models share the data and the order of batches. It says how much the result depends on the first
weights and on that order. Another text, size, rate or budget may give another result.

## The models and their losses

{models}

{loss_figure}
{turned}
## By frequency of the token that is predicted

The {n_seen:,} tokens that occur in the training text, in ten groups of as many tokens: group 1
holds the most frequent. Above 0 the tied GPT is better. Each interval is of one group alone: of
many, one in twenty misses.

{deciles}

{deciles_figure}

## Norms of the rows

A raw norm is not identified. Adding one vector to all rows of the matrix that predicts changes no
probability. Adding it to all rows of the matrix that reads, and subtracting it from all positions,
changes nothing in a GPT, either. So norms are given raw, and after the mean row is subtracted. The
table has the rank correlation (Spearman) of a row's norm with its token's count.

{correlations}

{norms_figure}

## The gradient of W

In the tied GPT the two parts are added up. At the end of training, {share} of the sum of both
lengths is from predicting, and the cosine of the two is {cosine}. In the untied GPT each part goes
to its own matrix. `tiedgpt.inspect.gradient_split` measures them, always on the same few windows of
validation text.

{gradient_figure}

## Samples

Of seed {first_seed}, from the end-of-text token.

{samples}

## How it was done

- Text: {study.train_tokens:,} tokens to train on, {study.val_tokens:,} to validate on, held out by
  document, or from the ends of documents; a byte-level BPE of {config.vocab_size:,} tokens, learned
  from the training text.
- Budget: {setting.steps:,} steps of {setting.batch_size} rows of {config.n_positions} tokens for
  every model, {study.passes:.2f} passes over the text. With one seed all models see the same
  batches in the same order.
- Shapes: the GPTs have {config.n_layer} layers, {config.n_head} heads and width {config.n_embd};
  the one of equal size is narrower. The LSTM has two layers, with as many units as give it the tied
  GPT's size. No dropout.
- First weights: the untied GPT is the tied one with a copy of W as its head. Both compute the same
  function before the first step, so what differs later is due to the tie. The GPT of equal size has
  other shapes and so weights of its own; its head begins as a copy, too. The LSTM's W is the GPT's
  times {lstm_scale:g}. A head that begins elsewhere than at W is not measured here.
- Optimizer: AdamW, betas {betas}, no weight decay, gradients clipped at {clip:g}. The rate rises to
  {setting.lr:g} in {warmup:.0%} of the steps and falls to 0. One rate serves all models; each may
  have a better one.
"""
NUMBER, SIGNED = "{:.4f}".format, "{:+.4f}".format
KINDS = "raw", "centred"
SIDES = {
    "tied": {"reads and predicts": "W of the tied GPT"},
    "untied": {"reads": "untied GPT, reads", "predicts": "untied GPT, predicts"},
    "lstm": {"reads and predicts": "W of the tied LSTM"},
}
"""The matrices whose rows are drawn."""


def write_report(study: Study, data: Data, out: Path) -> None:
    """Write report.md, its figures and report.html into a directory."""
    figures: dict[str, tuple[str, list[Panel]]] = {
        "loss": ("Validation loss over the seeds: mean and 95 % interval", _losses(study)),
        "deciles": ("Difference to the tied GPT by frequency: mean and interval", _deciles(study)),
        "norms": ("Norms of the rows against frequency", _norms(study)),
        "gradient": ("The gradient of W from reading and from predicting", _gradients(study)),
    }
    for name, (title, panels) in figures.items():
        save_figure(panels, out / "figures" / f"{name}.svg", title)
    links = {name: f"![{title}](figures/{name}.svg)" for name, (title, _) in figures.items()}
    text = _markdown(study, data, links)
    with replacing(out / "report.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for number, (name, (title, _)) in enumerate(figures.items()):
        svg = (out / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        (image,) = re.findall(rf'<img src="figures/{name}\.svg"[^>]*>', body)
        body = body.replace(image, _inline(svg, number, title))
    with replacing(out / "report.html") as temporary:
        temporary.write_text(PAGE.format(body=body), encoding="utf-8")


def _inline(svg: str, number: int, title: str) -> str:
    """Return a figure as an element of the page: its own ids, and black and white as the page's."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>f{number}-", svg)
    svg = svg.replace("#ffffff", "var(--paper)").replace("#000000", "var(--ink)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _markdown(study: Study, data: Data, figures: dict[str, str]) -> str:
    """Return the whole report."""
    ends = [run["curve"][-1] for run in study.runs["tied"]]
    share, (least, most) = _over_seeds([one["predict_share"] for one in ends])
    samples = (
        f"**{label}**\n\n{_indented(study.runs[name][0]['sample'])}"
        for name, label in NAMES.items()
    )
    return TEXT.format(
        conclusion=study.conclusion(),
        seeds=", ".join(map(str, study.seeds)),
        first_seed=study.seeds[0],
        models=_models(study),
        turned=_turned(study),
        n_seen=int((data.counts > 0).sum()),
        deciles=_by_decile(study),
        correlations=_correlations(study),
        share=f"{share:.1%} (95 % interval {least:.1%} to {most:.1%})",
        cosine=_with_interval(_over_seeds([one["cosine"] for one in ends]), SIGNED),
        samples="\n\n".join(samples),
        study=study,
        setting=study.setting,
        config=study.setting.config,
        betas=" and ".join(map(str, BETAS)),
        clip=CLIP,
        warmup=WARMUP,
        lstm_scale=LSTM_SCALE,
        **{f"{name}_figure": figure for name, figure in figures.items()},
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; all but the first column stand to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _with_interval(value: tuple[float, Interval], form: Callable[[float], str] = NUMBER) -> str:
    mean, (low, high) = value
    return f"{form(mean)} ({form(low)} to {form(high)})"


def _models(study: Study) -> str:
    rows = [
        (
            label,
            f"{study.runs[name][0]['parameters']:,}",
            _with_interval(study.loss(name)),
            "" if name == "tied" else _with_interval(study.difference(name), SIGNED),
        )
        for name, label in NAMES.items()
    ]
    columns = "model", "parameters", "validation loss, nats a token", "less the tied GPT's"
    return _table(columns, rows)


def _by_decile(study: Study) -> str:
    first, *others = NAMES
    rows = [
        (
            f"{g + 1}",
            f"{study.median_counts[g]:,.0f}",
            f"{study.target_shares[g]:.2%}",
            NUMBER(float(np.mean([run["by_decile"][g] for run in study.runs[first]]))),
            *(_with_interval(study.difference(name, g), SIGNED) for name in others),
        )
        for g in range(GROUPS)
    ]
    names = ("untied less tied", "untied of equal size less tied", "LSTM less tied GPT")
    return _table(("group", "median count", "targets", "tied GPT, nats", *names), rows)


def _correlations(study: Study) -> str:
    rows = []
    for name, runs in study.runs.items():
        for does in runs[0]["rows"]:
            kinds = ([run["rows"][does][k]["spearman"] for run in runs] for k in KINDS)
            rows.append((NAMES[name], does, *(_with_interval(_over_seeds(x)) for x in kinds)))
    return _table(("model", "the matrix", "raw norm", "centred norm"), rows)


def _indented(text: str) -> str:
    """Return a text as a block of Markdown that shows it as it is."""
    clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return "\n".join(f"    {line}" for line in (clean.strip("\n") or "(nothing)").split("\n"))


def _turned(study: Study) -> str:
    """Return a warning where a model's validation loss was lower before the end."""
    turned = [
        NAMES[name]
        for name, runs in study.runs.items()
        for curve in [np.mean([[one["loss"] for one in run["curve"]] for run in runs], 0)]
        if curve.min() < curve[-1]
    ]
    if not turned:
        return ""
    return f"\nLower before the end, so trained too long for this text: {'; '.join(turned)}.\n"


def _over_seeds(values: Sequence[float]) -> tuple[float, Interval]:
    return float(np.mean(values)), t_interval(values)


def _band(
    label: str, xs: Sequence[float], by_seed: Sequence[Sequence[float]], color: int, **style: bool
) -> Line:
    """Return the mean over seeds at each place, with its interval."""
    means, intervals = zip(*map(_over_seeds, zip(*by_seed, strict=True)), strict=True)
    low, high = zip(*intervals, strict=True)
    return Line(label, xs, means, color, low=low, high=high, **style)


def _losses(study: Study) -> list[Panel]:
    """Return the curves, and the GPTs' once more without their beginning."""
    curves: dict[str, list[list[Numbers]]] = {
        name: [run["curve"] for run in runs] for name, runs in study.runs.items()
    }
    panels = []
    for first, title in ((0, "all of the training"), (-5, "its last part, GPTs alone")):
        lines = tuple(
            _band(
                NAMES[name],
                [one["step"] for one in of_seeds[0]][first:],
                [[one["loss"] for one in curve][first:] for curve in of_seeds],
                color,
            )
            for color, (name, of_seeds) in enumerate(curves.items())
            if first == 0 or name != "lstm"
        )
        panels.append(Panel(title, "step", lines, y_label="nats a token"))
    return panels


def _deciles(study: Study) -> list[Panel]:
    """Return the paired differences by decile: of the GPTs, and of the LSTM."""
    panels = []
    for title, names in (("GPTs", ("untied", "untied-equal")), ("LSTM", ("lstm",))):
        lines = []
        for name in names:
            found = [study.difference(name, g) for g in range(GROUPS)]
            means, intervals = zip(*found, strict=True)
            low, high = zip(*intervals, strict=True)
            color, places = list(NAMES).index(name), range(1, GROUPS + 1)
            lines.append(Line(NAMES[name], places, means, color, True, low=low, high=high))
        zero = Line("no difference", (1, GROUPS), (0.0, 0.0), 0)
        title = f"{title}: loss less the tied GPT's"
        panels.append(Panel(title, "group, 1 the most frequent", (*lines, zero), y_label="nats"))
    return panels


def _norms(study: Study) -> list[Panel]:
    """Return the mean norm of each decile's rows, raw and centred."""
    panels = []
    for kind in KINDS:
        lines: list[Line] = []
        for name, sides in SIDES.items():
            for does, label in sides.items():
                norms = [run["rows"][does][kind]["by_decile"] for run in study.runs[name]]
                lines.append(_band(label, study.median_counts, norms, len(lines), marked=True))
        title = f"{kind} norm, mean of each group's rows"
        panels.append(Panel(title, "median count of the group", tuple(lines), log_x=True))
    return panels


def _gradients(study: Study) -> list[Panel]:
    """Return the share of predicting and the cosine over the steps."""
    panels = []
    for key, title in (
        ("predict_share", "share of predicting in |read| + |predict|"),
        ("cosine", "cosine of the two parts"),
    ):
        lines = []
        for color, name in enumerate(("tied", "untied", "untied-equal")):
            curves = [run["curve"] for run in study.runs[name]]
            values = [[one[key] for one in curve] for curve in curves]
            lines.append(_band(NAMES[name], [one["step"] for one in curves[0]], values, color))
        panels.append(Panel(title, "step", tuple(lines)))
    return panels

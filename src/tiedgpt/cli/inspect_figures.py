"""The figures of `tiedgpt inspect`: results of `tiedgpt.inspect` as panels and grids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tiedgpt.inspect.gradients import GradientSplit
from tiedgpt.inspect.layers import Ablation, AttentionMaps, Lens
from tiedgpt.inspect.predictions import Dot, Positions
from tiedgpt.inspect.rows import Vocabulary
from tiedgpt.plots.figure import save_figure
from tiedgpt.plots.panel import Grid, Line, Panel
from tiedgpt.plots.table import visible

NAMED = 5
"""Points of a cloud, and lines, that are named."""
MOST_TEXTS = 16
"""More columns of a grid than this leave no room for words."""

Panels = list[Panel | Grid]


def draw(name: str, result: Any, path: Path) -> None:
    """Write the figure of a result of `inspect NAME`; `UserError` as `save_figure`."""
    title, panels = FIGURES[name](result)
    save_figure(panels, path, title, columns=1 if len(panels) < 3 else 2 if len(panels) < 6 else 4)


def _lines(columns: dict[str, Any], **style: Any) -> tuple[Line, ...]:
    """Return a line for each column, over its index."""
    return tuple(
        Line(name, range(len(column)), np.asarray(column).tolist(), color, **style)
        for color, (name, column) in enumerate(columns.items())
    )


def _at_tokens(pieces: tuple[str, ...]) -> dict[str, Any]:
    return {
        "x_label": "token, and its position",
        "x_names": [f"{visible(piece)} {at}" for at, piece in enumerate(pieces)],
    }


def _positions(found: Positions) -> tuple[str, Panels]:
    bits = {"surprisal of the next token": found.surprisal_bits}
    lines = _lines(bits | {"entropy of the prediction": found.entropy_bits}, marked=True)
    axis = _at_tokens(found.pieces)
    panels: Panels = [Panel("the prediction after each token", lines=lines, y_label="bits", **axis)]
    if found.max_abs_change is not None and found.poked is not None:
        moved = f"change of the logits when token {found.poked[0]} is changed"
        lines = _lines({"largest": found.max_abs_change}, marked=True)
        panels.append(Panel(moved, lines=lines, y_label="largest change of a logit", **axis))
    return f"{len(found.ids)} tokens, loss {found.loss:.3f} nats", panels


def _lens(found: Lens) -> tuple[str, Panels]:
    words = [[visible(found.words[id])[:9] for id in row] for row in found.top_ids[..., 0].tolist()]
    grid = Grid(
        "the likeliest next token, by state",
        y_label="state after",
        unit="its probability",
        values=np.exp(found.top_logprob[..., 0]).tolist(),
        texts=words if len(found.ids) <= MOST_TEXTS else (),
        y_names=found.layers,
        **_at_tokens(found.pieces),
    )
    names = [visible(found.words[id]) for id in found.watch[:NAMED].tolist()]
    columns = dict(zip(names, np.exp(found.watch_logprob.T), strict=False))
    watched = Panel(
        f"after token {found.position}, {visible(found.pieces[found.position])}",
        "state after",
        _lines(columns, marked=True),
        y_label="probability",
        x_names=found.layers,
    )
    return "logit lens", [grid, watched]


def _dot(found: Dot) -> tuple[str, Panels]:
    panels: Panels = []
    for sign, what, norm, cos in (
        ("e", "rows e as they are", found.all_norm, found.all_cos),
        ("c", "rows c, minus their mean", found.all_centred_norm, found.all_centred_cos),
    ):
        x, y = norm[found.ids], cos[found.ids]
        lines = [
            Line("all tokens", norm.tolist(), cos.tolist(), 0, joined=False),
            Line("the likeliest", x.tolist(), y.tolist(), 1, marked=True, joined=False),
        ]
        lengths, most = np.linspace(norm.max() / 50, norm.max(), 200), float((x * y).max())
        for color, product in enumerate((most, 0.75 * most, 0.5 * most), start=2):
            level = product / lengths
            drawn = (level > cos.min()) & (level < cos.max())
            name = f"h . {sign} = {found.h_norm * product:.1f}"
            lines.append(Line(name, lengths[drawn].tolist(), level[drawn].tolist(), color))
        notes = list(zip(x, y, map(visible, found.pieces), strict=True))[:NAMED]
        panels.append(
            Panel(what, "norm of the row", tuple(lines), y_label="cos(h, row)", notes=notes)
        )
    return f"after token {found.position}, {visible(found.piece)}: logit = |h| |e| cos", panels


def _vocabulary(found: Vocabulary) -> tuple[str, Panels]:
    panels: Panels = []
    for matrix in found.matrices:
        columns = {"norm of the row": matrix.norm, "norm of the centred row": matrix.centred_norm}
        if matrix.prior_logit is not None:
            columns["prior logit, nats"] = matrix.prior_logit
        count = np.zeros(0) if found.count is None else found.count
        for name, column in columns.items() if count.any() else ():
            xs, ys = count[count > 0].tolist(), column[count > 0].tolist()
            cloud = Line(name, xs, ys, joined=False)
            title = f"{matrix.name}: {name}"
            panels.append(Panel(title, "count of the token", (cloud,), log_x=True, y_label=name))
        x, y = (
            f"component {n + 1}, {s:.0%} of the variance" for n, s in enumerate(matrix.pca_share)
        )
        xs, ys = matrix.pca.T.tolist()
        cloud = Line("tokens", xs, ys, joined=False)
        panels.append(Panel(f"{matrix.name}: main directions", x, (cloud,), y_label=y))
    return f"{len(found.pieces):,} tokens", panels


def _gradient_split(found: GradientSplit) -> tuple[str, Panels]:
    order = np.hypot(found.rows_read, found.rows_predict).argsort()[::-1][:40]
    parts = {"from reading": found.rows_read[order], "from predicting": found.rows_predict[order]}
    panel = Panel(
        f"reading {found.norm_read:.3g}, predicting {found.norm_predict:.3g}, "
        f"cosine {found.cosine:.3f}",
        "token",
        _lines(parts, marked=True, joined=False),
        y_label="norm of the row's gradient",
        x_names=[visible(found.pieces[id]) for id in order],
    )
    return "gradient of W: the rows with the largest gradient", [panel]


def _attention(found: AttentionMaps) -> tuple[str, Panels]:
    tokens: dict[str, Any] = {"x_label": "key", "y_label": "query"}
    tokens["x_names"] = tokens["y_names"] = list(map(visible, found.pieces))
    heads: dict[str, Any] = {"x_label": "head", "y_label": "layer"}
    grids: Panels = [
        Grid(f"layer {found.layer}, head {n}", unit="weight", values=weights.tolist(), **tokens)
        for n, weights in enumerate(found.patterns)
    ]
    for title, unit, values in (
        ("entropy of the weights", "bits", found.entropy),
        ("on the first token", "weight", found.first_share),
        ("on the token before", "weight", found.previous_share),
    ):
        grids.append(Grid(title, unit=unit, values=values.tolist(), **heads))
    return "attention: a layer's maps, and means of every head", grids


def _ablate(found: Ablation) -> tuple[str, Panels]:
    few = found.heads.shape[1] <= MOST_TEXTS
    texts = [[f"{x:+.2f}" for x in row] for row in found.heads] if few else ()
    unit, values = "change of the loss, nats", found.heads.tolist()
    heads = Grid("without a head", "head", "layer", unit, values, texts, signed=True)
    layers = [str(layer) for layer in range(len(found.mlp))]
    parts = _lines({"attention": found.attention, "MLP": found.mlp}, marked=True)
    whole = Panel(
        "without a layer's attention, or MLP", "layer", parts, y_label=unit, x_names=layers
    )
    instead = {"zero": "zero", "mean": "its mean"}[found.mode]
    return f"loss {found.loss:.3f} nats; a part's output is replaced by {instead}", [heads, whole]


FIGURES: dict[str, Callable[[Any], tuple[str, Panels]]] = {
    "positions": _positions,
    "lens": _lens,
    "dot": _dot,
    "vocabulary": _vocabulary,
    "gradient-split": _gradient_split,
    "attention": _attention,
    "ablate": _ablate,
}

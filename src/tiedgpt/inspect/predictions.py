"""Predictions at every position of a text, and one prediction as dot products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tiedgpt.errors import UserError
from tiedgpt.files import format_count
from tiedgpt.inspect.distributions import (
    chunks,
    entropy_bits,
    logits_of,
    measure,
    upcast,
    write_chunk,
)
from tiedgpt.inspect.inputs import InspectionInput, Model, Text, index, numpy, open_input, token_id
from tiedgpt.inspect.results import (
    LABELLED,
    SHOWN_ROWS,
    Figure,
    Result,
    lines,
    token_axis,
)
from tiedgpt.inspect.vocab_matrices import final_bias, vocab_matrices
from tiedgpt.plots.panel import Line, Panel
from tiedgpt.plots.table import number_cell, number_table, token_cells, visible
from tiedgpt.runtime import eval_mode


@dataclass(frozen=True, kw_only=True, repr=False)
class Positions(Result):
    """T tokens give T predictions; training learns from all, generation reads the last alone."""

    ids: np.ndarray  # (T,) the text's tokens
    pieces: tuple[str, ...]  # their text; part of a character is written `bytes:\xe2`
    target: np.ndarray  # (T,) the token that follows; -1 after the last
    logprob: np.ndarray  # (T,) of the target, in nats; the last is NaN
    rank: np.ndarray  # (T,) of the target among V, from 1; the last is 0
    surprisal_bits: np.ndarray  # (T,) -log2 of the target's probability; the last is NaN
    entropy_bits: np.ndarray  # (T,) of the prediction
    top_ids: np.ndarray  # (T, k) the likeliest tokens, in order
    top_logprob: np.ndarray  # (T, k) in nats
    words: dict[int, str]  # the text of every id above
    loss: float  # mean over the targets, in nats: `model.loss`; NaN for a single token
    bits_per_byte: float  # the targets' bits over their bytes of UTF-8; NaN without a tokenizer
    next: int  # T - 1: the only position that generation uses
    replaced: tuple[int, int, int] | None  # position, old id and new id of the replaced token
    max_abs_change: np.ndarray | None  # (T,) largest change of a logit after the replacement

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        changes = self.max_abs_change
        next_words = token_cells(self.words[id] for id in self.target[:-1])
        rows = number_table(
            ("#", range(len(self.ids))),
            ("token", token_cells(self.pieces)),
            ("next", [*next_words, "-"]),
            ("prob", np.exp(self.logprob)),
            ("rank", [*self.rank[:-1], None]),
            ("bits", self.surprisal_bits),
            ("entropy", self.entropy_bits),
            ("likeliest", token_cells(self.words[id] for id in self.top_ids[:, 0]))
            if changes is None
            else ("logits moved by", changes),
        )
        text = (
            f"{rows}\n\n"
            f"mean loss {number_cell(self.loss)} nats, "
            f"{number_cell(self.bits_per_byte)} bits per byte\n"
            f"training learns from {format_count(self.next, 'prediction')}, "
            f"generation reads position {self.next}\n"
            "bits: surprisal of the next token; entropy: of the prediction, in bits"
        )
        if self.replaced is None or changes is None:
            return text
        at, _, new = self.replaced
        most = changes[:at].max(initial=0)
        moved = f"moved by at most {most:.0e}: rounding" if most else "stayed the same, bit for bit"
        change = (
            f"{visible(self.pieces[at])}, was replaced by {visible(self.words[new])} (id {new})"
        )
        return f"{text}\nToken {at}, {change}. Before it, logits {moved}."

    @override
    def figure(self) -> Figure:
        bits = {"surprisal of the next token": self.surprisal_bits}
        curves = lines(bits | {"entropy of the prediction": self.entropy_bits})
        axis = token_axis(self.pieces)
        panels = [Panel("the prediction after each token", lines=curves, y_label="bits", **axis)]
        if self.max_abs_change is not None and self.replaced is not None:
            title = f"change of the logits when token {self.replaced[0]} is changed"
            curves = lines({"largest": self.max_abs_change})
            panels.append(Panel(title, lines=curves, y_label="largest change of a logit", **axis))
        return f"{len(self.ids)} tokens, loss {self.loss:.3f} nats", [*panels]


@torch.no_grad()
def positions(
    model: Model,
    tokenizer: Any = None,
    text: Text = "",
    *,
    top: int = 10,
    replace_at: int | None = None,
    replace_with: int | str | None = None,
) -> Positions:
    """Return the prediction at each position of a text, and the loss of the true next token.

    `model` is a GPT, a path, a run directory, a hub name or transformers' GPT-2; `tokenizer` None
    takes the one at the path; `text` may be ids (T,). `top` predictions are listed.

    `replace_at=j` replaces token j by `replace_with`, an id or a token's text (default: the next
    id), and reports how far each position's logits move. No earlier prediction changes.

    Raises `UserError` for an empty text, one longer than the context, ids out of range, and
    `replace_with` alone.
    """
    if replace_with is not None and replace_at is None:
        raise UserError(
            "needs the position of the token that it replaces (replace_at)", option="replace_with"
        )
    inputs = open_input(model, tokenizer, text)
    gpt, ids, targets = inputs.model, inputs.ids, inputs.targets
    statistics: dict[str, Tensor] = {}
    with eval_mode(gpt):
        h = gpt.body(ids)
        replaced, other = None, h
        if replace_at is not None:
            replaced, other = _replace_token(inputs, replace_at, replace_with)
        for rows in chunks(ids.shape[1]):
            logits = logits_of(gpt, h[:, rows])
            chunk = measure(logits, targets[rows], top)
            chunk["entropy_bits"] = entropy_bits(logits.softmax(-1))
            if replaced is not None:
                moved = logits_of(gpt, other[:, rows])
                same = moved == logits  # where both are -inf, their difference is NaN
                chunk["max_abs_change"] = (moved - logits).masked_fill(same, 0).abs().amax(-1)
            write_chunk(statistics, targets.shape, rows, chunk)
    columns = {name: numpy(values) for name, values in statistics.items()}
    surprisal = -columns["logprob"] / np.log(2).astype(columns["logprob"].dtype)
    nats = -columns["logprob"][:-1].astype(np.float64)
    others = [columns["top_ids"], *([] if replaced is None else [np.array(replaced[1:])])]
    return Positions(
        **({"max_abs_change": None} | inputs.text(*others) | columns),
        target=numpy(targets),
        surprisal_bits=surprisal,
        loss=float(nats.mean()) if len(nats) else math.nan,
        bits_per_byte=float(nats.sum()) / math.log(2) / _bytes(inputs),
        next=ids.shape[1] - 1,
        replaced=replaced,
    )


def _replace_token(
    inputs: InspectionInput, at: int, other: int | str | None
) -> tuple[tuple[int, int, int], Tensor]:
    """Return position, old and new id, and the body's output (1, T, D) for the changed text."""
    at, size = index(at, inputs.ids.shape[1], "replace_at"), inputs.model.config.vocab_size
    ids, old = inputs.ids.clone(), int(inputs.ids[0, at])
    new = (old + 1) % size
    if other is not None:
        new = token_id(other, inputs.tokenizer, size, "replace_with")
    ids[0, at] = new
    return (at, old, new), inputs.model.body(ids)


def _bytes(inputs: InspectionInput) -> float:
    """Return the number of bytes of the targets; NaN for none, or without a tokenizer."""
    if inputs.tokenizer is None:
        return math.nan
    lengths, targets = inputs.tokenizer.byte_lengths(), numpy(inputs.ids[0, 1:])
    return float(lengths[targets[targets < len(lengths)]].sum()) or math.nan


@dataclass(frozen=True, kw_only=True, repr=False)
class Dot(Result):
    """One prediction as dot products, logit_i = h . e_i = |h| |e_i| cos, of k tokens.

    Subtracting the mean row from all rows changes norms and cosines, but no probability. So both
    are given for the rows e_i and for the centred rows c_i = e_i - mean row. h_norm * centred_norm
    * centred_cos is the logit minus its part that is common to all tokens.
    """

    matrix: str  # name of the matrix that predicts, whose rows are e_i
    does: str  # "reads and predicts", or "predicts" in an untied model
    position: int  # where the prediction is made
    piece: str  # the token read there
    h_norm: float  # |h|, after the final norm
    ids: np.ndarray  # (k,)
    pieces: tuple[str, ...]  # their text
    logit: np.ndarray  # (k,) = bias_part + gain_part + head_bias
    row_norm: np.ndarray  # (k,) |e_i|
    cos: np.ndarray  # (k,) of h and e_i
    centred_norm: np.ndarray  # (k,) |c_i|
    centred_cos: np.ndarray  # (k,) of h and c_i
    bias_part: np.ndarray  # (k,) b . e_i: by the final norm's bias, the same in every context
    gain_part: np.ndarray  # (k,) (g * normalised state) . e_i: what the context adds
    head_bias: np.ndarray  # (k,) 0 for a plain head
    prob: np.ndarray  # (k,)
    rank_cos: np.ndarray  # (k,) rank by cos among all V, from 1
    all_norm: np.ndarray  # (V,) |e_i|
    all_cos: np.ndarray  # (V,)
    all_centred_norm: np.ndarray  # (V,) |c_i|
    all_centred_cos: np.ndarray  # (V,)
    row_read: np.ndarray  # (D,) of the token at the position, in the matrix that reads
    row_place: np.ndarray  # (D,) of the position; it is added to the token's row
    h: np.ndarray  # (D,) what the body makes of the text so far, after the final norm
    rows: np.ndarray  # (k, D) e_i of the likeliest: logit = sum of h * rows, and head_bias

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        rows = number_table(
            ("token", token_cells(self.pieces)),
            ("prob", self.prob),
            ("logit", self.logit),
            ("=bias", self.bias_part + self.head_bias),
            ("+gain", self.gain_part),
            ("|e|", self.row_norm),
            ("cos", self.cos),
            ("#cos", self.rank_cos),
            ("|c|", self.centred_norm),
            ("cos c", self.centred_cos),
        )
        return (
            f"after token {self.position}, {visible(self.piece)}: logit = h . e = |h| |e| cos; "
            f"|h| = {number_cell(self.h_norm)}\n"
            f"e is a row of {self.matrix}, which {self.does}; c is e minus the mean row\n"
            f"{rows}\n\n"
            "bias: the same in every context; gain: depends on the context; #cos: rank by cos\n"
            "subtracting the mean row from all rows changes |e| and cos, and no probability"
        )

    @override
    def figure(self) -> Figure:
        panels = [
            self._cloud("e", "rows e as they are", self.all_norm, self.all_cos),
            self._cloud(
                "c", "rows c, minus their mean", self.all_centred_norm, self.all_centred_cos
            ),
        ]
        title = f"after token {self.position}, {visible(self.piece)}: logit = |h| |e| cos"
        return title, [*panels]

    def _cloud(self, sign: str, title: str, norm: np.ndarray, cos: np.ndarray) -> Panel:
        x, y = norm[self.ids], cos[self.ids]
        curves = [
            Line("all tokens", norm.tolist(), cos.tolist(), 0, joined=False),
            Line("the likeliest", x.tolist(), y.tolist(), 1, marked=True, joined=False),
        ]
        lengths, most = np.linspace(norm.max() / 50, norm.max(), 200), float((x * y).max())
        for color, product in enumerate((most, 0.75 * most, 0.5 * most), start=2):
            level = product / lengths
            inside = (level > cos.min()) & (level < cos.max())
            name = f"h . {sign} = {self.h_norm * product:.1f}"
            curves.append(Line(name, lengths[inside].tolist(), level[inside].tolist(), color))
        notes = list(zip(x, y, map(visible, self.pieces), strict=True))[:LABELLED]
        return Panel(title, "norm of the row", tuple(curves), y_label="cos(h, row)", notes=notes)


@torch.no_grad()
def dot(
    model: Model, tokenizer: Any = None, text: Text = "", *, position: int = -1, top: int = 10
) -> Dot:
    """Return the prediction at a position of a text as dot products with the rows of a matrix.

    Arguments as of `positions`; `top` = V lists all tokens. Raises `UserError` as `positions`, and
    for a head that is not linear.
    """
    inputs = open_input(model, tokenizer, text)
    gpt, at = inputs.model, index(position, inputs.ids.shape[1], "position")
    with eval_mode(gpt):
        state = gpt.body(inputs.ids)[:, at : at + 1]
        logits = logits_of(gpt, state).double()
        measured = measure(logits, inputs.targets[:1], top)
        both = vocab_matrices(gpt)
    reads, matrix, read = both[0], both[-1], int(inputs.ids[0, at])
    h, b, centred = upcast(state[0, 0]), final_bias(gpt), matrix.weight - matrix.weight.mean(0)
    norm, centred_norm, tiny = matrix.weight.norm(dim=1), centred.norm(dim=1), 1e-30
    every = {
        "logit": logits[0],
        "prob": logits[0].softmax(-1),
        "row_norm": norm,
        "cos": matrix.weight @ h / (h.norm() * norm + tiny),
        "centred_norm": centred_norm,
        "centred_cos": centred @ h / (h.norm() * centred_norm + tiny),
        "bias_part": matrix.weight @ b,
        "gain_part": matrix.weight @ (h - b),
        "head_bias": matrix.bias,
    }
    ids = measured["top_ids"][0]
    behind = torch.searchsorted(every["cos"].sort().values, every["cos"][ids], right=True)
    pieces = inputs.text(numpy(ids))["words"]
    return Dot(
        matrix=matrix.name,
        does=matrix.does,
        position=at,
        piece=pieces[read],
        row_read=numpy(reads.weight[read]),
        row_place=numpy(gpt.wpe.weight[at]),
        h=numpy(h),
        rows=numpy(matrix.weight[ids]),
        h_norm=float(h.norm()),
        ids=numpy(ids),
        pieces=tuple(pieces[id] for id in ids.tolist()),
        rank_cos=numpy(1 + len(norm) - behind),
        all_norm=numpy(every["row_norm"]),
        all_cos=numpy(every["cos"]),
        all_centred_norm=numpy(every["centred_norm"]),
        all_centred_cos=numpy(every["centred_cos"]),
        **{name: numpy(values[ids]) for name, values in every.items()},
    )

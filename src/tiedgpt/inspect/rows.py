"""The rows of W: their norms, their relation to token frequency, and unreachable tokens.

Raw norms are not identified: subtracting the mean row from all rows changes neither a probability
nor the loss, but every norm. So norms are given raw and centred.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from tiedgpt.data import documents
from tiedgpt.errors import UserError
from tiedgpt.files import format_count
from tiedgpt.inspect.distributions import chunks
from tiedgpt.inspect.inputs import Model, numpy, open_model, piece
from tiedgpt.inspect.results import NOT_IN_JSON, SHOWN_ROWS, Figure, Result
from tiedgpt.inspect.run_files import counts_in, shards_in
from tiedgpt.inspect.vocab_matrices import VocabMatrix, final_bias, finite_vocab_matrices
from tiedgpt.plots.panel import Grid, Line, Panel
from tiedgpt.plots.table import number_table, token_cells
from tiedgpt.runtime import eval_mode
from tiedgpt.text import Tokenizer
from tiedgpt.weights.source import Source

Counts = np.ndarray | str | os.PathLike[str]
"""(V,) how often each token occurs; or a run, a folder of token shards, or a text to count in."""
AT_ONCE = 10_000_000
"""Tokens of a shard that are counted at a time."""
HELD_OUT = 0.2
"""Share of the tokens with counts that the direction is tested on."""
MIN_COUNTED_TOKENS = 20
"""Minimum number of tokens with counts for a trend."""
RIDGE = 1e-3
"""Ridge penalty of the direction, as a share of the rows' mean variance."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One matrix: a row e_i for each of V tokens. c_i is e_i less the mean row.

    `spearman`, `interval` and `slope` tell how norm, centred_norm and prior_logit go with ln count,
    over the tokens that occur; they are empty without counts.
    """

    name: str  # of the parameter
    does: str  # "reads", "predicts", or "reads and predicts"
    norm: np.ndarray  # (V,) |e_i|
    centred_norm: np.ndarray  # (V,) |c_i|
    prior_logit: np.ndarray | None
    """(V,) b . e_i, b the final norm's bias, and the head's own: the part of the logit that is the
    same in every context (Kobayashi et al. 2023). None for a matrix that only reads."""
    spearman: dict[str, float]  # rank correlation, from -1 to 1
    interval: dict[str, tuple[float, float]]  # its 95 % interval (Bonett and Wright 2000)
    slope: dict[str, float]  # least squares, per e-fold of the count
    direction: np.ndarray | None
    """(D,) direction . c_i + constant estimates ln count, by ridge regression (Cho et al. 2024 find
    that one direction writes it); None without counts."""
    ln_count: np.ndarray | None  # (V,) what the direction estimates; None without counts
    r2_heldout: float  # share of ln count's variance it explains, for tokens held out; or NaN
    pca: np.ndarray  # (V, 2) the rows along their first two principal components
    pca_share: np.ndarray  # (2,) share of the rows' variance
    own_rank_ids: np.ndarray  # (n,) the tokens that were asked for `own_rank`
    own_rank: np.ndarray
    """(n,) rank of token i among all if h were e_i, from 1. A row whose rank is 1 can win; one
    inside the convex hull of the others never does (Demeter et al. 2020)."""

    def trends(self) -> str:
        """Return the trends with frequency, and the share of tokens that predict themselves."""
        text = ""
        if self.spearman:
            rows = number_table(
                ("with ln count", self.spearman),
                ("spearman", self.spearman.values()),
                ("from", [low for low, _ in self.interval.values()]),
                ("to", [high for _, high in self.interval.values()]),
                ("slope", self.slope.values()),
            )
            share = max(0.0, self.r2_heldout)
            text = (
                f"{rows}\nfrom, to: the 95 % interval of spearman, the rank correlation\n"
                f"one direction explains {share:.0%} of ln count on held-out tokens\n"
            )
        if len(self.own_rank):
            wins, n = (self.own_rank == 1).mean(), len(self.own_rank)
            text += f"{wins:.0%} of {n:,} tokens are the likeliest if h is their own row\n"
        return text

    def panels(self, count: np.ndarray | None) -> list[Panel]:
        """Return the norms by count, and the rows along their two main directions."""
        columns = {"norm of the row": self.norm, "norm of the centred row": self.centred_norm}
        if self.prior_logit is not None:
            columns["prior logit, nats"] = self.prior_logit
        panels = []
        count = np.zeros(len(self.norm)) if count is None else count
        for name, column in columns.items() if count.any() else ():
            xs, ys = count[count > 0].tolist(), column[count > 0].tolist()
            cloud = Line(name, xs, ys, joined=False)
            title = f"{self.name}: {name}"
            panels.append(Panel(title, "count of the token", (cloud,), log_x=True, y_label=name))
        x, y = (f"component {n + 1}, {s:.0%} of the variance" for n, s in enumerate(self.pca_share))
        xs, ys = self.pca.T.tolist()
        cloud = Line("tokens", xs, ys, joined=False)
        return [*panels, Panel(f"{self.name}: main directions", x, (cloud,), y_label=y)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Vocabulary(Result):
    """All tokens, and one matrix if the model is tied; else that which reads, then the other."""

    matrices: tuple[Rows, ...]
    count: np.ndarray | None  # (V,) of each token, if counts were given or lie in the run
    counted_in: str | None  # where it was counted
    unseen: np.ndarray | None  # (n,) ids with a count of 0
    reachable: np.ndarray | None  # (V,) whether the token's text is encoded as this token
    fragment: np.ndarray | None  # (V,) whether it is part of a character: never encoded alone
    pieces: tuple[str, ...] = field(metadata=NOT_IN_JSON)  # (V,) the tokens' text; not in the JSON

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        parts = [self._matrix_table(matrix, top) for matrix in self.matrices]
        counts = "no counts: --counts compares the rows with token frequency"
        if self.unseen is not None:
            counts = f"not in {self.counted_in}: {format_count(len(self.unseen), 'token')}"
        unknown = "" if self.reachable is not None else "; no tokenizer: reached is not known"
        return "\n".join(
            [
                *parts,
                "",
                "prior logit: e . b, where b is the final norm's bias: the same in every context",
                "reached: whether some text is encoded as this token; as part: of a character",
                "",
                counts + unknown,
            ]
        )

    def _matrix_table(self, matrix: Rows, top: int) -> str:
        size = len(self.pieces)
        order = matrix.centred_norm.argsort()[::-1]
        order = order if 2 * top >= size else np.r_[order[:top], order[-top:]]
        columns = {
            "count": self.count,
            "|e|": matrix.norm,
            "|c|": matrix.centred_norm,
            "prior logit": matrix.prior_logit,
        }
        rows = number_table(
            ("id", map(str, order)),
            ("token", token_cells((self.pieces[id] for id in order), 20)),
            *((name, column[order]) for name, column in columns.items() if column is not None),
            ("reached", [self._reach(id) for id in order]),
        )
        head = f"{matrix.name} {matrix.does}: {size:,} rows e; c is e minus the mean row"
        which = "longest and shortest rows"
        if len(order) == size:
            which += ", all of them"
        return f"{head}\n{matrix.trends()}\n{which}\n{rows}"

    def _reach(self, id: int) -> str:
        if self.reachable is None or self.fragment is None:
            return "-"
        return "yes" if self.reachable[id] else "as part" if self.fragment[id] else "no"

    @override
    def figure(self) -> Figure:
        panels: list[Panel | Grid] = []
        for matrix in self.matrices:
            panels += matrix.panels(self.count)
        return f"{len(self.pieces):,} tokens", panels


@torch.no_grad()
def vocabulary(
    model: Model,
    tokenizer: Any = None,
    *,
    counts: Counts | None = None,
    own_rank_rows: int | None = 1024,
) -> Vocabulary:
    """Return the rows of each matrix, and their relation to token frequency.

    `model` and `tokenizer` are those of `positions`; fields that need a tokenizer or counts are
    None, NaN or empty without them. If `counts` is None and `model` is a run, the run's training
    data are counted. `own_rank_rows` is the number of evenly spaced tokens in `own_rank`; None
    ranks all tokens, which takes V^2 D multiplications.

    Raises `UserError` for counts of another vocabulary and for a nonlinear head.
    """
    model = model if isinstance(model, nn.Module) else Source.of(model)
    gpt, tokenizer = open_model(model, tokenizer)
    size, where = gpt.config.vocab_size, "the counts given"
    if counts is None and isinstance(model, Source):
        counts = counts_in(model)
    if isinstance(counts, (str, os.PathLike)):
        where = os.fspath(counts)
        counts = _counted(where, tokenizer, size)
    counts = None if counts is None else np.asarray(counts)
    if counts is not None and not (
        counts.shape == (size,)
        and np.issubdtype(counts.dtype, np.number)
        and np.isfinite(counts).all()
        and counts.min() >= 0
    ):
        raise UserError(
            f"must be ({size},) numbers, each >= 0, got {counts.dtype} {counts.shape}",
            option="counts",
        )
    n = size if own_rank_rows is None else min(own_rank_rows, size)
    if n < 0:
        raise UserError(f"must be >= 0, got {n}", option="own_rank_rows")
    sample = torch.linspace(0, size - 1, n, dtype=torch.float64, device="cpu").long()
    with eval_mode(gpt):
        bias = final_bias(gpt)
        matrices = [_rows(x, bias, counts, sample) for x in finite_vocab_matrices(gpt)]
    pieces = tuple(piece(tokenizer, id) for id in range(size))
    return Vocabulary(
        matrices=tuple(matrices),
        count=counts,
        counted_in=None if counts is None else where,
        unseen=None if counts is None else np.flatnonzero(counts == 0),
        reachable=None if tokenizer is None else _reachable(tokenizer, size),
        fragment=None
        if tokenizer is None
        else np.array([x.startswith("bytes:\\x") for x in pieces]),
        pieces=pieces,
    )


def _rows(matrix: VocabMatrix, b: Tensor, counts: np.ndarray | None, sample: Tensor) -> Rows:
    centred = matrix.weight - matrix.weight.mean(0)
    variances, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending
    axes = vectors[:, -2:].flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # eigh's are free
    numbers = {"norm": numpy(matrix.weight.norm(dim=1)), "centred_norm": numpy(centred.norm(dim=1))}
    if matrix.does != "reads":
        numbers["prior_logit"] = numpy(matrix.weight @ b + matrix.bias)
    direction, ln_count, r2_heldout = _direction(centred, counts)
    trends = {} if direction is None else {n: trend(x, counts) for n, x in numbers.items()}
    return Rows(
        name=matrix.name,
        does=matrix.does,
        norm=numbers["norm"],
        centred_norm=numbers["centred_norm"],
        prior_logit=numbers.get("prior_logit"),
        spearman={name: rho for name, (rho, _, _) in trends.items()},
        interval={name: interval for name, (_, interval, _) in trends.items()},
        slope={name: slope for name, (_, _, slope) in trends.items()},
        direction=direction,
        ln_count=ln_count,
        r2_heldout=r2_heldout,
        pca=numpy(centred @ axes),
        pca_share=numpy(variances[-2:].flip(0) / variances.sum().clamp(min=1e-30)),
        own_rank_ids=numpy(sample),
        own_rank=_own_rank(matrix.weight, sample.to(matrix.weight.device)),
    )


def _own_rank(weight: Tensor, ids: Tensor) -> np.ndarray:
    ranks = torch.zeros_like(ids)
    for rows in chunks(len(ids)):
        logits = weight[ids[rows]] @ weight.T
        ranks[rows] = 1 + (logits > logits.gather(1, ids[rows, None])).sum(1)
    return numpy(ranks)


def _direction(
    centred: Tensor, counts: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None, float]:
    """Fit direction . c_i + constant to ln count.

    Returns the direction, the estimates (V,), and R^2 for the tokens held out.
    """
    if counts is None or (counts > 0).sum() < MIN_COUNTED_TOKENS:
        return None, None, math.nan
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(len(counts), generator=generator, device="cpu")
    seen, held_out = torch.from_numpy(counts > 0), draws < HELD_OUT
    y = torch.from_numpy(np.log(np.maximum(counts, 1))).to(centred)
    train, test = (seen & ~held_out).to(y.device), (seen & held_out).to(y.device)
    x, level = centred[train], y[train].mean()
    middle = x.mean(0)
    products = torch.addr(x.T @ x, middle, middle, alpha=-len(x))
    products.diagonal().add_(RIDGE * products.trace() / len(products) + 1e-30)
    direction = torch.linalg.solve(products, (x - middle).T @ (y[train] - level))
    estimates = level + (centred - middle) @ direction
    variance = y[test].var(correction=0)
    r2_heldout = float(1 - (y - estimates)[test].square().mean() / variance)
    return numpy(direction), numpy(estimates), r2_heldout


def trend(number: np.ndarray, counts: Any) -> tuple[float, tuple[float, float], float]:
    """Return Spearman's rho, its interval, and the slope, of numbers against ln count."""
    x, y = np.log(counts[counts > 0]), number[counts > 0].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN where all counts are equal
        rho = float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])
        slope = float(((x - x.mean()) * y).sum() / np.square(x - x.mean()).sum())
        half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
        low, high = np.tanh(np.arctanh(rho) + np.array([-half, half]))
    return rho, (float(low), float(high)), slope


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values share their mean rank."""
    _, inverse, times = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(times) - (times - 1) / 2)[inverse]


def _reachable(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """Return (V,) whether a token's text is encoded as this token."""
    reachable = np.zeros(size, bool)
    for id in range(min(size, len(tokenizer))):
        with contextlib.suppress(UserError):  # no token, or one that characters do not make
            reachable[id] = tokenizer.encode(tokenizer.decode([id])) == [id]
    return reachable


def _counted(source: str, tokenizer: Tokenizer | None, size: int) -> np.ndarray:
    """Return how often each of `size` tokens occurs in token shards or texts."""
    if shards := shards_in(source):
        ends = [*range(0, len(shards), AT_ONCE), len(shards)]
        arrays: Any = (shards.read(*between) for between in itertools.pairwise(ends))
    elif tokenizer is None:
        raise UserError(
            f"counting in {source} needs a tokenizer", hint="give it, or a folder of shards"
        )
    else:
        arrays = (tokenizer.encode_array(document.text) for document in documents([source]))
    counts = np.zeros(size, np.int64)
    for ids in arrays:
        some = np.bincount(ids, minlength=size)
        if len(some) > size:
            raise UserError(
                f"{source} has token {len(some) - 1}, the model only {size:,}: they do not belong "
                "together"
            )
        counts += some
    return counts

"""Steps of plain SGD on one text, and the rows of W that they move.

W has a gradient from reading (h_0 = W[ids]) and a gradient from predicting (logits = h W^T). A tied
W moves by -lr times their sum; of two matrices, each moves by its own gradient.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiedgpt.core.loss import IGNORED
from tiedgpt.core.model import GPT
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.files import format_bytes
from tiedgpt.inspect.distributions import chunks, upcast
from tiedgpt.inspect.gradients import split_backward, vocab_parameters
from tiedgpt.inspect.inputs import Model, Text, index, numpy, open_input
from tiedgpt.inspect.results import SHOWN_ROWS, Figure, Result, lines
from tiedgpt.inspect.run_files import stored_opening
from tiedgpt.plots.panel import Panel
from tiedgpt.plots.table import number_table, token_cells, visible
from tiedgpt.runtime import free_memory
from tiedgpt.tie import untie
from tiedgpt.tie.heads import require_gpt
from tiedgpt.weights.source import Source

CHOICES = {"predict": ("all", "last"), "train": ("all", "head", "blocks")}
"""Values of two options: the predictions to learn from, and the parameters to train."""
DEFAULT_LR = 0.1
"""Default learning rate: with it the loss of most texts falls, and the rows move visibly."""
STATISTICS = ("reading", "predicting", "together", "cosine", "pull", "twin_cosine", "twin_distance")
"""Statistics of a row; `Learning` says which."""
FORWARDS_PER_STEP = 4
"""Time of a step in forward passes: two of them, and a backward pass of about two."""
COPIES = 3
"""Memory of a step in models: the copy, and the gradients through the head and the body."""
MATRICES = 4
"""Memory of a step in matrices (V, D) beside the models: both changes, and their products."""
LIKELY = 10
"""Number of likely tokens to list, before the first step and after the last."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Learning(Result):
    """The state before the first of S steps and after each.

    The change of a row is the sum over the steps so far, and 0 before the first. It has two parts:
    that of the matrix that reads, and that of the matrix that predicts.
    """

    reads: str  # name of the matrix that reads
    predicts: str  # name of the matrix that predicts: the same one in a tied model
    predict: str  # predictions that were learned from: "all" or "last"
    train: str  # trained parameters: "all", "head" or "blocks"
    lr: float
    ids: np.ndarray  # (T,) the text's tokens
    pieces: tuple[str, ...]
    words: dict[int, str]  # the text of every id
    loss: np.ndarray  # (S + 1,) mean over the text's T - 1 predictions, in nats
    learned_loss: np.ndarray  # (S + 1,) the loss that the steps reduce
    other: str | None  # the text that is not learned
    other_loss: np.ndarray | None  # (S + 1,) mean over its predictions, in nats
    position: int  # position of the prediction that is shown
    likely: np.ndarray  # (m,) the likeliest tokens there, before or after
    likely_prob: np.ndarray  # (S + 1, m)
    rows: np.ndarray  # (k,) ids of the rows that moved most, and of the text's; farthest first
    reading: np.ndarray  # (S + 1, k) length of the change by reading
    predicting: np.ndarray  # (S + 1, k) length of the change by predicting
    together: np.ndarray | None  # (S + 1, k) length of their sum; None for two matrices
    cosine: np.ndarray  # (S + 1, k) of the two parts; NaN if one is 0
    pull: np.ndarray  # (S + 1, k) times that the token came next, less the predicted times
    logit: np.ndarray  # (S + 1, k) of the row's token at the position
    prob: np.ndarray  # (S + 1, k)
    twin_cosine: np.ndarray | None  # (S + 1, k) of a token's two rows; None for one matrix
    twin_distance: np.ndarray | None  # (S + 1, k) between a token's two rows
    all_reading: np.ndarray  # (V,) change of every row by reading, after the last step
    all_predicting: np.ndarray  # (V,) by predicting
    diverged: bool  # whether the loss was not finite after one more step
    try_lr: float | None  # the learning rate to try then

    def table(self, top: int = SHOWN_ROWS) -> str:
        """Return the losses, the rows that moved most, and the prediction at the position."""
        losses = {"this text": self.loss}
        if self.predict == "last":
            losses["its last prediction"] = self.learned_loss
        if self.other_loss is not None:
            losses["the other text"] = self.other_loss
        parts = [self.describe(), number_table(("step", range(len(self.loss))), *losses.items())]
        parts[1] = f"mean loss, in nats\n{parts[1]}"
        if len(self.loss) > 1:
            parts.append(self._tabulate_rows())
        order = self.likely_prob[-1].argsort()[::-1][:LIKELY]
        likely = number_table(
            ("next token", token_cells(self.words[id] for id in self.likely[order])),
            ("prob before", self.likely_prob[0, order]),
            ("after", self.likely_prob[-1, order]),
        )
        parts.append(f"the prediction at position {self.position}\n{likely}")
        return "\n\n".join(parts)

    def describe(self) -> str:
        """Return a sentence on the training, and one on the rows of the text's last token."""
        n_steps = len(self.loss) - 1
        trained = {
            "all": "all parameters",
            "head": f"{self.predicts} alone",
            "blocks": "the blocks",
        }
        answers = {"all": "every position", "last": "the last position alone"}
        text = (
            f"{n_steps} step{'s' * (n_steps != 1)} of SGD (learning rate {self.lr:g}) on "
            f"{trained[self.train]}, from {answers[self.predict]}"
        )
        if self.diverged:
            text += f"\nstep {n_steps + 1} diverged: the loss is not finite; try {self.try_lr:g}"
        if not n_steps:
            return text
        row = self.rows.tolist().index(self.ids[-1])
        word = visible(self.words[self.rows[row]], 24)
        if self.train == "blocks":
            return f"{text}\nno row of W moved"
        if self.twin_cosine is None:
            return f"{text}\none matrix: the row of {word} that predicts is also read"
        angle = math.degrees(math.acos(min(1.0, float(self.twin_cosine[-1, row]))))
        return f"{text}\ntwo matrices: the two rows of {word} are {angle:.2g} degrees apart"

    def _tabulate_rows(self) -> str:
        """Return the changes of the rows after the last step."""
        columns: dict[str, Any] = {
            "id": map(str, self.rows),
            "token": token_cells((self.words[id] for id in self.rows), 14),
            "reading": self.reading[-1],
            "predicting": self.predicting[-1],
        }
        if self.together is not None:
            columns["together"] = self.together[-1]
        if self.twin_distance is not None:
            columns["apart"] = self.twin_distance[-1]
        columns |= {"cosine": self.cosine[-1], "pull": self.pull[-1]}
        columns |= {"before": self.prob[0], "after": self.prob[-1]}
        matrices = self.reads if self.together is not None else f"{self.reads}, {self.predicts}"
        return (
            f"length of the change of rows, in {matrices}\n{number_table(*columns.items())}\n"
            "cosine: of the two parts; pull: times the token came, less the predicted times\n"
            f"before, after: the token's probability at position {self.position}"
        )

    def figure(self) -> Figure:
        """Return the losses by step, and both parts of the change of the rows."""
        losses = {"this text": self.loss}
        if self.other_loss is not None:
            losses["the other text"] = self.other_loss
        panels = [Panel("mean loss", "step", lines(losses), y_label="nats")]
        changes = {"by reading": self.reading[-1], "by predicting": self.predicting[-1]}
        points = lines(changes, joined=False)
        names = [visible(self.words[id]) for id in self.rows]
        title = "change of the rows"
        panels.append(Panel(title, "token", points, y_label="length", x_names=names))
        return self.describe().splitlines()[0], [*panels]


def learn(
    model: Model,
    tokenizer: Any = None,
    text: Text = "",
    *,
    steps: int = 1,
    lr: float = DEFAULT_LR,
    predict: Literal["all", "last"] = "all",
    train: Literal["all", "head", "blocks"] = "all",
    untied: bool = False,
    other: str | None = None,
    position: int = -2,
    top: int = 10,
    max_seconds: float = math.inf,
) -> Learning:
    """Take steps of plain SGD on a text in a copy of the model, and return the changes.

    The steps reduce the mean loss of all predictions, or of the last one with a known answer
    (`predict="last"`). They train all parameters, the matrix that predicts (`train="head"`) or the
    blocks. A tied model also reads with the matrix that predicts; with `untied`, the copy first
    gets a separate head with equal values. `other` is a text that is not learned, by default a
    run's held-out opening. `position` is the prediction to show, by default the last with a known
    answer. `top` rows are listed beside the text's. Dropout is off, and half precision is trained
    in fp32. A loss that is not finite ends the steps: see `Learning.diverged`.

    Other arguments are those of `positions`. Raises the errors of `positions`, and `UserError` for
    a single token, for an adapter on W, and for a step that would take more than `max_seconds`.
    Raises `NoRoomError` if the copy does not fit into memory.
    """
    _require_options({"steps": steps, "top": top}, lr, {"predict": predict, "train": train})
    model = model if isinstance(model, torch.nn.Module) else Source.of(model)
    inputs = open_input(model, tokenizer, text)
    if other is None and isinstance(model, Source):
        other = stored_opening(model, inputs.tokenizer)
    ids, n_tokens = inputs.ids, inputs.ids.shape[1]
    if n_tokens < 2:
        raise UserError("the text has one token: it has nothing to predict", hint="add a word")
    position = index(position, n_tokens, "position")
    others = None if other is None else open_input(inputs.model, inputs.tokenizer, other, least=2)
    learner = _Learner(
        _copy(require_gpt(inputs.model), untied),
        ids,
        None if others is None else others.ids,
        learned=slice(-1, None) if predict == "last" else slice(None),
        train=train,
        lr=lr,
        position=position,
    )
    started = time.perf_counter()
    states = [learner.observe()]
    seconds = FORWARDS_PER_STEP * (time.perf_counter() - started)
    if steps and seconds > max_seconds:
        raise UserError(
            f"a step would take about {seconds:.3g} s, more than {max_seconds:g} s",
            hint="give a shorter text, or run `tiedgpt inspect learn`, which has no limit",
        )
    if not math.isfinite(states[0].loss):
        raise UserError("the loss is not finite: the weights hold nan or inf, or overflow")
    for _ in range(steps):
        learner.step(states[-1])
        state = learner.observe()
        if not math.isfinite(state.loss):
            break
        states.append(state)
    rows, likely = _choose_rows(states[-1], ids[0], top), _choose_likely(states)
    statistics: dict[str, Any] = {name: _stack(states, name, rows) for name in STATISTICS}
    logits, is_diverged = torch.stack([state.logits for state in states]), len(states) <= steps
    return Learning(
        reads=next(iter(learner.matrices)),
        predicts=list(learner.matrices)[-1],
        predict=predict,
        train=train,
        lr=lr,
        **inputs.text(numpy(rows), numpy(likely)),
        loss=np.array([state.loss for state in states]),
        learned_loss=np.array([state.learned_loss for state in states]),
        other=other,
        other_loss=None if others is None else np.array([state.other_loss for state in states]),
        position=position,
        likely=numpy(likely),
        likely_prob=numpy(logits.softmax(-1)[:, likely]),
        rows=numpy(rows),
        **statistics,
        logit=numpy(logits[:, rows]),
        prob=numpy(logits.softmax(-1)[:, rows]),
        all_reading=numpy(states[-1].reading),
        all_predicting=numpy(states[-1].predicting),
        diverged=is_diverged,
        try_lr=min(DEFAULT_LR, lr / 10) if is_diverged else None,
    )


def _require_options(counts: dict[str, int], lr: float, choices: dict[str, str]) -> None:
    """Raise `UserError` for an option that is out of range."""
    for name, count in counts.items():
        if count < 0:
            raise UserError(f"must be at least 0, got {count}", option=name)
    if not 0 < lr < math.inf:
        raise UserError(f"must be positive and finite, got {lr}", option="lr")
    for name, choice in choices.items():
        if choice not in CHOICES[name]:
            allowed = ", ".join(CHOICES[name])
            raise UserError(f"must be one of {allowed}, got {choice!r}", option=name)


@dataclass(frozen=True, kw_only=True)
class _State:
    """The losses, the logits (V,) at the position, and the statistics (V,) of all rows."""

    loss: float
    learned_loss: float
    other_loss: float
    logits: Tensor
    expected: Tensor
    """(V,) how often the learned predictions expect each token."""
    reading: Tensor
    predicting: Tensor
    together: Tensor | None
    cosine: Tensor
    pull: Tensor
    twin_cosine: Tensor | None
    twin_distance: Tensor | None


class _Learner:
    """A model in training, and the sums of both parts of the change of its rows."""

    def __init__(
        self, gpt: GPT, ids: Tensor, other: Tensor | None, *,
        learned: slice, train: str, lr: float, position: int,
    ) -> None:  # fmt: skip
        self.gpt, self.ids, self.other, self.position = gpt, ids, other, position
        self.matrices = vocab_parameters(gpt)
        groups: dict[str, Any] = {
            "all": gpt.parameters(),
            "head": [list(self.matrices.values())[-1]],
            "blocks": gpt.h.parameters(),
        }
        self.trained: list[Tensor] = [one.requires_grad_() for one in groups[train]]
        self.optimizer, self.lr = torch.optim.SGD(self.trained, lr=lr), lr
        self.targets = torch.full_like(ids[0, 1:], IGNORED)
        self.targets[learned] = ids[0, 1:][learned]
        self.came = torch.bincount(ids[0, 1:][learned], minlength=len(gpt.wte.weight))
        self.read, self.predict = (torch.zeros_like(gpt.wte.weight) for _ in range(2))
        self.pull = torch.zeros_like(gpt.wte.weight[:, 0])

    def step(self, before: _State) -> None:
        """Take one step of SGD, and add both parts of it to the sums."""
        _, by_body, by_head = split_backward(self.gpt, self.ids[:, :-1], self.targets, self.trained)
        reads, predicts = (list(self.matrices.values())[at] for at in (0, -1))
        for parameter, read, predict in zip(self.trained, by_body, by_head, strict=True):
            parts = [grad for grad in (read, predict) if grad is not None]
            parameter.grad = torch.stack(parts).sum(0)
            if parameter is reads and read is not None:
                self.read -= self.lr * read
            if parameter is predicts and predict is not None:
                self.predict -= self.lr * predict
        self.optimizer.step()
        self.pull += self.came - before.expected

    @torch.no_grad()
    def observe(self) -> _State:
        """Measure the losses, the prediction at the position and the rows."""
        gpt, answers, other = self.gpt, self.ids[0, 1:], self.other
        h, is_learned = gpt.body(self.ids), (self.targets != IGNORED).double()[:, None]
        nats, logits = list[Tensor](), self.pull
        expected = torch.zeros_like(self.pull, dtype=torch.float64)
        for some in chunks(len(answers) + 1):
            rows = upcast(gpt.logits(h[:, some])[0])
            if some.start <= self.position < some.stop:
                logits = rows[self.position - some.start]
            logprobs = rows.log_softmax(-1)[: len(answers) - some.start]
            nats.append(-logprobs.gather(-1, answers[some, None])[:, 0])
            expected += (logprobs.exp() * is_learned[some]).sum(0)
        losses = torch.cat(nats).double()
        statistics: dict[str, Any] = self._measure_rows()
        return _State(
            loss=float(losses.mean()) if logits.isfinite().all() else math.nan,
            learned_loss=float(losses[self.targets != IGNORED].mean()),
            other_loss=math.nan if other is None else float(gpt.loss(other[:, :-1], other[:, 1:])),
            logits=logits,
            expected=expected.to(self.pull),
            pull=self.pull.clone(),
            **statistics,
        )

    def _measure_rows(self) -> dict[str, Tensor | None]:
        """Return the statistics (V,) of the rows' changes, and of two matrices' rows."""
        first, last = (list(self.matrices.values())[at] for at in (0, -1))
        twins = first is not last
        reading, predicting = (one.norm(dim=1) for one in (self.read, self.predict))
        cosine = (self.read * self.predict).sum(1) / (reading * predicting)  # NaN if one is 0
        return {
            "reading": reading,
            "predicting": predicting,
            "together": None if twins else (self.read + self.predict).norm(dim=1),
            "cosine": cosine,
            "twin_cosine": F.cosine_similarity(first, last) if twins else None,
            "twin_distance": (first - last).norm(dim=1) if twins else None,
        }


def _copy(model: GPT, untied: bool) -> GPT:
    """Return a copy in fp32 or wider; an `untied` copy has two matrices."""
    device, weight = model.wte.weight.device, model.wte.weight
    n_bytes = sum(parameter.numel() for parameter in model.parameters()) * COPIES
    n_bytes = (n_bytes + MATRICES * weight.numel()) * max(4, weight.itemsize)
    free = free_memory(device)
    if free is not None and n_bytes > free:
        raise NoRoomError(
            f"a step on a copy takes {format_bytes(n_bytes)} of memory, and {format_bytes(free)} "
            "are free",
            hint="take a smaller model, or run `tiedgpt inspect learn` where more memory is free",
        )
    model = copy.deepcopy(model).requires_grad_(False).eval()
    model = model.to(torch.promote_types(weight.dtype, torch.float32))
    if untied and len(vocab_parameters(model)) == 1:
        untie(model)
    return model


def _choose_rows(state: _State, ids: Tensor, top: int) -> Tensor:
    """Return the ids of the text and of the rows that moved most, the farthest first."""
    far = torch.hypot(state.reading, state.predicting)
    moved = far.argsort(descending=True)[:top]
    rows = torch.cat([ids, moved[far[moved] > 0]]).unique()
    return rows[far[rows].argsort(descending=True, stable=True)]


def _choose_likely(states: list[_State]) -> Tensor:
    """Return the ids of the likeliest tokens before or after."""
    ends = [states[at].logits.topk(min(LIKELY, len(states[0].logits))).indices for at in (0, -1)]
    return torch.cat(ends).unique()


def _stack(states: list[_State], name: str, rows: Tensor) -> np.ndarray | None:
    """Return a statistic (S + 1, k) of these rows, or None."""
    values = [getattr(state, name) for state in states]
    return None if values[0] is None else numpy(torch.stack(values)[:, rows])

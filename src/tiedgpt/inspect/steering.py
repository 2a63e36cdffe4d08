"""Directions in the residual stream: found from texts, and added while a model computes.

A direction is the mean state after a layer on some texts, less that on others (Rimsky et al. 2024,
"Steering Llama 2 via Contrastive Activation Addition"). Any other vector (D,) may be one, such as
the difference of two rows of W.

    found = direction("runs/my-1", toward=happy, away=sad, layer=3)
    with steer(model, found.layer, found.vector, strength=2):
        model(ids)                                        # or Engine(model).generate(...)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, split_lines
from tiedgpt.inspect.inputs import Model, index, numpy, open_input, open_model, piece
from tiedgpt.inspect.results import SHOWN_ROWS, Figure, Result, lines
from tiedgpt.inspect.vocab_matrices import vocab_matrices
from tiedgpt.options import read_number
from tiedgpt.plots.panel import Panel
from tiedgpt.plots.table import number_cell, number_table, token_cells
from tiedgpt.runtime import eval_mode
from tiedgpt.signatures import checked


@dataclass(frozen=True, kw_only=True, repr=False)
class Direction(Result):
    """The difference of the mean states of two sets of texts, and its logits for each token."""

    layer: int  # after which the states are
    vector: np.ndarray  # (D,)
    norm: float  # of the vector
    state_norm: float  # mean length of the texts' states
    toward: np.ndarray  # (n,) each text's place along it: 1 is the mean of `toward`, -1 of `away`
    away: np.ndarray  # (m,)
    ids: np.ndarray  # (2, k) the tokens that it raises most, and lowers most, if the head reads it
    push: np.ndarray  # (2, k) row . vector, less the mean of all rows
    words: dict[int, str]  # the text of every id above

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        texts = number_table(
            ("texts", ["toward", "away"]),
            ("number", [len(self.toward), len(self.away)]),
            ("least", [self.toward.min(), self.away.min()]),
            ("greatest", [self.toward.max(), self.away.max()]),
        )
        columns: list[tuple[str, Any]] = []
        for name, ids, push in zip(("raises", "lowers"), self.ids, self.push, strict=True):
            columns += [(name, token_cells(self.words[id] for id in ids[:top])), ("by", push[:top])]
        return (
            f"after layer {self.layer}: length {number_cell(self.norm)}, of the states "
            f"{number_cell(self.state_norm)}\n{texts}\n1 is the mean of toward, -1 of away\n\n"
            f"{number_table(*columns)}\nlogits, if the head read the direction as it is"
        )

    @override
    def figure(self) -> Figure:
        columns = {"toward": np.sort(self.toward), "away": np.sort(self.away)}
        curves = lines(columns)
        panel = Panel("each text", "text, in order", curves, y_label="place along the direction")
        return f"a direction after layer {self.layer}", [panel]


@checked
@torch.no_grad()
def direction(
    model: Model,
    tokenizer: Any = None,
    *,
    toward: str | Sequence[str],
    away: str | Sequence[str],
    layer: int | None = None,
    top: int = 10,
) -> Direction:
    """Return the mean state of some texts less that of others, after a layer.

    `toward` and `away` are lists of texts, or one string with a text a line. A text's state is the
    mean over its positions but the first, whose state hardly depends on it. `layer` is by default
    the middle one; negative ones count from the last. Other arguments as of `positions`. Raises
    `UserError` as `positions`, and where the two means are equal.
    """
    top = read_number("top", top, int, least=1)
    gpt, tokenizer = open_model(model, tokenizer, needed=True)
    n_layer = gpt.config.n_layer
    at = n_layer // 2 if layer is None else index(layer, n_layer, "layer")
    with eval_mode(gpt):
        up = _states_of(gpt, tokenizer, toward, at, "toward")
        down = _states_of(gpt, tokenizer, away, at, "away")
        vector, middle = up.mean(0) - down.mean(0), (up.mean(0) + down.mean(0)) / 2
        norm = float(vector.norm())
        if not norm:
            raise UserError("the two sets of texts have the same mean state", hint="give others")
        matrix = vocab_matrices(gpt)[-1]
    pushes = matrix.weight @ vector.to(matrix.weight)
    pushes -= pushes.mean()
    ends = [pushes.topk(min(top, len(pushes)), largest=largest) for largest in (True, False)]
    ids = numpy(torch.stack([end.indices for end in ends]))
    return Direction(
        layer=at,
        vector=numpy(vector),
        norm=norm,
        state_norm=float(torch.cat([up, down]).norm(dim=-1).mean()),
        toward=numpy((up - middle) @ vector / (norm**2 / 2)),
        away=numpy((down - middle) @ vector / (norm**2 / 2)),
        ids=ids,
        push=numpy(torch.stack([end.values for end in ends])),
        words={int(id): piece(tokenizer, int(id)) for id in ids.flat},
    )


def _states_of(
    model: GPT, tokenizer: Any, texts: str | Sequence[str], layer: int, name: str
) -> Tensor:
    """Return the mean state (n, D) of each text after a layer."""
    documents = split_lines(texts) if isinstance(texts, str) else list(texts)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise UserError("must have at least one text", option=name)
    means = []
    for text in documents:
        states = list(model.states(open_input(model, tokenizer, text).ids))[layer + 1][0]
        means.append(states[min(1, len(states) - 1) :].mean(0))
    return torch.stack(means).to(torch.promote_types(model.wte.weight.dtype, torch.float32))


@checked
@contextmanager
def steer(
    model: GPT,
    layer: int,
    direction: Tensor | np.ndarray | Sequence[float],
    *,
    strength: float = 1.0,
) -> Iterator[GPT]:
    """Add `strength` times a direction (D,) to the state after a layer, at every position.

    The hook is removed when the block ends; several directions add up. An `Engine(model)` on torch
    is steered, too, if the model is in eval mode and the engine is idle when the block begins and
    ends: its cache is then cleared. Raises `UserError` for a model that is not a GPT, a missing
    layer, and a direction of another width.
    """
    at, width = index(layer, model.config.n_layer, "layer"), model.config.n_embd
    weight = model.wte.weight
    vector = torch.as_tensor(direction, device="cpu").detach().to(weight.device, torch.float32)
    if vector.shape != (width,) or not torch.isfinite(vector).all():
        raise UserError(
            f"must be {width} finite numbers, got {tuple(vector.shape)}", option="direction"
        )
    added = (vector * strength).to(weight.dtype)
    hook = model.h[at].register_forward_hook(lambda _, __, state: state + added)
    try:
        yield model
    finally:
        hook.remove()


def read_direction(path: Path) -> tuple[int, np.ndarray]:
    """Return the layer and the vector (D,) in the JSON of a `Direction`.

    Raises `UserError` for a missing file, `CorruptInputError` for other content.
    """
    fields = read_json(path)
    layer, vector = fields.get("layer"), fields.get("vector")
    is_vector = isinstance(vector, list) and all(type(x) in (int, float) for x in vector)
    if type(layer) is not int or not vector or not is_vector:
        hint = "write one with `tiedgpt inspect direction --format json`"
        raise CorruptInputError(f"{path} holds no direction", hint=hint)
    return layer, np.array(vector, np.float32)

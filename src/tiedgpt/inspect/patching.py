"""Activation patching: activations of one text replace those of another.

The model reads a corrupted text. One activation, at one layer and position, is replaced by that of
the clean text, and the later layers are computed from it. An activation that restores the clean
answer carries the difference between the texts (Vig et al. 2020; Meng et al. 2022, "Locating and
Editing Factual Associations in GPT"). Each score is computed exactly, by a separate forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.inspect.distributions import ROWS, logits_of
from tiedgpt.inspect.inputs import Model, Text, numpy, open_input, token_id
from tiedgpt.inspect.layers import replace_activation, run_layers
from tiedgpt.inspect.results import SHOWN_ROWS, Figure, Result, token_axis
from tiedgpt.plots.panel import Grid, Panel
from tiedgpt.plots.table import number_cell, number_table, token_cells, visible
from tiedgpt.runtime import eval_mode

Measure = Callable[[Tensor], Tensor]
PARTS = ("residual", "attention", "mlp", "heads")


@dataclass(frozen=True, kw_only=True, repr=False)
class Patching(Result):
    """The score of an answer after the corrupted text, with one activation of the clean text.

    The score is log P(answer), less log P(wrong) if there is one, in nats, at the last position.
    """

    ids: np.ndarray  # (T,) the clean text's tokens
    corrupted_ids: np.ndarray  # (T,) the corrupted text's
    pieces: tuple[str, ...]  # the clean text's, as text
    words: dict[int, str]  # the text of every id
    answer: int
    wrong: int  # -1 for none
    clean: float  # the score after the clean text
    corrupted: float  # after the corrupted text
    residual: np.ndarray  # (L, T) the state that enters a layer is replaced, at one position
    attention: np.ndarray  # (L, T) what a layer's attention adds is
    mlp: np.ndarray  # (L, T) what its MLP adds is
    heads: np.ndarray  # (L, H) what one head gives c_proj is, at all positions

    def share(self, scores: np.ndarray) -> np.ndarray:
        """Return how much of the difference comes back: 0 as corrupted, 1 as clean."""
        apart = self.clean - self.corrupted
        return (scores - self.corrupted) / (apart if apart else np.nan)

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        layers = range(len(self.mlp))
        columns: list[tuple[str, Any]] = [("layer", layers)]
        for name in PARTS:
            shares = np.nan_to_num(self.share(getattr(self, name)))
            best = shares.argmax(1)
            tokens = [f"{at} {token_cells([self.pieces[at]], 8)[0]}" for at in best]
            columns.append((name, tokens if name == "residual" else best))
            columns.append(("share", shares[layers, best]))
        n_apart = int((self.ids != self.corrupted_ids).sum())
        return (
            f"{self._name_score()}: {number_cell(self.clean)} nats, {number_cell(self.corrupted)} "
            f"corrupted ({n_apart} of {len(self.ids)} tokens differ)\n{number_table(*columns)}\n\n"
            "the position, or head, whose clean activation brings most back, and its share"
        )

    def _name_score(self) -> str:
        named = [id for id in (self.answer, self.wrong) if id >= 0]
        return " - ".join(f"log P({visible(self.words[id], 12)})" for id in named)

    @override
    def figure(self) -> Figure:
        unit, tokens = "share that comes back", token_axis(self.pieces)
        grids: list[Panel | Grid] = []
        for name in PARTS:
            axis = {"x_label": "head"} if name == "heads" else tokens
            values = self.share(getattr(self, name)).tolist()
            grids.append(Grid(name, y_label="layer", unit=unit, values=values, signed=True, **axis))
        return f"activation patching: {self._name_score()}", grids


@torch.no_grad()
def patch(
    model: Model,
    tokenizer: Any = None,
    text: Text = "",
    *,
    corrupted: Text,
    answer: int | str,
    wrong: int | str = -1,
    progress: Callable[[int, int], None] | None = None,
) -> Patching:
    """Return the effect of each activation of a clean text on the answer to a corrupted text.

    `text` is the clean text, `corrupted` one of as many tokens. `answer` is the token after the
    clean text, `wrong` the token after the corrupted text, or -1: an id or the text of one token.
    `progress` is called with the number of layers done and their total. Other arguments and errors
    are those of `positions`; different lengths and an answer of several tokens are a `UserError`.
    """
    clean = open_input(model, tokenizer, text)
    gpt = clean.model
    other = open_input(gpt, clean.tokenizer, corrupted)
    n_tokens, n_other = clean.ids.shape[1], other.ids.shape[1]
    if n_tokens != n_other:
        problem = f"must have the {n_tokens} tokens of the text, got {n_other}"
        hint = "replace words by others of as many tokens"
        raise UserError(problem, option="corrupted", hint=hint)
    size = gpt.config.vocab_size
    right = token_id(answer, clean.tokenizer, size, "answer")
    foil = -1 if wrong == -1 else token_id(wrong, clean.tokenizer, size, "wrong")

    def measure(states: Tensor) -> Tensor:
        """(B, T, D) before the final norm -> (B,)."""
        logprobs = logits_of(gpt, gpt.ln_f(states[None, :, -1])).log_softmax(-1)
        return logprobs[:, right] - (logprobs[:, foil] if foil >= 0 else 0)

    n_layer, n_head, width = gpt.config.n_layer, gpt.config.n_head, gpt.config.head_dim
    each_position = torch.eye(n_tokens, dtype=torch.bool, device=clean.ids.device)[
        ..., None
    ]  # (T, T, 1)
    each_head = torch.eye(n_head, dtype=torch.bool, device=clean.ids.device).repeat_interleave(
        width, 1
    )[:, None]  # (H,1,D)
    masks = {name: each_position for name in PARTS} | {"heads": each_head}
    scores: dict[str, Any] = {p: np.zeros((n_layer, len(mask))) for p, mask in masks.items()}
    with eval_mode(gpt):
        activations = _activations(gpt, clean.ids)
        *entering, last = gpt.states(other.ids)
        for layer, state in enumerate(entering):
            for name, mask in masks.items():
                scores[name][layer] = _patch(
                    gpt,
                    layer,
                    state,
                    name,
                    mask,
                    activations[name][layer],
                    measure,
                )
            if progress is not None:
                progress(layer + 1, n_layer)
        ends = [float(measure(state)[0]) for state in (activations["residual"][-1], last)]
    named = np.array([right, foil if foil >= 0 else right])
    return Patching(
        **clean.text(numpy(other.ids[0]), named),
        corrupted_ids=numpy(other.ids[0]),
        answer=right,
        wrong=foil,
        clean=ends[0],
        corrupted=ends[1],
        **scores,
    )


def _activations(model: GPT, ids: Tensor) -> dict[str, list[Tensor]]:
    """Return the activations (1, T, D) of each part by layer, and of `residual` the last state."""
    activations: dict[str, list[Tensor]] = {name: [] for name in PARTS}
    with ExitStack() as hooks:
        for layer in range(len(model.h)):
            for name in PARTS[1:]:
                hooks.enter_context(
                    replace_activation(model, layer, name, activations[name].append)
                )
        return activations | {"residual": list(model.states(ids))}


def _patch(
    model: GPT, layer: int, state: Tensor, name: str, masks: Tensor, clean: Tensor, measure: Measure
) -> np.ndarray:
    """Return the scores (B,) of `state` (1, T, D) entering a layer, patched where each mask says.

    masks (B, T or 1, D or 1).
    """
    scores = []
    for mask in masks.split(ROWS):
        states = state.expand(len(mask), -1, -1)
        hook: AbstractContextManager[object] = nullcontext()
        if name == "residual":
            states = torch.where(mask, clean, states)
        else:
            hook = replace_activation(model, layer, name, partial(torch.where, mask, clean))
        scores.append(measure(run_layers(model, layer, states, hook)))
    return numpy(torch.cat(scores))

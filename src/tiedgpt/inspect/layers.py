"""Layers: their predictions (logit lens), their attention weights, and their ablation.

The hidden states come from `model.states`, other activations from hooks on the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from tiedgpt.core.layers import Attention
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.inspect.distributions import (
    chunks,
    entropy_bits,
    kl_bits,
    logits_of,
    measure,
    upcast,
    write_chunk,
)
from tiedgpt.inspect.inputs import Model, Text, index, join, numpy, open_input
from tiedgpt.inspect.results import (
    LABELLED,
    MAX_TEXT_COLUMNS,
    NOT_IN_JSON,
    SHOWN_ROWS,
    Figure,
    Result,
    lines,
    token_axis,
)
from tiedgpt.plots.panel import Grid, Panel
from tiedgpt.plots.table import number_cell, number_table, token_cells, visible
from tiedgpt.runtime import eval_mode


@dataclass(frozen=True, kw_only=True, repr=False)
class Lens(Result):
    """Predictions by S states of the residual stream: S = L + 1, or 2 L + 1 with attentions."""

    layers: tuple[str, ...]  # (S,) after which module: "wte + wpe", "h.0", ...
    ids: np.ndarray  # (T,) the text's tokens
    pieces: tuple[str, ...]  # their text
    top_ids: np.ndarray  # (S, T, k) the likeliest tokens, in order
    top_logprob: np.ndarray  # (S, T, k) in nats
    target_logprob: np.ndarray  # (S, T) of the true next token, in nats; the last position is NaN
    target_rank: np.ndarray  # (S, T) from 1; the last position is 0
    kl_bits: np.ndarray  # (S, T) KL(the model's own prediction || this one)
    state_norm: np.ndarray  # (S, T) length of the state, before the final norm
    position: int  # whose words are watched
    watch: np.ndarray  # (m,) tokens that rank first there in any state, the last state's first
    watch_logprob: np.ndarray  # (S, m) in nats
    words: dict[int, str]  # the text of every id above

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        at = self.position
        columns: list[tuple[str, Any]] = [("state", self.layers)]
        for k in range(min(2, self.top_ids.shape[2])):
            likeliest = token_cells(self.words[id] for id in self.top_ids[:, at, k])
            columns.append((("1st", "2nd")[k], likeliest))
            columns.append(("prob", np.exp(self.top_logprob[:, at, k])))
        rows = number_table(
            *columns,
            ("rank of next", [rank or None for rank in self.target_rank[:, at]]),
            ("KL bits", self.kl_bits[:, at]),
        )
        return (
            f"after token {at}, {visible(self.pieces[at])}: final norm and head on each state\n"
            f"{rows}\n\n"
            "KL: from the model's own prediction\nearly layers were not trained for this head"
        )

    @override
    def figure(self) -> Figure:
        likeliest = self.top_ids[..., 0].tolist()
        texts = [[visible(self.words[id])[:9] for id in row] for row in likeliest]
        grid = Grid(
            "the likeliest next token, by state",
            y_label="state after",
            unit="its probability",
            values=np.exp(self.top_logprob[..., 0]).tolist(),
            texts=texts if len(self.ids) <= MAX_TEXT_COLUMNS else (),
            y_names=self.layers,
            **token_axis(self.pieces),
        )
        names = [visible(self.words[id]) for id in self.watch[:LABELLED].tolist()]
        columns = dict(zip(names, np.exp(self.watch_logprob.T), strict=False))
        watched = Panel(
            f"after token {self.position}, {visible(self.pieces[self.position])}",
            "state after",
            lines(columns),
            y_label="probability",
            x_names=self.layers,
        )
        return "logit lens", [grid, watched]


@torch.no_grad()
def lens(
    model: Model,
    tokenizer: Any = None,
    text: Text = "",
    *,
    top: int = 5,
    position: int = -1,
    after_attention: bool = False,
) -> Lens:
    """Return the prediction of every layer's state by the final norm and the head.

    This is the logit lens (nostalgebraist 2020). The norm's statistics are computed for each state.
    Early layers were not trained for this head: a strange word there may say more of the lens than
    of the layer (Belrose et al. 2023). GPT-1 has no final norm, so the head reads its states
    directly.

    `position` selects the row that `table` shows. `after_attention` adds the states between
    attention and MLP. Other arguments and errors are those of `positions`.
    """
    inputs = open_input(model, tokenizer, text)
    gpt, ids, targets = inputs.model, inputs.ids, inputs.targets
    at = index(position, ids.shape[1], "position")
    with eval_mode(gpt):
        layers, states = _states(gpt, ids, after_attention)
        columns: dict[str, Tensor] = {}
        for rows in chunks(ids.shape[1]):
            last = logits_of(gpt, gpt.ln_f(states[-1][:, rows]))
            for number, state in enumerate(states):
                logits = logits_of(gpt, gpt.ln_f(state[:, rows]))
                chunk = measure(logits, targets[rows], top) | {"kl_bits": kl_bits(last, logits)}
                write_chunk(columns, (len(states), ids.shape[1]), (number, rows), chunk)
        there = [logits_of(gpt, gpt.ln_f(state[:, at : at + 1])) for state in states]
        likeliest = dict.fromkeys(int(one.argmax()) for one in reversed(there))
        watch = torch.tensor([*likeliest], device=ids.device)
        watched = join(logits.log_softmax(-1)[:, watch] for logits in there)
    arrays: dict[str, Any] = {name: numpy(values) for name, values in columns.items()}
    return Lens(
        **inputs.text(numpy(watch), arrays["top_ids"]),
        layers=layers,
        target_logprob=arrays.pop("logprob"),
        target_rank=arrays.pop("rank"),
        **arrays,
        state_norm=join(state.norm(dim=-1) for state in states),
        position=at,
        watch=numpy(watch),
        watch_logprob=watched,
    )


def _states(model: GPT, ids: Tensor, after_attention: bool) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return the names and the states (1, T, D) of the residual stream, in order."""
    between: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        between.append(arguments[0])

    names, states = ["wte + wpe"], list[Tensor]()
    blocks: Any = model.h if after_attention else ()
    with ExitStack() as hooks:
        for block in blocks:
            reader = block.mlp if block.norm == "post" else block.ln_2
            hooks.enter_context(reader.register_forward_pre_hook(keep))
        for number, state in enumerate(model.states(ids), start=-1):
            if between:
                names.append(f"h.{number}.attn")
                states.append(between.pop())
            names += [f"h.{number}"] if states else []
            states.append(state)
    return tuple(names), states


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionMaps(Result):
    """One layer's attention weights, three numbers for every head, and the hidden states.

    The numbers are means over the queries that see more than one key; NaN for a single token.
    """

    ids: np.ndarray  # (T,) the text's tokens
    pieces: tuple[str, ...]  # their text
    words: dict[int, str]  # the text of every id
    layer: int  # whose weights `patterns` are
    patterns: np.ndarray  # (H, T, T) weight of key j for query i; a row sums to 1; 0 for j > i
    queries: np.ndarray  # (H, T, D/H) of the layer: query . key / sqrt(D/H) is a weight's logit
    keys: np.ndarray  # (H, T, D/H)
    entropy: np.ndarray  # (L, H) in bits
    first_share: np.ndarray  # (L, H) weight of the first token
    previous_share: np.ndarray  # (L, H) weight of the token before the query
    states: np.ndarray = field(metadata=NOT_IN_JSON)
    """(L + 1, T, D) the residual stream: transformers' `hidden_states`, but for the last, which
    is before the final norm here. Not in the JSON."""

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        keys = self.patterns[:, -1].argmax(1)
        rows = number_table(
            ("head", range(len(keys))),
            ("entropy, bits", self.entropy[self.layer]),
            ("on the first", self.first_share[self.layer]),
            ("on the previous", self.previous_share[self.layer]),
            ("last attends to", [f"{key} {token_cells([self.pieces[key]])[0]}" for key in keys]),
            ("weight", self.patterns[:, -1].max(1)),
        )
        return f"heads of layer {self.layer}: means over all positions but the first\n{rows}"

    @override
    def figure(self) -> Figure:
        tokens: dict[str, Any] = {"x_label": "key", "y_label": "query"}
        tokens["x_names"] = tokens["y_names"] = list(map(visible, self.pieces))
        heads: dict[str, Any] = {"x_label": "head", "y_label": "layer"}
        grids: list[Panel | Grid] = [
            Grid(f"layer {self.layer}, head {n}", unit="weight", values=weights.tolist(), **tokens)
            for n, weights in enumerate(self.patterns)
        ]
        for title, unit, values in (
            ("entropy of the weights", "bits", self.entropy),
            ("on the first token", "weight", self.first_share),
            ("on the token before", "weight", self.previous_share),
        ):
            grids.append(Grid(title, unit=unit, values=values.tolist(), **heads))
        return "attention: a layer's maps, and means of every head", grids


@torch.no_grad()
def attention(
    model: Model, tokenizer: Any = None, text: Text = "", *, layer: int = 0
) -> AttentionMaps:
    """Return a layer's attention weights, and all hidden states, for a text.

    A negative `layer` counts from the last. Other arguments and errors are those of `positions`.
    """
    inputs = open_input(model, tokenizer, text)
    gpt, selected = inputs.model, index(layer, inputs.model.config.n_layer, "layer")
    selected_heads, numbers = list[Tensor](), list[Tensor]()
    blocks: Any = gpt.h

    def look(attn: Attention, _: nn.Module, __: Any, qkv: Tensor) -> None:
        q, k, weights = _heads(attn, qkv[0])
        if len(numbers) == selected:
            selected_heads.extend((q, k, weights))
        several = weights[:, 1:]  # queries 1 to T - 1
        shares = several[..., 0].mean(1), several.diagonal(dim1=1, dim2=2).mean(1)
        numbers.append(torch.stack([entropy_bits(several).mean(1), *shares]))

    with eval_mode(gpt), ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.attn.c_attn.register_forward_hook(partial(look, block.attn)))
        states = join(gpt.states(inputs.ids))
    entropy, first_share, previous_share = numpy(torch.stack(numbers, 1))
    return AttentionMaps(
        **inputs.text(),
        layer=selected,
        queries=numpy(selected_heads[0]),
        keys=numpy(selected_heads[1]),
        patterns=numpy(selected_heads[2]),
        entropy=entropy,
        first_share=first_share,
        previous_share=previous_share,
        states=states,
    )


def _heads(attn: Attention, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split c_attn's output (T, 3 D) into q, k (H, T, D/H) and softmax(q k^T / sqrt(D/H))."""
    q, k, _ = upcast(qkv).unflatten(-1, (3, attn.n_head, -1)).permute(1, 2, 0, 3)
    seen = torch.ones(len(qkv), len(qkv), dtype=torch.bool, device=qkv.device).tril()
    if attn.window is not None:
        seen = seen.triu(1 - attn.window)
    return q, k, (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf).softmax(-1)


@dataclass(frozen=True, kw_only=True, repr=False)
class Ablation(Result):
    """The change of the loss without one head, attention or MLP at a time."""

    ids: np.ndarray  # (T,) the text's tokens
    mode: str  # what a part's output is replaced by: "zero", or its "mean" over the text
    loss: float  # of the whole model, mean in nats
    heads: np.ndarray  # (L, H) loss without what a head gives c_proj, less `loss`
    attention: np.ndarray  # (L,) the same without a layer's attention, its biases included
    mlp: np.ndarray  # (L,) the same without a layer's MLP, its biases included

    @override
    def table(self, top: int = SHOWN_ROWS) -> str:
        instead = "zero" if self.mode == "zero" else "its mean over the text"
        costliest = [
            "  ".join(f"{h}: {heads[h]:+.3f}" for h in heads.argsort()[::-1][:4])
            for heads in self.heads
        ]
        rows = number_table(
            ("layer", range(len(costliest))),
            ("attention", self.attention),
            ("MLP", self.mlp),
            ("heads, the costliest first", costliest),
        )
        loss = number_cell(self.loss)
        return f"loss {loss} nats, and its change when a part's output is {instead}\n{rows}"

    @override
    def figure(self) -> Figure:
        has_room = self.heads.shape[1] <= MAX_TEXT_COLUMNS
        texts = [[f"{x:+.2f}" for x in row] for row in self.heads] if has_room else ()
        unit, values = "change of the loss, nats", self.heads.tolist()
        heads = Grid("without a head", "head", "layer", unit, values, texts, signed=True)
        layers = [str(layer) for layer in range(len(self.mlp))]
        parts = lines({"attention": self.attention, "MLP": self.mlp})
        layer_parts = Panel(
            "without a layer's attention, or MLP", "layer", parts, y_label=unit, x_names=layers
        )
        instead = {"zero": "zero", "mean": "its mean"}[self.mode]
        title = f"loss {self.loss:.3f} nats; a part's output is replaced by {instead}"
        return title, [heads, layer_parts]


@torch.no_grad()
def ablate(
    model: Model,
    tokenizer: Any = None,
    text: Text = "",
    *,
    mode: Literal["zero", "mean"] = "zero",
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Return the change of the loss without each head, attention and MLP, one at a time.

    `mode` "zero" replaces an output by zero, "mean" by its mean over the text's positions.
    `progress` is called with the number of layers done and their total. Other arguments and errors
    are those of `positions`; a single token is a `UserError`.
    """
    if mode not in ("zero", "mean"):
        raise UserError(f"must be zero or mean, got {mode!r}", option="mode")
    inputs = open_input(model, tokenizer, text, least=2)
    gpt, ids = inputs.model, inputs.ids
    n_layer, n_head, width = gpt.config.n_layer, gpt.config.n_head, gpt.config.head_dim

    def replaced(x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x) if mode == "mean" else torch.zeros_like(x)

    def one_head_each(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (n_head, width)).clone()  # (H, T, H, D/H)
        for head in range(n_head):  # sequence i is without head i
            x[head : head + 1, :, head] = replaced(x[head : head + 1, :, head])
        return x.flatten(2)

    changes = {"heads": one_head_each, "attention": replaced, "mlp": replaced}
    lost = np.zeros((n_layer, n_head + 2))
    with eval_mode(gpt):
        *states, last = gpt.states(ids)
        loss = _losses(gpt, last, ids)[0]
        for layer, state in enumerate(states):
            losses = list[float]()
            for name, change in changes.items():
                rows = state.expand(n_head if name == "heads" else 1, -1, -1)
                hook = replace_activation(gpt, layer, name, change)
                losses += _losses(gpt, run_layers(gpt, layer, rows, hook), ids)
            lost[layer] = np.subtract(losses, loss)
            if progress is not None:
                progress(layer + 1, n_layer)
    return Ablation(
        ids=numpy(ids[0]),
        mode=mode,
        loss=loss,
        heads=lost[:, :n_head],
        attention=lost[:, n_head],
        mlp=lost[:, n_head + 1],
    )


def replace_activation(
    model: GPT, layer: int, name: str, change: Callable[[Tensor], Any]
) -> RemovableHandle:
    """Replace a layer's "heads", "attention" or "mlp" (B, T, D) by the result of `change`.

    The replacement lasts until the returned hook is removed.
    """
    block: Any = model.h[layer]
    if name == "heads":
        return block.attn.c_proj.register_forward_pre_hook(lambda _, x: change(x[0]))
    module: nn.Module = block.attn if name == "attention" else block.mlp
    return module.register_forward_hook(lambda _, __, out: change(out))


def run_layers(
    model: GPT, layer: int, state: Tensor, hook: AbstractContextManager[object]
) -> Tensor:
    """Return the last state for a state (B, T, D) entering a layer, whose hook is then removed."""
    with hook:
        state = model.h[layer](state, layer)
    for later in range(layer + 1, len(model.h)):
        state = model.h[later](state, later)
    return state


def _losses(model: GPT, state: Tensor, ids: Tensor) -> list[float]:
    """(B, T, D) before the final norm -> the mean loss of each sequence, in nats."""
    return [float(model.head_loss(h, ids[0, 1:])) for h in model.ln_f(state)[:, :-1]]

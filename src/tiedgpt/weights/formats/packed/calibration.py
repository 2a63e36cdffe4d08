"""Round to 4 bits, calibrated on text: later weights of a row correct the errors of earlier ones.

Plain rounding takes each weight to the nearest value. Here the columns of a matrix are rounded one
after the other, and each error e is spread over the columns to come, so that the output error
e^T H e is least for the inputs x that the text produces, H = E[x x^T] (GPTQ, Frantar et al. 2022).
The layout is that of plain rounding: int4's panels with one bf16 scale per group of 32 columns.

The shared matrix W has two sides, and both are in its H. In W's row of token v, the error e costs,
to second order and in nats a token,

    as it predicts    E[p_v (1 - p_v) (e^T h)^2] / 2    h: final hidden states; p_v = P(v)
    as it reads       E[[token = v] (e^T g)^2] / 2      g: the loss's gradient at the embedding

where the Fisher information E[g g^T] stands for the loss's curvature. A token is predicted about as
often as it is read, so both grow with the count of v. Within a row only their ratio matters:
H = E[h h^T] + E[g g^T] serves all rows. An untied head has the first part of it, and the W
beside that head has the second.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tiedgpt.core.cache import KVCache
from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.weights.formats.packed.panels import GROUP_SIZE, SCALE_FACTORS
from tiedgpt.weights.load import Progress

N_TOKENS = 32_768
"""Tokens that are read; of a longer text, windows from all of it."""
BATCH_TOKENS = 2048
GRADIENT_SHARE = 4
"""Every fourth window gives gradients: few are needed, and they cost the most."""
DAMPING = 0.01
"""Added to H's diagonal, as a share of its mean: keeps directions that the text lacks in place."""


def calibrate(
    model: GPT, ids: Any, progress: Progress | None = None
) -> tuple[GPT, dict[str, NDArray[np.float32]]]:
    """Return a copy of a plain model whose matrices hold int4's values, and the groups' scales.

    `ids` are token ids (N,), 30,000 or so, like the text that the model will work on. The scales
    (rows, groups) stand under the names of their parameters. W is rounded first, and each block's
    matrices at inputs from rounded blocks before it: later matrices make up for earlier ones, too.
    `progress` is called with the bytes that are rounded, and of all parameters.

    Raises `UserError` for ids that are too few, not integers, or outside the vocabulary, and where
    the model's states are not finite.
    """
    model = _copy(model)
    windows = _windows(model.config, ids)
    scales: dict[str, NDArray[np.float32]] = {}
    done, total = 0, sum(parameter.nbytes for parameter in model.parameters())
    for name, hessian in _hessians(model, windows):
        if not hessian.isfinite().all():
            raise UserError("the model's weights, or its states on this text, are not finite")
        weight = model.get_parameter(name)
        rounded, new_scales = round_matrix(weight, hessian)
        weight.copy_(rounded)
        scales[name], done = new_scales.cpu().numpy(), done + weight.nbytes
        if progress is not None:
            progress(done, total)
    return model, scales


def _hessians(model: GPT, windows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each matrix's name and H, up to a factor; it must be rounded before the next one."""
    batches = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
    some = windows[::GRADIENT_SHARE]
    reads = _gradient_moment(model, some) * (len(windows) / len(some))
    predicts = torch.stack([_moment(model.body(ids)) for ids in batches]).sum(0)
    if model.head is None:
        yield "wte.weight", reads + predicts
    else:
        yield "wte.weight", reads
        yield "head.weight", predicts
    states = [next(model.states(ids)) for ids in batches]
    for layer, block in enumerate(model.h):
        moments: dict[str, Tensor] = {}
        linears = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
        hooks = [m.register_forward_pre_hook(partial(_add, moments, n)) for n, m in linears.items()]
        for x in states:
            block(x, layer)
        for hook in hooks:
            hook.remove()
        for name, moment in moments.items():
            yield f"h.{layer}.{name}.weight", moment
        states = [block(x, layer) for x in states]


def sample_ids(model: GPT, n_tokens: int = N_TOKENS) -> Tensor:
    """Return ids (N,) that a model samples, for a calibration without text.

    Windows begin with the first token of a document, or a random one if none is defined.
    """
    model, generator = _copy(model), torch.Generator().manual_seed(0)
    config, length = model.config, min(model.config.n_positions, n_tokens)
    shape = (-(-n_tokens // length), 1)
    drawn = [torch.randint(config.vocab_size, shape, generator=generator, device="cpu")]
    if config.bos_token_id is not None:
        drawn[0].fill_(config.bos_token_id)
    cache = KVCache.allocate(config, batch_size=shape[0], capacity=length)
    while len(drawn) < length:
        probabilities = model(drawn[-1], cache)[:, -1].softmax(-1)
        drawn.append(torch.multinomial(probabilities, 1, generator=generator))
    return torch.cat(drawn, 1).flatten()


def _copy(model: GPT) -> GPT:
    """Return a copy in fp32 on the CPU that computes without dropout and gradients."""
    return copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False)


def _windows(config: GPTConfig, ids: Any) -> Tensor:
    """Return windows (B, T) of the whole context, evenly spread over the ids."""
    ids = torch.as_tensor(ids, device="cpu")
    is_integer = not (ids.dtype.is_floating_point or ids.dtype.is_complex)
    if ids.ndim != 1 or not (is_integer or len(ids) == 0):
        raise UserError(f"calibration ids must be integers (N,), got {ids.dtype} {ids.shape}")
    least = max(config.n_embd, config.inner_dim)  # fewer inputs than columns leave H singular
    if len(ids) < least:
        raise UserError(
            f"the calibration text has {len(ids):,} tokens and must have at least {least:,}, the "
            f"width of the widest matrix; {N_TOKENS:,} are better"
        )
    length = min(config.n_positions, len(ids))
    n_there = len(ids) // length
    n = min(n_there, -(-N_TOKENS // length))
    chosen = torch.arange(n, device="cpu") * n_there // n
    return ids[: n_there * length].long().view(n_there, length)[chosen]


def _moment(x: Tensor) -> Tensor:
    """(..., D) -> (D, D): the sum of x x^T."""
    x = x.flatten(0, -2)
    return x.T @ x


def _add(moments: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
    """Add a linear layer's inputs to its moment."""
    moments[name] = moments.get(name, 0) + _moment(inputs[0])


def _gradient_moment(model: GPT, windows: Tensor) -> Tensor:
    """Return the sum of g g^T (D, D) over tokens, g the gradient of their window's loss."""
    leaves: list[Tensor] = []

    def as_leaf(_: nn.Module, __: Any, read: Tensor) -> Tensor:
        leaves.append(read.detach().requires_grad_())
        return leaves[-1]

    hook, moments = model.wte.register_forward_hook(as_leaf), []
    for window in windows.split(1):
        loss = model.loss(window[:, :-1], window[:, 1:]) * (window.shape[1] - 1)
        moments.append(_moment(torch.autograd.grad(loss, leaves.pop())[0]))
    hook.remove()
    return torch.stack(moments).sum(0)


def round_matrix(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix (rows, width) to int4's values; return it and its scales (rows, groups).

    `hessian` (width, width) is H = E[x x^T] of its inputs x, or a multiple of that. With U^T U the
    inverse of H and U upper triangular, an error e_j in column j is spread as e_j / U_jj times U_j.
    """
    damping = (DAMPING * hessian.diagonal().mean().double()).clamp_min(1e-30)
    damped = hessian.double() + damping * torch.eye(len(hessian), device=hessian.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    root = torch.linalg.cholesky(inverse, upper=True).float()
    columns, scales = weight.T.clone(), []
    for first in range(0, len(columns), GROUP_SIZE):
        group, rest = slice(first, first + GROUP_SIZE), slice(first + GROUP_SIZE, None)
        columns[group], errors, scale = _round_group(columns[group], root[group, group])
        columns[rest] -= root[group, rest].T @ errors
        scales.append(scale)
    return columns.T, torch.stack(scales, 1)


def _round_group(group: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round (32, rows) by the scale, of several, whose error is least after all is spread.

    Return the values, the errors to spread (32, rows), and the scales (rows,).
    """
    extreme = group.gather(0, group.abs().argmax(0, keepdim=True))  # becomes -8
    scales = (
        (extreme / -8 * torch.tensor(SCALE_FACTORS, device=extreme.device)[:, None])
        .bfloat16()
        .float()
    )
    scales[scales == 0] = 1
    columns = group[:, None].repeat(1, len(scales), 1)  # (32, candidates, rows)
    errors = torch.empty_like(columns)
    for j, spread in enumerate(root):
        rounded = (columns[j] / scales).round_().clamp_(-8, 7) * scales
        errors[j] = (columns[j] - rounded) / spread[j]
        columns[j + 1 :] -= spread[j + 1 :, None, None] * errors[j]
        columns[j] = rounded
    best = errors.square().sum(0).argmin(0)[None]
    values, errors = (
        tensor.gather(1, best.expand(len(tensor), 1, -1))[:, 0] for tensor in (columns, errors)
    )
    return values, errors, scales.gather(0, best)[0]

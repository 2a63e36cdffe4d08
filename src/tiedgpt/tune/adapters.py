"""Low-rank adapters (LoRA, Hu et al. 2021): W + s B A in place of a frozen W.

A (r, in) starts random and B (out, r) zero, so the model's output stays the same at first, bit for
bit. The embedding's W has one pair for reading and predicting: with P = B (V, r) and Q = A (r, D)

    read      W[i] + s P[i] Q
    predict   h W^T + s (h Q^T) P^T

An adapted layer stays the same module under the same name; only its class changes, and `merge`
changes it back. Its parameters are `lora_A`, `lora_B`, and `lora_rows` (n, D): differences to the
rows of new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.model import GPT
from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.heads import Head
from tiedgpt.names import explains_arguments
from tiedgpt.options import read_number
from tiedgpt.runtime import eval_mode
from tiedgpt.tie.heads import find_second_names, is_tied, predicts_through_wte
from tiedgpt.tune.freezing import TWO_CHOICES, Model, TrainableParameters, count_trainable, gpt_of

BLOCKS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
"""The four matrices of each block."""
MAX_MERGE_CHANGE = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
"""Root mean square of the logits' allowed changes by a merge, over that of the logits."""


class Adapter:
    """The parameters that an adapter adds to a frozen matrix (out, in), and their sum."""

    weight: Any
    scale: float
    """s, alpha / r."""
    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None
    lora_rows: nn.Parameter | None
    lora_ids: Tensor | None
    """(n,) int64, ascending: the rows that `lora_rows` is added to."""

    def add_low_rank(self, y: Tensor, x: Tensor) -> Tensor:
        """Turn y = x W^T (..., out) into x (W + s B A + rows)^T."""
        if self.lora_A is not None and self.lora_B is not None:
            low = F.linear(x.to(self.lora_A.dtype), self.lora_A)  # (..., r)
            y = y + (self.scale * F.linear(low, self.lora_B)).to(y.dtype)
        if self.lora_rows is not None and self.lora_ids is not None:
            more = F.linear(x.to(self.lora_rows.dtype), self.lora_rows)  # (..., n)
            y = y.index_add(-1, self.lora_ids, more.to(y.dtype))
        return y

    def matrix(self) -> Tensor:
        """Return W + s B A + rows, (out, in), in fp32 or wider."""
        matrix = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        if self.lora_A is not None and self.lora_B is not None:
            matrix = matrix + self.scale * (self.lora_B @ self.lora_A).to(matrix.dtype)
        if self.lora_rows is not None and self.lora_ids is not None:
            matrix = matrix.index_add(0, self.lora_ids, self.lora_rows.to(matrix.dtype))
        return matrix

    def extra_repr(self) -> str:
        """Return the adapter's rank, scale and rows for `print(model)`."""
        parts = [super().extra_repr()]  # type: ignore[misc]
        if self.lora_A is not None:
            parts.append(f"lora rank {len(self.lora_A)}, scale {self.scale:g}")
        if self.lora_rows is not None:
            parts.append(f"{len(self.lora_rows)} rows trained whole")
        return ", ".join(parts)


class LoRALinear(Adapter, nn.Linear):
    """x (W + s B A)^T + b."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.add_low_rank(super().forward(x), x)


class LoRAEmbedding(Adapter, TiedEmbedding):
    """W + s P Q on both sides."""

    @override
    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        if self.lora_A is not None and self.lora_B is not None:
            x = x + (self.scale * F.embedding(ids, self.lora_B) @ self.lora_A).to(x.dtype)
        if self.lora_rows is not None and self.lora_ids is not None:
            at = torch.searchsorted(self.lora_ids, ids.long().contiguous())
            at = at.clamp(max=len(self.lora_ids) - 1)
            more = F.embedding(at, self.lora_rows) * (self.lora_ids[at] == ids)[..., None]
            x = x + more.to(x.dtype)
        return x

    @override
    def unembed(self, h: Tensor) -> Tensor:
        return self.add_low_rank(super().unembed(h), h)


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LoRALinear,
    TiedEmbedding: LoRAEmbedding,
}
UNADAPTED = {adapted: layer for layer, adapted in CLASSES.items()}


@dataclass(frozen=True)
class Size:
    """The size of one layer's adapter; rank 0 means no low-rank pair."""

    rank: int = 0
    scale: float = 0.0
    ids: tuple[int, ...] = ()
    """Rows of W that are trained in full."""


@explains_arguments
def lora(
    model: Model,
    rank: int = 8,
    targets: Sequence[str] = BLOCKS,
    alpha: float | None = None,
    *,
    tokens: Iterable[int] = (),
) -> TrainableParameters:
    """Freeze a model and attach adapters, in place; return the trainable parameters.

    `targets` are names of layers, or their ends: "attn.c_attn", "h.0.mlp.c_fc", "h.1*.c_proj"; the
    default is the four matrices of each block. "wte" adapts W with one pair for input and output,
    "head" an untied head. The product B A is scaled by alpha / rank; `alpha` is 2 `rank` by
    default. The rows of `tokens`, such as the ids of `add_tokens`, are trained in full, in an
    untied head too. The layers of a head of `tiedgpt.heads` are trained in full.

    A is drawn from torch's global random stream. Adapters of half-precision parameters are fp32.
    Raises `UserError`, with nothing changed, for missing and for already adapted targets.
    """
    gpt, alpha = gpt_of(model), 2 * rank if alpha is None else alpha
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= gpt.config.n_embd:
        raise UserError(f"rank (--lora) must be 1 to the width {gpt.config.n_embd}, got {rank!r}")
    alpha = read_number("alpha", alpha, float, above=0)
    sizes = {name: Size(rank, alpha / rank) for name in _find_targets(gpt, targets)}
    ids = tuple(sorted({*tokens}))
    for name in ("wte", "head") if ids else ():
        if name == "wte" or not predicts_through_wte(gpt):
            sizes[name] = replace(sizes.get(name, Size()), ids=ids)
    return adapt(model, sizes)


def adapt(model: Model, sizes: Mapping[str, Size]) -> TrainableParameters:
    """Freeze a model and put an adapter of each size on the layer of that name in its GPT."""
    gpt = gpt_of(model)
    require_adaptable(gpt, sizes)
    model.requires_grad_(False)
    for name, size in sizes.items():
        _attach_lora(gpt.get_submodule(name), size)
    if isinstance(model, Head):
        for name in model.head_tensors:
            model.get_parameter(name).requires_grad_(True)
    return count_trainable(model)


def require_adaptable(gpt: GPT, sizes: Mapping[str, Size]) -> None:
    """Raise `UserError` unless the layers of these names are plain and W has one name."""
    if adapted_layers(gpt):
        raise UserError(
            "the model has adapters already", hint="merge them first (tiedgpt.tune.merge)"
        )
    for name, size in sizes.items():
        layer = gpt.get_submodule(name)
        if type(layer) not in CLASSES or type(layer.weight) is not nn.Parameter:
            raise UserError(
                f"{name} is a {type(layer).__name__}: adapters go on plain layers",
                hint=(
                    "put them on before the model is wrapped, sharded, parametrized or entered "
                    "in fast_training"
                ),
            )
        n_rows = len(layer.weight)
        if wrong := [i for i in size.ids if type(i) is not int or not 0 <= i < n_rows]:
            raise UserError(
                f"must be ids from 0 to {n_rows - 1}, got {wrong[0]!r}", option="tokens"
            )
        if name in ("wte", "head") and (second := find_second_names(gpt)):
            raise UserError(
                f"{second[0]} is wte.weight under a second name, which an adapter of {name} would "
                "not reach: tiedgpt.tie.tie(model) or replace_head(model, None) leaves one name"
            )


def adapted_layers(gpt: GPT) -> dict[str, LoRALinear | LoRAEmbedding]:
    """Return the adapted layers of a GPT by name."""
    named = gpt.named_modules()
    return {name: m for name, m in named if isinstance(m, (LoRALinear, LoRAEmbedding))}


@torch.no_grad()
def merge(model: Model) -> float:
    """Add the adapters to their matrices, in fp32, and remove them, in place.

    The parameters stay the same objects, and all of them require gradients again. Logits of fixed
    ids are computed before and after. Returns the root mean square of their changes, relative to
    that of the logits. Above 1e-4 (fp32; 3e-2 in bf16 and 4e-3 in fp16, which round W), raises
    `CheckFailedError` and leaves the model unchanged. Half precision may round a small adapter
    away: merge in fp32 then.
    """
    gpt = gpt_of(model)
    layers = adapted_layers(gpt)
    if not layers:
        raise UserError("the model has no adapters to merge: see tiedgpt.tune.lora")
    ids = _fixed_ids(gpt, layers)
    bound = MAX_MERGE_CHANGE[gpt.wte.weight.dtype]
    with eval_mode(model):
        before = gpt(ids)
        originals = {name: layer.weight.clone() for name, layer in layers.items()}
        classes = {name: type(layer) for name, layer in layers.items()}
        try:
            for layer in layers.values():
                layer.weight.copy_(layer.matrix())
                layer.__class__ = UNADAPTED[type(layer)]  # type: ignore[assignment]
            change = float((gpt(ids) - before).double().norm() / before.double().norm())
            if not change <= bound:  # nan, too
                raise CheckFailedError(
                    f"merging changed the logits by {change:.1e} of their size, and {bound:.0e} is "
                    f"allowed in {gpt.wte.weight.dtype}: the model is unchanged",
                    hint=(
                        "convert it to a wider dtype first (model.float()), or look for adapters "
                        "that are not finite"
                    ),
                )
        except BaseException:
            for name, layer in layers.items():
                layer.__class__ = classes[name]
                layer.weight.copy_(originals[name])
            raise
    for layer in layers.values():
        for name in ("lora_A", "lora_B", "lora_rows", "lora_ids", "scale"):
            delattr(layer, name)
    model.requires_grad_(True)
    return change


def _find_targets(gpt: GPT, targets: Sequence[str]) -> list[str]:
    """Return the names of the target layers; raise `UserError` for a target without one."""
    if isinstance(targets, str):
        raise UserError(f"must be a list of names, got the string {targets!r}", option="targets")
    in_blocks = [name for name, m in gpt.h.named_modules(prefix="h") if isinstance(m, nn.Linear)]
    outside = ["wte"] + ["head"] * isinstance(gpt.head, nn.Linear)
    names: dict[str, None] = {}
    for target in targets:
        fits = [n for n in in_blocks + outside if fnmatch(n, target) or n.endswith(f".{target}")]
        if not fits and target in ("head", "lm_head") and is_tied(gpt):
            raise UserError(f"target {target!r}: {TWO_CHOICES}")
        if not fits:
            there = ", ".join([*BLOCKS, *outside])
            raise UserError(f"target {target!r} is no linear layer of the model: {there}")
        names |= dict.fromkeys(fits)
    return list(names)


def _attach_lora(layer: nn.Module, size: Size) -> None:
    """Turn a layer into an adapted one with the same output."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    n_out, n_in = weight.shape
    like = weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))
    layer.__class__ = CLASSES[type(layer)]
    layer.scale = size.scale  # type: ignore[assignment]
    for name in ("lora_A", "lora_B", "lora_rows"):
        layer.register_parameter(name, None)
    layer.register_buffer("lora_ids", None)
    if size.rank:
        layer.lora_A = nn.Parameter(like.new_empty(size.rank, n_in))
        layer.lora_B = nn.Parameter(like.new_zeros(n_out, size.rank))
        nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    if size.ids:
        layer.lora_rows = nn.Parameter(like.new_zeros(len(size.ids), n_in))
        layer.lora_ids = torch.tensor(size.ids, device=weight.device)


def _fixed_ids(gpt: GPT, layers: Mapping[str, LoRALinear | LoRAEmbedding]) -> Tensor:
    """Return fixed ids (2, T) that include those of trained rows."""
    length = min(32, gpt.config.n_positions)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(gpt.config.vocab_size, (2 * length,), generator=draw, device="cpu")
    for rows in (layer.lora_ids for layer in layers.values() if layer.lora_ids is not None):
        ids[: len(rows)] = rows[: 2 * length].cpu()
    return ids.view(2, length).to(gpt.wte.weight.device)

"""Causal attention on a CPU: of short sequences by our kernels, else in bf16 by batched matmuls.

The kernels (`train/step/kernels/attention.py`) read Q, K and V where c_attn wrote them, skip hidden
positions, and write the gradient in the same layout. No scores are kept: the backward pass computes
them again.

Gain of the kernels in CPU time on one core of Zen 4, 128 to 512 positions: forward and backward of
attention take 0.50x to 0.60x the time of torch's kernel in fp32 and 0.60x to 0.71x that of the
batched matmuls in bf16; limited to AVX2, 0.56x to 0.64x and 0.11x to 0.13x. A step of `tiny` or
`little` takes 0.95x in fp32 and 0.97x in bf16. In fp32 with AVX2, 1,024 positions would take 1.15x.

Longer sequences in bf16 and packed documents are computed by batched matmuls. A block of queries is
multiplied with the keys that it sees; in packed documents, these begin with the first document of
the block. Scores and softmax are fp32, so that the error is that of torch's kernel or less. All of
it is plain autograd.

Gain of the batched matmuls: a step of GPT-2 124M takes 0.95x the time at 4 x 512 (and 6 % more
memory) and 0.92x at 2 x 1024 (13 % more). Forward and backward of packed attention take, of the CPU
time of torch's kernel with a mask, 0.38x (4 x 512, documents of about 100 tokens), 0.59x (of about
400), 0.32x (2 x 1024, of 200) and 0.82x (8 x 256, of 80).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiedgpt.core.cache import KVCache
from tiedgpt.core.layers import Attention
from tiedgpt.core.loss import is_plain_autograd
from tiedgpt.infer.kernels.compile_cache import Kernel
from tiedgpt.train.step.fast.threads import can_run, prepare, run
from tiedgpt.train.step.substitute import Substitute

FORWARD = Kernel("tiedgpt.train.step.kernels.attention", "attention")
GRADIENT = Kernel("tiedgpt.train.step.kernels.attention", "attention_gradient")
TILE = 32
"""Number that must divide the number of positions and the size of a head for the kernels."""
MAX_KERNEL_POSITIONS = 512
"""Maximum length of a sequence for the kernels: scores of a longer one leave a core's cache."""
BLOCK = 128
"""Queries in a block."""
MAX_POSITIONS = 1024
"""Maximum length of a sequence; the stored softmax of a longer one takes too much memory."""


class BlockedAttention(Substitute, Attention):
    """Attention for training on a CPU, without dropout of attention weights."""

    def mix(self, qkv: Tensor, layer: int, past: KVCache | None, mask: Tensor | None) -> Tensor:
        """(B, T, 3D) -> (B, T, D)."""
        is_plain = past is None and mask is None and not (self.training and self.attn_pdrop > 0)
        if is_plain and can_run(qkv) and self._suits_kernels(qkv.shape[1], qkv.shape[2]):
            return attention(qkv.contiguous(), self.n_head)
        return super().mix(qkv, layer, past, mask)

    def _suits_kernels(self, n_positions: int, width: int) -> bool:
        is_dense = self.window is None or self.window >= n_positions
        is_whole = n_positions % TILE == width // (3 * self.n_head) % TILE == 0
        return is_dense and is_whole and n_positions <= MAX_KERNEL_POSITIONS

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """(B, H, T, D/H) thrice -> (B, H, T, D/H)."""
        n_positions = q.shape[2]
        banded = self.window is not None and self.window < n_positions
        short = causal and not banded and n_positions <= MAX_POSITIONS
        packed = mask is not None  # a cache, which has masks too, is not trained through
        dropped = self.training and self.attn_pdrop > 0
        if (
            (short or packed)
            and not dropped
            and q.device.type == "cpu"
            and q.dtype == torch.bfloat16
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            return blocked_attention(q, k, v, mask)
        return super().attend(q, k, v, mask, causal)


class _Attention(torch.autograd.Function):
    """Causal attention of qkv (B, T, 3D) with H heads by our kernels."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, n_head: int) -> Tensor:
        n_sequences, n_positions, width = qkv.shape
        shape, size = (n_sequences, n_positions, n_head), width // (3 * n_head)
        normalizers = _new_floats(qkv, n_sequences, n_head, n_positions, 2)
        scratch = _new_floats(qkv, torch.get_num_threads(), n_positions, 8 + 4 * size)
        y = qkv.new_empty(n_sequences, n_positions, n_head * size)
        prepare(GRADIENT, *shape, size, qkv, normalizers, y, scratch, qkv)
        run(FORWARD, *shape, size, qkv, normalizers, scratch, y)
        ctx.save_for_backward(qkv, normalizers)
        ctx.shape, ctx.size = shape, size
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        qkv, normalizers = ctx.saved_tensors
        (_, n_positions, n_head), size = ctx.shape, ctx.size
        if torch.is_grad_enabled() or not is_plain_autograd(grad):
            return _plain_gradient(qkv, n_head, grad), None
        numbers = 2 * n_positions + 6 * size
        scratch = _new_floats(qkv, torch.get_num_threads(), n_positions, numbers)
        out = torch.empty_like(qkv)
        run(GRADIENT, *ctx.shape, size, qkv, normalizers, grad.contiguous(), scratch, out)
        return out, None


attention: Callable[[Tensor, int], Tensor] = _Attention.apply
"""Causal attention of contiguous (B, T, 3D) -> (B, T, D) in fp32 or bf16.

T and D/H are multiples of 32.
"""


def _new_floats(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized fp32 tensor, also where another dtype or device is the default."""
    return like.new_empty(shape, dtype=torch.float32)


def _plain_gradient(qkv: Tensor, n_head: int, grad: Tensor) -> Tensor:
    """Return the gradient by torch's operations, for second derivatives and `torch.func.vmap`."""
    is_differentiated_again = torch.is_grad_enabled()
    with torch.enable_grad():
        qkv = qkv if is_differentiated_again else qkv.detach().requires_grad_()
        q, k, v = qkv.unflatten(-1, (3, n_head, -1)).transpose(1, 3).unbind(2)
        hidden = q.new_full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + hidden
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    (result,) = torch.autograd.grad(y, qkv, grad, create_graph=is_differentiated_again)
    return result


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, H, T, D/H) thrice -> (B, H, T, D/H): position i sees positions j <= i.

    With `mask` (B, 1, T, T), only those in its document; the sequences are computed one by one.
    """
    if mask is None:
        y = _blocks(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), None)
        return y.unflatten(0, (len(q), -1))
    return torch.stack([_blocks(*each) for each in zip(q, k, v, mask[:, 0], strict=True)])


def _blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """(N, T, D/H) thrice -> (N, T, D/H), with one mask (T, T) for all."""
    n_positions, width = q.shape[1:]
    blocks = []
    for start in range(0, n_positions, BLOCK):
        end, first = min(start + BLOCK, n_positions), 0
        queries = q[:, start:end].float()
        if mask is None:
            hidden = queries.new_full((end - start, end), -torch.inf).triu(start + 1)
        else:
            seen = mask[start:end, :end]
            first = int(seen.any(0).int().argmax())
            hidden = queries.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, first:]
        keys = k[:, first:end].float()
        scores = torch.baddbmm(hidden, queries, keys.mT, alpha=width**-0.5)
        blocks.append(torch.bmm(scores.softmax(-1).to(v.dtype), v[:, first:end]))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)

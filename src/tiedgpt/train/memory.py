"""How much memory training takes, by formula: what stays, and what a part of a batch adds."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 50 << 20
"""Of logits, as `core/loss.py` has it."""

KEPT = {"fp32": (32, 12), "bf16": (28, 6)}
"""Bytes that a block keeps of a position for its gradient: a unit of width, a unit of the MLP."""
DROPPED = (16, 18)
"""More with dropout: bytes a unit of width, and bytes a pair of positions in a head."""
WEIGHTS = 2
"""Bytes of an attention weight at the peak of bf16 training on a CPU, up to so many positions:"""
WEIGHTS_UP_TO, WEIGHTS_BLOCK = 256, 128
STATE = 4
"""Bytes a unit of width of the residual stream, which is what a recomputed block keeps."""
LATER = 90_000_000
"""Bytes of what torch imports when optimizers are made, and of its kernels' own buffers."""
M_MMAP_THRESHOLD = -3
"""Of <malloc.h>."""
UNITS = {"": 1e9, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bytes(text: str) -> int:
    """Return the bytes in "2" (GB), "2GB", "800MB" or "1.5 g"; `UserError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if size < 1:
        raise UserError(f"--memory {text}: give gigabytes, as 2 or 1.5, or a size, as 800MB")
    return size


def said(size: int) -> str:
    """Return bytes as they are read: 340 MB, 2.5 GB."""
    return f"{size / 1e6:,.0f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def taken(device: torch.device) -> int:
    """Return the bytes of the program itself, of what a budget on a device counts."""
    if device.type != "cpu":
        return 0
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") + LATER
    except (OSError, ValueError, IndexError):
        return 0


def return_memory_at_once() -> None:
    """Let glibc give back freed tensors of a megabyte and more at once, where it is the C library.

    By itself it raises that limit to 32 MB as a program frees large blocks, and keeps what is
    below in holes: a step with recomputed blocks then took twice the memory that it used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


@dataclass(frozen=True)
class Needed:
    """Bytes that training takes at its peak; the allocator may take more."""

    weights: int
    gradients: int
    moments: int
    activations: int
    """Of the sequences that are computed at a time, beyond the gradients that take their place."""
    loss: int
    """Logits of a chunk, and the gradients that the loss has ready before backward."""
    batch: int
    """Ids and targets of a step, as read and as moved to the device."""

    @property
    def lasting(self) -> int:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.moments

    @property
    def passing(self) -> int:
        """What a batch adds."""
        return self.activations + self.loss + self.batch

    @property
    def total(self) -> int:
        """All of it."""
        return self.lasting + self.passing


def needed(
    config: GPTConfig,
    *,
    batch_size: int,
    micro_batch: int,
    row_tokens: int,
    dtype: str,
    device: str = "cpu",
    recompute: str = "off",
    optimizer: str = "adamw",
    processes: int = 1,
    holders: int = 1,
) -> Needed:
    """Estimate the peak; `dtype` is that of the products, `optimizer` that of blocks' matrices.

    Of several `processes` it is that of each: it reads the whole batch, computes its share, and has
    one part in `holders` of what lasts, or, as DDP, all of it and the gradients twice.

    Attention with dropout holds its T x T matrices on a CPU; a GPU's kernels do not.

    The constants are what the blocks' layers save for their gradients, fitted to the peaks of ten
    shapes on a CPU, with `LATER` and freed memory given back: of those it is from 8 % too low to
    26 % too high. Several processes were not measured.
    """
    parameters = config.parameter_count()
    in_matrices = 12 * config.n_layer * config.n_embd * config.n_embd
    wide, of_width, of_inner = dtype == "fp32", *KEPT["fp32" if dtype == "fp32" else "bf16"]
    rows = micro_batch * row_tokens
    position = of_width * config.n_embd + of_inner * config.inner_dim
    if config.attn_pdrop or config.resid_pdrop:
        masks, pairs = DROPPED
        position += masks * config.n_embd
        if config.attn_pdrop and device == "cpu":
            position += pairs * config.n_head * row_tokens
    elif device == "cpu" and not wide and row_tokens <= WEIGHTS_UP_TO:
        position += WEIGHTS * config.n_head * (row_tokens + WEIGHTS_BLOCK) // 2
    blocks = position * config.n_layer
    if recompute == "blocks":
        blocks = STATE * config.n_embd * config.n_layer + position + of_inner * config.inner_dim
    matrix = 4 * config.vocab_size * config.n_embd
    logits = min(CHUNK_BYTES, rows * config.vocab_size * (4 if wide else 2))
    kept = rows * blocks
    copies = 2 if processes > holders else 1
    share = -(-batch_size // processes)
    in_parts = micro_batch < share  # W's gradient of a part, beside the sum of those before
    return Needed(
        weights=4 * parameters // holders,
        gradients=copies * 4 * parameters // holders,
        moments=(8 * parameters - (4 * in_matrices if optimizer == "muon" else 0)) // holders,
        activations=kept if in_parts else max(0, kept - 4 * in_matrices),
        loss=logits + STATE * config.n_embd * rows + (matrix if in_parts else 0),
        batch=4 * 8 * batch_size * row_tokens,
    )

"""How much memory training takes, by formula: what stays, and what a part of a batch adds.

It is asked before anything is built: a CPU that runs out of memory raises no error, the system ends
the process.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError, UserError

if TYPE_CHECKING:
    import torch

    from tiedgpt.train.parallel import World
    from tiedgpt.train.plan import Plan

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


def free(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None where the system does not tell."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    from tiedgpt.infer.room import free_memory

    return free_memory()


def return_memory_at_once() -> None:
    """Let glibc give back freed tensors of a megabyte and more at once, where it is the C library.

    By itself it raises that limit to 32 MB as a program frees large blocks, and keeps what is
    below in holes: a step with recomputed blocks then took twice the memory that it used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


class Needed(NamedTuple):
    """Bytes that a process takes at its peak; the allocator may take more."""

    lasting: int
    """Weights, gradients and the optimizer's moments."""
    passing: int
    """What a batch adds: activations, logits of a chunk, gradients of the loss, the batch."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.lasting + self.passing


def needed(config: GPTConfig, plan: Plan, row_tokens: int, world: World) -> Needed:
    """Estimate the peak of training rows of at most `row_tokens` tokens.

    Of several processes it is that of each: it reads the whole batch, computes its share, and has
    one part in `world.holders` of what lasts, or, as DDP, all of it and the gradients twice.

    Attention with dropout holds its T x T matrices on a CPU; a GPU's kernels do not.

    The constants are what the blocks' layers save for their gradients, fitted to the peaks of ten
    shapes on a CPU, with `LATER` and freed memory given back: of those it is from 8 % too low to
    26 % too high. Several processes were not measured.
    """
    if plan.untie_at is not None:
        config = replace(config, tie_word_embeddings=False)  # as it will be
    on_cpu, wide = world.device.type == "cpu", plan.dtype == "fp32"
    of_width, of_inner = KEPT["fp32" if wide else "bf16"]
    position = of_width * config.n_embd + of_inner * config.inner_dim
    if config.attn_pdrop or config.resid_pdrop:
        masks, pairs = DROPPED
        position += masks * config.n_embd
        if config.attn_pdrop and on_cpu:
            position += pairs * config.n_head * row_tokens
    elif on_cpu and not wide and row_tokens <= WEIGHTS_UP_TO:
        position += WEIGHTS * config.n_head * (row_tokens + WEIGHTS_BLOCK) // 2
    blocks = position * config.n_layer
    if plan.recompute == "blocks":
        blocks = STATE * config.n_embd * config.n_layer + position + of_inner * config.inner_dim

    parameters = config.parameter_count()
    in_matrices = 12 * config.n_layer * config.n_embd * config.n_embd
    moments = 8 * parameters - (4 * in_matrices if plan.optimizer == "muon" else 0)
    gradients = 4 * parameters * (2 if world.size > world.holders else 1)
    rows = plan.micro_batch * row_tokens
    logits = min(CHUNK_BYTES, rows * config.vocab_size * (4 if wide else 2))
    activations, loss = rows * blocks, logits + STATE * config.n_embd * rows
    if plan.micro_batch < world.share(plan.batch_size):
        loss += 4 * config.vocab_size * config.n_embd  # W's gradient of a part, beside the sum
    else:
        activations = max(0, activations - 4 * in_matrices)  # gradients take their place
    return Needed(
        lasting=(4 * parameters + gradients + moments) // world.holders,
        passing=activations + loss + 4 * 8 * plan.batch_size * row_tokens,
    )


def require_memory(config: GPTConfig, plan: Plan, row_tokens: int, world: World) -> None:
    """Raise `NoRoomError`, with the arithmetic, where a step cannot fit in memory."""
    device = world.device
    room, has, ways = free(device), "free", ["a smaller --batch-size or --micro-batch"]
    ways += ["--recompute blocks"] if plan.recompute == "off" else []
    if room is not None and device.type == "cpu" and world.neighbours > 1:
        room, has = room // world.neighbours, "free for each process"
    if plan.memory is not None:
        left = plan.memory - taken(device)
        if left <= 0:
            raise NoRoomError(
                f"--memory {said(plan.memory)}: the program alone takes about {said(taken(device))}"
            )
        if room is None or left < room:
            room, has = left, f"of --memory {said(plan.memory)} left beside the program"
            ways.append("more --memory")
    need = needed(config, plan, row_tokens, world)
    if room is not None and need.lasting > room:
        raise NoRoomError(
            f"{config.parameter_count():,} parameters need {said(need.lasting)} to train (weights, "
            f"gradients and the optimizer's moments) and {device} has {said(room)} {has}"
        )
    if room is not None and need.total > room:
        raise NoRoomError(
            f"a batch of {plan.batch_size:,} x {row_tokens:,} tokens, {plan.micro_batch:,} "
            f"sequences at a time, needs about {said(need.passing)} beside the "
            f"{said(need.lasting)} of weights, gradients and moments, and {device} has "
            f"{said(room)} {has}: use {', or '.join(ways)}"
        )


def memory_line(plan: Plan, config: GPTConfig, row_tokens: int, world: World) -> str:
    """Return in words what a plan with a budget takes beside the program itself."""
    how = ", blocks computed again in backward" if plan.recompute == "blocks" else ""
    return (
        f"about {said(needed(config, plan, row_tokens, world).total)} beside the program, of "
        f"{said(plan.memory or 0)}: {plan.micro_batch:,} sequences at a time{how}"
    )

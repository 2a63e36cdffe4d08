"""The memory of a step, and the largest micro-batch that fits."""

from __future__ import annotations

import math
from dataclasses import replace

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError
from tiedgpt.files import format_bytes, format_count
from tiedgpt.train.plan.groups import RunOptions
from tiedgpt.train.plan.values import Facts, Machine, Plan, Recompute
from tiedgpt.train.step.optim import OPTIMIZERS

MICRO_BATCH_TOKENS = 8192
"""Most tokens in a micro-batch on a CPU unless --micro-batch is given."""
GPU_MICRO_BATCH_TOKENS = 65_536
"""The same on a GPU, where more tokens keep it busy and the memory is the limit."""
CPU_ALLOCATOR_SHARE, GPU_ALLOCATOR_SHARE = 0.2, 0.1
"""Memory beyond the tensors' bytes. On a CPU malloc keeps freed blocks that are too small for the
next request: six models of 6 to 22 million parameters took 0.93 to 1.27 of their tensors' bytes."""
ATTENTION_SCORE_BYTES = 10
"""Bytes per attention score with dropout on a CPU: the score, its softmax, the dropped one."""


def estimate_memory(
    config: GPTConfig, plan: Plan, facts: Facts, machine: Machine
) -> dict[str, int]:
    """Return the bytes of one process in training by part.

    Activations are those of `core/layers.py` with attention that stores no scores. Blocks with a
    window count as dense ones, and frozen parameters as if their gradients were computed. The guide
    `docs/guides/scale.md` has the formulas.
    """
    w_matrix = config.vocab_size * config.n_embd
    block = 4 * config.n_embd**2 + 2 * config.n_embd * config.inner_dim
    rows = -(-plan.batch_size // machine.n_processes)
    parts = estimate_static_memory(config, plan, facts, machine)
    parts["batch"] = 4 * 8 * plan.batch_size * facts.row_tokens
    if machine.n_shards > 1:
        edges = w_matrix + config.n_positions * config.n_embd
        parts["gathered weights"] = 4 * (edges + 2 * block)
        parts["gathered gradients"] = 4 * (w_matrix + block)
    elif machine.n_processes > 1:
        parts["gradient buckets"] = parts["gradients"]
    if plan.dtype == "bf16" and not machine.is_cpu:
        layers = 1 if plan.recompute == "blocks" else config.n_layer
        parts["weights in bf16"] = 2 * (layers * block + w_matrix)
    if facts.n_trained is None and facts.predicts_tokens:
        parts["W's gradients apart"] = 4 * w_matrix * (2 if plan.micro_batch < rows else 1)
    parts |= estimate_activations(config, plan, facts, machine)
    allocator_share = CPU_ALLOCATOR_SHARE if machine.is_cpu else GPU_ALLOCATOR_SHARE
    parts["allocator"] = int(allocator_share * sum(parts.values()))
    return parts


def estimate_static_memory(
    config: GPTConfig, plan: Plan, facts: Facts, machine: Machine
) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state of one process."""
    count = config.parameter_count()
    trained = count if facts.n_trained is None else facts.n_trained
    matrices = 12 * config.n_layer * config.n_embd**2 if facts.n_trained is None else 0
    moments = OPTIMIZERS["adamw"].moments * (trained - matrices)
    moments += OPTIMIZERS[plan.optimizer].moments * matrices
    parts = {"weights": 4 * count, "gradients": 4 * trained, "optimizer state": 4 * moments}
    return {part: n_bytes // machine.n_shards for part, n_bytes in parts.items()}


def estimate_activations(
    config: GPTConfig, plan: Plan, facts: Facts, machine: Machine
) -> dict[str, int]:
    """Return the bytes that forward stores for backward, and of backward and the loss."""
    n_rows, row_tokens, n_embd = plan.micro_batch, facts.row_tokens, config.n_embd
    is_bf16, tokens = plan.dtype == "bf16", plan.micro_batch * facts.row_tokens
    itemsize = 2 if is_bf16 else 4
    layers = 1 if plan.recompute == "blocks" else config.n_layer
    per_token = (8 + 6 * itemsize + (2 if config.resid_pdrop else 0)) * n_embd
    per_token += 2 * itemsize * config.inner_dim
    parts = {"activations": tokens * layers * per_token}
    if layers < config.n_layer:
        parts["activations"] += 4 * tokens * config.n_layer * n_embd
    if machine.is_cpu and config.attn_pdrop:
        scores = n_rows * layers * config.n_head * row_tokens**2
        parts["attention scores"] = ATTENTION_SCORE_BYTES * scores
    parts["backward of a block"] = tokens * (4 * n_embd + itemsize * config.inner_dim)
    if facts.predicts_tokens:
        import torch  # not for `--help`

        from tiedgpt.core.loss import chunk_rows

        dtype = torch.bfloat16 if is_bf16 else torch.float32
        chunk = chunk_rows(tokens, config.vocab_size, dtype)
        logit_bytes = 6 if is_bf16 and not machine.is_cpu else itemsize
        parts["logits and loss"] = logit_bytes * chunk * config.vocab_size + 8 * tokens * n_embd
    return parts


def memory_limit(plan: Plan, machine: Machine) -> float:
    """Return the bytes that training may take: free memory, or what --memory leaves of it."""
    if plan.memory is None:
        return machine.free_bytes
    return max(0, min(machine.free_bytes, plan.memory - machine.used_bytes))


def fit_micro_batch(
    draft: Plan, options: RunOptions, config: GPTConfig, facts: Facts, machine: Machine
) -> Plan:
    """Return the plan with the largest micro-batch that fits in memory.

    With --memory, blocks are recomputed if a micro-batch of one row does not fit without it: a
    smaller micro-batch costs little, recomputing about a third of a step.
    """
    limit = memory_limit(draft, machine)
    rows = -(-draft.batch_size // machine.n_processes)
    most_tokens = GPU_MICRO_BATCH_TOKENS if machine.is_gpu else MICRO_BATCH_TOKENS
    most = min(rows, options.micro_batch or max(1, most_tokens // facts.row_tokens))
    sizes = [most >> n for n in range(1 if options.micro_batch else most.bit_length())]
    modes: list[Recompute] = ["off", "blocks"] if options.memory is not None else ["off"]
    if options.recompute != "auto":
        modes = [options.recompute]
    for recompute in modes:
        for size in sizes:
            plan = replace(draft, micro_batch=size, recompute=recompute)
            if sum(estimate_memory(config, plan, facts, machine).values()) <= limit:
                return plan
    raise explain_memory(config, plan, facts, machine)


def explain_memory(config: GPTConfig, plan: Plan, facts: Facts, machine: Machine) -> NoRoomError:
    """Return the error for a plan that does not fit in memory, with the arithmetic."""
    limit, parts = memory_limit(plan, machine), estimate_memory(config, plan, facts, machine)
    if plan.memory is not None and plan.memory <= machine.used_bytes:
        taken = f"the program alone takes {format_bytes(machine.used_bytes)}"
        return NoRoomError(f"--memory {format_bytes(plan.memory)}: {taken}")
    static = sum(estimate_static_memory(config, plan, facts, machine).values())
    room = f"{machine.device} has {format_bytes(limit)} free"
    if limit < machine.free_bytes:
        room = f"--memory leaves {format_bytes(limit)} beside the program"
    elif machine.is_cpu and machine.n_processes > 1:
        room += " for each process"
    if static > limit:
        return NoRoomError(
            f"{config.parameter_count():,} parameters need {format_bytes(static)} to train "
            f"(weights, gradients and optimizer state), and {room}",
            hint="use a smaller model",
        )
    options = ["a smaller --batch-size or --micro-batch"]
    if static + parts["batch"] > limit:
        options = ["a smaller --batch-size"]
    elif plan.recompute == "off":
        options += ["--recompute blocks"]
    options += ["more --memory"] if plan.memory is not None else []
    return NoRoomError(
        f"a batch of {plan.batch_size:,} x {facts.row_tokens:,} tokens, "
        f"{format_count(plan.micro_batch, 'sequence')} at a time, needs about "
        f"{format_bytes(sum(parts.values()))}, {format_bytes(static)} of them for weights, "
        f"gradients and optimizer state, and {room}",
        hint=f"use {', or '.join(options)}",
    )


def halve_micro_batch(plan: Plan, step: int) -> Plan:
    """Return the plan from `step` on with half of the rows at a time, after a GPU had no room."""
    micro_batch = max(1, plan.micro_batch // 2)
    factor = plan.micro_batch / micro_batch
    final = plan.final_batches
    return replace(
        plan,
        micro_batch=micro_batch,
        eval_batches=math.ceil(plan.eval_batches * factor),
        final_batches=None if final is None else math.ceil(final * factor),
        since=step,
    )


def describe_memory(plan: Plan) -> str:
    """Return in words how a plan keeps to its memory limit."""
    mode = ", blocks recomputed in backward" if plan.recompute == "blocks" else ""
    limit = format_bytes(plan.memory or 0)
    return f"{format_count(plan.micro_batch, 'sequence')} at a time{mode}, to stay in {limit}"

"""A plan without the numbers that depend on the number of steps."""

from __future__ import annotations

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.files import format_count
from tiedgpt.train.plan.groups import RunOptions, parse_bytes
from tiedgpt.train.plan.memory import fit_micro_batch
from tiedgpt.train.plan.values import Facts, Machine, Plan

MIN_HELD_OUT_EXAMPLES = 50
"""With fewer examples the validation loss is too noisy to end a run early."""


def draft_plan(options: RunOptions, config: GPTConfig, facts: Facts, machine: Machine) -> Plan:
    """Return the plan without the numbers that depend on the number of steps.

    Blocks are compiled only if the options ask for it.
    """
    compiles = options.compile == "on" and machine.missing_compiler is None
    draft = Plan(
        steps=1,
        micro_batch=1,
        warmup=0,
        grad_clip=options.grad_clip,
        dtype=machine.dtype if options.dtype == "auto" else options.dtype,
        seed=options.seed,
        eval_every=1,
        eval_batches=1,
        save_every=1,
        can_end_early=options.patience is not None or facts.n_held_out >= MIN_HELD_OUT_EXAMPLES,
        keep=options.keep,
        schedule=options.schedule,
        memory=None if options.memory is None else parse_bytes(options.memory),
        compile="on" if compiles else "off",
        threads=machine.threads,
        **options.plan_fields(config, facts),
    )
    require_rows(draft.batch_size, machine.n_processes)
    return fit_micro_batch(draft, options, config, facts, machine)


def require_rows(batch_size: int, n_processes: int) -> None:
    """Raise `UserError` for a batch with fewer rows than processes."""
    if batch_size < n_processes:
        raise UserError(
            f"a batch of {format_count(batch_size, 'row')} for {n_processes} processes: start "
            "fewer, or train with a larger --batch-size"
        )


def wants_compile(options: RunOptions, facts: Facts, machine: Machine) -> bool:
    """Return whether the blocks may be compiled; `auto`: on a GPU, for rows of one length.

    On a CPU, our own products and attention are faster (`bench/train.py --compile`).
    """
    if options.compile == "auto":
        return machine.is_gpu and facts.unit == "tokens"
    return options.compile == "on"

"""From the options, facts about the data, and the machine to a plan.

    config, plan = plan_run(options, config, facts, machine)

The functions are pure: the only impure input is `machine.tokens_per_second`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tiedgpt.core.config import GPTConfig
from tiedgpt.files import format_count
from tiedgpt.train.plan.draft import draft_plan, wants_compile
from tiedgpt.train.plan.groups import AUTO, RunOptions
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.plan.size import apply_size, choose_size, with_published_batch
from tiedgpt.train.plan.time import (
    count_final_rows,
    count_steps,
    plan_steps,
    seconds_left,
    set_steps,
)
from tiedgpt.train.plan.values import Facts, Machine, Plan

SHORT_RUN_STEPS = 100
"""A run with fewer steps is warned about."""
WARN_PARAMETERS_PER_TOKEN = 24
WARN_BATCH_SHARE = 0.1
"""Share of an epoch in one batch above which a warning is given."""
COMPILE_SPEEDUP = 1.5
"""Speed of compiled blocks over that of plain ones on a GPU: an estimate."""
FEW_SCORED_ROWS = 100
"""Number of rows of examples up to which the final evaluation takes all, in any time."""
PAUSE_SHARE, PAUSE_SECONDS = 0.02, 0.2
"""Share of the time that samples and checkpoints may take, and seconds for one of each."""


def plan_run(
    options: RunOptions,
    config: GPTConfig,
    facts: Facts,
    machine: Machine,
    *,
    seconds_spent: float = 0.0,
) -> tuple[GPTConfig, Plan]:
    """Return the model's config and the plan of a run.

    `config` is that of the model to start from, or of a fresh one, whose shape changes with
    `--size auto`. `seconds_spent` are the seconds of --minutes that preparing took. Raises
    `NoRoomError` if a step does not fit in memory, before anything is built.
    """
    reason = ""
    if isinstance(options, TrainOptions):
        if options.chooses and facts.text_tokens is not None:
            options, reason = choose_size(options, config, facts, machine, seconds_spent)
            config, facts = apply_size(options, config, facts)
        options = with_published_batch(options, config, facts, machine, seconds_spent)
    draft = draft_plan(options, config, facts, machine)
    if compile_pays(draft, options, config, facts, machine, seconds_spent):
        draft = replace(draft, compile="on")
    unit, amount, _ = options.duration
    if unit == "minutes":
        speed = machine.tokens_per_second(config, draft)  # with its own batch size
        step_seconds = draft.batch_size * facts.row_units / speed
        compiling = machine.compile_seconds() if draft.compile == "on" else 0.0
        seconds = seconds_left(60 * amount, seconds_spent + compiling)
        steps = count_steps(seconds, step_seconds, facts.held_out_rows, draft, machine.n_processes)
        evaluations = min(options.evaluations, round(seconds * PAUSE_SHARE / PAUSE_SECONDS))
        plan = set_steps(draft, options, steps, max(1, evaluations))
        plan = replace(plan, minutes=amount, reason=reason)
    else:
        plan = plan_steps(draft, options, facts, reason)
    rows = count_final_rows(plan.steps / machine.n_processes, facts.held_out_rows, plan)
    n_batches = math.ceil(rows / plan.micro_batch)
    has_few_rows = facts.n_examples > 0 and facts.held_out_rows <= FEW_SCORED_ROWS
    scores_all = options.score == "all" or n_batches * plan.micro_batch >= facts.held_out_rows
    scores_all = scores_all or has_few_rows
    return config, replace(plan, final_batches=None if scores_all else n_batches)


def compile_pays(
    draft: Plan,
    options: RunOptions,
    config: GPTConfig,
    facts: Facts,
    machine: Machine,
    seconds_spent: float,
) -> bool:
    """Whether compiling is left to us, possible, and shorter than the time that it saves."""
    may = options.compile == "auto" and wants_compile(options, facts, machine)
    if not may or machine.missing_compiler is not None:
        return False
    unit, amount, _ = options.duration
    seconds = seconds_left(60 * amount, seconds_spent)
    if unit != "minutes":
        units = plan_steps(draft, options, facts, "").steps * draft.batch_size * facts.row_units
        seconds = units / machine.tokens_per_second(config, draft)
    return seconds * (1 - 1 / COMPILE_SPEEDUP) > machine.compile_seconds()


def find_warnings(
    options: RunOptions, config: GPTConfig, facts: Facts, machine: Machine, plan: Plan
) -> list[str]:
    """Return warnings: a missing compiler, a short run, a requested batch or a model too large."""
    warnings = []
    if machine.missing_compiler is not None and wants_compile(options, facts, machine):
        warnings.append(
            f"--compile {options.compile}: {machine.missing_compiler}; blocks are not compiled"
        )
    is_default_for_few_examples = options.duration.least_steps > 1
    if plan.steps < SHORT_RUN_STEPS and not is_default_for_few_examples:
        warnings.append(
            f"{format_count(plan.steps, 'step')} only: too few to learn much; give more --minutes, "
            "--steps or --epochs"
        )
    share = plan.batch_size / facts.epoch_rows
    if share > WARN_BATCH_SHARE and plan.batch_size > 1 and options.batch_size is not None:
        warnings.append(
            f"a batch holds {min(1.0, share):.0%} of the training data: a smaller --batch-size "
            "gives more steps per epoch"
        )
    if not isinstance(options, TrainOptions) or options.start is not None or options.chooses:
        return warnings
    if facts.text_tokens is not None:
        ratio = config.parameter_count() / facts.text_tokens
        epochs = plan.steps * plan.batch_size / facts.epoch_rows
        if ratio > WARN_PARAMETERS_PER_TOKEN and epochs > 1:
            remedy = "use a smaller --size, --size auto, or more text"
            if options.size == AUTO:  # which chooses none for --steps and --width
                remedy = "give a smaller --size, or more text"
            warnings.append(
                f"the model has {ratio:,.0f} parameters per token of the text and will memorize "
                f"it: {remedy}"
            )
    return warnings

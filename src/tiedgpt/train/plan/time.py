"""The number of steps: from a duration before the run, and from the clock during it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tiedgpt.train.plan.groups import EVALUATIONS_PER_RUN, RunOptions
from tiedgpt.train.plan.values import Facts, Plan

MAX_EPOCHS = 40
"""Maximum number of epochs for a minimum number of steps."""
MIN_TIME_SHARE = 0.5
"""Share of --minutes that is trained, however long preparing the text took."""
SAMPLE_SHARE = 0.05
"""Rows scored at evaluations as a share of the rows trained on between them. A forward is a third
of a step, so this takes 1.7 % of the time."""
FORWARDS_PER_STEP = 3
"""Time of a step over that of a forward pass on as many rows."""
MIN_SCORED_BATCHES = 4
"""Smallest number of micro-batches in an evaluation."""
FINAL_SHARE = 0.02
"""Share of the time that the final evaluation may take."""
CLOSING_SECONDS = 1.0
"""Seconds for writing the model and its card."""
REPLAN_CHECKS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the steps, or of the time, at which the plan is compared with the clock."""
REPLAN_TOLERANCE = 0.05
"""Smallest relative change of the number of steps for a new plan."""


def seconds_left(seconds: float, spent: float) -> float:
    """Return the remaining seconds for training, at least half of all."""
    return max(seconds - spent, MIN_TIME_SHARE * seconds)


def plan_steps(draft: Plan, options: RunOptions, facts: Facts, reason: str) -> Plan:
    """Return the plan of a run whose length is given in steps or epochs."""
    unit, amount, min_steps = options.duration
    steps = int(amount)
    if unit == "epochs":
        min_steps = min_steps if facts.n_examples else 1
        steps = math.ceil(amount * facts.epoch_rows / draft.batch_size)
        min_steps = min(min_steps, math.ceil(MAX_EPOCHS * facts.epoch_rows / draft.batch_size))
        if steps < min_steps:
            steps = min_steps
            epochs = steps * draft.batch_size / facts.epoch_rows
            reason = (
                f"few examples: {steps:,} steps see each about {epochs:,.0f} times; --epochs or "
                "--steps decide otherwise"
            )
    return replace(set_steps(draft, options, steps), reason=reason)


def set_steps(draft: Plan, options: RunOptions, steps: int, evaluations: int | None = None) -> Plan:
    """Return the plan with a number of steps and the numbers that depend on it."""
    warmup = round(options.warmup * steps)
    cooldown = round(options.cooldown * steps) if options.schedule == "wsd" else 0
    evaluations = options.evaluations if evaluations is None else evaluations
    intervals = pause_intervals(steps, options.eval_every, evaluations)
    rows = SAMPLE_SHARE * intervals["eval_every"] * draft.batch_size
    return replace(
        draft,
        steps=steps,
        warmup=warmup,
        cooldown=min(cooldown, steps - warmup),
        eval_batches=max(MIN_SCORED_BATCHES, math.ceil(rows / draft.micro_batch)),
        **intervals,
    )


def pause_intervals(
    steps: int, eval_every: int | None = None, evaluations: int = EVALUATIONS_PER_RUN
) -> dict[str, Any]:
    """Return the steps between evaluations and between checkpoints, as fields of a plan."""
    return {
        "eval_every": eval_every or max(1, min(steps // evaluations, 1000)),
        "save_every": max(1, min(steps // 4, 1000)),
    }


def count_steps(
    seconds: float, step_seconds: float, held_out_rows: float, plan: Plan, n_processes: int = 1
) -> int:
    """Return the number of steps that fit into the time, with all evaluations."""
    forward = step_seconds / FORWARDS_PER_STEP * n_processes  # one process evaluates
    final_rows = count_final_rows(seconds / step_seconds, held_out_rows, plan)
    final = forward * final_rows / plan.batch_size
    closing = min(CLOSING_SECONDS, seconds / 10)
    return max(1, int((seconds - final - closing) / (step_seconds + forward * SAMPLE_SHARE)))


def count_final_rows(steps: float, held_out_rows: float, plan: Plan) -> float:
    """Return the number of rows in the final evaluation of a run with this number of steps."""
    rows = FINAL_SHARE * FORWARDS_PER_STEP * steps * plan.batch_size
    return min(held_out_rows, max(rows, MIN_SCORED_BATCHES * plan.micro_batch))


def replan(
    plan: Plan, held_out_rows: float, step: int, left: float, pace: float, n_processes: int = 1
) -> Plan | None:
    """Return the plan after `step` with `left` seconds and `pace` seconds per step.

    The learning rate continues at its value for the new number of steps. The warm-up is never
    shortened, and evaluations do not become more frequent. Returns None if the number of steps
    would change by less than `REPLAN_TOLERANCE`.
    """
    step_seconds = pace / (1 + SAMPLE_SHARE / FORWARDS_PER_STEP)  # the pace includes pauses
    fitting = step + count_steps(max(left, 0.0), step_seconds, held_out_rows, plan, n_processes)
    steps = max(step + 1, plan.warmup, fitting)
    if abs(steps - plan.steps) < REPLAN_TOLERANCE * plan.steps:
        return None
    scale, intervals = steps / plan.steps, pause_intervals(steps)
    eval_every = min(intervals["eval_every"], round(plan.eval_every * scale))
    return replace(
        plan,
        steps=steps,
        cooldown=min(round(plan.cooldown * scale), steps - plan.warmup),
        eval_every=max(plan.eval_every, eval_every),
        save_every=intervals["save_every"],
        since=step,
    )


def prolong(plan: Plan, options: RunOptions, step: int, times: float) -> Plan:
    """Return the plan of a finished run that continues for `times` its length.

    The learning rate continues at its value for the larger number of steps.
    """
    steps = max(step + 1, options.steps or round(plan.steps * times))
    cooldown = set_steps(plan, options, steps).cooldown
    return replace(
        plan,
        steps=steps,
        cooldown=min(cooldown, steps - plan.warmup),
        minutes=None if plan.minutes is None else plan.minutes * times,
        reason="",
        **pause_intervals(steps, options.eval_every),
        since=step,
    )


def compare_steps(steps: int, planned: int) -> str:
    """Return a note that the time had room for another number of steps than planned."""
    pace = "slower" if steps < planned else "faster"
    fitting = f"{steps:,} fit into the time instead of {planned:,}"
    return f"steps were {pace} than measured before: {fitting}"


@dataclass(frozen=True)
class Clock:
    """The time of a run, in seconds."""

    now: Callable[[], float] = time.perf_counter
    deadline: float | None = None
    """When a plan with minutes ends; None: its minutes after the first step begins."""


class PaceChecks:
    """When the plan of a run by minutes is compared with the clock, and the pace since then.

    Times are in seconds of one clock. A resumed run has its share of the time left.
    """

    def __init__(self, plan: Plan, step: int, now: float, deadline: float | None) -> None:
        assert plan.minutes is not None
        share = step / plan.steps
        self._seconds = 60 * plan.minutes * (1 - share) if deadline is None else deadline - now
        self.deadline = now + self._seconds
        self._start = share
        self._last = step, now
        self._checks = [check for check in REPLAN_CHECKS if check > share]

    def _share_done(self, plan: Plan, step: int, now: float) -> float:
        """Return the share of the steps or of the time that is done, whichever is larger."""
        elapsed = 1 - (self.deadline - now) / max(self._seconds, 1e-9)
        return max(step / plan.steps, self._start + (1 - self._start) * elapsed)

    def is_due(self, plan: Plan, step: int, now: float) -> bool:
        """Return whether a check is due after a step."""
        if not self._checks or step == self._last[0]:
            return False
        return self._share_done(plan, step, now) >= self._checks[0]

    def measure(self, plan: Plan, step: int, now: float) -> float | None:
        """Return the seconds per step since the last check if a check is due."""
        if not self.is_due(plan, step, now):
            return None
        (last_step, last_time), done = self._last, self._share_done(plan, step, now)
        self._checks = [check for check in self._checks if check > done]
        self._last = step, now
        return (now - last_time) / (step - last_step)

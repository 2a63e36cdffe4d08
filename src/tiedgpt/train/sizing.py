"""Everything that is decided before the first step, so that a run is a function of it.

The size of a fresh model, the numbers of the plan, and how many rows go at a time: memory is
measured in a throw-away model, because a CPU that runs out of memory raises no error and the system
ends the process. Weights, gradients and moments are counted before anything is built.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import DivergedError, NoRoomError, UserError
from tiedgpt.files import format_bytes
from tiedgpt.runtime import free_memory, has_bf16
from tiedgpt.train.blocks import decide_compile, prepare_blocks
from tiedgpt.train.choice import choose
from tiedgpt.train.measures import TensorMemory, held_memory
from tiedgpt.train.objective import Data, Objective, Pair
from tiedgpt.train.optim import make_optimizers
from tiedgpt.train.options import (
    DEFAULT_MINUTES,
    DURATIONS,
    EVALUATIONS,
    MOST_EPOCHS,
    TrainOptions,
    parse_bytes,
)
from tiedgpt.train.pace import (
    MEASURED,
    SAMPLE_SHARE,
    count_evaluations,
    count_final_rows,
    count_steps,
    step_seconds,
)
from tiedgpt.train.parallel import World
from tiedgpt.train.plan import Dtype, Plan, Recompute
from tiedgpt.train.step import train_step
from tiedgpt.train.storage import RunDirectory, plan_tables, read_plan
from tiedgpt.train.tune_options import AnyOptions, TuneOptions

MICRO_BATCH_TOKENS = 8192
SAME_PACE = 0.05
"""A plan stays as it is where its steps would change by less."""
LEAST_TIME = 0.1
"""Of --minutes, that is trained even where preparing took all of it."""
ABUNDANT = 0.1
"""Of the free memory: a step that surely takes less is not measured."""
LEAST_BYTES = 16
"""Of text to train on: no size suits less."""
ENOUGH_HELD_OUT = 50
"""Examples; the score of fewer is too noisy to end a run by."""

PLAIN = 100_000_000
"""A row's share is known once rows added this much, or once all other rows add less than this."""
HEAP = 1.2
"""Resident memory over the bytes that tensors take on a CPU: malloc keeps freed blocks that are too
small for the next request. Six models, 6 to 22 million parameters, took 0.93 to 1.27 of them."""


def training_device(name: str = "auto") -> torch.device:
    """Return the device of that name; auto is the GPU where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here: {why}") from None


def choose_size(
    options: AnyOptions,
    objective: Objective,
    data: Data,
    world: World,
    speed_of: Callable[[TrainOptions], float] | None = None,
) -> tuple[AnyOptions, Objective, Data, str, float | None]:
    """Return all three for the size that suits the text, where none is given, and why.

    The last value is the speed of that size, in tokens a second: measured, unless `speed_of` tells
    it. All processes of a `world` must call this, and get the same.
    """
    if isinstance(options, TuneOptions) or not options.chooses or data.text_tokens is None:
        return options, objective, data, "", None
    n_bytes = data.counts.get("train_text", {}).get("utf8_bytes", LEAST_BYTES)
    if n_bytes < LEAST_BYTES:
        raise UserError(
            f"the training text has {n_bytes} bytes, too few to learn anything from",
            hint="give more text",
        )
    seconds = 60 * MEASURED * (options.minutes or DEFAULT_MINUTES)
    chosen, reason, warning, speed = choose(
        options,
        data.text_tokens,
        speed_of or (lambda sized: measure_speed(sized, objective, data, world, seconds=seconds)),
    )
    reason = f"{reason}; {warning}" if warning else reason
    return chosen, *resize(objective, data, chosen), reason, speed


def make_plan(
    options: AnyOptions,
    objective: Objective,
    data: Data,
    device: torch.device,
    *,
    world: World | None = None,
    reason: str = "",
    speed: float | None = None,
    spent: float = 0.0,
) -> Plan:
    """Derive what was not set, measuring where the machine decides.

    `reason` says why the model has its size, `speed` is its tokens a second where they are known,
    and `spent` are the seconds of its minutes that are gone. Raises `NoRoomError` for a model that
    cannot fit in memory, before anything is built. In a `world` of several processes all must call
    this, and get the same.
    """
    world = world or World(device)
    draft = world.on_main(lambda: draft_plan(options, objective, data, world))
    world.on_main(lambda: world.require_work(draft))
    a_step = left = 0.0
    if options.duration.unit == "minutes":
        seconds = 60 * options.duration.amount
        if speed is None:
            at_most = min(4.0, 2 * MEASURED * seconds)
            a_step = step_seconds(objective, data, draft, world, seconds=at_most)
        else:
            a_step = draft.batch_size * data.row_units / speed
        left = world.on_main(lambda: max(seconds - spent, LEAST_TIME * seconds))
    return finish_plan(draft, options, data, world.size, reason=reason, a_step=a_step, left=left)


def finish_plan(
    draft: Plan,
    options: AnyOptions,
    data: Data,
    n_processes: int,
    *,
    reason: str = "",
    a_step: float = 0.0,
    left: float = 0.0,
) -> Plan:
    """Return a draft as a plan: with its steps, and what depends on them.

    Where minutes decide, a step takes `a_step` seconds and `left` seconds of them are left.
    """
    unit, amount, least = options.duration
    minutes, steps = None, int(amount)
    if unit == "epochs":
        steps = math.ceil(amount * data.epoch_rows / draft.batch_size)
        rows = draft.batch_size
        least = min(least, math.ceil(MOST_EPOCHS * data.epoch_rows / rows))
        if steps < least:
            steps, epochs = least, least * rows / data.epoch_rows
            reason = (
                f"few examples: {steps:,} steps see each about {epochs:,.0f} times; --epochs or "
                "--steps decide otherwise"
            )
    elif unit == "minutes":
        minutes = amount
        steps = count_steps(left, a_step, data, draft, n_processes)
        final_rows = count_final_rows(60 * minutes, a_step * n_processes, data, draft)
        if final_rows < data.held_out_rows:
            draft = replace(draft, final_batches=math.ceil(final_rows / draft.micro_batch))
    plan = set_steps(draft, options, steps, minutes)
    return replace(plan, minutes=minutes, reason=reason)


def draft_plan(options: AnyOptions, objective: Objective, data: Data, world: World) -> Plan:
    """Return a plan of which all is decided but the number of steps, and what depends on it."""
    draft = draft_numbers(options, objective, data, world.device)
    require_lasting(objective, data, draft, world)
    return fit_micro_batch(draft, options, objective, data, world)


def draft_numbers(
    options: AnyOptions,
    objective: Objective,
    data: Data,
    device: torch.device,
    dtype: Dtype | None = None,
) -> Plan:
    """Return the numbers that options decide, without any that memory or time decide.

    `dtype` is that of a device which is not here.
    """
    compiles, _ = decide_compile(options.compile, device, one_shape=data.unit == "tokens")
    chosen = dtype or choose_dtype(device)
    return Plan(
        steps=1,
        micro_batch=1,
        warmup=0,
        grad_clip=options.grad_clip,
        dtype=chosen if options.dtype == "auto" else options.dtype,
        seed=options.seed,
        eval_every=1,
        eval_batches=1,
        save_every=1,
        can_end_early=options.patience is not None or data.n_held_out >= ENOUGH_HELD_OUT,
        keep=options.keep,
        schedule=options.schedule,
        memory=None if options.memory is None else parse_bytes(options.memory),
        compile="on" if compiles else "off",
        **options.plan_fields(objective.config, data.row_tokens, data.epoch_rows),
    )


def choose_dtype(device: torch.device) -> Dtype:
    """Return the dtype of matmuls: bf16 where the device computes in it. No load decides."""
    return "bf16" if has_bf16(device) else "fp32"


def resize(objective: Objective, data: Data, options: TrainOptions) -> Pair:
    """Return both for a model of the shape that the options name, with its vocabulary."""
    config = objective.config
    config = options.model_config(
        vocab_size=config.vocab_size, bos=config.bos_token_id, eos=config.eos_token_id
    )
    return replace(objective, config=config), data.with_context(config.n_positions)


def measure_speed(
    options: TrainOptions, objective: Objective, data: Data, world: World, *, seconds: float
) -> float:
    """Return the tokens a second at which a size of a fresh model is trained."""
    objective, data = resize(objective, data, options)
    plan = world.on_main(lambda: draft_plan(options, objective, data, world))
    step = step_seconds(objective, data, plan, world, seconds=seconds)
    return plan.batch_size * data.row_units / step


def fit_micro_batch(
    draft: Plan, options: AnyOptions, objective: Objective, data: Data, world: World
) -> Plan:
    """Decide how many sequences go at a time and what is recomputed: the fastest that fits.

    Fewer at a time come first, which costs little; then recomputing, about a third of a step.
    """
    sizes = list_micro_batches(options, world.share(draft.batch_size), data)
    micro = sizes[0]
    ways: list[Recompute] = ["off", "blocks"] if options.memory is not None else ["off"]
    if options.recompute != "auto":
        ways = [options.recompute]
    if options.memory is None and _has_abundant_room(
        objective.config, micro * data.row_tokens, world
    ):
        return replace(draft, micro_batch=micro, recompute=ways[0])
    shared_out = world.n_shards > 1  # no device has room for all of it
    place = torch.device("cpu") if shared_out else world.device
    for recompute in ways:
        peak = measure_peak(objective, data, replace(draft, recompute=recompute), sizes[0], place)
        for size in sizes:
            plan = replace(draft, micro_batch=size, recompute=recompute)
            try:
                require_memory(objective, data, plan, world, peak)
                return plan
            except NoRoomError as error:
                refused = error
    raise refused


def list_micro_batches(options: AnyOptions, n_rows: int, data: Data) -> list[int]:
    """Return how many of a process's rows may go at a time, the largest number first."""
    at_most = options.micro_batch or max(1, MICRO_BATCH_TOKENS // data.row_tokens)
    micro = min(n_rows, at_most)
    return [micro >> n for n in range(1 if options.micro_batch else micro.bit_length())]


def _has_abundant_room(config: GPTConfig, n_tokens: int, world: World) -> bool:
    """Whether a step of so many tokens at a time fits by far, by a bound that is never passed.

    A layer keeps some 30 rows of D numbers, and its attention one for each head and position; the
    bound is twice that, with all logits, their gradient and a copy.
    """
    if world.device.type != "cpu" or world.size > 1:
        return False
    in_a_layer = 60 * config.inner_dim / 4 + 60 * config.n_embd / 4 + 20 * config.n_embd
    in_a_layer += 6 * config.n_head * config.n_positions
    numbers = n_tokens * (config.n_layer * in_a_layer + 4 * config.vocab_size)
    lasting = 24 * config.parameter_count()
    return 4 * numbers + lasting < ABUNDANT * measure_free(world.device)


def set_steps(draft: Plan, options: AnyOptions, steps: int, minutes: float | None = None) -> Plan:
    """Return a draft as a plan of so many steps, of which options give shares."""
    evaluations = options.evaluations
    if minutes is not None:
        evaluations = count_evaluations(minutes, evaluations)
    warmup = round(options.warmup * steps)
    cooldown = round(options.cooldown * steps) if options.schedule == "wsd" else 0
    pauses = pause_intervals(steps, options.eval_every, evaluations)
    rows = SAMPLE_SHARE * pauses["eval_every"] * draft.batch_size
    return replace(
        draft,
        steps=steps,
        warmup=warmup,
        cooldown=min(cooldown, steps - warmup),
        eval_batches=max(4, math.ceil(rows / draft.micro_batch)),
        **pauses,
    )


def pause_intervals(
    steps: int, eval_every: int | None = None, evaluations: int = EVALUATIONS
) -> dict[str, Any]:
    """Return the fields of a plan of so many steps that say when it pauses."""
    return {
        "eval_every": eval_every or max(1, min(steps // evaluations, 1000)),
        "save_every": max(1, min(steps // 4, 1000)),
    }


def replan(
    plan: Plan, data: Data, step: int, left: float, pace: float, n_processes: int = 1
) -> Plan | None:
    """Return the plan by which a run goes on that has `left` seconds and takes `pace` for a step.

    The rate goes on where the new number of steps has it. The warm-up is never cut, and evaluations
    do not come more often. None where the steps would change by less than `SAME_PACE`.
    """
    a_step = pace / (1 + SAMPLE_SHARE / 3)  # a pause is part of the pace
    fitting = step + count_steps(max(left, 0.0), a_step, data, plan, n_processes)
    steps = max(step + 1, plan.warmup, fitting)
    if abs(steps - plan.steps) < SAME_PACE * plan.steps:
        return None
    scale = steps / plan.steps
    pauses = pause_intervals(steps)
    return replace(
        plan,
        steps=steps,
        cooldown=min(round(plan.cooldown * scale), steps - plan.warmup),
        eval_every=max(plan.eval_every, min(pauses["eval_every"], round(plan.eval_every * scale))),
        save_every=pauses["save_every"],
        since=step,
    )


def make_longer(run: RunDirectory, options: AnyOptions, times: float) -> dict[str, Any]:
    """Let a run that has ended go on for so many times as long; return its new record.

    The rate goes on where the longer plan has it. Why the size was chosen is said of the first
    plan, whose time it was chosen for. Raises `CorruptInputError` for a damaged record.
    """
    tables = run.read_record()
    before = read_plan(tables)[1]
    step = run.reopen()
    steps = max(step + 1, options.steps or round(before.steps * times))
    cooldown = set_steps(before, options, steps).cooldown
    plan = replace(
        before,
        steps=steps,
        cooldown=min(cooldown, steps - before.warmup),
        minutes=None if before.minutes is None else before.minutes * times,
        reason="",
        **pause_intervals(steps, options.eval_every),
        since=step,
    )
    durations = {name: getattr(options, name) for name in DURATIONS}
    run.write_record({**tables, "options": tables["options"] | durations, **plan_tables(plan)})
    return run.read_record()


def measure_free(device: torch.device) -> float:
    """Return the free bytes of a device; infinitely many where the system does not tell."""
    free = free_memory(device)
    return math.inf if free is None else free


@dataclass(frozen=True)
class Peak:
    """The most bytes that a process of its own holds as it trains, the program included."""

    before: int
    """Held before any of it."""
    fixed: int
    """Whatever the rows are."""
    a_row: float
    """More for each row that is computed at a time, the longest that there may be."""

    def at(self, rows: int) -> int:
        """Return the peak of so many rows at a time."""
        return self.fixed + int(rows * self.a_row)


def measure_peak(
    objective: Objective, data: Data, plan: Plan, at_most: int, device: torch.device
) -> Peak:
    """Train a throw-away model on one row, two, four, until it is plain what a row takes.

    The bytes of its tensors are counted, so the result does not depend on what the process did
    before. Raises `NoRoomError` where a GPU has no room for one row.
    """
    gc.collect()
    before, room = held_memory(device), measure_free(device)
    memory, per_byte = TensorMemory(device), 1.0 if device.type == "cuda" else HEAP
    plan = replace(plan, compile="off", lr=1e-9)
    weights = None if objective.start is None else objective.start.gpt
    with memory.counting():
        model = prepare_blocks(objective.build().train(), plan).to(device)
        _, rules = make_optimizers(objective, model, plan)
    fewer = less = most = peak = 0
    scale, a_row = 1.0, 0.0
    for rows in (1, *sorted({min(1 << n, at_most) for n in range(at_most.bit_length() + 1)})):
        plan = replace(plan, batch_size=rows, micro_batch=rows)
        batch = data.batches(rows, plan.seed)(0)
        scale = data.row_tokens / batch[0][0].size
        try:
            with memory.counting(), contextlib.suppress(DivergedError):
                train_step(model, rules, batch, plan, objective=objective)
        except torch.OutOfMemoryError:
            if most == 0:
                raise NoRoomError(f"{device} has no room for one row of the batch") from None
            break
        if most == 0:  # the first step loads libraries, which belong to the program
            before = max(before, held_memory(device) - memory.peak)
        fewer, less, most, peak = most, peak, rows, int(memory.peak * per_byte)
        added = peak - less if most > fewer > 0 else 0
        a_row = added / (most - fewer) if added else 0.0
        others = a_row * (at_most - most)
        if added > PLAIN or (fewer > 1 and others < PLAIN) or peak + 2 * added > room:
            break
    del weights  # not before: the profiler warns when memory that it has not seen taken is freed
    return Peak(before, before + int(peak - most * a_row), scale * a_row)


def count_lasting(objective: Objective, plan: Plan) -> dict[str, int]:
    """Return the bytes of weights, and of gradients and moments of those that are trained."""
    config, n_trained = objective.config, objective.n_trained
    count = config.parameter_count()
    trained = count if n_trained is None else n_trained
    by_momentum = plan.optimizer == "muon" and n_trained is None
    in_matrices = 12 * config.n_layer * config.n_embd * config.n_embd if by_momentum else 0
    moments = 8 * trained - 4 * in_matrices
    return {"weights": 4 * count, "gradients": 4 * trained, "optimizer state": moments}


def require_lasting(objective: Objective, data: Data, plan: Plan, world: World) -> None:
    """Raise `NoRoomError` where weights and a batch cannot fit, before anything is built."""
    room, has = _measure_room(plan, world, held_memory(world.device))
    lasting = sum(count_lasting(objective, plan).values()) // world.n_shards
    if lasting > room:
        raise NoRoomError(
            f"{objective.config.parameter_count():,} parameters need {format_bytes(lasting)} to "
            f"train (weights, gradients and the optimizer's moments) and {world.device} has "
            f"{format_bytes(room)} {has}",
            hint="use a smaller model",
        )
    batch = 4 * 8 * plan.batch_size * data.row_tokens
    if lasting + batch > room:
        raise NoRoomError(
            f"a batch of {plan.batch_size:,} x {data.row_tokens:,} tokens takes "
            f"{format_bytes(batch)} beside {format_bytes(lasting)} of weights, gradients and "
            f"moments, and {world.device} has {format_bytes(room)} {has}",
            hint="use a smaller --batch-size",
        )


def require_memory(objective: Objective, data: Data, plan: Plan, world: World, peak: Peak) -> None:
    """Raise `NoRoomError`, with the arithmetic, where a step cannot fit in memory.

    The peak is that of one process. Of several each has one part in `world.n_shards` of what lasts,
    or, as DDP, all of it and the gradients twice.
    """
    room, has = _measure_room(plan, world, peak.before)
    config, lasting = objective.config, sum(count_lasting(objective, plan).values())
    need = peak.at(plan.micro_batch) - peak.before - (lasting - lasting // world.n_shards)
    if world.size > world.n_shards:
        trained = objective.n_trained
        need += 4 * (config.parameter_count() if trained is None else trained)
    if plan.micro_batch < world.share(plan.batch_size):
        need += 4 * config.vocab_size * config.n_embd  # W's gradient of a part, beside the sum
    if need <= room:
        return
    ways = ["a smaller --batch-size or --micro-batch"]
    ways += ["--recompute blocks"] if plan.recompute == "off" else []
    ways += ["more --memory"] if plan.memory is not None else []
    raise NoRoomError(
        f"a batch of {plan.batch_size:,} x {data.row_tokens:,} tokens, {plan.micro_batch:,} "
        f"sequences at a time, needs about {format_bytes(need)}, "
        f"{format_bytes(lasting // world.n_shards)} of them for weights, gradients and moments, "
        f"and {world.device} has {format_bytes(room)} {has}",
        hint=f"use {', or '.join(ways)}",
    )


def _measure_room(plan: Plan, world: World, before: int) -> tuple[float, str]:
    """Return the bytes that training may take beside the `before` of the program, and of what."""
    device = world.device
    room, has = measure_free(device) + held_memory(device) - before, "free"
    if device.type == "cpu" and world.n_local > 1:
        room, has = room / world.n_local, "free for each process"
    if plan.memory is None or room <= plan.memory - before:
        return room, has
    if plan.memory <= before:
        raise NoRoomError(
            f"--memory {format_bytes(plan.memory)}: the program alone takes {format_bytes(before)}"
        )
    return plan.memory - before, f"of --memory {format_bytes(plan.memory)} left beside the program"


def describe_memory(plan: Plan) -> str:
    """Return in words how a plan with a budget keeps to it."""
    how = ", blocks computed again in backward" if plan.recompute == "blocks" else ""
    memory = format_bytes(plan.memory or 0)
    return f"{plan.micro_batch:,} sequences at a time{how}, to stay in {memory}"

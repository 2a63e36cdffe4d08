"""Everything that is decided before the first step, so that a run is a function of it."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

import tiedgpt
from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, NoRoomError, TiedGPTError, UserError
from tiedgpt.train.blocks import decide
from tiedgpt.train.choice import choose
from tiedgpt.train.measures import describe
from tiedgpt.train.memory import measure_peak, require_lasting, require_memory
from tiedgpt.train.options import (
    DEFAULT_MINUTES,
    EVALUATIONS,
    MOST_EPOCHS,
    TrainOptions,
    parse_bytes,
)
from tiedgpt.train.pace import (
    MEASURED,
    SAMPLE_SHARE,
    faster_dtype,
    for_steps,
    measure_steps,
    step_seconds,
)
from tiedgpt.train.parallel import World
from tiedgpt.train.schedule import Plan, Recompute
from tiedgpt.train.task import Task

AnyTask = TypeVar("AnyTask", bound=Task)
MICRO_BATCH_TOKENS = 8192
FIRST_PART = 0.25
"""Of the time: then the steps that are left are planned again, by the pace so far."""
SAME_PACE = 0.05
"""A plan stays as it is where its steps would change by less."""
ENOUGH_HELD_OUT = 50
"""Examples; the score of fewer is too noisy to end a run by."""


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
    options: TrainOptions, task: AnyTask, world: World
) -> tuple[TrainOptions, AnyTask, str]:
    """Return the options, the task and why: of the size that suits the text, where it is not given.

    All processes of a `world` must call this, and get the same.
    """
    if not options.chooses or task.text_tokens is None:
        return options, task, ""
    seconds = 60 * MEASURED * (options.minutes or DEFAULT_MINUTES)
    chosen, reason, warning = choose(
        options, task.text_tokens, lambda sized: measure_speed(sized, task, world, seconds=seconds)
    )
    return chosen, task_of_size(task, chosen), f"{reason}; {warning}" if warning else reason


def make_plan(
    options: TrainOptions,
    task: Task,
    device: torch.device,
    *,
    world: World | None = None,
    reason: str = "",
) -> Plan:
    """Derive what was not set, measuring where the machine decides.

    `reason` says why the task has its size. Raises `NoRoomError` for a model that cannot fit in
    memory, before anything is built. In a `world` of several processes all must call this, and get
    the same.
    """
    world = world or World(device)
    draft = world.on_main(lambda: draft_plan(options, task, world))
    world.on_main(lambda: world.require_work(draft))
    unit, amount = options.duration
    minutes, steps = None, int(amount)
    if unit == "epochs":
        steps = math.ceil(amount * task.epoch_rows / draft.batch_size)
        rows = draft.batch_size
        least = min(options.least_steps, math.ceil(MOST_EPOCHS * task.epoch_rows / rows))
        if steps < least:
            steps, epochs = least, least * rows / task.epoch_rows
            reason = (
                f"{task.n_examples:,} examples are few: {steps:,} steps see each of them about "
                f"{epochs:,.0f} times; --epochs or --steps decide otherwise"
            )
    elif unit == "minutes":
        minutes = amount
        steps = measure_steps(minutes, task, draft, world)
    return replace(set_steps(draft, options, steps), minutes=minutes, reason=reason)


def draft_plan(options: TrainOptions, task: Task, world: World) -> Plan:
    """Return a plan of which all is decided but the number of steps, and what depends on it."""
    config, device = task.config, world.device
    if options.untie_at is not None and not config.tie_word_embeddings:
        raise UserError("--untie-at: the model to start from is untied already")
    compiles, _ = decide(options.compile, device, one_shape=task.unit == "tokens")
    draft = Plan(
        steps=1,
        batch_size=options.batch_rows(task.context, task.epoch_rows),
        micro_batch=1,
        optimizer=options.rule,
        lr=options.peak_rate(config),
        warmup=0,
        weight_decay=options.decay,
        grad_clip=options.grad_clip,
        dtype="bf16" if options.dtype == "auto" else options.dtype,
        seed=options.seed,
        eval_every=1,
        eval_batches=1,
        save_every=1,
        patience=options.limit_of_patience,
        can_end_early=_can_end_early(options, task),
        keep=options.keep,
        size="" if options.continues else options.named_size,
        schedule=options.schedule,
        untie_at=None if options.untie_at is None else 0,
        memory=None if options.memory is None else parse_bytes(options.memory),
        compile="on" if compiles else "off",
    )
    require_lasting(config, draft, task.row_tokens, world, task.trained)
    if options.dtype == "auto":
        draft = replace(draft, dtype=faster_dtype(config, device))
    return fit_micro_batch(draft, options, task, world)


def _can_end_early(options: TrainOptions, task: Task) -> bool:
    """Whether validation may end a run: not on a handful of examples, unless that was asked for."""
    return options.patience is not None or task.n_held_out >= ENOUGH_HELD_OUT


def task_of_size(task: AnyTask, options: TrainOptions) -> AnyTask:
    """Return the task for a model of the shape that the options name, with its vocabulary."""
    size, bos, eos = task.config.vocab_size, task.config.bos_token_id, task.config.eos_token_id
    return task.with_config(options.model_config(vocab_size=size, bos=bos, eos=eos))


def measure_speed(options: TrainOptions, task: Task, world: World, *, seconds: float) -> float:
    """Return the tokens a second at which a size of a fresh model is trained."""
    sized = task_of_size(task, options)
    plan = world.on_main(lambda: draft_plan(options, sized, world))
    step = step_seconds(sized, plan, world, seconds=seconds)
    return plan.batch_size * sized.row_units / step


def fit_micro_batch(draft: Plan, options: TrainOptions, task: Task, world: World) -> Plan:
    """Decide how many sequences go at a time and what is recomputed: the fastest that fits.

    Fewer at a time come first, which costs little; then recomputing, about a third of a step.
    """
    at_most = options.micro_batch or max(1, MICRO_BATCH_TOKENS // task.row_tokens)
    micro = min(world.share(draft.batch_size), at_most)
    sizes = [micro >> n for n in range(1 if options.micro_batch else micro.bit_length())]
    ways: list[Recompute] = ["off", "blocks"] if options.memory is not None else ["off"]
    if options.recompute != "auto":
        ways = [options.recompute]
    shared_out = world.n_shards > 1  # no device has room for all of it
    place = torch.device("cpu") if shared_out else world.device
    for recompute in ways:
        peak = measure_peak(task, replace(draft, recompute=recompute), sizes[0], place)
        for size in sizes:
            plan = replace(draft, micro_batch=size, recompute=recompute)
            try:
                require_memory(task.config, plan, task.row_tokens, peak, world, task.trained)
                return plan
            except NoRoomError as error:
                refused = error
    raise refused


def set_steps(draft: Plan, options: TrainOptions, steps: int) -> Plan:
    """Return a draft as a plan of so many steps, of which options give shares."""
    warmup, untie_at = round(options.warmup * steps), options.untie_at
    cooldown = round(options.cooldown * steps) if options.schedule == "wsd" else 0
    pauses = pause_intervals(steps, options.eval_every, options.evaluations())
    rows = SAMPLE_SHARE * pauses["eval_every"] * draft.batch_size
    return replace(
        draft,
        steps=steps,
        warmup=warmup,
        cooldown=min(cooldown, steps - warmup),
        untie_at=None if untie_at is None else min(round(untie_at * steps), steps - 1),
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


def replan(plan: Plan, task: Task, step: int, seconds: float) -> Plan | None:
    """Return the plan by which a run goes on that did `step` steps of its time in `seconds`.

    A pause is part of the pace. The rate goes on where the new number of steps has it. The warm-up
    is never cut. None where the steps would change by less than `SAME_PACE`.
    """
    assert plan.minutes is not None
    pace = seconds / step
    last = pace / 3 * task.held_out_rows / plan.batch_size
    steps = max(step + 1, plan.warmup, int(for_steps(plan.minutes, last) / pace))
    if abs(steps / plan.steps - 1) < SAME_PACE:
        return None
    scale, usual = steps / plan.steps, pause_intervals(plan.steps)["eval_every"]
    untie_at = plan.untie_at
    if untie_at is not None and untie_at > step:
        untie_at = max(step + 1, min(round(untie_at * scale), steps - 1))
    return replace(
        plan,
        steps=steps,
        cooldown=min(round(plan.cooldown * scale), steps - plan.warmup),
        untie_at=untie_at,
        **pause_intervals(steps, None if plan.eval_every == usual else plan.eval_every),
        since=step,
        before=plan,
    )


def longer_plan(plan: Plan, options: TrainOptions, step: int, times: float) -> Plan:
    """Return the plan by which a run that ended after `step` steps goes on for so many times.

    Why its size was chosen is said of the first plan, whose time it was chosen for.
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
        before=replace(plan, before=None),
    )


def record(
    options: TrainOptions,
    config: GPTConfig,
    plan: Plan,
    counted: dict[str, dict[str, Any]],
    text_digest: str | None = None,
    world: World | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the tables of run.toml; `counted` are those that tell what the data holds."""
    processes = {}
    if world is not None and world.size > 1:
        parallel = "fsdp" if world.n_shards > 1 else "ddp"
        processes = {"processes": {"number": world.size, "parallel": parallel}}
    return {
        "options": asdict(options),
        "model": asdict(config),
        **plan_tables(plan),
        "text": {"sha256": text_digest},
        **counted,
        **processes,
        "machine": describe(),
        "versions": {
            "tiedgpt": tiedgpt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
        },
    }


def plan_tables(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the tables of run.toml that hold a plan and, if there was one, the plan before it."""
    tables = {"training": plan, "training_before": plan.before}
    return {name: asdict(replace(each, before=None)) for name, each in tables.items() if each}


def recorded(tables: dict[str, Any]) -> tuple[GPTConfig, Plan]:
    """Return the config and the plan that `record` wrote."""
    try:
        before = tables.get("training_before")
        plan = Plan(**tables["training"], before=None if before is None else Plan(**before))
        return GPTConfig(**tables["model"]), plan
    except (KeyError, TypeError, TiedGPTError) as error:
        wrote = tables.get("versions", {}).get("tiedgpt", "unknown")
        raise CorruptInputError(
            f"run.toml is damaged or of another edition (tiedgpt {wrote} wrote it, this is "
            f"{tiedgpt.__version__}): {error}",
            hint="give another --out, with --start DIRECTORY/model to begin with its model",
        ) from None

"""Everything that is decided before the first step, so that a run is a function of it."""

from __future__ import annotations

import math
import platform
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
import torch.nn.functional as F

import tiedgpt
from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, NoRoomError, TiedGPTError, UserError
from tiedgpt.train.blocks import decide, in_training
from tiedgpt.train.choice import FIRST, MOST_PASSES, expected_loss, ladder, with_choices
from tiedgpt.train.measures import describe
from tiedgpt.train.memory import measured_peak, require_lasting, require_memory
from tiedgpt.train.optim import groups_and_optimizers
from tiedgpt.train.options import (
    DEFAULT_EPOCHS,
    DEFAULT_MINUTES,
    Keep,
    TrainOptions,
    parse_bytes,
)
from tiedgpt.train.parallel import World
from tiedgpt.train.schedule import Growth, Rule, Schedule, learning_rate
from tiedgpt.train.step import train_step
from tiedgpt.train.task import Task

MICRO_BATCH_TOKENS = 8192
EVALUATIONS = 10
SAMPLE_SHARE = 0.1
"""Rows of the fixed sample that is scored between steps, of those trained on in the meantime."""
MEASURED = 0.01
"""Of the time: so long a size is measured, if its steps are not longer."""
FIRST_PART = 0.25
"""Of the time: then the steps that are left are planned again, by the pace so far."""
SAME_PACE = 0.05
"""A plan stays as it is where its steps would change by less."""
MANY = 1000
"""Steps, of which shares are whole numbers."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's numbers; with the data and the seed they decide every weight."""

    steps: int
    batch_size: int
    """Sequences in a step."""
    micro_batch: int
    """Sequences computed at a time."""
    optimizer: Rule
    """Of the blocks' matrices."""
    lr: float
    warmup: int
    """Steps of warm-up."""
    weight_decay: float
    grad_clip: float
    dtype: str
    seed: int
    eval_every: int
    """Steps between evaluations on a part of the validation text."""
    eval_batches: int
    """Batches of that part; the last evaluation takes all, up to two million tokens."""
    save_every: int
    skip_limit: int = 10
    """Steps that are not finite, of the last 200, that end the run."""
    patience: int | None = None
    """Evaluations without improvement that end the run."""
    keep: Keep = "best"
    """Which weights are published; with "best" the run ends when validation has turned."""
    schedule: Schedule = "linear"
    cooldown: int = 0
    """Last steps, in which the rate of wsd falls."""
    batch_warmup: int = 0
    """First steps, in which the batch grows."""
    length_warmup: int = 0
    """First steps, in which the rows of a batch grow."""
    untie_at: int | None = None
    """Steps after which W only reads, and a head that begins as its copy predicts."""
    memory: int | None = None
    """Bytes that training may take in all, where that was asked for."""
    recompute: str = "off"
    """Whether "blocks" are computed again in backward; the same bits."""
    compile: str = "off"
    """Whether blocks are compiled, "on" or "off"."""
    minutes: float | None = None
    """The time from which the steps were measured; None where it does not decide."""
    size: str = ""
    """The name of the shape, of a fresh model."""
    reason: str = ""
    """Why this size was chosen, where it was."""
    since: int = 0
    """Steps after which this plan came into force."""
    before: Plan | None = None
    """The plan of the steps until then."""

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "micro_batch", "eval_every", "eval_batches", "save_every")
        from_0 = ("warmup", "seed", "cooldown", "batch_warmup", "length_warmup", "since")
        optional = {"patience": 1, "memory": 1, "untie_at": 0}
        least = dict.fromkeys((*counts, "skip_limit"), 1) | dict.fromkeys(from_0, 0)
        least |= {name: n for name, n in optional.items() if getattr(self, name) is not None}
        sound = (
            all(type(getattr(self, name)) is int for name in least)
            and all(getattr(self, name) >= n for name, n in least.items())
            and all(type(x) in (int, float) for x in (self.lr, self.weight_decay, self.grad_clip))
            and self.schedule in get_args(Schedule)
            and self.keep in get_args(Keep)
            and self.dtype in DTYPES
            and self.optimizer in get_args(Rule)
            and self.recompute in ("off", "blocks")
            and self.compile in ("on", "off")
        )
        if not sound:
            raise CorruptInputError(f"no training goes by this plan: {self}")

    def at(self, step: int) -> Plan:
        """Return the plan that is in force for a step, from 0."""
        return self if self.before is None or step >= self.since else self.before

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        plan = self.at(step)
        return learning_rate(
            step,
            peak=plan.lr,
            warmup=plan.warmup,
            steps=plan.steps,
            schedule=plan.schedule,
            cooldown=plan.cooldown,
        )

    def growth(self, row_units: int) -> Growth:
        """Return the shapes of the batches; `row_units` are the tokens of a whole row."""
        return Growth(
            batch_size=self.batch_size,
            micro_batch=self.micro_batch,
            row_units=row_units,
            batch_warmup=self.batch_warmup,
            length_warmup=self.length_warmup,
        )

    def untied(self, step: int) -> bool:
        """Whether the state after `step` steps has the head that the run makes on its way."""
        return self.untie_at is not None and step > self.untie_at

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matrix products, where it is not the weights' own."""
        return None if self.dtype == "fp32" else DTYPES[self.dtype]


def training_device(name: str = "auto") -> torch.device:
    """Return the device of that name; auto is the GPU where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here: {why}") from None


def make_plan(
    options: TrainOptions, task: Task, device: torch.device, *, world: World | None = None
) -> Plan:
    """Derive what was not set, measuring where the machine decides.

    Raises `NoRoomError` for a model that cannot fit in memory, before anything is built. In a
    `world` of several processes all must call this, and get the same.
    """
    world, reason = world or World(device), ""
    if options.chooses and task.text_tokens is not None:
        options, reason = chosen(options, task, task.text_tokens, world)
    draft = world.lead(lambda: drafted(options, task, world))
    world.lead(lambda: world.require_work(draft))
    steps, batch_size, minutes = options.steps, draft.batch_size, None
    epochs = options.epochs
    if epochs is None and options.minutes is None and options.task != "lm":
        epochs = DEFAULT_EPOCHS
    if steps is None and epochs is not None:
        share = growing_share(options, draft, task.row_units)
        steps = math.ceil(epochs * task.epoch_rows / batch_size / share)
    if steps is None:
        minutes = options.minutes or DEFAULT_MINUTES
        steps = measured_steps(minutes, task, draft, world)
        steps = round(steps / growing_share(options, draft, task.row_units))
    rows = SAMPLE_SHARE * paused(steps, options.eval_every)["eval_every"] * batch_size
    return replace(
        draft,
        steps=steps,
        minutes=minutes,
        reason=reason,
        **scheduled(options, steps),
        **paused(steps, options.eval_every),
        eval_batches=max(4, math.ceil(rows / draft.micro_batch)),
    )


def paused(steps: int, eval_every: int | None = None) -> dict[str, Any]:
    """Return the fields of a plan of so many steps that say when it pauses."""
    return {
        "eval_every": eval_every or max(1, min(steps // EVALUATIONS, 1000)),
        "save_every": max(1, min(steps // 4, 1000)),
    }


def replanned(plan: Plan, task: Task, step: int, seconds: float) -> Plan | None:
    """Return the plan by which a run goes on that did `step` steps of its time in `seconds`.

    A pause is part of the pace. The rate goes on where the new number of steps has it; what has
    begun to grow does so as before. None where the steps would change by less than `SAME_PACE`.
    """
    assert plan.minutes is not None
    growth = plan.growth(task.row_units)
    a_unit = seconds / growth.units_before(step)
    last = a_unit / 3 * task.held_out_rows * task.row_units
    units = (plan.minutes * 60 - last) / a_unit
    grown = max(step, plan.batch_warmup, plan.length_warmup)
    rest = (units - growth.units_before(grown)) / (plan.batch_size * task.row_units)
    steps = max(step + 1, grown + int(rest))
    if abs(steps / plan.steps - 1) < SAME_PACE:
        return None
    scale, usual = steps / plan.steps, paused(plan.steps)["eval_every"]
    untie_at = plan.untie_at
    if untie_at is not None and untie_at > step:
        untie_at = max(step + 1, min(round(untie_at * scale), steps - 1))
    return replace(
        plan,
        steps=steps,
        cooldown=min(round(plan.cooldown * scale), steps - plan.warmup),
        untie_at=untie_at,
        **paused(steps, None if plan.eval_every == usual else plan.eval_every),
        since=step,
        before=plan,
    )


def longer_plan(plan: Plan, options: TrainOptions, step: int, times: float) -> Plan:
    """Return the plan by which a run that ended after `step` steps goes on for so many times."""
    steps = max(step + 1, options.steps or round(plan.steps * times))
    cooldown = scheduled(options, steps)["cooldown"]
    return replace(
        plan,
        steps=steps,
        cooldown=min(cooldown, steps - plan.warmup),
        **paused(steps, options.eval_every),
        since=step,
        before=replace(plan, before=None),
    )


def drafted(options: TrainOptions, task: Task, world: World) -> Plan:
    """Return a plan of which all is decided but the number of steps, and what depends on it."""
    config, device = task.config, world.device
    if options.untie_at is not None and not config.tie_word_embeddings:
        raise UserError("--untie-at: the model to begin with has a head of its own already")
    decay = options.weight_decay
    one_shape = task.unit == "tokens" and not options.length_warmup
    compiles, _ = decide(options.compile, device, one_shape=one_shape)
    draft = Plan(
        steps=options.steps or 1,
        batch_size=options.default_batch_size(),
        micro_batch=1,
        optimizer=options.rule(),
        lr=options.lr or options.default_rate(config),
        warmup=0,
        weight_decay=options.default_weight_decay() if decay is None else decay,
        grad_clip=options.grad_clip,
        dtype="bf16" if options.dtype == "auto" else options.dtype,
        seed=options.seed,
        eval_every=1,
        eval_batches=1,
        save_every=1,
        skip_limit=options.skip_limit,
        patience=options.patience,
        keep=options.keep,
        size=options.named_size if options.start is None else "",
        schedule=options.schedule,
        untie_at=None if options.untie_at is None else 0,
        memory=None if options.memory is None else parse_bytes(options.memory),
        compile="on" if compiles else "off",
    )
    require_lasting(config, draft, task.row_tokens, world)
    if options.dtype == "auto":
        draft = replace(draft, dtype=faster_dtype(config, device))
    return fitted(draft, options, task, world)


def fitted(draft: Plan, options: TrainOptions, task: Task, world: World) -> Plan:
    """Decide how many sequences go at a time and what is recomputed: the fastest that fits.

    Fewer at a time come first, which costs little; then recomputing, about a third of a step.
    """
    at_most = options.micro_batch or max(1, MICRO_BATCH_TOKENS // task.row_tokens)
    micro = min(world.share(draft.batch_size), at_most)
    sizes = [micro >> n for n in range(1 if options.micro_batch else micro.bit_length())]
    ways = ["off", "blocks"] if options.memory is not None else ["off"]
    if options.recompute != "auto":
        ways = [options.recompute]
    shared_out = world.holders > 1  # no device has room for all of it
    place = torch.device("cpu") if shared_out else world.device
    for recompute in ways:
        peak = measured_peak(task, replace(draft, recompute=recompute), sizes[0], place)
        for size in sizes:
            plan = replace(draft, micro_batch=size, recompute=recompute)
            try:
                require_memory(task.config, plan, task.row_tokens, peak, world)
                return plan
            except NoRoomError as error:
                refused = error
    raise refused


def scheduled(options: TrainOptions, steps: int) -> dict[str, Any]:
    """Return the fields of a plan of so many steps that options give as shares of them."""
    warmup = round(options.warmup * steps)
    untie_at = options.untie_at
    return {
        "warmup": warmup,
        "cooldown": min(round(options.cooldown * steps), steps - warmup)
        if options.schedule == "wsd"
        else 0,
        "batch_warmup": round(options.batch_warmup * steps),
        "length_warmup": round(options.length_warmup * steps),
        "untie_at": None if untie_at is None else min(round(untie_at * steps), steps - 1),
    }


def growing_share(options: TrainOptions, draft: Plan, row_units: int) -> float:
    """Return what share of the tokens of whole batches the steps see, as batch and rows grow."""
    plan = replace(draft, steps=MANY, **scheduled(options, MANY))
    return plan.growth(row_units).units_before(MANY) / (MANY * plan.batch_size * row_units)


def faster_dtype(config: GPTConfig, device: torch.device) -> str:
    """Return "bf16" where a product of the MLP's shape is faster in it than in fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    seconds = {}
    for name, dtype in DTYPES.items():
        x = torch.randn(1024, config.n_embd, dtype=dtype, device=device)
        w = torch.randn(config.inner_dim, config.n_embd, dtype=dtype, device=device)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            F.linear(x, w)
            times.append(time.perf_counter() - began)
        seconds[name] = min(times)
    return "bf16" if seconds["bf16"] < 0.8 * seconds["fp32"] else "fp32"


def chosen(
    options: TrainOptions, task: Task, text_tokens: int, world: World
) -> tuple[TrainOptions, str]:
    """Return the options with what suits text, time and machine, and why: see `choice.py`.

    The task has the model of that size afterwards. Sizes are measured as far as is needed.
    """
    minutes = options.minutes or DEFAULT_MINUTES
    found: dict[str, tuple[float, TrainOptions, float]] = {}

    def judged(size: str) -> float:
        if size not in found:
            plain = replace(options, dropout=options.dropout or 0.0)
            sized = with_choices(plain, size, math.inf, text_tokens)
            per_second = speed(sized, task, world, seconds=MEASURED * minutes * 60)
            tokens = min(minutes * 60 * per_second, MOST_PASSES * text_tokens)
            loss = expected_loss(size, tokens, text_tokens)
            found[size] = loss, with_choices(options, size, tokens, text_tokens), per_second
        return found[size][0]

    sizes = ladder(text_tokens)
    place = sizes.index(FIRST) if FIRST in sizes else 0
    judged(sizes[place])
    for way in (1, -1):
        while 0 <= place + way < len(sizes) and judged(sizes[place + way]) < judged(sizes[place]):
            place += way
    best = sizes[place]
    _, sized, per_second = found[best]
    task.resize(resized(sized, task))
    time_passes = minutes * 60 * per_second / text_tokens
    passes = min(time_passes, MOST_PASSES)
    tried = ", ".join(size for size in sizes if size in found)
    reason = (
        f"{best} has the lowest expected loss of {tried} in {minutes:g} minutes here: "
        f"{passes:.1f} passes at {per_second:,.0f} tokens/s, dropout {task.config.resid_pdrop:g}"
    )
    if time_passes > MOST_PASSES:
        rows = sized.default_batch_size() * task.context
        steps = math.ceil(MOST_PASSES * text_tokens / rows)
        task.notes.append(
            f"warning: {text_tokens:,} tokens are too little text for {minutes:g} minutes: "
            f"{time_passes:,.0f} passes would learn it by heart, so this run ends after "
            f"{MOST_PASSES}, in about {steps * rows / per_second:,.0f} s; more text is worth more "
            "than more time"
        )
        sized = replace(sized, steps=steps, minutes=None)
    return sized, reason


def resized(options: TrainOptions, task: Task) -> GPTConfig:
    """Return the task's config with the shape that the options name."""
    config = task.config
    return options.model_config(
        vocab_size=config.vocab_size, bos=config.bos_token_id, eos=config.eos_token_id
    )


def speed(options: TrainOptions, task: Task, world: World, *, seconds: float) -> float:
    """Return the tokens a second at which a size of a fresh model is trained."""
    task.resize(resized(options, task))
    plan = world.lead(lambda: drafted(options, task, world))
    step = step_seconds(task, plan, world, seconds=seconds)
    return plan.batch_size * task.row_units / step


def step_seconds(task: Task, plan: Plan, world: World, *, seconds: float) -> float:
    """Return how long a step takes, by steps of a throw-away model, in all processes.

    It is the lower quartile of many: a busy moment of the machine makes some of them longer.
    """
    model = world.place(in_training(task.build().train(), plan))
    rules = world.optimizers(groups_and_optimizers(task, model, replace(plan, lr=1e-5), 0)[1])
    batch_of = task.batches(plan)
    times: list[float] = []

    def passed() -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    while len(times) < 4 or (sum(times) < seconds and len(times) < 60):
        began = time.perf_counter()
        train_step(model, rules, batch_of(len(times)), plan, world, task=task)
        times.append(world.lead(passed))
    return statistics.quantiles(times[1:], n=4)[0]


def measured_steps(minutes: float, task: Task, plan: Plan, world: World) -> int:
    """Return how many steps, with the evaluations between and after them, take so long."""
    step = step_seconds(task, plan, world, seconds=min(4.0, 2 * MEASURED * minutes * 60))
    # A forward is a third of a step; evaluations, by one process, see a tenth of what is trained
    # on, the last one all of the text.
    forward = step / 3 * world.size
    last = forward * task.held_out_rows / plan.batch_size
    return max(1, int((minutes * 60 - last) / (step + forward * SAMPLE_SHARE)))


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
        parallel = "fsdp" if world.holders > 1 else "ddp"
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
            f"{tiedgpt.__version__}): {error}; give another --out, with --start DIRECTORY/model to "
            "begin with its model"
        ) from None

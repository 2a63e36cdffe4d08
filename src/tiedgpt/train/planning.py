"""Pure functions from the options, facts about the data, and the machine to a plan.

    config, plan = plan_run(options, config, facts, machine)

The only impure input is `machine.tokens_per_second`. `--size auto` chooses the size with the lowest
expected validation loss, in bits per byte and up to a constant (Hoffmann et al. 2022,
arXiv 2203.15556, section 3.3):

    LOSS_A / N^LOSS_ALPHA + LOSS_B / D'^LOSS_BETA

N are the parameters of the blocks. D are the tokens trained on in the time at the measured speed,
and D' the effective tokens: each further epoch over a text of U tokens is worth less (Muennighoff
et al. 2023, arXiv 2305.16264, equation 5).

    D' = U + U R (1 - exp(-(D/U - 1) / R))

The constants are fitted to runs on 2.4 MB of Python's documentation (nano to mini, 0.3 to 4.5
million tokens, half an epoch to seven): with a constant of 1.203 the law is within 2 % of their
final scores. `bench/auto_size.py` measures what the choice is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_type_hints

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, NoRoomError, UserError
from tiedgpt.files import format_bytes, format_count
from tiedgpt.train.optim import OPTIMIZERS
from tiedgpt.train.options import (
    AUTO,
    DEFAULT_MINUTES,
    EVALUATIONS_PER_RUN,
    MAX_EPOCHS,
    SIZES,
    Keep,
    Schedule,
    TrainOptions,
    parse_bytes,
)

if TYPE_CHECKING:
    import torch

Dtype = Literal["fp32", "bf16"]
Recompute = Literal["off", "blocks"]
COUNTS = "steps", "batch_size", "micro_batch", "eval_every", "eval_batches", "save_every"
"""Fields that are at least 1."""
COSINE_FLOOR = 0.1
"""Share of the peak at which cosine ends: Brown et al. 2020, appendix B; Hoffmann et al. 2022."""
CANDIDATE_SIZES = ("nano", "tiny", "little", "mini", "small", "medium")
GPU_CANDIDATE_SIZES = (*CANDIDATE_SIZES, "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FIRST_CANDIDATE = "tiny"
LOSS_A, LOSS_ALPHA = 62.0, 0.5
LOSS_B, LOSS_BETA = 108.0, 0.39
REPEAT_DECAY_EPOCHS = 6.0
"""R of the law; Muennighoff et al. measured 15.4 on larger models."""
MAX_AUTO_EPOCHS = 16
"""Maximum number of epochs with --size auto: more of them memorize the text."""
AUTO_DROPOUT, DROPOUT_MIN_EPOCHS, DROPOUT_MIN_PARAMETERS_PER_TOKEN = 0.1, 8.0, 1.0
"""`tiny` on 0.3 MB ended 5 % lower after 14 epochs with 0.1 than after 6 without, and memorized the
text after 16 epochs without; it ended 11 % higher after 6 with 0.15."""
MAX_PARAMETERS_PER_TOKEN = 12
"""Larger models mostly memorize the text."""
WARN_PARAMETERS_PER_TOKEN = 24
WARN_BATCH_SHARE = 0.1
"""Share of an epoch in one batch above which a warning is given."""
SHORT_RUN_STEPS = 100
"""A run with fewer steps is warned about."""
SPEED_EXPONENT = 0.4
"""Exponent of a bound: with N times the parameters, a size has at most N^-0.4 of the speed.

`little` has 0.46 to 0.66 of the speed of `tiny` (bound: 0.72), `mini` 0.26 of `little` (0.51).
"""
TARGET_MIN_STEPS = 300
"""Number of steps that a run should have: smaller batches are chosen to reach it."""
GPU_TARGET_MIN_STEPS = 1000
"""The same for the larger batches of published sizes on a GPU."""
MIN_STEPS = 50
"""A size with fewer steps is not chosen if a smaller one has more."""
MIN_TEXT_BYTES = 16
VOCABULARY_RANGE = 384, 8192
CHARACTERS_PER_TOKEN_OF_VOCABULARY = 1000

MICRO_BATCH_TOKENS = 8192
"""Most tokens in a micro-batch on a CPU unless --micro-batch is given."""
GPU_MICRO_BATCH_TOKENS = 65_536
"""The same on a GPU, where more tokens keep it busy and the memory is the limit."""
COMPILE_SPEEDUP = 1.5
"""Speed of compiled blocks over that of plain ones on a GPU: an estimate."""
ALLOCATOR_SHARE = {True: 0.2, False: 0.1}
"""Memory beyond the tensors' bytes on a CPU (True) and on a GPU. On a CPU malloc keeps freed blocks
that are too small for the next request: six models of 6 to 22 million parameters took 0.93 to 1.27
of their tensors' bytes."""
ATTENTION_SCORE_BYTES = 10
"""Bytes per attention score with dropout on a CPU: the score, its softmax, the dropped one."""
MIN_HELD_OUT_EXAMPLES = 50
"""With fewer examples the validation loss is too noisy to end a run early."""

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
FEW_SCORED_ROWS = 100
"""Number of rows of examples up to which the final evaluation takes all, in any time."""
PAUSE_SHARE, PAUSE_SECONDS = 0.02, 0.2
"""Share of the time that samples and checkpoints may take, and seconds for one of each."""
CLOSING_SECONDS = 1.0
"""Seconds for writing the model and its card."""
REPLAN_CHECKS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the steps, or of the time, at which the plan is compared with the clock."""
REPLAN_TOLERANCE = 0.05
"""Smallest relative change of the number of steps for a new plan."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run; with the data and the seed they decide every weight."""

    steps: int
    batch_size: int
    """Sequences in a step."""
    micro_batch: int
    """Sequences computed at a time."""
    optimizer: str
    """Optimizer of the blocks' matrices: a name in `optim.OPTIMIZERS`."""
    lr: float
    warmup: int
    """Steps of warm-up."""
    weight_decay: float
    grad_clip: float
    dtype: Dtype
    seed: int
    eval_every: int
    """Steps between evaluations on a part of the validation text."""
    eval_batches: int
    """Number of micro-batches in that part."""
    save_every: int
    patience: int | None = None
    """Number of evaluations without improvement that ends the run; None: a rising loss ends it."""
    can_end_early: bool = True
    """Whether validation may end the run before its last step."""
    keep: Keep = "best"
    """Which weights are published."""
    schedule: Schedule = "linear"
    cooldown: int = 0
    """Number of last steps in which the rate of wsd decays."""
    memory: int | None = None
    """Memory limit of the process in bytes (--memory)."""
    recompute: Recompute = "off"
    """"blocks": activation checkpointing, with the same bits."""
    compile: Literal["on", "off"] = "off"
    """Whether blocks are compiled."""
    threads: int | None = None
    """CPU threads, if they were asked for or measured to be faster than the default."""
    minutes: float | None = None
    """Duration that decides the number of steps, or None."""
    final_batches: int | None = None
    """Micro-batches of the final score, or None for all held-out data."""
    size: str = ""
    """Name of the size of a fresh model."""
    reason: str = ""
    """Reason for the chosen size or number of steps."""
    since: int = 0
    """Number of steps done by an earlier plan."""

    def __post_init__(self) -> None:
        kinds = get_type_hints(Plan)
        sound = all(_fits(getattr(self, name), kind) for name, kind in kinds.items())
        numbers = [value for value in vars(self).values() if isinstance(value, (int, float))]
        sound = sound and all(0 <= number < math.inf for number in numbers) and self.minutes != 0
        if not sound or any(getattr(self, name) < 1 for name in COUNTS):
            raise CorruptInputError(f"invalid plan: {self}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        It rises linearly to `lr` in `warmup` steps. Then `schedule` decides:
        - linear: decays to 0 after the last step (Bergsma et al. 2025, arXiv 2502.15938);
        - wsd: stays constant, then decays linearly to 0 over the last `cooldown` steps (Hägele et
          al. 2024, arXiv 2405.18392);
        - cosine: decays along half a cosine wave to a tenth of the peak (Brown et al. 2020).
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        falling = self.steps - self.warmup
        if self.schedule == "cosine":
            wave = (1 + math.cos(math.pi * (step - self.warmup) / max(1, falling))) / 2
            return self.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * wave)
        if self.schedule == "wsd":
            falling = self.cooldown
        return self.lr * min(1.0, (self.steps - step) / max(1, falling))

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of matmuls under autocast, or None for fp32."""
        import torch  # not for `--help`

        return None if self.dtype == "fp32" else torch.bfloat16


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of this type, of one of several, or one of a `Literal`."""
    kinds = get_args(kind) or (kind,)
    return value in kinds or type(value) in kinds or (type(value) is int and float in kinds)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Numbers about the data and the trained parameters that a plan depends on."""

    unit: str = "examples"
    """tokens or examples."""
    row_units: int = 1
    """Units in a row of a batch."""
    row_tokens: int = 1
    """Tokens in the longest row."""
    epoch_rows: int = 1
    held_out_rows: float = 0.0
    """Rows of the final evaluation."""
    n_examples: int = 0
    """Number of training examples, or 0 for text."""
    n_held_out: float = math.inf
    text_tokens: int | None = None
    """Tokens of the training text, or None for examples."""
    text_bytes: int = MIN_TEXT_BYTES
    n_trained: int | None = None
    """Number of trained parameters, or None for all."""
    predicts_tokens: bool = True
    """Whether the head predicts tokens of the vocabulary."""

    @property
    def memorizes(self) -> bool:
        """Whether the examples are so few that none is held out."""
        return self.n_examples > 0 and self.n_held_out == 0

    def with_context(self, context: int) -> Self:
        """Return the facts of the same text in rows of another context."""
        assert self.text_tokens is not None
        return replace(
            self,
            row_units=context,
            row_tokens=context,
            epoch_rows=max(1, -(-(self.text_tokens - 1) // context)),
            held_out_rows=self.held_out_rows * self.row_tokens / context,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device that trains, as a plan sees it; of several processes the share of one."""

    tokens_per_second: Callable[[GPTConfig, Plan], float]
    """Training speed of all processes together, measured or given."""
    device: str = "cpu"
    dtype: Dtype = "fp32"
    """Fastest dtype of matmuls."""
    free_bytes: float = math.inf
    """Memory that this process may take in addition to `used_bytes`."""
    used_bytes: int = 0
    """Memory of the program before training."""
    threads: int | None = None
    """CPU threads, if they were asked for or measured to be faster than the default."""
    missing_compiler: str | None = None
    """Reason why torch.compile cannot be used, or None."""
    compile_seconds: Callable[[], float] = lambda: 0.0
    """Seconds that compiling the blocks takes: as measured, or expected before that."""
    n_processes: int = 1
    n_shards: int = 1
    """Processes that share each matrix (FSDP2)."""

    @property
    def is_cpu(self) -> bool:
        """Whether a CPU trains."""
        return self.device.startswith("cpu")

    @property
    def is_gpu(self) -> bool:
        """Whether a CUDA GPU trains."""
        return self.device.startswith("cuda")


def plan_run(
    options: TrainOptions,
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


def apply_size(options: TrainOptions, config: GPTConfig, facts: Facts) -> tuple[GPTConfig, Facts]:
    """Return the config and the facts for the size and context of the options."""
    sized = options.model_config(
        vocab_size=config.vocab_size, bos=config.bos_token_id, eos=config.eos_token_id
    )
    return sized, facts.with_context(sized.n_positions)


def draft_plan(options: TrainOptions, config: GPTConfig, facts: Facts, machine: Machine) -> Plan:
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


def wants_compile(options: TrainOptions, facts: Facts, machine: Machine) -> bool:
    """Return whether the blocks may be compiled; `auto`: on a GPU, for rows of one length.

    On a CPU, our own products and attention are faster (`bench/train.py --compile`).
    """
    if options.compile == "auto":
        return machine.is_gpu and facts.unit == "tokens"
    return options.compile == "on"


def compile_pays(
    draft: Plan,
    options: TrainOptions,
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


# Size


def effective_tokens(tokens: float, text_tokens: int) -> float:
    """Return the number of tokens seen once that equal `tokens` of a repeated text."""
    repeats = max(0.0, tokens / text_tokens - 1)
    repeated = REPEAT_DECAY_EPOCHS * (1 - math.exp(-repeats / REPEAT_DECAY_EPOCHS))
    return min(tokens, text_tokens) + text_tokens * repeated


def count_block_parameters(size: str) -> int:
    """Return N, the parameters of a size's blocks without norms and biases."""
    return 12 * SIZES[size].n_layer * SIZES[size].n_embd ** 2


def expected_loss(size: str, tokens: float, text_tokens: int) -> float:
    """Return the expected final loss of a size, up to a constant, in bits per byte."""
    effective = effective_tokens(tokens, text_tokens)
    return LOSS_A / count_block_parameters(size) ** LOSS_ALPHA + LOSS_B / effective**LOSS_BETA


def candidate_sizes(text_tokens: int, names: tuple[str, ...] = CANDIDATE_SIZES) -> list[str]:
    """Return the sizes that are not too large for a text, smallest first; at least one."""
    most = MAX_PARAMETERS_PER_TOKEN * text_tokens
    sizes = [size for size in names if count_block_parameters(size) <= most]
    return sizes or [CANDIDATE_SIZES[0]]


def choose_vocabulary_size(characters: int) -> int:
    """Return the size of the vocabulary for a text: a power of two."""
    least, most = VOCABULARY_RANGE
    tokens = max(1, characters / CHARACTERS_PER_TOKEN_OF_VOCABULARY)
    return max(least, min(most, 2 ** round(math.log2(tokens))))


def choose_context(size: str, text_tokens: int) -> int:
    """Return the context of a size: at most a sixteenth of the text, as a power of two."""
    short = 2 ** math.floor(math.log2(max(1.0, text_tokens / 16)))
    return max(min(SIZES[size].n_positions, short), min(8, text_tokens - 1), 1)


def choose_batch(size: str, context: int, tokens: float, machine: Machine) -> int:
    """Return the rows of a batch: fewer than the size's for a short run of so many tokens.

    On a GPU, a published size has a power of two of rows, at most the published number of tokens.
    """
    record = SIZES[size]
    if not machine.is_gpu or record.batch_tokens is None:
        return max(1, int(min(record.batch_size, tokens / context / TARGET_MIN_STEPS)))
    rows = min(record.batch_tokens, tokens / GPU_TARGET_MIN_STEPS) / context
    return 1 << int(math.log2(max(record.batch_size, rows)))


def with_published_batch(
    options: TrainOptions,
    config: GPTConfig,
    facts: Facts,
    machine: Machine,
    seconds_spent: float,
) -> TrainOptions:
    """Return the options with the batch size of a fresh model of a published size on a GPU."""
    size, is_fresh = options.named_size, options.start is None and options.recipe == "train"
    has_batch = options.batch_size is not None or SIZES[size].batch_tokens is None
    if has_batch or not (is_fresh and machine.is_gpu) or facts.text_tokens is None:
        return options

    def with_batch(tokens: float) -> TrainOptions:
        return replace(options, batch_size=choose_batch(size, facts.row_tokens, tokens, machine))

    unit, amount, _ = options.duration
    if unit == "steps":
        return with_batch(math.inf)
    if unit == "epochs":
        return with_batch(amount * facts.text_tokens)
    draft = draft_plan(replace(with_batch(math.inf), compile="off"), config, facts, machine)
    speed = machine.tokens_per_second(config, draft)
    return with_batch(seconds_left(60 * amount, seconds_spent) * speed)


def with_choices(
    options: TrainOptions, size: str, tokens: float, text_tokens: int, machine: Machine
) -> TrainOptions:
    """Return the options with a size and its context, batch size and dropout.

    Given options stay unchanged. `tokens` is the number of tokens trained on.
    """
    epochs, excess = tokens / text_tokens, count_block_parameters(size) / text_tokens
    repeats = epochs >= DROPOUT_MIN_EPOCHS and excess >= DROPOUT_MIN_PARAMETERS_PER_TOKEN
    dropout = AUTO_DROPOUT if repeats else 0.0
    context = options.context or choose_context(size, text_tokens)
    return replace(
        options,
        size=size,
        context=context,
        batch_size=options.batch_size or choose_batch(size, context, tokens, machine),
        dropout=dropout if options.dropout is None else options.dropout,
    )


@dataclass(frozen=True)
class Candidate:
    """A size with its expected result."""

    options: TrainOptions
    tokens: float
    """Tokens that it is trained on."""
    speed: float
    """Tokens per second."""
    rank: tuple[bool, float]
    """Whether it has too few steps, and its expected loss or, then, its number of parameters."""


def judge_size(
    size: str,
    options: TrainOptions,
    config: GPTConfig,
    facts: Facts,
    machine: Machine,
    seconds: float,
) -> Candidate:
    """Return the expected result of training a size for some seconds, not compiled."""
    text_tokens = facts.text_tokens or 1
    without_dropout = replace(options, dropout=options.dropout or 0.0)
    sized = with_choices(without_dropout, size, math.inf, text_tokens, machine)
    sized_config, sized_facts = apply_size(sized, config, facts)
    n_parameters = count_block_parameters(size)
    try:
        draft = draft_plan(replace(sized, compile="off"), sized_config, sized_facts, machine)
    except NoRoomError:
        return Candidate(sized, 0.0, 0.0, (True, n_parameters))
    speed = machine.tokens_per_second(sized_config, draft)
    tokens = min(seconds * speed, text_tokens * (options.epochs or MAX_AUTO_EPOCHS))
    chosen = with_choices(options, size, tokens, text_tokens, machine)
    steps = seconds * speed / (chosen.batch_size or 1) / sized_facts.row_units
    if steps < MIN_STEPS:
        return Candidate(chosen, tokens, speed, (True, n_parameters))
    return Candidate(chosen, tokens, speed, (False, expected_loss(size, tokens, text_tokens)))


def choose_size(
    options: TrainOptions,
    config: GPTConfig,
    facts: Facts,
    machine: Machine,
    seconds_spent: float,
) -> tuple[TrainOptions, str]:
    """Return the options with the size that suits the text and the time, and why.

    Sizes are measured one by one from `FIRST_CANDIDATE`: larger ones, then smaller ones, until the
    expected loss rises. A larger size is not measured if its loss would be higher even at the
    highest speed that it can have (`SPEED_EXPONENT`). A text is trained on at most
    `MAX_AUTO_EPOCHS` times, or `--epochs` times.
    """
    text_tokens = facts.text_tokens or 1
    if facts.text_bytes < MIN_TEXT_BYTES:
        raise UserError(
            f"the training text has {format_count(facts.text_bytes, 'byte')}, too few to learn "
            "anything from",
            hint="give more text",
        )
    minutes = options.minutes or DEFAULT_MINUTES
    seconds = seconds_left(60 * minutes, seconds_spent)
    results: dict[str, Candidate] = {}

    def judge(size: str) -> tuple[bool, float]:
        if size not in results:
            results[size] = judge_size(size, options, config, facts, machine, seconds)
        return results[size].rank

    def can_win(size: str, than: str) -> bool:
        smaller = count_block_parameters(than) / count_block_parameters(size)
        most = text_tokens * (options.epochs or MAX_AUTO_EPOCHS)
        tokens = min(seconds * results[than].speed * min(1.0, smaller) ** SPEED_EXPONENT, most)
        return smaller > 1 or expected_loss(size, tokens, text_tokens) < judge(than)[1]

    names = GPU_CANDIDATE_SIZES if machine.is_gpu else CANDIDATE_SIZES
    sizes = candidate_sizes(text_tokens, names)
    at = sizes.index(FIRST_CANDIDATE) if FIRST_CANDIDATE in sizes else 0
    has_few_steps, _ = judge(sizes[at])
    for direction in (-1,) if has_few_steps else (1, -1):
        while (
            0 <= at + direction < len(sizes)
            and can_win(sizes[at + direction], than=sizes[at])
            and judge(sizes[at + direction]) < judge(sizes[at])
        ):
            at += direction
    best = results[sizes[at]]
    time = format_count(minutes, "minute")
    reason = (
        f"{sizes[at]} has the lowest expected loss of {', '.join(s for s in sizes if s in results)}"
        f" in {time} here; dropout {best.options.dropout:g}"
    )
    epochs = seconds * best.speed / text_tokens
    if options.epochs or epochs <= MAX_AUTO_EPOCHS:
        return best.options, reason
    reason += (
        f"; {text_tokens:,} tokens are too little text for {time}: more than {MAX_AUTO_EPOCHS} "
        "epochs would memorize it, so this run ends after them; more text helps more than more time"
    )
    return replace(best.options, epochs=float(MAX_AUTO_EPOCHS), minutes=None), reason


def find_warnings(
    options: TrainOptions, config: GPTConfig, facts: Facts, machine: Machine, plan: Plan
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
    if facts.text_tokens is not None and options.start is None and not options.chooses:
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


# Memory


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
    parts["allocator"] = int(ALLOCATOR_SHARE[machine.is_cpu] * sum(parts.values()))
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
    if plan.memory <= machine.used_bytes:
        raise NoRoomError(
            f"--memory {format_bytes(plan.memory)}: the program alone takes "
            f"{format_bytes(machine.used_bytes)}"
        )
    return min(machine.free_bytes, plan.memory - machine.used_bytes)


def fit_micro_batch(
    draft: Plan, options: TrainOptions, config: GPTConfig, facts: Facts, machine: Machine
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


# Time


def seconds_left(seconds: float, spent: float) -> float:
    """Return the remaining seconds for training, at least half of all."""
    return max(seconds - spent, MIN_TIME_SHARE * seconds)


def plan_steps(draft: Plan, options: TrainOptions, facts: Facts, reason: str) -> Plan:
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


def set_steps(
    draft: Plan, options: TrainOptions, steps: int, evaluations: int | None = None
) -> Plan:
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


def prolong(plan: Plan, options: TrainOptions, step: int, times: float) -> Plan:
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

    def measure(self, plan: Plan, step: int, now: float) -> float | None:
        """Return the seconds per step since the last check if a check is due."""
        elapsed = 1 - (self.deadline - now) / max(self._seconds, 1e-9)
        done = max(step / plan.steps, self._start + (1 - self._start) * elapsed)
        last_step, last_time = self._last
        if not self._checks or done < self._checks[0] or step == last_step:
            return None
        self._checks = [check for check in self._checks if check > done]
        self._last = step, now
        return (now - last_time) / (step - last_step)

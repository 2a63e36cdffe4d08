"""The choice of a fresh model's size, context, batch, dropout and vocabulary.

`--size auto` chooses the size with the lowest expected validation loss, in bits per byte and up to
a constant (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3):

    LOSS_A / N^LOSS_ALPHA + LOSS_B / D'^LOSS_BETA

N are the parameters of the blocks. D are the tokens trained on in the time at the measured speed,
and D' the effective tokens: each further epoch over a text of U tokens is worth less (Muennighoff
et al. 2023, arXiv 2305.16264, equation 5).

    D' = U + U R (1 - exp(-(D/U - 1) / R))

A and B are fitted to runs on 2.4 MB of Python's documentation (nano to mini, 0.3 to 4.5 million
tokens, half an epoch to seven), with R = 6. With R = 3 and a constant of 1.183 the law is within
1 % of the six in `bench/results/auto_size-2026-11-22.jsonl`. `bench/auto_size.py` measures what the
choice is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.files import format_count
from tiedgpt.train.plan.draft import draft_plan
from tiedgpt.train.plan.options import DEFAULT_MINUTES, TrainOptions
from tiedgpt.train.plan.sizes import SIZES
from tiedgpt.train.plan.time import seconds_left
from tiedgpt.train.plan.values import MIN_TEXT_BYTES, Facts, Machine

CANDIDATE_SIZES = ("nano", "tiny", "little", "slim", "mini", "small", "medium")
GPU_CANDIDATE_SIZES = (*CANDIDATE_SIZES, "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FIRST_CANDIDATE = "tiny"
LOSS_A, LOSS_ALPHA = 62.0, 0.5
LOSS_B, LOSS_BETA = 108.0, 0.39
REPEAT_DECAY_EPOCHS = 3.0
"""R of the law; Muennighoff et al. measured 15.4 on larger models. With 6, `little` was
chosen for 17 epochs of 1 MB and ended at 1.503 nats a character; `slim` ends at 1.469 after 7."""
MAX_AUTO_EPOCHS = 16
"""Maximum number of epochs with --size auto: more of them memorize the text."""
AUTO_DROPOUT, DROPOUT_MIN_EPOCHS, DROPOUT_MIN_PARAMETERS_PER_TOKEN = 0.1, 8.0, 1.0
"""`tiny` on 0.3 MB ended 5 % lower after 14 epochs with 0.1 than after 6 without, and memorized the
text after 16 epochs without; it ended 11 % higher after 6 with 0.15."""
MAX_PARAMETERS_PER_TOKEN = 12
"""Larger models mostly memorize the text."""
SPEED_EXPONENT = 0.4
"""Exponent of a bound: with N times the parameters, a size has at most N^-0.4 of the speed.

`little` has 0.46 to 0.66 of the speed of `tiny` (bound: 0.72), `slim` 0.49 of `little` (0.76),
`mini` 0.26 (0.60).
"""
TARGET_MIN_STEPS = 300
"""Number of steps that a run should have: smaller batches are chosen to reach it."""
GPU_TARGET_MIN_STEPS = 1000
"""The same for the larger batches of published sizes on a GPU."""
MIN_STEPS = 50
"""A size with fewer steps is not chosen if a smaller one has more."""
VOCABULARY_RANGE = 384, 8192
CHARACTERS_PER_TOKEN_OF_VOCABULARY = 1000


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
    size, is_fresh = options.named_size, options.start is None
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


def apply_size(options: TrainOptions, config: GPTConfig, facts: Facts) -> tuple[GPTConfig, Facts]:
    """Return the config and the facts for the size and context of the options."""
    sized = options.model_config(
        vocab_size=config.vocab_size, bos=config.bos_token_id, eos=config.eos_token_id
    )
    return sized, facts.with_context(sized.n_positions)

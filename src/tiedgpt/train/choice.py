"""Which model to train for a text and a time: the rule of `--size auto`. No torch.

A size is judged by the loss that it is expected to end with, in bits per byte and up to a constant
that is the same for all of them:

    A / N^ALPHA  +  B / D'^BETA            (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3)

N are the parameters of its blocks. D are the tokens that it sees in the time at its measured speed,
and D' what they are worth, as the text of U tokens is seen again and again: a pass is worth less
the more there were (Muennighoff et al. 2023, arXiv 2305.16264, equation 5; their R is 15.4).

    D' = U + U R (1 - exp(-(D/U - 1) / R))

Sizes with more than `MOST_EXCESS` parameters for each token of the text are left out: they are only
good for learning it by heart. What else is chosen:

- a text is seen at most `MOST_PASSES` times: what is left of the time would be spent on learning it
  by heart;
- dropout (`DROPOUT`) where a model of at least `DROPOUT_EXCESS` parameters a token of the text
  sees it `DROPOUT_PASSES` times and more: `tiny` on 0.3 MB ended 5 % lower after 14 passes with 0.1
  than after 6 without, learned it by heart in 16 without, and ended 11 % higher after 6 with 0.15;
- a vocabulary of a token for each 1,000 characters of text, a power of two (`vocabulary`);
- the context is the size's own, and at most a sixteenth of the text (`context`);
- a batch is the size's own, and smaller where there would be fewer than `LEAST_STEPS` steps.

The constants are fitted to runs on 2.4 MB of Python's documentation (nano to mini, 0.3 to 4.5
million tokens, half a pass to seven): with a constant of 1.203 the law is within 2 % of what they
ended with. `bench/auto_size.py` measures what the choice is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tiedgpt.train.options import DEFAULT_MINUTES, SIZES, TrainOptions, format_count

LADDER = ("nano", "tiny", "little", "mini", "small", "medium")
FIRST = "tiny"
A, ALPHA = 62.0, 0.5
B, BETA = 108.0, 0.39
R = 6.0
MOST_PASSES = 16
DROPOUT, DROPOUT_PASSES, DROPOUT_EXCESS = 0.1, 8.0, 1.0
MOST_EXCESS = 12
LEAST_STEPS = 300
VOCABULARY = 384, 8192
"""The smallest and the largest that is chosen."""


def worth(tokens: float, text_tokens: int) -> float:
    """Return how many tokens seen once are worth `tokens` of a text of `text_tokens`."""
    again = max(0.0, tokens / text_tokens - 1)
    return min(tokens, text_tokens) + text_tokens * R * (1 - math.exp(-again / R))


def parameters(size: str) -> int:
    """Return N, the parameters of a size's blocks without norms and biases."""
    return 12 * SIZES[size].n_layer * SIZES[size].n_embd ** 2


def expected_loss(size: str, tokens: float, text_tokens: int) -> float:
    """Return what a size is expected to end with, up to a constant, in bits per byte."""
    return A / parameters(size) ** ALPHA + B / worth(tokens, text_tokens) ** BETA


def ladder(text_tokens: int) -> list[str]:
    """Return the sizes that suit a text, from the smallest: one at least."""
    most = max(MOST_EXCESS * text_tokens, parameters(LADDER[0]))
    return [size for size in LADDER if parameters(size) <= most]


def vocabulary(characters: int) -> int:
    """Return the tokens of a vocabulary that is trained on a text of so many characters."""
    least, most = VOCABULARY
    return max(least, min(most, 2 ** round(math.log2(max(1, characters / 1000)))))


def context(size: str, text_tokens: int) -> int:
    """Return the context of a size on a text: a power of two where the text is short."""
    short = 2 ** math.floor(math.log2(max(1.0, text_tokens / 16)))
    return max(min(SIZES[size].n_positions, short), min(8, text_tokens - 1), 1)


def with_choices(options: TrainOptions, size: str, tokens: float, text_tokens: int) -> TrainOptions:
    """Return the options with this size, and with what goes with so many tokens on this text.

    What the options say themselves stays as it is.
    """
    passes, excess = tokens / text_tokens, parameters(size) / text_tokens
    often = passes >= DROPOUT_PASSES and excess >= DROPOUT_EXCESS
    dropout = DROPOUT if often else SIZES[size].dropout
    row = options.context or context(size, text_tokens)
    batch = max(1, int(min(SIZES[size].batch_size, tokens / row / LEAST_STEPS)))
    return replace(
        options,
        size=size,
        context=row,
        batch_size=options.batch_size or batch,
        dropout=dropout if options.dropout is None else options.dropout,
    )


def choose(
    options: TrainOptions, text_tokens: int, speed: Callable[[TrainOptions], float]
) -> tuple[TrainOptions, str, str, float]:
    """Return the options with what suits the text and the time, why, a warning or "", the speed.

    `speed` measures the tokens a second of a size. One size after the other is measured, from
    `FIRST` on, larger and larger, then smaller, until the expected loss rises. A text is seen
    `MOST_PASSES` times at most, or `--epochs` times.
    """
    minutes = options.minutes or DEFAULT_MINUTES
    most = text_tokens * (options.epochs or MOST_PASSES)
    found: dict[str, tuple[float, float, float]] = {}  # expected loss, tokens seen, tokens/s

    def loss(size: str) -> float:
        if size not in found:
            plain = replace(options, dropout=options.dropout or 0.0)
            fast = speed(with_choices(plain, size, math.inf, text_tokens))
            seen = min(60 * minutes * fast, most)
            found[size] = expected_loss(size, seen, text_tokens), seen, fast
        return found[size][0]

    sizes = ladder(text_tokens)
    at = sizes.index(FIRST) if FIRST in sizes else 0
    loss(sizes[at])
    for way in (1, -1):
        while 0 <= at + way < len(sizes) and loss(sizes[at + way]) < loss(sizes[at]):
            at += way
    _, seen, fast = found[sizes[at]]
    made = with_choices(options, sizes[at], seen, text_tokens)
    time = format_count(minutes, "minute")
    reason = (
        f"{sizes[at]} has the lowest expected loss of {', '.join(s for s in sizes if s in found)} "
        f"in {time} at {fast:,.0f} tokens/s here; dropout {made.dropout:g}"
    )
    passes = 60 * minutes * fast / text_tokens
    if options.epochs or passes <= MOST_PASSES:
        return made, reason, "", fast
    warning = (
        f"{text_tokens:,} tokens are too little text for {time}: "
        f"{passes:,.0f} epochs would memorize it, so this run ends after {MOST_PASSES}, in about "
        f"{most / fast:,.0f} s; more text helps more than more time"
    )
    return replace(made, epochs=float(MOST_PASSES), minutes=None), reason, warning, fast

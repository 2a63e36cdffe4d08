"""What changes from step to step: the rate, the rows of a batch, their length. Pure functions.

The rate is not rescaled where a batch is small: neither AdamW's nor Muon's update grows with the
gradient.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Literal

Rule = Literal["adamw", "muon"]
"""How matrices of the blocks are updated."""
Schedule = Literal["linear", "wsd", "cosine"]
COSINE_FLOOR = 0.1
"""Of the peak, where cosine ends: Brown et al. 2020, appendix B; Hoffmann et al. 2022."""
FIRST_SHARE = 8
"""A warm-up of batch or length begins with an eighth."""
LENGTHS = 16
"""Rows that are not whole yet are a multiple of so many tokens long."""
WIDTH_EXPONENTS: dict[Rule, float] = {"adamw": 1.0, "muon": 0.5}


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup: int,
    steps: int,
    schedule: Schedule = "linear",
    cooldown: int = 0,
) -> float:
    """Return the rate of a step, from 0: it rises linearly to `peak` in `warmup` steps.

    Then it goes by `schedule`:
    - linear: falls to 0 after the last step (Bergsma et al. 2025, arXiv 2502.15938);
    - wsd: stays, and falls linearly to 0 over the last `cooldown` steps (Hägele et al. 2024, arXiv
      2405.18392);
    - cosine: falls along half a wave to a tenth of the peak (Brown et al. 2020).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "cosine":
        wave = (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
        return peak * (COSINE_FLOOR + (1 - COSINE_FLOOR) * wave)
    falling = steps - warmup if schedule == "linear" else cooldown
    return peak * min(1.0, (steps - step) / max(1, falling))


def transferred_rate(rate: float, *, width: int, to: int, rule: Rule) -> float:
    """Return the peak rate at the width `to` that does what `rate` does at `width`.

    An update should change a unit's output equally at every width. AdamW's elements are of one size
    and add up over the inputs: 1 / width (Yang et al. 2022, arXiv 2203.03466, table 8). Muon's
    update, scaled to match AdamW's (Liu et al. 2025, arXiv 2502.16982), has a spectral norm that
    grows with the root of the width: 1 / sqrt(width) (Yang et al. 2023, arXiv 2310.17813). `rule`
    is that of the blocks' matrices; one rate serves all groups.
    """
    return rate * (width / to) ** WIDTH_EXPONENTS[rule]


class Growth:
    """The shape of each step's batch, and what was trained on before it."""

    def __init__(
        self,
        *,
        batch_size: int,
        micro_batch: int,
        row_units: int,
        batch_warmup: int = 0,
        length_warmup: int = 0,
    ) -> None:
        """Have rows grow to `batch_size` and to `row_units` in so many steps each.

        The batch grows by whole micro-batches or, where one holds it all, by eighths; the rows by
        16 tokens, from an eighth of the context (Li et al. 2022, "The Stability-Efficiency
        Dilemma", arXiv 2108.06084).
        """
        self.whole = batch_size, row_units
        unit = micro_batch if micro_batch < batch_size else -(-batch_size // FIRST_SHARE)
        warmups = (batch_size, unit, batch_warmup), (row_units, LENGTHS, length_warmup)
        steps = max(batch_warmup, length_warmup)
        self._shapes = [
            (_grown(step, *warmups[0]), _grown(step, *warmups[1])) for step in range(steps)
        ]
        self._rows_before = [0, *accumulate(rows for rows, _ in self._shapes)]
        self._units_before = [0, *accumulate(rows * units for rows, units in self._shapes)]

    def shape(self, step: int) -> tuple[int, int]:
        """Return the rows of a step's batch, from 0, and their length."""
        return self._shapes[step] if step < len(self._shapes) else self.whole

    def rows_before(self, step: int) -> int:
        """Return how many rows the steps before one were trained on."""
        known = min(step, len(self._shapes))
        return self._rows_before[known] + (step - known) * self.whole[0]

    def units_before(self, step: int) -> int:
        """Return how many tokens, or examples, the steps before one were trained on."""
        known = min(step, len(self._shapes))
        return self._units_before[known] + (step - known) * self.whole[0] * self.whole[1]


def _grown(step: int, whole: int, unit: int, warmup: int) -> int:
    """Return what a size has grown to: from an eighth, by whole units."""
    if step >= warmup:
        return whole
    share = (1 + (FIRST_SHARE - 1) * step / warmup) / FIRST_SHARE
    return min(whole, unit * math.ceil(share * whole / unit))

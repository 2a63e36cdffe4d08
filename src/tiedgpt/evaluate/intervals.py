"""How far a mean over a sample may be from the mean over all such data: 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
Z = 1.959964
"""Standard errors to either side."""
T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""The same where the spread is estimated: with 1, 2, ... degrees of freedom."""


def ratio_interval(totals: Sequence[float], counts: Sequence[float]) -> Interval:
    """Return the interval of sum(totals) / sum(counts), of groups that do not depend on each other.

    Tokens of a text depend on each other, so documents or long stretches are the groups. The ratio
    is the mean of each group's ratio, weighted by its count; its variance is estimated without
    bias where the groups' ratios vary equally, and Student's t has the degrees of freedom of that
    estimate (Satterthwaite 1946; Bell and McCaffrey 2002): fewer than groups where one is much
    longer than the others. (nan, nan) of one group.
    """
    if len(totals) < 2:
        return math.nan, math.nan
    weights = np.divide(counts, math.fsum(counts))
    ratios = np.divide(totals, counts)
    mean = float(weights @ ratios)
    # sum w_i^2 (r_i - mean)^2 is a quadratic form of the ratios: its matrix has these two traces
    w2, w3, w4 = (float((weights**power).sum()) for power in (2, 3, 4))
    trace = w2 - 2 * w3 + w2 * w2
    trace_of_square = w4 + 2 * w4 * w2 + 2 * w3 * w3 + w2**4 - 4 * (weights**5).sum()
    trace_of_square += 2 * w2 * w4 - 4 * w2 * w2 * w3
    variance = float(weights**2 @ (ratios - mean) ** 2) * w2 / trace
    reach = _student(trace * trace / trace_of_square) * math.sqrt(variance)
    return mean - reach, mean + reach


def share_interval(n_right: int, n: int) -> Interval:
    """Return the interval of n_right / n, which stays between 0 and 1 (Wilson 1927)."""
    share, spread = n_right / n, Z * Z / n
    centre = (share + spread / 2) / (1 + spread)
    reach = Z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def t_interval(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of values that do not depend on each other (Student 1908).

    For differences of pairs, give the differences. (nan, nan) of one value.
    """
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    reach = _student(n - 1) * error
    return mean - reach, mean + reach


def _student(degrees: float) -> float:
    """Return how many standard errors Student's t reaches; a fraction of a degree is not used."""
    whole = max(1, int(degrees + 1e-9))
    return T[whole - 1] if whole <= len(T) else Z + (Z**3 + Z) / (4 * whole)

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
"""The same where the spread is estimated from a few values: 2, 3, ... of them."""


def ratio_interval(totals: Sequence[float], counts: Sequence[float]) -> Interval:
    """Return the interval of sum(totals) / sum(counts), of groups that do not depend on each other.

    Tokens of a text depend on each other, so windows or documents are the groups (the linearized
    variance of a ratio: Cochran 1977, "Sampling Techniques", 2.11). (nan, nan) of one group.
    """
    n = len(totals)
    if n < 2:
        return math.nan, math.nan
    mean = math.fsum(totals) / math.fsum(counts)
    residuals = np.subtract(totals, np.multiply(mean, counts))
    error = math.sqrt(float(residuals @ residuals) * n / (n - 1)) / math.fsum(counts)
    return mean - Z * error, mean + Z * error


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
    reach = (T[n - 2] if n - 2 < len(T) else Z + (Z**3 + Z) / (4 * (n - 1))) * error
    return mean - reach, mean + reach

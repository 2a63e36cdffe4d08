"""95 % confidence intervals of means and shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
Z = 1.959964
"""Standard errors on either side of a normal mean."""
T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Standard errors for an estimated variance (Student's t), by degrees of freedom from 1."""


def ratio_interval(totals: Sequence[float], counts: Sequence[float]) -> Interval:
    """Return the interval of sum(totals) / sum(counts) over independent groups.

    The tokens of a text are correlated, so a group is a document or a long stretch of one. The
    ratio is the mean of the groups' ratios, weighted by their counts. Its variance estimate is
    unbiased for groups of equal variance; Student's t has the degrees of freedom of that estimate
    (Satterthwaite 1946; Bell and McCaffrey 2002). A single group gives (nan, nan).
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
    """Return the interval of n_right / n, which lies between 0 and 1 (Wilson 1927)."""
    share, spread = n_right / n, Z * Z / n
    centre = (share + spread / 2) / (1 + spread)
    reach = Z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _student(degrees: float) -> float:
    """Return Student's t in standard errors, for degrees of freedom rounded down."""
    degrees = max(1, int(degrees + 1e-9))
    return T[degrees - 1] if degrees <= len(T) else Z + (Z**3 + Z) / (4 * degrees)

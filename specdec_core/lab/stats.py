"""Intervals and tests, from scipy. Every test states what it would have seen, not only a p-value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def bootstrap(
    rows: Sequence[Sequence[float]] | np.ndarray,
    statistic: Callable[[np.ndarray], float],
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Cluster bootstrap: whole prompts are drawn anew, since tokens of one prompt are not independent.

    Args:
        rows: ``[prompts, columns]``, one row of totals a prompt.
        statistic: of the column sums ``[columns]``, e.g. ``lambda s: s[0] / s[1]`` for a pooled ratio.

    With fewer than two prompts nothing is known of the spread, and the interval is the whole line.
    """
    table = np.asarray(rows, dtype=float)
    value = float(statistic(table.sum(0)))
    if len(table) < 2:
        return Interval(value, -np.inf, np.inf)
    picks = np.random.default_rng(seed).integers(0, len(table), (draws, len(table)))
    values = [statistic(sums) for sums in table[picks].sum(1)]
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def law_test(counts: Sequence[int], law: Sequence[float]) -> float:
    """p-value of ``counts`` under ``law`` (chi-square); 0 when a token of probability 0 was seen."""
    observed, expected = np.asarray(counts, dtype=float), np.asarray(law, dtype=float)
    if observed[expected == 0].sum() > 0:
        return 0.0
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) == 1:
        return 1.0
    return float(stats.chisquare(observed, expected / expected.sum() * observed.sum()).pvalue)


def power_against(
    law: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray, samples: int, false_alarm: float
) -> float:
    """Probability that :func:`law_test` at level ``false_alarm`` notices that tokens come from ``other``."""
    p, r = np.asarray(law, dtype=float), np.asarray(other, dtype=float)
    if r[p == 0].sum() > 0:
        return float(1 - (1 - r[p == 0].sum()) ** samples)
    p, r = p[p > 0], r[p > 0]
    shift = samples * float(((r - p) ** 2 / p).sum())
    if shift == 0:
        return false_alarm
    return float(stats.ncx2.sf(stats.chi2.isf(false_alarm, len(p) - 1), len(p) - 1, shift))


def detectable_distance(law: Sequence[float], samples: int, false_alarm: float, power: float = 0.999) -> float:
    """The total variation from ``law`` that :func:`law_test` notices with probability ``power``, for the direction
    that is hardest to see: mass moved between the two likeliest tokens."""
    p = np.asarray(law, dtype=float)
    first, second = np.argsort(p)[-1], np.argsort(p)[-2]

    def shortfall(distance: float) -> float:
        moved = p.copy()
        moved[first] -= distance
        moved[second] += distance
        return power_against(p, moved, samples, false_alarm) - power

    widest = float(p[first]) * (1 - 1e-9)
    return float(optimize.brentq(shortfall, 1e-9, widest)) if shortfall(widest) > 0 else float("nan")

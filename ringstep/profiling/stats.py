"""How far two runs lie apart, and how much of it the noise of their iterations may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_ITERATIONS = 5
"""Fewer say nothing of their noise: a bootstrap of four values has 35 different samples."""
RESAMPLES = 10_000
SEED = 20


@dataclass(frozen=True)
class Ratio:
    """Median of b over median of a; the bounds of its 95 % interval, None where a side has too few iterations."""

    value: float
    low: float | None
    high: float | None


def median_ratio(a: Sequence[float], b: Sequence[float], seed: int = SEED) -> Ratio:
    """Compare two runs by their medians: b / a with a percentile bootstrap interval of 95 %, the same at every call.

    The iterations of a run count as independent. Between two runs (another day, another phone of the same kind) there
    is more noise than within one, and none of it is in here.
    """
    value = float(np.median(b) / np.median(a))
    if min(len(a), len(b)) < MIN_ITERATIONS:
        return Ratio(value, None, None)
    random = np.random.default_rng(seed)
    ratios = resampled_medians(b, random) / resampled_medians(a, random)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(value, float(low), float(high))


def resampled_medians(times: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """Medians of RESAMPLES samples drawn from `times` with replacement, as float64.

    Drawn without the samples, so that 100 000 iterations cost what 25 do: a sample is sorted[floor(n * u)] of n uniform
    numbers u, of which the k-th smallest is Beta(k, n - k + 1), and the next one the least of the n - k above it.
    """
    ordered, n = np.sort(np.asarray(times, np.float64)), len(times)
    k = (n + 1) // 2
    u = random.beta(k, n - k + 1, RESAMPLES)
    medians = ordered[(u * n).astype(int).clip(max=n - 1)]
    if n % 2:
        return medians
    above = 1 - (1 - u) * random.random(RESAMPLES) ** (1 / (n - k))
    return (medians + ordered[(above * n).astype(int).clip(max=n - 1)]) / 2

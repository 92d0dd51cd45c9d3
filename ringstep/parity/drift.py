"""Drift: does a long generation move away from the reference as it goes on?

    SNR, dB |x x  xx x   xx x xx        |x x  xx                    |x x  xx x
            |  xx   x xx   x     level  |   xx  x xx x      slope   |  xx            fall
            +-------------------        +---------------xx--        +----------xx x-x-x
                        position                    position                   position

Errors that stay where they are made leave a level. Errors that a cache carries on, or entries that are lost at each
wrap of a ring, make a slope; a fault that begins at some position, such as a window's first wrap, makes a fall. Both
are judged on medians over blocks of positions, because neighbours share their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringstep.errors import RingstepError

CEILING_DB = 100.0  # what lies above is rounding of float32, which no generation shows
SKIPPED = 16  # of the slope: the first positions attend to little and are better by 2 to 3 dB whatever rounds a model
BLOCK = 10
FEWEST_BLOCKS = 4
FEWEST_TOKENS = SKIPPED + FEWEST_BLOCKS * BLOCK
CONFIDENCE = 0.95
SLOPE_DB = 2.0  # for 100 positions: a slope that counts
FALL_DB = 6.0  # twice the error, for good: a fall that counts, even if it is
ERRORS = 3.0  # of its standard errors smaller


@dataclass(frozen=True)
class Slope:
    """SNR over position in dB for each 100 positions, with the bounds of its confidence interval."""

    db_per_100: float
    low: float
    high: float

    @property
    def drifts(self) -> bool:
        """Whether it surely goes down, and steeply enough to matter."""
        return self.high < 0 and self.db_per_100 <= -SLOPE_DB


@dataclass(frozen=True)
class Fall:
    """The difference in dB between the medians of all positions before and all from `position` on."""

    db: float
    position: int
    error: float
    """Its standard error in dB."""

    @property
    def drifts(self) -> bool:
        """Whether it is large, and no accident of few positions."""
        return self.db - ERRORS * self.error >= FALL_DB


@dataclass(frozen=True)
class Trend:
    """What became of a curve."""

    slope: Slope
    fall: Fall

    @property
    def reasons(self) -> list[str]:
        """Why it is a drift; empty where it is none."""
        s, f = self.slope, self.fall
        found = []
        if s.drifts:
            found.append(f"{s.db_per_100:+.1f} dB for each 100 tokens (95 %: {s.low:+.1f} to {s.high:+.1f})")
        if f.drifts:
            found.append(f"{f.db:.1f} dB less from position {f.position} on")
        return found


def trend(positions: Sequence[int], snr_db: Sequence[float]) -> Trend:
    """Slope and fall of SNR in dB over position. Raises RingstepError for too few positions."""
    if len(positions) < FEWEST_TOKENS:
        raise RingstepError(f"a slope takes at least {FEWEST_TOKENS} tokens, there are {len(positions)}: give more")
    at, db = np.asarray(positions, float), np.minimum(np.asarray(snr_db, float), CEILING_DB)
    return Trend(slope_of(at[SKIPPED:], db[SKIPPED:]), fall_of(at, db))


def slope_of(at: NDArray[np.float64], db: NDArray[np.float64]) -> Slope:
    """Theil's and Sen's slope, the median of those between all pairs of blocks: single blocks do not move it."""
    from scipy.stats import theilslopes

    count = len(at) // BLOCK
    centres = at[: count * BLOCK].reshape(count, BLOCK).mean(1)
    levels = np.median(db[: count * BLOCK].reshape(count, BLOCK), axis=1)
    slope, _, low, high = theilslopes(levels, centres, CONFIDENCE)
    return Slope(100 * float(slope), 100 * float(low), 100 * float(high))


def fall_of(at: NDArray[np.float64], db: NDArray[np.float64]) -> Fall:
    """The fall at the block's beginning where two levels fit the curve best: by the sum of absolute deviations."""
    split = min(range(BLOCK, len(at) - BLOCK, BLOCK), key=lambda i: deviation(db[:i]) + deviation(db[i:]))
    before, after = db[:split], db[split:]
    error = float(np.hypot(median_error(before), median_error(after)))
    return Fall(float(np.median(before) - np.median(after)), int(at[split]), error)


def deviation(values: NDArray[np.float64]) -> float:
    """The sum of absolute deviations from the median."""
    return float(np.abs(values - np.median(values)).sum())


def median_error(values: NDArray[np.float64]) -> float:
    """The standard error of a median: 1.25 sigma / sqrt(n), sigma from the median deviation, of normal values."""
    sigma = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * sigma / float(np.sqrt(len(values)))

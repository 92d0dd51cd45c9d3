"""What calibration saw of a tensor, and the range that each method takes from it.

    min-max     everything that was seen
    percentile  all but the outermost share, split between both ends
    mse         the clipping that makes the mean squared error of rounding smallest
    entropy     the clipping that keeps the distribution closest (Kullback-Leibler, as TensorRT's calibrator does)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

BINS = 2048
SAMPLE = 1 << 13  # elements of a call that enter the histogram; smallest and largest are of all
CANDIDATES = 60  # clippings that a search tries


@dataclass
class Seen:
    """Smallest and largest element of a tensor over all of calibration, and a histogram of it."""

    low: float = np.inf
    high: float = -np.inf
    edge: float = 0.0
    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))
    """Of -edge .. edge in equal bins."""

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor in; values that are not finite make low or high so."""
        low, high = (float(v) for v in torch.aminmax(tensor))
        if not np.isfinite([low, high]).all():
            self.low = self.high = np.nan
            return
        self.low, self.high = min(self.low, low), max(self.high, high)
        flat = tensor.reshape(-1)
        if len(flat) > SAMPLE:
            stride = len(flat) // SAMPLE
            while math.gcd(stride, tensor.shape[-1]) > 1:
                stride += 1  # else it would meet some channels only
            flat = flat[::stride]
        self.widen(max(abs(low), abs(high)))
        # A third of torch.histc's time, which is called for every tensor of every chunk.
        bins = ((flat.numpy() / np.float32(self.edge) + np.float32(1)) * np.float32(BINS / 2)).astype(np.int32)
        self.counts += np.bincount(np.clip(bins, 0, BINS - 1), minlength=BINS)

    def widen(self, reach: float) -> None:
        """Double the histogram's edge until it covers `reach`; two old bins fall into one."""
        if self.edge == 0.0:
            self.edge = max(reach, 1e-30)
        while self.edge < reach:
            middle = self.counts.reshape(BINS // 2, 2).sum(-1)
            self.counts = np.pad(middle, BINS // 4)
            self.edge *= 2

    @property
    def centres(self) -> NDArray[np.float64]:
        """The middle of each bin."""
        return self.edge * ((2 * np.arange(BINS) + 1) / BINS - 1)


def percentile_range(seen: Seen, percentile: float) -> tuple[float, float]:
    """The range that holds `percentile` per cent of the elements, as many left out below as above."""
    share = np.cumsum(seen.counts) / seen.counts.sum()
    outside = (1 - percentile / 100) / 2
    width = 2 * seen.edge / BINS
    low = -seen.edge + width * int(np.searchsorted(share, outside, "right"))
    high = -seen.edge + width * (int(np.searchsorted(share, 1 - outside)) + 1)
    return max(low, seen.low), min(high, seen.high)


def clipped(seen: Seen, levels: int, error: Callable[[float, float], float]) -> tuple[float, float]:
    """The share of the range, both ends scaled alike, with the smallest error."""
    shares = np.linspace(1.0, 0.1 if levels <= 256 else 0.5, CANDIDATES)
    best = min(shares, key=lambda s: error(s * seen.low, s * seen.high))
    return float(best * seen.low), float(best * seen.high)


def mse_range(seen: Seen, levels: int) -> tuple[float, float]:
    """The range whose rounding to `levels` numbers and clipping err least in the mean square."""
    centres, counts = seen.centres, seen.counts

    def error(low: float, high: float) -> float:
        outside = np.maximum(low - centres, 0) + np.maximum(centres - high, 0)
        # Rounding's error is uniform within a step: step^2 / 12.
        inside = ((high - low) / (levels - 1)) ** 2 / 12
        return float((counts * np.where(outside > 0, outside**2, inside)).sum())

    return clipped(seen, levels, error)


def entropy_range(seen: Seen, levels: int) -> tuple[float, float]:
    """The range whose rounding to `levels` numbers keeps the distribution's divergence smallest."""
    centres, counts, half = seen.centres, seen.counts, seen.edge / BINS

    def divergence(low: float, high: float) -> float:
        # By their outer edges: the bin of the smallest element is inside when nothing is clipped.
        inside = (centres > low - half) & (centres < high + half)
        if inside.sum() < 2:
            return np.inf
        p = counts[inside].copy()
        p[0] += counts[centres <= low - half].sum()
        p[-1] += counts[centres >= high + half].sum()
        held = counts[inside]
        # Each of the quantised bins shares its mass among the bins of it that held something.
        bins = min(levels, len(held))
        group = np.arange(len(held)) * bins // len(held)
        mass, members = np.bincount(group, held, bins), np.bincount(group, held > 0, bins)
        q = np.where(held > 0, mass[group] / np.maximum(members[group], 1), 0)
        seen_p = p > 0
        p, q = p[seen_p] / p.sum(), np.maximum(q[seen_p] / max(q.sum(), 1e-300), 1e-12)
        return float((p * np.log(p / q)).sum())

    return clipped(seen, levels, divergence)


def value_range(seen: Seen, method: str, levels: int, percentile: float = 99.99) -> tuple[float, float]:
    """The range that `method` (min-max, percentile, mse, entropy) takes; it always holds 0."""
    if method == "min-max" or seen.counts.sum() == 0:
        low, high = seen.low, seen.high
    elif method == "percentile":
        low, high = percentile_range(seen, percentile)
    elif method == "mse":
        low, high = mse_range(seen, levels)
    else:
        low, high = entropy_range(seen, levels)
    return min(low, 0.0), max(high, 0.0)


def merge(parts: list[Seen]) -> Seen:
    """One tensor's history from several that share an encoding."""
    whole = Seen()
    for part in parts:
        # numpy's keep what is not a number, which Python's lose.
        whole.low, whole.high = float(np.minimum(whole.low, part.low)), float(np.maximum(whole.high, part.high))
        whole.widen(part.edge)
        copy = Seen(part.low, part.high, part.edge, part.counts.copy())
        # Edges differ by more than powers of two: count the bins' centres in.
        index = np.clip(((copy.centres / whole.edge + 1) * BINS / 2).astype(int), 0, BINS - 1)
        np.add.at(whole.counts, index, copy.counts)
    return whole

"""The numbers a weight may take, and a weight on them.

    per channel   scale [out, 1]          one scale for a row of the weight
    blocks        scale [out, blocks]     `block` neighbouring inputs share one; the last block may be shorter
    two_level     scale = steps * channel_scale, steps 1..15: the form HTP keeps blocks of int4 in (LPBQ)

Weights are [out, in], as checkpoints store them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringstep.errors import RingstepError

BITS = (2, 3, 4, 8, 16)
STEPS = 15  # HTP's block scales are four bits, and 0 would erase a block
SMALLEST = float(np.finfo(np.float32).tiny)  # a scale below would be denormal, and devices flush those to 0

Floats = NDArray[np.float32]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Grid:
    """The numbers a weight may take; RingstepError for a combination that means nothing."""

    bits: int
    symmetric: bool = True
    block: int | None = None
    two_level: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise RingstepError(f"weights of {self.bits} bits: only {', '.join(map(str, BITS))} are supported")
        if self.block is not None and self.block < 1:
            raise RingstepError(f"weights in blocks of {self.block}: a block has at least one input")
        if self.two_level and (self.block is None or not self.symmetric):
            raise RingstepError("two-level weight scales need symmetric weights in blocks")

    @property
    def low(self) -> int:
        """The smallest stored number."""
        return -(1 << self.bits - 1) if self.symmetric else 0

    @property
    def high(self) -> int:
        """The largest stored number."""
        return (1 << self.bits - 1) - 1 if self.symmetric else (1 << self.bits) - 1

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """What one number is kept in: int8 or int16, unsigned when asymmetric."""
        return np.dtype(f"{'' if self.symmetric else 'u'}int{16 if self.bits > 8 else 8}")

    def width(self, inputs: int) -> int:
        """Inputs that share a scale."""
        return inputs if self.block is None else min(self.block, inputs)

    def blocks(self, inputs: int) -> int:
        """Scales a row of `inputs` weights has."""
        return -(-inputs // self.width(inputs))


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [out, in] on its grid: real = scale * (q - zero)."""

    grid: Grid
    q: Ints  # grid.dtype [out, in], one number an element: packing is the formats' business
    scale: Floats  # [out, blocks], positive
    zero: Ints | None = None  # like q, [out, blocks]; None when symmetric
    steps: NDArray[np.uint8] | None = None  # two_level: [out, blocks] of 1..15
    channel_scale: Floats | None = None  # two_level: [out]

    def dequantised(self) -> Floats:
        """The weight as the device computes with it, float32 [out, in]."""
        inputs = self.q.shape[1]
        real = self.q.astype(np.float32)
        if self.zero is not None:
            real -= spread(self.zero, self.grid, inputs)
        real *= spread(self.scale, self.grid, inputs)
        return real


def spread(values: NDArray, grid: Grid, inputs: int) -> NDArray:
    """One value a block [out, blocks] to one an input: [out, in], or [out, 1] where a row has one block."""
    width = grid.width(inputs)
    return values if width == inputs else np.repeat(values, width, axis=1)[:, :inputs]


def by_block(weight: Floats, grid: Grid) -> Floats:
    """The weight [out, in] as [out, blocks, width]; a shorter last block is filled up with zeros."""
    outputs, inputs = weight.shape
    width, blocks = grid.width(inputs), grid.blocks(inputs)
    if blocks * width != inputs:
        weight = np.pad(weight, ((0, 0), (0, blocks * width - inputs)))
    return weight.reshape(outputs, blocks, width)


def min_max(weight: Floats, grid: Grid) -> tuple[Floats, Ints | None]:
    """The smallest scales [out, blocks] that clip nothing, and the zeros of an asymmetric grid.

    A symmetric grid uses its whole range: scale = max(max / high, min / low). An asymmetric range always holds 0,
    so that a zero weight stays zero. A block of zeros gets the scale 1.
    """
    blocks = by_block(weight, grid)
    top, bottom = np.maximum(blocks.max(-1), 0), np.minimum(blocks.min(-1), 0)
    scale = np.maximum(top / grid.high, bottom / grid.low) if grid.symmetric else (top - bottom) / grid.high
    scale = np.where(scale > 0, np.maximum(scale, SMALLEST), 1.0).astype(np.float32)
    if grid.symmetric:
        return scale, None
    return scale, np.clip(np.rint(-bottom / scale), 0, grid.high).astype(grid.dtype)


def two_levels(scale: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """The steps [out, blocks] and channel scales [out] nearest to the block scales: the largest gets step 15."""
    channel = np.maximum(scale.max(-1) / STEPS, SMALLEST).astype(np.float32)
    return np.clip(np.rint(scale / channel[:, None]), 1, STEPS).astype(np.uint8), channel


def on_scales(weight: Floats, grid: Grid, scale: Floats, zero: Ints | None = None) -> QuantisedWeight:
    """Round a weight to the nearest numbers of given scales [out, blocks] (one level) and zeros."""
    return QuantisedWeight(grid, nearest(weight, grid, scale, zero), scale, zero)


def on_steps(weight: Floats, grid: Grid, steps: NDArray[np.uint8], channel_scale: Floats) -> QuantisedWeight:
    """Round a weight to the nearest numbers of given steps [out, blocks] and channel scales [out] (two levels)."""
    scale = steps * channel_scale[:, None]
    return QuantisedWeight(grid, nearest(weight, grid, scale, None), scale, None, steps, channel_scale)


def nearest(weight: Floats, grid: Grid, scale: Floats, zero: Ints | None) -> Ints:
    """The stored numbers [out, in] nearest to a weight, halves to even."""
    inputs = weight.shape[1]
    q = np.rint(weight / spread(scale, grid, inputs))
    if zero is not None:
        q += spread(zero, grid, inputs)
    return np.clip(q, grid.low, grid.high).astype(grid.dtype)


def joined(pieces: Sequence[QuantisedWeight], order: Ints | None = None) -> QuantisedWeight:
    """Rows in pieces as one weight; row i of the pieces taken together becomes row order[i]."""
    back = slice(None) if order is None else np.argsort(order)
    all_or_none = lambda arrays: None if arrays[0] is None else np.concatenate(arrays)[back]
    return QuantisedWeight(
        pieces[0].grid, np.concatenate([p.q for p in pieces])[back], np.concatenate([p.scale for p in pieces])[back],
        all_or_none([p.zero for p in pieces]), all_or_none([p.steps for p in pieces]),
        all_or_none([p.channel_scale for p in pieces]),
    )  # fmt: skip


def check(weight: NDArray, grid: Grid) -> None:
    """Refuse what cannot be rounded: no matrix, an empty one, values that are not finite."""
    if weight.ndim != 2 or not weight.size:
        raise RingstepError(f"a weight of shape {list(weight.shape)} cannot be quantised; [out, in] is needed")
    # A sum is finite unless something in it is not, and needs no temporary.
    if not np.isfinite(weight.sum(dtype=np.float64)):
        raise RingstepError("the weight has values that are not finite; mend the checkpoint")

"""Scales by search: the clipping of each block that errs least, inputs weighed by their importance.

Weights here are [width, n, out], inputs first, as GPTQ walks them; importance is [width, n, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantize.grid import SMALLEST, STEPS, Grid

CLIPS = 40  # clippings that are tried, from all of the range
DEEPEST = 0.4  # to this part of it
CHANNEL_TRIES = 9  # channel scales round the first guess, for two-level grids
PIECE = 1 << 20  # values that are searched at a time: with more, every try goes through memory anew, seven times slower


def rounded(weight: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, out: Tensor | None = None) -> Tensor:
    """What is left of weights on a grid of these scales and zeros, in `out` where it is given."""
    made = torch.div(weight, scale, out=out).round_()
    if zero is None:
        return made.clamp_(grid.low, grid.high).mul_(scale)
    return made.add_(zero).clamp_(grid.low, grid.high).sub_(zero).mul_(scale)


def error(weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, out: Tensor) -> Tensor:
    """The weighed square error of each block, [n, out]; `out`, of the weight's shape, is overwritten."""
    return rounded(weight, scale, zero, grid, out).sub_(weight).square_().mul_(importance).sum(0)


def fit(weight: Tensor, importance: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """Scales [n, out] and, on an asymmetric grid, zeros, of the clipping with the smallest weighed error."""
    columns = max(1, PIECE // (weight.shape[0] * weight.shape[1]))
    found = [fit_piece(piece.contiguous(), importance, grid) for piece in weight.split(columns, 2)]
    zeros = [zero for _, zero in found if zero is not None]
    return torch.cat([scale for scale, _ in found], 1), torch.cat(zeros, 1) if zeros else None


def fit_piece(weight: Tensor, importance: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """The same for some of a weight's outputs."""
    top, bottom = weight.amax(0).clamp_min(0), weight.amin(0).clamp_max(0)
    whole = torch.maximum(top / grid.high, bottom / grid.low) if grid.symmetric else (top - bottom) / grid.high
    whole = whole.clamp_min(SMALLEST)
    best, space = torch.full_like(whole, torch.inf), torch.empty_like(weight)
    scale, zero = whole.clone(), None if grid.symmetric else torch.zeros_like(whole)
    for clip in torch.linspace(DEEPEST, 1.05, CLIPS).tolist():
        tried = whole * clip
        own = None if zero is None else torch.clamp(torch.round(-bottom * clip / tried), grid.low, grid.high)
        found = error(weight, importance, tried, own, grid, space)
        better = found < best
        best, scale = torch.where(better, found, best), torch.where(better, tried, scale)
        if zero is not None and own is not None:
            zero = torch.where(better, own, zero)
    return scale, zero


def fit_channel(weight: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    """The channel scales [out] of a two-level grid, over all its blocks."""
    wanted, _ = fit(weight, importance, grid)
    guess = (wanted.amax(0) / STEPS).clamp_min(SMALLEST)
    best, channel, space = torch.full_like(guess, torch.inf), guess.clone(), torch.empty_like(weight)
    for part in torch.linspace(0.8, 1.2, CHANNEL_TRIES).tolist():
        tried = guess * part
        scale = torch.clamp(torch.round(wanted / tried), 1, STEPS) * tried
        found = error(weight, importance, scale, None, grid, space).sum(0)
        better = found < best
        best, channel = torch.where(better, found, best), torch.where(better, tried, channel)
    return channel


def fit_steps(weight: Tensor, importance: Tensor, grid: Grid, channel: Tensor) -> Tensor:
    """The steps [n, out] of a two-level grid, given its channel scales [out]: all fifteen are tried."""
    best, space = torch.full_like(weight[0], torch.inf), torch.empty_like(weight)
    steps = torch.ones_like(best)
    for step in range(1, STEPS + 1):
        found = error(weight, importance, (channel * step).expand_as(best), None, grid, space)
        better = found < best
        best, steps = torch.where(better, found, best), torch.where(better, float(step), steps)
    return steps

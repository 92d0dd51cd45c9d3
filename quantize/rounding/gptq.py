"""GPTQ: round a weight input by input, each error made good by the inputs still to come (Frantar et al. 2022).

    H = sum x x^T + damping     U = upper Cholesky factor of H^-1
    for input i, in order:  q_i = nearest(w_i),  w_j -= (w_i - q_i) U_ij / U_ii  for j after i

Inputs with much energy come first, while there are most others to make up for them; with blocks, whole blocks do, and a
block's scales are found when its turn comes, on the weights as they are then. A sweep then refits the scales in closed
form and rounds every input once more, given all the others (coordinate descent on the same error).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantize.grid import SMALLEST, STEPS, Grid, QuantisedWeight, check
from quantize.rounding.scales import fit, fit_channel, fit_steps
from ringstep.errors import RingstepError

LAZY = 128  # inputs whose corrections of what comes later are applied together
DAMPING = 0.05
COLUMNS = 512  # of a triangular inverse that are solved for together
SWEEPS = 1  # the first lowers a linear's error by 0.2 dB, a second by 0.05


@dataclass(frozen=True)
class Curvature:
    """A Hessian made ready for rounding: what does not depend on the weight."""

    order: Tensor
    """Of the inputs, as they are rounded [in]."""
    energy: Tensor
    cost: Tensor
    """What rounding an input costs once all later ones have made up for it, 1 / U_ii^2 [in], as the weight has them."""
    matrix: Tensor
    """Dampened, in the order of rounding, float32 [in, in]."""
    factor: Tensor
    """U, each row divided by its diagonal, float32 [in, in]."""


def curvature(weight: Tensor, hessian: Tensor, grid: Grid, damping: float = DAMPING) -> Curvature:
    """Prepare the Hessian [in, in] of a weight [out, in].

    Raises RingstepError for values that are not finite, in either, and for sizes that do not fit.
    """
    check(weight.numpy(), grid)
    if hessian.shape != (weight.shape[1], weight.shape[1]):
        raise RingstepError(f"a Hessian {list(hessian.shape)} for a weight of {weight.shape[1]} inputs")
    if not torch.isfinite(hessian.sum(dtype=torch.float64)):
        raise RingstepError("the inputs of calibration are not finite")
    energy = hessian.diagonal().double()
    order = in_order(energy, grid)
    matrix = hessian.double()
    matrix.diagonal().add_(max(damping * float(energy.mean()), 1e-12))
    matrix = matrix[order][:, order]
    single = matrix.float()
    factor = inverse_factor(matrix)
    cost = torch.empty(len(energy), dtype=torch.float64)
    cost[order] = factor.diagonal().square().reciprocal()
    return Curvature(order, energy, cost, single, factor.div_(factor.diagonal()[:, None].clone()).float())


def quantise(weight: Tensor, hessian: Tensor, grid: Grid, damping: float = DAMPING, sweeps: int = SWEEPS,
             ) -> QuantisedWeight:  # fmt: skip
    """Quantise a float32 weight [out, in]; `hessian` [in, in] is the sum of x x^T over calibration.

    `damping` is added to the Hessian's diagonal, as a part of its mean. Raises RingstepError for values that are not
    finite, and inputs of another size.
    """
    return quantise_by(weight, curvature(weight, hessian, grid, damping), grid, sweeps)


def quantise_by(weight: Tensor, own: Curvature, grid: Grid, sweeps: int = SWEEPS) -> QuantisedWeight:
    """Quantise a weight [out, in] by the Curvature of its inputs on the same grid."""
    outputs, inputs = weight.shape
    width, order, cost, factor = grid.width(inputs), own.order, own.cost, own.factor
    # With one scale a channel the scale is fixed before anything is made up for: plain energy serves better.
    blocks, importance = by_inputs(weight, own.energy if grid.block is None else cost, grid)
    scales = Scales(blocks, importance, grid)
    left, stored = weight.T.float()[order].contiguous(), torch.empty(inputs, outputs)
    ordered = cost[order].float()
    lazy = LAZY if grid.block is None else width * max(1, LAZY // width)
    for start in range(0, inputs, lazy):
        stop = min(inputs, start + lazy)
        part, errors = left[start:stop], torch.empty(stop - start, outputs)
        for i in range(stop - start):
            block = int(order[start + i]) // width
            if grid.block is not None and (start + i) % width == 0:
                end = min(i + width, stop - start)
                scales.find(block, part[i:end], ordered[start + i : start + end])
            scale, zero = scales.of(block)
            number = torch.round(part[i] / scale)
            number = torch.clamp(number if zero is None else number + zero, grid.low, grid.high)
            stored[start + i] = number
            errors[i] = part[i] - (number if zero is None else number - zero) * scale
            if i + 1 < stop - start:
                part[i + 1 :].addr_(factor[start + i, start + i + 1 : stop], errors[i], alpha=-1)
        if stop < inputs:
            left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    if sweeps:
        whole = weight.T.float()[order]
        lazily = [(a, min(inputs, a + LAZY)) for a in range(0, inputs, LAZY)]
        parts = lazily if grid.block is None else runs(order, width)
        for _ in range(sweeps):
            sweep(whole, own.matrix, stored, scales, order // width, parts)
    back = torch.empty_like(stored)
    back[order] = stored
    return scales.weight(np.ascontiguousarray(back.T.numpy()).astype(grid.dtype))


class Scales:
    """A weight's scales while it is rounded: all at once for a channel, block by block in their turn."""

    def __init__(self, blocks: Tensor, importance: Tensor, grid: Grid) -> None:
        self.grid = grid
        self.channel = fit_channel(blocks, importance, grid) if grid.two_level else None
        if grid.block is None:
            self.scale, self.zero = fit(blocks, importance, grid)
        else:
            self.scale = torch.ones(blocks.shape[1:])
            self.zero = None if grid.symmetric else torch.zeros(blocks.shape[1:])

    def find(self, block: int, weight: Tensor, importance: Tensor) -> None:
        """Set one block's scales from its weights [width, out] as they are now."""
        own, weighed = weight[:, None], importance[:, None, None]
        if self.channel is not None:
            self.scale[block] = fit_steps(own, weighed, self.grid, self.channel)[0]
            return
        scale, zero = fit(own, weighed, self.grid)
        self.scale[block] = scale[0]
        if zero is not None and self.zero is not None:
            self.zero[block] = zero[0]

    def everywhere(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros [in, out] of inputs in these blocks [in]."""
        scale = self.scale if self.channel is None else self.scale * self.channel
        return scale[blocks], None if self.zero is None else self.zero[blocks]

    def of(self, block: int) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros [out] of one block."""
        scale = self.scale[block] if self.channel is None else self.scale[block] * self.channel
        return scale, None if self.zero is None else self.zero[block]

    def weight(self, q: np.ndarray) -> QuantisedWeight:
        """The weight with numbers q [out, in]."""
        rows = lambda tensor: np.ascontiguousarray(tensor.T.numpy())
        if self.channel is not None:
            steps, channel = rows(self.scale).astype(np.uint8), self.channel.numpy()
            return QuantisedWeight(self.grid, q, steps * channel[:, None], None, steps, channel)
        zero = None if self.zero is None else rows(self.zero).astype(self.grid.dtype)
        return QuantisedWeight(self.grid, q, rows(self.scale), zero)


def sweep(weight: Tensor, h: Tensor, q: Tensor, scales: Scales, blocks: Tensor, parts: list[tuple[int, int]]) -> None:
    """Refit the scales and round every input anew, given all others; q [in, out] and scales change in place.

    All in the order of rounding: weight [in, out], h [in, in], the block of each input, and the parts that are
    done before the rest hears of them, each block one of them.
    """
    refit_rows(weight, h, q, scales, blocks)
    real = restored(q, *scales.everywhere(blocks))
    downhill = h @ (weight - real)
    for start, stop in parts:
        inside, slope, before = h[start:stop, start:stop], downhill[start:stop], real[start:stop].clone()
        block = int(blocks[start])
        if scales.grid.block is not None:
            refit_block(inside, slope, q[start:stop], real[start:stop], scales, block)
        scale, zero = scales.of(block)
        for i in range(stop - start):
            at = start + i
            wanted = torch.round((real[at] + slope[i] / inside[i, i]) / scale)
            q[at] = torch.clamp(wanted if zero is None else wanted + zero, scales.grid.low, scales.grid.high)
            now = restored(q[at], scale, zero)
            slope.addr_(inside[:, i], now - real[at], alpha=-1)
            real[at] = now
        downhill[stop:].addmm_(h[stop:, start:stop], real[start:stop] - before, alpha=-1)


def refit_rows(weight: Tensor, h: Tensor, q: Tensor, scales: Scales, blocks: Tensor) -> None:
    """Least squares for the one scale a row has, the channel's or the only one; blocks alone have none."""
    if scales.channel is None and scales.grid.block is not None:
        return
    v = q * scales.scale[blocks] if scales.channel is not None else restored(q, torch.tensor(1.0), scales.zero)
    hv = h @ v
    found = (weight * hv).sum(0) / (v * hv).sum(0)
    usable = torch.isfinite(found) & (found > SMALLEST)
    if scales.channel is not None:
        scales.channel = torch.where(usable, found, scales.channel)
    else:
        scales.scale = torch.where(usable, found, scales.scale)


def refit_block(inside: Tensor, slope: Tensor, q: Tensor, real: Tensor, scales: Scales, block: int) -> None:
    """Least squares for a block's scale, all else given; slope and real [width, out] follow in place."""
    old, zero = scales.of(block)
    v = restored(q, torch.tensor(1.0), zero)
    hv = inside @ v
    found = old + (slope * v).sum(0) / (v * hv).sum(0)
    if scales.channel is not None:
        # The error is a parabola in the scale: the whole step nearest to its foot is the best one.
        steps = torch.round(found / scales.channel).clamp(1, STEPS)
        scales.scale[block] = torch.where(torch.isfinite(steps), steps, scales.scale[block])
    else:
        scales.scale[block] = torch.where(torch.isfinite(found) & (found > SMALLEST), found, old)
    new, _ = scales.of(block)
    slope.sub_(hv * (new - old))
    real.copy_(v * new)


def restored(q: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """scale * (q - zero)."""
    return (q if zero is None else q - zero) * scale


def runs(order: Tensor, width: int) -> list[tuple[int, int]]:
    """Where each block begins and ends in an order that keeps blocks together."""
    ends = [i + 1 for i in range(len(order)) if i + 1 == len(order) or order[i] // width != order[i + 1] // width]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def in_order(energy: Tensor, grid: Grid) -> Tensor:
    """The order in which inputs are rounded: most energy first, whole blocks together."""
    if grid.block is None:
        return torch.argsort(energy, descending=True, stable=True)
    width = grid.width(len(energy))
    parts = torch.split(torch.arange(len(energy)), width)
    # A last block that is shorter keeps its place: blocks begin at multiples of the width.
    whole = [part for part in parts if len(part) == width]
    whole.sort(key=lambda part: -float(energy[part].sum()))
    return torch.cat([part[torch.argsort(energy[part], descending=True, stable=True)]
                      for part in [*whole, *parts[len(whole) :]]])  # fmt: skip


def inverse_factor(matrix: Tensor) -> Tensor:
    """The upper Cholesky factor of a matrix's inverse, float64; the matrix is overwritten.

    With the order turned round the factor's own inverse is what is wanted, and the matrix's is never computed:
    J H J = L L^T gives H^-1 = U^T U with U = J L^-1 J.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if failed:
        raise RingstepError("the Hessian of its inputs cannot be inverted; raise damping in [weights]")
    inverse = matrix.zero_().fill_diagonal_(1.0)
    for start in range(0, len(lower), COLUMNS):
        # Above the diagonal both are zero: a third of the work of solving for whole columns.
        columns = inverse[start:, start : start + COLUMNS]
        columns.copy_(torch.linalg.solve_triangular(lower[start:, start:], columns, upper=False))
    return inverse.flip(0, 1)


def by_inputs(weight: Tensor, importance: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as [width, blocks, out] and importance [in] as [width, blocks, 1], filled up with zeros."""
    outputs, inputs = weight.shape
    width, count = grid.width(inputs), grid.blocks(inputs)
    left = count * width - inputs
    turned = torch.nn.functional.pad(weight.T.float(), (0, 0, 0, left)).reshape(count, width, outputs)
    weighed = torch.nn.functional.pad(importance.float(), (0, left)).reshape(count, width, 1)
    return turned.transpose(0, 1).contiguous(), weighed.transpose(0, 1).contiguous()

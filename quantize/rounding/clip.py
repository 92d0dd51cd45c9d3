"""Round to nearest on scales whose clipping was searched, errors weighed by the mean square of the inputs."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quantize.grid import Grid, QuantisedWeight, check, on_scales, on_steps
from quantize.rounding.gptq import by_inputs
from quantize.rounding.scales import fit, fit_channel, fit_steps


def quantise(weight: Tensor, hessian: Tensor, grid: Grid) -> QuantisedWeight:
    """Quantise a weight [out, in]; `hessian` [in, in] is the sum of x x^T over calibration.

    RingstepError for a weight with values that are not finite.
    """
    values = weight.numpy()
    check(values, grid)
    blocks, importance = by_inputs(weight, hessian.diagonal(), grid)
    rows = lambda tensor: np.ascontiguousarray(tensor.T.numpy())
    if grid.two_level:
        channel = fit_channel(blocks, importance, grid)
        steps = rows(fit_steps(blocks, importance, grid, channel)).astype(np.uint8)
        return on_steps(values, grid, steps, channel.numpy())
    scale, zero = fit(blocks, importance, grid)
    return on_scales(values, grid, rows(scale), None if zero is None else rows(zero).astype(grid.dtype))

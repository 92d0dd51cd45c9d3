"""Round to nearest on min-max scales: no calibration, no search; the yardstick for the other methods."""

from __future__ import annotations

from quantize.grid import Floats, Grid, QuantisedWeight, check, min_max, on_scales, on_steps, two_levels


def quantise(weight: Floats, grid: Grid) -> QuantisedWeight:
    """Quantise a float32 weight [out, in]; rows are independent, so a large one may come in pieces of rows.

    RingstepError for a weight with values that are not finite.
    """
    check(weight, grid)
    scale, zero = min_max(weight, grid)
    return on_steps(weight, grid, *two_levels(scale)) if grid.two_level else on_scales(weight, grid, scale, zero)

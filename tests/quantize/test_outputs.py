"""Rounding with outputs that make up for each other: against the loss it is for, and against plain GPTQ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantize.grid import Grid, QuantisedWeight, joined
from quantize.rounding import gptq, nearest, outputs
from ringstep.errors import RingstepError

GRIDS = [Grid(4), Grid(4, True, 32), Grid(4, True, 32, True), Grid(4, False, 32)]


def moments(size: int, seed: int) -> torch.Tensor:
    """A second moment [size, size] of vectors that lie mostly in a quarter of the directions."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(max(1, size // 4), size, generator=generator)
    x = torch.randn(800, len(mix), generator=generator) @ mix + 0.3 * torch.randn(800, size, generator=generator)
    return x.T @ x


def loss(made: QuantisedWeight, weight: torch.Tensor, metric: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(A E H E^T), both dampened as the rounding does."""
    error = made.dequantised().astype(np.float64) - weight.double().numpy()
    a, h = metric.double().numpy().copy(), hessian.double().numpy().copy()
    a += outputs.DAMPING * np.diagonal(a).mean() * np.eye(len(a))
    h += gptq.DAMPING * np.diagonal(h).mean() * np.eye(len(h))
    return float(np.trace(a @ error @ h @ error.T))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_lowers_the_loss_and_more_parts_lower_it_further(grid: Grid) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    metric, hessian = moments(48, 1), moments(64, 2)
    plain = loss(gptq.quantise(weight, hessian, grid), weight, metric, hessian)
    losses = [loss(outputs.quantise(weight, hessian, metric, grid, parts=parts), weight, metric, hessian)
              for parts in (2, 4, 48)]  # fmt: skip
    assert losses[0] < 0.9 * plain and losses[1] < losses[0] and losses[2] < losses[1]


def test_one_part_and_independent_outputs_are_plain_gptq() -> None:
    weight = torch.randn(20, 32, generator=torch.Generator().manual_seed(3))
    hessian, grid = moments(32, 4), Grid(4, True, 16, True)
    plain = gptq.quantise(weight, hessian, grid)
    for metric, parts in ((moments(20, 5), 1), (torch.diag(torch.rand(20)), 4), (torch.zeros(20, 20), 4)):
        made = outputs.quantise(weight, hessian, metric, grid, parts=parts)
        np.testing.assert_array_equal(made.q, plain.q)
        np.testing.assert_allclose(made.dequantised(), plain.dequantised(), rtol=1e-5)


def test_the_last_rows_take_over_what_the_others_err_along_the_one_direction_that_counts() -> None:
    weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(6))
    direction, hessian = torch.rand(40, generator=torch.Generator().manual_seed(7)) + 0.5, moments(32, 8)
    metric = 50 * torch.outer(direction, direction)
    along = lambda made: float(np.square(direction.numpy() @ (made.dequantised() - weight.numpy())).sum())
    plain = along(gptq.quantise(weight, hessian, Grid(4)))
    assert along(outputs.quantise(weight, hessian, metric, Grid(4))) < 0.4 * plain


def test_scale_of_the_metric_and_more_parts_than_rows_do_not_matter() -> None:
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(9))
    metric, hessian = moments(3, 10), moments(16, 11)
    one, other = (outputs.quantise(weight, hessian, metric * k, Grid(4), parts=7) for k in (1.0, 1e-12))
    np.testing.assert_array_equal(one.q, other.q)
    assert one.q.shape == (3, 16)


def test_rows_in_pieces_become_one_weight_in_any_order() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    for grid in GRIDS:
        whole, order = nearest.quantise(weight, grid), np.array([4, 0, 5, 1, 3, 2])
        pieces = [nearest.quantise(weight[order[:2]], grid), nearest.quantise(weight[order[2:]], grid)]
        made = joined(pieces, order)
        for field in ("q", "scale", "zero", "steps", "channel_scale"):
            np.testing.assert_array_equal(getattr(made, field), getattr(whole, field))


def test_what_cannot_be_rounded() -> None:
    weight, hessian = torch.randn(4, 16), torch.eye(16)
    with pytest.raises(RingstepError, match="4 outputs"):
        outputs.quantise(weight, hessian, torch.eye(5), Grid(4))
    with pytest.raises(RingstepError, match="gradients"):
        outputs.quantise(weight, hessian, torch.full((4, 4), torch.nan), Grid(4))

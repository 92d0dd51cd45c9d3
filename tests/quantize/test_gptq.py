"""Rounding by GPTQ and by clipping search, against brute force and against each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from quantize.grid import Grid
from quantize.rounding import clip, gptq, nearest
from quantize.rounding.scales import fit, fit_steps, rounded
from ringstep.errors import RingstepError

GRIDS = [Grid(4), Grid(8), Grid(4, block=32), Grid(4, True, 32, True), Grid(4, False, 64), Grid(4, False),
         Grid(3, block=16)]  # fmt: skip


def inputs(count: int, size: int, seed: int = 0) -> torch.Tensor:
    """Inputs [count, size] as a layer's: most lie in a third of the directions, some channels are larger."""
    mix = torch.randn(max(1, size // 3), size, generator=torch.Generator().manual_seed(100))
    generator = torch.Generator().manual_seed(seed)
    own = 0.2 * torch.randn(count, size, generator=generator)
    return (torch.randn(count, len(mix), generator=generator) @ mix + own) * torch.linspace(0.5, 3, size)


def loss(weight: torch.Tensor, made: np.ndarray, x: torch.Tensor) -> float:
    """What the outputs lose, against their own size."""
    error = x @ (torch.from_numpy(made) - weight).T
    return float(error.square().sum() / (x @ weight.T).square().sum())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_method_beats_the_simpler_one(grid: Grid) -> None:
    x, weight = inputs(600, 96), torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    weight *= torch.linspace(0.2, 3, 40)[:, None]
    hessian = x.T @ x
    plain = loss(weight, nearest.quantise(weight.numpy(), grid).dequantised(), x)
    clipped = loss(weight, clip.quantise(weight, hessian, grid).dequantised(), x)
    made = gptq.quantise(weight, hessian, grid)
    assert loss(weight, made.dequantised(), x) < 0.6 * clipped
    assert clipped < 1.02 * plain
    assert made.q.min() >= grid.low and made.q.max() <= grid.high and made.q.dtype == grid.dtype
    if grid.two_level:
        assert made.steps is not None and made.steps.min() >= 1 and made.steps.max() <= 15
    # On text that it has not seen as well.
    other = inputs(600, 96, seed=5)
    assert loss(weight, made.dequantised(), other) < plain


def test_near_the_best_of_all_roundings() -> None:
    """Two outputs of four inputs on a fixed grid: all 3^4 neighbours are tried."""
    x = inputs(50, 4, seed=3)
    hessian = x.T @ x
    weight = torch.randn(2, 4, generator=torch.Generator().manual_seed(4))
    made = gptq.quantise(weight, hessian, Grid(4), damping=1e-6)
    for row in range(2):
        scale, own = made.scale[row, 0], made.q[row].astype(np.float64)
        cost = lambda q, row=row, scale=float(scale): float(
            (x.double() @ torch.from_numpy(q * scale - weight[row].double().numpy())).square().sum())  # fmt: skip
        near = np.rint(weight[row].double().numpy() / scale)
        best = min(cost(near + np.array(step)) for step in itertools.product((-1, 0, 1), repeat=4))
        assert cost(own) <= cost(near) + 1e-9
        assert cost(own) < 3 * best + 1e-9


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    made = gptq.quantise(weight, torch.eye(32) * 7, Grid(4))
    np.testing.assert_array_equal(made.q, np.clip(np.rint(weight.numpy() / made.scale), -8, 7))


def test_the_lazy_corrections_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(900, 150), torch.randn(10, 150, generator=torch.Generator().manual_seed(6))
    once = gptq.quantise(weight, x.T @ x, Grid(4))
    monkeypatch.setattr(gptq, "LAZY", 7)
    again = gptq.quantise(weight, x.T @ x, Grid(4))
    assert (once.q != again.q).mean() < 0.01
    np.testing.assert_array_equal(once.scale, again.scale)


def test_a_last_block_that_is_shorter() -> None:
    x, weight = inputs(400, 80), torch.randn(6, 80, generator=torch.Generator().manual_seed(7))
    for grid in (Grid(4, block=32), Grid(4, True, 32, True), Grid(4, False, 32)):
        made = gptq.quantise(weight, x.T @ x, grid)
        assert made.scale.shape == (6, 3)
        plain = nearest.quantise(weight.numpy(), grid)
        assert loss(weight, made.dequantised(), x) < loss(weight, plain.dequantised(), x)


def test_dead_inputs_and_zero_weights() -> None:
    x = inputs(200, 64)
    x[:, 10:20] = 0
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(8))
    weight[2] = 0
    for grid in (Grid(4), Grid(4, True, 32, True)):
        made = gptq.quantise(weight, x.T @ x, grid).dequantised()
        assert np.isfinite(made).all() and not made[2].any()
    assert np.isfinite(gptq.quantise(weight, torch.zeros(64, 64), Grid(4)).dequantised()).all()


def test_what_cannot_be_rounded() -> None:
    weight, hessian = torch.randn(4, 16), torch.eye(16)
    with pytest.raises(RingstepError, match="not finite"):
        gptq.quantise(weight.index_fill(0, torch.tensor([1]), torch.nan), hessian, Grid(4))
    with pytest.raises(RingstepError, match="calibration are not finite"):
        gptq.quantise(weight, hessian * torch.inf, Grid(4))
    with pytest.raises(RingstepError, match="16 inputs"):
        gptq.quantise(weight, torch.eye(8), Grid(4))


def test_scales_found_are_the_best_of_a_finer_search() -> None:
    generator = torch.Generator().manual_seed(9)
    weight, importance = torch.randn(32, 3, 5, generator=generator), torch.rand(32, 3, 1, generator=generator)
    for grid in (Grid(4), Grid(4, False)):
        scale, zero = fit(weight, importance, grid)
        cost = lambda s, z, g=grid: ((rounded(weight, s, z, g) - weight).square() * importance).sum(0)
        for part in np.linspace(0.5, 1.5, 41):
            assert (cost(scale, zero) <= 1.25 * cost(scale * part, zero) + 1e-6).all()


def test_every_step_of_fifteen_is_tried() -> None:
    channel = torch.tensor([0.5, 0.1])
    weight = torch.stack([channel * 9 * torch.tensor([float(i), float(i)]) for i in range(-8, 8)])[:, None]
    steps = fit_steps(weight, torch.ones(16, 1, 1), Grid(4, True, 16, True), channel)
    assert steps.tolist() == [[9.0, 9.0]]

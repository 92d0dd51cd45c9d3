"""The grids: which numbers a weight may take, min-max scales, two-level scales, rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from quantize.grid import Grid, QuantisedWeight, by_block, min_max, on_scales, on_steps, two_levels
from quantize.rounding import nearest
from ringstep.errors import RingstepError

GRIDS = [
    Grid(bits, symmetric, block) for bits in (2, 3, 4, 8, 16) for symmetric in (True, False) for block in (None, 8)
]
GRIDS += [Grid(4, True, 8, two_level=True), Grid(8, True, 16, two_level=True)]
name = lambda g: f"{g.bits}{'s' if g.symmetric else 'u'}{g.block or ''}{'lpbq' if g.two_level else ''}"


def weight_of(outputs: int = 5, inputs: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)


def by_hand(quantised: QuantisedWeight) -> np.ndarray:
    """real = scale * (q - zero), one element at a time."""
    out = np.zeros(quantised.q.shape)
    for o, i in np.ndindex(*out.shape):
        b = 0 if quantised.grid.block is None else i // quantised.grid.block
        zero = 0 if quantised.zero is None else int(quantised.zero[o, b])
        out[o, i] = float(quantised.scale[o, b]) * (int(quantised.q[o, i]) - zero)
    return out


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_every_element_is_the_nearest_number_of_its_scale(grid: Grid) -> None:
    weight = weight_of()
    quantised = nearest.quantise(weight, grid)
    assert quantised.q.dtype == grid.dtype and quantised.q.min() >= grid.low and quantised.q.max() <= grid.high
    assert quantised.scale.dtype == np.float32 and quantised.scale.shape == (5, grid.blocks(32))
    real = quantised.dequantised()
    assert real.dtype == np.float32
    np.testing.assert_allclose(real, by_hand(quantised), rtol=1e-6)
    numbers = np.arange(grid.low, grid.high + 1)
    for o, i in np.ndindex(*weight.shape):
        b = 0 if grid.block is None else i // grid.block
        zero = 0 if quantised.zero is None else int(quantised.zero[o, b])
        best = np.abs(float(quantised.scale[o, b]) * (numbers - zero) - float(weight[o, i])).min()
        assert abs(float(real[o, i]) - float(weight[o, i])) <= best * 1.001 + 1e-5 * abs(float(weight[o, i]))


def test_the_range_of_each_grid() -> None:
    assert [(g.low, g.high) for g in (Grid(4), Grid(4, False), Grid(8), Grid(2), Grid(16))] == [
        (-8, 7), (0, 15), (-128, 127), (-2, 1), (-32768, 32767)]  # fmt: skip


def test_min_max_clips_nothing_and_uses_the_whole_range() -> None:
    weight = np.array([[-8.0, 1, 2, 3], [-1, 1, 2, 7], [-16, 1, 2, 15]], np.float32)
    scale, zero = min_max(weight, Grid(4))
    assert zero is None and scale.ravel().tolist() == pytest.approx([1.0, 1.0, 15 / 7])
    scale, zero = min_max(weight, Grid(4, False))
    assert scale.ravel().tolist() == pytest.approx([11 / 15, 8 / 15, 31 / 15])
    assert zero is not None and zero.ravel().tolist() == [11, 2, 8]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_asymmetric_range_holds_zero(sign: float) -> None:
    quantised = nearest.quantise(sign * np.array([[5.0, 5.5, 6.0, 0.0]], np.float32), Grid(4, False))
    assert quantised.dequantised()[0, 3] == 0
    assert np.abs(quantised.dequantised() - sign * np.array([[5.0, 5.5, 6.0, 0.0]])).max() < 0.21


def test_a_last_block_may_be_shorter() -> None:
    weight = weight_of(3, 21)
    quantised = nearest.quantise(weight, Grid(8, True, 8))
    assert quantised.scale.shape == (3, 3)
    np.testing.assert_allclose(quantised.dequantised(), weight, atol=0.02)
    assert by_block(weight, Grid(8, True, 8)).shape == (3, 3, 8)
    alone = nearest.quantise(np.ascontiguousarray(weight[:, 16:]), Grid(8))
    np.testing.assert_array_equal(quantised.q[:, 16:], alone.q)


def test_two_level_scales_are_whole_steps_of_the_channels() -> None:
    scale = np.array([[15.0, 7.4, 0.1], [3.0, 3.0, 3.0]], np.float32)
    steps, channel = two_levels(scale)
    assert steps.tolist() == [[15, 7, 1], [15, 15, 15]] and channel.tolist() == pytest.approx([1.0, 0.2])
    quantised = nearest.quantise(weight_of(4, 64), Grid(4, True, 16, two_level=True))
    assert quantised.steps is not None and quantised.channel_scale is not None
    assert quantised.steps.dtype == np.uint8 and quantised.steps.min() >= 1 and quantised.steps.max() == 15
    np.testing.assert_array_equal(quantised.scale, quantised.steps * quantised.channel_scale[:, None])


def test_rows_are_independent() -> None:
    weight, grid = weight_of(6, 32), Grid(4, True, 8, two_level=True)
    whole, part = nearest.quantise(weight, grid), nearest.quantise(weight[2:4], grid)
    np.testing.assert_array_equal(whole.dequantised()[2:4], part.dequantised())


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_zeros_and_tiny_weights_stay_finite(grid: Grid) -> None:
    weight = np.zeros((3, 16), np.float32)
    weight[1] = 1e-42
    quantised = nearest.quantise(weight, grid)
    assert np.isfinite(quantised.scale).all() and (quantised.scale > 0).all()
    assert np.abs(quantised.dequantised()).max() <= 1e-36


def test_given_scales_are_kept() -> None:
    weight, scale = weight_of(2, 8), np.full((2, 2), 0.5, np.float32)
    assert on_scales(weight, Grid(4, True, 4), scale).scale is scale
    two = on_steps(weight, Grid(4, True, 4, True), np.full((2, 2), 3, np.uint8), np.full(2, 0.25, np.float32))
    assert (two.scale == 0.75).all()


@pytest.mark.parametrize("arguments", [(5,), (0,), (4, True, 0), (4, True, None, True), (4, False, 8, True)])
def test_grids_that_mean_nothing_are_refused(arguments: tuple) -> None:
    with pytest.raises(RingstepError):
        Grid(*arguments)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = weight_of()
    weight[3, 4] = bad
    with pytest.raises(RingstepError, match="not finite"):
        nearest.quantise(weight, Grid(4))
    with pytest.raises(RingstepError, match="shape"):
        nearest.quantise(weight[0], Grid(4))

"""Histories of tensors against numpy over all of their values, and each method's range where the best one is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quantize.observe import BINS, SAMPLE, Seen, merge, value_range

torch.set_num_threads(1)
Floats = np.ndarray


def history(*parts: Floats) -> Seen:
    seen = Seen()
    for part in parts:
        seen.add(torch.from_numpy(np.asarray(part, np.float32)))
    return seen


def counted(seen: Seen, values: Floats, share: float = 2e-3) -> None:
    """The histogram is numpy's, but for values that rounding puts into the next bin."""
    want, _ = np.histogram(values.astype(np.float64), BINS, (-seen.edge, seen.edge))
    assert seen.counts.sum() == len(values)
    shifted = [np.abs(np.cumsum(seen.counts) - np.cumsum(np.roll(want, k))) for k in (-1, 0, 1)]
    assert np.min(shifted, axis=0).max() <= share * len(values)


@pytest.mark.parametrize("sizes", [[1.0], [1.0, 1.0, 1.0], [0.001, 5.0, 0.1, 700.0], [700.0, 0.001], [3.0, 3.1]])
def test_a_history_is_that_of_all_values(sizes: list[float]) -> None:
    random = np.random.default_rng(0)
    parts = [(size * random.normal(0.3, 1, (7, 11, 13))).astype(np.float32) for size in sizes]
    seen, whole = history(*parts), np.concatenate([p.ravel() for p in parts])
    assert (seen.low, seen.high) == (whole.min(), whole.max())
    assert seen.edge >= np.abs(whole).max() and seen.edge < 2 * np.abs(whole).max() * 1.0001
    counted(seen, whole, 0.03)  # next to 700, float32 cannot say on which side of 0 a thousandth lies
    assert seen.centres[0] == -seen.edge * (1 - 1 / BINS) and np.diff(seen.centres).std() < 1e-9 * seen.edge


def test_one_sided_and_constant_tensors() -> None:
    for values in (np.zeros(5), np.full(9, 3.5), np.full(2, -1e-3), np.array([2.0, 900.0]), np.array([0.0, 1e-20])):
        seen = history(values)
        assert (seen.low, seen.high) == (np.float32(values.min()), np.float32(values.max()))
        assert seen.counts.sum() == len(values)
    later = history(np.zeros(5), np.full(3, 1000.0))
    assert later.counts.sum() == 8 and later.counts[BINS // 2 - 1 : BINS // 2 + 1].sum() == 5
    assert later.counts[-BINS // 2 - BINS // 4 :].sum() >= 3


@pytest.mark.parametrize("shape", [(128, 576), (128, 1536), (64, 4096), (1, 9, 128, 256), (3 * SAMPLE,), (SAMPLE + 5,)])
def test_large_tensors_are_sampled_all_over(shape: tuple[int, ...]) -> None:
    """Smallest and largest are of all elements; every channel has its share of the histogram."""
    random = np.random.default_rng(1)
    channel = np.arange(shape[-1], dtype=np.float32)
    values = np.broadcast_to(channel, shape) + random.uniform(0.2, 0.8, shape).astype(np.float32)
    seen = history(values)
    assert (seen.low, seen.high) == (values.min(), values.max())
    assert SAMPLE // 2 <= seen.counts.sum() <= 2 * SAMPLE
    wanted, _ = np.histogram(values, BINS, (-seen.edge, seen.edge))
    share = np.cumsum(seen.counts) / seen.counts.sum()
    assert np.abs(share - np.cumsum(wanted) / values.size).max() < 0.02
    if shape[-1] <= 576:
        for i in range(shape[-1]):
            inside = (seen.centres > i) & (seen.centres < i + 1)
            assert seen.counts[inside].sum() > 0, f"channel {i} was never looked at"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stay(bad: float) -> None:
    seen = history(np.ones(3), np.array([1.0, bad]), np.array([-7.0, 9.0]))
    assert not np.isfinite([seen.low, seen.high]).any()
    for parts in ([seen, history(np.ones(2))], [history(np.ones(2)), seen]):
        whole = merge(parts)
        assert not np.isfinite([whole.low, whole.high]).all()


def test_widen_keeps_counts() -> None:
    random = np.random.default_rng(2)
    values = random.normal(size=4000)
    seen = history(values)
    for factor in (1.0, 1.5, 2.0, 33.0, 1e6):
        edge = seen.edge
        seen.widen(edge * factor)
        assert seen.counts.sum() == 4000 and edge * factor <= seen.edge < 2 * edge * max(factor, 1.0)
        assert np.log2(seen.edge / edge) == round(np.log2(seen.edge / edge))
        if factor <= 33:
            counted(seen, values)


@pytest.mark.parametrize("sizes", [[1.0], [1.0, 1.0], [1.0, 3.0, 0.7], [100.0, 1e-4], [5.0, 4.999]])
def test_merging_is_seeing_all(sizes: list[float]) -> None:
    random = np.random.default_rng(3)
    parts = [(size * random.normal(-0.2, 1, 3000)).astype(np.float32) for size in sizes]
    whole, together = np.concatenate(parts), merge([history(p) for p in parts])
    assert (together.low, together.high) == (whole.min(), whole.max())
    counted(together, whole, 0.01)


def test_merging_changes_no_part() -> None:
    one, other = history(np.ones(3)), history(np.full(3, 8.0))
    edges, counts = (one.edge, other.edge), (one.counts.copy(), other.counts.copy())
    merge([one, other])
    assert (one.edge, other.edge) == edges
    np.testing.assert_array_equal(one.counts, counts[0])
    np.testing.assert_array_equal(other.counts, counts[1])


def test_merging_a_range_without_values() -> None:
    """cos and sin are known, not seen."""
    for parts in ([Seen(-1, 1), history(np.full(3, 8.0))], [history(np.full(3, 8.0)), Seen(-1, 1)]):
        whole = merge(parts)
        assert (whole.low, whole.high, whole.counts.sum()) == (-1, 8, 3)


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0, 99.9, 100.0])
@pytest.mark.parametrize("make", [np.random.Generator.normal, np.random.Generator.exponential])
def test_percentile_is_that_of_the_values(make: Callable[..., Floats], percentile: float) -> None:
    values = make(np.random.default_rng(4), size=8000).astype(np.float32)
    seen = history(values)
    low, high = value_range(seen, "percentile", 256, percentile)
    outside = (100 - percentile) / 2
    width = 2 * seen.edge / BINS
    at = lambda q, method: min(0.0, np.percentile(values, q, method=method)) if q < 50 else np.percentile(
        values, q, method=method)  # fmt: skip
    assert at(outside, "lower") - 1.1 * width <= low <= at(outside, "higher") + 1.1 * width
    assert at(100 - outside, "lower") - 1.1 * width <= high <= at(100 - outside, "higher") + 1.1 * width
    inside = ((values >= low) & (values <= high)).mean()
    assert inside >= percentile / 100 - 1e-3
    assert seen.low <= low or low == 0


def rounding_error(values: Floats, low: float, high: float, levels: int) -> float:
    """The mean squared error of rounding to `levels` numbers between low and high, computed by doing it."""
    step = (high - low) / (levels - 1)
    q = np.clip(np.rint((values - low) / step), 0, levels - 1)
    return float(np.mean((q * step + low - values) ** 2))


def sampled(values: Floats) -> Seen:
    """A history of all values, in pieces that are counted whole."""
    return history(*np.array_split(values, -(-len(values) // SAMPLE)))


# Optimal clipping of b-bit uniform rounding (Banner et al. 2019, arXiv 1810.05723, table of alpha): Laplace of
# diversity 1 and normal of deviation 1.
KNOWN = [("laplace", 4, 2.83), ("laplace", 8, 3.89), ("laplace", 16, 5.03), ("laplace", 256, 9.89),
         ("normal", 4, 1.71), ("normal", 8, 2.15), ("normal", 16, 2.55), ("normal", 256, 3.92)]  # fmt: skip


@pytest.mark.parametrize(("kind", "levels", "alpha"), KNOWN)
def test_mse_finds_the_clipping_that_is_known_best(kind: str, levels: int, alpha: float) -> None:
    values = getattr(np.random.default_rng(5), kind)(size=200_000).astype(np.float32)
    seen = sampled(values)
    low, high = value_range(seen, "mse", levels)
    # Both ends are scaled alike: their middle is what the table has.
    assert abs((high - low) / 2 / alpha - 1) < 0.16
    shares = np.linspace(1, 0.05, 200)
    best = min(rounding_error(values, s * seen.low, s * seen.high, levels) for s in shares)
    mine = rounding_error(values, low, high, levels)
    # Between few levels rounding's error is not uniform, as the formula takes it to be.
    assert mine <= (1.2 if levels < 16 else 1.03) * best
    if levels <= 16:
        assert mine < 0.7 * rounding_error(values, seen.low, seen.high, levels)


def test_mse_clips_nothing_where_clipping_costs() -> None:
    """A uniform distribution, and 16 bits."""
    random = np.random.default_rng(6)
    uniform = history(random.uniform(-1, 1, 8000))
    low, high = value_range(uniform, "mse", 256)
    assert low == uniform.low and high == uniform.high
    normal = history(random.normal(size=8000))
    assert value_range(normal, "mse", 65536) == (normal.low, normal.high)


def divergence(counts: Floats, centres: Floats, low: float, high: float, levels: int) -> float:
    """Kullback-Leibler of a clipped histogram against its rounded form, bin by bin as TensorRT's calibrator has it."""
    width = centres[1] - centres[0]
    inside = [i for i, c in enumerate(centres) if c + width / 2 > low and c - width / 2 < high]
    p = {i: float(counts[i]) for i in inside}
    for i in range(len(counts)):
        if i not in p:
            p[inside[0] if i < inside[0] else inside[-1]] += counts[i]
    groups: dict[int, list[int]] = {}
    for k, i in enumerate(inside):
        groups.setdefault(k * min(levels, len(inside)) // len(inside), []).append(i)
    q = dict.fromkeys(inside, 0.0)
    for members in groups.values():
        full = [i for i in members if counts[i] > 0]
        for i in full:
            q[i] = sum(counts[j] for j in full) / len(full)
    total_p, total_q = sum(p.values()), sum(q.values())
    return sum(p[i] / total_p * np.log(p[i] / total_p / max(q[i] / total_q, 1e-12)) for i in inside if p[i] > 0)


@pytest.mark.parametrize("kind", ["normal", "laplace", "outliers"])
def test_entropy_is_the_smallest_divergence(kind: str) -> None:
    random = np.random.default_rng(7)
    values = random.laplace(size=8000) if kind == "laplace" else random.normal(size=8000)
    if kind == "outliers":
        values[:8] = 30.0
    seen = history(values)
    low, high = value_range(seen, "entropy", 256)
    mine = divergence(seen.counts, seen.centres, low, high, 256)
    for share in np.linspace(1.0, 0.1, 25):
        other = divergence(seen.counts, seen.centres, share * seen.low, share * seen.high, 256)
        assert mine <= other * 1.02 + 1e-6, share
    assert abs(low / seen.low - high / seen.high) < 1e-6  # both ends alike


def test_entropy_of_more_levels_than_bins_clips_nothing() -> None:
    seen = history(np.random.default_rng(8).laplace(size=8000))
    assert value_range(seen, "entropy", 65536) == (seen.low, seen.high)


@pytest.mark.parametrize("method", ["min-max", "percentile", "mse", "entropy"])
def test_every_range_holds_zero(method: str) -> None:
    random = np.random.default_rng(9)
    low, high = value_range(history(random.uniform(5, 9, 500)), method, 256)
    assert low == 0 and 4.5 < high <= 9
    low, high = value_range(history(random.uniform(-9, -5, 500)), method, 256)
    assert -9 <= low < -4.5 and high == 0
    assert value_range(history(np.zeros(4)), method, 256) == (0, 0)
    # Known without values: taken as it is.
    assert value_range(Seen(-1, 1), method, 256) == (-1, 1)


def test_min_max_is_everything() -> None:
    seen = history(np.array([-3.0, 100.0]), np.array([-70.0, 1.0]))
    assert value_range(seen, "min-max", 256) == (-70, 100)

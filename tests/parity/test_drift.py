"""Slopes and falls of curves drawn by hand: what drifts is found, what only wavers is not."""

from __future__ import annotations

import numpy as np
import pytest

from ringstep.errors import RingstepError
from ringstep.parity.drift import FEWEST_TOKENS, trend

AT = np.arange(315)


def noise(seed: int, sigma: float = 4.0) -> np.ndarray:
    """SNR of positions differs by a few dB, and neighbours' alike."""
    random = np.random.default_rng(seed)
    white = random.standard_normal(len(AT) + 2) * sigma
    return (white[2:] + white[1:-1] + white[:-2]) / np.sqrt(3)


def drifts(curve: np.ndarray) -> bool:
    return bool(trend(AT, curve).reasons)


def test_slope_of_a_line() -> None:
    found = trend(AT, 60 - 0.03 * AT)
    assert found.slope.db_per_100 == pytest.approx(-3.0) and found.slope.low == pytest.approx(-3.0)
    assert found.slope.drifts and "-3.0 dB for each 100 tokens" in found.reasons[0]
    assert not trend(AT, 60 + 0.03 * AT).reasons  # better with time is no fault
    assert not trend(AT, 60 - 0.015 * AT).slope.drifts  # surely there, too little to matter


def test_levels_do_not_drift() -> None:
    """Sixty wavering curves at any level, the first eight positions 3 dB better: none is called a drift."""
    curves = [30 + 3 * (AT < 8) + noise(seed) for seed in range(60)]
    assert sum(map(drifts, curves)) == 0


def test_a_repeated_text_does_not_drift() -> None:
    """A greedy generation that runs into a loop repeats its SNR."""
    random = np.random.default_rng(3)
    looped = np.concatenate([30 + noise(1)[:100], np.resize(30 + 4 * random.standard_normal(7), 215)])
    assert not drifts(looped)


@pytest.mark.parametrize("decades", [-10, -20])
def test_accumulated_errors_drift(decades: int) -> None:
    """Errors that add up, as a random walk or all one way: 10 or 20 dB for each factor of ten in position."""
    found = [drifts(70 + decades * np.log10(AT + 1) + noise(seed)) for seed in range(30)]
    assert sum(found) >= (28 if decades == -10 else 30)


@pytest.mark.parametrize(("at", "db"), [(10, 20), (60, 12), (128, 12), (250, 12)])
def test_a_fault_from_a_position_on_is_a_fall(at: int, db: int) -> None:
    """Also where less than half of all pairs of positions straddle it, which the slope does not see."""
    for seed in range(10):
        found = trend(AT, 40 - db * (at <= AT) + noise(seed))
        assert found.fall.drifts and abs(found.fall.position - at) <= 10, (seed, found.fall)
    assert f"from position {found.fall.position} on" in found.reasons[-1]


def test_what_float32_rounds_is_no_drift() -> None:
    assert not drifts(130 - 0.08 * AT)  # 105 dB at the end
    assert drifts(130 - 0.2 * AT)


def test_values_that_are_not_finite_are_a_fall() -> None:
    assert drifts(np.where(AT < 200, 60.0, -300.0))


def test_too_few_positions() -> None:
    with pytest.raises(RingstepError, match=f"at least {FEWEST_TOKENS} tokens, there are 20"):
        trend(range(20), [50.0] * 20)
    trend(range(FEWEST_TOKENS), [50.0] * FEWEST_TOKENS)

"""The measures of parity against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringstep.parity.metrics import NEAR_TIE, agreement, kl_nats, log_softmax, snr_db, top_overlap

rows = st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=20).map(lambda v: np.array(v, np.float32))


def test_snr() -> None:
    reference = np.array([3.0, 4.0])  # power 25
    assert snr_db(reference, np.array([3.0, 4.5])) == pytest.approx(20.0)  # noise 0.25
    assert snr_db(reference, np.array([8.0, 4.0])) == pytest.approx(0.0)
    assert snr_db(reference, np.zeros(2)) == pytest.approx(0.0)
    assert snr_db(reference, -reference) == pytest.approx(10 * np.log10(1 / 4))


def test_snr_is_of_the_reference() -> None:
    assert snr_db(np.array([10.0]), np.array([1.0])) > snr_db(np.array([1.0]), np.array([10.0]))


def test_snr_of_identical_and_broken_arrays() -> None:
    some = np.linspace(-1, 1, 7, dtype=np.float32)
    assert snr_db(some, some) == 300.0 and snr_db(np.zeros(3), np.zeros(3)) == 300.0
    for bad in (np.nan, np.inf, -np.inf):
        assert snr_db(some, np.where(some == 1, np.float32(bad), some)) == -300.0
    assert snr_db(np.zeros(3), np.ones(3)) < -300.0


def test_snr_computes_in_float64() -> None:
    half = np.full(4096, 300.0, np.float16)  # its squares overflow float16
    assert snr_db(half, half + np.float16(3)) == pytest.approx(40.0)
    large = np.full(8, 1e30, np.float32)
    assert snr_db(large, large * np.float32(1.001)) == pytest.approx(60.0, abs=0.01)


def test_top_overlap() -> None:
    reference = np.array([9.0, 8.0, 7.0, 1.0, 0.0])
    other = np.array([7.0, 9.0, 0.0, 8.0, 1.0])
    assert top_overlap(reference, other, 1) == 0.0
    assert top_overlap(reference, other, 2) == 0.5
    assert top_overlap(reference, other, 3) == pytest.approx(2 / 3)
    assert top_overlap(reference, other) == 1.0
    assert top_overlap(reference, other, 50) == 1.0  # a vocabulary smaller than k


def test_kl() -> None:
    half, skewed = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    want = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert kl_nats(half, skewed) == pytest.approx(want)
    assert kl_nats(half + 100, skewed - 7) == pytest.approx(want)  # logits have no origin
    assert kl_nats(skewed, half) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))
    assert kl_nats(skewed, skewed) == 0.0
    assert np.isfinite(kl_nats(np.array([1e4, 0.0]), np.array([0.0, 1e4])))


@given(rows)
def test_probabilities_sum_to_one(row: np.ndarray) -> None:
    assert np.exp(log_softmax(row)).sum() == pytest.approx(1.0)
    assert kl_nats(row, row) == pytest.approx(0.0, abs=1e-12)


def flipped(margin: float, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 10000 that are `noise` off everywhere, so that is their rms, and whose first two tokens trade places."""
    reference = np.concatenate([[margin, 0.0], np.full(9998, -50.0)])
    other = reference + noise * np.where(np.arange(10000) % 2, 1, -1)
    other[:2] = margin / 2 - 0.01, margin / 2 + 0.01
    return reference, other


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "ambiguous"), (0.99, "ambiguous"), (1.01, "different")])
def test_agreement_near_a_tie(factor: float, verdict: str) -> None:
    """A tie is a margin of at most four times the row's rms error."""
    assert NEAR_TIE == 4.0
    assert agreement(*flipped(factor * 0.4)) == verdict


def test_agreement_on_the_token_alone() -> None:
    assert agreement(np.array([1.0, 2.0]), np.array([5.0, 6.0])) == "equal"


def test_a_flip_in_a_clean_row_is_different() -> None:
    """Two wrong tokens in an otherwise exact row prove a fault, however close the two are."""
    reference = np.concatenate([[1.0, 0.0], np.full(998, -9.0)])
    other = reference.copy()
    other[:2] = 0.4, 0.6
    assert agreement(reference, other) == "different"

"""The measures of parity. All take float arrays of equal shape, the reference first, and compute in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["equal", "ambiguous", "different"]
Floats = NDArray[np.floating]

NEAR_TIE = 4.0
SILENT_DB = 300.0  # identical arrays have no noise; float64 itself ends near 313 dB


def snr_db(reference: Floats, other: Floats) -> float:
    """Signal to noise ratio 10 log10(sum r^2 / sum (r - o)^2) in dB; 300 where identical, -300 where not finite."""
    r, o = np.asarray(reference, np.float64), np.asarray(other, np.float64)
    if not np.isfinite(o).all():
        return -SILENT_DB
    noise, signal = float(np.square(r - o).sum()), float(np.square(r).sum())
    if noise == 0.0:
        return SILENT_DB
    return 10.0 * float(np.log10(max(signal, np.finfo(float).tiny) / noise))


def max_rel(reference: Floats, other: Floats) -> float:
    """The largest error of any entry as a share of the reference's largest entry; infinite where not finite."""
    r, o = np.asarray(reference, np.float64), np.asarray(other, np.float64)
    if not np.isfinite(o).all():
        return float("inf")
    return float(np.abs(r - o).max() / max(float(np.abs(r).max()), np.finfo(float).tiny))


def top_overlap(reference: Floats, other: Floats, k: int = 5) -> float:
    """The share of the reference's k largest entries that are among the other's k largest, 0 to 1."""
    k = min(k, reference.shape[-1])
    return len(set(np.argsort(-reference)[:k]) & set(np.argsort(-other)[:k])) / k


def kl_nats(reference: Floats, other: Floats) -> float:
    """Kullback-Leibler divergence KL(reference || other) of two rows of logits, in nats."""
    r, o = log_softmax(reference), log_softmax(other)
    return max(0.0, float((np.exp(r) * (r - o)).sum()))


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Logarithm of the softmax of one row."""
    shifted = np.asarray(logits, np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def agreement(reference: Floats, other: Floats) -> Verdict:
    """Whether both rows put the same token first.

    "ambiguous" where they do not, but the reference's own margin between the two tokens is below the error: within
    four times the row's rms error, which two independent errors of that size reach three sigma apart
    (3 sqrt(2) = 4.2), so that any engine with this error may turn the tie.
    """
    a, b = int(reference.argmax()), int(other.argmax())
    if a == b:
        return "equal"
    margin = float(reference[a]) - float(reference[b])
    error = np.abs(np.asarray(other, np.float64) - np.asarray(reference, np.float64))
    # The error on the two tokens themselves always exceeds the margin once they flip: it proves nothing.
    rms = float(np.sqrt(np.square(error).mean()))
    return "ambiguous" if margin <= NEAR_TIE * rms else "different"

"""The `auto` scheme: raise the linears that take most noise out of the logits a byte, until a goal is met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Promotion:
    """One linear that was raised."""

    path: str
    low: int
    high: int
    noise: float
    """The part of all rounding noise that goes with it, 0 to 1, as estimated."""
    extra_bytes: int
    db: float
    """SNR of the logits once it and all before it are raised, as estimated from the measured start."""


def choose(noise: Mapping[str, float], extra_bytes: Mapping[str, int], low: int, high: int, start_db: float,
           target_db: float | None, room_bytes: int | None) -> list[Promotion]:  # fmt: skip
    """The promotions in the order of noise a byte, up to `target_db` or until `room_bytes` are spent.

    `noise` and `extra_bytes` go by path; noise is the energy each linear's rounding adds, `start_db` the SNR measured
    with none raised, which sets its scale: energies of independent errors add up. A linear in more bits is taken to
    keep the square of the ratio of its steps (6 dB a bit) of its noise.
    """
    total, left = sum(noise.values()), 1.0
    kept = 4.0 ** (low - high)
    chosen: list[Promotion] = []
    spent = 0
    for path in sorted(noise, key=lambda p: noise[p] / max(extra_bytes[p], 1), reverse=True):
        if target_db is not None and start_db - 10 * math.log10(left) >= target_db:
            break
        if room_bytes is not None and spent + extra_bytes[path] > room_bytes:
            continue
        share = noise[path] / max(total, 1e-300)
        left = max(left - share * (1 - kept), 1e-9)
        spent += extra_bytes[path]
        chosen.append(Promotion(path, low, high, share, extra_bytes[path], start_db - 10 * math.log10(left)))
    return chosen

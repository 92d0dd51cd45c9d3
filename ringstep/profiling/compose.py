"""A decode step from its parts: each kind's median times how often it stands in the step, and the head.

    21 x 0.917 ms (sliding) + 7 x 1.127 ms (full) = 27.15 ms

Parts that were measured alone leave out what a whole step may save or cost (the next layer's weights fetched while this
one computes, a graph's start): the sum says what the parts are worth, not what the step will take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringstep.errors import RingstepError
from ringstep.profiling.profile import Profile
from ringstep.profiling.stats import MIN_ITERATIONS, SEED, resampled_medians

FULL, HEAD, STEP = "full", "head", "step"


@dataclass(frozen=True)
class Term:
    """One part: count x ms = total_ms."""

    part: str
    count: int
    ms: float
    layout: str
    context: int
    job: str
    origin: str

    @property
    def total_ms(self) -> float:
        """What the part adds to the step."""
        return self.count * self.ms


@dataclass(frozen=True)
class Composed:
    """A step, or what of it was measured."""

    model: str
    device: str
    unit: str
    precision: str
    context: int
    """Of the full layers; 0 where there are none."""
    terms: tuple[Term, ...]
    ms: float
    low_ms: float | None
    high_ms: float | None
    """Bounds of `ms` by the parts' noise (95 % of each median) and rounding, all off the same way; None where a part
    has neither."""
    missing: tuple[str, ...]
    """Parts that were not measured."""
    notes: tuple[str, ...]

    @property
    def layers_only(self) -> bool:
        """Whether the head is missing."""
        return HEAD in self.missing

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second; without the head where `layers_only`, None where any other part is missing."""
        return None if set(self.missing) - {HEAD} else 1000 / self.ms


def compose(parts: Sequence[Profile], *, rounding: Mapping[str, float] | None = None,
            expected: Mapping[str, int] | None = None) -> Composed:  # fmt: skip
    """Add up the parts of one step, a profile each.

    `rounding` is by how many microseconds a figure may be off, by job; `expected` how often each part stands in the
    step. Raises RingstepError for no parts, a part twice, a whole step among them, and parts that no single step has:
    of other models, devices, precisions, full layers of other contexts, counts that `expected` does not have.
    """
    if not parts:
        raise RingstepError("nothing to compose: no part was measured")
    for name, field in _MUST_AGREE.items():
        values = sorted({str(field(part)) for part in parts})
        if len(values) > 1:
            raise RingstepError(f"parts of one step must have one {name}, these have {', '.join(values)}")
    subjects = [part.subject for part in parts]
    names = [s.part for s in subjects]
    for name in names:
        if names.count(name) > 1:
            of = [f"{s.layout} at context {s.context}" for s in subjects if s.part == name]
            raise RingstepError(f"part {name} is there {len(of)} times ({', '.join(of)}): a step has one of each kind")
    if STEP in names and len(names) > 1:
        raise RingstepError("a profile of a whole step is no part of one")
    _check_counts(parts, expected or {})
    context = next((part.subject.context for part in parts if part.subject.part == FULL), 0)
    notes = [
        f"{s.part} was measured at context {s.context}: one with a window is the same at any from its window on"
        for s in subjects
        if context and s.part not in (FULL, HEAD) and s.context != context
    ]
    if any(part.origin != "aihub" for part in parts):
        notes.append(f"{'/'.join(sorted({part.origin for part in parts}))} figures, not measured here")
    for verdict, means in (("failed", "computes something else"), ("unchecked", "was not held against a reference")):
        own = [part.subject.part for part in parts if part.parity == verdict and part.origin != "published"]
        if own:
            notes.append(f"PARITY {verdict.upper()}: {', '.join(own)} {means}: this is no latency of a proven model")
    terms = tuple(Term(s.part, s.count, part.median_us / 1000, s.layout, s.context, part.job, part.origin)
                  for part, s in zip(parts, subjects, strict=True))  # fmt: skip
    bounds = [_bounds(part, rounding or {}) for part in parts]
    low = high = None
    if all(bounds):
        low, high = (sum(part.subject.count * bound[side] / 1000 for part, bound in zip(parts, bounds, strict=True)
                         if bound) for side in (0, 1))  # fmt: skip
    missing = [name for name in expected or {} if name not in names]
    if not expected and HEAD not in names and STEP not in names:
        missing.append(HEAD)
    first = parts[0]
    return Composed(
        first.subject.model, first.place.device, first.place.unit, first.subject.precision, context, terms,
        sum(term.total_ms for term in terms), low, high, tuple(missing), tuple(notes),
    )  # fmt: skip


def all_full(parts: Sequence[Profile]) -> list[Profile] | None:
    """The same step with every layer a full one: what the windows save. None without full layers or others beside."""
    layers = [part for part in parts if part.subject.part not in (HEAD, STEP)]
    full = [part for part in layers if part.subject.part == FULL]
    if len(full) != 1 or len(layers) < 2:
        return None
    count = sum(part.subject.count for part in layers)
    flat = dataclasses.replace(full[0], subject=dataclasses.replace(full[0].subject, count=count))
    return [flat, *(part for part in parts if part.subject.part == HEAD)]


_MUST_AGREE = {
    "model": lambda p: p.subject.model,
    "recipe": lambda p: p.subject.recipe,
    "precision": lambda p: p.subject.precision,
    "number of tokens": lambda p: p.subject.tokens,
    "device": lambda p: p.place.device,
    "runtime": lambda p: p.place.runtime,
    "unit": lambda p: p.place.unit,
}


def _check_counts(parts: Sequence[Profile], expected: Mapping[str, int]) -> None:
    for s in (part.subject for part in parts):
        if s.count < 1:
            raise RingstepError(f"part {s.part}: count {s.count}, at least 1 is needed")
        if expected and s.part not in expected:
            raise RingstepError(f"part {s.part}: the step has none; it has {', '.join(expected)}")
        if expected and s.count != expected[s.part]:
            raise RingstepError(f"part {s.part}: counted {s.count} times, the step has {expected[s.part]}")


def _bounds(part: Profile, rounding: Mapping[str, float]) -> tuple[float, float] | None:
    """Microseconds between which the part's median lies."""
    off = rounding.get(part.job)
    low = high = part.median_us
    if len(part.times_us) >= MIN_ITERATIONS:
        medians = resampled_medians(part.times_us, np.random.default_rng(SEED))
        low, high = (float(bound) for bound in np.percentile(medians, [2.5, 97.5]))
    elif off is None:
        return None
    return low - (off or 0), high + (off or 0)

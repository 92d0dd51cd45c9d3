"""The window gate: a step tried where caches begin to forget, wrap and end, against the reference.

    window W, ring of W - 1 slots, a graph of n tokens:

    decode     ......W-2 | W-1 | W | W+1                 one by one over the edge, and over the second and third wrap
    straddle   ....... | W-1 ... W+n-2 |                 a chunk that begins on one side and ends on the other
    padded     ....... | W-1 ... W+n/2 ..pad..           the same, not full
    larger     . | 1 ................ W+1 |              more tokens in one step than the window has
    full       ............................. | C-2 | C-1  the last positions of the context
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ringstep.contract import StepSpec
from ringstep.parity.metrics import snr_db
from ringstep.parity.report import Truth, compare_cache
from ringstep.parity.thresholds import thresholds_for
from ringstep.session import DecodeSession

Mode = Literal["off", "fast", "full"]
WRAPS = 3
SMALL_CHUNK = 8  # up to here a chunk tries every place over an edge


@dataclass(frozen=True)
class Feeding:
    """A text fed in one step of `lead` tokens (none if 0), then in steps of `calls` tokens, which are judged."""

    kind: str
    """The layer type it was made for: the name of its mask."""
    case: str
    lead: int
    calls: tuple[int, ...]

    @property
    def end(self) -> int:
        """How many tokens it feeds."""
        return self.lead + sum(self.calls)


@dataclass(frozen=True)
class Judged:
    """What a feeding came to: its worst position and its worst cache, in dB."""

    feeding: Feeding
    position: int
    logits_db: float
    layer: int
    cache_db: float
    failures: list[str]


def feedings(spec: StepSpec, mode: Mode, windows: Sequence[int] = ()) -> list[Feeding]:
    """What a mode tries: `fast` every window's edge, second wrap and a chunk over it; `full` everything.

    Without windows `fast` tries nothing. `windows` are those that the original is said to have: an artifact that has
    dropped one does not know of it.
    """
    found: dict[tuple[int, tuple[int, ...]], Feeding] = {}
    if mode == "off":
        return []
    own = [(mask.name, mask.window) for mask in spec.masks if mask.window and mask.window < spec.context]
    unknown = sorted({w for w in windows if w < spec.context} - {window for _, window in own})
    tried = [windowed_feedings(spec, name, w, mode) for name, w in (*own, *(("original", w) for w in unknown))]
    if mode == "full":
        tried += [full_feedings(spec, mask.name) for mask in spec.masks]
    for some in tried:
        for feeding in some:
            if feeding.lead >= 0 and feeding.end <= spec.context:
                found.setdefault((feeding.lead, feeding.calls), feeding)
    return sorted(found.values(), key=lambda f: (f.lead, f.end))


def windowed_feedings(spec: StepSpec, kind: str, window: int, mode: Mode) -> Iterator[Feeding]:
    """The feedings of one layer type with a window."""
    sizes = sorted(g.n for g in spec.graphs)
    wrap, largest = max(1, window - 1), sizes[-1]
    feeding = lambda case, lead, *calls: Feeding(kind, case, lead, calls)
    yield feeding("edge", max(0, window - 2), *[1] * (window + 2 - max(0, window - 2)))
    yield feeding("wrap 2", 2 * wrap - 1, 1, 1, 1)
    if largest > 1:
        yield feeding("straddle", max(0, window - (largest + 1) // 2), largest, 1)
    yield feeding("larger", 1, window + 1, 1)
    if mode == "fast":
        return
    for k in range(3, WRAPS + 1):
        yield feeding(f"wrap {k}", k * wrap - 1, 1, 1, 1)
    yield feeding("alone", 0, *[1] * min(spec.context, WRAPS * wrap + 2))
    for n in (n for n in sizes if n > 1):
        # The new tokens of a chunk begin to push entries out at each of these positions.
        for k, edge in enumerate((wrap, window, *(k * wrap for k in range(2, WRAPS + 1)))):
            before = range(1, n) if n <= SMALL_CHUNK else sorted({1, n // 2, n - 1})
            for at in before:
                yield feeding(f"straddle {k + 1}", edge - at, n, 1)
            yield feeding(f"padded {k + 1}", edge - n // 2, max(2, n - 1), 1, max(2, n // 2))
        yield feeding("chunks", 0, *[n] * min(spec.context // n, (WRAPS + 1) * wrap // n + 1))
        yield feeding("chunks after one", 1, *[n] * min((spec.context - 1) // n, (WRAPS + 1) * wrap // n + 1))
    for count in (window, window + 1, 2 * window, 2 * window + largest):
        yield feeding("larger", 0, count, 1)
        yield feeding("larger", 1, count, 1)
        yield feeding("larger", window + 1, count, 1)


def full_feedings(spec: StepSpec, kind: str) -> Iterator[Feeding]:
    """What any layer type is tried with: the context filled to the last position, in every graph."""
    last, sizes = spec.context, sorted(g.n for g in spec.graphs)
    yield Feeding(kind, "whole", 0, (last,))
    yield Feeding(kind, "full", max(0, last - 3), (1,) * min(3, last))
    for n in (n for n in sizes if n > 1):
        yield Feeding(kind, "full", max(0, last - n), (min(n, last),))
        yield Feeding(kind, "full, padded", max(0, last - n + 1), (min(n - 1, last),))


Tick = Callable[[float], None]


def judge(session: DecodeSession, truth: Truth, tried: Sequence[Feeding], limit_db: float | None = None,
          tick: Tick | None = None) -> list[Judged]:  # fmt: skip
    """Feed truth.ids in each of these ways; logits and caches are held against `limit_db` (thresholds.toml)."""
    if limit_db is None:
        limit_db = thresholds_for(session.spec, session.engine.name).windows_db
    session.reset()
    state, found = copied(session), []
    for feeding in sorted(tried, key=lambda f: (f.lead, f.end)):
        # A lead goes on from the one before, so that a long text is fed once.
        restore(session, state)
        if feeding.lead > session.position:
            session.step(truth.ids[session.position : feeding.lead])
            state = copied(session)
        logits = []
        for count in feeding.calls:
            logits.append(session.step(truth.ids[session.position : session.position + count]))
        found.append(judged(session, truth, feeding, np.concatenate(logits), limit_db))
        if tick:
            tick(1)
    session.reset()
    return found


def judged(session: DecodeSession, truth: Truth, feeding: Feeding, logits: np.ndarray, limit_db: float) -> Judged:
    """One feeding, `logits` [sum of calls, vocab] being what the session answered."""
    copied_ids = len(session.spec.prefix.ids) if session.spec.prefix else 0
    rows = [(snr_db(truth.logits[p], row), p) for p, row in enumerate(logits, feeding.lead) if p >= copied_ids]
    low, position = min(rows, default=(np.inf, feeding.lead))
    caches = [compare_cache(session, layer, entries) for layer, entries in enumerate(truth.caches)]
    poor, layer = min(((min(c.key_db, c.value_db), c.layer) for c in caches), default=(np.inf, 0))
    failures = []
    if low < limit_db:
        failures.append(f"logits {low:.1f} dB at position {position}, below {limit_db:.0f} dB")
    if poor < limit_db:
        failures.append(f"cache of layer {layer} {poor:.1f} dB, below {limit_db:.0f} dB")
    return Judged(feeding, position, low, layer, poor, failures)


State = tuple[int, dict[tuple[int, str], np.ndarray]]


def copied(session: DecodeSession) -> State:
    """A session's position and copies of its caches."""
    return session.position, {key: array.copy() for key, array in session.caches.items()}


def restore(session: DecodeSession, state: State) -> None:
    """Put a session back to where it was copied."""
    session.position, kept = state
    for key, array in kept.items():
        session.caches[key][...] = array


def plain(mode: Mode, reference: str, limit_db: float, found: Sequence[Judged]) -> dict[str, Any]:
    """The results as JSON values, with what failed in sentences."""
    failures = [f"window gate, {j.feeding.kind} layers, {j.feeding.case} from position {j.feeding.lead}: {text}"
                for j in found for text in j.failures]  # fmt: skip
    return {"mode": mode, "reference": reference, "windows_db": limit_db, "passed": not failures,
            "failures": failures, "feedings": [dataclasses.asdict(j) for j in found]}  # fmt: skip

"""Comparing a session with a reference over a text: per position, per cache, and in sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringstep.contract import StepSpec
from ringstep.parity.metrics import SILENT_DB, Verdict, agreement, kl_nats, max_rel, snr_db, top_overlap
from ringstep.parity.thresholds import scheme_on, thresholds_for
from ringstep.session import DecodeSession, is_simulated

CacheEntries = tuple[np.ndarray, np.ndarray, np.ndarray]
DECODED = 8  # last tokens of a text that go through the decode graph


@dataclass(frozen=True)
class Truth:
    """What the reference says about a text.

    logits [tokens, vocab]; caches[layer] = (positions [m], keys [kv_heads, m, head_dim], values), keys after
    rotary.
    """

    source: str
    ids: list[int]
    logits: np.ndarray
    caches: list[CacheEntries]


@dataclass(frozen=True)
class Position:
    """One position's agreement; snr in dB, kl in nats, top5 as a share, max_rel as a share of the largest logit."""

    position: int
    token: int
    snr_db: float
    top1: Verdict
    top5: float
    kl: float
    max_rel: float = 0.0


@dataclass(frozen=True)
class CacheParity:
    """One layer's cache entries against the reference, in dB."""

    layer: int
    key_db: float
    value_db: float


@dataclass
class Report:
    """Parity of one engine on one text."""

    engine: str
    reference: str
    dtype: str
    activations: str
    simulated: bool
    threshold_db: float
    scheme: str = ""
    top1_share: float = 0.0
    """Of a scheme: the share of positions whose first token must not be another one."""
    pooled_db: float = 0.0
    """Logits SNR of all positions as one signal, in dB."""
    positions: list[Position] = field(default_factory=list)
    caches: list[CacheParity] = field(default_factory=list)
    answer: dict[str, Any] | None = None

    @property
    def min_db(self) -> float:
        """The lowest logits SNR of any position, in dB."""
        return min(p.snr_db for p in self.positions)

    @property
    def failures(self) -> list[str]:
        """Why the gate fails; empty when it passes."""
        found = []
        if self.scheme:
            return self.quantised_failures()
        if self.min_db < self.threshold_db:
            worst = min(self.positions, key=lambda p: p.snr_db)
            found.append(f"logits {worst.snr_db:.1f} dB at position {worst.position}, below {self.threshold_db:.0f} dB")
        wrong = [p.position for p in self.positions if p.top1 == "different"]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            found.append(f"another first token at position {wrong[0]}{more}")
        if self.answer and self.answer["verdict"] == "different":
            found.append("another answer to the prompt")
        return found

    def quantised_failures(self) -> list[str]:
        """Rounding weights turns close decisions somewhere in any text: pooled SNR and the share of top-1 decide."""
        found, share = [], float(np.mean([p.top1 != "different" for p in self.positions]))
        if self.pooled_db < self.threshold_db:
            found.append(f"logits {self.pooled_db:.1f} dB over all positions, below {self.threshold_db:.0f} dB")
        if share < self.top1_share:
            found.append(f"another first token at {100 * (1 - share):.0f} % of the positions")
        return found

    def summary(self) -> dict[str, Any]:
        """The figures a table or a gate needs, as plain values."""
        snr = np.array([p.snr_db for p in self.positions])
        verdicts = [p.top1 for p in self.positions]
        entries = [db for c in self.caches for db in (c.key_db, c.value_db)]
        return {
            "engine": self.engine, "simulated": self.simulated, "reference": self.reference, "dtype": self.dtype,
            "activations": self.activations, "tokens": len(self.positions),
            "scheme": self.scheme,
            "snr_db": {"min": float(snr.min()), "median": float(np.median(snr)), "max": float(snr.max()),
                       "pooled": self.pooled_db},
            "top1": verdicts.count("equal") / len(verdicts),
            "ambiguous": verdicts.count("ambiguous"), "different": verdicts.count("different"),
            "top5": float(np.mean([p.top5 for p in self.positions])),
            "kl": {"mean": float(np.mean([p.kl for p in self.positions])), "max": max(p.kl for p in self.positions)},
            "max_rel": max(p.max_rel for p in self.positions),
            "caches_db": {"min": min(entries), "median": float(np.median(entries))} if entries else None,
            "threshold_db": self.threshold_db, "passed": not self.failures, "failures": self.failures,
        }  # fmt: skip


def threshold_db(spec: StepSpec, engine: str) -> float:
    """The lowest logits SNR that still passes (thresholds.toml)."""
    return thresholds_for(spec, engine).db


def start_report(session: DecodeSession, source: str, threshold: float | None) -> Report:
    """An empty report of a session's engine."""
    spec, engine = session.spec, session.engine.name
    own = thresholds_for(spec, engine)
    limit = own.db if threshold is None else threshold
    scheme = scheme_on(spec, engine)
    return Report(engine, source, spec.dtype, spec.activations, is_simulated(spec, engine), limit, scheme, own.top1)


def compare(report: Report, session: DecodeSession, truth: Truth, logits: np.ndarray) -> None:
    """Fill a report: `logits` [tokens, vocab] are what the session returned for truth.ids, fed from position 0."""
    # What the sink prefix holds was copied from the original.
    copied = len(session.spec.prefix.ids) if session.spec.prefix else 0
    compare_logits(report, truth.ids, truth.logits, logits, copied)
    report.caches = [compare_cache(session, layer, truth.caches[layer]) for layer in range(len(truth.caches))]


def compare_logits(report: Report, ids: Sequence[int], want: np.ndarray, have: np.ndarray, copied: int) -> int:
    """Fill a report with the positions that both logits [tokens, vocab] of a text have after the first `copied`.

    All of them count where there are no more. Returns the first position compared.
    """
    count = min(len(want), len(have))
    first = copied if copied < count else 0
    report.pooled_db = snr_db(want[first:count], have[first:count])
    for position in range(first, count):
        a, b = want[position], have[position]
        report.positions.append(Position(position, ids[position], snr_db(a, b), agreement(a, b), top_overlap(a, b),
                                         kl_nats(a, b), max_rel(a, b)))  # fmt: skip
    return first


def compare_cache(session: DecodeSession, layer: int, want: CacheEntries) -> CacheParity:
    """Compare the entries that a session and the reference both hold of one layer, by position."""
    return compare_entries(layer, want, session.entries(layer)) or CacheParity(layer, SILENT_DB, SILENT_DB)


def compare_entries(layer: int, want: CacheEntries, have: CacheEntries, first: int = 0) -> CacheParity | None:
    """SNR of the entries of one layer that both hold, from position `first` on; None where there are none."""
    common = np.intersect1d(want[0], have[0])
    common = common[common >= first]
    if not len(common):
        return None
    theirs, mine = np.searchsorted(want[0], common), np.searchsorted(have[0], common)
    key_db, value_db = (snr_db(want[what][:, theirs], have[what][:, mine]) for what in (1, 2))
    return CacheParity(layer, key_db, value_db)


def steps(spec: StepSpec, count: int) -> list[int]:
    """How a text of `count` tokens is fed: in chunks of the largest graph, its last few tokens one at a time.

    Padding a last chunk is cheaper, but then a fault of the decode graph alone would pass.
    """
    sizes = [graph.n for graph in spec.graphs]
    largest, left = max(sizes), 0
    if min(sizes) == 1 < largest:
        left = min(DECODED, count // 2, count % largest or largest)
    chunked = count - left
    return [min(largest, chunked - at) for at in range(0, chunked, largest)] + [1] * left


def feed(session: DecodeSession, ids: Sequence[int], tick: Any = None, sizes: Sequence[int] = ()) -> np.ndarray:
    """Feed a text from position 0 on, `sizes` tokens a step, by default a chunk at a time so that progress shows.

    Returns logits [tokens, vocab].
    """
    session.reset()
    largest = max(graph.n for graph in session.spec.graphs)
    logits = []
    for size in sizes or [largest] * -(-len(ids) // largest):
        at = session.position
        logits.append(session.step(ids[at : at + size]))
        if tick:
            tick(len(logits[-1]))
    return np.concatenate(logits)


def teacher_forced(session: DecodeSession, truth: Truth, threshold: float | None = None, tick: Any = None) -> Report:
    """Feed the reference's text and compare every position's logits, then every cache entry."""
    report = start_report(session, truth.source, threshold)
    compare(report, session, truth, feed(session, truth.ids, tick, steps(session.spec, len(truth.ids))))
    return report


def stream(
    session: DecodeSession, prompt: Sequence[int], limit: int, eos: Sequence[int], tick: Any = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Answer greedily: yields each id (an eos included) with the logits [fed, vocab] of what was fed for it.

    The prompt is fed chunk by chunk; ends at an eos, after `limit` ids, or with the context.
    """
    logits = feed(session, prompt, tick)
    for count in range(1, limit + 1):
        token = int(logits[-1].argmax())
        yield token, logits
        if token in eos or count == limit or session.position >= session.spec.context:
            return
        logits = session.step([token])
        if tick:
            tick(1)


def generate(session: DecodeSession, prompt: Sequence[int], limit: int, eos: Sequence[int], tick: Any = None,
             ) -> tuple[list[int], np.ndarray]:  # fmt: skip
    """The whole greedy answer: its ids (an eos included) and logits [prompt + answer - 1, vocab] of all it was fed."""
    ids, logits = zip(*stream(session, prompt, limit, eos, tick), strict=True)
    return list(ids), np.concatenate(logits)


def answer_parity(session: DecodeSession, truth: Truth, prompt: int, eos: Sequence[int],
                  threshold: float | None = None, tick: Any = None) -> Report:  # fmt: skip
    """Let the session answer a prompt by itself and compare it with the reference's answer.

    truth.ids is the prompt (its first `prompt` ids) and the reference's greedy answer; truth.logits covers all but
    the last. Positions are compared as far as both were fed the same ids; the caches when that is all of them.
    """
    report = start_report(session, truth.source, threshold)
    want = truth.ids[prompt:]
    have, logits = generate(session, truth.ids[:prompt], len(want), eos, tick)
    same = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
    shared = prompt + same
    fed = min(len(logits), len(truth.logits), shared)
    whole = Truth(truth.source, truth.ids, truth.logits[:fed], truth.caches if want == have else [])
    compare(report, session, whole, logits[:fed])
    verdict: Verdict = "equal" if want == have else "different"
    # The reference's own near tie decides otherwise: reported, but no fault of the engine.
    if verdict == "different" and report.positions[-1].top1 == "ambiguous":
        verdict = "ambiguous"
    report.answer = {"reference_ids": want, "ids": have, "prompt_tokens": prompt, "verdict": verdict}
    return report

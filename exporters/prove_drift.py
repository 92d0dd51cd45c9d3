"""A long generation, engine against reference: fed the reference's own text, and running free."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from exporters.prove import Reference, as_stored, proof_ids
from ringstep import console
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.files import write_json
from ringstep.parity.drift import FALL_DB, FEWEST_TOKENS, SLOPE_DB, Trend, trend
from ringstep.parity.golden import Golden
from ringstep.parity.metrics import Verdict, agreement
from ringstep.parity.report import Report, Truth, generate, start_report
from ringstep.parity.runs import compare_runs, record
from ringstep.session import DecodeSession, is_simulated

FILE = "drift.json"
TOKENS, SIMULATED_TOKENS, PROMPT_TOKENS = 300, 96, 16


def drift_tokens(spec: StepSpec, engine: str, prompt: int, tokens: int | None) -> int:
    """How many tokens to generate after a prompt: what was asked for, as far as the context goes."""
    wanted = tokens or (SIMULATED_TOKENS if is_simulated(spec, engine) else TOKENS)
    room = spec.context - prompt + 1  # the last token is not fed
    if room < FEWEST_TOKENS:
        raise RingstepError(f"--drift: a slope takes {FEWEST_TOKENS} tokens after a prompt of {prompt}, the context of "
                            f"{spec.context} has room for {room}: export with a larger --context")  # fmt: skip
    if wanted > room:
        console.warn(f"the context of {spec.context} has room for {room} tokens of {wanted}; a drift shows later")
    return min(wanted, room)


def prove_drift(folder: Path, reference: Reference | Golden, engine: str, tokens: int | None = None) -> dict[str, Any]:
    """Generate and compare; returns what drift.json holds. A golden's own text is all there is to compare with."""
    spec = StepSpec.load(folder)
    truth, prompt = original(folder, spec, reference, engine, tokens)
    copied = len(spec.prefix.ids) if spec.prefix else 0
    fed = truth.ids[: len(truth.logits)]
    label = "simulated: " if is_simulated(spec, engine) else ""
    with DecodeSession.open(folder, engine) as session:
        with console.progress(f"{label}{len(fed)} tokens of the original's text on {engine}", len(fed)) as tick:
            # One at a time, as a generation is: a chunk may be kinder to a ring.
            run = record(session, fed, engine, tick, each=1)
        forced = compare_runs(start_report(session, truth.source, None), as_stored(truth, folder), run, copied)
        with console.progress(f"{label}{len(truth.ids) - prompt} tokens of {engine}'s own", len(fed)) as tick:
            have, logits = generate(session, truth.ids[:prompt], len(truth.ids) - prompt, (), tick)
        free = start_report(session, truth.source, None)
    ids = [*truth.ids[:prompt], *have]
    own = None
    if not isinstance(reference, Golden):
        with console.progress("the original on that text"):
            own = reference.truth(ids[:-1])
        compare_runs(free, Truth(own.source, own.ids, own.logits, []), Truth(engine, ids, logits, []), copied)
    return judged(forced, free if own else None) | {"free_running": answer(truth, prompt, have, run.logits) | (
        curve(free) if own else {})}  # fmt: skip


def original(folder: Path, spec: StepSpec, reference: Reference | Golden, engine: str, tokens: int | None,
             ) -> tuple[Truth, int]:  # fmt: skip
    """The reference's generation and the length of its prompt."""
    if isinstance(reference, Golden):
        if len(reference.fed) < FEWEST_TOKENS:
            raise RingstepError(f"--drift: a slope takes {FEWEST_TOKENS} tokens, the golden has {len(reference.fed)} "
                                "that fit; make it with --answer 300, and the context longer")  # fmt: skip
        return reference.truth, reference.prompt
    prompt = proof_ids(spec, folder, min(PROMPT_TOKENS, spec.context))
    count = drift_tokens(spec, engine, len(prompt), tokens)
    with console.progress(f"{count} tokens of the original"):
        return reference.answer(prompt, count, ()), len(prompt)


def answer(truth: Truth, prompt: int, have: list[int], logits: Any) -> dict[str, Any]:
    """How far the engine's own generation is the reference's; where they part, whether a near tie did it."""
    want = truth.ids[prompt:]
    same = next((i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b), len(want))
    verdict: Verdict = "equal"
    if same < len(want):
        verdict = "different"
        if agreement(truth.logits[prompt - 1 + same], logits[prompt - 1 + same]) == "ambiguous":
            verdict = "ambiguous"
    return {"verdict": verdict, "same": same, "tokens": len(want)}


def curve(report: Report) -> dict[str, list[Any]]:
    """SNR of the logits by position."""
    return {"position": [p.position for p in report.positions], "snr_db": [p.snr_db for p in report.positions]}


def judged(forced: Report, free: Report | None) -> dict[str, Any]:
    """The verdict on both curves: a slope or a fall of either fails."""
    trends: dict[str, Trend] = {}
    for name, report in (("teacher_forced", forced), ("free_running", free)):
        if report is not None:
            trends[name] = trend([p.position for p in report.positions], [p.snr_db for p in report.positions])
    failures = [f"{name.replace('_', ' ')}: {reason}" for name, t in trends.items() for reason in t.reasons]
    worst = min(trends.values(), key=lambda t: t.slope.db_per_100)
    return {
        "engine": forced.engine, "simulated": forced.simulated, "reference": forced.reference,
        "tokens": len(forced.positions), "teacher_forced": curve(forced), "summary": forced.summary(),
        "trends": {name: dataclasses.asdict(t) for name, t in trends.items()},
        "slope_db_per_100": worst.slope.db_per_100, "limits": {"slope_db_per_100": -SLOPE_DB, "fall_db": FALL_DB},
        "passed": not failures, "failures": failures,
    }  # fmt: skip


def save(body: dict[str, Any], folder: Path) -> None:
    """Write drift.json into the artifact."""
    write_json(folder / FILE, body)

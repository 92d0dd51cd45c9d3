"""All stages of an artifact side by side: each against the reference, and against the stage before it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporters.artifact import Artifact
from exporters.opening import NAMES, ORIGINAL, STAGES, Stage
from exporters.prove import Reference, as_stored, proof_ids, proof_tokens
from ringstep import console
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.files import write_json
from ringstep.parity.golden import Golden
from ringstep.parity.report import Report, Truth, threshold_db
from ringstep.parity.runs import compare_runs, greedy, record

FILE = "parity_stages.json"
PROMPT_TOKENS, GREEDY_TOKENS = 32, 16


@dataclass(frozen=True)
class Script:
    """What every stage is fed: the reference's greedy answer lies in ids[start : start + count]."""

    ids: list[int]
    start: int
    count: int


@dataclass(frozen=True)
class Ran:
    """A stage that was run."""

    name: str
    engine: str
    simulated: bool
    spec: StepSpec
    truth: Truth
    copied: int = 0
    """Leading positions that a sink prefix gave."""


def script(reference: Reference, text: Sequence[int]) -> Script:
    """A text of the same length with the reference's greedy answer early in it, where a short run still meets it."""
    prompt = max(1, min(PROMPT_TOKENS, len(text) // 2))
    limit = min(GREEDY_TOKENS, len(text) - prompt)
    if limit < 1:
        return Script(list(text), 0, 0)
    answered = list(reference.answer(text[:prompt], limit, ()).ids)[: prompt + limit]
    return Script([*answered, *text[prompt : prompt + len(text) - len(answered)]], prompt, len(answered) - prompt)


def chosen(artifact: Artifact, against: str, engine: str | None) -> tuple[list[Stage], dict[str, str]]:
    """The stages to run beside the original, the one it is all held against among them; and why others are not run."""
    after = STAGES if against == ORIGINAL else STAGES[NAMES.index(against) - 1 :]
    found, absent = [], {}
    for stage in after:
        left_out = engine == "ort" and stage.engine not in ("torch", "ort")
        reason = "left out by --engine ort" if left_out else stage.lacking(artifact)
        if reason:
            absent[stage.name] = reason
        else:
            found.append(stage)
    wanted = next((stage.name for stage in STAGES if stage.engine == engine and engine != "ort"), None)
    if wanted in absent:
        raise RingstepError(f"--engine {engine}: {artifact.folder} has no stage {wanted}: {absent[wanted]}")
    if against in absent:
        raise RingstepError(f"--against {against}: {artifact.folder} has no such stage: {absent[against]}")
    return found, absent


def run_stage(artifact: Artifact, stage: Stage, ids: Sequence[int]) -> Ran:
    """Open a stage, feed it as much of the text as its engine's pace allows, and close it."""
    with console.progress(f"opening {stage.name}"):
        session = stage.open(artifact)
    with session:
        simulated = stage.simulated(artifact)
        count = min(len(ids), proof_tokens(artifact.spec, stage.engine)) if simulated else len(ids)
        label = "simulated: " if simulated else ""
        with console.progress(f"{label}{count} tokens on {stage.name}", count) as tick:
            truth = record(session, ids[:count], stage.name, tick)
        truth = truth if stage.stored else as_stored(truth, artifact.folder)
        copied = len(session.spec.prefix.ids) if session.spec.prefix else 0
        return Ran(stage.name, stage.engine, simulated, session.spec, truth, copied)


def prove_stages(artifact: Artifact, reference: Reference | Golden, *, against: str = ORIGINAL,
                 engine: str | None = None, tokens: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Run the stages from `against` on over one text; returns what parity_stages.json holds."""
    stages, absent = chosen(artifact, against, engine)
    if not [stage for stage in stages if stage.name != against]:
        raise RingstepError(f"--against {against}: {artifact.folder} has no stage after it to compare")
    planned, truth = told(reference) if isinstance(reference, Golden) else asked(artifact, reference, tokens)
    first = as_stored(truth, artifact.folder)
    ran = [Ran(ORIGINAL, "reference", False, artifact.spec, first)] if against == ORIGINAL else []
    ran += [run_stage(artifact, stage, planned.ids) for stage in stages]
    return compared(ran, truth.source, planned) | {"absent": absent}


def asked(artifact: Artifact, reference: Reference, tokens: int | None) -> tuple[Script, Truth]:
    """What to feed, and what a reference at hand says of it."""
    text = proof_ids(artifact.spec, artifact.folder, tokens or proof_tokens(artifact.spec, "ort"))
    with console.progress("the original's answer and logits"):
        planned = script(reference, text)
        return planned, reference.truth(planned.ids)


def told(golden: Golden) -> tuple[Script, Truth]:
    """The same of a golden."""
    return Script(golden.fed, golden.prompt, len(golden.truth.ids) - golden.prompt), golden.truth


def compared(ran: Sequence[Ran], original: str, planned: Script) -> dict[str, Any]:
    """Every run after the first held against the first and against the one before it."""
    base = ran[0]
    stages = []
    for before, own in itertools.pairwise(ran):
        report = compare(own, base, original if base.name == ORIGINAL else base.name)
        last = compare(own, before, before.name)
        answer = greedy(base.truth, own.truth, planned.start, planned.count)
        body = dataclasses.asdict(report)
        stages.append({
            "stage": own.name, "engine": own.engine, "simulated": own.simulated, "summary": report.summary(),
            "snr_db": [p.snr_db for p in report.positions], "positions": body["positions"], "caches": body["caches"],
            "greedy": answer,
            "before": {"stage": before.name, "summary": last.summary(),
                       "snr_db": [p.snr_db for p in last.positions], "caches": dataclasses.asdict(last)["caches"]},
        })  # fmt: skip
    return {"reference": original if base.name == ORIGINAL else base.name, "tokens": len(planned.ids),
            "against": base.name, "stages": stages, "passed": all(s["summary"]["passed"] for s in stages)}  # fmt: skip


def compare(own: Ran, other: Ran, source: str) -> Report:
    """One run against another."""
    spec = own.spec
    report = Report(own.engine, source, spec.dtype, spec.activations, own.simulated, threshold_db(spec, own.engine),
                    spec.scheme)  # fmt: skip
    return compare_runs(report, other.truth, own.truth, max(own.copied, other.copied))


def save(body: dict[str, Any], folder: Path) -> None:
    """Write parity_stages.json into the artifact."""
    write_json(folder / FILE, body)

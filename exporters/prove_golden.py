"""One engine held against a golden: no transformers, no checkpoint, no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.prove import as_stored, proof_tokens
from ringstep import console
from ringstep.errors import RingstepError
from ringstep.parity.golden import Golden
from ringstep.parity.report import Truth, start_report
from ringstep.parity.runs import compare_runs, greedy, record
from ringstep.session import DecodeSession, is_simulated
from ringstep.text import Text

if TYPE_CHECKING:
    from exporters.artifact import Artifact


def prove_golden(artifact: Artifact, golden: Golden, engine: str, tokens: int | None,
                 threshold_db: float | None) -> dict[str, Any]:  # fmt: skip
    """A plain report as `prove` gives it; a simulator reads as much of the golden as its pace allows."""
    spec = artifact.spec
    count = len(golden.fed)
    if is_simulated(spec, engine) and tokens is None:
        count = min(count, proof_tokens(spec, engine))
    truth = as_stored(golden.truth, artifact.folder)
    with DecodeSession.open(artifact.folder, engine) as session:
        label = "simulated: " if is_simulated(spec, engine) else ""
        with console.progress(f"{label}{count} tokens on {engine}", count) as tick:
            run = record(session, golden.fed[:count], engine, tick)
        report = start_report(session, truth.source, threshold_db)
    compare_runs(report, truth, run, len(spec.prefix.ids) if spec.prefix else 0)
    report.answer = answer(golden, run, artifact.folder)
    body = dataclasses.asdict(report)
    return {"summary": report.summary(), "positions": body["positions"], "caches": body["caches"],
            "answer": report.answer, "golden": golden.facts}  # fmt: skip


def answer(golden: Golden, run: Truth, folder: Path) -> dict[str, Any] | None:
    """How far the engine's own greedy answer would be the golden's, to the first token that differs."""
    want = golden.truth.ids[golden.prompt :]
    found = greedy(golden.truth, run, golden.prompt, len(want))
    if found is None:
        return None
    same = found["same"]
    ids = want[:same]
    if same < len(want):
        ids = [*ids, int(run.logits[golden.prompt - 1 + same].argmax())]
    try:
        text = Text(folder)
        said = {"prompt": text.decode(golden.truth.ids[: golden.prompt])[:200], "reference_text": text.decode(want),
                "text": text.decode(ids)}  # fmt: skip
    except RingstepError:
        said = {"prompt": "", "reference_text": str(want), "text": str(ids)}
    return {"reference_ids": want, "ids": ids, "prompt_tokens": golden.prompt, "verdict": found["verdict"], **said}

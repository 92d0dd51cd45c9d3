"""The table of planted faults: ten tiny models in three precisions, clean and with each fault, through the window gate.

    python benchmarks/window_faults.py [--json FILE] [--only NAME ...]

Floats are held against the original, quantised artifacts against their own rounded weights; all on ONNX Runtime.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

# Without this folder, whose sanitize.py is not the package.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/parity"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import planted_faults as planted

from exporters.tiny import CHUNK, CONTEXT, MODELS, tiny_ids, write_tiny
from ringstep import console
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError

PRECISIONS = ("fp32", "w8a16", "w4a16")
MODES = ("fast", "full")
CLEAN = "nothing planted"
Found = dict[str, dict[str, Any]]


def export(model: Path, out: Path, precision: str) -> None:
    """One artifact for ONNX Runtime."""
    from exporters.line import Job, Line

    with contextlib.redirect_stderr(io.StringIO()):
        Line(Job(model=str(model), out=out, format="onnx", precision=precision, context=CONTEXT, chunk=CHUNK,
                 calibration_tokens=320, parity=False)).run()  # fmt: skip


def tried(out: Path, truth: Any, mode: Any, window: int | None, plant: Callable[[Any], None] | None = None) -> Any:
    """(ways to feed, those that failed, dB of the worst), or "refused" where the contract is."""
    from ringstep.parity.windows import feedings, judge
    from ringstep.session import DecodeSession

    try:
        with DecodeSession.open(out, threads=1) as session, pytest.MonkeyPatch.context() as patch:
            if plant:
                plant(patch)
            judged = judge(session, truth, feedings(session.spec, mode, [window] if window else []))
    except RingstepError as error:
        return {"refused": str(error)}
    worst = min((min(j.logits_db, j.cache_db) for j in judged), default=None)
    return {"feedings": len(judged), "failed": sum(bool(j.failures) for j in judged), "worst_db": worst}


def of_model(name: str, home: str) -> list[dict[str, Any]]:
    """Every row of one model."""
    import torch

    from exporters.own_weights import OwnWeights
    from exporters.prove import open_reference

    torch.set_num_threads(1)
    console.settings.quiet = True
    folder = Path(home) / name
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    model, window, rows = write_tiny(folder / "model", name), MODELS[name].get("sliding_window"), []
    checkpoint = open_checkpoint(str(model))
    original = open_reference(checkpoint)

    def truth_of(out: Path, precision: str) -> Any:
        ids = tiny_ids(StepSpec.load(out).vocab, CONTEXT)
        return original.truth(ids) if precision == "fp32" else OwnWeights(out, checkpoint).truth(ids)

    def add(precision: str, fault: str, find: Callable[[str], Any]) -> None:
        fast = find("fast")
        # The full part begins with all that the fast part tries.
        full = fast if fault != CLEAN and caught(fast) else find("full")
        rows.append({"model": name, "precision": precision, "fault": fault, "fast": fast, "full": full})

    for precision in PRECISIONS:
        out = folder / precision
        export(model, out, precision)
        truth = truth_of(out, precision)
        add(precision, CLEAN, lambda mode, out=out, truth=truth: tried(out, truth, mode, window))
        if window is None:
            continue
        for fault, plant in planted.HOST.items():
            add(precision, fault, lambda mode, out=out, t=truth, p=plant: tried(out, t, mode, window, p))
        files = {"ring of length W": planted.ring_of_length_w}
        if precision != "fp32":
            files |= {"KV encodings differ, in step.json": planted.encodings_differ,
                      "KV encodings differ, in the graphs": planted.graph_encodings_differ}  # fmt: skip
        for fault, change in files.items():
            altered = Path(shutil.copytree(out, folder / "altered"))
            change(altered)
            add(precision, fault, lambda mode, t=truth, a=altered: tried(a, t, mode, window))
            shutil.rmtree(altered)
        for fault, plant in planted.RECIPE.items():
            if not applies(fault, name):
                continue
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                export(model, folder / "faulty", precision)
            # A quantised one is held against its own weights, which is a clean recipe's result with these.
            truth = truth_of(folder / "faulty", precision)
            add(precision, fault, lambda mode, t=truth: tried(folder / "faulty", t, mode, window))
            shutil.rmtree(folder / "faulty")
    return rows


def applies(fault: str, name: str) -> bool:
    """Whether a model has what a recipe's fault is about."""
    gated = MODELS[name].get("headwise_attn_output_gate", False)
    return gated if fault.startswith("gate") else MODELS[name]["num_key_value_heads"] > 1


def caught(found: dict[str, Any]) -> bool:
    """Whether a mode saw something."""
    return "refused" in found or found["failed"] > 0


def show(rows: list[dict[str, Any]]) -> None:
    """A line a fault: caught of tried, by precision and mode."""
    cells = []
    for fault in dict.fromkeys(row["fault"] for row in rows):
        own = [row for row in rows if row["fault"] == fault]
        cell = []
        for precision in PRECISIONS:
            some = [row for row in own if row["precision"] == precision]
            counts = [sum(caught(row[mode]) for row in some) for mode in MODES]
            cell.append(f"{counts[0]}, {counts[1]} of {len(some)}" if some else "")
        refused = all("refused" in row["fast"] for row in own)
        cells.append((fault, *cell, "" if fault == CLEAN else "refused" if refused else "reported"))
    console.table("found by the fast part, by all, of artifacts", ["planted", *PRECISIONS, ""], cells)


def main() -> int:
    """Measure, print, and fail when a fault was missed or a clean artifact reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    args, start, rows = parser.parse_args(), time.perf_counter(), []
    with tempfile.TemporaryDirectory() as home, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for own in pool.map(of_model, args.only, [home] * len(args.only)):
            rows += own
            print(f"{own[0]['model']}: {len(own)} rows", file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    wrong = [row for row in rows for mode in MODES if caught(row[mode]) == (row["fault"] == CLEAN)]
    for row in wrong:
        console.line(f"WRONG: {row}")
    console.line(f"{len(rows)} rows, {len(wrong)} wrong, {console.human_seconds(time.perf_counter() - start)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

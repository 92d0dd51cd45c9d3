"""The gate: tiny models of every recipe through precisions and engines, held to thresholds and to the baseline.

Random models are chaotic: rounding their weights leaves 5 to 30 dB, whatever the code does. So a quantised artifact is
measured twice: `weights`, its own rounded weights in floats against the original, which is what rounding costs; and
`logits` and `caches`, the artifact against those weights, which is what graphs, activations, caches, windows and the
chip's arithmetic add. Floats are measured against the original itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from exporters.tiny import CHUNK, CONTEXT, GATED, MODELS, tiny_ids, write_tiny
from ringstep.errors import RingstepError, did_you_mean

BASELINE = Path(__file__).resolve().parent.parent / "artifacts/baselines/parity.json"
FORMAT = "ringstep.parity-baseline"
DEVICE = "galaxy-s25"
SCHEMES = ("w8a16", "w4a16")
DROP_DB = 1.0
CEILING_DB = 100.0
"""Above it float32 sums in another order, as another CPU has them, change a figure by more than DROP_DB."""
SIMULATED_TOKENS = 24
MEASURES = ("logits", "caches", "windows", "weights")


@dataclass
class Row:
    """One model in one precision on one engine; measures in dB, see above. `windows`: the worst of the window gate."""

    model: str
    precision: str
    engine: str
    simulated: bool
    db: dict[str, float] = field(default_factory=dict)
    limit_db: float = 0.0
    seconds: float = 0.0
    """Of feeding, without the export; on the simulator no time of a phone."""
    failures: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its name in the baseline."""
        return f"{self.model} / {self.precision} / {self.engine}"


def run_gate(models: Sequence[str] = GATED, workers: int = 2, simulate: bool | None = None,
             tick: Callable[[float], None] = lambda amount: None) -> list[Row]:  # fmt: skip
    """Export and measure each model; `simulate` None: where the simulator is installed."""
    for name in models:
        if name not in MODELS:
            raise RingstepError(f"--only {name!r}: no tiny model{did_you_mean(name, MODELS)}; {', '.join(MODELS)}")
    if simulate is None:
        simulate = has_simulator()
    with tempfile.TemporaryDirectory(prefix="ringstep-gate-") as folder:
        # Tensors this small only lose by a second thread; the models run beside each other instead.
        pool = ProcessPoolExecutor(min(workers, len(models)), get_context("spawn"), _start, (folder,))
        with pool:
            jobs = {pool.submit(measure, name, Path(folder), simulate): name for name in models}
            found = {}
            for job in as_completed(jobs):
                found[jobs[job]] = job.result()
                tick(1)
    return [row for name in models for row in found[name]]


def has_simulator() -> bool:
    """Whether the HTP simulator can run here."""
    from ringstep import qnn

    try:
        qnn.require()
    except RingstepError:
        return False
    return True


def _start(folder: str) -> None:
    """In each worker: one thread, nothing of the user's cache."""
    os.environ |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{folder}/cache"}
    import torch

    from ringstep import console

    torch.set_num_threads(1)
    console.settings.quiet = True


def measure(name: str, folder: Path, simulate: bool) -> list[Row]:
    """All rows of one model. What ringstep refuses becomes a row that fails."""
    home = folder / name
    model, rows = write_tiny(home / "model", name), []
    wanted = [("fp32", "onnx", "fp32"), *[("fp16", "qnn", "fp16")] * simulate]
    # One folder for all schemes: they share what was traced.
    wanted += [(scheme, "qnn" if simulate else "onnx", "quantised") for scheme in SCHEMES]
    for precision, form, out in wanted:
        own = ["ort"] * (precision != "fp16") + ["qnn-sim"] * (form == "qnn")
        some = [Row(name, precision, engine, engine == "qnn-sim") for engine in own]
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # random ids are no text to calibrate with, as it warns
                export(model, home / out, precision, form)
            texts, truths, weights = references(model, home / out, bool(precision in SCHEMES))
            for row in some:
                measure_row(row, home / out, texts, truths, weights)
        except RingstepError as error:
            for row in some:
                row.failures.append(str(error))
        rows += some
    return rows


def export(model: Path, out: Path, precision: str, form: Any) -> None:
    """Export into a folder, which may hold another precision of the same model."""
    from exporters.line import Job, Line

    Line(Job(model=str(model), out=out, format=form, device=DEVICE if form == "qnn" else None, precision=precision,
             context=CONTEXT, chunk=CHUNK, calibration_tokens=640, parity=False)).run()  # fmt: skip


def references(model: Path, out: Path, rounded: bool) -> tuple[list[list[int]], list[Any], float | None]:
    """Two texts of the whole context, what is expected of an artifact, and what rounding weights alone costs in dB."""
    from exporters.own_weights import OwnWeights
    from exporters.prove import open_reference
    from ringstep.checkpoint import open_checkpoint
    from ringstep.contract import StepSpec
    from ringstep.parity.metrics import snr_db

    checkpoint, spec = open_checkpoint(str(model)), StepSpec.load(out)
    first = spec.prefix.ids if spec.prefix else ()
    texts = [[*first, *tiny_ids(spec.vocab, CONTEXT, seed)][:CONTEXT] for seed in (0, 1)]
    original = open_reference(checkpoint)
    truths = [original.truth(ids) for ids in texts]
    if not rounded:
        return texts, truths, None
    own = OwnWeights(out, checkpoint)
    expected = [own.truth(ids) for ids in texts]
    rows = lambda some: np.concatenate([t.logits[len(first) :] for t in some])
    return texts, expected, snr_db(rows(truths), rows(expected))


def measure_row(row: Row, out: Path, texts: list[list[int]], truths: list[Any], weights: float | None) -> None:
    """Fill a row: one text in chunks, one token by token, then the places of the window gate."""
    from ringstep.parity.metrics import snr_db
    from ringstep.parity.report import compare_cache
    from ringstep.parity.thresholds import thresholds_for
    from ringstep.parity.windows import feedings, judge
    from ringstep.session import DecodeSession

    start = time.perf_counter()
    options: dict[str, Any] = {} if row.simulated else {"threads": 1}
    with DecodeSession.open(out, row.engine, **options) as session:
        spec, have, want, caches = session.spec, [], [], []
        skip = len(spec.prefix.ids) if spec.prefix else 0
        for ids, truth, each in zip(texts, truths, (CHUNK, 1), strict=True):
            session.reset()
            count = SIMULATED_TOKENS if row.simulated else len(ids)
            fed = [session.step(ids[at : min(at + each, count)]) for at in range(0, count, each)]
            have.append(np.concatenate(fed)[skip:])
            want.append(truth.logits[skip:count])
            for layer in range(len(spec.caches)):
                found = compare_cache(session, layer, truth.caches[layer])
                caches += [found.key_db, found.value_db]
        row.db = {"logits": snr_db(np.concatenate(want), np.concatenate(have)), "caches": min(caches)}
        row.limit_db = thresholds_for(spec, row.engine).windows_db
        if tried := feedings(spec, "fast"):
            judged = judge(session, truths[0], tried)
            row.db["windows"] = min(min(j.logits_db, j.cache_db) for j in judged)
    if weights is not None:
        row.db["weights"] = weights
    row.seconds = time.perf_counter() - start
    for name in ("logits", "caches", "windows"):
        if name in row.db and not row.db[name] >= row.limit_db:
            row.failures.append(f"{name} {row.db[name]:.1f} dB, below {row.limit_db:.0f} dB")


Baseline = dict[str, dict[str, float]]
"""Row.key, measure."""


def load_baseline(path: Path = BASELINE) -> Baseline:
    """The committed figures; none where there is no file. Raises RingstepError for one that cannot be read."""
    from ringstep.files import read_text

    if not path.exists():
        return {}
    try:
        body = json.loads(read_text(path))
    except ValueError as error:
        raise RingstepError(f"{path}: cannot be read as JSON: {error}") from None
    rows = body.get("rows") if isinstance(body, dict) and body.get("format") == FORMAT else None
    if not isinstance(rows, dict):
        raise RingstepError(f"{path}: no baseline of parity; restore it from git or write it with --update-baseline")
    for key, measures in rows.items():
        sound = isinstance(measures, dict) and set(measures) <= set(MEASURES)
        if not sound or not all(type(db) in (int, float) and math.isfinite(db) for db in measures.values()):
            raise RingstepError(f"{path}: rows, {key}: expected dB by {', '.join(MEASURES)}")
    return rows


def against(rows: Sequence[Row], baseline: Baseline) -> None:
    """Add to each row's failures what it has lost against the baseline: more than DROP_DB of a measure."""
    for row in rows:
        before = baseline.get(row.key)
        if before is None:
            row.failures.append("not in the baseline; add it with ringstep parity --update-baseline")
            continue
        for name in ("logits", "weights"):  # sums over two texts; the others are the worst of many, and jump
            if name in before and name not in row.db and not row.failures:
                row.failures.append(f"{name}: in the baseline, but not measured")
            elif name in before and name in row.db and lost(before[name], row.db[name]) > DROP_DB:
                row.failures.append(f"{name} {row.db[name]:.1f} dB, {before[name]:.1f} dB in the baseline")


def lost(before: float, now: float) -> float:
    """How much of a measure is gone, in dB; what lies above CEILING_DB does not count."""
    return min(before, CEILING_DB) - min(now, CEILING_DB)


def differences(rows: Sequence[Row], baseline: Baseline) -> list[tuple[str, str, float | None, float | None]]:
    """(row, measure, before, now) wherever writing the rows would change the baseline by 0.05 dB or more."""
    found: list[tuple[str, str, float | None, float | None]] = []
    now = {row.key: row.db for row in rows}
    for key in dict.fromkeys([*baseline, *now]):
        for name in MEASURES:
            old, new = baseline.get(key, {}).get(name), now.get(key, {}).get(name)
            if old != new and (old is None or new is None or abs(old - new) >= 0.05):
                found.append((key, name, old, new))
    return found


def save_baseline(rows: Sequence[Row], kept: Baseline, path: Path = BASELINE) -> None:
    """Write the rows' figures, and of the old ones those in `kept`, atomically."""
    from ringstep.files import write_json
    from ringstep.stage import library_versions

    if not path.parent.is_dir():
        raise RingstepError(f"{path.parent}: not there; a baseline is written in a checkout of ringstep's sources")
    libraries = library_versions("torch", "onnx", "onnxruntime", "onnxruntime-qnn", "transformers")
    body = {"format": FORMAT, "versions": libraries,
            "rows": kept | {row.key: {name: round(db, 2) for name, db in row.db.items()} for row in rows}}  # fmt: skip
    write_json(path, body)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain values."""
    return [dataclasses.asdict(row) | {"passed": not row.failures} for row in rows]

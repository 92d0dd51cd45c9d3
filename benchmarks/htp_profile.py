"""One run of a compiled graph on the simulator, with QNN's profile of its operations; cycles there mean nothing."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np

from ringstep import child, qnn

TIMEOUT_SECONDS = 1800.0
Arrays = dict[str, np.ndarray]


def run(context: Path, feeds: Arrays) -> tuple[Arrays, int, int]:
    """The outputs of a *_ctx.onnx, the operations its profile lists, and how many of them take any cycles.

    Those that take none were merged into others or move no bytes. Raises RingstepError when the child fails.
    """
    qnn.require()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "profile.csv"
        name = f"{context.name} on the simulator"
        outputs: Arrays = child.run(
            name, _run, context, feeds, table, timeout_s=TIMEOUT_SECONDS, explain=qnn.explain
        ).value
        with open(table, newline="") as file:
            cycles = [int(row["Time"]) for row in csv.DictReader(file) if row["Message"] == "NODE"]
    return outputs, len(cycles), sum(count > 0 for count in cycles)


def _run(context: Path, feeds: Arrays, table: Path) -> Arrays:
    """Runs in the child."""
    import onnxruntime as ort
    import onnxruntime_qnn as plugin

    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    settings = {
        "backend_path": plugin.get_qnn_htp_path(),
        "profiling_level": "detailed",
        "profiling_file_path": str(table),
    }
    options.add_provider_for_devices(qnn.devices(), settings)
    session = ort.InferenceSession(str(context), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))

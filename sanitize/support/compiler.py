"""The real HTP compiler and simulator for many tiny models: one child process, started anew when a model ends it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from ringstep import child, qnn
from ringstep.devices import Chip
from ringstep.errors import RingstepError
from sanitize.support import cases

TIMEOUT_SECONDS = 60.0


class Compiler:
    """The compiler of one chip in a child process, started anew when a model took it down."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.worker: child.Worker | None = None

    def attempt(self, built: cases.Built, *, fp16: bool, outputs: bool = False) -> dict[str, Any]:
        """Compile and run a model: {"ops": {type: count}, "db": SNR or None}, or {"refused": why}.

        With `outputs` what it computed is there as "out".
        """
        if self.worker is None or self.worker.pipe.closed:
            self.close()
            self.worker = child.Worker(self.chip.name, explain=qnn.explain)
        try:
            work = (built.model.SerializeToString(), built.feeds, self.chip.soc_model, fp16, outputs)
            result: dict[str, Any] = self.worker.call(try_model, *work, timeout_s=TIMEOUT_SECONDS).value
            return result
        except RingstepError as error:
            why = str(error).removeprefix(f"{self.chip.name}: ").split("; log: ")[0]
            return {"refused": ("crash: " if self.worker.pipe.closed else "") + why}

    def close(self) -> None:
        """End the child process and remove its log."""
        if self.worker is not None:
            self.worker.close()
            self.worker.log.unlink(missing_ok=True)


def try_model(
    model: bytes, feeds: dict[str, np.ndarray], soc_model: int, fp16: bool, outputs: bool = False
) -> dict[str, Any]:
    """In the child: compile, run, compare with the CPU. Raises what ONNX Runtime raises on a refusal."""
    options = qnn.session_options(soc_model=soc_model, fp16=fp16)
    session = onnxruntime.InferenceSession(model, options)
    ops = qnn.assigned_ops(session)
    session.disable_fallback()
    try:
        got = session.run(None, feeds)
    except Exception as error:
        return {"ops": ops, "db": None, "run": child.one_line(str(error))}
    if outputs:
        return {"ops": ops, "db": None, "out": got}
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4
    try:
        want = onnxruntime.InferenceSession(model, quiet, providers=["CPUExecutionProvider"]).run(None, feeds)
    except Exception:
        return {"ops": ops, "db": None}
    return {"ops": ops, "db": min((snr(w, g) for w, g in zip(want, got, strict=True)), default=None)}


def snr(want: Any, got: Any) -> float:
    """Signal to noise in dB, at most 200; uint16 results count from the middle. -200 where a value is not finite."""
    a, b = (np.asarray(x, np.float64) - (cases.Q_ZERO if np.asarray(x).dtype == np.uint16 else 0) for x in (want, got))
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return -200.0
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    noise, signal = float(np.sum((a - b) ** 2)), float(np.sum(a**2))
    if noise == 0:
        return 200.0
    return round(float(np.clip(10 * np.log10(max(signal, 1e-30) / noise), -200, 200)), 1)

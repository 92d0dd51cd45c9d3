"""A .pte lowered for Qualcomm's NPU on the HTP simulator, in a child process. Its times mean nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringstep import child, qairt
from ringstep.contract import StepSpec
from ringstep.engines.base import Arrays
from ringstep.engines.executorch import ExecutorchEngine
from ringstep.errors import RingstepError

TIMEOUT_SECONDS = 1800.0


class ExecutorchQnnEngine:
    """ExecutorchEngine in a process that finds Qualcomm's libraries."""

    name = "executorch"

    def __init__(self, folder: Path, spec: StepSpec) -> None:
        """Raises RingstepError where ExecuTorch, the libraries or the .pte are missing."""
        ExecutorchEngine(folder, spec)  # what is missing is said here
        self.spec = spec
        what = f"{folder.name}: the .pte on the simulator"
        self.worker = child.Worker(what, explain=qairt.explain, env=qairt.environment(qairt.require()))
        try:
            self.worker.call(_open, folder.resolve(), spec, timeout_s=TIMEOUT_SECONDS)
        except BaseException:
            self.worker.close()
            raise

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        """Run the method of n tokens, filling `outputs`. Raises RingstepError."""
        plain = {name: np.asarray(array) for name, array in inputs.items()}
        try:
            made = self.worker.call(_run, n, plain, timeout_s=TIMEOUT_SECONDS).value
        except RingstepError as error:
            # The runtime says a number where the backend's log has the reason.
            cause = qairt.explain(child.read_tail(self.worker.log)) if self.worker.log.exists() else ""
            raise RingstepError(f"{error}: {cause}" if cause and cause not in str(error) else str(error)) from None
        for name, array in outputs.items():
            array[...] = made[name]

    def close(self) -> None:
        self.worker.close()


# What follows runs in the child.

_engine: ExecutorchEngine | None = None


def _open(folder: Path, spec: StepSpec) -> None:
    global _engine
    _engine = ExecutorchEngine(folder, spec)


def _run(n: int, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if _engine is None:
        raise RingstepError("no artifact is open")
    outputs = {t.name: np.empty(t.shape, t.dtype) for t in _engine.spec.graph(n).outputs}
    _engine.run(n, inputs, outputs)
    return outputs

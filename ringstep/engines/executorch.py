"""ExecuTorch's runtime on this machine: the methods `decode` and `prefill` of one .pte."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from ringstep.console import quiet_libraries
from ringstep.contract import PartSpec, StepSpec
from ringstep.engines.base import Arrays, Engine
from ringstep.errors import RingstepError

FORMAT = "executorch"
SIMULATED = "executorch-simulated"  # where x86 cannot run what is shipped: the same program, its weights not shared
DECODE, PREFILL = "decode", "prefill"


def require() -> None:
    """Raise RingstepError where ExecuTorch is not installed."""
    if importlib.util.find_spec("executorch") is None:
        raise RingstepError(
            "ExecuTorch is not installed: pip install 'ringstep[executorch]' (Linux on x86-64 or ARM, and macOS)"
        )


def method_name(n: int) -> str:
    """The method of a .pte that takes n tokens."""
    return DECODE if n == 1 else PREFILL


def open_engine(folder: Path, spec: StepSpec) -> Engine:
    """The engine of an artifact's .pte: in this process, or for the NPU in one that finds Qualcomm's libraries."""
    if spec.target.get("backend") == "qnn":
        from ringstep.engines.executorch_qnn import ExecutorchQnnEngine

        return ExecutorchQnnEngine(folder, spec)
    return ExecutorchEngine(folder, spec)


class ExecutorchEngine:
    """The .pte of an artifact on the CPU, with whatever backend it was lowered to."""

    name = "executorch"

    def __init__(self, folder: Path, spec: StepSpec) -> None:
        """The file is opened with the first run. Raises RingstepError where ExecuTorch or the .pte is missing."""
        require()
        if not all(FORMAT in graph.parts for graph in spec.graphs):
            raise RingstepError("step.json: the graphs have no .pte; export it with --format executorch")
        self.folder, self.spec = folder, spec
        self.programs: dict[Path, Any] = {}
        self.methods: dict[int, Any] = {}

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        import torch

        formats = self.spec.graph(n).parts
        (part,) = formats.get(SIMULATED) or formats[FORMAT]
        if n not in self.methods:
            self.methods[n] = self.load(n, part)
        try:
            results = self.methods[n].execute([torch.from_numpy(inputs[name]) for name in part.inputs])
        except RuntimeError as error:
            raise RingstepError(f"{self.folder / part.file}: method {method_name(n)}: {first_line(error)}") from None
        for name, result in zip(part.outputs, results, strict=True):
            np.copyto(outputs[name], result.numpy(), casting="no")

    def load(self, n: int, part: PartSpec) -> Any:
        """The method of n tokens, ready to run."""
        path, name = self.folder / part.file, method_name(n)
        if path not in self.programs:
            self.programs[path] = load_program(path)
        program = self.programs[path]
        if name not in program.method_names:
            raise RingstepError(f"{path}: has no method {name!r}, only {', '.join(sorted(program.method_names))}")
        try:
            method = program.load_method(name)
        except RuntimeError as error:
            raise RingstepError(f"{path}: method {name}: {first_line(error)}") from None
        have = method.metadata.num_inputs(), method.metadata.num_outputs()
        if have != (len(part.inputs), len(part.outputs)):
            raise RingstepError(f"{path}: method {name} has {have[0]} inputs and {have[1]} outputs, step.json has "
                                f"{len(part.inputs)} and {len(part.outputs)}; export again")  # fmt: skip
        return method

    def close(self) -> None:
        self.methods.clear()
        self.programs.clear()


def load_program(path: Path) -> Any:
    """Open a .pte. Raises RingstepError for a file that is missing or that the runtime refuses."""
    with quiet_libraries():
        from executorch.runtime import Runtime, Verification

    from ringstep.pte import HEAD_BYTES, header

    if not path.is_file():
        raise RingstepError(f"{path}: no such file")
    with path.open("rb") as stream:
        header(path, stream.read(HEAD_BYTES), path.stat().st_size)  # the runtime prints why, and raises a number
    try:
        return Runtime.get().load_program(path, verification=Verification.InternalConsistency)
    except RuntimeError as error:
        raise RingstepError(f"{path}: ExecuTorch's runtime refuses it: {first_line(error)}; export again") from None


def first_line(error: Exception) -> str:
    """What the runtime says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]

"""Qualcomm's HTP simulator: the NPU's own arithmetic on x86-64, in a child process. Its times mean nothing.

The simulator loads a context that was compiled for another chip without a word, so a result stands for the
chip that the context was compiled for, and for no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ringstep import child, qnn
from ringstep.contract import PartSpec, StepSpec
from ringstep.devices import find_device
from ringstep.engines.base import Arrays
from ringstep.errors import RingstepError, did_you_mean

Tensors = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]

TIMEOUT_SECONDS = 1800.0
NUMPY_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}


class QnnGraph:
    """One graph on the simulator; made by open_graph, ended by close() or a with block."""

    def __init__(self, worker: child.Worker, inputs: Tensors, outputs: Tensors, timeout_s: float) -> None:
        self.worker, self.timeout_s = worker, timeout_s
        self.inputs, self.outputs = inputs, outputs
        """Name to shape and dtype."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the graph: every output by name.

        Raises RingstepError for a missing or unknown input, a wrong shape or dtype, and a child that crashed,
        hung or outgrew its memory.
        """
        for name in feeds:
            if name not in self.inputs:
                raise RingstepError(f"{self.worker.what}: no input {name!r}{did_you_mean(name, self.inputs)}")
        for name, (shape, dtype) in self.inputs.items():
            if name not in feeds:
                raise RingstepError(f"{self.worker.what}: input {name} is missing")
            have = feeds[name]
            if have.shape != shape or have.dtype != dtype:
                got, want = f"{list(have.shape)} {have.dtype}", f"{list(shape)} {dtype}"
                raise RingstepError(f"{self.worker.what}: input {name} is {got}, want {want}")
        # np.asarray: a memory map would travel with its class.
        plain = {name: np.asarray(array) for name, array in feeds.items()}
        outputs: dict[str, np.ndarray] = self.worker.call(_run, plain, timeout_s=self.timeout_s).value
        return outputs

    def close(self) -> None:
        """End the child process."""
        self.worker.close()

    def __enter__(self) -> QnnGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_graph(
    model: Path,
    *,
    soc_model: int | None = None,
    fp16: bool,
    timeout_s: float = TIMEOUT_SECONDS,
    memory_bytes: int | None = None,
) -> QnnGraph:
    """Open a compiled *_ctx.onnx, or an ONNX file that is then compiled in memory (it needs `soc_model`).

    `fp16`: float32 tensors are computed in float16. `timeout_s` holds for opening and for each run;
    `memory_bytes` bounds the child's memory, None: what is free now. Raises RingstepError when the plugin or
    the file is missing, the NPU refuses the graph, or the child fails.
    """
    qnn.require()
    if not model.is_file():
        raise RingstepError(f"{model}: no such file")
    if soc_model is None and not model.name.endswith("_ctx.onnx"):
        raise RingstepError(f"{model}: soc_model is needed to compile it for the simulator")
    worker = child.Worker(f"{model.name} on the simulator", memory_bytes=memory_bytes, explain=qnn.explain)
    try:
        inputs, outputs = worker.call(_open, model, soc_model, fp16, timeout_s=timeout_s).value
    except BaseException:
        worker.close()
        raise
    return QnnGraph(worker, inputs, outputs, timeout_s)


class QnnSimEngine:
    """The graphs of an artifact on the simulator: compiled contexts if it has any, else ONNX files."""

    name = "qnn-sim"

    def __init__(
        self,
        folder: Path,
        spec: StepSpec,
        *,
        chip: str | None = None,
        fp16: bool = True,
        timeout_s: float = TIMEOUT_SECONDS,
        memory_bytes: int | None = None,
    ) -> None:
        """`chip` is what ONNX files are compiled for, None: the artifact's own; contexts carry theirs.

        The rest: see open_graph.
        """
        self.folder, self.spec = folder, spec
        name = chip or spec.target.get("chip")
        self.soc_model = find_device(name).chip.soc_model if name else None
        self.open = lambda part: open_graph(
            folder / part.file, soc_model=self.soc_model, fp16=fp16, timeout_s=timeout_s, memory_bytes=memory_bytes
        )
        self.parts: dict[int, list[tuple[PartSpec, QnnGraph]]] = {}

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        """Run the parts of the graph of n tokens in order, filling `outputs`. Raises RingstepError."""
        if n not in self.parts:
            self.parts[n] = self._open_parts(n)
        pool: dict[str, np.ndarray] = dict(inputs)
        for part, graph in self.parts[n]:
            pool |= graph.run({name: pool[name] for name in part.inputs})
        for name, array in outputs.items():
            if pool[name].shape != array.shape or pool[name].dtype != array.dtype:
                have = f"{list(pool[name].shape)} {pool[name].dtype}"
                raise RingstepError(
                    f"output {name} of the graph n={n} is {have}, unlike step.json; export again"
                )
            array[...] = pool[name]

    def close(self) -> None:
        """End every child process."""
        for parts in self.parts.values():
            for _, graph in parts:
                graph.close()
        self.parts.clear()

    def _open_parts(self, n: int) -> list[tuple[PartSpec, QnnGraph]]:
        formats = self.spec.graph(n).parts
        chosen = formats.get("qnn") or formats.get("onnx")
        if not chosen:
            raise RingstepError(
                f"step.json: the graph of n={n} has neither QNN nor ONNX files; export it again"
            )
        if "qnn" not in formats and self.soc_model is None:
            raise RingstepError(
                f"{self.folder}: ONNX files for no chip, and the simulator needs one; export with --device"
            )
        opened: list[tuple[PartSpec, QnnGraph]] = []
        try:
            for part in chosen:
                graph = self.open(part)
                opened.append((part, graph))
                if graph.inputs.keys() != set(part.inputs) or not graph.outputs.keys() >= set(part.outputs):
                    raise RingstepError(
                        f"{self.folder / part.file}: its inputs or outputs differ from step.json"
                    )
        except BaseException:
            for _, graph in opened:
                graph.close()
            raise
        return opened


# What follows runs in the child.

_session: Any = None


def _open(model: Path, soc_model: int | None, fp16: bool) -> tuple[Tensors, Tensors]:
    global _session
    _session = qnn.open_session(model, soc_model=soc_model, fp16=fp16)
    return _tensors(_session.get_inputs()), _tensors(_session.get_outputs())


def _run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in _session.get_outputs()]
    return dict(zip(names, _session.run(names, feeds), strict=True))


def _tensors(args: list[Any]) -> Tensors:
    numpy_type = lambda text: np.dtype(NUMPY_TYPES.get(text) or re.sub(r"tensor\((.*)\)", r"\1", text))
    return {arg.name: (tuple(arg.shape), numpy_type(arg.type)) for arg in args}

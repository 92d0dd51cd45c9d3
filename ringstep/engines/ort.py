"""ONNX Runtime on the CPU, inputs and outputs bound to the session's own arrays (no cache is copied)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ringstep.contract import PartSpec, StepSpec
from ringstep.engines.base import Arrays
from ringstep.errors import RingstepError


def open_session(model: str | bytes, name: str, threads: int, optimised: bool = True, fused: bool = True) -> Any:
    """An ONNX file or model on CPUExecutionProvider; without `optimised` nodes stay what they are.

    Without `fused` quantised operators are computed in float between their Q and DQ nodes. Raises RingstepError, which
    calls it `name`, where ONNX Runtime refuses it.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # a refusal is raised, and said in one line
    # Its fused kernel for quantised weights would round activations to 8 bits (46 dB); an unknown key is ignored.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if not fused:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RingstepError(f"{name}: ONNX Runtime refuses it: {str(error).splitlines()[0][:300]}") from None


class OrtPart:
    """One ONNX file with its IO binding; an array is bound again only when another one takes its place."""

    def __init__(self, path: Path, spec: PartSpec, threads: int, fused: bool = True) -> None:
        self.session = open_session(str(path), str(path), threads, fused=fused)
        have = {i.name for i in self.session.get_inputs()}
        if have != set(spec.inputs):
            raise RingstepError(f"{path}: inputs differ from step.json: {sorted(have ^ set(spec.inputs))[0]}")
        if lacking := sorted(set(spec.outputs) - {o.name for o in self.session.get_outputs()}):
            raise RingstepError(f"{path}: has no output {lacking[0]}, which step.json names; export again")
        self.path, self.spec, self.binding = path, spec, self.session.io_binding()
        self.bound: dict[str, np.ndarray] = {}

    def run(self, pool: dict[str, np.ndarray]) -> None:
        """Run on the arrays of `pool`, writing outputs into them."""
        for names, bind in ((self.spec.inputs, self.binding.bind_input), (self.spec.outputs, self.binding.bind_output)):
            for name in names:
                if self.bound.get(name) is not pool[name]:
                    self.rebind(bind, name, pool[name])
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as error:
            reason = str(error).splitlines()[0][:300]
            raise RingstepError(f"{self.path}: ONNX Runtime cannot run it: {reason}") from None

    def rebind(self, bind: Callable[..., Any], name: str, array: np.ndarray) -> None:
        """Bind an array's memory; the reference kept here keeps that memory alive."""
        bind(name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)
        self.bound[name] = array


class OrtEngine:
    """The ONNX files of an artifact on CPUExecutionProvider."""

    name = "ort"

    def __init__(self, folder: Path, spec: StepSpec, threads: int | None = None) -> None:
        count = threads or os.cpu_count() or 1
        self.parts: dict[int, list[OrtPart]] = {}
        self.hidden: dict[int, dict[str, np.ndarray]] = {}
        # The fused kernels of 8-bit activations and weights add pairs of products in 16 bits, which saturate, on x86
        # without VNNI: 16 dB against 48.
        narrow = any(t.name == "logits" and t.dtype in ("uint8", "int8") for g in spec.graphs for t in g.outputs)
        self.open = lambda part: OrtPart(folder / part.file, part, count, fused=not narrow)
        self.spec = spec

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        if n not in self.parts:
            graph = self.spec.graph(n)
            if "onnx" not in graph.parts:
                raise RingstepError(f"step.json: the graph of n={n} has no ONNX files; export it with --format onnx")
            self.parts[n] = [self.open(part) for part in graph.parts["onnx"]]
            self.hidden[n] = {t.name: np.empty(t.shape, t.dtype) for t in graph.hidden}
        pool = {**self.hidden[n], **inputs, **outputs}
        for part in self.parts[n]:
            part.run(pool)

    def close(self) -> None:
        self.parts.clear()

"""What a bisection feeds a step and keeps of it: calls, codes of quantised tensors, an engine opened up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from exporters.onnx import graph_file, load_model
from exporters.surgery import Graph, Tensors
from ringstep.contract import FLOAT32, Encoding, StepSpec
from ringstep.encoding import dequantise, quantise
from ringstep.engines.base import Arrays
from ringstep.errors import RingstepError


@dataclass(frozen=True)
class Call:
    """One call of a step with the original's caches: what the graph is fed, as the artifact stores it."""

    position: int
    feeds: Tensors


class Codec:
    """Floats to and from what the artifact's tensors hold."""

    def __init__(self, folder: Path, spec: StepSpec, n: int) -> None:
        self.dtype = spec.dtype
        self.encodings: dict[str, tuple[str, Encoding]] = {}
        if spec.scheme:
            # Not from activations.json: graphs of other n name other tensors alike, such as a Transpose's.
            self.encodings = encodings_in(load_model(folder / "onnx" / graph_file(n)).graph)
            self.dtype = "float32" if self.encodings else spec.dtype
        for tensor in (*spec.graphs[0].inputs, *spec.graphs[0].outputs):
            if tensor.encoding is not None:
                self.encodings[tensor.name] = (tensor.dtype, tensor.encoding)

    def own(self, name: str) -> tuple[str, Encoding] | None:
        """The type and encoding of a tensor; None where it is a float."""
        return self.encodings.get(name.removesuffix("_quantised"))

    def encode(self, name: str, array: np.ndarray, dtype: str | None = None) -> np.ndarray:
        """Floats as the tensor holds them."""
        own = self.own(name)
        if own is None:
            return np.ascontiguousarray(array, dtype or self.dtype)
        return quantise(array, own[1], own[0])

    def decode(self, name: str, array: np.ndarray) -> np.ndarray:
        """What a tensor holds, in float32; whole numbers that are no encoding stay."""
        own = self.own(name)
        if own is None:
            return array.astype(np.float32) if array.dtype.kind == "f" else array
        return dequantise(array, own[1])


def encodings_in(graph: ir.Graph) -> dict[str, tuple[str, Encoding]]:
    """The type and encoding of every activation of a QDQ graph, by its name without `_quantised`.

    Raises RingstepError where a scale or a zero is none.
    """
    found = {}
    for node in graph:
        if node.op_type != "DequantizeLinear" or node.inputs[0] is None or node.inputs[0].const_value is not None:
            continue
        codes, scale = node.inputs[0], node.inputs[1]
        if scale is None or scale.const_value is None or scale.const_value.size != 1 or codes.dtype is None:
            continue
        zero = node.inputs[2].const_value if len(node.inputs) > 2 and node.inputs[2] is not None else None
        own = Encoding(float(scale.const_value.numpy().item()), 0 if zero is None else int(zero.numpy().item()))
        if not FLOAT32[0] <= own.scale <= FLOAT32[1]:
            raise RingstepError(f"node {node.name}: a scale of {own.scale:g} is no encoding; export again")
        found[str(codes.name).removesuffix("_quantised")] = (codes.dtype.numpy().name, own)
    return found


def either(made: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A tensor under its own name or that of its quantised form. Raises RingstepError where the graph makes neither."""
    found = made.get(name, made.get(f"{name}_quantised"))
    if found is None:
        raise RingstepError(f"the artifact's graph makes no {name}; export it again")
    return found


class Exposed:
    """An engine of DecodeSession that keeps tensors from inside of every step, or of those made while `keep` is set."""

    def __init__(self, name: str, graphs: Sequence[Graph], kept: Sequence[str]) -> None:
        self.name, self.graphs, self.names = name, graphs, kept
        self.kept: list[Tensors] = []
        self.keep = True

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        pool: Tensors = dict(inputs)
        for graph in self.graphs:
            pool |= graph.run(pool)
        for name, array in outputs.items():
            array[...] = pool[name]
        if self.keep:
            self.kept.append({name: pool[name].copy() for name in self.names if name in pool})

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()

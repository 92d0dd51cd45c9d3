"""What a bisection feeds a step and keeps of it: calls, codes of quantised tensors, an engine opened up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from exporters.quantised import ACTIVATIONS
from exporters.surgery import Graph, Tensors
from ringstep.contract import FLOAT32, INTEGERS, Encoding, StepSpec
from ringstep.encoding import dequantise, quantise
from ringstep.engines.base import Arrays
from ringstep.errors import RingstepError
from ringstep.tensor_file import read_json


@dataclass(frozen=True)
class Call:
    """One call of a step with the original's caches: what the graph is fed, as the artifact stores it."""

    position: int
    feeds: Tensors


def read_encodings(path: Path) -> dict[str, tuple[str, Encoding]]:
    """The encodings of activations by tensor. Raises RingstepError for what is no such file."""
    found = {}
    for name, body in read_json(path).items():
        try:
            dtype, scale, zero = body["dtype"], body["scale"], body["zero"]
            low, high = INTEGERS[dtype]
            if not (type(scale) is float and FLOAT32[0] <= scale <= FLOAT32[1] and type(zero) is int):
                raise ValueError
            if not low <= zero <= high:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise RingstepError(f"{path}: no encoding at {name[:80]!r}; export again") from None
        found[name] = (dtype, Encoding(scale, zero))
    return found


class Codec:
    """Floats to and from what the artifact's tensors hold."""

    def __init__(self, folder: Path, spec: StepSpec) -> None:
        self.dtype = spec.dtype
        self.roots: dict[str, str] = {}
        self.encodings: dict[str, tuple[str, Encoding]] = {}
        if spec.scheme and (folder / ACTIVATIONS).is_file():
            self.encodings = read_encodings(folder / ACTIVATIONS)
            self.dtype = "float32"
        for tensor in (*spec.graphs[0].inputs, *spec.graphs[0].outputs):
            if tensor.encoding is not None:
                self.encodings[tensor.name] = (tensor.dtype, tensor.encoding)

        self.ends = {t.name for g in spec.graphs for t in (*g.inputs, *g.outputs, *g.hidden)}

    def within(self, graph: ir.Graph) -> Codec:
        """The same for tensors of one float graph: what a move makes is held as what it moves.

        The file of encodings has each name once, and decode and prefill may give one name to different moves.
        """
        from quantize.activations import MOVES, is_float

        found = copy.copy(self)
        found.roots = {}
        for node in graph:
            source = next((str(v.name) for v in node.inputs if v is not None and is_float(v)), None)
            if node.op_type in MOVES and source is not None:
                made = (str(v.name) for v in node.outputs if v.name not in self.ends)
                found.roots |= dict.fromkeys(made, found.roots.get(source, source))
        return found

    def own(self, name: str) -> tuple[str, Encoding] | None:
        """The type and encoding of a tensor; None where it is a float."""
        plain = name.removesuffix("_quantised")
        return self.encodings.get(self.roots.get(plain, plain))

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


def either(made: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A tensor under its own name or that of its quantised form. Raises RingstepError where the graph makes neither."""
    found = made.get(name, made.get(f"{name}_quantised"))
    if found is None:
        raise RingstepError(f"the artifact's graph makes no {name}; export it again")
    return found


class Exposed:
    """An engine of DecodeSession that keeps tensors from inside of every step."""

    def __init__(self, name: str, graphs: Sequence[Graph], kept: Sequence[str]) -> None:
        self.name, self.graphs, self.names = name, graphs, kept
        self.kept: list[Tensors] = []

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        pool: Tensors = dict(inputs)
        for graph in self.graphs:
            pool |= graph.run(pool)
        for name, array in outputs.items():
            array[...] = pool[name]
        self.kept.append({name: pool[name].copy() for name in self.names if name in pool})

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()

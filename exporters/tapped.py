"""What a bisection feeds a step and keeps of it: calls, codes of quantised tensors, an engine opened up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exporters.quantised import ACTIVATIONS
from exporters.surgery import Graph, Tensors
from ringstep.contract import Encoding, StepSpec
from ringstep.encoding import dequantise, quantise
from ringstep.engines.base import Arrays


@dataclass(frozen=True)
class Call:
    """One call of a step with the original's caches: what the graph is fed, as the artifact stores it."""

    position: int
    feeds: Tensors


class Codec:
    """Floats to and from what the artifact's tensors hold."""

    def __init__(self, folder: Path, spec: StepSpec) -> None:
        self.dtype = spec.dtype
        self.encodings: dict[str, tuple[str, Encoding]] = {}
        if spec.scheme and (folder / ACTIVATIONS).is_file():
            body = json.loads((folder / ACTIVATIONS).read_text())
            self.encodings = {k: (e["dtype"], Encoding(e["scale"], e["zero"])) for k, e in body.items()}
            self.dtype = "float32"
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

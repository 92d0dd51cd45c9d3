"""Tiny models in QDQ form, put together without the line: files, contract and the weights they hold."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from float_models import FOLDER, N, calibrated, graphs_of, model_of

from quantize.activations import Activation, encode
from quantize.calibrate import Calibration
from quantize.grid import Grid, QuantisedWeight
from quantize.model import Model
from quantize.observe import Seen
from quantize.parameters import linears
from quantize.qdq import to_qdq
from quantize.rounding import nearest
from quantize.scheme import Scheme
from quantize.store import DATA, INDEX, Stored, Writer, load_index, save_index
from recipes.weights import key, sources
from ringstep.contract import PartSpec, StepSpec
from ringstep.devices import find_device
from ringstep.session import DecodeSession

SM8750 = find_device("galaxy-s25").chip
GRIDS = {
    "w8": (Grid(8), Grid(8)), "w4": (Grid(4), Grid(8)), "lpbq": (Grid(4, True, 16, True), Grid(8)),
    "w16": (Grid(16), Grid(16)),
}  # fmt: skip


@dataclass(frozen=True)
class Quantised:
    """A QDQ artifact in `folder`, and what it was made of."""

    folder: Path
    model: Model
    spec: StepSpec
    found: Calibration
    weights: dict[str, QuantisedWeight]
    """By name in the graph."""
    stored: dict[str, Stored]
    activations: dict[str, Activation | None]

    def open(self) -> DecodeSession:
        """On ONNX Runtime; takes float rows."""
        from ringstep.engines.ort import OrtEngine

        return DecodeSession(self.spec, OrtEngine(self.folder, self.spec, threads=1))

    def entries(self) -> dict[tuple[int, str], np.ndarray]:
        """The sink prefix's entries in the integers of the caches."""
        made = {}
        for (layer, what), array in self.found.entries.items():
            own = self.activations[f"past_{what}_{layer}"]
            assert own is not None
            made[layer, what] = integers(array, own)
        return made


def integers(values: np.ndarray, own: Activation) -> np.ndarray:
    """The nearest integers of an encoding."""
    ends = np.iinfo(own.dtype)
    return np.clip(np.rint(values / own.encoding.scale) + own.encoding.zero, ends.min, ends.max).astype(own.dtype)


@functools.cache
def quantised(name: str, grids: str, scheme: Scheme | None = None, chip: bool = False) -> Quantised:
    """The decode graph and that of N tokens, weights rounded to nearest: those of layers on the first grid, the head's
    on the second."""
    model, found, folder = model_of(name), calibrated(name, 1), FOLDER / f"qdq-{len(list(FOLDER.glob('qdq-*')))}"
    spec, graphs = graphs_of(name, SM8750.name if chip else None)
    folder.mkdir()
    weights, own = {}, GRIDS[grids]
    with open(folder / DATA, "wb") as file:
        writer = Writer(file)
        for path, source in linears(model.plan).items():
            weights[key(source)] = nearest.quantise(model.read(source), own[path == "head"])
            writer.weight(key(source), weights[key(source)])
    save_index(folder / INDEX, writer.index)
    stored = load_index(folder / INDEX)
    reach = float(np.abs(model.table(np.arange(model.plan.vocab))).max())
    seen = found.seen | {"x": Seen(-reach, reach)}
    small = {key(s): model.read(s) for s in sources(model.plan) if len(s.out_shape) == 1}
    activations: dict[str, Activation | None] = {}
    contracts = []
    for n, graph in graphs.items():
        made = encode(graph.graph, seen, scheme or Scheme("test"), SM8750 if chip else None)
        activations |= made
        ir.save(to_qdq(graph, folder, made, stored, small), folder / f"{n}.onnx")
    for graph_spec in spec.graphs:
        tensor = lambda t: encoded(t, activations)
        inputs, outputs = tuple(map(tensor, graph_spec.inputs)), tuple(map(tensor, graph_spec.outputs))
        part = PartSpec(f"{graph_spec.n}.onnx", tuple(t.name for t in inputs), tuple(t.name for t in outputs))
        contracts.append(dataclasses.replace(graph_spec, inputs=inputs, outputs=outputs, parts={"onnx": (part,)}))
    cache_type = {t.layer: t.dtype for t in contracts[0].inputs}
    caches = tuple(dataclasses.replace(c, dtype=cache_type[c.layer]) for c in spec.caches)
    mask = next(own for n, own in activations.items() if n.startswith("mask_") and own is not None)
    spec = dataclasses.replace(spec, graphs=tuple(contracts), caches=caches, dtype="uint16", embedding=None,
                               mask_value=-mask.encoding.scale * mask.encoding.zero)  # fmt: skip
    assert {g.n for g in spec.graphs} == {1, N}
    return Quantised(folder, model, spec, found, weights, stored, activations)


def encoded(tensor: Any, activations: dict[str, Activation | None]) -> Any:
    """An input or output in integers."""
    own = activations[tensor.name]
    assert own is not None
    return dataclasses.replace(tensor, dtype=own.dtype, encoding=own.encoding)

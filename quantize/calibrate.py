"""Calibration and rounding in one walk over the layers: text in, ranges, quantised weights and the sink prefix out.

    for each layer   float pass over all text ─▶ ranges of its tensors, Hessians of its linears' inputs
                     round its linears        ─▶ quantised.bin
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from quantize.activations import MOVES
from quantize.grid import QuantisedWeight
from quantize.observe import Seen
from quantize.torch_graph import Block, block_of, run
from quantize.walk import BlockEngine, Entries, layer_outputs_of, layer_spec, prefix_through, source_of, through
from recipes.plan import Plan, Source
from recipes.step import head_sources
from recipes.weights import key
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession

Read = Callable[[Source], np.ndarray]
Rows = Callable[[np.ndarray], np.ndarray]
Round = Callable[[str, str, Tensor, Tensor | None], QuantisedWeight | None]
SINK_RATIO = 20.0  # a massive activation is this many times what other positions reach (SmolLM2: 35 and more)
HEAD_ROWS = 4096


@dataclass
class Calibration:
    """What the walk found."""

    seen: dict[str, Seen] = field(default_factory=dict)
    prefix: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    """Float entries [1, kv_heads, count, head_dim] by layer and "key" or "value"."""
    prefix_logits: np.ndarray | None = None
    tokens: int = 0


@dataclass(frozen=True)
class Model:
    """What a walk needs of a model: its plan, contract, graph of n tokens, and weights."""

    plan: Plan
    spec: StepSpec
    graph: ir.Graph
    n: int
    read: Read
    rows: Rows
    """Embedding rows [len(ids), hidden] of ids, in float32."""

    def sources(self, layer: int) -> dict[str, tuple[str, Source]]:
        """A layer's parameters: the name in the graph to its path and origin."""
        found = self.plan.layer_sources(layer)
        return {key(s): (f"layers.{layer}.{p.removesuffix('.weight')}", s) for p, s in found.items()}

    def block(self, layer: int) -> Block:
        """A layer's nodes."""
        names = self.sources(layer)
        outputs = layer_outputs_of(self.spec, layer)
        return block_of(self.graph, f"/layers.{layer}/", outputs, names.__contains__)

    def head(self) -> Block:
        """The head's nodes."""
        names = {key(s) for s in head_sources(self.plan).values()}
        return block_of(self.graph, "/head/", ("logits",), names.__contains__)

    def embedded(self, ids: Sequence[int]) -> np.ndarray:
        """What enters the first layer for ids, float32 [len(ids), hidden]."""
        return self.rows(np.asarray(ids)) * np.float32(self.plan.embedding_scale)


class Watch:
    """The hook of a float pass: ranges of computed tensors, and sum x x^T of each linear's input."""

    def __init__(self, block: Block, seen: dict[str, Seen]) -> None:
        moved = {n for step in block.steps if step.op in MOVES for n in step.outputs} - set(block.outputs)
        self.skip = moved | {n for n in block.inputs if n.startswith(("past_", "mask_", "cos_", "sin_"))}
        self.seen = seen
        self.linears = {step.inputs[0] for step in block.steps if step.op == "Gemm"}
        self.hessians: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self.skip:
            self.seen.setdefault(name, Seen()).add(x)
        if name in self.linears:
            if name not in self.hessians:
                self.hessians[name] = torch.zeros(x.shape[-1], x.shape[-1])
            self.hessians[name].addmm_(x.t(), x)
        return x


def find_sinks(model: Model, ids: Sequence[int], tick: Any = None) -> tuple[int, list[dict[str, float]]]:
    """Positions with massive activations over one text: how many lead it, and each one's size.

    A position counts when the largest element of its hidden state, in some layer, is SINK_RATIO times the median
    position's. Returns (leading positions, [{position, token, layer, largest, ratio}]).
    """
    rows = model.embedded(ids)
    worst: dict[int, dict[str, float]] = {}
    for layer in range(len(model.plan.layers)):
        with open_layer(model, layer) as session:
            rows = through(session, rows, None)
        largest = np.abs(rows).max(-1)
        typical = float(np.median(largest))
        for position in np.flatnonzero(largest > SINK_RATIO * typical).tolist():
            found = {"position": position, "token": ids[position], "layer": layer,
                     "largest": float(largest[position]), "ratio": float(largest[position]) / typical}  # fmt: skip
            if position not in worst or found["ratio"] > worst[position]["ratio"]:
                worst[position] = found
        if tick:
            tick(1)
    leading = 0
    while leading in worst:
        leading += 1
    return leading, [worst[p] for p in sorted(worst)]


def open_layer(model: Model, layer: int) -> DecodeSession:
    """A layer's session; session.engine is its BlockEngine."""
    block = model.block(layer)
    weights = {name: torch.from_numpy(model.read(source)) for name, (_, source) in model.sources(layer).items()}
    for name, tensor in weights.items():
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise RingstepError(f"tensor {name}: values that are not finite; mend the checkpoint")
    source = source_of(block, model.spec, layer)
    engine = BlockEngine(block, weights, source, f"hidden_{layer}")
    return DecodeSession(layer_spec(model.spec, layer, model.n), engine)


def calibrate(model: Model, sequences: Sequence[Sequence[int]], prefix: Sequence[int], round_: Round,
              tick: Any = None) -> Calibration:  # fmt: skip
    """Walk the layers over `sequences` (ids after the prefix, whole chunks of n), rounding each layer's linears.

    `round_(path, name, weight, hessian)` is called for every linear and for the head.
    """
    found = Calibration(tokens=sum(map(len, sequences)))
    states = [model.embedded(ids) for ids in sequences]
    first = model.embedded(prefix) if len(prefix) else np.zeros((0, model.plan.hidden), np.float32)
    for layer in range(len(model.plan.layers)):
        with open_layer(model, layer) as session:
            engine: Any = session.engine
            entries: Entries | None = None
            if len(first):
                first, entries = prefix_through(session, first)
                found.prefix |= entries
            watch = Watch(engine.block, found.seen)
            engine.hook = watch
            for i, rows in enumerate(states):
                states[i] = through(session, rows, entries)
                if tick:
                    tick(len(rows))
            for what in ("key", "value"):
                name = next(n for n in engine.block.outputs if n.endswith(f"_{what}_{layer}"))
                if entries:
                    found.seen[name].add(torch.from_numpy(entries[layer, what]))
            check_finite(watch, engine.block)
            round_layer(model, layer, engine, watch.hessians, round_)
    head(model, states, first, found, round_)
    for name in (str(v.name) for v in model.graph.inputs):
        if name.startswith(("cos_", "sin_")):
            reach = next(r.scale for r in model.spec.rotary if r.name == name[4:])
            found.seen[name] = Seen(-reach, reach, reach)
    return found


def check_finite(watch: Watch, block: Block) -> None:
    """Refuse activations that are not finite, by name."""
    for step in block.steps:
        for name in step.outputs:
            seen = watch.seen.get(name)
            if seen and not np.isfinite([seen.low, seen.high]).all():
                raise RingstepError(f"tensor {name} (node {step.name}): values that are not finite during calibration")


def round_layer(model: Model, layer: int, engine: Any, hessians: Mapping[str, Tensor], round_: Round) -> None:
    """Round every linear of a layer."""
    inputs = {step.inputs[1]: step.inputs[0] for step in engine.block.steps if step.op == "Gemm"}
    for name, (path, _) in model.sources(layer).items():
        if name in inputs:
            round_(path, name, engine.weights[name], hessians.get(inputs[name]))


def head(model: Model, states: list[np.ndarray], first: np.ndarray, found: Calibration, round_: Round) -> None:
    """The head over every text's last hidden state, its rows in pieces: a vocabulary is long."""
    block, sources = model.head(), head_sources(model.plan)
    norm = {key(sources["norm.weight"]): torch.from_numpy(model.read(sources["norm.weight"]))}
    source = next(n for n in block.inputs)
    gemm = next(step for step in block.steps if step.op == "Gemm")
    name = key(sources["lm_head.weight"])
    weight = torch.from_numpy(model.read(sources["lm_head.weight"]))
    watch = Watch(block, found.seen)
    with torch.inference_mode():
        for rows in states:
            for at in range(0, len(rows), model.n):
                run(block, {source: torch.from_numpy(rows[at : at + model.n])}, norm | {name: weight}, watch)
        if len(first):
            logits = run(block, {source: torch.from_numpy(first)}, norm | {name: weight})["logits"]
            found.prefix_logits = logits.numpy()
    check_finite(watch, block)
    round_("head", name, weight, watch.hessians.get(gemm.inputs[0]))

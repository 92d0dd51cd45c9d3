"""Calibration: real text through the float model, one layer at a time; what every tensor's values were.

    find_sinks  one text with its first token  ─▶ which positions carry massive activations
    calibrate   all text after the sink prefix ─▶ ranges of every tensor, the prefix's keys, values and logits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantize.activations import MOVES
from quantize.model import Model
from quantize.observe import BINS, Seen
from quantize.torch_graph import Block, run
from quantize.walk import Entries, prefix_through, through
from recipes.step import head_sources
from recipes.weights import key
from ringstep.errors import RingstepError
from ringstep.files import ordinary_size

Tick = Callable[[int], Any]
SINK_RATIO = 20.0  # a massive activation is this many times what other positions reach (SmolLM2: 35 and more)


@dataclass(frozen=True)
class Sink:
    """A position with massive activations."""

    position: int
    token: int
    layer: int
    """Where it stands out most."""
    largest: float
    ratio: float
    """`largest` against the median position's largest element."""


@dataclass
class Calibration:
    """What calibration found."""

    tokens: int
    seen: dict[str, Seen] = field(default_factory=dict)
    """By tensor name: inputs of blocks and what nodes compute."""
    prefix: tuple[int, ...] = ()
    entries: Entries = field(default_factory=dict)
    """Of the sink prefix, float32 [1, kv_heads, len(prefix), head_dim] by layer and "key" or "value"."""
    logits: np.ndarray | None = None
    """Of the sink prefix, float32 [len(prefix), vocab]."""
    sinks: list[Sink] = field(default_factory=list)
    sink: dict[str, Seen] = field(default_factory=dict)
    """What the prefix's tokens alone were, by tensor name: they are in no range of `seen`."""


class Watch:
    """The hook of a float pass: what every computed tensor's values are; of n tokens, the first `rows`."""

    def __init__(self, block: Block, seen: dict[str, Seen], n: int = 0, rows: int = 0) -> None:
        moved = {n for step in block.steps if step.op in MOVES for n in step.outputs} - set(block.outputs)
        self.skip = moved | {n for n in block.inputs if n.startswith(("past_", "mask_", "cos_", "sin_"))}
        self.block, self.seen, self.n, self.rows = block, seen, n, rows

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self.skip:
            # Tokens are the last but one dim; what stacks heads on them is taken whole.
            own = x.narrow(-2, 0, self.rows) if self.rows and x.dim() > 1 and x.shape[-2] == self.n else x
            self.seen.setdefault(name, Seen()).add(own)
        return x

    def check(self) -> None:
        """Refuse values that were not finite, at the first node that made them."""
        for step in self.block.steps:
            for name in step.outputs:
                seen = self.seen.get(name)
                if seen and not np.isfinite([seen.low, seen.high]).all():
                    raise RingstepError(f"tensor {name} (node {step.name}): values that are not finite in calibration")


def watched(watch: Watch, walk: Callable[..., Any], *args: Any) -> Any:
    """What `walk` returns; where it fails over values that are not finite, the node that made them is named."""
    try:
        return walk(*args)
    except RingstepError:
        watch.check()
        raise


def find_sinks(model: Model, ids: Sequence[int], tick: Tick = lambda _: None) -> list[Sink]:
    """Positions of one text whose largest hidden element is, in some layer, SINK_RATIO times the median position's."""
    rows = model.embedded(ids)
    found: dict[int, Sink] = {}
    for layer in range(len(model.plan.layers)):
        session, engine = model.open_layer(layer)
        engine.hook = Watch(engine.block, {})
        rows = watched(engine.hook, through, session, rows, None)
        largest = np.abs(rows).max(-1)
        typical = max(float(np.median(largest)), 1e-30)
        for position in np.flatnonzero(largest > SINK_RATIO * typical).tolist():
            reach = float(largest[position])
            if position not in found or reach / typical > found[position].ratio:
                found[position] = Sink(position, int(ids[position]), layer, reach, reach / typical)
        tick(len(rows))
    return [found[position] for position in sorted(found)]


def leading(sinks: Sequence[Sink]) -> int:
    """How many positions from the first on are sinks: the length of the prefix."""
    positions, count = {sink.position for sink in sinks}, 0
    while count in positions:
        count += 1
    return count


def calibrate(model: Model, sequences: Sequence[Sequence[int]], prefix: Sequence[int], tick: Tick = lambda _: None,
              ) -> Calibration:  # fmt: skip
    """Walk the layers over `sequences` (ids after the prefix, whole chunks of model.n); without any, the prefix alone.

    `tick(tokens)` is called for each sequence of each layer, and of the head. Raises RingstepError naming a weight
    or a tensor that is not finite.
    """
    found = Calibration(sum(map(len, sequences)), prefix=tuple(prefix))
    states = [model.embedded(ids) for ids in sequences]
    first = model.embedded(prefix) if prefix else np.zeros((0, model.plan.hidden), np.float32)
    for layer in range(len(model.plan.layers)) if states or prefix else ():
        session, engine = model.open_layer(layer)
        entries: Entries | None = None
        if prefix:
            engine.hook = Watch(engine.block, found.sink, model.n, len(prefix))
            first, entries = watched(engine.hook, prefix_through, session, first)
            found.entries |= entries
        engine.hook = watch = Watch(engine.block, found.seen)
        for i, rows in enumerate(states):
            states[i] = watched(watch, through, session, rows, entries)
            tick(len(rows))
        watch.check()
        for what in ("key", "value"):
            name = next(n for n in engine.block.outputs if n.endswith(f"_{what}_{layer}"))
            if entries and states:
                found.seen[name].add(torch.from_numpy(entries[layer, what]))
    if states or prefix:
        head(model, states, first, found, tick)
    for rotary in model.spec.rotary:
        found.seen |= {f"{what}_{rotary.name}": Seen(-rotary.scale, rotary.scale) for what in ("cos", "sin")}
    return found


def head(model: Model, states: list[np.ndarray], first: np.ndarray, found: Calibration, tick: Tick) -> None:
    """The head over every text's last hidden state, a vocabulary's rows in pieces."""
    block, sources = model.head(), head_sources(model.plan)
    norm, name = key(sources["norm.weight"]), key(sources["lm_head.weight"])
    norms = {norm: model.weight(norm, sources["norm.weight"])}
    watch = Watch(block, found.seen)
    made = np.empty((len(first), model.plan.vocab), np.float32)
    at = 0
    for piece in model.head_pieces():
        weights = norms | {name: piece}
        with torch.inference_mode():
            for rows in states:
                # The norm's values are the same for every piece, and its histogram the same in shape.
                run(block, {block.inputs[0]: torch.from_numpy(rows)}, weights, watch)
            if len(first):
                feed, hook = {block.inputs[0]: torch.from_numpy(first)}, Watch(block, found.sink)
                made[:, at : at + len(piece)] = run(block, feed, weights, hook)["logits"]
        at += len(piece)
    watch.check()
    for rows in states:
        tick(len(rows))
    if len(first):
        found.logits = made


def constant(seen: Mapping[str, Seen]) -> list[str]:
    """Tensors that had one value throughout calibration: the text did not reach them."""
    return [name for name, own in seen.items() if own.low == own.high]


def save(path: Path, found: Calibration) -> None:
    """Write a calibration as .npz, plain arrays only."""
    names = list(found.seen)
    arrays: dict[str, Any] = {
        "names": np.array(names),
        "edges": np.array([[s.low, s.high, s.edge] for s in found.seen.values()]).reshape(-1, 3),
        "counts": np.array([s.counts for s in found.seen.values()], np.float32).reshape(-1, BINS),
        "tokens": np.array(found.tokens), "prefix": np.array(found.prefix, np.int64),
        "sinks": np.array([[s.position, s.token, s.layer, s.largest, s.ratio] for s in found.sinks]).reshape(-1, 5),
    }  # fmt: skip
    arrays["sink_names"] = np.array(list(found.sink))
    arrays["sink_edges"] = np.array([[s.low, s.high] for s in found.sink.values()]).reshape(-1, 2)
    arrays |= {f"{what}_{layer}": array for (layer, what), array in found.entries.items()}
    if found.logits is not None:
        arrays["logits"] = found.logits
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def load(path: Path) -> Calibration:
    """Read what save wrote. Raises RingstepError for anything else."""
    try:
        ordinary_size(path)  # a pipe would wait for ever
        with np.load(path, allow_pickle=False) as body:
            edges, counts = body["edges"], body["counts"].astype(np.float64)
            if counts.shape != (len(edges), BINS) or len(body["names"]) != len(edges):
                raise ValueError("shapes do not agree")
            if not (np.isfinite(edges).all() and (edges[:, 0] <= edges[:, 1]).all() and (edges[:, 2] >= 0).all()):
                raise ValueError("ranges that are none")
            if not (np.isfinite(counts).all() and (counts >= 0).all()):
                raise ValueError("counts that are none")
            seen = {str(name): Seen(float(edge[0]), float(edge[1]), float(edge[2]), count)
                    for name, edge, count in zip(body["names"], edges, counts, strict=True)}  # fmt: skip
            entries = {}
            for stem in body.files:
                what, _, layer = stem.partition("_")
                if what in ("key", "value") and layer.isdecimal():
                    entries[int(layer), what] = body[stem]
                    if body[stem].dtype != np.float32 or not np.isfinite(body[stem]).all():
                        raise ValueError(f"{stem} is not finite float32")
            sinks = [Sink(int(p), int(t), int(at), float(largest), float(ratio))
                     for p, t, at, largest, ratio in body["sinks"]]  # fmt: skip
            logits = body["logits"] if "logits" in body.files else None
            sink = {str(name): Seen(float(low), float(high))
                    for name, (low, high) in zip(body["sink_names"], body["sink_edges"], strict=True)}  # fmt: skip
            prefix = tuple(map(int, body["prefix"]))
            return Calibration(int(body["tokens"]), seen, prefix, entries, logits, sinks, sink)
    except Exception as error:  # of every kind where bytes are damaged: numpy's, zipfile's, zlib's
        raise RingstepError(f"{path}: no calibration of ringstep's ({str(error).partition(chr(10))[0]})") from None

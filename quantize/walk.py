"""The layer loop: real text through one layer at a time, each driven by a DecodeSession as the whole step would be.

    embedding rows ─ layer 0 over every sequence ─ layer 1 over every sequence ─ ... ─ head
                      └ ring caches, masks, chunks: the session's own

One layer's weights are in memory; the hidden state of all text is (tokens * hidden * 4 bytes).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from quantize.torch_graph import Block, Hook, run
from recipes.step import layer_inputs, layer_outputs
from ringstep.contract import GraphSpec, StepSpec, io_tensors
from ringstep.engines.base import Arrays
from ringstep.session import DecodeSession

Entries = dict[tuple[int, str], np.ndarray]


def layer_spec(spec: StepSpec, layer: int, n: int) -> StepSpec:
    """The contract of one layer alone: x [n, hidden] in, the next hidden state in the place of logits."""
    cache = spec.caches[layer]
    rotary = tuple(r for r in spec.rotary if r.name == cache.rotary)
    masks = tuple(m for m in spec.masks if m.name == cache.mask)
    inputs, outputs = io_tensors(n, spec.hidden, spec.hidden, "float32", rotary, masks, (cache,), False)
    return dataclasses.replace(
        spec, vocab=spec.hidden, rotary=rotary, masks=masks, caches=(cache,), embedding=None, prefix=None, eos=(),
        graphs=(GraphSpec(n, inputs, outputs),),
    )  # fmt: skip


class BlockEngine:
    """An engine that computes one layer's graph in torch; `hook` may be changed between calls."""

    name = "torch"

    def __init__(self, block: Block, weights: dict[str, Tensor], source: str, result: str) -> None:
        self.block, self.weights, self.source, self.result = block, weights, source, result
        self.hook: Hook | None = None

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        """Compute the layer: x is fed as `source`, `result` is returned as logits."""
        feeds = {name: torch.from_numpy(inputs["x" if name == self.source else name]) for name in self.block.inputs}
        with torch.inference_mode():
            made = run(self.block, feeds, self.weights, self.hook)
        for name, array in outputs.items():
            np.copyto(array, made[self.result if name == "logits" else name].numpy())

    def close(self) -> None:
        """Nothing to free."""


def layer_outputs_of(spec: StepSpec, layer: int) -> tuple[str, ...]:
    """Names of what a layer's graph returns: the hidden state and its two cache outputs."""
    return (f"hidden_{layer}", *layer_outputs(spec.caches[layer]))


def source_of(block: Block, spec: StepSpec, layer: int) -> str:
    """The name of a layer's hidden input, whatever the block before calls it."""
    known = set(layer_inputs(spec.caches[layer]))
    (name,) = (name for name in block.inputs if name not in known)
    return name


def through(session: DecodeSession, rows: np.ndarray, entries: Entries | None) -> np.ndarray:
    """One sequence's rows [tokens, hidden] through a layer's session, after the sink prefix's entries."""
    session.reset()
    if entries:
        session.seed(entries)
    return session.step(rows)


def prefix_through(session: DecodeSession, rows: np.ndarray) -> tuple[np.ndarray, Entries]:
    """The sink prefix's rows [count, hidden] through a layer in float: the next rows, and the entries it leaves."""
    session.reset()
    after = session.step(rows)
    layer = session.spec.caches[0].layer
    _, keys, values = session.entries(0)
    return after, {(layer, "key"): keys[None], (layer, "value"): values[None]}

"""What the layer loop needs of a model: its plan, its contract, its graph, and a way to its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from quantize.torch_graph import Block, block_of
from quantize.walk import BlockEngine, layer_outputs_of, layer_spec, source_of
from recipes.plan import Plan, Source
from recipes.step import head_sources
from recipes.weights import key
from ringstep.checkpoint import Checkpoint
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession

Read = Callable[[Source], np.ndarray]
HEAD_ROWS = 8192  # of a vocabulary at a time


@dataclass(frozen=True)
class Model:
    """A float model by blocks; `graph` is its sanitised step of `n` tokens, `read` gives a parameter in float32."""

    plan: Plan
    spec: StepSpec
    graph: ir.Graph
    n: int
    read: Read
    table: Callable[[np.ndarray], np.ndarray]
    """Rows of the embedding table, float32 [len(ids), hidden]."""

    def sources(self, layer: int) -> dict[str, tuple[str, Source]]:
        """A layer's parameters: the name in the graph to its path (layers.3.mlp.down_proj) and origin."""
        found = self.plan.layer_sources(layer)
        return {key(s): (f"layers.{layer}.{p.removesuffix('.weight')}", s) for p, s in found.items()}

    def block(self, layer: int) -> Block:
        """A layer's nodes."""
        names = self.sources(layer)
        outputs = layer_outputs_of(self.spec, layer)
        return block_of(self.graph, f"/layers.{layer}/", outputs, names.__contains__)

    def head(self) -> Block:
        """The head's nodes: the norm and the Gemm to logits."""
        names = {key(s) for s in head_sources(self.plan).values()}
        return block_of(self.graph, "/head/", ("logits",), names.__contains__)

    def embedded(self, ids: Sequence[int]) -> np.ndarray:
        """What enters the first layer for ids, float32 [len(ids), hidden]; RingstepError where it is not finite."""
        rows = self.table(np.asarray(ids, np.int64)) * np.float32(self.plan.embedding_scale)
        if not np.isfinite(rows.sum(dtype=np.float64)):
            raise RingstepError(f"tensor {key(self.plan.embedding)}: values that are not finite; mend the checkpoint")
        return rows

    def weight(self, name: str, source: Source) -> torch.Tensor:
        """A parameter in float32; RingstepError naming it where it holds values that are not finite."""
        tensor = torch.from_numpy(self.read(source))
        # In float32 first: a sixth of the time, and only weights near its limit overflow.
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise RingstepError(f"tensor {name}: values that are not finite; mend the checkpoint")
        return tensor

    def head_pieces(self) -> Iterator[torch.Tensor]:
        """The head's weight [HEAD_ROWS, hidden] at a time: whole in float32 nothing would be larger."""
        source = head_sources(self.plan)["lm_head.weight"]
        start, stop = source.rows or (0, source.shape[0])
        for at in range(start, stop, HEAD_ROWS):
            yield self.weight(key(source), dataclasses.replace(source, rows=(at, min(stop, at + HEAD_ROWS))))

    def open_layer(self, layer: int) -> tuple[DecodeSession, BlockEngine]:
        """A session that drives one layer alone, and its engine, which holds that layer's weights."""
        block = self.block(layer)
        weights = {name: self.weight(name, source) for name, (_, source) in self.sources(layer).items()}
        engine = BlockEngine(block, weights, source_of(block, self.spec, layer), f"hidden_{layer}")
        return DecodeSession(layer_spec(self.spec, layer, self.n), engine), engine


def table_of(checkpoint: Checkpoint, plan: Plan) -> Callable[[np.ndarray], np.ndarray]:
    """Rows of a checkpoint's embedding table, each read when it is asked for."""
    source = plan.embedding

    def rows(ids: np.ndarray) -> np.ndarray:
        wanted, back = np.unique(ids, return_inverse=True)
        made = np.empty((len(wanted), source.shape[1]), np.float32)
        # Neighbouring ids are read together.
        for run in np.split(np.arange(len(wanted)), np.flatnonzero(np.diff(wanted) > 1) + 1):
            first, last = int(wanted[run[0]]), int(wanted[run[-1]])
            piece: Any = checkpoint.read(source.name, (first, last + 1))
            made[run] = np.asarray(piece).astype(np.float32) + np.float32(source.add)
        return made[back.reshape(-1)]

    return rows

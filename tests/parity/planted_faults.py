"""Faults planted one at a time: in the host loop, in what a recipe exports, and in files of an artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recipes.blocks
import ringstep.session
from recipes.blocks import Attention
from ringstep.contract import StepSpec
from ringstep.encoding import put
from ringstep.session import Buffers
from ringstep.slots import held_positions, visible, writes

Patch = pytest.MonkeyPatch


def mask_too_wide(patch: Patch) -> None:
    patch.setattr(ringstep.session, "visible", lambda h, p, n, w: visible(h, p, n, w and w + 1))


def mask_too_narrow(patch: Patch) -> None:
    patch.setattr(ringstep.session, "visible", lambda h, p, n, w: visible(h, p, n, w and w - 1))


def ring_slot_off_by_one(patch: Patch) -> None:
    """New entries land one slot further on."""
    later = lambda kind, length, position, count: writes(kind, length, position + (kind == "ring"), count)
    patch.setattr(ringstep.session, "writes", later)


def ring_behind(patch: Patch) -> None:
    """The mask is made for a ring that is one token behind."""
    patch.setattr(ringstep.session, "held_positions", lambda k, n, p: held_positions(k, n, max(0, p - (k == "ring"))))


def rotary_off_by_one(patch: Patch) -> None:
    """Angles of the next position, in chunks and in single steps."""
    right = Buffers.fill

    def fill(self: Buffers, position: int, feed: np.ndarray, table: Any) -> None:
        right(self, position, feed, table)
        for rotary in self.spec.rotary:
            at = np.arange(position + 1, position + 1 + self.graph.n, dtype=np.float32)
            angles = at[:, None] * np.asarray(rotary.inv_freq, np.float32)
            for role, function in (("cos", np.cos), ("sin", np.sin)):
                tensor = self.by_role[role, rotary.name]
                put(self.inputs[tensor.name], function(angles) * rotary.scale, tensor)

    patch.setattr(Buffers, "fill", fill)


def rotary_off_in_chunks(patch: Patch) -> None:
    """The same in prefill chunks alone."""
    right = Buffers.fill
    with pytest.MonkeyPatch.context() as inner:
        rotary_off_by_one(inner)
        wrong = Buffers.fill
    pick = lambda self, *args: (wrong if self.graph.n > 1 else right)(self, *args)
    patch.setattr(Buffers, "fill", pick)


def window_dropped(patch: Patch) -> None:
    """Masks hide only what was never written: a chunk sees the whole ring, and all of itself."""
    patch.setattr(ringstep.session, "visible", lambda h, p, n, w: visible(h, p, n, None))


def chunk_sees_evicted(patch: Patch) -> None:
    """Every query of a chunk sees what the first one sees, although its own window has moved on."""

    def seen(held: np.ndarray, position: int, n: int, window: int | None) -> np.ndarray:
        found = visible(held, position, n, window)
        found[:, : len(held)] |= found[:1, : len(held)]
        return found

    patch.setattr(ringstep.session, "visible", seen)


HOST: dict[str, Callable[[Patch], None]] = {
    "mask one too wide": mask_too_wide,
    "mask one too narrow": mask_too_narrow,
    "ring slot off by one": ring_slot_off_by_one,
    "mask of a ring one token behind": ring_behind,
    "rotary position off by one": rotary_off_by_one,
    "the same in chunks alone": rotary_off_in_chunks,
    "window dropped": window_dropped,
    "chunk sees evicted entries": chunk_sees_evicted,
}


def gate_after_projection(patch: Patch) -> None:
    """out_proj(out) * gates in place of out_proj(out * gates), heads taking turns over the hidden size."""
    right = Attention.forward

    def forward(self: Attention, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        gate, self._modules["g_proj"] = self._modules.get("g_proj"), None
        try:
            out, key, value = right(self, x, *rest)
        finally:
            self._modules["g_proj"] = gate
        if gate is None:
            return out, key, value
        gates = recipes.blocks.sigmoid(gate(x), self.accurate)
        # By Concat, which quantisation takes; Expand it does not.
        return out * torch.cat([gates] * (out.shape[-1] // self.heads), dim=-1), key, value

    patch.setattr(Attention, "forward", forward)


def heads_grouped_wrongly(patch: Patch) -> None:
    """Head h reads kv head h % kv_heads: what a repeat in place of a repeat_interleave does."""
    right = Attention.by_head

    def by_head(self: Attention, x: torch.Tensor, heads: int, norm: Any) -> torch.Tensor:
        found = right(self, x, heads, norm)
        if heads == self.kv_heads or self.kv_heads == 1:
            return found
        shape, group = found.shape, heads // self.kv_heads
        flat = found.reshape(heads, -1, self.head_dim)
        return flat.reshape(group, self.kv_heads, -1, self.head_dim).transpose(0, 1).reshape(shape)

    patch.setattr(Attention, "by_head", by_head)


RECIPE: dict[str, Callable[[Patch], None]] = {
    "gate after the output projection": gate_after_projection,
    "heads grouped in the wrong order": heads_grouped_wrongly,
}


def ring_of_length_w(folder: Path) -> None:
    """step.json of an artifact whose rings hold W entries: one more than a query may see besides itself."""
    body = json.loads((folder / "step.json").read_text())
    for part in (*body["masks"], *body["caches"]):
        part["length"] += part["kind"] == "ring"
    (folder / "step.json").write_text(json.dumps(body))


def encodings_differ(folder: Path) -> None:
    """step.json of an artifact whose keys come out by another scale than they go in by."""
    body = json.loads((folder / "step.json").read_text())
    for graph in body["graphs"]:
        for tensor in graph["outputs"]:
            if tensor["role"] == "key_out":
                tensor["encoding"]["scale"] *= 1.1
    (folder / "step.json").write_text(json.dumps(body))


def graph_encodings_differ(folder: Path) -> None:
    """The same in the graphs, of which step.json knows nothing: keys are written by a larger scale, read as before."""
    import onnx_ir as ir

    for graph in StepSpec.load(folder).graphs:
        path = folder / graph.parts["onnx"][0].file
        model = ir.load(path)
        for out in model.graph.outputs:
            if not (out.name or "").startswith("new_key"):
                continue
            node = out.producer()
            assert node is not None and node.op_type == "QuantizeLinear", out.name
            scale = node.inputs[1]
            assert scale is not None and scale.const_value is not None
            own = ir.Value(name=f"{out.name}_wrong", const_value=ir.tensor(
                (scale.const_value.numpy() * np.float32(1.1)).astype(np.float32), name=f"{out.name}_wrong"))
            own.shape, own.dtype = scale.shape, scale.dtype
            model.graph.register_initializer(own)
            node.replace_input_with(1, own)
        ir.save(model, path)

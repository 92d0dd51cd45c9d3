"""Where a step stops being equal: what each block and node adds by itself, and the verdict.

Two measures, never to be mixed up. `snr_db` along the depth is cumulative: it says how far a tensor is from the
original's after everything before it. `local_db` is what one block (or node) does to it when it is fed the reference's
own inputs. A residual stream carries an early fault to the end, so only the local measure can name a culprit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ringstep.parity.metrics import SILENT_DB, Floats

Kind = Literal["fault", "loss"]

FP16_MAX = 65504.0
FP16_NEAR = 0.75 * FP16_MAX
CLIPPED_SHARE = 1e-3
TIES_DB = 3.0  # nodes within this much of the worst are named with it


@dataclass(frozen=True)
class Limits:
    """What counts as a fault of a block, in dB of its local measure."""

    floor_db: float
    """Below it whatever the other blocks have."""
    margin_db: float
    """This far below the median of all blocks."""
    always_db: float
    """At or above it never a fault."""


# What rounding to integers costs a layer varies by 20 dB between layers: only what is below all of it is a fault.
LIMITS: dict[str, Limits] = {
    "float32": Limits(70.0, 15.0, 100.0),
    "float16": Limits(20.0, 15.0, 50.0),
    "quantised": Limits(6.0, 15.0, 20.0),
}


@dataclass
class Block:
    """One block's result: the tensor it hands on, and the keys and values it adds. All in dB."""

    tensor: str
    layer: int | None
    """None for what is no layer: the embedding and the head."""
    snr_db: float
    """Cumulative: after a text on the engine with its own caches."""
    local_db: float
    """By itself: fed the reference's inputs."""
    key_db: float | None = None
    value_db: float | None = None
    recipe_db: float | None = None
    """The reference's block made by the recipe in eager torch, against the original's hidden states."""

    @property
    def measures(self) -> dict[str, float]:
        """Every local measure by what it is of."""
        found = {"hidden": self.local_db, "key": self.key_db, "value": self.value_db}
        return {what: db for what, db in found.items() if db is not None}


@dataclass
class Node:
    """One node of the worst block fed the reference's inputs."""

    node: str
    op: str
    tensor: str
    own_db: float
    """Its own output against the clean node's."""
    effect_db: float
    """What its error alone does to the block's worst output, all the rest computed in float32."""
    largest: float
    """Largest magnitude of the output on the engine."""
    layer: int | None = None
    fused_with: str = ""
    """The neighbours that the compiler computes together with it, as one node and worse than apart; by comma."""
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Its name for a table."""
        return label(self.node, self.fused_with)


@dataclass(frozen=True)
class Finding:
    """The block that is to blame, and why."""

    kind: Kind
    block: int
    """Index into the blocks."""
    what: str
    """Which of its outputs: hidden, key, value."""
    db: float
    typical_db: float
    """Median of the same measure over the other blocks."""


def label(node: str, fused_with: str) -> str:
    """A node and its neighbours in short: /layers.0/mlp/Sigmoid + gate_proj/Gemm, Mul."""
    if not fused_with:
        return node
    names = fused_with.split(", ")
    shared = os.path.commonpath([node, *names]) + "/"
    return f"{node} + {', '.join(name.removeprefix(shared) for name in names)}"


def rows_db(reference: Floats, other: Floats) -> float:
    """SNR in dB in which every row weighs alike: -10 log10 of the mean over rows of noise / signal.

    A row is the last dimension: a position's hidden state, a head's key. One massive position (an attention sink)
    would otherwise be all that is seen. 300 where identical, -300 where not finite.
    """
    r, o = np.asarray(reference, np.float64), np.asarray(other, np.float64)
    if r.shape != o.shape or not np.isfinite(o).all():
        return -SILENT_DB
    r, o = r.reshape(-1, r.shape[-1] if r.ndim else 1), o.reshape(-1, o.shape[-1] if o.ndim else 1)
    signal, noise = np.square(r).sum(1), np.square(r - o).sum(1)
    if not noise.any():
        return SILENT_DB
    # A row of (nearly) nothing has no ratio of its own: it is measured by what rows are like, massive ones aside.
    usual = float(np.median(signal[signal > 0])) if signal.any() else float(np.finfo(float).tiny)
    ratio = float((noise / np.maximum(signal, 1e-6 * usual)).mean())
    return float(np.clip(-10.0 * np.log10(ratio), -SILENT_DB, SILENT_DB))


def limits_of(dtype: str, simulated: bool) -> Limits:
    """The limits for activations of a type; the simulator computes float32 graphs in float16."""
    if dtype == "float32":
        return LIMITS["float16" if simulated else "float32"]
    return LIMITS.get(dtype, LIMITS["quantised"])


def find(blocks: Sequence[Block], limits: Limits) -> Finding:
    """The first block that is at fault, else the one that loses most by itself.

    A fault is a local measure below the floor, or far below the median of the same measure over all layers.
    """
    typical = {what: float(np.median([b.measures[what] for b in blocks if b.layer is not None and what in b.measures]))
               for what in ("hidden", "key", "value") if any(what in b.measures for b in blocks if b.layer is not None)}
    for index, block in enumerate(blocks):
        worst = min(block.measures, key=lambda what: block.measures[what] - typical.get(what, 0.0))
        for what in (worst, *block.measures):
            db = block.measures[what]
            usual = typical.get(what, limits.always_db)
            if db < limits.always_db and (db < limits.floor_db or db < usual - limits.margin_db):
                return Finding("fault", index, what, db, usual)
    index = min(range(len(blocks)), key=lambda i: blocks[i].local_db)
    return Finding("loss", index, "hidden", blocks[index].local_db, typical.get("hidden", 0.0))


def guilty(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that explain the block's error, worst first: those within 3 dB of the worst effect."""
    ranked = sorted(nodes, key=lambda node: node.effect_db)
    return [node for node in ranked if node.effect_db <= ranked[0].effect_db + TIES_DB] if ranked else []


def explained_db(nodes: Sequence[Node]) -> float:
    """The block's SNR in dB if all that its nodes do by themselves simply added up."""
    noise = sum(10.0 ** (-node.effect_db / 10.0) for node in nodes)
    return float(np.clip(-10.0 * np.log10(max(noise, 1e-30)), -SILENT_DB, SILENT_DB))


def stage_of(stages: Sequence[Mapping[str, Any]]) -> str | None:
    """The stage that brings the error in: the first that has half of the last one's noise, by local SNR in dB."""
    if not stages:
        return None
    last = min(stages[-1]["snr_db"], SILENT_DB)
    return str(next(s["stage"] for s in stages if s["snr_db"] <= last + TIES_DB))


def value_notes(name: str, values: np.ndarray) -> list[str]:
    """What the values of one tensor on the engine give away: not finite, near fp16's end, codes at the ends."""
    array = np.asarray(values)
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        share = float(((array == info.min) | (array == info.max)).mean())
        # A tensor's own extremes may touch both ends: one value in a small tensor is no clipping.
        count = int(((array == info.min) | (array == info.max)).sum())
        return [f"{100 * share:.2f} % of its codes are clipped"] if share > CLIPPED_SHARE and count > 2 else []
    bad = int((~np.isfinite(array)).sum())
    if bad:
        return [f"{bad} values are not finite (fp16 ends at 65504)"]
    largest = float(np.abs(array.astype(np.float64)).max(initial=0.0))
    if largest > FP16_NEAR and array.dtype == np.float16:
        return [f"reaches {largest:.0f}, near fp16's 65504"]
    return []


def verdict(blocks: Sequence[Block], found: Finding, nodes: Sequence[Node], stage: str | None,
            alike: Sequence[int] = ()) -> str:  # fmt: skip
    """One line for people. `alike` are other layers whose main loss is the same node."""
    block = blocks[found.block]
    name = block.tensor if found.what == "hidden" else f"new_{found.what}_{block.layer}"
    where = f"layer {block.layer}" if block.layer is not None else block.tensor
    to_blame = guilty(nodes)
    node = f"{to_blame[0].label} ({to_blame[0].op})" if to_blame else ""
    at = f", stage {stage}" if stage else ""
    if found.kind == "fault":
        text = f"{where} is at fault: {name} has {found.db:.1f} dB by itself, {found.typical_db:.1f} is usual{at}"
        return f"{text}; first diverging node: {node}" if node else text
    text = f"no block is at fault; {where} loses most, {found.db:.1f} dB by itself{at}"
    if node:
        text += f"; main loss: {node}"
    if alike:
        text += f", as in layer{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
    apart = explained_db(nodes)
    if nodes and found.db < apart - TIES_DB:
        text += f"; its nodes alone would give {apart:.1f} dB: more of them are computed together"
    return text


def as_json(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """The depth table as plain values."""
    return [dataclasses.asdict(block) for block in blocks]

"""What one decode step of a layer moves and computes, by its shape, precision, context and cache layout.

    layer ─ weights ──────────── read once a step, in the precision's bits
          ─ keys and values ──── read: min(context, window) entries; returned: the new one, or all of them under roll
          ─ multiplications ──── one a weight, and two a key's dim and head

Bytes are what the graph's tensors hold. What a phone's memory really moves is not known from outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringstep.errors import RingstepError, did_you_mean

LAYOUTS = ("ring", "roll", "append", "join")
SCALE_BYTES = 4  # QNN keeps a float32 scale an output channel


@dataclass(frozen=True)
class Precision:
    """Bits of what a step reads."""

    name: str
    weights: int
    head: int
    embedding: int
    cache: int
    timed: int
    """Bits a weight costs in time, by the phone measurements: 4-bit weights took as long as 8-bit ones
    (docs/latency-model.md)."""

    @property
    def scaled(self) -> bool:
        """Whether weights have scales."""
        return self.weights < 16


# The presets of these names in quantize/schemes, without their exceptions.
PRECISIONS = {p.name: p for p in (
    Precision("fp16", 16, 16, 16, 16, timed=16),
    Precision("w8a16", 8, 8, 8, 16, timed=8),
    Precision("w4a16", 4, 8, 8, 16, timed=8),
)}  # fmt: skip


@dataclass(frozen=True)
class LayerShape:
    """Layers of one kind: what the time of one depends on."""

    name: str
    count: int
    weights: int
    """Numbers in its matrices."""
    rows: int
    """Output channels of its matrices: as many scales."""
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    """Leading dims of a head that the rotary turns."""
    window: int | None


@dataclass(frozen=True)
class ModelShape:
    """A model as far as its latency and memory depend on it."""

    label: str
    recipe: str
    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    """One a kind, with its count."""

    @property
    def head_weights(self) -> int:
        """Numbers in the head, and in the embedding table."""
        return self.hidden * self.vocab


@dataclass(frozen=True)
class Cost:
    """One token through a layer or a whole step."""

    layers: int = 0
    weights: int = 0
    """Numbers read."""
    weight_bytes: int = 0
    """As kept, scales included."""
    timed_bytes: int = 0
    """As they cost time: see Precision.timed."""
    kv_read: int = 0
    """Numbers of keys and values that attention reads, the new ones included."""
    kv_returned: int = 0
    """Numbers of keys and values that the graph returns."""
    kv_bytes: int = 0
    """Bytes of both."""
    macs: int = 0
    rotated: int = 0
    """Numbers that the rotary turns."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def precision_named(name: str) -> Precision:
    """A precision by its name. Raises RingstepError for one whose time nobody has measured."""
    if name not in PRECISIONS:
        raise RingstepError(f"no latency is known in precision {name!r}, only in {', '.join(PRECISIONS)}"
                            f"{did_you_mean(name, PRECISIONS)}")  # fmt: skip
    return PRECISIONS[name]


def entries(shape: LayerShape, context: int) -> int:
    """How many keys a query sees in a full cache: a window counts the current token."""
    return context if shape.window is None else min(context, shape.window)


def layer_cost(shape: LayerShape, precision: Precision, context: int, layout: str) -> Cost:
    """One layer, one token, the cache full. `context` in tokens, 0 for a layer without a cache.

    Raises RingstepError for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise RingstepError(f"unknown cache layout {layout!r}{did_you_mean(layout, LAYOUTS)}")
    seen = entries(shape, context)
    entry = 2 * shape.kv_heads * shape.head_dim
    returned = entry * max(1, seen - 1) if layout == "roll" else entry
    return Cost(
        layers=1, weights=shape.weights, weight_bytes=stored(shape.weights, shape.rows, precision.weights),
        timed_bytes=math.ceil(shape.weights * precision.timed / 8), kv_read=entry * seen, kv_returned=returned,
        kv_bytes=math.ceil((entry * seen + returned) * precision.cache / 8),
        macs=shape.weights + 2 * shape.heads * shape.head_dim * seen,
        rotated=(shape.heads + shape.kv_heads) * shape.rotated,
    )  # fmt: skip


def head_cost(model: ModelShape, precision: Precision) -> Cost:
    """The head, one token."""
    weights = model.head_weights
    timed = max(precision.head, precision.timed)
    return Cost(weights=weights, weight_bytes=stored(weights, model.vocab, precision.head),
                timed_bytes=math.ceil(weights * timed / 8), macs=weights)  # fmt: skip


def step_cost(model: ModelShape, precision: Precision, context: int, layouts: dict[str, str]) -> Cost:
    """Every layer and the head; `layouts` by the kinds' names."""
    total = head_cost(model, precision)
    for shape in model.layers:
        one = layer_cost(shape, precision, context, layouts[shape.name])
        total += Cost(*(getattr(one, name) * shape.count for name in Cost.__dataclass_fields__))
    return total


def kv_cache_bytes(model: ModelShape, precision: Precision, context: int) -> int:
    """What the caches hold between steps: context - 1 entries a full layer, window - 1 a sliding one."""
    return sum(
        shape.count * 2 * shape.kv_heads * shape.head_dim * max(0, entries(shape, context) - 1) * precision.cache // 8
        for shape in model.layers
    )


def stored(weights: int, rows: int, bits: int) -> int:
    """Bytes of weights as they are kept, packed, with a scale a row where they are integers."""
    return math.ceil(weights * bits / 8) + (rows * SCALE_BYTES if bits < 16 else 0)

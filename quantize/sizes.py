"""What a quantised model weighs, scales, zeros and steps included: bits a weight as they are, not as they are called.

4 bits in groups of 128 with a 16-bit scale and zero are 4.25 bits a weight. The integers are packed; a block that is
shorter than the others pays for a whole scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantize.grid import Grid
from quantize.parameters import GridOf, parameters
from quantize.scheme import EMBEDDING, HEAD
from recipes.plan import Plan
from ringstep.console import human_bytes


@dataclass(frozen=True)
class Storage:
    """Bits that a format spends beside the numbers. `zero` None: as many as a number has."""

    scale: int = 16
    """A block's, or a row's where it has one; not that of two-level blocks."""
    zero: int | None = 16
    symmetric_zeros: bool = False
    """Whether symmetric weights carry zeros too."""
    filled: bool = False
    """Whether a row's last block is as long as the others."""
    step: int = 8
    """A block's of two-level weights."""
    channel: int = 32
    """A row's scale of two-level weights."""
    floats: int = 16
    """A number that is not quantised."""


PLAIN = Storage()
GPTQ = Storage(zero=None, symmetric_zeros=True)
"""float16 scales, zeros packed like the numbers."""
MATMUL_NBITS = Storage(scale=32, zero=None, floats=32, filled=True)
"""float32 scales beside float32 norms."""
HTP = Storage(scale=32, step=8)
"""float32 scales a channel; uint8 steps a block, as QNN's blockwise expansion takes them."""


@dataclass(frozen=True)
class Size:
    """One parameter."""

    path: str
    shape: tuple[int, ...]
    grid: Grid | None
    """None: floats."""
    bits: float
    """A weight, everything included."""
    bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def grid_name(grid: Grid | None, floats: int = 16) -> str:
    """A grid in a few words: "int4 x 32 two-level", "uint4 x 128" (asymmetric), "int8 a row", "float16"."""
    if grid is None:
        return f"float{floats}"
    name = f"{'' if grid.symmetric else 'u'}int{grid.bits}"
    if grid.block is None:
        return f"{name} a row"
    return f"{name} x {grid.block}{' two-level' if grid.two_level else ''}"


def nbytes(shape: Sequence[int], grid: Grid | None, storage: Storage = PLAIN) -> int:
    """Bytes of a parameter of `shape`, [out, in] where it has a grid."""
    count = math.prod(shape)
    if grid is None:
        return -(-count * storage.floats // 8)
    outputs, inputs = shape
    blocks = outputs * grid.blocks(inputs)
    parts = [(blocks * (grid.block or inputs) if storage.filled else count) * grid.bits]
    if grid.two_level:
        parts += [blocks * storage.step, outputs * storage.channel]
    else:
        parts.append(blocks * storage.scale)
    if not grid.symmetric or storage.symmetric_zeros:
        parts.append(blocks * (grid.bits if storage.zero is None else storage.zero))
    return sum(-(-bits // 8) for bits in parts)


def sizes(plan: Plan, grid_of: GridOf, storage: Storage = PLAIN, *, shared_head: bool = False) -> list[Size]:
    """The size of every parameter in the model's order; norms, whose grids are not asked for, are floats.

    `shared_head`: a tied head is no copy of its own, because the file holds embedding and head once.
    """
    found = []
    for path, source in parameters(plan).items():
        shape = source.out_shape
        if path == HEAD and shared_head and plan.head == plan.embedding:
            continue
        grid = grid_of(path) if len(shape) == 2 else None
        size = nbytes(shape, grid, storage)
        found.append(Size(path, shape, grid, 8 * size / math.prod(shape), size))
    return found


COLUMNS = ("parameters", "weights", "stored as", "bits a weight", "bytes")


def rows(found: Sequence[Size]) -> list[tuple[str, str, str, str, str]]:
    """Rows for console.table under COLUMNS: alike parameters of all layers in one row, sums last."""
    groups: dict[tuple[str, str], list[Size]] = {}
    for size in found:
        name = size.path.split(".", 2)[2] if size.path.startswith("layers.") else size.path
        groups.setdefault((name, grid_name(size.grid, int(size.bits))), []).append(size)
    made = []
    for (name, stored), members in groups.items():
        label = f"{name} ({len(members)})" if members[0].path.startswith("layers.") else name
        made.append(_row(label, stored, members))
    inside = [size for size in found if size.path not in (EMBEDDING, HEAD)]
    return [*made, _row("layers and norms", "", inside), _row("all", "", found)]


def _row(label: str, stored: str, members: Sequence[Size]) -> tuple[str, str, str, str, str]:
    count, total = sum(size.elements for size in members), sum(size.bytes for size in members)
    return label, f"{count:,}", stored, f"{8 * total / count:.3f}", human_bytes(total)


def as_json(found: Sequence[Size], storage: Storage = PLAIN) -> dict[str, Any]:
    """The table as plain values: every parameter, the sums, and what a scale, zero and step were counted as."""
    count, total = sum(size.elements for size in found), sum(size.bytes for size in found)
    return {
        "parameters": [
            {"path": s.path, "shape": list(s.shape), "stored": grid_name(s.grid, int(s.bits)), "bits": s.bits,
             "bytes": s.bytes}
            for s in found
        ],
        "weights": count, "bytes": total, "bits": 8 * total / count, "storage_bits": asdict(storage),
    }  # fmt: skip

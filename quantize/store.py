"""The file of quantised weights: every weight once, for decode and every prefill chunk alike.

quantised.bin holds integers and scales, each starting at a multiple of 64 bytes; quantised.json says where, by the
parameter's name. int4 is packed two a byte, the lower half first, as ONNX stores it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantize.grid import Grid, QuantisedWeight
from quantize.pack import pack
from ringstep.errors import RingstepError

DATA, INDEX = "quantised.bin", "quantised.json"
ALIGN = 64


@dataclass(frozen=True)
class Place:
    """Where an array lies: `offset` bytes into `file`."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    """numpy's name, or int4."""


@dataclass(frozen=True)
class Stored:
    """A weight [out, in] in the file."""

    grid: Grid
    shape: tuple[int, int]
    q: Place
    scale: Place
    """[out]: of each channel; two-level: what its steps are times."""
    steps: Place | None = None
    """Two-level: uint8 [in / block, out], 1 to 15."""


class Writer:
    """Appends weights to a file; `index` gathers where they lie."""

    def __init__(self, file: BinaryIO, name: str = DATA) -> None:
        self.file, self.name = file, name
        self.index: dict[str, Stored] = {}

    def array(self, values: np.ndarray, dtype: str = "") -> Place:
        """Append an array in row-major order; `dtype` int4 packs it."""
        self.file.write(b"\0" * (-self.file.tell() % ALIGN))
        place = Place(self.name, self.file.tell(), values.shape, dtype or str(values.dtype))
        packed = pack(values.reshape(-1), 4, signed=True) if dtype == "int4" else np.ascontiguousarray(values)
        self.file.write(packed.tobytes())
        return place

    def weight(self, name: str, weight: QuantisedWeight) -> Stored:
        """Append a symmetric weight [out, in] of 4, 8 or 16 bits."""
        grid = weight.grid
        if not grid.symmetric or (grid.block is not None and not grid.two_level):
            raise RingstepError(f"tensor {name}: HTP takes symmetric weights, per channel or in two-level blocks")
        shape = (weight.q.shape[0], weight.q.shape[1])
        if grid.two_level:
            assert weight.steps is not None and weight.channel_scale is not None
            q = self.array(weight.q, "int4")
            stored = Stored(grid, shape, q, self.array(weight.channel_scale), self.array(weight.steps.T))
        else:
            q = self.array(weight.q, "int4" if grid.bits == 4 else "")
            stored = Stored(grid, shape, q, self.array(weight.scale.reshape(-1)))
        self.index[name] = stored
        return stored


def save_index(path: Path, index: dict[str, Stored]) -> None:
    """Write where each weight lies, as JSON."""
    path.write_text(json.dumps({name: asdict(stored) for name, stored in index.items()}, indent=0) + "\n")


def load_index(path: Path) -> dict[str, Stored]:
    """Read what save_index wrote."""

    def place(body: Any) -> Place | None:
        return None if body is None else Place(body["file"], body["offset"], tuple(body["shape"]), body["dtype"])

    found = {}
    for name, body in json.loads(path.read_text()).items():
        q, scale = place(body["q"]), place(body["scale"])
        assert q is not None and scale is not None
        shape = (body["shape"][0], body["shape"][1])
        found[name] = Stored(Grid(**body["grid"]), shape, q, scale, place(body["steps"]))
    return found

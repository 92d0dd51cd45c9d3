"""The file of quantised weights: every weight once, for decode and every prefill chunk alike.

quantised.bin holds integers and scales, each starting at a multiple of 64 bytes; quantised.json says where, by the
parameter's name. int4 is packed two a byte, the lower half first, as ONNX stores it; 2 and 3 bits likewise
(quantize/pack.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantize.grid import Grid, QuantisedWeight
from quantize.pack import pack, unpack
from ringstep.encoding import mapped
from ringstep.errors import RingstepError
from ringstep.files import read_text

DATA, INDEX = "quantised.bin", "quantised.json"
ALIGN = 64
PACKED = (2, 3, 4)


@dataclass(frozen=True)
class Place:
    """Where an array lies: `offset` bytes into `file`."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    """numpy's name, or what is packed: int4, uint4, int3, ..."""


@dataclass(frozen=True)
class Stored:
    """A weight [out, in] in the file."""

    grid: Grid
    shape: tuple[int, int]
    q: Place
    scale: Place
    """[out] where a row has one scale, and of two-level weights: what their steps are times. Else [out, blocks]."""
    steps: Place | None = None
    """Two-level: uint8 [in / block, out], 1 to 15."""
    zero: Place | None = None
    """Asymmetric: [out, blocks], one number an element."""


class Writer:
    """Appends weights to a file; `index` gathers where they lie."""

    def __init__(self, file: BinaryIO, name: str = DATA) -> None:
        self.file, self.name = file, name
        self.index: dict[str, Stored] = {}

    def array(self, values: np.ndarray, bits: int = 0) -> Place:
        """Append an array in row-major order; integers of 2, 3 or 4 `bits` are packed and called int4, uint3, ..."""
        self.file.write(b"\0" * (-self.file.tell() % ALIGN))
        if bits in PACKED:
            signed = values.dtype.kind == "i"
            place = Place(self.name, self.file.tell(), values.shape, f"{'' if signed else 'u'}int{bits}")
            self.file.write(pack(values.reshape(-1), bits, signed=signed).data)
        else:
            place = Place(self.name, self.file.tell(), values.shape, str(values.dtype))
            self.file.write(np.ascontiguousarray(values).data)
        return place

    def weight(self, name: str, weight: QuantisedWeight) -> Stored:
        """Append a weight."""
        grid, (outputs, inputs) = weight.grid, weight.q.shape
        q = self.array(weight.q, grid.bits)
        steps = zero = None
        if grid.two_level:
            assert weight.steps is not None and weight.channel_scale is not None
            scale = self.array(weight.channel_scale)
            steps = self.array(weight.steps.T)
        else:
            scale = self.array(weight.scale if grid.block is not None else weight.scale.reshape(-1))
        if weight.zero is not None:
            zero = self.array(weight.zero)
        self.index[name] = Stored(grid, (outputs, inputs), q, scale, steps, zero)
        return self.index[name]


def weight_at(folder: Path, stored: Stored) -> QuantisedWeight:
    """The weight that a Writer stored in `folder`; what is not packed is mapped, not read.

    Raises RingstepError where a file is missing or too short, and for numbers that are not those of the grid.
    """
    grid, outputs = stored.grid, stored.shape[0]
    q, scale = array_at(folder, stored.q), array_at(folder, stored.scale)
    if q.dtype != grid.dtype or q.shape != stored.shape:
        raise RingstepError(f"{folder / stored.q.file}: {stored.q.dtype} {list(q.shape)} where {grid} belongs")
    if stored.steps is not None:
        steps = np.ascontiguousarray(array_at(folder, stored.steps).T)
        return QuantisedWeight(grid, q, steps * scale[:, None], None, steps, scale)
    zero = None if stored.zero is None else array_at(folder, stored.zero)
    return QuantisedWeight(grid, q, scale.reshape(outputs, -1), zero)


def array_at(folder: Path, place: Place) -> np.ndarray:
    """The array of a place: mapped read-only, or a copy where it is packed."""
    path, count = folder / place.file, math.prod(place.shape)
    bits = next((bits for bits in PACKED if place.dtype in (f"int{bits}", f"uint{bits}")), 0)
    try:
        if bits:
            raw = mapped(path, "uint8", place.offset, (-(-count * bits // 8),))
            return unpack(np.asarray(raw), bits, count, signed=place.dtype.startswith("i")).reshape(place.shape)
        return np.asarray(mapped(path, place.dtype, place.offset, place.shape))
    except RingstepError as error:
        raise RingstepError(f"{error}; quantise again") from None


def save_index(path: Path, index: dict[str, Stored]) -> None:
    """Write where each weight lies, as JSON."""
    path.write_text(json.dumps({name: asdict(stored) for name, stored in index.items()}, indent=0) + "\n")


def load_index(path: Path) -> dict[str, Stored]:
    """Read what save_index wrote. Raises RingstepError for anything else."""
    found = {}
    try:
        for name, body in json.loads(read_text(path)).items():
            q, scale, steps, zero = (_place(body[key]) for key in ("q", "scale", "steps", "zero"))
            outputs, inputs = _whole(body["shape"])
            if q is None or scale is None:
                raise ValueError(f"{name} has no numbers")
            found[name] = Stored(Grid(**body["grid"]), (outputs, inputs), q, scale, steps, zero)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise RingstepError(f"{path}: no index of rounded weights ({reason}); quantise again") from None
    return found


def _place(body: Any) -> Place | None:
    if body is None:
        return None
    (offset,) = _whole([body["offset"]])
    if Path(body["file"]).name != body["file"]:
        raise ValueError(f"{body['file']} is no file beside it")
    return Place(body["file"], offset, _whole(body["shape"]), str(body["dtype"]))


def _whole(values: Any) -> tuple[int, ...]:
    """Sizes and offsets."""
    if not all(type(value) is int and 0 <= value < 1 << 56 for value in values):
        raise ValueError(f"{values} are no sizes")
    return tuple(values)

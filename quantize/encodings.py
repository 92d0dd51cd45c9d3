"""Encodings of weights and activations as AIMET writes them for Qualcomm's converters: JSON, format version 1.0.0.

    {"version": "1.0.0", "activation_encodings": [{"name": "x", "enc_type": "PER_TENSOR", ...}],
     "param_encodings": [{"name": "w", "enc_type": "LPBQ", ...}]}

real = scale * (q + offset), q counted from 0: a number of b bits that is signed here (is_sym) has the offset -2^(b-1).
Lists of blocks run over the blocks of the first output channel, then the second's. LPBQ gives the
float scale of a channel, per_block_int_scale the steps, compressed_bw the bits of a weight and bw twice as many.
Checked against what aimet-onnx 2.42.0 exports and loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantize.activations import Activation
from quantize.grid import BITS, Grid, QuantisedWeight
from ringstep.contract import INTEGERS, Encoding
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import new_file, ordinary_size
from ringstep.tensor_file import parse_json

VERSION = "1.0.0"
MAX_BYTES = 2 << 30  # 50 times SmolLM2's in blocks of 32; a JSON of more is no encodings file
FIELDS = {
    "PER_TENSOR": {"scale", "offset"},
    "PER_CHANNEL": {"scale", "offset"},
    "PER_BLOCK": {"scale", "offset", "block_size"},
    "LPBQ": {"scale", "offset", "block_size", "compressed_bw", "per_block_int_scale"},
}
COMMON = {"name", "dtype", "bw", "is_sym", "enc_type"}


@dataclass(frozen=True)
class WeightEncoding:
    """What a QuantisedWeight [out, in] is besides its numbers; see there."""

    grid: Grid
    scale: NDArray[np.float32]
    zero: NDArray[Any] | None = None
    steps: NDArray[np.uint8] | None = None
    channel_scale: NDArray[np.float32] | None = None


Weights = Iterable[tuple[str, QuantisedWeight | WeightEncoding | None]]
Activations = Mapping[str, Activation | None]


def write_encodings(path: Path, activations: Activations, weights: Weights) -> None:
    """Write the encodings of tensors by name; None: the tensor stays in float16.

    `weights` is walked once and nothing of it kept, so it may read one weight at a time. Raises RingstepError for a
    name given twice, scales that are not finite and positive, and when the file cannot be written.
    """
    seen: set[str] = set()
    with new_file(path) as file:
        put = lambda text: file.write(text.encode("utf-8"))
        put(f'{{"version": "{VERSION}",\n "activation_encodings": [')
        for at, (name, activation) in enumerate(activations.items()):
            _once(name, seen)
            put((",\n  " if at else "\n  ") + "".join(_entry(name, _activation(name, activation))))
        put('],\n "param_encodings": [')
        for at, (name, weight) in enumerate(weights):
            _once(name, seen)
            put(",\n  " if at else "\n  ")
            for text in _entry(name, _weight(name, weight)):
                put(text)
        put("]}\n")


def _once(name: str, seen: set[str]) -> None:
    if name in seen:
        raise RingstepError(f"tensor {name!r} has two encodings")
    seen.add(name)


FLOAT: dict[str, Any] = {"dtype": "FLOAT", "bw": 16, "enc_type": "PER_TENSOR", "is_sym": False}


def _activation(name: str, activation: Activation | None) -> dict[str, Any]:
    if activation is None:
        return FLOAT
    low, high = INTEGERS[activation.dtype]
    scale, zero = activation.encoding.scale, activation.encoding.zero
    if not (np.isfinite(scale) and scale > 0 and low <= zero <= high):
        raise RingstepError(f"tensor {name!r}: scale {scale} and zero {zero} are no encoding of {activation.dtype}")
    return {
        # Signed and not symmetric, is_sym would say too much: the same numbers counted from 0.
        "dtype": "INT", "bw": (high - low).bit_length(), "enc_type": "PER_TENSOR", "is_sym": low < 0 and zero == 0,
        "scale": np.array([scale]), "offset": np.array([low - zero]),
    }  # fmt: skip


def _weight(name: str, weight: QuantisedWeight | WeightEncoding | None) -> dict[str, Any]:
    if weight is None:
        return FLOAT
    grid = weight.grid
    if not (np.isfinite(weight.scale).all() and (weight.scale > 0).all()):
        raise RingstepError(f"tensor {name!r}: a scale is not finite and positive")
    fields: dict[str, Any] = {"dtype": "INT", "bw": grid.bits, "is_sym": grid.symmetric}
    if grid.two_level:
        assert weight.steps is not None and weight.channel_scale is not None, name
        bits = 2 * grid.bits
        offset = np.full(len(weight.channel_scale), -(1 << bits - 1))
        return fields | {
            "enc_type": "LPBQ", "bw": bits, "compressed_bw": grid.bits, "block_size": grid.block,
            "scale": weight.channel_scale, "offset": offset, "per_block_int_scale": weight.steps,
        }  # fmt: skip
    zero = np.full(weight.scale.size, 1 << grid.bits - 1) if weight.zero is None else weight.zero.astype(np.int64)
    kind = {"enc_type": "PER_CHANNEL"} if grid.block is None else {"enc_type": "PER_BLOCK", "block_size": grid.block}
    return fields | kind | {"scale": weight.scale, "offset": -zero}


def _entry(name: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """One JSON object, its lists in pieces."""
    plain = {key: value for key, value in fields.items() if not isinstance(value, np.ndarray)}
    yield json.dumps({"name": name} | plain)[:-1]
    for key, values in fields.items():
        if not isinstance(values, np.ndarray):
            continue
        flat = values.reshape(-1)
        yield f', "{key}": ['
        for start in range(0, flat.size, 1 << 16):
            # str of a numpy float32 is the shortest text that reads back as the same float32.
            yield (", " if start else "") + ", ".join(map(str, flat[start : start + (1 << 16)]))
        yield "]"
    yield "}"


def read_encodings(
    path: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Activation | None], dict[str, WeightEncoding | None]]:
    """Read encodings back: activations and weights by name; `shapes` gives every weight's [out, in].

    An activation that was signed and not symmetric comes back unsigned with the same real numbers. Raises
    RingstepError naming file, tensor and field for anything unknown, missing, of another type, count or range.
    """
    try:
        if ordinary_size(path) > MAX_BYTES:
            raise RingstepError(f"{path} is larger than any encodings file; is it the right file?")
        body = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise RingstepError(f"{path} cannot be read: {error.strerror or error}") from None
    if body.get("version") != VERSION:
        raise RingstepError(f"{path}: version {str(body.get('version'))[:40]!r} is not supported, only {VERSION!r}")
    activations: dict[str, Activation | None] = {}
    weights: dict[str, WeightEncoding | None] = {}
    for section in ("activation_encodings", "param_encodings"):
        entries = body.get(section)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise RingstepError(f"{path}: {section} is missing or no list of objects")
        for at, entry in enumerate(entries):
            name = entry.get("name")
            if not isinstance(name, str) or not name:
                raise RingstepError(f"{path}: {section}[{at}] has no name")
            where = f"{path}: tensor {name!r}"
            if name in activations or name in weights:
                raise RingstepError(f"{where} has two encodings")
            if section == "activation_encodings":
                activations[name] = _read_activation(entry, where)
                continue
            if name not in shapes:
                raise RingstepError(f"{where} is no weight of this model{did_you_mean(name, shapes)}")
            weights[name] = _read_weight(entry, shapes[name], where)
    return activations, weights


def _kind(entry: dict[str, Any], where: str, allowed: tuple[str, ...]) -> str | None:
    """The enc_type of an entry whose fields are complete and known; None for one that stays in float16."""
    kind, dtype = entry.get("enc_type"), entry.get("dtype")
    if dtype == "FLOAT":
        if entry.get("bw") != 16:
            raise RingstepError(f"{where}: float of {entry.get('bw')!r} bits is not supported, only 16")
        return None
    if dtype != "INT":
        raise RingstepError(f"{where}: dtype {str(dtype)[:40]!r} is not supported, only 'INT' and 'FLOAT'")
    if not isinstance(kind, str) or kind not in allowed:
        raise RingstepError(f"{where}: enc_type {str(kind)[:40]!r} is not supported here, only {', '.join(allowed)}")
    wanted = COMMON | FIELDS[kind]
    for name in sorted(wanted - entry.keys()):
        raise RingstepError(f"{where}: field {name!r} is missing")
    for name in sorted(entry.keys() - wanted):
        raise RingstepError(f"{where}: field {name!r} is unknown{did_you_mean(name, wanted)}")
    if not isinstance(entry["is_sym"], bool):
        raise RingstepError(f"{where}: is_sym is {str(entry['is_sym'])[:40]!r}, not true or false")
    return kind


def _read_activation(entry: dict[str, Any], where: str) -> Activation | None:
    if _kind(entry, where, ("PER_TENSOR",)) is None:
        return None
    (scale,), (offset,) = _scales(entry, 1, where), _whole(entry, "offset", 1, where)
    bits = _bits(entry, "bw", (8, 16), where)
    low = -(1 << bits - 1) if entry["is_sym"] else 0
    zero = low - int(offset)
    if not low <= zero < low + (1 << bits):
        raise RingstepError(f"{where}: offset {int(offset)} is out of range for {bits} bits")
    dtype: Any = f"{'' if low else 'u'}int{bits}"
    return Activation(dtype, Encoding(float(scale), zero))


def _read_weight(entry: dict[str, Any], shape: tuple[int, ...], where: str) -> WeightEncoding | None:
    kind = _kind(entry, where, ("PER_CHANNEL", "PER_BLOCK", "LPBQ"))
    if kind is None:
        return None
    outputs, inputs = shape
    two_level = kind == "LPBQ"
    bits = _bits(entry, "compressed_bw" if two_level else "bw", BITS, where)
    if two_level and entry["bw"] != 2 * bits:
        raise RingstepError(f"{where}: bw {entry['bw']!r} is not twice compressed_bw {bits}")
    block = None if kind == "PER_CHANNEL" else entry["block_size"]
    if block is not None and (type(block) is not int or block < 1):
        raise RingstepError(f"{where}: block_size {str(block)[:40]!r} is no whole number from 1 on")
    symmetric: bool = entry["is_sym"]
    if two_level and not symmetric:
        raise RingstepError(f"{where}: is_sym is false, which LPBQ cannot be")
    grid = Grid(bits, symmetric, block, two_level)
    blocks = grid.blocks(inputs)
    count = outputs if two_level else outputs * blocks
    scale = _scales(entry, count, where).astype(np.float32)
    offset = _whole(entry, "offset", count, where)
    if symmetric:
        base = -(1 << (2 * bits if two_level else bits) - 1)
        if (offset != base).any():
            raise RingstepError(f"{where}: an offset is {int(offset[offset != base][0])}; symmetric means {base}")
    if two_level:
        steps = _whole(entry, "per_block_int_scale", outputs * blocks, where).reshape(outputs, blocks)
        # AIMET uses 16 too, which this package never writes (quantize.grid.STEPS).
        if ((steps < 1) | (steps > 1 << bits)).any():
            raise RingstepError(f"{where}: a per_block_int_scale is not in 1 to {1 << bits}")
        small = steps.astype(np.uint8)
        return WeightEncoding(grid, small * scale[:, None], None, small, scale)
    if symmetric:
        return WeightEncoding(grid, scale.reshape(outputs, blocks))
    if ((offset > 0) | (offset < -grid.high)).any():
        raise RingstepError(f"{where}: an offset is not in {-grid.high} to 0")
    return WeightEncoding(grid, scale.reshape(outputs, blocks), (-offset).reshape(outputs, blocks).astype(grid.dtype))


def _bits(entry: dict[str, Any], field: str, allowed: tuple[int, ...], where: str) -> int:
    value = entry[field]
    if type(value) is not int or value not in allowed:
        raise RingstepError(f"{where}: {field} {str(value)[:40]!r} is not one of {', '.join(map(str, allowed))}")
    return value


def _list(entry: dict[str, Any], field: str, count: int, where: str) -> NDArray[np.float64]:
    values = entry[field]
    if not isinstance(values, list) or len(values) != count:
        have = f"{len(values)} values" if isinstance(values, list) else "no list"
        raise RingstepError(f"{where}: {field} has {have}, its shape needs {count}")
    if not all(type(value) in (int, float) for value in values):
        raise RingstepError(f"{where}: {field} holds something that is no number")
    try:
        return np.array(values, np.float64)
    except OverflowError:
        raise RingstepError(f"{where}: {field} holds a number beyond float64") from None


def _scales(entry: dict[str, Any], count: int, where: str) -> NDArray[np.float64]:
    scale = _list(entry, "scale", count, where)
    with np.errstate(over="ignore"):
        narrow = scale.astype(np.float32)
    if not (np.isfinite(narrow).all() and (narrow > 0).all()):
        raise RingstepError(f"{where}: a scale is not a finite positive float32")
    return scale


def _whole(entry: dict[str, Any], field: str, count: int, where: str) -> NDArray[np.int64]:
    # AIMET writes offsets as floats.
    values = _list(entry, field, count, where)
    if not ((np.abs(values) < 1 << 53) & (values == np.rint(values))).all():
        raise RingstepError(f"{where}: {field} holds something that is no whole number")
    return values.astype(np.int64)

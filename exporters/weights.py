"""The weight file of an artifact: every parameter once, in the checkpoint's layout, written piece by piece.

weights.bin holds the layers and an untied head, embedding.bin the table [vocab, hidden] that the host looks
rows up in (and that a tied head shares); index.json says where each parameter lies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipes.plan import Plan, Source
from recipes.step import head_sources
from ringstep.checkpoint import Checkpoint
from ringstep.contract import DTYPE_BYTES, DType
from ringstep.errors import RingstepError

ALIGN = 4096  # the page size ONNX advises for mapping external data
PIECE_BYTES = 8 << 20  # the float32 size of what is converted at a time: peak memory is a few of these


@dataclass(frozen=True)
class Placed:
    """Where a parameter lies: `offset` bytes into `file`, row-major."""

    file: str
    offset: int
    shape: tuple[int, ...]


def key(source: Source) -> str:
    """A parameter's name in the index: the checkpoint tensor's, with the rows where it is a part of one."""
    return source.name if source.rows is None else f"{source.name}[{source.rows[0]}:{source.rows[1]}]"


def sources(plan: Plan) -> Iterator[Source]:
    """Every distinct parameter of the model, table first, then in the order the step uses them."""
    seen = set()
    layers = [source for i in range(len(plan.layers)) for source in plan.layer_sources(i).values()]
    for source in [plan.embedding, *layers, *head_sources(plan).values()]:
        if key(source) not in seen:
            seen.add(key(source))
            yield source


def pieces(checkpoint: Checkpoint, source: Source) -> Iterator[np.ndarray]:
    """The parameter in float32, a few rows at a time."""
    start, stop = source.rows or (0, source.shape[0])
    step = max(1, PIECE_BYTES // max(4, 4 * int(np.prod(source.shape[1:]))))
    for at in range(start, stop, step):
        piece = np.asarray(checkpoint.read(source.name, (at, min(stop, at + step)))).astype(np.float32, copy=False)
        yield piece + np.float32(source.add) if source.add else piece


def read(checkpoint: Checkpoint, source: Source) -> np.ndarray:
    """The whole parameter in float32 (a new array)."""
    out = np.empty(source.out_shape, np.float32)
    at = 0
    for piece in pieces(checkpoint, source):
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out


def write_weights(checkpoint: Checkpoint, plan: Plan, dtype: DType, folder: Path, tick: Any = None) -> int:
    """Write weights.bin, embedding.bin and index.json into `folder`; return the bytes written.

    `tick(bytes)` is called as parameters are written. Raises RingstepError naming a tensor with values that are
    not finite, or that float16 cannot hold.
    """
    index: dict[str, Any] = {}
    total = 0
    with open(folder / "weights.bin", "wb") as weights, open(folder / "embedding.bin", "wb") as table:
        for source in sources(plan):
            is_table = source == plan.embedding
            file = table if is_table else weights
            file.write(b"\0" * (-file.tell() % ALIGN))
            index[key(source)] = asdict(Placed(Path(file.name).name, file.tell(), source.out_shape))
            for piece in pieces(checkpoint, source):
                total += _write(file, piece, dtype, source)
                if tick:
                    tick(piece.size * DTYPE_BYTES[dtype])
    (folder / "index.json").write_text(json.dumps({"dtype": dtype, "parameters": index}, indent=0) + "\n")
    return total


def _write(file: BinaryIO, piece: np.ndarray, dtype: DType, source: Source) -> int:
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(piece, dtype)
    # A sum is finite unless something in it is not, and costs a fraction of isfinite's temporary.
    if not np.isfinite(stored.sum(dtype=np.float64)):
        what = "values that are not finite" if not np.isfinite(piece).all() else "values beyond float16's 65504"
        raise RingstepError(f"tensor {source.name}: {what}; use --precision fp32, or mend the checkpoint")
    file.write(stored.data)
    return stored.nbytes


def load_index(folder: Path) -> dict[str, Placed]:
    """Read index.json."""
    body = json.loads((folder / "index.json").read_text())
    return {name: Placed(p["file"], p["offset"], tuple(p["shape"])) for name, p in body["parameters"].items()}

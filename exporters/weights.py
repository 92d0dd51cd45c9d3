"""The weight file of an artifact: every parameter once, in the checkpoint's layout, written piece by piece.

weights.bin holds the layers and an untied head, embedding.bin the table [vocab, hidden] that the host looks
rows up in (and that a tied head shares); index.json says where each parameter lies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipes.plan import Plan, Source
from recipes.weights import key, pieces, sources
from ringstep.checkpoint import Checkpoint
from ringstep.contract import DTYPE_BYTES, DType
from ringstep.errors import RingstepError

Pieces = Callable[[Source], Iterable[np.ndarray]]
ALIGN = 4096  # the page size ONNX advises for mapping external data


@dataclass(frozen=True)
class Placed:
    """Where a parameter lies: `offset` bytes into `file`, row-major."""

    file: str
    offset: int
    shape: tuple[int, ...]


def write_weights(checkpoint: Checkpoint, plan: Plan, dtype: DType, folder: Path, tick: Any = None,
                  matrices: Collection[str] | None = None, read: Pieces | None = None) -> int:  # fmt: skip
    """Write weights.bin, embedding.bin and index.json into `folder`; return the bytes written.

    `tick(bytes)` is called as parameters are written. The places of other matrices than `matrices` (by key; None: all)
    are holes, which read as zeros and take no room: enough for a graph whose weights will be others. `read` stands
    in for the checkpoint. Raises RingstepError naming a tensor with values that are not finite, or that float16 cannot
    hold.
    """
    index: dict[str, Any] = {}
    total = 0
    with open(folder / "weights.bin", "wb") as weights, open(folder / "embedding.bin", "wb") as table:
        for source in sources(plan):
            is_table = source == plan.embedding
            file = table if is_table else weights
            file.write(b"\0" * (-file.tell() % ALIGN))
            index[key(source)] = asdict(Placed(Path(file.name).name, file.tell(), source.out_shape))
            if matrices is not None and len(source.out_shape) > 1 and key(source) not in matrices:
                file.truncate(file.tell() + int(np.prod(source.out_shape)) * DTYPE_BYTES[dtype])
                file.seek(0, 2)
                continue
            for piece in read(source) if read else pieces(checkpoint, source):
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

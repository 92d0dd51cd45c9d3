"""The embedding table, a scale a row, written a few rows at a time; a tied head on the same grid is this table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quantize.grid import Grid
from quantize.rounding import nearest
from quantize.store import ALIGN, Place, Stored
from recipes.plan import Plan
from recipes.weights import key
from ringstep.contract import EmbeddingSpec
from ringstep.errors import RingstepError

FILE = "embedding.bin"


def unreadable(grid: Grid | None) -> str:
    """Why a host cannot read rows of a table on this grid; "" where it can."""
    if grid is not None and (grid.bits not in (8, 16) or not grid.symmetric or grid.block is not None):
        return "hosts read symmetric rows of 8 or 16 bits with one scale; change [embedding]"
    return ""


def write_table(pieces: Iterable[np.ndarray], plan: Plan, grid: Grid | None, folder: Path,
                ) -> tuple[EmbeddingSpec, Stored | None, float]:  # fmt: skip
    """Write the table, which comes as `pieces` of rows, as embedding.bin into `folder`.

    Integers [vocab, hidden], then float32 scales [vocab]; float16 without a grid.

    Returns its contract (paths as in an artifact), the same as a weight, and the largest element's size.
    Raises RingstepError for a grid the host cannot read rows of, and for values that are not finite or beyond float16.
    """
    name = key(plan.embedding)
    if reason := unreadable(grid):
        raise RingstepError(f"embedding: {reason}")
    largest, scales = 0.0, []
    shape = (plan.vocab, plan.hidden)
    with open(folder / FILE, "wb") as file:
        for piece in pieces:
            if not np.isfinite(piece.sum(dtype=np.float64)):
                raise RingstepError(f"tensor {name}: values that are not finite; mend the checkpoint")
            largest = max(largest, float(np.abs(piece).max()))
            if grid is None:
                file.write(piece.astype(np.float16).data)
                continue
            made = nearest.quantise(piece, grid)
            file.write(np.ascontiguousarray(made.q).data)
            scales.append(made.scale.reshape(-1))
        if grid is None:
            if largest > np.finfo(np.float16).max:
                raise RingstepError(f"tensor {name}: values beyond float16's 65504; quantise the embedding")
            return EmbeddingSpec(f"onnx/{FILE}", 0, shape, "float16"), None, largest
        at = write_aligned(file, np.concatenate(scales))
    dtype = str(grid.dtype)
    stored = Stored(grid, shape, Place(FILE, 0, shape, dtype), Place(FILE, at, (plan.vocab,), "float32"))
    return EmbeddingSpec(f"onnx/{FILE}", 0, shape, dtype, at), stored, largest  # type: ignore[arg-type]


def write_aligned(file: BinaryIO, values: np.ndarray) -> int:
    """Append an array at a multiple of ALIGN bytes; returns where."""
    file.write(b"\0" * (-file.tell() % ALIGN))
    at = file.tell()
    file.write(np.ascontiguousarray(values).data)
    return at

"""Embedding tables for Qualcomm Genie: a bare row-major file of integers, and the argument that says what they mean.

genie-t2t-run takes `-t PATH,TYPE,SCALE,OFFSET` with TYPE one of int8, uint8, int16, uint16, no header in the file, and
real = SCALE * (q + OFFSET). A looked-up row goes into the graph's input by dst = factor * src + shift with
factor = S_table / S_input and shift = factor * Z_table - Z_input, Z being the offsets; both must be signed, or neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantize.activations import Activation, from_range
from quantize.parameters import Pieces
from recipes.plan import Plan
from ringstep.contract import INTEGERS
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import new_file

BINS = 8192  # of the histogram that a clipped range is searched on
Tick = Callable[[float], None]


@dataclass(frozen=True)
class Table:
    """A quantised embedding table [vocab, hidden] in a file."""

    file: Path
    shape: tuple[int, int]
    activation: Activation
    snr_db: float
    """Of the table itself against its floats; 300 where nothing is lost."""
    low: float
    high: float
    """What the floats reach."""

    def argument(self) -> str:
        """PATH,TYPE,SCALE,OFFSET; RingstepError for a path with a comma, which Genie would cut."""
        if "," in str(self.file):
            raise RingstepError(f"{self.file}: Genie takes a comma for the end of the path; rename it")
        encoding = self.activation.encoding
        # 9 digits are what a float32 needs to be read back as it was.
        return f"{self.file},{self.activation.dtype},{encoding.scale:.9g},{-encoding.zero}"


@dataclass(frozen=True)
class Requantisation:
    """From a table's integers to the input's: dst = factor * src + shift, rounded and kept in the type's range."""

    factor: float
    shift: float
    source: str
    target: str

    def apply(self, q: NDArray[np.integer]) -> NDArray[np.integer]:
        """What Genie feeds for integers of the table."""
        low, high = INTEGERS[self.target]
        return np.clip(np.rint(self.factor * q + self.shift), low, high).astype(self.target)


def write_table(
    plan: Plan, pieces: Pieces, file: Path, dtype: str = "uint16", *, clip: bool = False, tick: Tick = lambda _: None
) -> Table:
    """Quantise the embedding, times the model's embedding scale, into `file`.

    The range is the table's own, or with `clip` the one of least squared error, which helps 8 bits where few values lie
    far out (SmolLM2's table in uint8: 33.0 dB instead of 29.9). `pieces` is walked twice (with `clip` three times), a
    few rows in memory at a time; `tick` is told the bytes written. Raises RingstepError naming the tensor for another
    type, values that are not finite, and when the file cannot be written.
    """
    if dtype not in INTEGERS:
        hint = did_you_mean(dtype, INTEGERS)
        raise RingstepError(f"an embedding table of {dtype!r}: Genie knows {', '.join(INTEGERS)}{hint}")
    shape, name = plan.embedding.out_shape, plan.embedding.name
    rows = lambda: (piece * np.float32(plan.embedding_scale) for piece in pieces(plan.embedding))
    low, high, count = _reach(rows(), name)
    if count != math.prod(shape):
        raise RingstepError(f"tensor {name}: {count} values where {list(shape)} belong")
    bottom, top = INTEGERS[dtype]
    span = _clipped(rows(), low, high, top - bottom) if clip else (low, high)
    activation = from_range(*span, dtype, symmetric=False)  # type: ignore[arg-type]
    scale, zero = np.float32(activation.encoding.scale), activation.encoding.zero
    signal = noise = 0.0
    with new_file(file) as out:
        for piece in rows():
            q = np.clip(np.rint(piece / scale) + np.float32(zero), bottom, top)
            signal += float(np.square(piece, dtype=np.float64).sum())
            noise += float(np.square(piece - scale * (q - np.float32(zero)), dtype=np.float64).sum())
            stored = q.astype(np.dtype(dtype).newbyteorder("<"))
            out.write(stored.data)
            tick(stored.nbytes)
    snr = 10 * math.log10(signal / noise) if noise and signal else 300.0
    return Table(file, (shape[0], shape[1]), activation, snr, low, high)


def requantise(table: Table, target: Activation) -> Requantisation:
    """The factors from a table to the encoding of the graph's input.

    Raises RingstepError where one is signed and the other is not, and where the input cannot take what the table holds.
    """
    source, into = table.activation.encoding, target.encoding
    if (INTEGERS[table.activation.dtype][0] < 0) != (INTEGERS[target.dtype][0] < 0):
        raise RingstepError(
            f"{table.file}: the table is {table.activation.dtype} and the graph's input {target.dtype}; Genie needs "
            "both signed or neither"
        )
    low, high = (into.scale * (bound - into.zero) for bound in INTEGERS[target.dtype])
    # Half a step beyond the end is rounding; more means an input calibrated on other rows.
    slack = 0.5 * into.scale + 0.5 * source.scale
    if table.low < low - slack or table.high > high + slack:
        raise RingstepError(
            f"{table.file}: the table reaches {table.low:.4g} to {table.high:.4g}, the graph's input only {low:.4g} to "
            f"{high:.4g}; calibrate its range with the whole table"
        )
    factor = source.scale / into.scale
    return Requantisation(factor, into.zero - factor * source.zero, table.activation.dtype, target.dtype)


def _reach(rows: Iterable[NDArray[np.float32]], name: str) -> tuple[float, float, int]:
    """The smallest and largest value, 0 among them, and how many there are."""
    low = high = 0.0
    count = 0
    for piece in rows:
        least, most = float(piece.min()), float(piece.max())
        if not math.isfinite(least + most):
            raise RingstepError(f"tensor {name}: values that are not finite; mend the checkpoint")
        low, high, count = min(low, least), max(high, most), count + piece.size
    return low, high, count


def _clipped(rows: Iterable[NDArray[np.float32]], low: float, high: float, levels: int) -> tuple[float, float]:
    """The part of low .. high whose rounding and clipping errors add up to the least, by a histogram."""
    if low == high:
        return low, high
    counts = np.zeros(BINS)
    for piece in rows:
        counts += np.histogram(piece, BINS, (low, high))[0]
    middles = low + (np.arange(BINS) + 0.5) * (high - low) / BINS

    def error(bottom: float, top: float) -> float:
        outside = middles - np.clip(middles, bottom, top)
        # A value on a grid of step s errs by s^2 / 12 on average.
        inside = np.square((top - bottom) / levels) / 12
        return float((counts * np.where(outside == 0, inside, np.square(outside))).sum())

    shares = np.linspace(0.02, 1.0, 99)
    bottom, top = low, high
    for _ in range(3):  # one end after the other
        top = float(min(high * shares, key=lambda end: error(bottom, end)))
        bottom = float(min(low * shares, key=lambda end: error(end, top)))
    return bottom, top

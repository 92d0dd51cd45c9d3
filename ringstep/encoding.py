"""Quantised numbers: real = scale * (q - zero), and the embedding table that is read by rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringstep.contract import INTEGERS, Encoding, PrefixSpec, StepSpec, TensorSpec
from ringstep.errors import RingstepError
from ringstep.files import ordinary_size


def quantise(values: np.ndarray, encoding: Encoding, dtype: str) -> np.ndarray:
    """The nearest integers of `dtype`, halves to even as ONNX rounds them; what lies outside is clipped."""
    low, high = INTEGERS[dtype]
    scaled = np.rint(np.asarray(values, np.float32) / np.float32(encoding.scale)) + encoding.zero
    return np.clip(scaled, low, high).astype(dtype)


def dequantise(values: np.ndarray, encoding: Encoding | None) -> np.ndarray:
    """float32 values of a tensor; one without an encoding is only cast."""
    floats = values.astype(np.float32)
    if encoding is not None:
        floats -= np.float32(encoding.zero)
        floats *= np.float32(encoding.scale)
    return floats


def put(into: np.ndarray, values: Any, tensor: TensorSpec) -> None:
    """Write float values into a tensor's array, quantised where it has an encoding."""
    into[...] = values if tensor.encoding is None else quantise(values, tensor.encoding, tensor.dtype)


class Table:
    """An embedding table [vocab, hidden], read by rows; `scales` [vocab] where its rows are integers."""

    def __init__(self, values: np.ndarray, scales: np.ndarray | None = None) -> None:
        self.values, self.scales, self.shape = values, scales, values.shape

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        """Rows [len(ids), hidden], in float32 or the table's own float16."""
        rows: np.ndarray = self.values[ids]
        return rows if self.scales is None else rows.astype(np.float32) * self.scales[ids][:, None]


def mapped(path: Path, dtype: str | type, offset: int, shape: Sequence[int]) -> np.ndarray:
    """An array of a file, mapped read-only. Raises RingstepError where the file does not hold it."""
    try:
        # A pipe would wait for ever, and a negative offset counts from elsewhere.
        if ordinary_size(path) < offset or offset < 0:
            raise ValueError("it lies outside the file")
        return np.memmap(path, dtype, "r", offset, tuple(shape))
    except (OSError, ValueError, TypeError, OverflowError, RingstepError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
        raise RingstepError(f"{path}: no {dtype} {list(shape)} there ({reason})") from None


def open_table(folder: Path, spec: StepSpec) -> Table | None:
    """The embedding table, mapped read-only from the artifact (rows are read when used)."""
    if spec.embedding is None:
        return None
    own = spec.embedding
    path = folder / own.file
    try:
        values = mapped(path, own.dtype, own.offset, own.shape)
        scales = None if own.scales is None else mapped(path, "float32", own.scales, (own.shape[0],))
    except RingstepError as error:
        raise RingstepError(f"{error}, which is the embedding table; export again") from None
    if scales is not None and not (np.isfinite(scales).all() and (scales > 0).all() and (scales < 1e30).all()):
        raise RingstepError(f"{path}: the scales of the embedding table are no positive numbers; export again")
    return Table(values, scales)


class Prefix(NamedTuple):
    """The sink prefix in memory: entries [1, kv_heads, len(ids), head_dim] as caches hold them.

    Entries go by (layer, "key" or "value"); logits float32 [len(ids), vocab].
    """

    ids: tuple[int, ...]
    entries: dict[tuple[int, str], np.ndarray]
    logits: np.ndarray


def open_prefix(folder: Path, spec: StepSpec) -> Prefix | None:
    """Read the sink prefix. Raises RingstepError where the file is not what step.json says."""
    if spec.prefix is None:
        return None
    path, count = folder / spec.prefix.file, len(spec.prefix.ids)
    shapes = [((cache.layer, what), (1, cache.kv_heads, count, cache.head_dim), np.dtype(cache.dtype))
              for cache in spec.caches for what in ("key", "value")]  # fmt: skip
    expected = sum(int(np.prod(shape)) * dtype.itemsize for _, shape, dtype in shapes) + 4 * count * spec.vocab
    try:
        raw = path.read_bytes() if ordinary_size(path) == expected else b""
    except OSError as error:
        raise RingstepError(f"{path}: the sink prefix cannot be read ({error.strerror}); export again") from None
    if len(raw) != expected:
        raise RingstepError(f"{path}: a sink prefix of {count} tokens has {expected} bytes, not this; export again")
    entries, at = {}, 0
    for key, shape, dtype in shapes:
        entries[key] = np.frombuffer(raw, dtype, int(np.prod(shape)), at).reshape(shape)
        at += entries[key].nbytes
    logits = np.frombuffer(raw, np.float32, count * spec.vocab, at).reshape(count, spec.vocab)
    if not all(np.isfinite(array).all() for array in (logits, *entries.values())):
        raise RingstepError(f"{path}: the sink prefix holds values that are not finite; export again")
    return Prefix(spec.prefix.ids, entries, logits)


def write_prefix(path: Path, spec: StepSpec, ids: Sequence[int], entries: dict[tuple[int, str], np.ndarray],
                 logits: np.ndarray) -> PrefixSpec:  # fmt: skip
    """Write float entries [kv_heads, len(ids), head_dim] by (layer, "key" or "value") and logits [len(ids), vocab].

    The caches' encodings are taken from the contract's graphs; call it last.
    """
    by_cache = {(t.layer, t.role.split("_")[0]): t for t in spec.graphs[0].inputs if t.layer is not None}
    with open(path, "wb") as file:
        for cache in spec.caches:
            for what in ("key", "value"):
                tensor, values = by_cache[cache.layer, what], entries[cache.layer, what]
                stored = np.empty(values.shape, tensor.dtype)
                put(stored, values, tensor)
                file.write(stored.tobytes())
        file.write(np.ascontiguousarray(logits, np.float32).tobytes())
    return PrefixSpec(path.name, tuple(ids))

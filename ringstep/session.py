"""DecodeSession: the one host loop. It owns the caches, fills masks and rotary tables, and writes rings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringstep.contract import CacheKind, CacheSpec, GraphSpec, StepSpec
from ringstep.engines.base import Engine
from ringstep.errors import RingstepError, did_you_mean
from ringstep.slots import held_positions, visible, writes

ENGINES = ("ort", "qnn-sim")


class DecodeSession:
    """Drives the graphs of an artifact token by token, or chunk by chunk.

    A step either succeeds and advances `position`, or raises RingstepError and leaves every cache as it was.
    """

    def __init__(self, spec: StepSpec, engine: Engine, table: np.ndarray | None = None) -> None:
        """`table` [vocab, hidden] is the embedding table where the graph takes x (spec.embedding)."""
        if spec.embedding is not None and (table is None or table.shape != spec.embedding.shape):
            raise RingstepError("the graph takes embeddings: a table [vocab, hidden] is needed")
        self.spec, self.engine, self.table = spec, engine, table
        self.position, self.closed = 0, False
        # Caches alike lie in one array, so that a step writes them with one copy; `caches` holds views of each.
        self.stacks = {alike: np.zeros((len(own), *alike.shape[1:]), alike.dtype) for alike, own in group(spec).items()}
        self.caches: dict[tuple[int, str], np.ndarray] = {
            key: self.stacks[alike][i : i + 1] for alike, own in group(spec).items() for i, key in enumerate(own)
        }
        self.buffers = {graph.n: Buffers(spec, graph) for graph in spec.graphs}
        # A padded chunk would shift a rolled window too far.
        self.may_pad = all(cache.kind != "roll" for cache in spec.caches)

    @classmethod
    def open(cls, path: str | Path, engine: str = "ort", **options: Any) -> DecodeSession:
        """Open an artifact folder on an engine: "ort" (ONNX Runtime CPU) or "qnn-sim" (the HTP simulator)."""
        folder = Path(path)
        spec = StepSpec.load(folder)
        made: Engine
        if engine == "ort":
            from ringstep.engines.ort import OrtEngine

            made = OrtEngine(folder, spec, **options)
        elif engine == "qnn-sim":
            from ringstep.engines.qnn_sim import QnnSimEngine

            made = QnnSimEngine(folder, spec, **options)
        else:
            raise RingstepError(f"engine {engine!r} is unknown{did_you_mean(engine, ENGINES)}; {', '.join(ENGINES)}")
        return cls(spec, made, open_table(folder, spec))

    def step(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Process tokens and return their logits, float32 [len(token_ids), vocab].

        Any number of tokens: they are cut into the graphs' chunk sizes, a remainder is padded (its padding is
        never written) or decoded one by one. Raises RingstepError on context overflow, an id outside the
        vocabulary, a graph that left an output unwritten, and values that are not finite.
        """
        try:
            ids = np.asarray(token_ids)
        except ValueError:  # lists of different lengths
            ids = np.empty(0)
        if self.closed:
            raise RingstepError("step: the session is closed")
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":  # numpy counts time spans as integers
            raise RingstepError("step: token_ids must be a non-empty list of whole numbers")
        if ids.min() < 0 or ids.max() >= self.spec.vocab:
            raise RingstepError(f"step: a token id lies outside 0..{self.spec.vocab - 1}")
        if self.position + len(ids) > self.spec.context:
            raise RingstepError(
                f"step: position {self.position} + {len(ids)} tokens pass the context of {self.spec.context}; "
                "reset() or export with a larger --context"
            )
        logits = np.empty((len(ids), self.spec.vocab), np.float32)
        start, done = self.position, 0
        # A single call changes nothing unless it succeeds; several can fail halfway.
        kept = self.windows() if self.pick(len(ids)) < len(ids) else {}
        try:
            while done < len(ids):
                n = self.pick(len(ids) - done)
                count = min(n, len(ids) - done)
                logits[done : done + count] = self.run(n, ids[done : done + count])
                done += count
        except BaseException:
            self.rewind(start, kept)
            raise
        return logits

    def windows(self) -> dict[tuple[int, str], np.ndarray]:
        """Copies of the caches whose old entries a step overwrites; append only fills empty slots."""
        overwritten = [cache.layer for cache in self.spec.caches if cache.kind != "append"]
        return {key: array.copy() for key, array in self.caches.items() if key[0] in overwritten}

    def rewind(self, position: int, kept: dict[tuple[int, str], np.ndarray]) -> None:
        """Undo the calls since `position`, given the windows of that time."""
        if self.position == position:
            return
        for key, array in kept.items():
            self.caches[key][...] = array
        for cache in self.spec.caches:
            if cache.kind == "append":
                keys, values = self.caches[cache.layer, "key"], self.caches[cache.layer, "value"]
                keys = keys.swapaxes(2, 3) if cache.key_layout == "transposed" else keys
                keys[:, :, position:] = values[:, :, position:] = 0
        self.position = position

    def pick(self, left: int) -> int:
        """The graph for the next call: the largest chunk that is filled, else the smallest that can be padded."""
        sizes = sorted(self.buffers)
        fitting = [n for n in sizes if n <= left]
        padded = [n for n in sizes if n > left] if self.may_pad else []
        # Padding beats running several smaller graphs: a chunk costs little more than a token on an NPU.
        if fitting and (not padded or left < 2 or fitting[-1] == left or fitting[-1] > 1):
            return fitting[-1]
        if padded:
            return padded[0]
        raise RingstepError(f"step: {left} tokens left and the smallest graph takes {sizes[0]}; export with --chunk 1")

    def run(self, n: int, ids: np.ndarray) -> np.ndarray:
        """One call of the graph of n tokens on len(ids) <= n tokens: logits [len(ids), vocab], caches updated."""
        spec, buffers, count = self.spec, self.buffers[n], len(ids)
        buffers.fill(self.position, ids, self.table)
        for name, cache, what in buffers.past:
            buffers.inputs[name] = self.caches[cache.layer, what]
        logits = buffers.outputs["logits"]
        # An engine that leaves an output unwritten is caught by the check below.
        logits.flat[0] = np.nan
        for new in buffers.stacks.values():
            new[:, 0, 0, 0] = np.nan
        self.engine.run(n, buffers.inputs, buffers.outputs)
        if not all(np.isfinite(array).all() for array in (logits[:count], *buffers.stacks.values())):
            finite = lambda name, array: np.isfinite(array[:count] if name == "logits" else array).all()
            name = next(name for name, array in buffers.outputs.items() if not finite(name, array))
            raise RingstepError(
                f"step: output {name} of the graph n={n} at position {self.position} is not finite (overflow in "
                f"{spec.dtype}, or an output the engine never wrote); the caches were left as they were"
            )
        for alike in self.stacks:
            self.write(alike, buffers, count)
        self.position += count
        return logits[:count].astype(np.float32)

    def write(self, alike: Alike, buffers: Buffers, count: int) -> None:
        """Store a step's new entries; rolled caches trade places with the outputs that replace them."""
        old, new = self.stacks[alike], buffers.stacks[alike]
        if alike.kind == "roll":
            self.stacks[alike], buffers.stacks[alike] = new, old
            for key, name in buffers.names[alike]:
                self.caches[key], buffers.outputs[name] = buffers.outputs[name], self.caches[key]
            return
        if alike.transposed:
            old, new = old.swapaxes(2, 3), new.swapaxes(2, 3)
        for source, slot, length in writes(alike.kind, old.shape[2], self.position, count):
            old[:, :, slot : slot + length] = new[:, :, source : source + length]

    def entries(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a layer's cache holds now: positions [m] in order, keys and values float32 [kv_heads, m, head_dim]."""
        cache = self.spec.caches[layer]
        held = held_positions(cache.kind, cache.length, self.position)
        slots = np.argsort(held, kind="stable")[int((held < 0).sum()) :]
        keys, values = self.caches[layer, "key"][0], self.caches[layer, "value"][0]
        if cache.key_layout == "transposed":
            keys = keys.transpose(0, 2, 1)
        return held[slots], keys[:, slots].astype(np.float32), values[:, slots].astype(np.float32)

    def reset(self) -> None:
        """Forget everything: position 0, caches zero."""
        self.position = 0
        for array in self.caches.values():
            array.fill(0)

    def close(self) -> None:
        """Free the engine; a step after this is refused."""
        self.closed = True
        self.engine.close()

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Buffers:
    """The arrays of one graph: inputs that are refilled each call, outputs that are reused."""

    def __init__(self, spec: StepSpec, graph: GraphSpec) -> None:
        self.spec, self.graph = spec, graph
        caches = {cache.layer: cache for cache in spec.caches}
        self.inputs = {t.name: np.zeros(t.shape, t.dtype) for t in graph.inputs if t.layer is None}
        self.outputs = {t.name: np.zeros(t.shape, t.dtype) for t in graph.outputs if t.layer is None}
        what = lambda role: role.split("_")[0]
        by_cache = {(t.layer, what(t.role)): t for t in graph.outputs if t.layer is not None}
        self.stacks: dict[Alike, np.ndarray] = {}
        self.names: dict[Alike, list[tuple[tuple[int, str], str]]] = {}
        for alike, own in group(spec).items():
            stack = np.zeros((len(own), *by_cache[own[0]].shape[1:]), alike.dtype)
            self.stacks[alike] = stack
            self.names[alike] = [(key, by_cache[key].name) for key in own]
            self.outputs |= {name: stack[i : i + 1] for i, (_, name) in enumerate(self.names[alike])}
        self.past = [(t.name, caches[t.layer], what(t.role)) for t in graph.inputs if t.layer is not None]
        self.by_role = {(t.role, t.of): t.name for t in graph.inputs if t.layer is None}

    def fill(self, position: int, ids: np.ndarray, table: np.ndarray | None) -> None:
        """Write ids or embeddings, rotary tables and masks for tokens from `position` on."""
        n, count = self.graph.n, len(ids)
        if table is None:
            feed = self.inputs[self.by_role["ids", None]]
            feed[:count] = ids
            feed[count:] = ids[-1]
        else:
            feed = self.inputs[self.by_role["embedding", None]]
            feed[:count] = table[ids]
            feed[count:] = feed[count - 1]
        for rotary in self.spec.rotary:
            # float32 products as the reference computes them: at position 4000 their rounding is visible.
            positions = np.arange(position, position + n, dtype=np.float32)
            angles = positions[:, None] * np.asarray(rotary.inv_freq, np.float32)
            self.inputs[self.by_role["cos", rotary.name]][:] = np.cos(angles) * rotary.scale
            self.inputs[self.by_role["sin", rotary.name]][:] = np.sin(angles) * rotary.scale
        for mask in self.spec.masks:
            held = held_positions(mask.kind, mask.length, position)
            seen = visible(held, position, n, mask.window)
            self.inputs[self.by_role["mask", mask.name]][0, 0] = np.where(seen, 0.0, self.spec.mask_value)


class Alike(NamedTuple):
    """What cache tensors have in common that a step writes together."""

    kind: CacheKind
    shape: tuple[int, ...]
    dtype: str
    transposed: bool


def group(spec: StepSpec) -> dict[Alike, list[tuple[int, str]]]:
    """The cache tensors (layer, "key" or "value") that are alike."""
    groups: dict[Alike, list[tuple[int, str]]] = {}
    for cache in spec.caches:
        for what in ("key", "value"):
            transposed = what == "key" and cache.key_layout == "transposed"
            alike = Alike(cache.kind, tensor_shape(cache, what), cache.dtype, transposed)
            groups.setdefault(alike, []).append((cache.layer, what))
    return groups


def tensor_shape(cache: CacheSpec, what: str) -> tuple[int, ...]:
    """Shape of a cache tensor, [1, kv_heads, length, head_dim] or its transposed form."""
    if what == "key" and cache.key_layout == "transposed":
        return (1, cache.kv_heads, cache.head_dim, cache.length)
    return (1, cache.kv_heads, cache.length, cache.head_dim)


def open_table(folder: Path, spec: StepSpec) -> np.ndarray | None:
    """The embedding table [vocab, hidden], mapped read-only from the artifact (rows are read when used)."""
    if spec.embedding is None:
        return None
    path, shape = folder / spec.embedding.file, spec.embedding.shape
    try:
        return np.memmap(path, spec.embedding.dtype, "r", spec.embedding.offset, shape)
    except (OSError, ValueError) as error:
        raise RingstepError(f"{path}: no embedding table {list(shape)} there ({error}); export again") from None

"""DecodeSession: the one host loop. It owns the caches, fills masks and rotary tables, and writes rings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringstep.contract import QUANTISED, CacheKind, CacheSpec, Encoding, GraphSpec, StepSpec, TensorSpec
from ringstep.encoding import Prefix, Table, dequantise, open_prefix, open_table, put
from ringstep.engines.base import Engine
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import refuse_pipes
from ringstep.slots import held_positions, visible, writes

ENGINES = ("ort", "qnn-sim", "executorch")


def is_simulated(spec: StepSpec, engine: str) -> bool:
    """Whether an engine runs an artifact on the HTP simulator, whose times mean nothing."""
    return engine == "qnn-sim" or (engine == "executorch" and spec.target.get("backend") == "qnn")


class DecodeSession:
    """Drives the graphs of an artifact token by token, or chunk by chunk.

    A step either succeeds and advances `position`, or raises RingstepError and leaves every cache as it was.
    """

    def __init__(
        self, spec: StepSpec, engine: Engine, table: Table | np.ndarray | None = None, prefix: Prefix | None = None
    ) -> None:
        """`table` [vocab, hidden] is the embedding table where the graph takes x (spec.embedding).

        `prefix` is the sink prefix where the contract has one (spec.prefix).
        """
        if spec.embedding is not None and (table is None or table.shape != spec.embedding.shape):
            raise RingstepError("the graph takes embeddings: a table [vocab, hidden] is needed")
        if spec.prefix is not None and (prefix is None or prefix.ids != spec.prefix.ids):
            raise RingstepError(f"the model has a sink prefix: its entries ({spec.prefix.file}) are needed")
        self.spec, self.engine, self.prefix = spec, engine, prefix
        self.table = Table(table) if isinstance(table, np.ndarray) else table
        self.position, self.closed = 0, False
        # Caches alike lie in one array, so that a step writes them with one copy; `caches` holds views of each.
        self.stacks = {alike: np.zeros((len(own), *alike.shape[1:]), alike.dtype) for alike, own in group(spec).items()}
        self.caches: dict[tuple[int, str], np.ndarray] = {
            key: self.stacks[alike][i : i + 1] for alike, own in group(spec).items() for i, key in enumerate(own)
        }
        self.encodings: dict[tuple[int, str], Encoding | None] = {
            (t.layer, t.role.split("_")[0]): t.encoding
            for t in spec.graphs[0].inputs if t.layer is not None
        }  # fmt: skip
        self.buffers = {graph.n: Buffers(spec, graph) for graph in spec.graphs}
        self.reset()
        # A padded chunk would shift a rolled window too far.
        self.may_pad = all(cache.kind != "roll" for cache in spec.caches)

    @classmethod
    def open(cls, path: str | Path, engine: str = "ort", **options: Any) -> DecodeSession:
        """Open an artifact folder on an engine.

        "ort" (ONNX Runtime on the CPU), "qnn-sim" (the HTP simulator) or "executorch" (ExecuTorch's runtime).
        """
        folder = Path(path)
        spec = StepSpec.load(folder)
        refuse_pipes(folder)
        made: Engine
        if engine == "ort":
            from ringstep.engines.ort import OrtEngine

            made = OrtEngine(folder, spec, **options)
        elif engine == "qnn-sim":
            from ringstep.engines.qnn_sim import QnnSimEngine

            made = QnnSimEngine(folder, spec, **options)
        elif engine == "executorch":
            from ringstep.engines.executorch import open_engine

            made = open_engine(folder, spec, **options)
        else:
            raise RingstepError(f"engine {engine!r} is unknown{did_you_mean(engine, ENGINES)}; {', '.join(ENGINES)}")
        return cls(spec, made, open_table(folder, spec), open_prefix(folder, spec))

    def step(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Process tokens and return their logits, float32 [len(token_ids), vocab].

        Any number of tokens: they are cut into the graphs' chunk sizes, a remainder is padded (its padding is
        never written) or decoded one by one. Where the graph takes x, float rows [tokens, hidden] may stand in
        the place of ids. A text begins with the sink prefix's ids where there is one; they are not computed but
        copied. Raises RingstepError on context overflow, an id outside the vocabulary, a text that begins with
        other ids than the prefix, a graph that left an output unwritten, and values that are not finite.
        """
        feed = self.check(token_ids)
        logits = np.empty((len(feed), self.spec.vocab), np.float32)
        start, done = self.position, 0
        # A single call changes nothing unless it succeeds; several can fail halfway.
        inside = self.prefix is not None and start < len(self.prefix.ids)
        alone = not inside and self.pick(len(feed)) >= len(feed)
        kept = {} if alone else self.windows()
        try:
            if self.prefix and inside:
                done = self.begin(feed)
                logits[:done] = self.prefix.logits[start : start + done]
            while done < len(feed):
                n = self.pick(len(feed) - done)
                count = min(n, len(feed) - done)
                logits[done : done + count] = self.run(n, feed[done : done + count])
                done += count
        except BaseException:
            self.rewind(start, kept)
            raise
        return logits

    def check(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """What a step is fed, ids [tokens] or float rows [tokens, hidden]; RingstepError when it cannot be."""
        try:
            feed = np.asarray(token_ids)
        except ValueError:  # lists of different lengths
            feed = np.empty(0)
        if self.closed:
            raise RingstepError("step: the session is closed")
        rows = feed.ndim == 2 and feed.dtype.kind == "f" and len(feed) > 0
        if rows:
            takes_x = any(t.role == "embedding" for t in self.spec.graphs[0].inputs)
            if not takes_x or feed.shape[1] != self.spec.hidden or self.prefix:
                raise RingstepError(f"step: rows {list(feed.shape)} are no embeddings that this graph takes; feed ids")
            if not np.isfinite(feed).all():
                raise RingstepError("step: the embeddings hold values that are not finite")
        elif feed.ndim != 1 or feed.size == 0 or feed.dtype.kind not in "iu":  # numpy counts time spans as integers
            raise RingstepError("step: token_ids must be a non-empty list of whole numbers")
        elif feed.min() < 0 or feed.max() >= self.spec.vocab:
            raise RingstepError(f"step: a token id lies outside 0..{self.spec.vocab - 1}")
        if self.position + len(feed) > self.spec.context:
            raise RingstepError(
                f"step: position {self.position} + {len(feed)} tokens pass the context of {self.spec.context}; "
                "reset() or export with a larger --context"
            )
        return feed

    def begin(self, ids: np.ndarray) -> int:
        """Copy the sink prefix's entries for the ids that lie in it; returns how many those are."""
        assert self.prefix is not None
        start, own = self.position, self.prefix.ids
        count = min(len(own) - start, len(ids))
        if tuple(ids[:count]) != own[start : start + count]:
            raise RingstepError(
                f"step: the text begins with {[int(i) for i in ids[:count]]} where this artifact's sink prefix has "
                f"{list(own[start : start + count])}: begin every text with it"
            )
        self.seed({key: array[:, :, start : start + count] for key, array in self.prefix.entries.items()})
        return count

    def seed(self, entries: dict[tuple[int, str], np.ndarray]) -> None:
        """Write entries [1, kv_heads, count, head_dim] of the next `count` positions, as caches hold them."""
        count = next(iter(entries.values())).shape[2]
        for cache in self.spec.caches:
            for what in ("key", "value"):
                old, new = self.caches[cache.layer, what], entries[cache.layer, what]
                if what == "key" and cache.key_layout == "transposed":
                    old = old.swapaxes(2, 3)
                if cache.kind == "roll":
                    keep = min(count, cache.length)
                    old[:, :, :-keep], old[:, :, -keep:] = old[:, :, keep:].copy(), new[:, :, count - keep :]
                    continue
                for source, slot, length in writes(cache.kind, cache.length, self.position, count):
                    old[:, :, slot : slot + length] = new[:, :, source : source + length]
        self.position += count

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
                keys[:, :, position:] = empty(self.encodings[cache.layer, "key"])
                values[:, :, position:] = empty(self.encodings[cache.layer, "value"])
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

    def run(self, n: int, feed: np.ndarray) -> np.ndarray:
        """One call of the graph of n tokens on len(feed) <= n tokens: logits [len(feed), vocab], caches updated."""
        spec, buffers, count = self.spec, self.buffers[n], len(feed)
        buffers.fill(self.position, feed, self.table)
        for name, cache, what in buffers.past:
            buffers.inputs[name] = self.caches[cache.layer, what]
        logits = buffers.outputs["logits"]
        # An engine that leaves a float output unwritten is caught by the check below; integers are always finite.
        floats = [new for alike, new in buffers.stacks.items() if alike.dtype not in QUANTISED]
        for new in floats:
            new[:, 0, 0, 0] = np.nan
        if buffers.logits.encoding is None:
            logits.flat[0] = np.nan
            floats.append(logits[:count])
        self.engine.run(n, buffers.inputs, buffers.outputs)
        if not all(np.isfinite(array).all() for array in floats):
            finite = lambda name, array: np.isfinite(array[:count] if name == "logits" else array).all()
            name = next(name for name, array in buffers.outputs.items() if not finite(name, array))
            raise RingstepError(
                f"step: output {name} of the graph n={n} at position {self.position} is not finite (overflow in "
                f"{spec.dtype}, or an output the engine never wrote); the caches were left as they were"
            )
        for alike in self.stacks:
            self.write(alike, buffers, count)
        self.position += count
        return dequantise(logits[:count], buffers.logits.encoding)

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
        """What the cache of spec.caches[layer] holds now: positions [m] in order, keys and values in float32.

        Keys and values are [kv_heads, m, head_dim].
        """
        cache = self.spec.caches[layer]
        held = held_positions(cache.kind, cache.length, self.position)
        slots = np.argsort(held, kind="stable")[int((held < 0).sum()) :]
        keys, values = self.caches[cache.layer, "key"][0], self.caches[cache.layer, "value"][0]
        if cache.key_layout == "transposed":
            keys = keys.transpose(0, 2, 1)
        as_float = lambda what, array: dequantise(array[:, slots], self.encodings[cache.layer, what])
        return held[slots], as_float("key", keys), as_float("value", values)

    def reset(self) -> None:
        """Forget everything: position 0, caches zero."""
        self.position = 0
        for key, array in self.caches.items():
            array.fill(empty(self.encodings[key]))

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
        self.by_role: dict[tuple[str, str | None], TensorSpec] = {}
        self.by_role |= {(t.role, t.of): t for t in graph.inputs if t.layer is None}
        self.logits = next(t for t in graph.outputs if t.role == "logits")

    def fill(self, position: int, feed: np.ndarray, table: Table | None) -> None:
        """Write ids or embeddings, rotary tables and masks for tokens from `position` on."""
        n, count = self.graph.n, len(feed)
        if ("ids", None) in self.by_role:
            into = self.inputs[self.by_role["ids", None].name]
            into[:count] = feed
        else:
            x = self.by_role["embedding", None]
            into = self.inputs[x.name]
            if feed.ndim == 1:
                assert table is not None
                feed = table[feed]
            put(into[:count], feed, x)
        into[count:] = into[count - 1]
        for rotary in self.spec.rotary:
            # float32 products as the reference computes them: at position 4000 their rounding is visible.
            positions = np.arange(position, position + n, dtype=np.float32)
            angles = positions[:, None] * np.asarray(rotary.inv_freq, np.float32)
            for role, function in (("cos", np.cos), ("sin", np.sin)):
                tensor = self.by_role[role, rotary.name]
                put(self.inputs[tensor.name], function(angles) * rotary.scale, tensor)
        for mask in self.spec.masks:
            held = held_positions(mask.kind, mask.length, position)
            seen = visible(held, position, n, mask.window)
            tensor = self.by_role["mask", mask.name]
            put(self.inputs[tensor.name][0, 0], np.where(seen, 0.0, self.spec.mask_value), tensor)


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


def empty(encoding: Encoding | None) -> int:
    """What a slot that was never written holds: the integer that stands for zero."""
    return encoding.zero if encoding else 0

"""The step contract: every input and output of a decode step or prefill chunk, saved as step.json.

docs/step-contract.md explains it field by field for a host program in another language.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import ordinary_size

FORMAT = "ringstep.step"
VERSION = 2
MAX_JSON_BYTES = 64 << 20
INT64_MAX = 2**63 - 1

DType = Literal["float32", "float16", "int32", "uint8", "int8", "uint16", "int16"]
CacheKind = Literal["ring", "append", "roll", "state"]
Role = Literal[
    "ids", "embedding", "cos", "sin", "mask", "key_in", "value_in", "key_out", "value_out",
    "state_in", "state_out", "hidden", "logits",
]  # fmt: skip
DTYPE_BYTES = {"float32": 4, "float16": 2, "int32": 4, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2}
QUANTISED = ("uint8", "int8", "uint16", "int16")
FLOAT32 = (2.0**-126, 3.4028234663852886e38)  # hosts compute with scales in float32, where less is 0
INTEGERS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}


@dataclass(frozen=True)
class Encoding:
    """What the integers of a tensor stand for: real = scale * (q - zero)."""

    scale: float
    zero: int


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: `of` names the rotary or mask it belongs to, `layer` the layer of a cache tensor.

    A quantised tensor (uint8, int8, uint16, int16) has an encoding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    of: str | None = None
    layer: int | None = None
    encoding: Encoding | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class RotarySpec:
    """A rotary embedding: angle of pair i at position p is p * inv_freq[i]; cos and sin are times `scale`.

    inv_freq holds rotated dims / 2 values; pair i is dims (i, i + rotated / 2) of the head ("rotate half"),
    dims beyond the rotated ones pass through.
    """

    name: str
    inv_freq: tuple[float, ...]
    scale: float = 1.0
    theta: float = 0.0
    kind: str = "default"


@dataclass(frozen=True)
class MaskSpec:
    """An additive mask [1, 1, n, length + n]: 0 where query i may look, `mask_value` elsewhere.

    A query at position q sees a key at position p when p <= q and, with a window, q - p < window.
    """

    name: str
    kind: CacheKind
    length: int
    window: int | None


@dataclass(frozen=True)
class CacheSpec:
    """The K/V cache of one layer: two tensors [1, kv_heads, length, head_dim].

    With key_layout "transposed" the keys are [1, kv_heads, head_dim, length].
    """

    layer: int
    kind: CacheKind
    length: int
    kv_heads: int
    head_dim: int
    dtype: DType
    rotary: str
    mask: str
    window: int | None = None
    key_layout: Literal["plain", "transposed"] = "plain"

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return 2 * self.kv_heads * self.length * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class EmbeddingSpec:
    """The table [vocab, hidden] in row-major order at `offset` bytes of `file`; the host looks rows up.

    An int8 or int16 table has float32 scales [vocab] at `scales` bytes of the file: row i is scales[i] times its
    integers.
    """

    file: str
    offset: int
    shape: tuple[int, int]
    dtype: DType
    scales: int | None = None


@dataclass(frozen=True)
class PrefixSpec:
    """The sink prefix: every text begins with `ids`, whose cache entries and logits were computed in float.

    `file` holds, for each cache in order, keys then values [kv_heads, len(ids), head_dim] in the cache's dtype and
    encoding, and after them logits float32 [len(ids), vocab]. The host copies them in place of running those tokens.
    """

    file: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class PartSpec:
    """A graph file that computes part of the step; parts run in order and pass tensors on by name."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class GraphSpec:
    """One static graph: n tokens a call. `parts` is keyed by format ("onnx", "qnn")."""

    n: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    hidden: tuple[TensorSpec, ...] = ()
    parts: dict[str, tuple[PartSpec, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepSpec:
    """Everything a host needs to drive the graphs of one artifact."""

    recipe: str
    model: str
    vocab: int
    hidden: int
    context: int
    dtype: DType
    mask_value: float
    eos: tuple[int, ...]
    rotary: tuple[RotarySpec, ...]
    masks: tuple[MaskSpec, ...]
    caches: tuple[CacheSpec, ...]
    graphs: tuple[GraphSpec, ...]
    embedding: EmbeddingSpec | None = None
    activations: Literal["accurate", "native"] = "native"
    target: dict[str, str] = field(default_factory=dict)
    scheme: str = ""
    prefix: PrefixSpec | None = None

    def graph(self, n: int) -> GraphSpec:
        """The graph that takes n tokens; RingstepError when there is none."""
        for graph in self.graphs:
            if graph.n == n:
                return graph
        raise RingstepError(f"step.json: no graph for n={n}; there are {[g.n for g in self.graphs]}")

    def save(self, path: Path) -> None:
        """Write step.json atomically."""
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        temp = path.with_name(path.name + ".tmp")
        temp.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        os.replace(temp, path)

    @staticmethod
    def load(path: Path) -> StepSpec:
        """Read and validate step.json (a file, or the folder that holds it).

        Raises RingstepError naming the field on anything missing, unknown, wrongly typed or inconsistent.
        """
        path = path / "step.json" if path.is_dir() else path
        try:
            if ordinary_size(path) > MAX_JSON_BYTES:
                raise RingstepError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, not a step.json")
            body = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RingstepError(f"{path}: no such file; is this an artifact made by ringstep export?") from None
        except (OSError, ValueError, RecursionError) as error:
            raise RingstepError(f"{path}: cannot be read as JSON: {str(error).splitlines()[0]}") from None
        try:
            return parse(body)
        except RingstepError as error:
            raise RingstepError(f"{path}: {error}") from None


def parse(body: Any) -> StepSpec:
    """Build a StepSpec from decoded JSON; RingstepError names the first bad field."""
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise RingstepError(f"format: not {FORMAT!r}; this is no step.json")
    version = body.get("version")
    if type(version) is not int or version != VERSION:
        raise RingstepError(
            f"version: {shown(version)} is not {VERSION}; export again with this ringstep, or update it"
        )
    fields = {key: value for key, value in body.items() if key not in ("format", "version")}
    spec = cast(StepSpec, build(StepSpec, fields, ""))
    _validate(spec)
    return spec


def build(kind: Any, value: Any, where: str) -> Any:
    """Turn JSON into `kind` (dataclasses, tuples, dicts, unions, literals, scalars, Any), strictly.

    Raises RingstepError naming the first bad field, which lies at `where`.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise RingstepError(f"{where or 'step'}: expected an object")
        hints = _hints(cast(Any, kind))
        for key in value:
            if key not in hints:
                raise RingstepError(f"{_join(where, key)}: unknown field{did_you_mean(key, hints)}")
        for entry in dataclasses.fields(kind):
            optional = entry.default is not dataclasses.MISSING or entry.default_factory is not dataclasses.MISSING
            if entry.name not in value and not optional:
                raise RingstepError(f"{_join(where, entry.name)}: missing")
        built = {key: build(hints[key], item, _join(where, key)) for key, item in value.items()}
        return cast(Any, kind)(**built)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RingstepError(f"{where}: expected a list")
        if args[-1] is Ellipsis:
            return tuple(build(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(args):
            raise RingstepError(f"{where}: expected {len(args)} items, found {len(value)}")
        return tuple(build(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise RingstepError(f"{where}: expected an object")
        return {key: build(args[1], item, _join(where, key)) for key, item in value.items()}
    if origin is Literal:
        if value not in args:
            raise RingstepError(f"{where}: {shown(value)} is none of {', '.join(args)}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return build(next(a for a in args if a is not type(None)), value, where)
    if isinstance(value, int) and abs(value) > INT64_MAX:
        raise RingstepError(f"{where}: too large a number")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise RingstepError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise RingstepError(f"{where}: not a finite number")
    return value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)  # slow, and a large step has thousands of tensors


def _join(where: str, key: str) -> str:
    key = key[:80] if key.isprintable() else ascii(key[:80])
    return f"{where}.{key}" if where else key


def shown(value: Any) -> str:
    """A JSON value for an error message: scalars in short, anything deeper by its type."""
    return repr(value)[:80] if value is None or isinstance(value, str | int | float) else type(value).__name__


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RingstepError(message)


def check_relative(path: str, where: str) -> None:
    """Refuse a file name that leaves the artifact folder."""
    pure = PurePosixPath(path)
    bad = pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path or path in ("", ".")
    _require(not bad, f"{where}: {path!r} leaves the artifact's folder")


def _validate(spec: StepSpec) -> None:
    for name in ("vocab", "hidden", "context"):
        _require(getattr(spec, name) >= 1, f"{name}: must be at least 1")
    _require(spec.dtype != "int32", "dtype: must be float32, float16, or that of quantised activations")
    _require(spec.mask_value < 0, "mask_value: must be negative")
    rotary = {r.name: r for r in spec.rotary}
    masks = {m.name: m for m in spec.masks}
    _require(len(rotary) == len(spec.rotary), "rotary: two with one name")
    _require(len(masks) == len(spec.masks), "masks: two with one name")
    for mask in spec.masks:
        where = f"masks.{mask.name}"
        _require(mask.kind != "state", f"{where}.kind: a state has no mask")
        _require(mask.length >= 1, f"{where}.length: must be at least 1")
        _require(mask.window is None or mask.window >= 1, f"{where}.window: must be at least 1")
        if mask.kind == "ring":
            _require(
                mask.window is not None and mask.length == max(1, mask.window - 1),
                f"{where}.length: a ring of window {mask.window} holds window - 1 entries",
            )
            continue
        # Shorter, it would drop entries that a later query should see.
        seen = spec.context if mask.window is None or mask.kind == "append" else min(spec.context, mask.window)
        _require(mask.length >= seen - 1, f"{where}.length: {mask.length} is too short, {seen - 1} entries are seen")
    _require([c.layer for c in spec.caches] == sorted({c.layer for c in spec.caches}), "caches: layers not in order")
    for i, cache in enumerate(spec.caches):
        where = f"caches[{i}]"
        _require(cache.layer >= 0, f"{where}.layer: negative")
        floats = spec.dtype in ("float32", "float16")
        _require(cache.dtype in (("float32", "float16") if floats else QUANTISED), f"{where}.dtype: not one of a cache "
                 f"beside {spec.dtype}")  # fmt: skip
        _require(cache.rotary in rotary, f"{where}.rotary: no rotary named {cache.rotary!r}")
        _require(cache.mask in masks, f"{where}.mask: no mask named {cache.mask!r}")
        mask = masks[cache.mask]
        same = (mask.kind, mask.length, mask.window) == (cache.kind, cache.length, cache.window)
        _require(same, f"{where}: kind, length or window differ from its mask {mask.name!r}")
        _require(min(cache.kv_heads, cache.head_dim) >= 1, f"{where}: kv_heads and head_dim must be at least 1")
        rotated = 2 * len(rotary[cache.rotary].inv_freq)
        _require(rotated <= cache.head_dim, f"{where}: rotates {rotated} dims of {cache.head_dim}")
    _require(bool(spec.graphs), "graphs: empty")
    _require(len({g.n for g in spec.graphs}) == len(spec.graphs), "graphs: two with one n")
    if spec.embedding:
        check_relative(spec.embedding.file, "embedding.file")
        _require(0 <= spec.embedding.offset < 1 << 60, "embedding.offset: not a place in a file")
        _require(spec.embedding.shape == (spec.vocab, spec.hidden), "embedding.shape: not [vocab, hidden]")
        signed = spec.embedding.dtype in ("int8", "int16")
        _require(signed or spec.embedding.dtype in ("float32", "float16"), "embedding.dtype: no type of a table")
        scaled = spec.embedding.scales is not None
        _require(scaled == signed, "embedding.scales: int8 and int16 tables have them, no other")
        if spec.embedding.scales is not None:
            end = spec.embedding.offset + spec.vocab * spec.hidden * DTYPE_BYTES[spec.embedding.dtype]
            apart = end <= spec.embedding.scales < 1 << 60 and spec.embedding.scales % 4 == 0
            _require(apart, "embedding.scales: not a place behind the table, at a multiple of 4 bytes")
        _require(spec.embedding.offset % DTYPE_BYTES[spec.embedding.dtype] == 0, "embedding.offset: not aligned")
    if spec.prefix:
        check_relative(spec.prefix.file, "prefix.file")
        _require(0 < len(spec.prefix.ids) <= spec.context, "prefix.ids: none, or more than the context")
        _require(all(0 <= i < spec.vocab for i in spec.prefix.ids), "prefix.ids: an id lies outside the vocabulary")
    for graph in spec.graphs:
        _validate_graph(spec, graph)
    _validate_encodings(spec)


def _validate_graph(spec: StepSpec, graph: GraphSpec) -> None:
    where = f"graphs[n={graph.n}]"
    _require(1 <= graph.n <= spec.context, f"{where}: n must lie in 1..context")
    want_in, want_out = io_tensors(
        graph.n, spec.vocab, spec.hidden, spec.dtype, spec.rotary, spec.masks, spec.caches, spec.embedding is None
    )
    for side, have, want in (("inputs", graph.inputs, want_in), ("outputs", graph.outputs, want_out)):
        _require(len({t.name for t in have}) == len(have), f"{where}.{side}: two with one name")
        known = {(t.role, t.of, t.layer): t for t in want}
        for tensor in have:
            match = known.pop((tensor.role, tensor.of, tensor.layer), None)
            _require(match is not None, f"{where}.{side}.{tensor.name}: role {tensor.role!r} is not expected here")
            assert match is not None
            _require(
                (tensor.shape, tensor.dtype) == (match.shape, match.dtype),
                f"{where}.{side}.{tensor.name}: {list(tensor.shape)} {tensor.dtype} should be "
                f"{list(match.shape)} {match.dtype}",
            )
        _require(not known, f"{where}.{side}: missing {', '.join(t.name for t in known.values())}")
    available = {t.name for t in graph.inputs}
    everything = available | {t.name for t in graph.outputs} | {t.name for t in graph.hidden}
    for fmt, parts in graph.parts.items():
        _require(bool(parts), f"{where}.parts.{fmt}: empty")
        made = set(available)
        for i, part in enumerate(parts):
            check_relative(part.file, f"{where}.parts.{fmt}[{i}].file")
            for name in part.inputs:
                _require(name in made, f"{where}.parts.{fmt}[{i}].inputs: {name!r} is not available yet")
            for name in part.outputs:
                _require(name in everything, f"{where}.parts.{fmt}[{i}].outputs: {name!r} is not declared")
            made |= set(part.outputs)
        left = [t.name for t in graph.outputs if t.name not in made]
        _require(not left, f"{where}.parts.{fmt}: no part returns {', '.join(left)}")


def _validate_encodings(spec: StepSpec) -> None:
    """Integers have encodings, and one tensor means the same in every graph; a cache's the same going in and out."""
    known: dict[Any, Any] = {}
    for graph in spec.graphs:
        for tensor in (*graph.inputs, *graph.outputs, *graph.hidden):
            where = f"graphs[n={graph.n}].{tensor.name}.encoding"
            _require((tensor.encoding is not None) == (tensor.dtype in QUANTISED),
                     f"{where}: {tensor.dtype} {'needs one' if tensor.dtype in QUANTISED else 'has none'}")  # fmt: skip
            if tensor.encoding is None:
                continue
            low, high = INTEGERS[tensor.dtype]
            # The largest integer times it must be a float32 too.
            fits = FLOAT32[0] <= tensor.encoding.scale <= FLOAT32[1] / 65536
            _require(fits, f"{where}.scale: must be a positive float32, 65536 of which are one too")
            _require(low <= tensor.encoding.zero <= high, f"{where}.zero: outside {tensor.dtype}")
            cached = tensor.layer is not None
            key = (tensor.layer, tensor.role.split("_")[0]) if cached else tensor.name
            same = known.setdefault(key, tensor.encoding) == tensor.encoding
            _require(same, f"{where}: differs from {'the same cache' if cached else 'the same tensor'} elsewhere, so "
                     "entries cannot be copied as they are")  # fmt: skip
    for tensor in spec.graphs[0].inputs:
        if tensor.role == "mask" and tensor.encoding is not None:
            # A shallower mask would let a query look where it may not.
            deepest = tensor.encoding.scale * (INTEGERS[tensor.dtype][0] - tensor.encoding.zero)
            _require(spec.mask_value <= 0.5 * deepest, f"mask_value: {tensor.name} is masked by {deepest:.6g}")


def io_tensors(
    n: int,
    vocab: int,
    hidden: int,
    dtype: DType,
    rotary: tuple[RotarySpec, ...],
    masks: tuple[MaskSpec, ...],
    caches: tuple[CacheSpec, ...],
    ids: bool,
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and outputs that a step of n tokens has under this contract, in order.

    With `ids` the embedding is inside the graph: input_ids int32 [n]; else x [n, hidden].
    """
    first = (
        TensorSpec("input_ids", (n,), "int32", "ids") if ids else TensorSpec("x", (n, hidden), dtype, "embedding")
    )
    inputs, outputs = [first], [TensorSpec("logits", (n, vocab), dtype, "logits")]
    for r in rotary:
        inputs.append(TensorSpec(f"cos_{r.name}", (n, len(r.inv_freq)), dtype, "cos", r.name))
        inputs.append(TensorSpec(f"sin_{r.name}", (n, len(r.inv_freq)), dtype, "sin", r.name))
    for m in masks:
        inputs.append(TensorSpec(f"mask_{m.name}", (1, 1, n, m.length + n), dtype, "mask", m.name))
    for c in caches:
        for what in ("key", "value"):
            new = c.length if c.kind == "roll" else n
            transposed = what == "key" and c.key_layout == "transposed"
            shape = lambda entries, c=c, t=transposed: (
                (1, c.kv_heads, c.head_dim, entries) if t else (1, c.kv_heads, entries, c.head_dim)
            )
            role_in, role_out = cast(Role, f"{what}_in"), cast(Role, f"{what}_out")
            inputs.append(TensorSpec(f"past_{what}_{c.layer}", shape(c.length), c.dtype, role_in, None, c.layer))
            prefix = "present" if c.kind == "roll" else "new"
            outputs.append(TensorSpec(f"{prefix}_{what}_{c.layer}", shape(new), c.dtype, role_out, None, c.layer))
    return tuple(inputs), tuple(outputs)

"""Schemes: which tensors are kept in how many bits, and how they get there. The presets are in schemes/*.toml.

A scheme is plain data. scheme_file.py reads one and checks every key and value; here is what it says of one parameter
(`weights_for`, `grid_for`), whether it fits a model (`check`) and whether a chip can run it (`refuse`).

Parameters are named by the path of their module: "layers.3.mlp.down_proj", "layers.3.attn.q_proj", "head", "embedding".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from quantize.grid import Grid
from recipes.plan import Plan
from ringstep.devices import Chip
from ringstep.errors import RingstepError, did_you_mean

HEAD, EMBEDDING = "head", "embedding"
PER_CHANNEL_BITS = 8  # weights raised to so many bits get a scale a channel: blocks of 8 bits run on no HTP
LPBQ_BITS: Literal[4] = 4
LONGEST_BLOCK = 1 << 16

Bits = Literal[2, 3, 4, 8, 16]
Method = Literal["min-max", "percentile", "mse", "entropy"]


@dataclass(frozen=True)
class Weights:
    """How weights are kept, and how they are rounded."""

    dtype: Literal["int", "float16"] = "int"
    """float16 leaves them as they are; the other keys have no meaning then, and `bits` is 16."""
    bits: Bits = 8
    """Of one number; 16 is int16."""
    symmetric: bool = True
    """Zero is the number 0; else every scale has a zero point."""
    block: int | None = None
    """Inputs that share a scale, a power of two from 16 on; None: one scale an output channel."""
    two_level: bool = False
    """The scale of a block is a step of 1 to 15 times its channel's scale: the form of blocks HTP keeps (LPBQ)."""
    rounding: Literal["nearest", "clip", "gptq", "two-sided"] = "nearest"
    """`clip` searches the scale that errs least on real activations; `gptq` also makes up for each rounding in the
    inputs not yet rounded (Frantar et al. 2022, arXiv 2210.17323); `two-sided` in the outputs as well, by what an error
    at each output does to the logits (YAQA, Tseng et al. 2025). The head is rounded as by `gptq`."""
    damping: float = 0.05
    """GPTQ: what is added to the Hessian's diagonal, as a part of its mean; above 0, at most 1."""


@dataclass(frozen=True)
class Ranges:
    """How an activation's range is found from calibration, by the tensor's role."""

    linear_input: Method = "min-max"
    residual: Method = "min-max"
    scores: Method = "min-max"
    cache: Method = "min-max"
    logits: Method = "min-max"
    gate: Method = "min-max"
    other: Method = "min-max"


@dataclass(frozen=True)
class Activations:
    """How activations are kept."""

    bits: Literal[0, 8, 16] = 16
    """0 leaves them in float, so that only weights are quantised."""
    percentile: float = 99.99
    """For ranges by percentile: how much of the values lies inside, in percent; above 50, at most 100."""
    ranges: Ranges = field(default_factory=Ranges)
    accuracy_level: Literal[0, 4] = 0
    """Of MatMulNBits, where activations are float: 4 lets a CPU round them to 8 bits as it multiplies, 0 does not."""


@dataclass(frozen=True)
class Cache:
    """How keys and values are kept between steps; without meaning where activations are float."""

    bits: Literal[8, 16] = 16


@dataclass(frozen=True)
class Exceptions:
    """Activation bits of what differs from the rest, 0 for float; None: it does not differ."""

    norms: Literal[0, 8, 16] | None = None
    """RMSNorms: what goes in and out, and their weights."""
    gates: Literal[0, 8, 16] | None = None
    """Sigmoid, SiLU and GELU."""
    softmax: Literal[0, 8, 16] | None = None
    """Attention scores and their softmax."""


@dataclass(frozen=True)
class Auto:
    """Raise the weights whose promotion buys most SNR a byte until a goal is met; at least one goal is set."""

    target_db: float | None = None
    """Stop when the logits have this SNR against float32, in dB."""
    max_bytes: int | None = None
    """Never take more than this for all weights with their scales."""
    steps: tuple[str, ...] = ("4 -> 8",)
    """Promotions that may be made, in bits."""

    def promotions(self) -> tuple[tuple[int, int], ...]:
        """`steps` as pairs of bits. Raises ValueError for one that is not "4 -> 8" or such."""
        pairs = [step.split("->") for step in self.steps]
        return tuple((int(low), int(high)) for low, high in pairs)


@dataclass(frozen=True)
class Override:
    """Keys of [weights] that differ for the parameters whose path matches a pattern; later overrides win."""

    pattern: str
    """As a shell has them: * for anything (dots too), ? for one character, [0-3] for one of a set."""
    keys: tuple[tuple[str, Any], ...]
    """Names and values of Weights' fields, in alphabetical order."""


@dataclass(frozen=True)
class Scheme:
    """One way to quantise a model."""

    name: str
    """A preset's name or a file's stem; it is no part of what the scheme does."""
    description: str = ""
    sequential: bool = False
    """A layer is rounded for what the rounded layers before it hand on, not for what the original hands on."""
    rotate: Literal["none", "auto", "hadamard"] = "none"
    """Rotations that spread outliers over all channels, folded into the weights; the graph stays as it is.
    `auto`: where the layers allow it."""
    rescale: Literal["none", "awq"] = "none"
    """Input channels scaled by their activations, folded into what is before (Lin et al. 2023, arXiv 2306.00978)."""
    sink_prefix: Literal["auto", "off"] = "auto"
    """Find positions with massive activations and keep their keys and values in float."""
    weights: Weights = field(default_factory=Weights)
    """Every linear of every layer."""
    head: Weights = field(default_factory=Weights)
    """Takes nothing over from `weights`."""
    embedding: Weights = field(default_factory=Weights)
    """The table [vocab, hidden], a scale a row or blocks of a row; always rounded to nearest."""
    activations: Activations = field(default_factory=Activations)
    cache: Cache = field(default_factory=Cache)
    exceptions: Exceptions = field(default_factory=Exceptions)
    override: tuple[Override, ...] = ()
    auto: Auto | None = None


def paths_of(plan: Plan) -> list[str]:
    """The path of every parameter that a scheme decides on, in the order of the model; norms are not among them."""
    found = [EMBEDDING]
    for index in range(len(plan.layers)):
        for name, source in plan.layer_sources(index).items():
            if len(source.out_shape) == 2:
                found.append(f"layers.{index}.{name.removesuffix('.weight')}")
    return [*found, HEAD]


def weights_for(scheme: Scheme, path: str) -> Weights:
    """What a scheme says of one parameter, overrides included. Any path gets an answer."""
    found = {HEAD: scheme.head, EMBEDDING: scheme.embedding}.get(path, scheme.weights)
    for override in scheme.override:
        if fnmatchcase(path, override.pattern):
            found = dataclasses.replace(found, **dict(override.keys))
    return found


def grid_for(scheme: Scheme, path: str) -> Grid | None:
    """The grid of one parameter; None where it stays in float16."""
    weights = weights_for(scheme, path)
    if weights.dtype != "int":
        return None
    return Grid(weights.bits, weights.symmetric, weights.block, weights.two_level)


def contradiction(weights: Weights) -> str:
    """Why the keys of `weights` do not go together; "" where they do."""
    if weights.dtype == "float16":
        same = weights == Weights(dtype="float16", bits=16)
        return "" if same else "other keys have no meaning with dtype = 'float16'; set dtype = 'int' beside them"
    if weights.block is not None and (weights.block < 16 or weights.block & (weights.block - 1)):
        return f"block must be a power of two, 16 or more, not {weights.block} (0 or no block: a scale a channel)"
    if weights.block is not None and weights.block > LONGEST_BLOCK:
        return f"block = {weights.block} is longer than rows are; leave block out for a scale a channel"
    if weights.two_level and weights.block is None:
        return "two_level needs blocks; set block, such as 32"
    if weights.two_level and (weights.bits != LPBQ_BITS or not weights.symmetric):
        return f"two_level needs symmetric weights of {LPBQ_BITS} bits; set two_level = false (and block = 0)"
    if not 0 < weights.damping <= 1:
        return f"damping must be above 0 and at most 1, not {weights.damping}"
    return ""


def check(scheme: Scheme, paths: Iterable[str]) -> None:
    """Refuse a scheme that does not fit a model's parameters (see paths_of).

    Raises RingstepError for an override that matches none of them, since it would do nothing in silence, and for
    overrides that contradict each other.
    """
    known = list(paths)
    for override in scheme.override:
        if not any(fnmatchcase(path, override.pattern) for path in known):
            raise RingstepError(
                f"scheme {scheme.name}: override {override.pattern!r} matches none of the model's {len(known)} "
                f"parameters{did_you_mean(override.pattern, known)}"
            )
    for path in known:
        weights = weights_for(scheme, path)
        if path == EMBEDDING and weights.rounding != "nearest":
            raise RingstepError(f"scheme {scheme.name}: {path}: rounding = {weights.rounding!r} needs inputs to weigh "
                                "errors by, and a table has none; leave it out")  # fmt: skip
        if reason := contradiction(weights):
            raise RingstepError(f"scheme {scheme.name}: {path}: {reason}")


def raised(scheme: Scheme, paths: Iterable[str], bits: int) -> Scheme:
    """The scheme with these parameters in more bits: what `auto` does. From 8 bits on they get a scale a channel."""
    keys: tuple[tuple[str, Any], ...] = (("bits", bits),)
    if bits >= PER_CHANNEL_BITS:
        keys = (("bits", bits), ("block", None), ("two_level", False))
    more = tuple(Override(path, keys) for path in paths)
    return dataclasses.replace(scheme, override=scheme.override + more)


def refuse(scheme: Scheme, chip: Chip, paths: Iterable[str] = ()) -> None:
    """Raise RingstepError with the reason where a chip's tensor processor (HTP) cannot run the scheme.

    `paths` are a model's parameters (see paths_of); without them the overrides are not looked at. The embedding
    never counts: the host reads it. The limits were seen with the compiler of onnxruntime-qnn 2.7.0 for v68, v69,
    v73 and v79; docs/lint.md has most of them, devices.toml the chips'.
    """
    at = f"scheme {scheme.name} cannot run on {chip.name} ({chip.htp_arch})"
    every = {path: weights_for(scheme, path) for path in paths if path != EMBEDDING}
    every = every or {"[weights]": scheme.weights, "[head]": scheme.head}
    for _, high in scheme.auto.promotions() if scheme.auto else ():
        every[f"[auto] steps to {high} bits"] = weights_for(raised(scheme, ["a weight"], high), "a weight")
    activations = scheme.activations.bits
    integers = [path for path, weights in every.items() if weights.dtype == "int"]
    floats = [path for path, weights in every.items() if weights.dtype == "float16"]
    if activations == 0 and integers:
        raise RingstepError(
            f"{at}: {integers[0]} has integer weights and float activations, which only CPUs take; "
            "set [activations] bits = 16"
        )
    if activations == 8:
        raise RingstepError(f"{at}: it takes no norms of 8-bit activations; set [activations] bits = 16")
    if chip.arch < 69 and 8 in dataclasses.astuple(scheme.exceptions):
        raise RingstepError(f"{at}: no operator there reads 16-bit activations and writes 8-bit ones; leave the 8 of "
                            "[exceptions] out")  # fmt: skip
    if not chip.fp16 and (activations == 0 or floats or 0 in dataclasses.astuple(scheme.exceptions)):
        what = f"{floats[0]} is" if floats else "some activations are"
        raise RingstepError(f"{at}: {what} in float16, which it does not compute; use integers throughout")
    for path in integers:
        if reason := _refused(every[path], chip):
            raise RingstepError(f"{at}: {path}: {reason}")


def _refused(weights: Weights, chip: Chip) -> str:
    if weights.bits < 4:
        return f"{weights.bits}-bit weights come out wrong there; use 4 or 8 bits"
    if not weights.symmetric:
        return "weights with a zero point a channel or block are refused there; set symmetric = true"
    if weights.block is not None and not weights.two_level:
        return "plain blocks would fall back to the CPU; set two_level = true (4 bits), or leave block out"
    if weights.two_level and not chip.lpbq:
        return "two-level blocks (LPBQ) need v69 or newer; leave block and two_level out"
    if weights.bits == 16 and chip.arch < 73:
        return "16-bit weights with 16-bit activations need v73 or newer; use 8 bits"
    return ""


def describe(scheme: Scheme) -> dict[str, Any]:
    """The scheme as JSON takes it, defaults written out, for the manifest."""
    found = dataclasses.asdict(scheme)
    found["override"] = [{"pattern": o.pattern, **dict(o.keys)} for o in scheme.override]
    if scheme.auto:
        found["auto"]["steps"] = list(scheme.auto.steps)
    return found


def fingerprint(scheme: Scheme) -> str:
    """A sha256 (hex) over what a scheme does: schemes that differ in name and description only are the same."""
    found = describe(scheme)
    del found["name"], found["description"]
    text = json.dumps(found, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()

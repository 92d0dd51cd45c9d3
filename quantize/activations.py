"""Encodings of activations: which tensors share one, and what each is, from what calibration saw.

Tensors that only move (Reshape, Transpose, Split, Concat, ...) share the encoding of what they move, so that nothing is
rounded twice. Cache entries are apart: past and new ones have one encoding, so that the host copies them as they are.
Only computed tensors and inputs have ranges; those have the same names in decode and prefill graphs, and so the
encodings are the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from quantize.observe import Seen, merge, value_range
from quantize.scheme import Scheme
from ringstep.contract import INTEGERS, DType, Encoding
from ringstep.devices import Chip
from ringstep.errors import RingstepError

MOVES = ("Reshape", "Transpose", "Split", "Slice", "Squeeze", "Unsqueeze", "Concat", "Identity", "Expand")
# HTP's 16-bit kernels of these give their results on one grid whatever is asked for (docs/htp-accuracy.md).
FIXED = {"Sigmoid": Encoding(2.0**-16, 0), "Tanh": Encoding(2.0**-15, 32768), "Softmax": Encoding(1 / 65535, 0)}
GATES = ("Sigmoid", "Swish", "Gelu", "Tanh", "Erf")
# How far below the smallest score masked ones go: e^-20 is half a step of a 16-bit softmax over a million keys.
MASK_DEPTH = 20.0
HEADROOM = 1.5
# A sink that reaches so many times as far as all other text would leave it two bits less: its tensor stays in float.
SINK_REACH = 4.0


@dataclass(frozen=True)
class Activation:
    """A quantised activation: its integer type and encoding."""

    dtype: DType
    encoding: Encoding

    def fake(self, values: np.ndarray) -> np.ndarray:
        """What is left of float values after quantising them."""
        low, high = INTEGERS[self.dtype]
        scale, zero = np.float32(self.encoding.scale), self.encoding.zero
        q = np.clip(np.rint(values / scale) + zero, low, high) - zero
        return (q * scale).astype(np.float32)


def from_range(low: float, high: float, dtype: DType, symmetric: bool) -> Activation:
    """The encoding that spends an integer type on low .. high (0 among them), zero in the middle if symmetric."""
    bottom, top = INTEGERS[dtype]
    tiny = float(np.finfo(np.float32).tiny) * 65536
    if symmetric:
        middle = 0 if bottom < 0 else (top + 1) // 2
        return Activation(dtype, Encoding(float(np.float32(max(-low, high, tiny) / (top - middle))), middle))
    scale = float(np.float32(max(high - low, tiny) / (top - bottom)))
    return Activation(dtype, Encoding(scale, int(np.clip(round(bottom - low / scale), bottom, top))))


def is_float(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """Whether a value is a float activation (no initializer)."""
    return value is not None and value.const_value is None and value.dtype == ir.DataType.FLOAT


def groups(graph: ir.Graph) -> dict[str, str]:
    """Every float activation's group by name; members of a group share an encoding."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    def join(a: str, b: str) -> None:
        parent[root(b)] = root(a)

    entries = {str(v.name) for v in graph.outputs if str(v.name).startswith(("new_", "present_"))}
    for value in graph.inputs:
        if is_float(value):
            root(str(value.name))
    for node in graph:
        outs = [str(v.name) for v in node.outputs if is_float(v)]
        for out in outs:
            root(out)
        if node.op_type in MOVES:
            moved = [str(v.name) for v in node.inputs if is_float(v)]
            for name in moved:
                for out in outs:
                    if out not in entries:
                        join(name, out)
    for name in entries:
        _, what, layer = name.split("_")
        join(f"past_{what}_{layer}", name)
    return {name: root(name) for name in parent}


def roles(graph: ir.Graph) -> dict[str, str]:
    """The role of each input and computed tensor, as Ranges names them, by what computes with it.

    Moves do not count: decode and prefill move things otherwise.
    """
    found: dict[str, str] = {}
    for node in graph:
        for value in node.outputs if node.op_type not in MOVES else ():
            name = str(value.name)
            readers = readers_of(value)
            if name == "logits":
                found[name] = "logits"
            elif node.op_type in GATES or any(op in GATES for op in readers):
                found[name] = "gate"
            elif node.op_type == "Softmax" or "Softmax" in readers or (node.op_type == "MatMul" and "Add" in readers):
                found[name] = "scores"
            elif "RMSNormalization" in readers and node.op_type in ("Add", "RMSNormalization"):
                found[name] = "residual"
            elif any(op in ("Gemm", "MatMul") for op in readers):
                found[name] = "linear_input"
    for value in graph.inputs:
        name = str(value.name)
        found[name] = "cache" if name.startswith("past_") else "residual" if name in ("x", "embedded") else "other"
    return found


def readers_of(value: ir.Value) -> set[str]:
    """The operators that compute with a value, or with what is moved of it."""
    found: set[str] = set()
    for user, _ in value.uses():
        found |= {user.op_type} if user.op_type not in MOVES else set().union(*map(readers_of, user.outputs))
    return found


def encode(graph: ir.Graph, seen: Mapping[str, Seen], scheme: Scheme, chip: Chip | None,
           sink: Mapping[str, Seen] | None = None) -> dict[str, Activation | None]:  # fmt: skip
    """The encoding of every float activation of a graph; None for one that stays in float.

    `sink` is what the sink's own tokens were, where they run through the graph. Raises RingstepError naming a tensor
    that calibration did not see, or saw values in that are not finite.
    """
    group, role = groups(graph), roles(graph)
    members: dict[str, list[str]] = {}
    for name, top in group.items():
        members.setdefault(top, []).append(name)
    found: dict[str, Activation | None] = {}
    # A step's inputs and outputs are of one type, and HTP's linears read and write one width, never floats.
    plain = {str(v.name) for v in (*graph.inputs, *graph.outputs)}
    if chip is not None:
        linears = [node for node in graph if node.op_type == "Gemm"]
        plain |= {str(v.name) for node in linears for v in (node.inputs[0], node.outputs[0]) if v is not None}
    masked = {str(node.outputs[0].name): node for node in graph if masks(node)}
    mask = Activation("uint16", Encoding(float(np.float32(mask_depth(graph, seen) / 65535)), 65535))
    fixed = {str(node.outputs[0].name): FIXED[node.op_type] for node in graph if node.op_type in FIXED}
    for names in members.values():
        special = next((n for n in names if n in fixed), None)
        own: Activation | None
        if special is not None and scheme.activations.bits == 16 and bits_of(role[special], scheme) == 16:
            own = Activation("uint16", fixed[special])
        elif any(n.startswith("mask_") for n in names):
            own = mask
        else:
            own = from_seen(graph, names, seen, role, scheme, chip, masked, not plain.isdisjoint(names), sink or {})
        found.update(dict.fromkeys(names, own))
    return found


def masks(node: ir.Node) -> bool:
    """Whether a node adds a mask to scores."""
    return node.op_type == "Add" and any(v is not None and str(v.name).startswith("mask_") for v in node.inputs)


def mask_depth(graph: ir.Graph, seen: Mapping[str, Seen]) -> float:
    """How far a mask pushes scores down: past the span of all scores that calibration saw, and MASK_DEPTH more."""
    scores = [unmasked(node, seen) for node in graph if masks(node)]
    return HEADROOM * max((s.high - s.low for s in scores if s is not None), default=0.0) + MASK_DEPTH


def unmasked(node: ir.Node, seen: Mapping[str, Seen]) -> Seen | None:
    """What calibration saw of the scores that a node adds a mask to."""
    own = next((v for v in node.inputs if v is not None and not str(v.name).startswith("mask_")), None)
    while own is not None and str(own.name) not in seen and (maker := own.producer()) is not None:
        own = maker.inputs[0]
    return seen.get(str(own.name)) if own is not None else None


def bits_of(role: str, scheme: Scheme) -> int:
    """Bits of an activation of this role, 0 for float."""
    own = {"residual": scheme.exceptions.norms, "gate": scheme.exceptions.gates, "scores": scheme.exceptions.softmax}
    found = own.get(role)
    return scheme.activations.bits if found is None else found


def from_seen(graph: ir.Graph, names: list[str], seen: Mapping[str, Seen], role: Mapping[str, str], scheme: Scheme,
              chip: Chip | None, masked: Mapping[str, ir.Node], plain: bool, sink: Mapping[str, Seen],
              ) -> Activation | None:  # fmt: skip
    """A group's encoding from its members' histories; `plain`: one of them can only be what most activations are."""
    cached = any(n.startswith("past_") for n in names)
    node = next((masked[n] for n in names if n in masked), None)
    known = [n.replace("present_", "new_") for n in sorted(names)]  # what `roll` returns calibration knows as new
    histories = [seen[n] for n in known if n in seen] if node is None else [unmasked(node, seen)]
    parts = [h for h in histories if h is not None]
    if not parts:
        raise RingstepError(f"tensor {sorted(names)[0]}: calibration never saw it, so it has no range")
    whole = merge(parts)
    if not np.isfinite([whole.low, whole.high]).all():
        raise RingstepError(f"tensor {sorted(names)[0]}: values that are not finite during calibration")
    kind = "cache" if cached else next((role[n] for n in sorted(names) if n in role), "other")
    bits = scheme.cache.bits if cached else scheme.activations.bits if plain else bits_of(kind, scheme)
    if bits == 0:
        return None
    tokens = [sink[n] for n in known if n in sink]
    if tokens and not cached and node is None:
        own = merge(tokens)
        far = max(abs(own.low), abs(own.high)) > SINK_REACH * max(abs(whole.low), abs(whole.high))
        if far and not plain and (chip is None or chip.fp16):
            return None
        whole = merge([whole, own])
    # HTP's MatMul keeps a second operand of int16 with zero 0; uint16 it cuts to 8 bits, on v68 and v69 always
    # (docs/htp-accuracy.md): there a wider cache would only cost memory.
    if cached and bits == 16 and chip is not None and chip.arch < 73:
        bits = 8
    method = getattr(scheme.activations.ranges, kind)
    low, high = value_range(whole, method, 1 << bits, scheme.activations.percentile)
    if bits == 16:
        # Other text reaches further (in SmolLM2 up to 1.9 times), and clipping costs more than half a bit.
        low, high = HEADROOM * low, HEADROOM * high
    if node is not None:
        low -= MASK_DEPTH  # masked scores lie lower still and are clipped there
    if cached:
        # Symmetric in 8 bits too: zero 128 has 77 dB in the MatMul, another zero 66.
        return from_range(low, high, "uint8" if bits == 8 else "int16", symmetric=True)
    return from_range(low, high, "uint8" if bits == 8 else "uint16", symmetric=False)

"""Operators that a target lacks, or takes and computes wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.casts import BOOL_DATA
from sanitize.graph import dequantised
from sanitize.passes import nan_guards as nan_guards_pass
from sanitize.passes.fuse_gelu import find_gelu
from sanitize.passes.fuse_rms_norm import on_last
from sanitize.rules.subject import ONNX, SIXTEEN, Hit, Subject, element
from sanitize.support import load_support

# The pass that replaces what HTP lacks; see mending_pass.
FIXED_BY = {
    "Attention": "lower-attention", "RotaryEmbedding": "lower-rotary-embedding",
    "GatherND": "lower-gather-nd", "Erf": "fuse-gelu", "Size": "fold",
    "com.microsoft.MatMulNBits": "lower-matmul-nbits",
    "com.microsoft.GroupQueryAttention": "lower-group-query-attention",
    "com.microsoft.MultiHeadAttention": "lower-multi-head-attention",
    "com.microsoft.RotaryEmbedding": "lower-rotary-embedding",
    "com.microsoft.SkipLayerNormalization": "lower-skip-norm",
    "com.microsoft.SkipSimplifiedLayerNormalization": "lower-skip-norm",
    "com.microsoft.FusedMatMul": "lower-fused-matmul",
    **{f"com.microsoft.{op}": "lower-gelu" for op in ("BiasGelu", "FastGelu", "QuickGelu")},
}  # fmt: skip
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
KINDS = {
    ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.INT32: "int32", ir.DataType.INT64: "int64",
    ir.DataType.BOOL: "bool",
}  # fmt: skip
WEIGHTS = {ir.DataType.UINT8: "a16 u8", ir.DataType.UINT16: "16x16"}
ANY_WEIGHTS = "a16 any"  # 16-bit activations, weights in floats: whatever the chip takes is open to them
DATA_INPUT = {"Where": 1}  # elsewhere the first input is the data
CONVERSIONS = ("QuantizeLinear", "DequantizeLinear", "Constant")
# What these return in 16 bits is right in one encoding only (scale, zero point).
FIXED_ENCODINGS = {"Sigmoid": (2.0**-16, 0), "HardSigmoid": (2.0**-16, 0), "Tanh": (2.0**-15, 1 << 15)}
# And this collapses when the output scale is that fine or finer.
TOO_FINE = {"Log": 2.0**-14}


def full_name(node: ir.Node) -> str:
    """Operator as the data files have it: the domain in front unless it is ONNX's own."""
    return node.op_type if node.domain in ONNX else f"{node.domain}.{node.op_type}"


def kind_of(subject: Subject, node: ir.Node) -> str | None:
    """The type that the survey knows this node's case by; None where it knows none."""
    index = DATA_INPUT.get(node.op_type, 0)
    data = node.inputs[index] if len(node.inputs) > index else None
    if data is None or data.dtype not in KINDS:
        return None
    # A constant may stand first: Mul(2, x) is judged by x.
    moving = (v for v in node.inputs if v is not None and v.dtype == data.dtype and not subject.constant(v))
    data = data if not subject.constant(data) else next(moving, data)
    kind = KINDS[data.dtype]  # type: ignore[index]
    if kind != "fp32":
        return kind
    source = dequantised(data)
    if source is None or subject.constant(source):
        # Floats that are still to be quantised; where some are quantised already, floats are meant to stay.
        return ANY_WEIGHTS if subject.target.precision == "a16" and not subject.quantised else kind
    for value in node.inputs[1:]:
        weight = dequantised(value)
        if weight is not None and subject.constant(weight):
            return WEIGHTS.get(weight.dtype, "a16") if weight.dtype else "a16"
    return ANY_WEIGHTS


def entry_of(subject: Subject, node: ir.Node) -> tuple[str, list[str]] | None:
    """Type and architectures that the survey found for a node; None where it has no answer."""
    entry = subject.support.operators.get(full_name(node))
    if entry is None:
        return None
    kind = kind_of(subject, node)
    if kind == ANY_WEIGHTS:
        assert subject.target.chip is not None
        takes = (k for k in ("a16", *WEIGHTS.values()) if subject.target.chip.htp_arch in entry.get(k, []))
        kind = next(takes, "a16")
    if kind not in entry:
        kind = "a16" if kind in ("a16 u8", "16x16") and "a16" in entry else "any"
    if kind not in entry:
        # An operator surveyed in one type, such as control flow, is judged by it.
        kind = next(iter(entry)) if len(entry) == 1 else None
    return (kind, entry[kind]) if kind else None


def gelu_input(node: ir.Node) -> ir.Value | None:
    """What an Erf takes the GELU of: 1 + erf(x / sqrt 2), which the compiler fuses to its Gelu; None elsewhere."""
    erf = node.op_type == "Erf" and node.domain in ONNX
    plus = match.with_constant(match.next_node(node.outputs[0], "Add")) if erf else None
    times = match.scaled(graphs.made_by(node.inputs[0], "Mul", "Div")) if plus is not None and plus[1] == 1.0 else None
    return times[0] if times is not None and abs(times[1] / 0.5**0.5 - 1.0) < 1e-3 else None


def mending_pass(subject: Subject, node: ir.Node, kind: str) -> str:
    """The pass that takes out a node which is refused in this type, "" if none can."""
    assert subject.target.chip is not None
    name, arch = full_name(node), subject.target.chip.htp_arch
    if name == "GatherND" and graphs.tensor(node.inputs[1]) is not None:
        return FIXED_BY[name]
    in_int32 = arch in subject.support.operators[name].get("int32", [])
    narrows = kind == "int64" and in_int32 and arch not in subject.support.wrong.get(f"{name} int32", [])
    if narrows or (kind == "bool" and name in BOOL_DATA):
        return "narrow-types"
    if name == "GatherND" or (name == "Erf" and find_gelu(node) is None):
        return ""
    return FIXED_BY.get(name, "")


def unsupported(subject: Subject) -> Iterator[Hit]:
    """The compiler refused the operator's smallest model, or has never heard of it."""
    assert subject.target.chip is not None
    chip, arch = subject.target.chip.name, subject.target.chip.htp_arch
    for place in subject.live:
        node, name = place.node, full_name(place.node)
        if node.op_type in CONVERSIONS or gelu_input(node) is not None:
            continue
        if name not in subject.support.operators:
            yield Hit(place.name, f"{chip} knows no operator {name}", place.where)
            continue
        found = entry_of(subject, node)
        if found is None or arch in found[1] or (found[0] in ("fp32", "fp16") and not subject.target.chip.fp16):
            continue
        kind, _ = found
        crashes = arch in subject.support.crashes.get(f"{name} {kind}", [])
        verb = "crashes the compiler" if crashes else "is refused"
        fixed_by = mending_pass(subject, node, kind)
        fix = f"{name} in int32 is taken" if kind == "int64" and fixed_by == "narrow-types" else None
        taken = subject.support.operators[name].get("a16 u8", [])
        if kind in ("a16", *WEIGHTS.values()) and kind != "a16 u8" and arch in taken:
            fixed_by, fix = "", f"quantise its weight to uint8: {name} with that is taken"
        elif name == "Erf" and subject.quantised and fixed_by:
            # The GELU around it is no longer seen between QuantizeLinear and DequantizeLinear.
            fixed_by, fix = "", f"run sanitize (pass {fixed_by}) on the float model, then quantise it"
        yield Hit(place.name, f"{name} in {kind} {verb} for {chip}", place.where, fixed_by=fixed_by, fix=fix)


def wrong(subject: Subject) -> Iterator[Hit]:
    """The compiler takes it; the simulator computed something else, or stopped."""
    assert subject.target.chip is not None
    for place in subject.live:
        found = entry_of(subject, place.node)
        if found is None:
            continue
        name, arch = full_name(place.node), subject.target.chip.htp_arch
        if arch in subject.support.wrong.get(f"{name} {found[0]}", []):
            what = f"{name} in {found[0]} compiles and then computes something else"
            yield Hit(place.name, what, place.where, fixed_by=mending_pass(subject, place.node, found[0]))


def on_cpu(subject: Subject) -> Iterator[Hit]:
    """ONNX Runtime's CPU provider, which takes what a delegate does not."""
    version = graphs.opset(subject.model)
    for place in subject.places:
        name = full_name(place.node)
        entry = subject.support.operators.get(name) if subject.target.name == "ort-mobile" else _cpu_entry(name)
        if entry is None:
            yield Hit(place.name, f"the CPU provider has no {name}", place.where)
            continue
        if place.node.domain in ONNX and _defined(name, version) > entry["opset"]:
            what = f"{name} as opset {version} defines it has no kernel, that of opset {entry['opset']} has"
            yield Hit(place.name, what, place.where)
            continue
        index = DATA_INPUT.get(name, 0)
        data = place.node.inputs[index] if len(place.node.inputs) > index else None
        kind = KINDS.get(data.dtype) if data is not None and data.dtype else None
        known = set(entry["types"])
        if kind and "any" not in known and kind not in known and len(known) > 1:
            yield Hit(place.name, f"{name} in {element(data)} has no kernel", place.where)


def _cpu_entry(name: str) -> dict[str, Any] | None:
    return load_support("ort-mobile").operators.get(name)


def _defined(name: str, version: int) -> int:
    try:
        return int(onnx.defs.get_schema(name, version, "").since_version)
    except onnx.defs.SchemaError:
        return 0


def beside_xnnpack(subject: Subject) -> Iterator[Hit]:
    """Nodes that run on the CPU provider beside XNNPACK."""
    for place in subject.live:
        node, name = place.node, full_name(place.node)
        entry = subject.support.operators.get(name)
        if entry is None:
            if node.op_type not in CONVERSIONS:
                yield Hit(place.name, f"XNNPACK has no {name}", place.where, severity="note")
            continue
        data = graphs.dims(node.inputs[0])
        if "rank" in entry and data is not None and len(data) != entry["rank"]:
            what = f"{name} of rank {len(data)}; XNNPACK takes rank {entry['rank']}"
            yield Hit(place.name, what, place.where)
        elif any(i < len(node.inputs) and not subject.constant(node.inputs[i]) for i in entry.get("constant", [])):
            yield Hit(place.name, f"{name} with weights that are no constants", place.where)
        elif entry.get("last_axis") and data and graphs.attribute(node, "axis", -1) not in (-1, len(data) - 1):
            yield Hit(place.name, f"{name} over an axis that is not the last", place.where)


def nan_guards(subject: Subject) -> Iterator[Hit]:
    """IsNaN, which exporters put around a softmax."""
    for place in subject.ops("IsNaN"):
        guards = nan_guards_pass.guards(place.node, subject.target)
        yield Hit(place.name, "IsNaN is left from a guard", place.where, fixed_by=None if guards else "")


def norm_rows(subject: Subject) -> Iterator[Hit]:
    """RMSNormalization over more rows than its kernel handles: see the observations in docs/lint.md."""
    for place in subject.ops("RMSNormalization", "SimplifiedLayerNormalization"):
        data = place.node.inputs[0]
        dims = graphs.dims(data)
        if data is None or dims is None or len(dims) < 3 or dims[-3] <= 8 or dequantised(data) is not None:
            continue
        seen = dims[-3] <= 12 or dims[-1] <= 32 or data.dtype == ir.DataType.FLOAT16
        what = f"RMSNormalization over {list(dims)}: the third dim from the end exceeds 8"
        fixed_by = None if on_last(place.node, data) else ""
        yield Hit(place.name, what, place.where, fixed_by=fixed_by, severity="error" if seen else "warning")


def output_encodings(subject: Subject) -> Iterator[Hit]:
    """16-bit Sigmoid, HardSigmoid and Tanh whose output is not in the one encoding that their kernel writes."""
    for place in subject.ops(*FIXED_ENCODINGS, *TOO_FINE):
        for user in graphs.users(place.node.outputs[0]):
            stored = user.outputs[0].dtype
            if user.op_type != "QuantizeLinear" or stored not in SIXTEEN:
                continue
            scale = graphs.scalar(user.inputs[1])
            zero = graphs.scalar(user.inputs[2]) if len(user.inputs) > 2 else 0.0
            if scale is None or zero is None:
                continue
            if place.node.op_type in TOO_FINE:
                finest = TOO_FINE[place.node.op_type]
                if scale <= finest:
                    fix = f"widen its output range until the scale exceeds {finest:.9g}"
                    yield Hit(place.name, f"{place.node.op_type} into scale {scale:.9g}", place.where, fix=fix)
                continue
            want_scale, want_zero = FIXED_ENCODINGS[place.node.op_type]
            fix = f"quantise its output to uint16 with scale {want_scale:.9g}, zero point {want_zero}"
            signed = stored == ir.DataType.INT16
            if signed and place.node.op_type == "Sigmoid":
                want_scale, want_zero, signed = 2.0**-15, 0, False
            # Half a step over the whole range does no harm: 1/65535 is as good as 1/65536.
            if signed or abs(scale / want_scale - 1) > 1e-4 or abs(zero - want_zero) > 1:
                what = f"{place.node.op_type} into {element(user.outputs[0])}, scale {scale:.4g}, zero point {zero:.0f}"
                yield Hit(place.name, what, place.where, fix=fix)


def branches(subject: Subject) -> Iterator[Hit]:
    """An If that the compiler does not take: its branches read weights of the graph around it."""
    for place in subject.ops("If"):
        for attribute in place.node.attributes.values():
            if attribute.type != ir.AttributeType.GRAPH:
                continue
            for node in attribute.as_graph():
                outer = [v for v in node.inputs if v is not None and v.is_initializer() and v.graph is not node.graph]
                if outer:
                    what = f"a branch reads {outer[0].name}, a weight of the graph around it"
                    yield Hit(place.name, what, place.where)
                    break

"""Element types of inputs, outputs and values, constants that a precision cannot hold, forms of quantisation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import infinities as infinities_pass
from sanitize.rules.operators import FLOATS, dequantised, full_name
from sanitize.rules.subject import SIXTEEN, Hit, Subject, element

# Where an infinity acts as a mask or a bound; weights of MatMul and Gather are not searched.
MASKING = ("Add", "Sub", "Mul", "Where", "Max", "Min", "Clip", "Pad", "Expand", "Concat", "Identity", "Cast", "Reshape",
           "Slice", "Unsqueeze", "Trilu", "ScatterND", "Softmax", "Gather", "Tile")  # fmt: skip
MASK_ELEMENTS = 1 << 24
CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")


def wide_io(subject: Subject) -> Iterator[Hit]:
    """int64 and bool inputs and outputs."""
    for side, value in _io(subject):
        if value.dtype in (ir.DataType.INT64, ir.DataType.BOOL):
            # HTP takes bools at its edge, so no pass changes what a host feeds.
            fixed_by = "" if value.dtype == ir.DataType.BOOL else None
            yield Hit(str(value.name), f"{side} {value.name} is {element(value)}", fixed_by=fixed_by)


def doubles(subject: Subject) -> Iterator[Hit]:
    """float64 at the edge of the graph, which is refused, and inside it."""
    for side, value in _io(subject):
        if value.dtype == ir.DataType.DOUBLE:
            yield Hit(str(value.name), f"{side} {value.name} is float64", severity="error")
    for place in subject.live:
        if any(value.dtype == ir.DataType.DOUBLE and not value.is_graph_output() for value in place.node.outputs):
            yield Hit(place.name, f"{full_name(place.node)} computes in float64", place.where)


def brain_floats(subject: Subject) -> Iterator[Hit]:
    """bfloat16 anywhere that something is computed."""
    for side, value in _io(subject):
        if value.dtype == ir.DataType.BFLOAT16:
            yield Hit(str(value.name), f"{side} {value.name} is bfloat16")
    for place in subject.live:
        if any(value.dtype == ir.DataType.BFLOAT16 and not value.is_graph_output() for value in place.node.outputs):
            yield Hit(place.name, f"{full_name(place.node)} computes in bfloat16", place.where)


def floats_on_fixed_point(subject: Subject) -> Iterator[Hit]:
    """Floats on a chip that computes integers only."""
    assert subject.target.chip is not None
    chip = subject.target.chip
    if chip.fp16:
        return
    floating = [
        place
        for place in subject.live
        if place.node.op_type not in CONVERSIONS
        and not _moves_floats(subject, place.node)
        and _computes_floats(subject, place.node)
    ]
    if floating and not subject.quantised:
        yield Hit("", f"the model computes in floats; {chip.name} ({chip.htp_arch}) has none")
        return
    if not chip.float_io:
        for side, value in _io(subject):
            if value.dtype in FLOATS:
                fix = "move QuantizeLinear and DequantizeLinear to the host"
                yield Hit(str(value.name), f"{side} {value.name} is {element(value)}", fix=fix, severity="warning")
    for place in floating:
        yield Hit(place.name, f"{full_name(place.node)} computes in floats", place.where)


def _moves_floats(subject: Subject, node: ir.Node) -> bool:
    """Whether the chip takes this operator on floats all the same, such as Reshape."""
    assert subject.target.chip is not None
    entry = subject.support.operators.get(full_name(node), {})
    kind = "fp16" if node.outputs[0].dtype == ir.DataType.FLOAT16 else "fp32"
    if node.inputs and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT16:
        kind = "fp16"
    return subject.target.chip.htp_arch in entry.get("any" if "any" in entry else kind, [])


def _computes_floats(subject: Subject, node: ir.Node) -> bool:
    """Whether a float reaches or leaves a node other than from DequantizeLinear and to QuantizeLinear."""
    for value in node.inputs:
        if value is not None and value.dtype in FLOATS and not subject.constant(value) and dequantised(value) is None:
            return True
    for value in node.outputs:
        users = graphs.users(value)
        if value.dtype in FLOATS and (value.is_graph_output() or any(u.op_type != "QuantizeLinear" for u in users)):
            return True
    return False


def wide_products(subject: Subject) -> Iterator[Hit]:
    """16-bit weights (or norms' weights) on chips that multiply 16 by 8 bits."""
    assert subject.target.chip is not None
    arch = subject.target.chip.htp_arch
    for place in subject.ops("MatMul", "Gemm", "Conv", "ConvTranspose", "LayerNormalization", "RMSNormalization"):
        node = place.node
        data, weight = (dequantised(v) for v in (*node.inputs, None)[:2])
        if data is None or weight is None or data.dtype not in SIXTEEN or weight.dtype not in SIXTEEN:
            continue
        static = subject.constant(weight)
        taken = subject.support.operators.get(node.op_type, {}).get("16x16", [])
        if static and arch not in taken:
            yield Hit(place.name, f"{node.op_type} of 16-bit data and 16-bit weights", place.where)
        elif not static and subject.support.probes["16x16 MatMul of two activations"].get(arch) != "taken":
            yield Hit(place.name, f"{node.op_type} of two 16-bit activations", place.where)


def infinities(subject: Subject) -> Iterator[Hit]:
    """Infinite constants in masks and bounds."""
    mended = {id(value) for value, *_ in infinities_pass.masks(subject.model, subject.target)}
    by = lambda value: None if id(value) in mended or _bounds_nothing(value) else ""
    for graph in graphs.every_graph(subject.model):
        for value in graph.initializers.values():
            if _infinite(value):
                yield Hit(str(value.name), f"the constant {value.name} holds an infinity", fixed_by=by(value))
    for place in subject.places:
        if place.node.op_type == "Constant" and _infinite(place.node.outputs[0]):
            what = f"the constant {place.node.outputs[0].name} holds an infinity"
            yield Hit(place.name, what, place.where, fixed_by=by(place.node.outputs[0]))
        if place.node.op_type == "ConstantOfShape" and "value" in place.node.attributes:
            filling = place.node.attributes["value"].as_tensor().numpy()
            if filling.dtype.kind == "f" and np.isinf(filling).any():
                what = "ConstantOfShape fills with an infinity"
                yield Hit(place.name, what, place.where, fixed_by=by(place.node.outputs[0]))


def _bounds_nothing(value: ir.Value) -> bool:
    return any(infinities_pass.bounds_nothing(use.node, use.idx) for use in value.uses())


def _infinite(value: ir.Value) -> bool:
    if value.dtype not in (*FLOATS, ir.DataType.DOUBLE) or value.dtype == ir.DataType.BFLOAT16:
        return False
    if not any(user.op_type in MASKING for user in graphs.users(value)):
        return False
    numbers = graphs.array(value, MASK_ELEMENTS)
    return numbers is not None and bool(np.isinf(numbers).any())


def blocked(subject: Subject) -> Iterator[Hit]:
    """Weights in blocks, as MatMulNBits tools write them; HTP's own two-level form quantises within the graph."""
    for place in subject.places:
        node = place.node
        if node.op_type != "DequantizeLinear" or not graphs.attribute(node, "block_size", 0):
            continue
        if graphs.made_by(node.inputs[0], "QuantizeLinear") is None:
            size = graphs.attribute(node, "block_size")
            yield Hit(place.name, f"DequantizeLinear of {element(node.inputs[0])} in blocks of {size}", place.where)


def signed_nibbles(subject: Subject) -> Iterator[Hit]:
    """int4 weights without a zero point, and int2 weights."""
    for place in subject.places:
        node = place.node
        data = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if data is not None and data.dtype in (ir.DataType.INT2, ir.DataType.UINT2):
            fix = "store these weights in int4 or int8"
            yield Hit(place.name, f"DequantizeLinear of {element(data)} {data.name}", place.where, fix=fix)
        if data is not None and data.dtype == ir.DataType.INT4:
            missing = len(node.inputs) < 3 or node.inputs[2] is None
            if missing and not graphs.attribute(node, "block_size", 0):
                yield Hit(place.name, f"DequantizeLinear of int4 {data.name} has no zero point", place.where)


def _io(subject: Subject) -> Iterator[tuple[str, ir.Value]]:
    for value in subject.model.graph.inputs:
        if not value.is_initializer():
            yield "input", value
    for value in subject.model.graph.outputs:
        yield "output", value

"""A float graph made a QDQ graph for HTP: integers between the nodes, weights as references into quantised.bin.

    past_key (int16) ─ DQ ┐
    x (uint16) ─ DQ ─ RMSNormalization ─ Q ─ DQ ─ Gemm ─ Q ─ DQ ─ ... ─ Q ─ logits (uint16)
                             weight int16 ─ DQ ┘    └ DQ ─ weight int4 [out, in], scale [out]

Inputs and outputs are integers with the encodings that step.json lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quantize.activations import MOVES, Activation, is_float
from quantize.grid import Grid
from quantize.store import Place, Stored
from ringstep.errors import RingstepError

IR_TYPES: dict[str, ir.DataType] = {
    "uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8, "uint16": ir.DataType.UINT16, "int16": ir.DataType.INT16,
    "int4": ir.DataType.INT4, "float32": ir.DataType.FLOAT,
}  # fmt: skip
BYTES = {"uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "int4": 0.5, "float32": 4}


class Writer:
    """A graph being put together: nodes in order, and one initializer for each distinct constant."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}

    def initialize(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer, made once."""
        if name not in self.initializers:
            shape = ir.Shape(tensor.shape.numpy())
            value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self.initializers[name] = value
        return self.initializers[name]

    def constant(self, name: str, values: np.ndarray) -> ir.Value:
        """A small array in the graph itself."""
        return self.initialize(name, ir.tensor(np.ascontiguousarray(values).reshape(values.shape), name=name))

    def external(self, name: str, place: Place) -> ir.Value:
        """A reference into the weight files."""
        count = int(np.prod(place.shape))
        tensor = ir.ExternalTensor(
            place.file, place.offset, int(-(-count * BYTES[place.dtype] // 1)), IR_TYPES[place.dtype], name=name,
            shape=ir.Shape(place.shape), base_dir=self.folder,
        )  # fmt: skip
        return self.initialize(name, tensor)

    def zeros(self, dtype: str, shape: Sequence[int]) -> ir.Value:
        """Zero points of symmetric numbers, one tensor for each type and shape."""
        name = "zeros." + "x".join(map(str, (dtype, *shape)))
        values = np.zeros(tuple(shape), np.int8 if dtype == "int4" else dtype)
        return self.initialize(name, ir.tensor(values, dtype=IR_TYPES[dtype], name=name))

    def node(self, op: str, name: str, inputs: Sequence[ir.Value | None], output: str, dtype: str,
             shape: ir.Shape | None, attributes: Mapping[str, int] | None = None) -> ir.Value:  # fmt: skip
        """Append a node of one output."""
        made = ir.Value(name=output, shape=shape, type=ir.TensorType(IR_TYPES[dtype]))
        attrs = [ir.AttrInt64(key, value) for key, value in (attributes or {}).items()]
        self.nodes.append(ir.Node("", op, list(inputs), attrs, outputs=[made], name=name))
        return made

    def parameters(self, own: Activation) -> list[ir.Value]:
        """Scale and zero point of an activation."""
        e = own.encoding
        scale = self.constant(f"scale.{e.scale!r}", np.array(e.scale, np.float32))
        return [scale, self.constant(f"zero.{own.dtype}.{e.zero}", np.array(e.zero, own.dtype))]

    def quantise(self, x: ir.Value, own: Activation, output: str) -> ir.Value:
        """x -> integers named `output`."""
        name = f"{output}/QuantizeLinear"
        return self.node("QuantizeLinear", name, [x, *self.parameters(own)], output, own.dtype, x.shape)

    def dequantise(self, q: ir.Value, own: Activation) -> ir.Value:
        """Integers -> float."""
        return self.node("DequantizeLinear", f"{q.name}/DequantizeLinear", [q, *self.parameters(own)],
                         f"{q.name}_dequantised", "float32", q.shape)  # fmt: skip


def to_qdq(model: ir.Model, folder: Path, activations: Mapping[str, Activation | None], weights: Mapping[str, Stored],
           small: Mapping[str, np.ndarray]) -> ir.Model:  # fmt: skip
    """The QDQ form of a float graph that will lie in `folder`, beside the weight files.

    `weights` are the linears by name, `small` the values of every other float parameter (norms). Raises
    RingstepError naming a tensor without an encoding, or a weight that is neither.
    """
    graph = model.graph
    writer = Writer(folder)
    floats: dict[ir.Value, ir.Value] = {}
    inputs = []
    for value in graph.inputs:
        if not is_float(value):
            floats[value] = ir.Value(name=value.name, shape=value.shape, type=value.type)
            inputs.append(floats[value])
            continue
        own = encoding_of(value, activations)
        assert own is not None  # encode keeps inputs and outputs in integers
        q = ir.Value(name=value.name, shape=value.shape, type=ir.TensorType(IR_TYPES[own.dtype]))
        inputs.append(q)
        floats[value] = writer.dequantise(q, own)
    outputs: dict[str, ir.Value] = {}
    wanted = {str(v.name) for v in graph.outputs}
    for node in graph:
        if node.op_type == "Gemm" and (stored := weights.get(str(node.inputs[1].name))):  # type: ignore[union-attr]
            made = [linear(writer, node, floats, stored)]
        else:
            made = [ir.Value(name=f"{v.name}_float", shape=v.shape, type=v.type) for v in node.outputs]
            operands = [operand(writer, node, v, floats, small) for v in node.inputs]
            writer.nodes.append(ir.Node(node.domain, node.op_type, operands, node.attributes.values(), outputs=made,
                                        name=node.name))  # fmt: skip
        for value, result in zip(node.outputs, made, strict=True):
            own, name = encoding_of(value, activations), str(value.name)
            if own is None:
                result.name = name
                floats[value] = result
                continue
            moved = source_encoding(node, activations)
            if moved is not None and moved != own:
                # A move has one encoding; the change to the cache's is a step of its own.
                result = writer.dequantise(writer.quantise(result, moved, f"{name}_moved"), moved)
            kept = name in wanted or name.startswith("hidden_")  # where a step may be cut into parts
            q = writer.quantise(result, own, name if kept else f"{name}_quantised")
            if name in wanted:
                outputs[name] = q
            if value.uses():
                floats[value] = writer.dequantise(q, own)
    body = ir.Graph(
        inputs, [outputs[str(v.name)] for v in graph.outputs], nodes=writer.nodes,
        initializers=list(writer.initializers.values()), opset_imports=dict(graph.opset_imports), name=graph.name,
    )  # fmt: skip
    return ir.Model(body, ir_version=model.ir_version, producer_name="ringstep")


def refusal(grid: Grid | None) -> str:
    """Why a linear on this grid has no form here that HTP keeps; "" where it has one."""
    if grid is None:
        return "its weights stay in float16, and a QDQ graph holds integers only: give it 4 or 8 bits"
    if not grid.symmetric:
        return "HTP refuses weights with zero points: set symmetric = true"
    if grid.block is not None and not grid.two_level:
        return "HTP leaves plain blocks to the CPU: set two_level = true (4 bits), or leave block out"
    if grid.bits not in (4, 8, 16):
        return f"HTP has no weights of {grid.bits} bits: use 4, 8 or 16"
    return ""


def encoding_of(value: ir.Value, activations: Mapping[str, Activation | None]) -> Activation | None:
    """A tensor's encoding, None where it stays in float; RingstepError where nothing is known of it."""
    if str(value.name) not in activations:
        raise RingstepError(f"tensor {value.name}: no encoding; calibrate again with this graph")
    return activations[str(value.name)]


def source_encoding(node: ir.Node, activations: Mapping[str, Activation | None]) -> Activation | None:
    """The encoding of what a node moves; None for a node that computes."""
    if node.op_type not in MOVES:
        return None
    return next((encoding_of(v, activations) for v in node.inputs if is_float(v)), None)


def operand(writer: Writer, node: ir.Node, value: ir.Value | None, floats: Mapping[ir.Value, ir.Value],
            small: Mapping[str, np.ndarray]) -> ir.Value | None:  # fmt: skip
    """What a node reads: an activation's float form, a quantised parameter or constant, or integers as they are."""
    if value is None or value in floats:
        return None if value is None else floats[value]
    if value.const_value is None:
        raise RingstepError(f"node {node.name}: reads {value.name}, which nothing before it makes")
    name = str(value.name)
    if value.dtype != ir.DataType.FLOAT:
        return writer.initialize(name, value.const_value)
    array = small[name] if name in small else value.const_value.numpy()
    if array.size > 1 << 16:
        raise RingstepError(f"node {node.name}: weight {name} is no linear layer's; it would stay in float")
    q, scale, zero = integers_of(name, array)
    return dequantised(writer, name, q, np.array(scale, np.float32), np.array(zero, q.dtype))


def integers_of(name: str, array: np.ndarray) -> tuple[np.ndarray, float, int]:
    """A small parameter or constant as integers, their scale and zero point.

    Raises RingstepError for values that are not finite.
    """
    if not np.isfinite(array).all():
        raise RingstepError(f"tensor {name}: values that are not finite")
    if array.size == 1:
        # A single number is exact: it is its own scale.
        own = float(array.reshape(-1)[0])
        q = np.full(array.shape, 32767 if own > 0 else 0, np.uint16)
        scale, zero = (own / 32767, 0) if own > 0 else (-own / 32768, 32768)
        return (q, scale, zero) if own else (q, 1.0, 0)
    # RMSNormalization takes int16 with zero 0 on every chip, v68 too; int8 on none.
    scale = float(np.float32(max(float(np.abs(array).max()), 1e-30) / 32767))
    return np.rint(array / np.float32(scale)).astype(np.int16), scale, 0


def dequantised(writer: Writer, name: str, q: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> ir.Value:
    """A small quantised constant and its DequantizeLinear."""
    if f"{name}_q" in writer.initializers:
        return next(n.outputs[0] for n in writer.nodes if n.name == f"{name}/DequantizeLinear")
    stored = writer.constant(f"{name}_q", q)
    inputs = [stored, writer.constant(f"{name}_scale", scale), writer.constant(f"{name}_zero", zero)]
    return writer.node("DequantizeLinear", f"{name}/DequantizeLinear", inputs, f"{name}_dequantised", "float32",
                       stored.shape)  # fmt: skip


def linear(writer: Writer, node: ir.Node, floats: Mapping[ir.Value, ir.Value], stored: Stored) -> ir.Value:
    """A Gemm on quantised weights."""
    x, weight, out = node.inputs[0], str(node.inputs[1].name), node.outputs[0]  # type: ignore[union-attr]
    assert x is not None
    if reason := refusal(stored.grid):
        raise RingstepError(f"tensor {weight}: {reason}")
    if stored.steps is not None:
        return two_level(writer, node, floats[x], weight, stored)
    q = writer.external(f"{weight}_q", stored.q)
    scale = writer.external(f"{weight}_scale", stored.scale)
    zero = writer.zeros(stored.q.dtype, stored.scale.shape)
    real = writer.node("DequantizeLinear", f"{node.name}/weight/DequantizeLinear", [q, scale, zero],
                       f"{weight}_dequantised", "float32", q.shape, {"axis": 0})  # fmt: skip
    return writer.node("Gemm", str(node.name), [floats[x], real], f"{out.name}_float", "float32", out.shape,
                       {"transB": 1})  # fmt: skip


def two_level(writer: Writer, node: ir.Node, x: ir.Value, weight: str, stored: Stored) -> ir.Value:
    """A MatMul on int4 blocks whose scales are a step times the channel's: the form that HTP keeps (LPBQ).

        steps uint8 [in / block, out] ─ DQ(channel [out]) ─ scales ┐
        weight int4 [out, in] ─ Transpose ─────── DQ(axis 0, blocks) ─ MatMul

    The compiler takes it in a MatMul only; it folds the Transpose, so that the file keeps the checkpoint's layout.
    """
    assert stored.steps is not None
    out, blocks, block = node.outputs[0], stored.steps.shape, int(stored.grid.block or 0)
    steps, channel = writer.external(f"{weight}_steps", stored.steps), writer.external(f"{weight}_scale", stored.scale)
    scales = writer.node("DequantizeLinear", f"{node.name}/scales/DequantizeLinear",
                         [steps, channel, writer.zeros("uint8", stored.scale.shape)], f"{weight}_scales", "float32",
                         ir.Shape(blocks), {"axis": 1})  # fmt: skip
    turned = ir.Shape(tuple(reversed(stored.shape)))
    made = ir.Value(name=f"{weight}_turned", shape=turned, type=ir.TensorType(ir.DataType.INT4))
    q = writer.external(f"{weight}_q", stored.q)
    writer.nodes.append(ir.Node("", "Transpose", [q], [ir.AttrInt64s("perm", [1, 0])], outputs=[made],
                                name=f"{node.name}/weight/Transpose"))  # fmt: skip
    back = writer.node("DequantizeLinear", f"{node.name}/weight/DequantizeLinear",
                       [made, scales, writer.zeros("int4", blocks)], f"{weight}_dequantised", "float32", turned,
                       {"axis": 0, "block_size": block})  # fmt: skip
    return writer.node("MatMul", str(node.name), [x, back], f"{out.name}_float", "float32", out.shape)

"""ONNX by blocks: each kind of layer is traced once and stamped for every layer, weights bound by name.

    plan ─ trace embed, each kind, head ─▶ blocks ─ stamp ─▶ /layers.0/attn/q_proj/Gemm ... ─▶ decode.onnx
    checkpoint ─ write_weights ─▶ weights.bin, embedding.bin ─────────── referenced as external data ┘

Time grows with the kinds of layers and the bytes written, memory with one block. Decode and prefill graphs
refer to the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass

from exporters.trace import OPSET, trace
from exporters.weights import Placed
from recipes.blocks import Embed, Head
from recipes.plan import Options, Plan, Source
from recipes.step import head_sources, layer_inputs, layer_outputs
from recipes.weights import key
from ringstep.contract import DType, GraphSpec, StepSpec, TensorSpec
from ringstep.errors import RingstepError

IR_VERSION = 11  # the first that carries opset 23
IR_TYPES: dict[DType, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int32": ir.DataType.INT32,
}


Blocks = dict[tuple[str, int], ir.Graph]


def trace_blocks(plan: Plan, options: Options, spec: StepSpec) -> Blocks:
    """Trace "embed", each kind of layer and "head" for every n (float32; the stamp sets the dtype).

    There is no "embed" where the block would be empty: the host looks rows up and nothing is scaled.
    """
    wanted: dict[tuple[str, int], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]] = {}
    with torch.device("meta"):
        for graph in spec.graphs:
            n, shapes = graph.n, {t.name: t.shape for t in graph.inputs}
            x = torch.zeros(n, plan.hidden)
            if options.embedding_inside or plan.embedding_scale != 1.0:
                embed = Embed(plan.vocab, plan.hidden, plan.embedding_scale, options.embedding_inside)
                ids = torch.zeros(n, dtype=torch.int32)
                wanted["embed", n] = embed, (ids if options.embedding_inside else x,)
            for name, kind in plan.kinds.items():
                cache = next(c for c, layer in zip(spec.caches, plan.layers, strict=True) if layer == name)
                args = (*[x] * options.streams, *(torch.zeros(shapes[i]) for i in layer_inputs(cache)))
                wanted[name, n] = plan.layer(kind, options), args
            wanted["head", n] = Head(plan.hidden, plan.vocab, plan.norm_eps), (x,)
    return dict(zip(wanted, trace(list(wanted.values())), strict=True))


class Stamp:
    """A model being put together from copies of traced blocks."""

    def __init__(self, dtype: DType, placed: Mapping[str, Placed], folder: Path) -> None:
        self.dtype, self.placed, self.folder = IR_TYPES[dtype], placed, folder
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}

    def value(self, tensor: TensorSpec) -> ir.Value:
        """A graph input or output of the contract."""
        return ir.Value(name=tensor.name, shape=ir.Shape(tensor.shape), type=ir.TensorType(IR_TYPES[tensor.dtype]))

    def initialize(self, name: str, tensor: ir.ExternalTensor | ir.TensorProtocol) -> None:
        """Add an initializer."""
        shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        self.initializers[name] = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)

    def weight(self, source: Source) -> ir.Value:
        """The initializer of a parameter, as a reference into the weight files."""
        name = key(source)
        if name not in self.initializers:
            where = self.placed[name]
            nbytes = int(np.prod(where.shape)) * self.dtype.itemsize
            tensor = ir.ExternalTensor(
                where.file, where.offset, int(nbytes), self.dtype, name=name, shape=ir.Shape(where.shape),
                base_dir=self.folder,
            )  # fmt: skip
            self.initialize(name, tensor)
        return self.initializers[name]

    def constant(self, node: ir.Node) -> ir.Value:
        """A Constant node as an initializer, one for each distinct content."""
        attribute = next(iter(node.attributes.values()))
        if attribute.name == "value":
            array = attribute.as_tensor().numpy()
        elif attribute.name == "value_ints":
            array = np.array(attribute.as_ints(), np.int64)
        else:
            array = np.array(attribute.as_float(), np.float32)
        if array.dtype == np.float32:
            array = array.astype(self.dtype.numpy())
        name = f"const.{array.dtype}." + "x".join(str(v) for v in array.reshape(-1)) + (".0d" if not array.ndim else "")
        if name not in self.initializers:
            self.initialize(name, ir.tensor(array, name=name))
        return self.initializers[name]

    def zeros(self, shape: tuple[int, ...]) -> ir.Value:
        """An initializer of zeros."""
        self.initialize("zeros", ir.tensor(np.zeros(shape, self.dtype.numpy()), name="zeros"))
        return self.initializers["zeros"]

    def block(
        self,
        block: ir.Graph,
        at: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[str],
        weights: Mapping[str, Source],
    ) -> list[ir.Value]:
        """Copy a block's nodes under the name `at`; returns its outputs, named `outputs`."""
        values: dict[ir.Value | None, ir.Value | None] = {None: None}
        values.update(zip(block.inputs, inputs, strict=True))
        # Sorted: the tracer's order changes from run to run, and with it the file and all that is built from it.
        values.update({value: self.weight(weights[name]) for name, value in sorted(block.initializers.items())})
        final = dict(zip(block.outputs, outputs, strict=True))
        for node in block:
            if node.op_type == "Constant":
                values[node.outputs[0]] = self.constant(node)
                continue
            made = []
            for i, old in enumerate(node.outputs):
                dtype = self.dtype if old.dtype == ir.DataType.FLOAT else old.dtype
                name = final.get(old) or f"{at}/{node.name}_output_{i}"
                made.append(ir.Value(name=name, shape=old.shape, type=ir.TensorType(dtype) if dtype else None))
            copy = ir.Node(
                node.domain, node.op_type, [values[v] for v in node.inputs], node.attributes.values(), outputs=made,
                name=f"{at}/{node.name}",
            )  # fmt: skip
            values.update(zip(node.outputs, made, strict=True))
            self.nodes.append(copy)
        results = [values[v] for v in block.outputs]
        assert all(r is not None for r in results)
        return results  # type: ignore[return-value]


def hidden_names(layer: int, streams: int) -> list[str]:
    """The names of a layer's output, where a step may be cut into parts: the residual stream and its rest."""
    return [f"hidden_{layer}", f"hidden_rest_{layer}"][:streams]


def stamp_step(
    plan: Plan, streams: int, spec: StepSpec, graph: GraphSpec, blocks: Blocks, placed: Mapping[str, Placed],
    folder: Path,
) -> ir.Model:  # fmt: skip
    """Put the step of one n together from its traced blocks."""
    stamp = Stamp(spec.dtype, placed, folder)
    inputs = {t.name: stamp.value(t) for t in graph.inputs}
    x = inputs["input_ids"] if "input_ids" in inputs else inputs["x"]
    if ("embed", graph.n) in blocks:
        (x,) = stamp.block(blocks["embed", graph.n], "/embed", [x], ["embedded"], {"weight": plan.embedding})
    stream = [x, stamp.zeros((graph.n, plan.hidden))] if streams > 1 else [x]
    made = {}
    for index, name in enumerate(plan.layers):
        cache = spec.caches[index]
        args = [*stream, *(inputs[i] for i in layer_inputs(cache))]
        names = [*hidden_names(index, streams), *layer_outputs(cache)]
        weights = plan.layer_sources(index)
        *stream, key, value = stamp.block(blocks[name, graph.n], f"/layers.{index}", args, names, weights)
        made.update({entry.name: entry for entry in (key, value)})
    (made["logits"],) = stamp.block(blocks["head", graph.n], "/head", stream[:1], ["logits"], head_sources(plan))
    outputs = []
    for tensor in graph.outputs:
        output = made[tensor.name]
        output.shape, output.type = ir.Shape(tensor.shape), ir.TensorType(IR_TYPES[tensor.dtype])
        outputs.append(output)
    body = ir.Graph(
        list(inputs.values()), outputs, nodes=stamp.nodes, initializers=list(stamp.initializers.values()),
        opset_imports={"": OPSET}, name=f"{spec.recipe}_n{graph.n}",
    )  # fmt: skip
    model = ir.Model(body, ir_version=IR_VERSION, producer_name="ringstep")
    RemoveUnusedNodesPass()(model)  # the last layer's rest goes nowhere
    return model


def graph_file(n: int) -> str:
    """The file name of a graph: decode.onnx for one token, prefill_N.onnx for a chunk."""
    return "decode.onnx" if n == 1 else f"prefill_{n}.onnx"


def traced_file(n: int) -> str:
    """The file name of a graph as traced, before it is sanitised."""
    return Path(graph_file(n)).stem + ".traced.onnx"


def export_graphs(
    plan: Plan, options: Options, spec: StepSpec, placed: Mapping[str, Placed], folder: Path,
    name: Callable[[int], str] = graph_file,
) -> dict[int, Path]:  # fmt: skip
    """Trace, stamp and save the graph of every n of the contract as folder / `name`(n); returns the files by n."""
    files = {}
    blocks = trace_blocks(plan, options, spec)
    for graph in spec.graphs:
        model = stamp_step(plan, options.streams, spec, graph, blocks, placed, folder)
        path = folder / name(graph.n)
        ir.save(model, path)
        files[graph.n] = path
    return files


def load_model(path: Path) -> ir.Model:
    """An ONNX file, weights left where they are. Raises RingstepError for what is none."""
    try:
        return ir.load(path)
    except Exception as error:  # protobuf and onnx-ir have errors of their own
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0][:200]
        raise RingstepError(f"{path}: cannot be read as an ONNX graph: {reason}; export again") from None

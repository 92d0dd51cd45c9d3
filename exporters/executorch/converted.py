"""A quantised step in the form that torchao's convert_pt2e leaves, made from the artifact's own encodings and weights.

    x ─ quantize ─ dequantize ─ rms_norm ─ quantize ─ dequantize ─ linear ─ quantize ─ dequantize ─ ...
                                                weight int8 ─ dequantize ┘

Observers would find other ranges and nearest weights on a second walk over the same text. Here the .pte holds the very
integers of the ONNX graphs, and a tensor without an encoding is an error: nothing uncalibrated can come out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.ao.quantization.fx._decomposed  # torch.ops.quantized_decomposed
import torchao.quantization.quant_primitives  # noqa: F401  torch.ops.torchao
from torch import Tensor, nn

from exporters.onnx import graph_file
from exporters.quantised import float_file
from exporters.tapped import encodings_in
from quantize.activations import MOVES, Activation, is_float
from quantize.grid import STEPS
from quantize.qdq import integers_of, refusal
from quantize.store import Stored, weight_at
from quantize.torch_graph import block_of, run
from ringstep.contract import INTEGERS, GraphSpec
from ringstep.errors import RingstepError


class Weights(nn.Module):
    """Every parameter of a step as integers, held once for the graphs of all n; the tensors they stand for by name."""

    def __init__(self, home: Path, index: Mapping[str, Stored], small: Mapping[str, np.ndarray]) -> None:
        """`index` are the linears in `home`, `small` the other parameters in float32."""
        super().__init__()
        self.names = {name: f"w{i}" for i, name in enumerate([*index, *small])}
        self.stored = index
        self.encodings: dict[str, tuple[float, int]] = {}
        for name, stored in index.items():
            if reason := refusal(stored.grid):
                raise RingstepError(f"tensor {name}: {reason}")
            weight = weight_at(home, stored)
            self.keep(name, weight.q, weight.scale if stored.steps is not None else weight.scale.reshape(-1))
        for name, array in small.items():
            q, scale, zero = integers_of(name, array)
            self.encodings[name] = scale, zero
            self.keep(name, q, None)

    def keep(self, name: str, q: np.ndarray, scale: np.ndarray | None) -> None:
        """Register integers, and where they have scales of their own those and zero points of 0."""
        own = self.names[name]
        self.register_buffer(own, torch.from_numpy(np.array(q)))
        if scale is not None:
            self.register_buffer(f"{own}_scale", torch.from_numpy(np.array(scale)))
            self.register_buffer(f"{own}_zero", torch.zeros(scale.shape, dtype=torch.int64))

    def real(self, name: str) -> Tensor:
        """A parameter dequantised, the operation to be traced."""
        own = self.names[name]
        q = getattr(self, own)
        if name in self.encodings:
            return dequantise(q, *self.encodings[name])
        scale, zero, grid = getattr(self, f"{own}_scale"), getattr(self, f"{own}_zero"), self.stored[name].grid
        if grid.two_level:
            return torch.ops.torchao.dequantize_affine.default(
                q, [1, grid.block], scale, zero, q.dtype, grid.low, grid.high, torch.float32
            )
        return torch.ops.quantized_decomposed.dequantize_per_channel.default(
            q, scale, zero, 0, grid.low, grid.high, q.dtype
        )


class Converted(nn.Module):
    """One graph of a quantised step: float tensors in the order of its inputs and outputs, rounded at every edge."""

    def __init__(self, graph: ir.Graph, activations: Mapping[str, Activation], weights: Weights) -> None:
        """`graph` is the sanitised float graph. Raises RingstepError naming a tensor without an encoding."""
        super().__init__()
        self.activations, self.weights = activations, weights
        self.inputs, self.outputs = (tuple(str(v.name) for v in side) for side in (graph.inputs, graph.outputs))
        block = block_of(graph, "", self.outputs, weights.names.__contains__)
        made = [v for node in graph for v in node.outputs]
        for value in (*graph.inputs, *made):
            if is_float(value) and str(value.name) not in activations:
                raise RingstepError(f"tensor {value.name}: stays in float, and this backend takes integers only: give "
                                    "the scheme no [exceptions]")  # fmt: skip
        # What moves has the encoding of its source first; a cache's own is a step after it.
        self.moved: dict[str, Activation] = {}
        for step in block.steps:
            source = next((activations[n] for n in step.inputs if n in activations), None)
            if step.op in MOVES and source is not None:
                self.moved |= {name: source for name in step.outputs if activations[name] != source}
        self.numbers: dict[str, tuple[float, int]] = {}
        for name, tensor in block.constants.items():
            if tensor.is_floating_point():
                q, scale, zero = integers_of(name, tensor.numpy())
                self.register_buffer(f"c{len(self.numbers)}", torch.from_numpy(q.reshape(q.shape or (1,))))
                self.numbers[name] = scale, zero
        whole = {name: t for name, t in block.constants.items() if name not in self.numbers}
        self.block = dataclasses.replace(block, constants=whole)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: dict[str, Tensor] = {}

        def rounded(name: str, x: Tensor) -> Tensor:
            if name in self.moved:
                x = quantised(x, self.moved[name])
            if name in self.outputs:
                # Apart from what the graph itself goes on with: each reader converts for itself.
                outputs[name] = quantised(x, self.activations[name])
            return quantised(x, self.activations[name]) if x.is_floating_point() else x

        real = {name: self.weights.real(name) for name in self.block.weights}
        for i, (name, encoding) in enumerate(self.numbers.items()):
            real[name] = dequantise(getattr(self, f"c{i}"), *encoding)
        run(self.block, dict(zip(self.inputs, inputs, strict=True)), real, rounded)
        return tuple(outputs[name] for name in self.outputs)


def converted(home: Path, graph: GraphSpec, weights: Weights) -> Converted:
    """The step of graph.n tokens in an artifact's folder `home`; `graph` with the encodings of inputs and outputs."""
    # Not from activations.json: graphs of other n name other tensors alike, such as a Transpose's.
    found = encodings_in(ir.load(home / graph_file(graph.n)).graph)
    found |= {t.name: (t.dtype, t.encoding) for t in (*graph.inputs, *graph.outputs) if t.encoding is not None}
    activations = {name: Activation(dtype, encoding) for name, (dtype, encoding) in found.items()}  # type: ignore[arg-type]
    return Converted(ir.load(home / float_file(graph.n)).graph, activations, weights)


def quantised(x: Tensor, own: Activation) -> Tensor:
    """x rounded to an encoding, both operations to be traced."""
    low, high = INTEGERS[own.dtype]
    q = torch.ops.quantized_decomposed.quantize_per_tensor.default(
        x, own.encoding.scale, own.encoding.zero, low, high, getattr(torch, own.dtype)
    )
    return dequantise(q, own.encoding.scale, own.encoding.zero)


def dequantise(q: Tensor, scale: float, zero: int) -> Tensor:
    """Integers to float32, the operation to be traced."""
    limits = torch.iinfo(q.dtype)
    made: Tensor = torch.ops.quantized_decomposed.dequantize_per_tensor.default(
        q, scale, zero, limits.min, limits.max, q.dtype
    )
    return made


def block_scales(visitor: Any, node: Any, attributes: Any) -> tuple[Any, dict[str, Any]]:
    """In the place of ExecuTorch's NodeVisitor.make_qnn_per_block_config: steps of 1 to 15 as they were rounded.

    Its own divides a row's largest scale by 16, and so would round all steps anew. Weights are a convolution's
    [out, in, 1, 1], which QNN has as [1, 1, in, out]: blocks of a FullyConnected come out wrong.
    """
    import executorch.backends.qualcomm.python.PyQnnManagerAdaptor as adaptor
    from executorch.backends.qualcomm.utils import constants as own

    scales = attributes[own.QCOM_SCALE]
    rows = scales.reshape(node.meta["val"].shape[0], -1)
    channel = rows.amax(-1) / STEPS
    steps = torch.round(rows / channel[:, None]).clamp(1, STEPS).to(torch.uint8)
    offsets = np.empty(len(channel), dtype=[("scale", np.float32), ("offset", np.int32)])
    offsets["scale"], offsets["offset"] = channel.numpy(), 0
    config = {name: attributes[name] for name in (own.QCOM_DTYPE, own.QCOM_QUANT_MIN, own.QCOM_QUANT_MAX)} | {
        own.QCOM_AXIS: 3, own.QCOM_AXIS_ORDER: (2, 3, 1, 0), own.QCOM_NUM_BLOCKS_PER_AXIS: steps.shape[1],
        own.QCOM_BLOCK_SCALE_OFFSET: offsets, own.QCOM_BLOCK_SCALES: steps.flatten().numpy(),
        own.QCOM_BLOCK_SCALE_BITWIDTH: 4,
        own.QCOM_BLOCK_STORAGE_TYPE: adaptor.Qnn_BlockwiseExpansionBlockScaleStorageType_t.
        QNN_BLOCKWISE_EXPANSION_BITWIDTH_SCALE_STORAGE_8,
    }  # fmt: skip
    return adaptor.Qnn_QuantizationEncoding_t.QNN_QUANTIZATION_ENCODING_BLOCKWISE_EXPANSION, config

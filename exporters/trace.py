"""Tracing one block: torch's dynamo exporter on meta tensors, weights as named inputs that are bound later.

    module on meta ─ torch.export ─ torch.onnx (own translations, no optimiser) ─ tidy ─▶ ir.Graph

No weight exists while this runs, so a block of any size costs the same second.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset23 as op

OPSET = 23  # the first with RMSNormalization, which HTP has as one fp16 kernel that survives attention sinks
INT32_MAX = 2**31 - 1


def _ints(values: Sequence[int]) -> Any:
    return op.Constant(value_ints=[int(v) for v in values])


def _float(value: float | None) -> Any:
    return None if value is None else op.Constant(value_float=float(value))


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    # transB keeps the checkpoint's [out, in] layout: no transposed copy, and a tied head shares the table.
    return op.Gemm(x, weight, transB=1) if bias is None else op.Gemm(x, weight, bias, transB=1)


def _reshape(x: Any, sizes: Sequence[int]) -> Any:
    return op.Reshape(x, _ints(sizes))


def _split(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    return op.Split(x, _ints(sizes), axis=int(dim), num_outputs=len(sizes))


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    last = INT32_MAX if end is None else min(end, INT32_MAX)
    return op.Slice(x, _ints([start or 0]), _ints([last]), _ints([dim]), _ints([step]))


def _clamp(x: Any, low: float | None = None, high: float | None = None) -> Any:
    return op.Clip(x, _float(low), _float(high))


def _amax(x: Any, dim: Sequence[int], keepdim: bool = False) -> Any:
    return op.ReduceMax(x, _ints(dim), keepdims=int(keepdim))


def _sum(x: Any, dim: Sequence[int], keepdim: bool = False, dtype: Any = None) -> Any:
    return op.ReduceSum(x, _ints(dim), keepdims=int(keepdim))


_ATEN = torch.ops.aten
TRANSLATIONS: dict[Any, Any] = {
    _ATEN.linear.default: _linear,
    _ATEN.view.default: _reshape,
    _ATEN._unsafe_view.default: _reshape,
    _ATEN.reshape.default: _reshape,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.slice.Tensor: _slice,
    _ATEN.clamp.default: _clamp,
    _ATEN.amax.default: _amax,
    _ATEN.sum.dim_IntList: _sum,
}


class SideBySide(torch.nn.Module):
    """Blocks that share nothing, as one module: the exporter's set-up costs a second and is paid once."""

    def __init__(self, blocks: Sequence[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(module for module, _ in blocks)
        self.counts = [len(args) for _, args in blocks]

    def forward(self, *args: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
        results, at = [], 0
        for block, count in zip(self.blocks, self.counts, strict=True):
            result = block(*args[at : at + count])
            results.append(result if isinstance(result, tuple) else (result,))
            at += count
        return tuple(results)


def trace(blocks: Sequence[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]) -> list[ir.Graph]:
    """Trace float32 modules with their arguments, all on the meta device; returns an ONNX graph for each.

    A graph has its inputs in the order of the arguments, initializers named as the module's parameters and
    without data, and nodes named by module path (attn/q_proj/Gemm).
    """
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    # The tracer tells inputs apart by identity: blocks must not be handed the same tensor.
    flat = tuple(torch.empty_like(arg) for _, args in blocks for arg in args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(SideBySide(blocks), flat, strict=False)
        program = torch.onnx.export(
            exported, (), dynamo=True, opset_version=OPSET, optimize=False, verify=False, verbose=False,
            custom_translation_table=TRANSLATIONS,
        )  # fmt: skip
    assert program is not None
    whole = program.model.graph
    tidy(whole)
    inputs, outputs = list(whole.inputs), list(whole.outputs)
    graphs = []
    for index, (module, args) in enumerate(blocks):
        with torch.device("meta"):
            count = len(result) if isinstance(result := module(*args), tuple) else 1
        graph = ir.convenience.extract(whole, inputs[: len(args)], outputs[:count])
        del inputs[: len(args)], outputs[:count]
        for value in list(graph.initializers.values()):
            value.name = str(value.name).removeprefix(f"blocks.{index}.")
        name_nodes(graph)
        graphs.append(graph)
    return graphs


def tidy(graph: ir.Graph) -> None:
    """Remove what the exporter leaves behind: Identity, allowzero, num_outputs beside sizes."""
    for node in list(graph):
        if node.op_type == "Identity":
            source, copy = node.inputs[0], node.outputs[0]
            assert source is not None
            ir.convenience.replace_all_uses_with(copy, source)
            for i, output in enumerate(graph.outputs):
                if output is copy:
                    graph.outputs[i] = source
            graph.remove(node, safe=True)
        elif node.op_type == "Reshape":
            node.attributes.pop("allowzero", None)  # every shape here is static and without zeros
        elif node.op_type == "Split" and len(node.inputs) > 1:
            node.attributes.pop("num_outputs", None)


def name_nodes(graph: ir.Graph) -> None:
    """Name nodes by module path and operator, numbered from the second of a name on: attn/Mul, attn/Mul_1."""
    seen: dict[str, int] = {}
    for node in graph:
        # Scopes nest as blocks / blocks.0 / blocks.0.attn / blocks.0.attn.q_proj / linear.
        scopes = [scope.split(":")[0].strip() for scope in node.metadata_props.get("namespace", "").split("/")[1:-1]]
        path = scopes[-1].split(".")[2:] if scopes else []
        name = "/".join([*path, node.op_type])
        seen[name] = seen.get(name, 0) + 1
        node.name = name if seen[name] == 1 else f"{name}_{seen[name] - 1}"
        node.metadata_props.clear()

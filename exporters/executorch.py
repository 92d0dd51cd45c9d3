"""ExecuTorch: the recipe's module lowered to one .pte with the methods `decode` and `prefill`, weights held once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recipes.blocks import RMSNorm
from recipes.plan import Options, Plan, Source
from recipes.step import DecodeStep
from ringstep.contract import GraphSpec, StepSpec
from ringstep.engines.executorch import method_name, quiet
from ringstep.pte import methods


class MeanByLinear(nn.Module):
    """RMSNorm whose mean is a product with a row of 1 / dim: XNNPACK takes it where it leaves a mean to the CPU."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.row = nn.Parameter(torch.full((1, norm.dim), 1.0 / norm.dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(F.linear(x * x, self.row) + self.eps) * self.weight


class Method(nn.Module):
    """A step with the contract's tensors of one graph by position, as a method of a .pte takes and returns them."""

    def __init__(self, step: DecodeStep, graph: GraphSpec) -> None:
        super().__init__()
        self.step = step
        self.inputs = tuple(t.name for t in graph.inputs)
        self.outputs = tuple(t.name for t in graph.outputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.step(dict(zip(self.inputs, inputs, strict=True)))
        return tuple(outputs[name] for name in self.outputs)


def replace_norms(module: nn.Module) -> None:
    """Write every RMSNorm of a module as MeanByLinear."""
    for name, child in module.named_children():
        if isinstance(child, RMSNorm):
            setattr(module, name, MeanByLinear(child))
        else:
            replace_norms(child)


MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class ForXnnpack(TorchFunctionMode):
    """Traces torch.split as slices and products over heads as bmm, which XNNPACK takes; tanh GELU through a sigmoid.

    A split stays on the CPU, and so do the expansions that a product of rank 4 comes with: each cuts a delegate in two.
    XNNPACK's own tanh GELU is good for 84 dB in a step that has 138 dB before it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.split:
            return slices(*args, **(kwargs or {}))
        if function is F.gelu and (kwargs or {}).get("approximate") == "tanh":
            x = args[0]  # 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
            return x * torch.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)))
        if function in MATMUL and args[0].shape[:-2] == args[1].shape[:-2] and args[0].dim() == 4:
            a, b = (x.reshape(-1, *x.shape[-2:]) for x in args)
            return torch.bmm(a, b).reshape(*args[0].shape[:-1], args[1].shape[-1])
        return function(*args, **(kwargs or {}))


def slices(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    """Pieces of x of these sizes, one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [x.narrow(dim, end - size, size) for size, end in zip(sizes, ends, strict=True)]


def example_inputs(graph: GraphSpec) -> tuple[Tensor, ...]:
    """Zeros in the shapes and types of a graph's inputs."""
    return tuple(torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in graph.inputs)


def constants(spec: StepSpec) -> dict[str, Any]:
    """Constant methods that describe the contract to a host that has the .pte alone."""
    names = {f"{method_name(graph.n)}_{side}": [t.name for t in getattr(graph, side)]
             for graph in spec.graphs for side in ("inputs", "outputs")}  # fmt: skip
    return names | {
        "get_vocab_size": spec.vocab,
        "get_max_context_len": spec.context,
        "get_chunk": max(graph.n for graph in spec.graphs),
        "get_eos_ids": list(spec.eos),
        "get_layer_kinds": [f"{c.kind} {c.length}" for c in spec.caches],
        "get_kv_widths": [c.kv_heads * c.head_dim for c in spec.caches],
    }


def trace(plan: Plan, options: Options, spec: StepSpec, read: Callable[[Source], Any]) -> dict[str, Any]:
    """The recipe's module traced for each graph of the contract: exported programs by method, over the same tensors."""
    # A stack trace for each node would be most of the time.
    with torch.no_grad(), patch.object(torch.fx.config, "do_not_emit_stack_traces", True), ForXnnpack():
        step = DecodeStep(plan, options, spec, read)
        replace_norms(step)
        return {method_name(graph.n): torch.export.export(Method(step, graph), example_inputs(graph))
                for graph in spec.graphs}  # fmt: skip


def lower(programs: dict[str, Any], described: dict[str, Any]) -> Any:
    """Exported programs by method in the edge dialect, all that XNNPACK takes in its delegates."""
    with patch.object(torch.fx.config, "do_not_emit_stack_traces", True), quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        return to_edge_transform_and_lower(
            programs, partitioner={name: [XnnpackPartitioner()] for name in programs}, constant_methods=described
        )


def export_pte(plan: Plan, options: Options, spec: StepSpec, read: Callable[[Source], Any], file: Path,
               ) -> dict[str, Any]:  # fmt: skip
    """Write the .pte of a contract's graphs; returns its bytes, and delegates and CPU kernels by method."""
    edge = lower(trace(plan, options, spec, read), constants(spec))
    with quiet():
        from executorch.exir import ExecutorchBackendConfig
        from executorch.exir.passes import MemoryPlanningPass

        # Caches are read where the host keeps them, and never copied.
        planned = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
        made = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planned))
    with file.open("wb") as stream:
        made.write_to_file(stream)
    found = methods(made.executorch_program)
    facts = {name: {what: method[what] for what in ("delegates", "cpu_kernels")} for name, method in found.items()}
    return {"bytes": file.stat().st_size, "methods": facts}

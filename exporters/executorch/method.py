"""What both backends share: the recipe's module with the contract's tensors by position, and the .pte it becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.step import DecodeStep
from ringstep.console import quiet_libraries
from ringstep.contract import GraphSpec, StepSpec
from ringstep.engines.executorch import method_name
from ringstep.pte import methods


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


def write_pte(edge: Any, file: Path, integers: bool = False) -> dict[str, Any]:
    """Write a lowered program; returns its bytes, and delegates and CPU kernels by method.

    `integers`: QNN's inputs and outputs stay integers.
    """
    with quiet_libraries():
        from executorch.exir import ExecutorchBackendConfig
        from executorch.exir.passes import MemoryPlanningPass

        # Caches are read where the host keeps them, and never copied.
        planner = planning_integers() if integers else MemoryPlanningPass
        planned = planner(alloc_graph_input=False, alloc_graph_output=False)
        made = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planned))
    with file.open("wb") as stream:
        made.write_to_file(stream)
    found = methods(made.executorch_program)
    facts = {name: {what: method[what] for what in ("delegates", "cpu_kernels")} for name, method in found.items()}
    return {"bytes": file.stat().st_size, "methods": facts}


def planning_integers() -> Any:
    """MemoryPlanningPass after BuildQuantIo.

    Any pass in between would run the delegate's float operators on integers, which not all take.
    """
    from executorch.backends.qualcomm._passes import BuildQuantIo
    from executorch.exir.passes import MemoryPlanningPass

    class Planning(MemoryPlanningPass):
        def run(self, graph_module: Any, graph_signature: Any = None) -> Any:
            return super().run(BuildQuantIo()(graph_module).graph_module, graph_signature)

    return Planning

"""XNNPACK, for CPUs: the recipe's module lowered to one .pte with the methods `decode` and `prefill`, weights once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from exporters.executorch.faster_fx import faster_fx
from exporters.executorch.method import Method, constants, example_inputs, write_pte
from recipes.blocks import RMSNorm
from recipes.plan import Options, Plan, Source
from recipes.step import DecodeStep
from ringstep.console import quiet_libraries
from ringstep.contract import StepSpec
from ringstep.engines.executorch import method_name
from ringstep.errors import RingstepError


class MeanByLinear(nn.Module):
    """RMSNorm whose mean is a product with a row of 1 / dim: XNNPACK takes it where it leaves a mean to the CPU."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.row = nn.Parameter(torch.full((1, norm.dim), 1.0 / norm.dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(F.linear(x * x, self.row) + self.eps) * self.weight


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


def quantise(step: DecodeStep, group: int) -> None:
    """8da4w: int8 activations measured at run time; int4 weights in groups of inputs, the head's int8 a channel.

    torchao's, rounded to nearest. Raises RingstepError naming a linear whose inputs are no multiple of `group`.
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis, PerGroup, quantize_

    for name, module in step.layers.named_modules():
        if isinstance(module, nn.Linear) and module.in_features % group:
            raise RingstepError(f"layers.{name} has {module.in_features} inputs, no multiple of the group of {group}")
    int4: Any = torch.int4  # type: ignore[attr-defined]
    quantize_(step.layers, Int8DynamicActivationIntxWeightConfig(int4, PerGroup(group)))
    quantize_(step.head, Int8DynamicActivationIntxWeightConfig(torch.int8, PerAxis(0)))


def trace(plan: Plan, options: Options, spec: StepSpec, read: Callable[[Source], Any], group: int | None,
          ) -> dict[str, Any]:  # fmt: skip
    """The recipe's module traced for each graph of the contract: exported programs by method, over the same tensors.

    `group` is how many weights share a scale in 8da4w, None for floats.
    """
    with torch.no_grad(), faster_fx(), ForXnnpack():
        step = DecodeStep(plan, options, spec, read)
        replace_norms(step)
        if group:
            quantise(step, group)
        return {method_name(graph.n): torch.export.export(Method(step, graph), example_inputs(graph))
                for graph in spec.graphs}  # fmt: skip


def lower(programs: dict[str, Any], described: dict[str, Any]) -> Any:
    """Exported programs by method in the edge dialect, all that XNNPACK takes in its delegates."""
    with faster_fx(), quiet_libraries():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        return to_edge_transform_and_lower(
            programs, partitioner={name: [XnnpackPartitioner()] for name in programs}, constant_methods=described
        )


def export_pte(plan: Plan, options: Options, spec: StepSpec, read: Callable[[Source], Any], file: Path,
               group: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Write the .pte of a contract's graphs; returns its bytes, and delegates and CPU kernels by method."""
    return write_pte(lower(trace(plan, options, spec, read, group), constants(spec)), file)

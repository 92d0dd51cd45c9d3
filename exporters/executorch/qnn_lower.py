"""What lowering for QNN does inside its child process: programs by method, the edge dialect once, a .pte for each way.

    DecodeStep (fp16) or Converted (integers) ─ torch.export ─▶ edge dialect ─┬▶ weights shared    model.pte
                                                                              └▶ weights apart     simulated.pte
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from exporters.executorch.faster_fx import faster_fx
from exporters.executorch.method import Method, constants, example_inputs, write_pte
from exporters.line import Line
from recipes.step import DecodeStep
from ringstep.contract import GraphSpec
from ringstep.engines.executorch import method_name
from ringstep.pte_qnn import read_graphs

if TYPE_CHECKING:
    from exporters.job import Job


def lower_to_files(job: Job, soc_model: int, graphs: Mapping[str, GraphSpec], files: Mapping[bool, Path],
                   small: Mapping[str, np.ndarray]) -> dict[bool, dict[str, Any]]:  # fmt: skip
    """Write a .pte for each of `files`, by whether its methods share weights; returns the facts of each.

    `graphs` are the contract's by method, `small` the parameters of a quantised step that are no linear's, in float32.
    """
    gc.disable()  # a child that ends with this: looking through millions of objects that stay is a tenth of the time
    with torch.no_grad(), faster_fx():
        line = Line(job)
        programs = quantised_programs(job.out / "onnx", graphs, small) if line.scheme else float_programs(line)
        specs = {share: compiler_spec(soc_model, share, fp16=line.scheme is None) for share in files}
        edge = to_edge(programs, specs[min(specs)], graphs if line.scheme else {}, constants(line.spec))
        facts = {}
        for share, file in files.items():
            with weights_given() as given:
                lowered = to_backend(edge, specs[share])
            facts[share] = write_pte(lowered, file, line.scheme is not None)
            facts[share] |= {"weights": dict(zip(edge.methods, given, strict=True)), "graphs": read_graphs(file)}
        return facts


def compiler_spec(soc_model: int, share: bool, fp16: bool) -> list[Any]:
    """The options of ExecuTorch's QNN backend."""
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
    from executorch.backends.qualcomm.utils.utils import (
        generate_htp_compiler_spec,
        generate_qnn_executorch_compiler_spec,
    )

    options = generate_htp_compiler_spec(use_fp16=fp16, use_weight_sharing=share)
    made: list[Any] = generate_qnn_executorch_compiler_spec(soc_model=QcomChipset(soc_model), backend_options=options)
    return made


def float_programs(line: Line) -> dict[str, Any]:
    """The recipe's module, exported for each graph of the contract over the same weights."""
    step = DecodeStep(line.plan, line.options, line.spec, line.read)
    return {method_name(graph.n): torch.export.export(Method(step, graph), example_inputs(graph))
            for graph in line.spec.graphs}  # fmt: skip


def quantised_programs(home: Path, graphs: Mapping[str, GraphSpec], small: Mapping[str, np.ndarray],
                       ) -> dict[str, Any]:  # fmt: skip
    """The artifact's sanitised graphs between its own encodings, over the same integers."""
    from exporters.executorch.converted import Weights, converted
    from quantize.store import INDEX, load_index

    weights = Weights(home, load_index(home / INDEX), small)
    zeros = lambda graph: tuple(torch.zeros(t.shape) for t in graph.inputs)
    return {name: torch.export.export(converted(home, graph, weights), zeros(graph)) for name, graph in graphs.items()}


def to_edge(programs: dict[str, Any], spec: list[Any], integers: Mapping[str, GraphSpec], described: dict[str, Any],
            ) -> Any:  # fmt: skip
    """Exported programs in the edge dialect after the backend's own passes: to_edge_transform_and_lower_to_qnn's
    first half, which it does not offer by itself.

    `integers` are the contract's graphs where inputs and outputs stay integers.
    """
    from executorch.backends.qualcomm._passes import TagQuantIO
    from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
    from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
    from executorch.backends.qualcomm.serialization.qc_schema import QnnExecuTorchBackendType
    from executorch.backends.qualcomm.utils.constants import (
        QCOM_PASS_ACTIVATE_KEY,
        QCOM_PASS_ARGS_KWARGS_DEFAULTS_KEY,
    )
    from executorch.backends.qualcomm.utils.qnn_manager_lifecycle import QnnManagerContext
    from executorch.backends.qualcomm.utils.utils import qnn_edge_config
    from executorch.exir.program._program import _gen_edge_manager_for_partitioners, lift_constant_tensor_pass

    manager = get_qnn_pass_manager_cls(QnnExecuTorchBackendType.kHtpBackend)
    passes = {}
    for name, program in programs.items():
        own = manager()
        programs[name] = own.transform_for_export_pipeline(program)
        job = manager.get_capture_program_passes()
        if name in integers:
            arguments = job[TagQuantIO][QCOM_PASS_ARGS_KWARGS_DEFAULTS_KEY]
            job[TagQuantIO][QCOM_PASS_ACTIVATE_KEY] = True
            arguments["get_quant_io_dtype_fn"] = types_of(integers[name])
        passes[name] = own.get_to_edge_transform_passes(program, passes_job=job, compiler_specs=spec,
                                                        convert_linear_to_conv2d=in_blocks(program))  # fmt: skip
    with QnnManagerContext({name: spec for name in programs}):
        partitioners = {name: [QnnPartitioner(spec)] for name in programs}
        edge = _gen_edge_manager_for_partitioners(partitioners, programs, qnn_edge_config(), described)
        edge = edge.transform(passes)
    for name in programs:
        lift_constant_tensor_pass(edge.exported_program(name))
    return edge


def in_blocks(program: Any) -> bool:
    """Whether weights are in blocks, which HTP computes right in a convolution only."""
    return any("dequantize_affine" in str(node.target) for node in program.graph.nodes)


def types_of(graph: GraphSpec) -> Any:
    """What TagQuantIO asks of each node: the integer type of an input or output of the graph, None for any other."""

    def of(node: torch.fx.Node) -> torch.dtype | None:
        given: Any = node.graph.output_node().args[0]
        if node in given:
            return getattr(torch, graph.outputs[list(given).index(node)].dtype)
        if node.op != "placeholder":
            return None
        taken = [n for n in node.graph.nodes if n.op == "placeholder"][-len(graph.inputs) :]  # parameters come first
        return getattr(torch, graph.inputs[taken.index(node)].dtype) if node in taken else None

    return of


def to_backend(edge: Any, spec: list[Any]) -> Any:
    """The programs of an edge manager, which stays as it is, with all that QNN takes in its delegates."""
    from executorch.backends.qualcomm.builders.node_visitor import NodeVisitor
    from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
    from executorch.backends.qualcomm.utils.qnn_manager_lifecycle import QnnManagerContext

    from exporters.executorch.converted import block_scales

    with QnnManagerContext({name: spec for name in edge.methods}), \
         patch.object(NodeVisitor, "make_qnn_per_block_config", block_scales):  # fmt: skip
        return edge.to_backend({name: QnnPartitioner(spec) for name in edge.methods})


@contextlib.contextmanager
def weights_given() -> Iterator[list[str]]:
    """A sha256 for each method, in order, over all constants that the compiler is given: types, encodings, numbers.

    But for those that are one number throughout, whose shape may be that of n tokens.
    """
    import executorch.backends.qualcomm.python.PyQnnManagerAdaptor as adaptor
    from executorch.backends.qualcomm.qnn_preprocess import QnnBackend

    given: list[str] = []
    tensor, build = adaptor.TensorWrapper, QnnBackend._build_op_wrappers
    seen: set[str] = set()

    def noted(name: str, kind: Any, dtype: Any, encoding: Any, config: Any, rank: int, dims: Any, dynamic: Any,
              data: Any, *rest: Any) -> Any:  # fmt: skip
        numbers = np.ascontiguousarray(data).reshape(-1)
        static = kind == adaptor.Qnn_TensorType_t.QNN_TENSOR_TYPE_STATIC and numbers.size > 1
        if static and (numbers[1:] != numbers[0]).any():
            plain = {k: v.tobytes().hex() if hasattr(v, "tobytes") else str(v) for k, v in config.items()}
            about = repr((str(dtype), str(encoding), sorted(plain.items()), list(dims)))
            seen.add(hashlib.sha256(about.encode() + numbers.tobytes()).hexdigest())
        return tensor(name, kind, dtype, encoding, config, rank, dims, dynamic, data, *rest)

    def built(*args: Any, **kwargs: Any) -> Any:
        seen.clear()  # validation of single operators came before
        made = build(*args, **kwargs)
        given.append(hashlib.sha256("".join(sorted(seen)).encode()).hexdigest())
        return made

    with patch.object(adaptor, "TensorWrapper", noted), patch.object(QnnBackend, "_build_op_wrappers", built):
        yield given

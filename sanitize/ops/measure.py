"""Measure forms on Qualcomm's HTP simulator: `ringstep ops`. A graph a form, so that a refusal names its form."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ringstep import child, qnn
from ringstep.devices import Chip
from ringstep.errors import RingstepError
from ringstep.parity.metrics import SILENT_DB, snr_db
from sanitize.ops.forms import Array, Case, Form, Ops
from sanitize.ops.table import FormResult, OpTable, Row

OPSET, IR_VERSION = 24, 11
TIMEOUT_SECONDS = 120.0
LARGEST, SMALLEST_NORMAL = 65504.0, 2.0**-14
REASON_CHARS = 200


def measure(
    chip: Chip, precision: str, forms: Iterable[Form], done: Callable[[float], None] = lambda amount: None
) -> OpTable:
    """Measure forms for a chip, fp16 or a16; `done` is called with 1 after each.

    A form that the compiler refuses, or crashes on, is in the table with the reason. Raises RingstepError
    without the plugin, and for fp16 on a chip that lacks it.
    """
    qnn.require()
    if precision == "fp16" and not chip.fp16:
        raise RingstepError(f"{chip.name} has no fp16; measure a16")
    results: dict[str, FormResult] = {}
    one = _fp16 if precision == "fp16" else _a16
    with tempfile.TemporaryDirectory() as folder:
        worker = None
        try:
            for form in forms:
                if not (form.cases if precision == "fp16" else form.a16_cases):
                    continue
                if worker is None or worker.pipe.closed:
                    worker = child.Worker("operators", log=Path(folder) / "log", explain=qnn.explain)
                run = functools.partial(_call, worker, chip.soc_model, precision == "fp16")
                try:
                    results[form.name] = one(form, run)
                except RingstepError as error:
                    results[form.name] = FormResult(form.name, _count(form, precision), 0, _reason(str(error)), ())
                done(1)
        finally:
            if worker is not None:
                worker.close()
    return OpTable(chip.name, chip.htp_arch, precision, qnn.version(), results)


Run = Callable[[bytes, dict[str, Array]], tuple[Array, int]]


class Grid(NamedTuple):
    """Of a quantised tensor; the zero point has the codes' type."""

    scale: float
    zero: Array


def _fp16(form: Form, run: Run) -> FormResult:
    """Cases of one shape share a graph."""
    rows: list[Row] = []
    ops = npu_ops = 0
    for size, group in groupby(form.cases, key=lambda case: case.size):
        cases = list(group)
        inputs = [np.concatenate(parts).astype(np.float16) for parts in zip(*(c.inputs for c in cases), strict=True)]
        exact = [array.astype(np.float64) for array in inputs]
        nodes, names = _nodes(form, size, len(inputs))
        feeds = dict(zip(names, inputs, strict=True))
        got, npu_ops = run(_fp16_model(nodes, feeds), feeds)
        ops = len(nodes.nodes)
        truth = _truth(form, exact)
        if got.shape != truth.shape:
            raise RingstepError(f"{form.name}: computes {list(got.shape)}, its truth {list(truth.shape)}")
        each = len(truth) // len(cases)
        for index, case in enumerate(cases):
            part = slice(index * each, (index + 1) * each)
            row = compare(form.name, case, truth[part], got[part].astype(np.float64))
            rows += [row] if row else []
    return FormResult(form.name, ops, npu_ops, "", tuple(rows))


def _a16(form: Form, run: Run) -> FormResult:
    """A graph a case: every tensor has the scale of that case's range."""
    rows: list[Row] = []
    ops = npu_ops = 0
    for case in form.a16_cases:
        nodes, names = _nodes(form, case.size, len(case.inputs))
        ops = len(nodes.nodes)
        grids = [grid_of(a, signed=index in form.signed) for index, a in enumerate(case.inputs)]
        codes = [quantise(array, grid) for array, grid in zip(case.inputs, grids, strict=True)]
        exact = [dequantise(code, grid) for code, grid in zip(codes, grids, strict=True)]
        feeds = dict(zip(names, codes, strict=True))
        truth = _truth(form, exact)
        model, grid = _a16_model(nodes, dict(zip(names, grids, strict=True)), dict(zip(names, exact, strict=True)))
        got, taken = run(model, feeds)
        npu_ops = taken - 1
        row = compare(form.name, case, truth, dequantise(got[: len(truth)], grid), grid)
        rows += [row] if row else []
    return FormResult(form.name, ops, npu_ops, "", tuple(rows))


def compare(form: str, case: Case, truth: Array, got: Array, grid: Grid | None = None) -> Row | None:
    """One row of an fp16 output, or of one on a grid; None where no truth fits in the type."""
    if grid is None:
        fits = np.abs(truth) <= LARGEST
        truth, got = truth[fits], got[fits]
        ideal = truth.astype(np.float16).astype(np.float64)
        # What rounds to zero is zero, or else a clean zero would count as pure noise.
        truth = np.where(ideal == 0.0, 0.0, truth)
    else:
        ideal = dequantise(quantise(truth, grid), grid)
    if not truth.size:
        return None
    finite = np.isfinite(got)
    error = np.abs(np.where(finite, got, truth) - truth)
    normal = finite & (np.abs(truth) >= SMALLEST_NORMAL)
    return Row(
        form=form, low=case.low, high=case.high, size=case.size,
        snr_db=_db(snr_db(truth, got)), ideal_db=_db(snr_db(truth, ideal)),
        max_rel=_digits(float((error[normal] / np.abs(truth[normal])).max(initial=0.0))),
        max_abs=_digits(float(error.max(initial=0.0))),
        max_steps=_digits(float(error.max(initial=0.0) / grid.scale)) if grid else 0.0,
        count=int(truth.size), nonfinite=int((~finite).sum()), flushed=int(((got == 0.0) & (ideal != 0.0)).sum()),
    )  # fmt: skip


def grid_of(values: Array, signed: bool = False) -> Grid:
    """A 16-bit grid that holds the values and zero: uint16, or symmetric int16."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if signed:
        return Grid(float(np.float32(max(-low, high, 1e-12) / 32767.0)), np.array(0, np.int16))
    scale = float(np.float32(max(high - low, 1e-12) / 65535.0))
    return Grid(scale, np.array(min(round(-low / scale), 65535), np.uint16))


def quantise(values: Array, grid: Grid) -> Array:
    """Codes of the values."""
    limits = np.iinfo(grid.zero.dtype)
    codes = np.clip(np.rint(values / grid.scale) + int(grid.zero), limits.min, limits.max)
    return np.asarray(codes.astype(grid.zero.dtype))


def dequantise(codes: Array, grid: Grid) -> Array:
    """Values of the codes, in float64."""
    return np.asarray((codes.astype(np.float64) - int(grid.zero)) * grid.scale)


def _truth(form: Form, inputs: list[Array]) -> Array:
    with np.errstate(all="ignore"):  # 60000 overflows an exp on its way to a right result
        return form.exact(*inputs)


def _nodes(form: Form, size: int, inputs: int) -> tuple[Ops, list[str]]:
    ops, names = Ops(size), [f"x{index}" for index in range(inputs)]
    form.build(ops, *names)
    ops.nodes[-1].output[0] = "y"
    return ops, names


def _count(form: Form, precision: str) -> int:
    case = (form.cases if precision == "fp16" else form.a16_cases)[0]
    return len(_nodes(form, case.size, len(case.inputs))[0].nodes)


def _model(nodes: list[Any], inputs: list[Any], output: Any, constants: dict[str, Array]) -> bytes:
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "form", inputs, [output], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes(model.SerializeToString())


def _floats(constants: dict[str, Array], dtype: Any) -> dict[str, Array]:
    return {name: a if a.dtype == np.int64 else a.astype(dtype) for name, a in constants.items()}


def _fp16_model(nodes: Ops, feeds: dict[str, Array]) -> bytes:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, a.shape) for name, a in feeds.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    return _model(nodes.nodes, inputs, output, _floats(nodes.constants, np.float16))


def _a16_model(nodes: Ops, grids: dict[str, Grid], values: dict[str, Array]) -> tuple[bytes, Grid]:
    """Q/DQ pairs around every node, codes in and, twice, out; weights (rank 2 and more) are int8 with scale 1/128."""
    tensors = _evaluate(nodes, values)
    constants: dict[str, Array] = {}
    written: list[Any] = []
    grid = Grid(1.0, np.array(0, np.uint16))

    def convert(kind: str, source: str, target: str, grid: Grid) -> None:
        constants[f"{target}_scale"], constants[f"{target}_zero"] = np.array(grid.scale, np.float32), grid.zero
        inputs = [source, f"{target}_scale", f"{target}_zero"]
        written.append(helper.make_node(kind, inputs, [target], name=f"{kind}_{target}"))

    def constant(name: str, node: Any) -> str:
        array = nodes.constants[name]
        bound = node.op_type in ("Clip", "Pow") and name != node.input[0]
        if array.dtype == np.int64 or bound:
            constants[name] = array if array.dtype == np.int64 else array.astype(np.float32)
            return name
        own = Grid(1.0 / 128.0, np.array(0, np.int8)) if array.ndim >= 2 else grid_of(array)
        constants[f"{name}_q"] = quantise(array, own)
        convert("DequantizeLinear", f"{name}_q", name, own)
        return name

    for name, own in grids.items():
        convert("DequantizeLinear", name, f"{name}_dq", own)
    for node in nodes.nodes:
        inputs = [constant(name, node) if name in nodes.constants else f"{name}_dq" for name in node.input]
        (result,) = node.output
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:], copy.output[:] = inputs, [f"{result}_float"]
        written.append(copy)
        grid = grid_of(tensors[result])
        convert("QuantizeLinear", f"{result}_float", result, grid)
        convert("DequantizeLinear", result, f"{result}_dq", grid)
    # The plugin replaces the grids of Sigmoid, Tanh and others by fixed ones, and a graph output then lies on a grid
    # that it does not have: a copy stands between.
    written.append(helper.make_node("Concat", ["y_dq", "y_dq"], ["twice_float"], name="copy", axis=0))
    convert("QuantizeLinear", "twice_float", "twice", grid)
    kind = lambda grid: helper.np_dtype_to_tensor_dtype(grid.zero.dtype)
    inputs = [helper.make_tensor_value_info(n, kind(grids[n]), a.shape) for n, a in values.items()]
    return _model(written, inputs, helper.make_tensor_value_info("twice", kind(grid), None), constants), grid


def _evaluate(nodes: Ops, values: dict[str, Array]) -> dict[str, Array]:
    """Every tensor of the graph, in float64: float32 would overflow on the way."""
    from onnx.reference import ReferenceEvaluator

    inputs = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, a.shape) for n, a in values.items()]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.DOUBLE, None) for node in nodes.nodes]
    graph = helper.make_graph(nodes.nodes, "form", inputs, outputs, [
        numpy_helper.from_array(a, n) for n, a in _floats(nodes.constants, np.float64).items()])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, values)
    return {node.output[0]: np.asarray(a) for node, a in zip(nodes.nodes, found, strict=True)}


def _call(worker: child.Worker, soc_model: int, fp16: bool, model: bytes, feeds: dict[str, Array]) -> tuple[Array, int]:
    outcome = worker.call(_on_npu, model, soc_model, fp16, feeds, timeout_s=TIMEOUT_SECONDS)
    output, nodes = outcome.value
    return output, nodes


def _on_npu(model: bytes, soc_model: int, fp16: bool, feeds: dict[str, Array]) -> tuple[Array, int]:
    """Runs in the child: the output, and how many nodes the NPU took, without Q/DQ."""
    import onnxruntime as ort

    session = ort.InferenceSession(model, qnn.session_options(soc_model=soc_model, fp16=fp16))
    ops = qnn.assigned_ops(session)
    (output,) = session.run(None, feeds)
    return output, sum(n for kind, n in ops.items() if kind not in ("QuantizeLinear", "DequantizeLinear"))


def _reason(message: str) -> str:
    text = re.sub(r"; log: \S+$", "", message).removeprefix("operators: ")
    if "CPU EP" in text or "Unsupported nodes" in text:
        return "the plugin leaves it to the CPU"
    if "QNNExecutionProvider_" in text:  # the plugin's name of the whole graph
        return "the compiler fails on the graph"
    return child.one_line(re.sub(r"/\S+/", "", text))[:REASON_CHARS]


def _db(value: float) -> float:
    return round(min(max(value, -SILENT_DB), SILENT_DB), 1)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")

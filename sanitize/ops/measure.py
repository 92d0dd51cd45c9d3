"""Measure forms on Qualcomm's HTP simulator: `ringstep ops`. A graph a form, so that a refusal names its form."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

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
GRID = 65535
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
        start = lambda: child.Worker("operators", log=Path(folder) / "log", explain=qnn.explain)
        worker = start()
        try:
            for form in forms:
                run = lambda model, feeds: worker.call(
                    _on_npu, model, chip.soc_model, precision == "fp16", feeds, timeout_s=TIMEOUT_SECONDS
                ).value
                try:
                    results[form.name] = one(form, run)
                except RingstepError as error:
                    results[form.name] = FormResult(form.name, _count(form, precision), 0, _reason(str(error)), ())
                    if worker.pipe.closed:
                        worker = start()
                done(1)
        finally:
            worker.close()
    return OpTable(chip.name, chip.htp_arch, precision, qnn.version(), results)


Run = Callable[[bytes, dict[str, Array]], tuple[Array, int]]


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
        grids = [grid_of(array) for array in case.inputs]
        codes = [quantise(array, *grid) for array, grid in zip(case.inputs, grids, strict=True)]
        exact = [(code.astype(np.float64) - zero) * scale for code, (scale, zero) in zip(codes, grids, strict=True)]
        feeds = dict(zip(names, codes, strict=True))
        truth = _truth(form, exact)
        model, (scale, zero) = _a16_model(nodes, dict(zip(names, grids, strict=True)), dict(zip(names, exact, strict=True)))
        got, npu_ops = run(model, feeds)
        row = compare(form.name, case, truth, (got.astype(np.float64) - zero) * scale, (scale, zero))
        rows += [row] if row else []
    return FormResult(form.name, ops, npu_ops, "", tuple(rows))


def compare(form: str, case: Case, truth: Array, got: Array, grid: tuple[float, int] | None = None) -> Row | None:
    """One row: fp16 output, or codes on `grid` (scale, zero point); None where no truth fits in the type."""
    if grid is None:
        fits = np.abs(truth) <= LARGEST
        truth, got = truth[fits], got[fits]
        ideal = truth.astype(np.float16).astype(np.float64)
        # What rounds to zero is zero, or else a clean zero would count as pure noise.
        truth = np.where(ideal == 0.0, 0.0, truth)
    else:
        scale, zero = grid
        ideal = (quantise(truth, scale, zero).astype(np.float64) - zero) * scale
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
        max_steps=_digits(float(error.max(initial=0.0) / grid[0])) if grid else 0.0,
        count=int(truth.size), nonfinite=int((~finite).sum()), flushed=int(((got == 0.0) & (ideal != 0.0)).sum()),
    )  # fmt: skip


def grid_of(values: Array) -> tuple[float, int]:
    """Scale and zero point of a 16-bit grid that holds the values and zero."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    scale = float(np.float32(max(high - low, 1e-12) / GRID))
    return scale, round(-low / scale)


def quantise(values: Array, scale: float, zero: int) -> Array:
    """Codes of the values, uint16."""
    return np.clip(np.rint(values / scale) + zero, 0, GRID).astype(np.uint16)


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


def _a16_model(
    nodes: Ops, grids: dict[str, tuple[float, int]], values: dict[str, Array]
) -> tuple[bytes, tuple[float, int]]:
    """Q/DQ pairs around every node, uint16 inputs and output, weights (rank 2 and more) int8 with scale 1/128."""
    tensors = _evaluate(nodes, values)
    constants: dict[str, Array] = {}
    written: list[Any] = []

    def pair(kind: str, source: str, target: str, scale: float, zero: Array) -> None:
        constants[f"{target}_scale"], constants[f"{target}_zero"] = np.float32(scale), zero  # type: ignore[assignment]
        inputs = [source, f"{target}_scale", f"{target}_zero"]
        written.append(helper.make_node(kind, inputs, [target], name=f"{kind}_{target}"))

    for name, (scale, zero) in grids.items():
        pair("DequantizeLinear", name, f"{name}_dq", scale, np.array(zero, np.uint16))
    renamed = {name: f"{name}_dq" for name in grids}
    grid = (1.0, 0)
    for node in nodes.nodes:
        inputs = []
        for position, name in enumerate(node.input):
            if name not in nodes.constants:
                inputs.append(renamed[name])
                continue
            constant = nodes.constants[name]
            inputs.append(name)
            if constant.dtype == np.int64 or (position and node.op_type in ("Clip", "Pow")):
                constants[name] = constant if constant.dtype == np.int64 else constant.astype(np.float32)
            elif constant.ndim >= 2:
                constants[f"{name}_q"] = np.rint(constant * 128.0).astype(np.int8)
                pair("DequantizeLinear", f"{name}_q", name, 1.0 / 128.0, np.array(0, np.int8))
            else:
                scale, zero = grid_of(constant)
                constants[f"{name}_q"] = quantise(constant, scale, zero)
                pair("DequantizeLinear", f"{name}_q", name, scale, np.array(zero, np.uint16))
        result = node.output[0]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:], copy.output[:]
        copy.input.extend(inputs)
        copy.output.append(f"{result}_float")
        written.append(copy)
        grid = grid_of(tensors[result])
        pair("QuantizeLinear", f"{result}_float", result, grid[0], np.array(grid[1], np.uint16))
        if result != "y":
            pair("DequantizeLinear", result, f"{result}_dq", grid[0], np.array(grid[1], np.uint16))
            renamed[result] = f"{result}_dq"
    inputs = [helper.make_tensor_value_info(n, TensorProto.UINT16, a.shape) for n, a in values.items()]
    output = helper.make_tensor_value_info("y", TensorProto.UINT16, None)
    return _model(written, inputs, output, constants), grid


def _evaluate(nodes: Ops, values: dict[str, Array]) -> dict[str, Array]:
    """Every tensor of the graph in float32."""
    from onnx.reference import ReferenceEvaluator

    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in values.items()]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes.nodes]
    graph = helper.make_graph(nodes.nodes, "form", inputs, outputs, [
        numpy_helper.from_array(a, n) for n, a in _floats(nodes.constants, np.float32).items()])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, {n: a.astype(np.float32) for n, a in values.items()})
    return {node.output[0]: np.asarray(a) for node, a in zip(nodes.nodes, found, strict=True)}


def _on_npu(model: bytes, soc_model: int, fp16: bool, feeds: dict[str, Array]) -> tuple[Array, int]:
    """Runs in the child: the output, and how many nodes the NPU took, without Q/DQ."""
    import onnxruntime as ort

    session = ort.InferenceSession(model, qnn.session_options(soc_model=soc_model, fp16=fp16))
    ops = qnn.assigned_ops(session)
    (output,) = session.run(None, feeds)
    return output, sum(n for kind, n in ops.items() if kind not in ("QuantizeLinear", "DequantizeLinear"))


def _reason(message: str) -> str:
    text = re.sub(r"; log: \S+$", "", message).removeprefix("operators: ")
    return child.one_line(re.sub(r"/\S+/", "", text))[:REASON_CHARS]


def _db(value: float) -> float:
    return round(min(max(value, -SILENT_DB), SILENT_DB), 1)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")

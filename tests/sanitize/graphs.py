"""Run a pass on a model, on the same model in an If body, and twice; compare what ONNX Runtime computes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from ringstep.parity.metrics import snr_db
from sanitize.model_file import read_model, write_model
from sanitize.passes import Change, Pass
from sanitize.target import Target, find_target

NUMPY = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.INT64: np.int64,
         TensorProto.INT32: np.int32, TensorProto.BOOL: np.bool_, TensorProto.DOUBLE: np.float64,
         TensorProto.UINT8: np.uint8, TensorProto.UINT16: np.uint16}  # fmt: skip
Feeds = dict[str, np.ndarray]


def parse(text: str) -> onnx.ModelProto:
    """An ONNX model from its textual form, given a header if it has none."""
    if not text.lstrip().startswith("<"):
        text = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n' + text
    return onnx.parser.parse_model(text)


def weights(**shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    """Normal float32 tensors of these names and shapes, always the same."""
    random = np.random.default_rng(3)
    return [numpy_helper.from_array(random.normal(size=s).astype(np.float32), name) for name, s in shapes.items()]


def with_weights(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """A parsed model with normal float32 initializers of these names and shapes, every node named after its result."""
    made = parse(text)
    made.graph.initializer.extend(weights(**shapes))
    for node in made.graph.node:
        node.name = f"make_{node.output[0]}"
    return made


def ops(model: ir.Model | onnx.ModelProto) -> list[str]:
    """Operator types of the main graph, in order."""
    nodes = model.graph.node if isinstance(model, onnx.ModelProto) else list(model.graph)
    return [node.op_type for node in nodes]


def random_feeds(model: onnx.ModelProto, seed: int = 0) -> Feeds:
    """Standard normal floats, small integers, coin tosses for every input."""
    rng = np.random.default_rng(seed)
    constants = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        shape = [dim.dim_value or 2 for dim in kind.shape.dim]
        dtype = np.dtype(NUMPY[kind.elem_type])
        if dtype.kind == "f":
            feeds[value.name] = rng.normal(size=shape).astype(dtype)
        elif dtype.kind == "b":
            feeds[value.name] = rng.random(shape) < 0.5
        else:
            feeds[value.name] = rng.integers(0, 3, shape).astype(dtype)
    return feeds


def run(path: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """What ONNX Runtime computes, without its own rewrites. Inputs the model lost are left out, types adapted."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64,
             "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}  # fmt: skip
    adapted = {i.name: feeds[i.name].astype(types.get(i.type, feeds[i.name].dtype)) for i in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, adapted), strict=True))


def in_if(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with its nodes in the then-branch of an If; the else-branch is a copy under other names."""
    graph = model.graph

    def branch(suffix: str) -> onnx.GraphProto:
        made = {name for node in graph.node for name in node.output if name} | {t.name for t in graph.initializer}
        name_of = lambda name: name + suffix if name in made else name
        nodes, tensors = [], []
        outputs = []
        for index, node in enumerate(graph.node):
            copy = onnx.NodeProto.FromString(node.SerializeToString())
            copy.name = (node.name or f"{node.op_type}_{index}") + suffix
            copy.input[:] = [name_of(name) for name in node.input]
            copy.output[:] = [name_of(name) for name in node.output]
            nodes.append(copy)
        for tensor in graph.initializer:
            same = onnx.TensorProto.FromString(tensor.SerializeToString())
            same.name += suffix
            tensors.append(same)
        for output in graph.output:
            info = onnx.ValueInfoProto.FromString(output.SerializeToString())
            info.name = name_of(output.name)
            outputs.append(info)
        return helper.make_graph(nodes, "body" + suffix, [], outputs, tensors)

    if any(attribute.HasField("g") for node in graph.node for attribute in node.attribute):
        raise ValueError("in_if takes flat models")
    choose = helper.make_node(
        "If", ["choose_branch"], [o.name for o in graph.output], "choose",
        then_branch=branch("_then"), else_branch=branch("_else"),
    )  # fmt: skip
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [i for i in graph.input if i.name not in constants]
    condition = helper.make_tensor_value_info("choose_branch", TensorProto.BOOL, [])
    outer = helper.make_graph([choose], "outer", [condition, *inputs], list(graph.output))
    return helper.make_model(outer, ir_version=model.ir_version, opset_imports=list(model.opset_import))


def check(
    model: onnx.ModelProto,
    the_pass: Pass,
    folder: Path,
    *,
    target: Target | None = None,
    feeds: Feeds | None = None,
    min_db: float | None = None,
    changes: int | None = None,
) -> ir.Model:
    """Assert all that every pass promises; return the changed model (not the one in the If).

    `min_db`: None is the pass's own promise. `changes`: how many it must report; None: at least one. 0: the model
    must stay as it is. `target`: qnn-htp on sm8750 in fp16 unless given.
    """
    target = target or find_target("qnn-htp")
    feeds = random_feeds(model) if feeds is None else feeds
    min_db = the_pass.min_db if min_db is None else min_db
    after, made = _once(model, the_pass, folder / "plain", target, feeds, min_db)
    expected = len(made) > 0 if changes is None else len(made) == changes
    assert expected, f"{the_pass.name} reported {made}"
    branch_feeds = feeds | {"choose_branch": np.array(True)}
    _, inside = _once(in_if(model), the_pass, folder / "if", target, branch_feeds, min_db)
    assert bool(inside) == bool(made), f"{the_pass.name} reported {inside} in an If body, {made} outside"
    _once(all_returned(model), the_pass, folder / "returned", target, feeds, min_db)
    return after


def all_returned(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with every value that a node makes as an output, where ONNX knows its type."""
    found = onnx.shape_inference.infer_shapes(model)
    returned = {output.name for output in model.graph.output}
    made = {name for node in model.graph.node for name in node.output}
    more = onnx.ModelProto.FromString(model.SerializeToString())
    known = [v for v in found.graph.value_info if v.name in made - returned and v.type.tensor_type.elem_type]
    more.graph.output.extend(known)
    return more


def _once(
    model: onnx.ModelProto, the_pass: Pass, folder: Path, target: Target, feeds: Feeds, min_db: float
) -> tuple[ir.Model, list[Change]]:
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "before.onnx")
    loaded = read_model(folder / "before.onnx")
    before = run(folder / "before.onnx", feeds)
    made = the_pass.run(loaded, target)
    assert the_pass.run(loaded, target) == [], f"{the_pass.name} changes its own result"
    write_model(loaded, folder / "after.onnx")
    onnx.checker.check_model(str(folder / "after.onnx"))
    after = run(folder / "after.onnx", feeds)
    assert before.keys() == after.keys()
    for name, want in before.items():
        have = after[name]
        if not made or math.isinf(min_db):
            np.testing.assert_array_equal(have, want.astype(have.dtype), err_msg=name)
        else:
            assert np.isfinite(have).all() == np.isfinite(want).all(), name
            db = snr_db(want.astype(np.float64).reshape(-1), have.astype(np.float64).reshape(-1))
            assert db >= min_db, f"{name}: {db:.1f} dB, {the_pass.name} promises {min_db}"
    return read_model(folder / "after.onnx"), made

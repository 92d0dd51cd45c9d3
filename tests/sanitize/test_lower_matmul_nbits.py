"""MatMulNBits against ONNX Runtime's own kernel, and lazily."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops
from onnx import TensorProto, helper, numpy_helper

from ringstep.errors import RingstepError
from sanitize.command import sanitize_file
from sanitize.graph import infer_types
from sanitize.model_file import read_model
from sanitize.passes import lower_matmul_nbits
from sanitize.passes.lower_matmul_nbits import PASS
from sanitize.target import find_target


def nbits(
    *, bits: int = 4, block: int = 16, k: int = 48, n: int = 5, zeros: str = "", bias: bool = False, times: int = 1
) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    blocks = -(-k // block)
    packed = rng.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8)
    tensors = [numpy_helper.from_array(packed, "q")]
    tensors.append(numpy_helper.from_array(rng.random((n, blocks)).astype(np.float32), "scales"))
    names = ["x", "q", "scales"]
    if zeros or bias:
        names.append("zeros" if zeros else "")
    if zeros == "packed":
        zero = rng.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
        tensors.append(numpy_helper.from_array(zero, "zeros"))
    elif zeros:
        tensors.append(numpy_helper.from_array(rng.integers(0, 9, (n, blocks)).astype(np.float32), "zeros"))
    if bias:
        names += ["", "bias"]
        tensors.append(numpy_helper.from_array(rng.normal(size=n).astype(np.float32), "bias"))
    nodes = [
        helper.make_node("MatMulNBits", names, [f"y{i}"], f"mm{i}", domain="com.microsoft", K=k, N=n, bits=bits,
                         block_size=block)
        for i in range(times)
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, k])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [3, n]) for i in range(times)], tensors,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


@pytest.mark.parametrize(
    "case",
    [
        nbits(),
        nbits(zeros="packed"),
        nbits(zeros="floats"),
        nbits(bits=8, zeros="packed", block=32, k=64),
        nbits(k=40),
        nbits(bias=True, block=32, k=64),
    ],
    ids=["middle", "packed zeros", "float zeros", "8 bits", "ragged", "bias"],
)
def test_equals_the_kernel(tmp_path: Path, case: onnx.ModelProto) -> None:
    after = check(case, PASS, tmp_path, changes=1)
    assert ops(after)[0] == "MatMul"


def test_a_cpu_keeps_it(tmp_path: Path) -> None:
    check(nbits(), PASS, tmp_path, target=find_target("ort-mobile"), changes=0)


def test_weights_are_computed_when_written_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(nbits(times=2), tmp_path / "a.onnx")
    model = read_model(tmp_path / "a.onnx")
    monkeypatch.setattr(lower_matmul_nbits, "dequantize", lambda *_: pytest.fail("a weight was computed"))
    PASS.run(model, find_target("qnn-htp"))
    infer_types(model)
    lazy = [v for v in model.graph.initializers.values() if isinstance(v.const_value, ir.LazyTensor)]
    assert len(lazy) == 1
    assert [node.inputs[1] for node in model.graph] == [lazy[0]] * 2


def test_a_weight_that_is_no_constant_is_refused(tmp_path: Path) -> None:
    model = nbits()
    model.graph.input.append(helper.make_tensor_value_info("q", TensorProto.UINT8, [5, 3, 8]))
    del model.graph.initializer[0]
    with pytest.raises(RingstepError, match=r"mm0.*constants"):
        check(model, PASS, tmp_path)


@pytest.mark.parametrize("level", [0, 4])
def test_a_gate_behind_it_and_a_kernel_of_8_bits(tmp_path: Path, level: int) -> None:
    model = nbits(block=32, k=64)
    model.graph.node[0].attribute.append(helper.make_attribute("accuracy_level", level))
    # Nothing is known of what the operator returns, nor of what follows from it.
    model.graph.node.extend([helper.make_node("Sigmoid", ["y0"], ["s"]), helper.make_node("Mul", ["s", "y0"], ["m"]),
                             helper.make_node("Neg", ["m"], ["y"])])  # fmt: skip
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 5]))
    onnx.save(model, tmp_path / "a.onnx")
    report = sanitize_file(tmp_path / "a.onnx", tmp_path / "b.onnx", target="qnn-htp", verify=True)
    assert {p["name"] for p in report["passes"] if p["changes"]} >= {"lower-matmul-nbits", "accurate-sigmoid"}
    assert report["min_db"] > 85  # a promise each for two passes, not the 40 dB of what rounds


def test_a_weight_of_another_size_is_refused(tmp_path: Path) -> None:
    model = nbits()
    next(a for a in model.graph.node[0].attribute if a.name == "N").i = 6
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(RingstepError, match=r"mm0.*are not those of \d+ x 6"):
        PASS.run(read_model(tmp_path / "a.onnx"), find_target("qnn-htp"))

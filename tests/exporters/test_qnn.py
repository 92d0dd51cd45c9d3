"""Compile small graphs for a phone's NPU and run them on its simulator, against ONNX Runtime's CPU."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporters.qnn import check_context, compile_context
from ringstep import qnn
from ringstep.contract import GraphSpec, PartSpec, StepSpec, TensorSpec
from ringstep.devices import find_device
from ringstep.engines.qnn_sim import QnnSimEngine, open_graph
from ringstep.errors import RingstepError
from ringstep.hashing import sha256_file

pytest.importorskip("onnxruntime_qnn")

CHIP = find_device("sm8750").chip
ELEMENT = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "int32": TensorProto.INT32}


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[str, tuple]],
    outputs: dict[str, tuple[str, tuple]],
    constants: dict[str, np.ndarray],
) -> Path:
    info = lambda tensors: [helper.make_tensor_value_info(k, ELEMENT[d], s) for k, (d, s) in tensors.items()]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "step", info(inputs), info(outputs), initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    onnx.save(model, str(path))
    return path


def mlp(path: Path, dtype: str) -> Path:
    """Embedding, norm, a linear of torch's layout and a SiLU in its accurate form: ids [4] to y [4, 96]."""
    random = np.random.default_rng(0)
    constants = {
        "table": random.standard_normal((32, 64)).astype(dtype),
        "scale": (1 + 0.1 * random.standard_normal(64)).astype(dtype),
        "weight": (0.1 * random.standard_normal((96, 64))).astype(dtype),
        "low": np.array(-17, dtype),
        "high": np.array(10.5, dtype),
        "one": np.array(1, dtype),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"], name="/embed"),
        helper.make_node("RMSNormalization", ["x", "scale"], ["h"], name="/norm", axis=-1, epsilon=1e-5),
        helper.make_node("Gemm", ["h", "weight"], ["g"], name="/up", transB=1),
        helper.make_node("Neg", ["g"], ["n"], name="/act/neg"),
        helper.make_node("Clip", ["n", "low", "high"], ["c"], name="/act/clip"),
        helper.make_node("Exp", ["c"], ["e"], name="/act/exp"),
        helper.make_node("Add", ["e", "one"], ["d"], name="/act/add"),
        helper.make_node("Div", ["g", "d"], ["y"], name="/act/div"),
    ]
    return write(path, nodes, {"ids": ("int32", (4,))}, {"y": (dtype, (4, 96))}, constants)


def det(path: Path) -> Path:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="/relu"),
        helper.make_node("Det", ["a"], ["y"], name="/layers.3/det"),
    ]
    return write(path, nodes, {"x": ("float32", (4, 8, 8))}, {"y": ("float32", (4,))}, {})


def on_cpu(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    import onnxruntime as ort

    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def snr(want: np.ndarray, have: np.ndarray) -> float:
    want, have = want.astype(np.float64), have.astype(np.float64)
    return float(10 * np.log10((want**2).sum() / ((want - have) ** 2).sum()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_compile_and_simulate(tmp_path: Path, dtype: str) -> None:
    model = mlp(tmp_path / "m.onnx", dtype)
    report = compile_context(model, tmp_path / "out", chip=CHIP, fp16=True, name="decode")
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["decode_ctx.onnx", "decode_ctx_qnn.bin"]
    assert set(report.files) == set((tmp_path / "out").iterdir())
    assert report.binary_bytes == (tmp_path / "out" / "decode_ctx_qnn.bin").stat().st_size > 64 * 96 * 2
    assert report.source_ops["Gemm"] == report.npu_ops["Gemm"] == 1
    assert sum(report.source_ops.values()) == 8
    assert report.version.startswith("onnxruntime-qnn ") and "QAIRT" in report.version
    assert report.peak_bytes > 1 << 20 and 0 < report.seconds < 60

    feeds = {"ids": np.array([3, 0, 31, 7], np.int32)}
    want = on_cpu(mlp(tmp_path / "reference.onnx", "float32"), feeds)
    with open_graph(report.files[0], fp16=True) as graph:
        assert graph.inputs == {"ids": ((4,), np.dtype(np.int32))}
        assert graph.outputs == {"y": ((4, 96), np.dtype(dtype))}
        first = graph.run(feeds)["y"]
        assert first.dtype == dtype and snr(want, first) > 50
        np.testing.assert_array_equal(first, graph.run(feeds)["y"])
        with pytest.raises(RingstepError, match=r"no input 'idz' \(did you mean ids\?\)"):
            graph.run({"idz": feeds["ids"]})
        with pytest.raises(RingstepError, match="input ids is missing"):
            graph.run({})
        with pytest.raises(RingstepError, match=r"input ids is \[4\] int64, want \[4\] int32"):
            graph.run({"ids": feeds["ids"].astype(np.int64)})


def test_plain_onnx_is_compiled_in_memory(tmp_path: Path) -> None:
    model = mlp(tmp_path / "m.onnx", "float32")
    feeds = {"ids": np.array([1, 2, 3, 4], np.int32)}
    with open_graph(model, soc_model=CHIP.soc_model, fp16=True) as graph:
        assert snr(on_cpu(model, feeds), graph.run(feeds)["y"]) > 50
    assert os.listdir(tmp_path) == ["m.onnx"]
    with pytest.raises(RingstepError, match="soc_model is needed"):
        open_graph(model, fp16=True)


def test_unsupported_node_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    model = det(tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "decode_ctx.onnx").write_text("an earlier result")
    with pytest.raises(RingstepError) as caught:
        compile_context(model, tmp_path / "out", chip=CHIP, fp16=True, name="decode")
    text, log = str(caught.value).split("; log: ")
    assert text == "m.onnx: compiling for sm8750: the NPU refuses /layers.3/det (Det)"
    assert "Unsupported nodes" in Path(log).read_text()
    Path(log).unlink()
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "out"]
    assert (tmp_path / "out" / "decode_ctx.onnx").read_text() == "an earlier result"


def test_bad_files_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"no protobuf")
    for path in (junk, tmp_path / "missing.onnx"):
        with pytest.raises(RingstepError, match=r"\.onnx: cannot be read as ONNX"):
            compile_context(path, out, chip=CHIP, fp16=True, name="x")
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    dynamic = {"x": ("float32", ("n", 8))}
    model = write(tmp_path / "d.onnx", relu, dynamic, {"y": ("float32", ("n", 8))}, {})
    with pytest.raises(RingstepError, match="input x has a dynamic shape"):
        compile_context(model, out, chip=CHIP, fp16=True, name="x")
    with pytest.raises(RingstepError, match="no file name"):
        compile_context(model, out, chip=CHIP, fp16=True, name="../x")
    with pytest.raises(RingstepError, match="not one context but 1 Relu"):
        check_context(model)
    assert not out.exists()


def test_the_binary_is_the_same_wherever_the_artifact_lies(tmp_path: Path) -> None:
    digests = set()
    for place in ("a", "b/c"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        report = compile_context(mlp(folder / "m.onnx", "float16"), folder, chip=CHIP, fp16=True, name="m")
        digests.add(tuple(sha256_file(path) for path in report.files))
    assert len(digests) == 1


def test_context_without_its_binary_says_so(tmp_path: Path) -> None:
    report = compile_context(mlp(tmp_path / "m.onnx", "float16"), tmp_path, chip=CHIP, fp16=True, name="m")
    report.files[1].unlink()
    with pytest.raises(RingstepError, match=r"m_ctx\.onnx on the simulator: .* does not exist") as caught:
        open_graph(report.files[0], fp16=True)
    Path(str(caught.value).split("; log: ")[1]).unlink()


def test_interrupted_move_leaves_no_wrapper_beside_a_foreign_binary(tmp_path: Path, monkeypatch) -> None:
    model = mlp(tmp_path / "m.onnx", "float16")
    out = tmp_path / "out"
    first = compile_context(model, out, chip=CHIP, fp16=True, name="x")

    def stop_at_wrapper(source: Path, target: Path) -> None:
        if target.suffix == ".onnx":
            raise KeyboardInterrupt
        source.rename(target)

    monkeypatch.setattr("exporters.qnn.os.replace", stop_at_wrapper)
    with pytest.raises(KeyboardInterrupt):
        compile_context(model, out, chip=CHIP, fp16=True, name="x")
    assert os.listdir(out) == [first.files[1].name]
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "out"]


def test_engine_runs_parts_in_order(tmp_path: Path) -> None:
    shape = ("float16", (1, 8))
    write(tmp_path / "a.onnx", [helper.make_node("Relu", ["x"], ["h"])], {"x": shape}, {"h": shape}, {})
    write(tmp_path / "b.onnx", [helper.make_node("Add", ["h", "x"], ["logits"])], {"h": shape, "x": shape},
          {"logits": shape}, {})  # fmt: skip
    x = TensorSpec("x", (1, 8), "float16", "embedding")
    logits = TensorSpec("logits", (1, 8), "float16", "logits")
    parts = (PartSpec("a.onnx", ("x",), ("h",)), PartSpec("b.onnx", ("h", "x"), ("logits",)))
    graphs = (GraphSpec(1, (x,), (logits,), (), {"onnx": parts}), GraphSpec(2, (x,), (logits,)))
    spec = StepSpec("r", "m", 8, 8, 4, "float16", -1000.0, (), (), (), (), graphs)
    with pytest.raises(RingstepError, match=r"ONNX files for no chip, .* export with --device"):
        QnnSimEngine(tmp_path, spec).run(1, {}, {})
    assert QnnSimEngine(tmp_path, dataclasses.replace(spec, target={"chip": "sm8650"})).soc_model == 57
    engine = QnnSimEngine(tmp_path, spec, chip="sm8750")
    values = np.linspace(-2, 2, 8, dtype=np.float16)[None]
    outputs = {"logits": np.zeros((1, 8), np.float16)}
    try:
        engine.run(1, {"x": values}, outputs)
        np.testing.assert_allclose(outputs["logits"], np.maximum(values, 0) + values, rtol=2e-3)
        with pytest.raises(RingstepError, match="n=2 has neither QNN nor ONNX"):
            engine.run(2, {"x": values}, outputs)
        with pytest.raises(RingstepError, match="unlike step"):
            engine.run(1, {"x": values}, {"logits": np.zeros((1, 9), np.float16)})
    finally:
        engine.close()


def test_memory_limit_holds_for_the_compiler(tmp_path: Path) -> None:
    model = mlp(tmp_path / "m.onnx", "float16")
    with pytest.raises(RingstepError, match="of memory, the limit is 4 MiB") as caught:
        compile_context(model, tmp_path / "out", chip=CHIP, fp16=True, name="x", memory_bytes=4 << 20)
    Path(str(caught.value).split("; log: ")[1]).unlink()
    assert os.listdir(tmp_path / "out") == []


def test_explain_reads_qnn_logs() -> None:
    line = "2026-01-01 [E:onnxruntime:, q.cc:1 F] "
    listed = (
        line + "Unsupported nodes in QNN EP: " + "".join(f"{{ name: /n{i}, type: Det }}" for i in range(10))
    )
    assert qnn.explain(listed).startswith("the NPU refuses /n0 (Det), /n1 (Det)")
    assert qnn.explain(listed).endswith("/n7 (Det) and 2 more")
    warned = "QNN.backendValidateOpConfig() failed for node `tr` of type `Transpose` with error code 3110"
    assert qnn.explain(warned) == "the NPU refuses tr (Transpose)"
    assert qnn.explain(line + "Failed to create device\n" + line + "fallback to CPU EP has been") == (
        "Failed to create device"
    )
    assert "disk is full" in qnn.explain(line + "Failed to write context cache file.")
    assert qnn.explain("nothing of note") == ""

"""Files in and out: hostile ones are refused, weights are referred to and copied, never parsed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import parse, run
from onnx import TensorProto, helper, numpy_helper

from ringstep.errors import RingstepError
from sanitize import wire
from sanitize.command import sanitize_file
from sanitize.model_file import read_model, write_model
from sanitize.verify import read_inputs


def linear(size: int = 32, **tensor: object) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(size, size)).astype(np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, size])
    return helper.make_model(helper.make_graph([node], "g", [x], [y], [weight]), ir_version=10,
                             opset_imports=[helper.make_opsetid("", 21)])  # fmt: skip


def feeds(size: int = 32) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(1, size)).astype(np.float32)}


@pytest.mark.parametrize("external", [False, True])
def test_weights_survive_bit_for_bit(tmp_path: Path, external: bool) -> None:
    onnx.save(linear(), tmp_path / "a.onnx", save_as_external_data=external, location="a.bin", size_threshold=0)
    model = read_model(tmp_path / "a.onnx")
    weight = model.graph.initializers["w"].const_value
    assert isinstance(weight, ir.ExternalTensor)
    (tmp_path / "out").mkdir()
    write_model(model, tmp_path / "out" / "b.onnx")
    assert sorted(os.listdir(tmp_path / "out")) == ["b.onnx", "b.onnx.data"]
    assert (tmp_path / "out" / "b.onnx.data").read_bytes() == linear().graph.initializer[0].raw_data
    want, have = run(tmp_path / "a.onnx", feeds())["y"], run(tmp_path / "out" / "b.onnx", feeds())["y"]
    np.testing.assert_array_equal(have, want)
    onnx.checker.check_model(str(tmp_path / "out" / "b.onnx"))


def test_float_data_is_referred_to_as_well(tmp_path: Path) -> None:
    model = linear()
    values = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, values.shape, values.reshape(-1)))
    onnx.save(model, tmp_path / "a.onnx")
    tensor = read_model(tmp_path / "a.onnx").graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_constants_in_nodes_and_bodies_are_referred_to(tmp_path: Path) -> None:
    big = numpy_helper.from_array(np.arange(1000, dtype=np.float32), "big")
    body = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], "c", value=big), helper.make_node("Add", ["x", "c"], ["z"], "add")],
        "body", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1000])],
    )  # fmt: skip
    same = helper.make_node("Identity", ["x"], ["q"], "i")
    other = helper.make_graph([same], "o", [], [helper.make_tensor_value_info("q", TensorProto.FLOAT, [1000])])
    flag = helper.make_tensor_value_info("b", TensorProto.BOOL, [])
    graph = helper.make_graph(
        [helper.make_node("If", ["b"], ["y"], "if", then_branch=body, else_branch=other)], "g",
        [flag, helper.make_tensor_value_info("x", TensorProto.FLOAT, [1000])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1000])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "a.onnx")
    proto = wire.read_skeleton(tmp_path / "a.onnx")
    assert len(proto.SerializeToString()) < 1000
    model = read_model(tmp_path / "a.onnx")
    write_model(model, tmp_path / "b.onnx")
    given = {"b": np.array(True), "x": np.ones(1000, np.float32)}
    np.testing.assert_array_equal(run(tmp_path / "b.onnx", given)["y"], np.arange(1000) + 1)


def test_in_place_leaves_weights_where_they_are(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnx", save_as_external_data=True, location="a.bin", size_threshold=0)
    before = (tmp_path / "a.bin").stat()
    write_model(read_model(tmp_path / "a.onnx"), tmp_path / "a.onnx", keep=tmp_path)
    after = (tmp_path / "a.bin").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.onnx"]
    run(tmp_path / "a.onnx", feeds())


def test_a_second_stage_names_its_data_as_the_first(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "traced.onnx")
    for number in range(2):
        stage = tmp_path / f"stage{number}"
        write_model(read_model(tmp_path / "traced.onnx"), stage / "a.onnx", keep=tmp_path)
        assert sorted(os.listdir(stage)) == ["a.onnx", "a.onnx.data1"]
        for file in stage.iterdir():
            os.replace(file, tmp_path / file.name)
    want = (tmp_path / "a.onnx.data1").read_bytes()
    # What the model itself refers to stays.
    write_model(read_model(tmp_path / "a.onnx"), tmp_path / "stage2" / "a.onnx", keep=tmp_path)
    assert (tmp_path / "a.onnx.data1").read_bytes() == want
    assert os.listdir(tmp_path / "stage2") == ["a.onnx"]


def test_onto_itself(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnx")
    want = run(tmp_path / "a.onnx", feeds())["y"]
    for _ in range(2):
        write_model(read_model(tmp_path / "a.onnx"), tmp_path / "a.onnx")
        np.testing.assert_array_equal(run(tmp_path / "a.onnx", feeds())["y"], want)


def test_a_failed_check_leaves_everything_alone(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnx")
    old = (tmp_path / "a.onnx").read_bytes()

    def refuse(path: Path) -> None:
        run(path, feeds())
        raise RingstepError("differs")

    with pytest.raises(RingstepError, match="differs"):
        write_model(read_model(tmp_path / "a.onnx"), tmp_path / "a.onnx", check=refuse)
    assert os.listdir(tmp_path) == ["a.onnx"] and (tmp_path / "a.onnx").read_bytes() == old


def test_truncated_anywhere_is_an_error(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnx")
    whole = (tmp_path / "a.onnx").read_bytes()
    for end in [0, 1, 5, 40, 100, 1000, len(whole) - 1]:
        (tmp_path / "b.onnx").write_bytes(whole[:end])
        with pytest.raises(RingstepError, match=r"b\.onnx"):
            read_model(tmp_path / "b.onnx")


@pytest.mark.parametrize("garbage", [b"\x00" * 100, b"PK\x03\x04" + b"x" * 5000, b"\xff" * 5000, b"{}" * 3000])
def test_other_files_are_refused(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(garbage)
    with pytest.raises(RingstepError, match=r"a\.onnx"):
        read_model(tmp_path / "a.onnx")


def external(tmp_path: Path, location: str, offset: int = 0, length: int = 4096) -> Path:
    model = linear()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / "a.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "m" / "a.onnx"


def test_external_data_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    for location in ("../secret.bin", str(tmp_path / "secret.bin"), "x/../../secret.bin"):
        with pytest.raises(RingstepError, match="outside the model's folder"):
            read_model(external(tmp_path, location))
    path = external(tmp_path, "link.bin")
    (tmp_path / "m" / "link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(RingstepError, match="link out of the model's folder"):
        read_model(path)


def test_a_download_cache_of_links_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    path = external(tmp_path, "a.bin")
    path.rename(blobs / "111")
    (blobs / "222").write_bytes(bytes(4096))
    (snapshot / "a.onnx").symlink_to(blobs / "111")
    (snapshot / "a.bin").symlink_to(blobs / "222")
    assert len(read_model(snapshot / "a.onnx").graph) == 1


def test_external_data_that_is_missing_short_or_strange(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="cannot be read"):
        read_model(external(tmp_path, "a.bin"))
    (tmp_path / "m" / "a.bin").write_bytes(bytes(4000))
    with pytest.raises(RingstepError, match="do not belong together"):
        read_model(external(tmp_path, "a.bin"))
    with pytest.raises(RingstepError, match="do not belong together"):
        read_model(external(tmp_path, "a.bin", length=100))
    os.mkfifo(tmp_path / "m" / "pipe")
    with pytest.raises(RingstepError, match="not an ordinary file"):
        read_model(external(tmp_path, "pipe"))


def test_cycles_and_dangling_values_are_named(tmp_path: Path) -> None:
    cyclic = parse("g (float[2] x) => (float[2] y) { a = Add(x, b) b = Neg(a) y = Neg(b) }")
    onnx.save(cyclic, tmp_path / "a.onnx")
    with pytest.raises(RingstepError, match="cycle"):
        read_model(tmp_path / "a.onnx")
    onnx.save(parse("g (float[2] x) => (float[2] y) { y = Add(x, nowhere) }"), tmp_path / "a.onnx")
    with pytest.raises(RingstepError, match="nowhere"):
        read_model(tmp_path / "a.onnx")
    onnx.save(parse("g (float[2] x) => (float[2] y) { y = Neg(x) y = Abs(x) }"), tmp_path / "a.onnx")
    with pytest.raises(RingstepError, match="exists already"):
        read_model(tmp_path / "a.onnx")


def test_functions_are_inlined(tmp_path: Path) -> None:
    model = parse(
        '<ir_version: 10, opset_import: ["" : 21, "mine" : 1]> g (float[2] x) => (float[2] y) { y = mine.twice(x) }'
        '<domain: "mine", opset_import: ["" : 21]> twice (a) => (b) { b = Add(a, a) }'
    )
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert [node.op_type for node in loaded.graph] == ["Add"] and not loaded.functions
    write_model(loaded, tmp_path / "b.onnx")
    x = {"x": np.ones(2, np.float32)}
    np.testing.assert_array_equal(run(tmp_path / "b.onnx", x)["y"], run(tmp_path / "a.onnx", x)["y"])


def test_types_are_inferred_in_bodies_too(tmp_path: Path) -> None:
    from graphs import in_if

    onnx.save(in_if(parse("g (float[2,3] x) => (float[3,2] y) { a = Neg(x) y = Transpose(a) }")), tmp_path / "a.onnx")
    model = read_model(tmp_path / "a.onnx")
    shapes = {v.name: tuple(v.shape) for node in model.graph.all_nodes() for v in node.outputs if v.shape is not None}
    assert shapes["a_then"] == (2, 3)


@pytest.mark.parametrize("name", ["m[1].onnx", "*.onnx", "a b.onnx"])
def test_names_that_are_patterns(name: str, tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnx")
    (tmp_path / "out").mkdir()
    write_model(read_model(tmp_path / "a.onnx"), tmp_path / "out" / name)
    assert sorted(os.listdir(tmp_path / "out")) == [name, f"{name}.data"]
    np.testing.assert_array_equal(run(tmp_path / "out" / name, feeds())["y"], run(tmp_path / "a.onnx", feeds())["y"])


@pytest.mark.parametrize("out", ["w.onnx", "w.onnx.data", "sub/../w.onnx.data", "linked.onnx"])
def test_weights_of_the_source_are_not_written_over(out: str, tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnx", save_as_external_data=True, location="w.onnx.data", size_threshold=0)
    (tmp_path / "sub").mkdir()
    (tmp_path / "linked.onnx.data").symlink_to(tmp_path / "w.onnx.data")
    before = (tmp_path / "w.onnx.data").read_bytes()
    if out == "linked.onnx":
        sanitize_file(tmp_path / "a.onnx", tmp_path / out, target="xnnpack")  # the link goes, not what it leads to
    else:
        with pytest.raises(RingstepError, match=r"w.onnx.data is a file of .*a.onnx, which would be lost"):
            sanitize_file(tmp_path / "a.onnx", tmp_path / out, target="xnnpack")
    assert (tmp_path / "w.onnx.data").read_bytes() == before


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    """Neither in the model's place nor in that of its data: the old model stays."""
    onnx.save(linear(), tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes(b"old")
    (tmp_path / "b.onnx.data").mkdir()
    for out in (tmp_path, tmp_path / "b.onnx"):
        with pytest.raises(RingstepError, match="is a folder"):
            sanitize_file(tmp_path / "a.onnx", out, target="xnnpack")
    assert (tmp_path / "b.onnx").read_bytes() == b"old"


def test_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "a.onnx")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in (dead.pid, 1):
        (tmp_path / f".b.onnx.tmp-{number}").mkdir()
        (tmp_path / f".b.onnx.tmp-{number}" / "b.onnx.data").write_bytes(b"half")
    (tmp_path / f".c.onnx.tmp-{dead.pid}").mkdir()
    (tmp_path / f".b.onnx.tmp-{dead.pid}x").mkdir()
    write_model(read_model(tmp_path / "a.onnx"), tmp_path / "b.onnx")
    left = {name for name in os.listdir(tmp_path) if ".tmp-" in name}
    assert left == {".b.onnx.tmp-1", f".c.onnx.tmp-{dead.pid}", f".b.onnx.tmp-{dead.pid}x"}


def test_inputs_from_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(RingstepError, match="not an ordinary file"):
        read_inputs(tmp_path / "x.npz")

"""Time grows with the nodes, memory with neither weights nor file: read, every tidying pass, write."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from sanitize.model_file import read_model, write_model
from sanitize.passes import common_subexpressions, dead, duplicates, fold, names, noop, reshape_pairs, transposed
from sanitize.pipeline import sanitize
from sanitize.target import find_target

PASSES = [p.PASS for p in (fold, noop, reshape_pairs, common_subexpressions, duplicates, transposed, dead, names)]
TARGET = find_target("qnn-htp")
SMALL = 1200  # nodes
make = helper.make_node


def chain(count: int) -> list[NodeProto]:
    """Blocks of ten nodes in a row: shape arithmetic, no-ops, duplicates."""
    nodes, last = [], "x"
    for i in range(count // 10):
        p = f"l{i}_"
        constant = numpy_helper.from_array(np.array([i % 7], np.float32))
        nodes += [
            make("Constant", [], [p + "c"], value=constant), make("Shape", [last], [p + "s"]),
            make("Gather", [p + "s", "zero"], [p + "g"]), make("Unsqueeze", [p + "g", "axis"], [p + "u"]),
            make("Concat", [p + "u", "minus"], [p + "k"], axis=0), make("Reshape", [last, p + "k"], [p + "r"]),
            make("Identity", [p + "r"], [p + "i"]), make("Add", [p + "i", p + "c"], [p + "a"]),
            make("Add", [p + "i", p + "c"], [p + "b"]), make("Mul", [p + "a", p + "b"], [p + "o"]),
        ]  # fmt: skip
        last = p + "o"
    return [*nodes, make("Neg", [last], ["y"])]


def wide(count: int) -> list[NodeProto]:
    """Blocks of four nodes that all read the input; their sum."""
    nodes, ends = [], []
    for i in range(count // 4):
        p = f"w{i}_"
        nodes += [
            make("LeakyRelu", ["x"], [p + "a"], alpha=0.001 * i), make("Transpose", [p + "a"], [p + "t"], perm=[1, 0]),
            make("Transpose", [p + "t"], [p + "u"], perm=[1, 0]), make("Add", [p + "u", "x"], [p + "o"]),
        ]  # fmt: skip
        ends.append(p + "o")
    while len(ends) > 1:
        groups = [ends[at : at + 32] for at in range(0, len(ends), 32)]
        ends = [f"sum{len(nodes) + index}" for index in range(len(groups))]
        nodes += [make("Sum", group, [end]) for group, end in zip(groups, ends, strict=True)]
    return [*nodes, make("Neg", ends, ["y"])]


def branches(count: int) -> list[NodeProto]:
    """A row of Ifs with bodies of three nodes each."""
    nodes, last = [], "x"
    for i in range(count // 7):
        bodies = []
        for side in "te":
            p = f"b{i}{side}_"
            inner = [
                make("Identity", [last], [p + "i"]), make("Exp", [p + "i"], [p + "e"]),
                make("Dropout", [p + "e"], [p + "o", p + "mask"]),
            ]  # fmt: skip
            out = helper.make_tensor_value_info(p + "o", TensorProto.FLOAT, [2, 3])
            bodies.append(helper.make_graph(inner, p, [], [out]))
        nodes.append(make("If", ["flag"], [f"b{i}"], then_branch=bodies[0], else_branch=bodies[1]))
        last = f"b{i}"
    return [*nodes, make("Neg", [last], ["y"])]


def save(nodes: list[NodeProto], path: Path) -> None:
    constants = {"zero": np.array(0), "axis": np.array([0]), "minus": np.array([-1])}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", [x, flag], [y], tensors)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), path)


def seconds(path: Path) -> float:
    """Processor seconds from file to file."""
    start = time.process_time()
    model = read_model(path)
    sanitize(model, TARGET, PASSES)
    write_model(model, path.with_suffix(".out.onnx"))
    return time.process_time() - start


@pytest.mark.parametrize("kind", [chain, wide, branches])
def test_twice_the_nodes_take_twice_the_time(tmp_path: Path, kind: Callable[[int], list[NodeProto]]) -> None:
    paths = [tmp_path / "1.onnx", tmp_path / "4.onnx"]
    for path, factor in zip(paths, (1, 4), strict=True):
        save(kind(SMALL * factor), path)
    seconds(paths[0])  # imports, and the kernels that folding runs
    ratios = []
    for _ in range(3):
        small, large = (seconds(path) for path in paths)
        ratios.append(large / small)
        if ratios[-1] <= 2.3**2:
            return
    pytest.fail(f"four times the nodes take {min(ratios):.1f} times the seconds")


def test_weights_are_never_held(tmp_path: Path) -> None:
    rows, width, layers = 1024, 1024, 75  # 300 MB
    weights = np.random.default_rng(0).integers(0, 255, (rows, width * 4), np.uint8)
    nodes, tensors, last = [], [], "x"
    with open(tmp_path / "a.bin", "wb") as out:
        for i in range(layers):
            weights[0, :4] = [i, 0, 0, 0]
            out.write(weights.tobytes())
            tensor = TensorProto(name=f"w{i}", data_type=1, dims=[rows, width], data_location=TensorProto.EXTERNAL)
            for key, text in (("location", "a.bin"), ("offset", i * weights.nbytes), ("length", weights.nbytes)):
                tensor.external_data.add(key=key, value=str(text))
            tensors.append(tensor)
            nodes += [make("MatMul", [last, f"w{i}"], [f"m{i}"], f"m{i}"), make("Identity", [f"m{i}"], [f"i{i}"])]
            last = f"i{i}"
    tensors[-1].external_data[1].value = "0"  # as the first
    nodes.append(make("Neg", [last], ["y"]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width]) for name in "xy")
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), ir_version=10)
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    script = f"""
        import sys, threading, time
        sys.path[:0] = {[str(Path.cwd()), str(Path(__file__).parent)]!r}
        from pathlib import Path
        from test_scale import PASSES, TARGET, read_model, sanitize, write_model

        def held():
            status = open("/proc/self/status").read()
            return int(status.split("RssAnon:")[1].split()[0]) / 1024

        peak, done = 0.0, False
        def watch():
            global peak
            while not done:
                peak = max(peak, held())
                time.sleep(0.002)

        from sanitize.evaluate import evaluate
        import onnxruntime
        start = held()
        thread = threading.Thread(target=watch)
        thread.start()
        model = read_model(Path({str(tmp_path / "a.onnx")!r}))
        sanitize(model, TARGET, PASSES)
        write_model(model, Path({str(tmp_path / "b.onnx")!r}))
        done = True
        thread.join()
        print(peak - start)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 60, "megabytes of memory that is no page of a file"
    assert (tmp_path / "b.onnx.data").stat().st_size == (layers - 1) * weights.nbytes

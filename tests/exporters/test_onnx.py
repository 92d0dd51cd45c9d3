"""ONNX by blocks: names, types, weights by reference, and as many traces as there are kinds of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from export_runs import GEMMA, LLAMA, SPARK, Export, export, write_checkpoint
from onnx import TensorProto
from safetensors.numpy import load_file

import exporters.onnx
from exporters.onnx import export_graphs, trace_blocks
from exporters.weights import Placed, load_index, write_weights
from recipes import plan_for
from recipes.plan import Options, Plan
from recipes.step import step_spec
from recipes.weights import key, sources
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import StepSpec
from ringstep.session import DecodeSession

PLAIN_OPS = {"Add", "Concat", "Gelu", "Gemm", "MatMul", "Mul", "RMSNormalization", "Reshape", "Sigmoid", "Softmax",
             "Split", "Sub", "Transpose"}  # fmt: skip
ACCURATE_OPS = (PLAIN_OPS - {"Gelu", "Sigmoid", "Softmax"}) | {"Abs", "Clip", "Exp", "Pow", "ReduceMax", "ReduceSum",
                                                              "Tanh"}  # fmt: skip


@pytest.fixture(scope="module")
def traced() -> list[Any]:
    """What each call of trace_blocks returned while `spark` was exported."""
    return []


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory, traced: list[Any]) -> Export:
    """Decode and a prefill of 8, float32."""

    def recorded(*args: Any) -> Any:
        traced.append(trace_blocks(*args))
        return traced[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporters.onnx, "trace_blocks", recorded)
        return export(SPARK, tmp_path_factory.mktemp("spark"), chunks=(1, 8))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return export(SPARK, tmp_path_factory.mktemp("half"), dtype="float16", activations="accurate")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A llama with a tied head."""
    return export(write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory, tied: Export) -> Export:
    """The same llama with the table inside the graph."""
    return export(tied.checkpoint.path, tmp_path_factory.mktemp("inside"), embedding_inside=True)


def load(made: Export, file: str = "decode.onnx") -> onnx.GraphProto:
    """A graph with the shape of every tensor, inferred where the file leaves it out."""
    model = onnx.load(str(made.folder / file), load_external_data=False)
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph


def values(graph: onnx.GraphProto) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Name, element type and shape of every tensor of a graph but its constants."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        assert all(dim.HasField("dim_value") for dim in kind.shape.dim), value.name
        yield value.name, kind.elem_type, tuple(dim.dim_value for dim in kind.shape.dim)


def places(graph: onnx.GraphProto) -> dict[str, tuple[str, int, int]]:
    """Weight name to file, offset and length."""
    found = {}
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            entry = {e.key: e.value for e in tensor.external_data}
            found[tensor.name] = entry["location"], int(entry["offset"]), int(entry["length"])
    return found


def graphs(*made: Export) -> Iterator[tuple[Export, onnx.GraphProto, str]]:
    for one in made:
        for graph in one.spec.graphs:
            file = exporters.onnx.graph_file(graph.n)
            yield one, load(one, file), file


def test_names(spark: Export, half: Export, tied: Export, inside: Export) -> None:
    for _, graph, _ in graphs(spark, half, tied, inside):
        names = [node.name for node in graph.node]
        assert len(set(names)) == len(names)
        outputs = [name for node in graph.node for name in node.output if name]
        assert len(set(outputs)) == len(outputs)
        assert all(name.startswith(("/layers.", "/head/", "/embed/")) for name in names)
    assert {"/layers.7/attn/q_proj/Gemm", "/layers.0/mlp/down_proj/Gemm", "/head/lm_head/Gemm"} <= {
        node.name for node in load(spark).node
    }
    assert "/embed/Gather" in {node.name for node in load(inside).node}


def test_types_and_shapes(spark: Export, half: Export, tied: Export, inside: Export) -> None:
    for made, graph, _ in graphs(spark, half, tied, inside):
        known = {name: (kind, shape) for name, kind, shape in values(graph)}
        assert {out for node in graph.node for out in node.output if out} <= known.keys()
        assert all(len(shape) <= 4 for _, shape in known.values())
        assert all(len(tensor.dims) <= 4 for tensor in graph.initializer)
        kinds = {known[value.name][0] for value in (*graph.input, *graph.output)}
        floats = TensorProto.FLOAT if made.spec.dtype == "float32" else TensorProto.FLOAT16
        assert kinds == {floats} | ({TensorProto.INT32} if made.options.embedding_inside else set())
        # int64 only as the constant shapes that operators ask for.
        made_by_nodes = {known[out][0] for node in graph.node for out in node.output if out}
        assert made_by_nodes == {floats}


def test_inputs_and_outputs_are_the_contract(spark: Export, inside: Export) -> None:
    for made in (spark, inside):
        for spec in made.spec.graphs:
            graph = load(made, exporters.onnx.graph_file(spec.n))
            shapes = {name: shape for name, _, shape in values(graph)}
            for have, want in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
                assert [v.name for v in have] == [t.name for t in want]
                assert all(shapes[t.name] == t.shape for t in want)


def test_float16_holds_no_float32(half: Export) -> None:
    graph = load(half)
    assert {kind for _, kind, _ in values(graph)} == {TensorProto.FLOAT16, TensorProto.INT64}
    assert {tensor.data_type for tensor in graph.initializer} <= {TensorProto.FLOAT16, TensorProto.INT64}
    assert not any(a.t.data_type == TensorProto.FLOAT for node in graph.node for a in node.attribute)
    assert "Cast" not in {node.op_type for node in graph.node}


def test_only_expected_operators(spark: Export, half: Export) -> None:
    for _, graph, _ in graphs(spark):
        assert {node.op_type for node in graph.node} == PLAIN_OPS
    assert {node.op_type for node in load(half).node} <= ACCURATE_OPS
    for _, graph, _ in graphs(spark, half):
        count = Counter(node.op_type for node in graph.node)
        assert count["Gemm"] == 8 * 8 + 1 and count["RMSNormalization"] == 8 * 2 + 1


def test_checker(spark: Export, half: Export, tied: Export, inside: Export) -> None:
    for made, _, file in graphs(spark, half, tied, inside):
        onnx.checker.check_model(str(made.folder / file), full_check=True)


def test_weights_lie_in_two_files(spark: Export, half: Export, tied: Export, inside: Export) -> None:
    for made, graph, file in graphs(spark, half, tied, inside):
        sizes = {name: (made.folder / name).stat().st_size for name in ("weights.bin", "embedding.bin")}
        shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        for name, (where, offset, length) in places(graph).items():
            assert offset % 4096 == 0 and offset + length <= sizes[where]
            assert length == np.prod(shapes[name]) * (4 if made.spec.dtype == "float32" else 2)
        inline = [t for t in graph.initializer if t.data_location != TensorProto.EXTERNAL]
        assert not any("weight" in t.name for t in inline) and sum(t.ByteSize() for t in inline) < 10_000
        # Two parameters never overlap.
        spans = sorted(places(graph).values())
        for (first, start, length), (second, offset, _) in pairwise(spans):
            assert first != second or start + length <= offset, file


def test_decode_and_prefill_share_weights(spark: Export) -> None:
    assert places(load(spark)) == places(load(spark, "prefill_8.onnx"))
    assert len(places(load(spark))) == 8 * 10 + 2


def test_tied_head_is_the_table(tied: Export, spark: Export, inside: Export) -> None:
    for made in (tied, spark, inside):
        graph, spec = load(made), made.spec
        (head,) = [node for node in graph.node if node.name == "/head/lm_head/Gemm"]
        table = spec.vocab * spec.hidden * 4
        assert places(graph)[head.input[1]] == ("embedding.bin", 0, table)
        assert (made.folder / "embedding.bin").stat().st_size == table
        names = list(load_index(made.folder))
        assert len([name for name in names if "embed" in name or "lm_head" in name]) == 1
    (lookup,) = [node for node in load(inside).node if node.op_type == "Gather"]
    assert places(load(inside))[lookup.input[0]][0] == "embedding.bin"


def test_weight_bytes_are_the_checkpoints(spark: Export, half: Export) -> None:
    stored = load_file(SPARK / "model.safetensors")
    fused = stored["model.layers.2.self_attn.q_k_v_proj.weight"]
    for made, dtype in ((spark, np.float32), (half, np.float16)):
        index = load_index(made.folder)
        for rows in ((0, 128), (128, 192), (192, 256)):
            place = index[f"model.layers.2.self_attn.q_k_v_proj.weight:{rows[0]}-{rows[1]}"]
            have = stored_array(made.folder, place, dtype)
            np.testing.assert_array_equal(have, fused[slice(*rows)].astype(dtype))
        for name in ("model.norm.weight", "model.embedding.weight", "model.layers.7.mlp.down_proj.weight"):
            np.testing.assert_array_equal(stored_array(made.folder, index[name], dtype), stored[name].astype(dtype))


def stored_array(folder: Path, place: Placed, dtype: Any) -> np.ndarray:
    return np.fromfile(folder / place.file, dtype, int(np.prod(place.shape)), offset=place.offset).reshape(place.shape)


def test_gemma_norms_are_one_more(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "gemma", GEMMA)
    checkpoint, stored = open_checkpoint(str(folder)), load_file(folder / "model.safetensors")
    plan = plan_for(checkpoint.config)
    write_weights(checkpoint, plan, "float32", tmp_path)
    index = load_index(tmp_path)
    for name in ("model.norm.weight", "model.layers.1.self_attn.q_norm.weight"):
        np.testing.assert_array_equal(stored_array(tmp_path, index[name], np.float32), stored[name] + np.float32(1))
    for source in sources(plan):
        want = stored[source.name] + np.float32(source.add)
        np.testing.assert_array_equal(stored_array(tmp_path, index[key(source)], np.float32), want)
        assert source.add == (1.0 if len(source.shape) == 1 else 0.0)


def deeper(layers: int) -> tuple[Plan, StepSpec]:
    config = dict(open_checkpoint(str(SPARK)).config)
    kinds = config["layer_types"] * (layers // 8)
    plan = plan_for(config | {"layer_types": kinds, "num_hidden_layers": layers})
    return plan, step_spec(plan, Options(), model="test", context=64, chunks=(1, 8), eos=())


def test_export_is_reproducible(spark: Export, tied: Export, tmp_path: Path) -> None:
    """Every byte: what is compiled from a graph is keyed by its sha256."""
    again = export(tied.checkpoint.path, tmp_path)
    files = sorted(p.name for p in again.folder.iterdir())
    assert files == ["decode.onnx", "embedding.bin", "index.json", "weights.bin"]
    for name in files:
        assert (again.folder / name).read_bytes() == (tied.folder / name).read_bytes(), name


def test_a_trace_a_kind(spark: Export, traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {(name, n) for name in ("sliding", "full", "head") for n in (1, 8)}
    assert len(traced) == 1 and set(traced[0]) == blocks
    handed: list[int] = []

    def counted(jobs: list[Any]) -> list[None]:
        handed.append(len(jobs))
        return [None] * len(jobs)

    monkeypatch.setattr(exporters.onnx, "trace", counted)
    for layers in (8, 16):
        plan, spec = deeper(layers)
        assert len(plan.layers) == layers
        assert set(trace_blocks(plan, Options(), spec)) == blocks
    assert handed == [len(blocks)] * 2


def test_blocks_of_eight_layers_stamp_sixteen(
    spark: Export, traced: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, spec = deeper(16)
    placed = {key(source): Placed("weights.bin", 0, source.out_shape) for source in sources(plan)}
    monkeypatch.setattr(exporters.onnx, "trace_blocks", lambda *args: traced[0])
    files = export_graphs(plan, Options(), spec, placed, tmp_path)
    model = onnx.load(str(files[1]), load_external_data=False)
    names = [node.name for node in model.graph.node]
    eight = [node.name for node in load(spark).node]
    head = len([name for name in eight if name.startswith("/head/")])
    assert len(names) == len(set(names)) == 2 * (len(eight) - head) + head
    assert {name for name in names if not name.startswith(("/layers.8", "/layers.9", "/layers.1"))} < set(eight)


def test_embedding_inside_gives_the_same_logits(tied: Export, inside: Export) -> None:
    ids = np.random.default_rng(1).integers(0, tied.spec.vocab, 12)
    (asked,) = [t for t in inside.spec.graph(1).inputs if t.role == "ids"]
    assert (asked.name, asked.dtype, asked.shape) == ("input_ids", "int32", (1,))
    answers = []
    for made in (tied, inside):
        with DecodeSession.open(made.save(), threads=1) as session:
            assert (session.table is None) == made.options.embedding_inside
            answers.append(np.concatenate([session.step([i]) for i in ids]))
    np.testing.assert_array_equal(answers[0], answers[1])
    assert answers[0].std() > 0.5


def test_golden(spark: Export, golden: dict[str, np.ndarray]) -> None:
    """The files as they lie on disk compute the model, alone and by chunks."""
    ids = golden["input_ids"].astype(int)
    with DecodeSession.open(spark.save(), threads=1) as session:
        for n in (1, 8):
            session.reset()
            have = np.concatenate([session.step(ids[at : at + n]) for at in range(0, 48, n)])
            noise = np.square(have - golden["logits"]).sum(1)
            assert (10 * np.log10(np.square(golden["logits"]).sum(1) / noise)).min() > 105

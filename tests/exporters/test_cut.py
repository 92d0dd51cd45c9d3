"""Cutting a step by layers: where, and that the parts together are the whole."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_runs import SPARK, Export, export
from hypothesis import given
from hypothesis import strategies as st

from exporters.cut import block_bytes, choose_cuts, layer_of, part_specs, write_parts
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession

sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return export(SPARK, tmp_path_factory.mktemp("spark"), chunks=(1, 4))


@pytest.fixture(scope="module")
def accurate(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return export(SPARK, tmp_path_factory.mktemp("accurate"), activations="accurate")


def split(layers: list[int], head: int, cuts: list[int]) -> list[list[int]]:
    """The blocks of each part, the head last."""
    blocks, starts = [*layers, head], [0, *(c + 1 for c in cuts)]
    return [blocks[a:b] for a, b in zip(starts, [*starts[1:], len(blocks)], strict=True)]


@given(layers=sizes, head=st.integers(0, 1000), limit=st.integers(1, 3000))
def test_choose_cuts(layers: list[int], head: int, limit: int) -> None:
    if max(*layers, head) > limit:
        with pytest.raises(RingstepError, match="raise --max-part-mb"):
            choose_cuts(layers, head, limit)
        return
    cuts = choose_cuts(layers, head, limit)
    assert cuts == sorted(set(cuts)) and all(0 <= c < len(layers) for c in cuts)
    parts = split(layers, head, cuts)
    assert [b for part in parts for b in part] == [*layers, head]
    assert all(part and sum(part) <= limit for part in parts)
    # As few parts as there can be: no part takes the first block of the next.
    assert all(sum(a) + b[0] > limit for a, b in pairwise(parts))


def test_a_whole_that_fits_is_not_cut() -> None:
    assert choose_cuts([3, 3, 3], 3, 12) == []
    assert choose_cuts([3, 3, 3], 3, 11) == [2]
    assert choose_cuts([3, 3, 3], 3, 3) == [0, 1, 2]


def test_block_bytes(spark: Export) -> None:
    layers, head = block_bytes(spark.folder / "decode.onnx")
    hidden, inner, vocab, q, kv, heads = 64, 160, 320, 128, 64, 4
    one = hidden * (2 + q + 2 * kv + q + heads + 3 * inner)
    # Shape constants count to the layer that uses them first.
    assert layers[1:3] == [4 * one] * 2 and 0 <= layers[0] - 4 * one < 400 and len(layers) == 8
    assert head == 4 * (hidden + vocab * hidden)
    assert layer_of("/layers.12/attn/Add") == 12 and layer_of("/embed/Mul") == 0


@pytest.mark.parametrize("cuts", [[3], [2, 5], [0, 1, 2, 3, 4, 5, 6, 7], [7]], ids=str)
def test_parts_are_the_whole(spark: Export, cuts: list[int]) -> None:
    """[7] and the finest cut leave the head a part of its own."""
    ids, answers, caches = np.random.default_rng(2).integers(0, 320, 26), [], []
    for chosen in (None, cuts):
        with DecodeSession.open(spark.save(chosen), threads=1) as session:
            fed = [session.step(ids[:12]), *(session.step([i]) for i in ids[12:])]
            answers.append(np.concatenate(fed))
            caches.append([entry for layer in range(8) for entry in session.entries(layer)])
    np.testing.assert_array_equal(answers[0], answers[1])
    for whole, part in zip(*caches, strict=True):
        np.testing.assert_array_equal(whole, part)


@pytest.mark.parametrize("cuts", [[2, 5], [3, 7]], ids=str)
def test_parts_are_the_whole_with_accurate_activations(accurate: Export, cuts: list[int]) -> None:
    """More than one tensor may pass from layer to layer, but the head takes one."""
    ids, answers = np.random.default_rng(2).integers(0, 320, 20), []
    for chosen in (None, cuts):
        with DecodeSession.open(accurate.save(chosen), threads=1) as session:
            answers.append(np.concatenate([session.step([i]) for i in ids]))
    np.testing.assert_array_equal(answers[0], answers[1])
    parts = StepSpec.load(accurate.folder).graph(1).parts["onnx"]
    assert all(set(a.outputs) & set(b.inputs) for a, b in pairwise(parts))
    if cuts[-1] == 7:
        assert parts[-1].inputs == ("hidden_7",)


def test_head_alone(spark: Export) -> None:
    spec = StepSpec.load(spark.save([3, 7]))
    first, second, head = spec.graph(1).parts["onnx"]
    assert (head.file, head.inputs, head.outputs) == ("decode.part3.onnx", ("hidden_7",), ("logits",))
    assert first.inputs[0] == "x" and first.outputs[0] == second.inputs[0] == "hidden_3"
    assert len(first.outputs) == 1 + 2 * 4 and "past_key_4" not in first.inputs
    assert [t.name for t in spec.graph(1).hidden] == ["hidden_3", "hidden_7"]
    model = onnx.load(str(spark.folder / head.file), load_external_data=False)
    assert {node.name.split("/")[1] for node in model.graph.node} == {"head"}
    onnx.checker.check_model(str(spark.folder / head.file), full_check=True)


def test_parts_refer_to_the_same_weights(spark: Export) -> None:
    spark.save([3])
    found: dict[str, list[str]] = {}
    for file in ("decode.onnx", "decode.part1.onnx", "decode.part2.onnx", "prefill_4.part2.onnx"):
        for tensor in onnx.load(str(spark.folder / file), load_external_data=False).graph.initializer:
            if tensor.external_data:
                found.setdefault(tensor.name, []).append(str(sorted((e.key, e.value) for e in tensor.external_data)))
    assert all(len(set(places)) == 1 and len(places) in (2, 3) for places in found.values())
    assert len(list(Path(spark.folder).glob("*.bin"))) == 2


def test_parts_are_reproducible(spark: Export, tmp_path: Path) -> None:
    parts = part_specs(spark.spec, spark.spec.graph(1), [3], "decode")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_parts(spark.folder / "decode.onnx", parts, tmp_path / name)
    for part in parts:
        assert (tmp_path / "a" / part.file).read_bytes() == (tmp_path / "b" / part.file).read_bytes()


def test_every_cache_is_in_one_part(spark: Export) -> None:
    graph = spark.spec.graph(1)
    for cuts in ([3], [0, 4, 7]):
        parts = part_specs(spark.spec, graph, cuts, "decode")
        for side, tensors in (("inputs", graph.inputs), ("outputs", graph.outputs)):
            names = [name for part in parts for name in getattr(part, side)]
            assert all(names.count(t.name) == 1 for t in tensors if t.layer is not None)
        assert "logits" in parts[-1].outputs

"""The judging half of bisect: measures against hand-made noise, faults and losses, stages, telling values."""

from __future__ import annotations

import numpy as np
import pytest

from ringstep.parity.bisect import (
    LIMITS,
    Block,
    Node,
    explained_db,
    find,
    guilty,
    label,
    rows_db,
    stage_of,
    value_notes,
    verdict,
)


def blocks(*hidden: float) -> list[Block]:
    """x, layers with these local figures, logits; keys and values at 69 dB."""
    layers = [Block(f"hidden_{i}", i, 40.0, db, 69.0, 69.0) for i, db in enumerate(hidden)]
    return [Block("x", None, 73.0, 73.0), *layers, Block("logits", None, 40.0, 65.0)]


def node(name: str, effect: float) -> Node:
    return Node(name, name.rpartition("/")[2], f"{name}_output_0", effect, effect, 1.0)


def test_rows_weigh_alike() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal((100, 64))
    noise = random.standard_normal((100, 64))
    noise *= np.linalg.norm(reference, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    assert rows_db(reference, reference + 1e-2 * noise) == pytest.approx(40.0, abs=1e-9)
    # A massive row that is exact hides nothing of the others: 99 of 100 rows have noise.
    reference[0] *= 1e4
    wrong = reference + 1e-2 * np.where(np.arange(100)[:, None] == 0, 0.0, noise)
    assert rows_db(reference, wrong) == pytest.approx(40.0 - 10 * np.log10(0.99), abs=1e-9)
    assert rows_db(reference, reference) == 300.0
    assert rows_db(reference, np.full_like(reference, np.nan)) == -300.0
    assert rows_db(reference, reference[:50]) == -300.0  # another shape is no answer


def test_the_first_fault_is_named_not_the_deepest() -> None:
    # Two faults: the second is worse, the first is where it begins.
    found = find(blocks(60.0, 30.0, 60.0, 10.0, 61.0, 62.0), LIMITS["float16"])
    assert (found.kind, found.block, found.what, found.db) == ("fault", 2, "hidden", 30.0)


def test_a_wrong_cache_entry_is_a_fault_of_its_layer() -> None:
    made = blocks(60.0, 61.0, 60.0)
    made[2].key_db = 12.0
    found = find(made, LIMITS["float16"])
    assert (found.kind, found.block, found.what) == ("fault", 2, "key")
    assert "new_key_1 has 12.0 dB" in verdict(made, found, [], None)


@pytest.mark.parametrize(("dtype", "db", "kind"), [
    ("float32", 120.0, "loss"), ("float32", 69.0, "fault"), ("float16", 55.0, "loss"), ("float16", 40.0, "fault"),
    ("quantised", 30.0, "loss"), ("quantised", 5.0, "fault"),
])  # fmt: skip
def test_limits(dtype: str, db: float, kind: str) -> None:
    usual = {"float32": 130.0, "float16": 60.0, "quantised": 50.0}[dtype]
    made = [Block(f"hidden_{i}", i, 0.0, db if i == 2 else usual) for i in range(6)]
    found = find(made, LIMITS[dtype])
    assert (found.kind, found.block) == (kind, 2)


def test_noise_adds_up_and_the_worst_nodes_are_named() -> None:
    nodes = [node("/a", 60.0), node("/b", 57.5), node("/c", 80.0), node("/d", 300.0)]
    assert [n.node for n in guilty(nodes)] == ["/b", "/a"]
    assert explained_db(nodes[:1] * 2) == pytest.approx(60.0 - 10 * np.log10(2))
    made, sigmoid = blocks(60.0, 50.0), node("/layers.1/mlp/Sigmoid", 60.0)
    text = verdict(made, find(made, LIMITS["float16"]), [sigmoid], "compiled", [0])
    assert "main loss: /layers.1/mlp/Sigmoid (Sigmoid), as in layer 0" in text
    # 50 dB against the nodes' 60: something is computed otherwise than the nodes alone.
    assert "its nodes alone would give 60.0 dB" in text


def test_the_stage_is_where_most_of_the_noise_comes_in() -> None:
    rows = [{"stage": s, "snr_db": db} for s, db in (("recipe's form", 90.0), ("traced", 70.0), ("sanitised", 70.0),
                                                     ("compiled", 50.0))]  # fmt: skip
    assert stage_of(rows) == "compiled"
    rows[1]["snr_db"] = rows[2]["snr_db"] = 51.0
    assert stage_of(rows) == "traced"
    assert stage_of([]) is None


def test_values_that_give_away() -> None:
    half = np.ones(1000, np.float16)
    assert value_notes("t", half) == []
    half[3] = 60000
    assert value_notes("t", half) == ["reaches 60000, near fp16's 65504"]
    half[4] = np.inf
    assert value_notes("t", half) == ["1 values are not finite (fp16 ends at 65504)"]
    codes = np.arange(1000, dtype=np.uint16)
    assert value_notes("t", codes) == []  # a tensor's own smallest value may be the first code
    codes[:50] = 65535
    assert value_notes("t", codes) == ["5.00 % of its codes are clipped"]
    assert value_notes("t", np.full(4, 70000.0, np.float32)) == []  # float32 has room


def test_labels() -> None:
    assert label("/layers.0/mlp/Sigmoid", "/layers.0/mlp/gate_proj/Gemm, /layers.0/mlp/Mul") == (
        "/layers.0/mlp/Sigmoid + gate_proj/Gemm, Mul")  # fmt: skip
    assert label("/layers.0/mlp/down_proj/Gemm", "/layers.0/mlp/Mul_4") == "/layers.0/mlp/down_proj/Gemm + Mul_4"
    assert label("/layers.0/Add", "") == "/layers.0/Add"

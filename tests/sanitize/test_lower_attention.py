"""Attention against ONNX Runtime's own kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import Feeds, check, ops, random_feeds
from onnx import TensorProto, helper

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.passes.lower_attention import PASS
from sanitize.target import find_target

BATCH, HEADS, SIZE, VALUE = 2, 4, 8, 6
F, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
Named = tuple[str, int, list[int]]


def attention(
    *, rank: int = 4, kv_heads: int = 4, n: int = 3, new: int = 3, past: int = 0, mask: Named | None = None,
    lengths: bool = False, present: bool = False, more: int = 0, opset: int = 23, **attributes: object,
) -> onnx.ModelProto:  # fmt: skip
    if rank == 4:
        shapes = [[BATCH, HEADS, n, SIZE], [BATCH, kv_heads, new, SIZE], [BATCH, kv_heads, new, VALUE]]
        y = [BATCH, HEADS, n, VALUE]
    else:
        shapes = [[BATCH, n, HEADS * SIZE], [BATCH, new, kv_heads * SIZE], [BATCH, new, kv_heads * VALUE]]
        y = [BATCH, n, HEADS * VALUE]
        attributes |= {"q_num_heads": HEADS, "kv_num_heads": kv_heads}
    inputs: list[Named] = [(name, F, shape) for name, shape in zip("qkv", shapes, strict=True)]
    names = ["q", "k", "v", mask[0] if mask else ""]
    if mask:
        inputs.append(mask)
    if past:
        inputs += [("pk", F, [BATCH, kv_heads, past, SIZE]), ("pv", F, [BATCH, kv_heads, past, VALUE])]
    names += ["pk", "pv"] if past else ["", ""]
    if lengths:
        inputs.append(("lengths", INT64, [BATCH]))
        names.append("lengths")
    outputs: list[Named] = [("y", F, y)]
    if present:
        outputs += [("kk", F, [BATCH, kv_heads, past + new, SIZE]), ("vv", F, [BATCH, kv_heads, past + new, VALUE])]
    if more:
        outputs.append(("qk", F, [BATCH, HEADS, n, past + new]))
    while names and not names[-1]:
        names.pop()
    node = helper.make_node("Attention", names, [name for name, _, _ in outputs], "attn", **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])


def masked(model: onnx.ModelProto) -> Feeds:
    """Feeds in which every query sees its first key."""
    feeds = random_feeds(model)
    for name, array in feeds.items():
        if array.dtype == np.bool_:
            array[..., 0] = True
        if name == "lengths":
            feeds[name] = np.array([2, 5], np.int64)
    return feeds


CASES = {
    "plain": attention(),
    "rank 3": attention(rank=3),
    "grouped": attention(kv_heads=2),
    "grouped, rank 3": attention(kv_heads=1, rank=3),
    "grouped, one token": attention(kv_heads=2, n=1, new=1, past=4, mask=("mask", F, [1, 5]), present=True),
    "grouped, one token, mask by head": attention(
        kv_heads=2, n=1, new=1, past=4, mask=("mask", F, [1, 4, 1, 5]), present=True
    ),
    "past": attention(past=5, present=True),
    "past, rank 3": attention(past=5, rank=3, kv_heads=2, present=True),
    "present without past": attention(present=True, rank=3),
    "causal": attention(is_causal=1),
    "causal, more keys": attention(is_causal=1, new=5),
    "causal, past": attention(is_causal=1, past=4, kv_heads=2, present=True),
    "float mask": attention(mask=("mask", F, [3, 3])),
    "float mask of rank 4": attention(mask=("mask", F, [2, 1, 3, 3]), kv_heads=2),
    "boolean mask": attention(mask=("mask", BOOL, [2, 4, 3, 3])),
    "boolean mask, causal": attention(mask=("mask", BOOL, [3, 3]), is_causal=1, kv_heads=2),
    "softcap": attention(softcap=2.0, mask=("mask", BOOL, [3, 3])),
    "scale": attention(scale=0.2, kv_heads=2),
    "lengths": attention(lengths=True, new=5, opset=24),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_kernel(tmp_path: Path, name: str) -> None:
    after = check(CASES[name], PASS, tmp_path, changes=1, feeds=masked(CASES[name]))
    assert "Attention" not in ops(after)
    assert all(value.shape is not None and len(value.shape) <= 4 for node in after.graph for value in node.outputs)


def test_masks_are_small_where_16_bits_must_hold_them(tmp_path: Path) -> None:
    model = CASES["boolean mask, causal"]
    after = check(model, PASS, tmp_path, target=find_target("qnn-htp", precision="a16"), feeds=masked(model))
    lowest = min(found.min() for v in after.graph.initializers.values() if (found := graphs.array(v)) is not None)
    assert lowest == -100


def test_a_cpu_keeps_it(tmp_path: Path) -> None:
    check(CASES["plain"], PASS, tmp_path, target=find_target("xnnpack"), changes=0)


def test_scores_that_are_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match=r"attn.*qk_matmul_output"):
        check(attention(present=True, more=1), PASS, tmp_path)


def test_open_shapes_are_refused(tmp_path: Path) -> None:
    model = attention()
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[2].dim_param = "length"
    with pytest.raises(RingstepError, match=r"attn.*not static"):
        check(model, PASS, tmp_path)

"""Attention, MultiHeadAttention and GroupQueryAttention of com.microsoft against ONNX Runtime's own kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import Feeds, check, ops, random_feeds
from onnx import TensorProto, helper, numpy_helper

from ringstep.errors import RingstepError
from sanitize.passes import lower_group_query_attention, lower_multi_head_attention, lower_packed_attention
from sanitize.target import find_target

BATCH, HEADS, SIZE = 2, 4, 16
HIDDEN = HEADS * SIZE
F, INT32 = TensorProto.FLOAT, TensorProto.INT32
Named = tuple[str, int, list[int]]


def model_of(
    node: onnx.NodeProto, inputs: list[Named], outputs: list[Named], *tensors: onnx.TensorProto
) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs], list(tensors),
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def multi_head(
    *, n: int = 3, new: int = 3, past: int = 0, keys: int = 3, bias: bool = False, padding: list[int] | None = None,
    scores: list[int] | None = None, **attributes: object,
) -> onnx.ModelProto:  # fmt: skip
    kv = [BATCH, new, HIDDEN] if keys == 3 else [BATCH, HEADS, new, SIZE]
    cache = [BATCH, HEADS, past, SIZE]
    inputs: list[Named | None] = [
        ("q", F, [BATCH, n, HIDDEN]), ("k", F, kv), ("v", F, kv), ("b", F, [3 * HIDDEN]) if bias else None,
        ("padding", INT32, padding) if padding else None, ("scores", F, scores) if scores else None,
        ("pk", F, cache) if past else None, ("pv", F, cache) if past else None,
    ]  # fmt: skip
    outputs: list[Named] = [("y", F, [BATCH, n, HIDDEN])]
    if past:
        outputs += [(name, F, [BATCH, HEADS, past + new, SIZE]) for name in ("kk", "vv")]
    node = helper.make_node(
        "MultiHeadAttention", [i[0] if i else "" for i in inputs], [o[0] for o in outputs], "mha",
        domain="com.microsoft", num_heads=HEADS, **attributes,
    )  # fmt: skip
    return model_of(node, [i for i in inputs if i], outputs)


MULTI_HEAD = {
    "plain": multi_head(),
    "cross": multi_head(new=5),
    "keys by head": multi_head(new=5, keys=4),
    "bias": multi_head(bias=True),
    "past": multi_head(past=4),
    "one token": multi_head(n=1, new=1, past=4),
    "padding": multi_head(padding=[BATCH, 3]),
    "padding by query": multi_head(padding=[BATCH, 3, 3]),
    "scores": multi_head(scores=[1, HEADS, 3, 3]),
    "causal": multi_head(unidirectional=1),
    "scale": multi_head(scale=0.3),
}


@pytest.mark.parametrize("name", MULTI_HEAD)
def test_multi_head(tmp_path: Path, name: str) -> None:
    model = MULTI_HEAD[name]
    feeds = random_feeds(model)
    if "padding" in feeds:
        feeds["padding"] = np.minimum(feeds["padding"], 1)
        feeds["padding"][..., 0] = 1
    after = check(model, lower_multi_head_attention.PASS, tmp_path, changes=1, feeds=feeds)
    assert "MultiHeadAttention" not in ops(after)


def grouped(
    *, n: int = 1, past: int = 8, total: int = 8, kv_heads: int = 2, rotary: bool = True, packed: bool = False,
    positions: bool = False, scores: bool = False, batch: int = BATCH, caches: bool = True, **attributes: object,
) -> onnx.ModelProto:  # fmt: skip
    kv, cache, present = [batch, n, kv_heads * SIZE], [batch, kv_heads, past, SIZE], [batch, kv_heads, total, SIZE]
    query = HIDDEN + 2 * kv_heads * SIZE if packed else HIDDEN
    inputs: list[Named | None] = [("q", F, [batch, n, query])]
    inputs += [None, None] if packed else [("k", F, kv), ("v", F, kv)]
    inputs += [("pk", F, cache), ("pv", F, cache)] if past else [None, None]
    inputs += [("lengths", INT32, [batch]), ("longest", INT32, [1])]
    if rotary:
        inputs += [("cos", F, [16, SIZE // 2]), ("sin", F, [16, SIZE // 2])]
    elif positions or scores:
        inputs += [None, None]
    if positions or scores:
        inputs.append(("ids", TensorProto.INT64, [batch, n]) if positions else None)
    if scores:
        inputs.append(("scores", F, [1, 1, n, total]))
    outputs: list[Named] = [("y", F, [batch, n, HIDDEN]), ("kk", F, present), ("vv", F, present)]
    node = helper.make_node(
        "GroupQueryAttention", [i[0] if i else "" for i in inputs], [o[0] for o in outputs], "gqa",
        domain="com.microsoft", num_heads=HEADS, kv_num_heads=kv_heads, do_rotary=int(rotary), **attributes,
    )  # fmt: skip
    longest = numpy_helper.from_array(np.array([total], np.int32), "longest")
    return model_of(node, [i for i in inputs if i and i[0] != "longest"], outputs[: 3 if caches else 1], longest)


GROUPED = {
    "decode": (grouped(), [7, 7]),
    "decode, no rotary": (grouped(rotary=False), [7, 7]),
    "growing": (grouped(past=7, total=8), [7, 7]),
    "prompt": (grouped(n=5, past=0, total=5), [4, 4]),
    "interleaved": (grouped(rotary_interleaved=1), [7, 7]),
    "packed": (grouped(packed=True), [7, 7]),
    "one kv head": (grouped(kv_heads=1), [7, 7]),
    "no groups": (grouped(kv_heads=4), [7, 7]),
    "window": (grouped(local_window_size=3), [7, 7]),
    "window, prompt": (grouped(n=5, past=0, total=5, local_window_size=2), [4, 4]),
    "softcap": (grouped(softcap=1.5), [7, 7]),
    "scale": (grouped(scale=0.3), [7, 7]),
    "bias": (grouped(scores=True), [7, 7]),
    "positions": (grouped(positions=True), [7, 7]),
    "positions of a prompt": (grouped(n=5, past=0, total=5, positions=True, batch=1), [4]),
    "chunk": (grouped(n=3, batch=1), [7]),
    "chunk, not full": (grouped(n=3, batch=1), [5]),
    # The kernel leaves the rows of present behind the last entry open.
    "not full": (grouped(caches=False), [5, 3]),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped(tmp_path: Path, name: str) -> None:
    model, lengths = GROUPED[name]
    after = check(model, lower_group_query_attention.PASS, tmp_path, changes=1, feeds=_feeds(model, lengths))
    assert "GroupQueryAttention" not in ops(after)
    assert all(value.shape is not None and len(value.shape) <= 4 for node in after.graph for value in node.outputs)


def _feeds(model: onnx.ModelProto, lengths: list[int]) -> Feeds:
    return random_feeds(model) | {"lengths": np.array(lengths, np.int32)}


def packed(
    *,
    bias: bool = True,
    padding: bool = False,
    scores: bool = False,
    past: int = 0,
    value: int = HIDDEN,
    **attributes: object,
) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    width = 2 * HIDDEN + value
    inputs: list[Named | None] = [
        ("x", F, [BATCH, 3, 12]), ("w", F, [12, width]), ("b", F, [width]) if bias else None,
        ("padding", INT32, [BATCH, 3]) if padding else None,
        ("past", F, [2, BATCH, HEADS, past, SIZE]) if past else None,
        ("scores", F, [BATCH, HEADS, 3, 3]) if scores else None,
    ]  # fmt: skip
    outputs: list[Named] = [("y", F, [BATCH, 3, value])]
    if past:
        outputs.append(("present", F, [2, BATCH, HEADS, past + 3, SIZE]))
    if value != HIDDEN:
        attributes["qkv_hidden_sizes"] = [HIDDEN, HIDDEN, value]
    node = helper.make_node(
        "Attention", [i[0] if i else "" for i in inputs], [o[0] for o in outputs], "attn", domain="com.microsoft",
        num_heads=HEADS, **attributes,
    )  # fmt: skip
    weight = numpy_helper.from_array(rng.normal(size=(12, width)).astype(np.float32), "w")
    return model_of(node, [i for i in inputs if i and i[0] != "w"], outputs, weight)


PACKED = {
    "plain": packed(),
    "no bias": packed(bias=False),
    "padding": packed(padding=True),
    "scores": packed(scores=True),
    "causal": packed(unidirectional=1),
    "scale": packed(scale=0.1),
    "narrow values": packed(value=HEADS * 8),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed(tmp_path: Path, name: str) -> None:
    feeds = random_feeds(PACKED[name])
    if "padding" in feeds:
        feeds["padding"] = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    after = check(PACKED[name], lower_packed_attention.PASS, tmp_path, changes=1, feeds=feeds)
    assert "Attention" not in ops(after)


def test_a_packed_past_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match=r"attn.*past"):
        check(packed(past=4), lower_packed_attention.PASS, tmp_path)


def test_what_cannot_be_lowered_is_named(tmp_path: Path) -> None:
    model = grouped(smooth_softmax=1)
    with pytest.raises(RingstepError, match=r"gqa.*smooth_softmax"):
        check(model, lower_group_query_attention.PASS, tmp_path, feeds=_feeds(model, [7, 7]))


def test_a_cpu_keeps_both(tmp_path: Path) -> None:
    cpu = find_target("ort-mobile")
    check(multi_head(), lower_multi_head_attention.PASS, tmp_path, target=cpu, changes=0)
    model, lengths = GROUPED["decode"]
    check(model, lower_group_query_attention.PASS, tmp_path, target=cpu, changes=0, feeds=_feeds(model, lengths))

"""What the lowerings build compiles for sm8750 and computes the same there (simulated)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import Feeds, parse, random_feeds, run
from onnx import TensorProto
from test_fuse_rms_norm import OUT_OF_REACH, spelling
from test_lower_attention import attention
from test_lower_matmul_nbits import nbits
from test_lower_microsoft_attention import grouped, multi_head
from test_lower_rotary_embedding import rotary

from ringstep.engines.qnn_sim import open_graph
from ringstep.parity.metrics import snr_db
from sanitize.model_file import read_model, write_model
from sanitize.passes import (
    Pass,
    accurate_square,
    fuse_rms_norm,
    lower_attention,
    lower_group_query_attention,
    lower_matmul_nbits,
    lower_multi_head_attention,
    lower_rotary_embedding,
)
from sanitize.target import find_target

TARGET = find_target("qnn-htp", "sm8750")
MASK = ("mask", TensorProto.BOOL, [2, 1, 3, 7])
CASES: dict[str, tuple[onnx.ModelProto, Pass]] = {
    "rotary": (rotary(microsoft=False, rank=4, positions="given"), lower_rotary_embedding.PASS),
    "rotary, interleaved": (rotary(microsoft=True, rank=3, interleaved=1, rotated=4), lower_rotary_embedding.PASS),
    "attention": (
        attention(kv_heads=2, past=4, mask=MASK, is_causal=1, softcap=3.0, present=True),
        lower_attention.PASS,
    ),
    "multi-head": (multi_head(bias=True, padding=[2, 3], unidirectional=1), lower_multi_head_attention.PASS),
    "grouped, one token": (grouped(), lower_group_query_attention.PASS),
    "grouped, chunk": (grouped(n=3, batch=1, local_window_size=4), lower_group_query_attention.PASS),
    "nbits": (nbits(zeros="packed", k=64, n=16), lower_matmul_nbits.PASS),
    "rms norm, wide": (parse(spelling(shape="1, 12, 4, 8")), fuse_rms_norm.PASS),
    "rms norm, massive": (parse(spelling(shape="2, 8")), fuse_rms_norm.PASS),
    "rms norm, massive, opset 18": (parse(OUT_OF_REACH), accurate_square.PASS),
}
FLOOR_DB = 50.0


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime_qnn") is None, reason="needs the QNN plugin")
@pytest.mark.parametrize("name", CASES)
def test_same_on_the_simulator(tmp_path: Path, name: str) -> None:
    model, the_pass = CASES[name]
    feeds = _feeds(model)
    if "massive" in name:
        feeds["x"] *= 3000
    onnx.save(model, tmp_path / "before.onnx")
    want = run(tmp_path / "before.onnx", feeds)
    loaded = read_model(tmp_path / "before.onnx")
    assert the_pass.run(loaded, TARGET)
    write_model(loaded, tmp_path / "after.onnx")
    assert TARGET.chip is not None
    with open_graph(tmp_path / "after.onnx", soc_model=TARGET.chip.soc_model, fp16=True) as graph:
        have = graph.run(feeds)
    for output, array in want.items():
        assert snr_db(array.astype(np.float64).reshape(-1), have[output].astype(np.float64).reshape(-1)) > FLOOR_DB


def _feeds(model: onnx.ModelProto) -> Feeds:
    feeds = random_feeds(model)
    for name, array in feeds.items():
        if array.dtype == np.bool_ or name == "padding":
            array[..., 0] = 1
        if name == "padding":
            feeds[name] = np.minimum(array, 1)
        if name == "lengths":
            feeds[name] = np.full(array.shape, 7, np.int32)
    return feeds

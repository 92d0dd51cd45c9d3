"""A model moved to a newer opset computes the same; one that would not is left alone, with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import in_if, parse, random_feeds, run

from sanitize import graph as graphs
from sanitize.model_file import read_model, write_model
from sanitize.opset import raise_opset

OLD = """<ir_version: 7, opset_import: ["" : 11]>
g (float[1, 4, 6] x) => (float[4, 6] a, float[1, 1, 4, 6] b, float[1, 4] c, float[1, 4, 3] d, float[1, 4, 3] e,
   float[1, 4, 2] f, float[1, 4, 4] h, float[1, 4, 6] i, float[1, 1, 1] j) {
  a = Squeeze<axes = [0]>(x)
  b = Unsqueeze<axes = [1]>(x)
  c = ReduceSum<axes = [-1], keepdims = 0>(x)
  d, e = Split<axis = 2>(x)
  f, h = Split<axis = 2, split = [2, 4]>(x)
  i = Softmax<axis = 2>(x)
  j = ReduceMean(x)
}"""


@pytest.mark.parametrize("version", [13, 18, 20, 23])
@pytest.mark.parametrize("wrap", [lambda model: model, in_if])
def test_same_results(tmp_path: Path, version: int, wrap: object) -> None:
    model = wrap(parse(OLD))  # type: ignore[operator]
    onnx.save(model, tmp_path / "old.onnx")
    loaded = read_model(tmp_path / "old.onnx")
    assert raise_opset(loaded, version) == ""
    assert graphs.opset(loaded) == version
    write_model(loaded, tmp_path / "new.onnx")
    onnx.checker.check_model(str(tmp_path / "new.onnx"))
    feeds = random_feeds(parse(OLD)) | {"choose_branch": np.array(True)}
    want, have = run(tmp_path / "old.onnx", feeds), run(tmp_path / "new.onnx", feeds)
    for name, array in want.items():
        np.testing.assert_array_equal(have[name], array)


@pytest.mark.parametrize(
    "version, call, reason",
    [
        (11, "Softmax<axis = 1>(x)", "Softmax means something else from opset 13"),
        (10, "Clip<min = 0.0>(x)", "Clip lost its attribute min"),
        (16, "GridSample<mode = \"bilinear\">(x, x)", "GridSample means something else from opset 20"),
        (18, "GroupNormalization<num_groups = 1>(x, s, s)", "GroupNormalization means something else from opset 21"),
    ],
)  # fmt: skip
def test_what_would_change_stays(tmp_path: Path, version: int, call: str, reason: str) -> None:
    text = f"""<ir_version: 7, opset_import: ["" : {version}]>
    g (float[1, 2, 2, 2] x, float[1] s) => (float y, float[2, 2, 2] z) {{ y = {call}\n z = Squeeze(x) }}"""
    onnx.save(parse(text), tmp_path / "old.onnx")
    loaded = read_model(tmp_path / "old.onnx")
    assert reason in raise_opset(loaded, 23)
    assert graphs.opset(loaded) == version


def test_a_newer_model_is_not_lowered(tmp_path: Path) -> None:
    onnx.save(parse("g (float[2] x) => (float[2] y) { y = Neg(x) }"), tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert raise_opset(loaded, 13) == "" and graphs.opset(loaded) == 21

"""Encodings read out of quantised graphs, and indexes of weights that cannot be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from exporters.tapped import encodings_in
from quantize.store import load_index
from ringstep.contract import Encoding
from ringstep.errors import RingstepError


def test_encodings_come_from_the_graph() -> None:
    # Prefill's Transpose_output_0 is a move of queries, decode's one of past keys: a file by name has room for one.
    x = ir.val("k_quantised", ir.DataType.INT16, (1,))
    scale = ir.val("s", const_value=ir.tensor(np.float32(0.5)), dtype=ir.DataType.FLOAT, shape=ir.Shape(()))
    node = ir.Node("", "DequantizeLinear", [x, scale], name="dq")
    graph = lambda: ir.Graph([x], [node.outputs[0]], nodes=[node], name="decode")
    assert encodings_in(graph()) == {"k": ("int16", Encoding(0.5, 0))}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_a_scale_that_is_none(scale: float) -> None:
    x = ir.val("k_quantised", ir.DataType.INT16, (1,))
    step = ir.val("s", const_value=ir.tensor(np.float32(scale)), dtype=ir.DataType.FLOAT, shape=ir.Shape(()))
    node = ir.Node("", "DequantizeLinear", [x, step], name="dq")
    with pytest.raises(RingstepError, match="node dq: a scale"):
        encodings_in(ir.Graph([x], [node.outputs[0]], nodes=[node], name="decode"))


PLACE = {"file": "quantised.bin", "offset": 0, "shape": [2, 2], "dtype": "int8"}
STORED = {"grid": {"bits": 8}, "shape": [2, 2], "q": PLACE, "scale": PLACE, "steps": None, "zero": None}


@pytest.mark.parametrize("change", [
    {"grid": None}, {"grid": {"bits": "x", "what": 1}}, {"shape": [1]}, {"shape": None}, {"q": None}, {"scale": 3},
    {"q": PLACE | {"file": "../../secret"}}, {"q": PLACE | {"file": "/etc/passwd"}}, {"q": PLACE | {"file": 3}},
    {"q": PLACE | {"offset": -1}}, {"q": PLACE | {"offset": 1.5}}, {"q": PLACE | {"shape": [10**30]}},
    {"zero": []}, {"steps": {"file": "x"}},
])  # fmt: skip
def test_an_index_that_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "quantised.json"
    path.write_text(json.dumps({"w": STORED}))
    assert list(load_index(path)) == ["w"]
    path.write_text(json.dumps({"w": STORED | change}))
    with pytest.raises(RingstepError, match=r"quantised\.json: no index of rounded weights"):
        load_index(path)

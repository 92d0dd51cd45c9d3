"""Codes of tensors inside quantised graphs: what moves, and files of encodings that cannot be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from exporters.tapped import Codec, read_encodings
from quantize.store import load_index
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError

FLOAT = ir.TensorType(ir.DataType.FLOAT)
KEY, OTHER = {"dtype": "int16", "scale": 0.5, "zero": 0}, {"dtype": "uint16", "scale": 0.25, "zero": 7}


def value(name: str) -> ir.Value:
    return ir.Value(name=name, type=FLOAT, shape=ir.Shape((1,)))


def empty_spec(scheme: str) -> StepSpec:
    graphs: Any = (type("Graph", (), {"inputs": (), "outputs": (), "hidden": ()}),)
    return StepSpec("r", "m", 1, 1, 1, "uint16", -1.0, (), (), (), (), graphs, scheme=scheme)


def test_a_move_is_held_as_what_it_moves(tmp_path: Path) -> None:
    # Prefill's Transpose_output_0 is a move of queries, decode's one of past keys; the file has the name once.
    (tmp_path / "quantize").mkdir()
    body = {"past_key_0": KEY, "Transpose_output_0": OTHER, "MatMul_output_0": OTHER}
    (tmp_path / "quantize/activations.json").write_text(json.dumps(body))
    names = ("past_key_0", "Transpose_output_0", "Reshape_output_0", "MatMul_output_0")
    past, moved, again, product = map(value, names)
    nodes = [ir.Node("", "Transpose", [past], outputs=[moved]), ir.Node("", "Reshape", [moved], outputs=[again]),
             ir.Node("", "MatMul", [again, again], outputs=[product])]  # fmt: skip
    codec = Codec(tmp_path, empty_spec("w8a16"))
    own = codec.within(ir.Graph([past], [product], nodes=nodes, name="decode"))
    for name in (*names[:3], "Transpose_output_0_quantised"):
        assert own.encode(name, np.array([3.0])).tolist() == [6] and own.encode(name, np.array([3.0])).dtype == "int16"
    assert own.encode("MatMul_output_0", np.array([3.0])).tolist() == [19]
    assert codec.encode("Transpose_output_0", np.array([3.0])).tolist() == [19]  # the other graph's, as before


@pytest.mark.parametrize("text", [
    "", "[]", "[" * 100_000, '{"a": 1}', '{"a": {}}', '{"a": null}', '{"a": {"dtype": "int16", "scale": 0.5}}',
    *(json.dumps({"a": KEY | change}) for change in (
        {"dtype": "float32"}, {"dtype": []}, {"scale": float("nan")}, {"scale": 0.0}, {"scale": -1.0}, {"scale": "1"},
        {"scale": 1e300}, {"zero": 40000}, {"zero": 10**400}, {"zero": None}, {"zero": True},
    )),
])  # fmt: skip
def test_encodings_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "activations.json"
    path.write_text(text)
    with pytest.raises(RingstepError, match=r"activations\.json"):
        read_encodings(path)


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
    with pytest.raises(RingstepError, match=r"quantised\.json: no weight at 'w'"):
        load_index(path)

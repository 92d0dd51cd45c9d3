"""The table of thresholds: what holds for which artifact, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from test_report import session

from recipes import SUMMARIES
from ringstep.errors import RingstepError
from ringstep.parity.thresholds import FILE, load, thresholds_for

TEXT = FILE.read_text()


def spec(**fields: Any) -> Any:
    """A contract with these fields; thresholds look at dtype, activations, scheme and recipe."""
    return dataclasses.replace(session().spec, **fields)


@pytest.mark.parametrize(
    ("fields", "engine", "db", "top1"),
    [({}, "ort", 90, 0), ({}, "qnn-sim", 20, 0), ({"activations": "accurate"}, "qnn-sim", 35, 0),
     ({"dtype": "float16"}, "ort", 20, 0), ({"dtype": "float16", "activations": "accurate"}, "ort", 35, 0),
     ({"dtype": "float32", "activations": "accurate"}, "torch", 90, 0),
     ({"scheme": "w8a16"}, "ort", 25, 0.6), ({"scheme": "w8-mine"}, "qnn-sim", 25, 0.6),
     ({"scheme": "w4a16-block"}, "ort", 10, 0.6), ({"scheme": "auto"}, "ort", 10, 0.6),
     ({"scheme": "fp32"}, "ort", 10, 0.6)],
)  # fmt: skip
def test_what_holds(fields: dict[str, Any], engine: str, db: float, top1: float) -> None:
    """As the figures stood before there was a table."""
    own = thresholds_for(spec(**fields), engine)
    assert (own.db, own.top1) == (db, top1)


def test_recipes_replace_single_keys(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(TEXT + "[recipes.gemma3.onnx.w8a16]\npooled_db = 31\n[recipes.gemma3.onnx.fp32]\nposition_db = 80")
    gemma = thresholds_for(spec(recipe="gemma3", scheme="w8a16"), "ort", file)
    assert (gemma.db, gemma.top1) == (31, 0.6)
    assert thresholds_for(spec(recipe="gemma3", scheme="w8a16"), "qnn-sim", file).db == 25
    assert thresholds_for(spec(recipe="gemma3", scheme="w8"), "ort", file).db == 25
    assert thresholds_for(spec(recipe="llama", scheme="w8a16"), "ort", file).db == 25
    assert thresholds_for(spec(recipe="gemma3"), "ort", file).db == 80


def test_recipes_of_the_table_exist() -> None:
    assert set(load()[1]) <= set(SUMMARIES)


BAD = {
    "no TOML": (("[onnx.fp32]", "[onnx.fp32"), "not valid TOML"),
    "a format misspelt": (("[qnn.w8]", "[qn.w8]"), "qn: unknown (did you mean qnn?)"),
    "a key misspelt": (("top1 = 0.6", "top2 = 0.6"), "onnx.w8.top2: unknown (did you mean top1?)"),
    "a key of schemes": (("position_db = 90", "pooled_db = 90"), "onnx.fp32.pooled_db: unknown"),
    "a key missing": (("position_db = 90\n", ""), "onnx.fp32.position_db: missing"),
    "a precision missing": (("[onnx.fp16-native]", "[onnx.w2]"), "onnx.fp16-native: missing"),
    "no number": (("position_db = 90", "position_db = '90'"), "'90' is not a finite number"),
    "a truth value": (("position_db = 90", "position_db = true"), "True is not a finite number"),
    "not finite": (("position_db = 90", "position_db = nan"), "nan is not a finite number"),
    "no share": (("top1 = 0.6", "top1 = 60"), "onnx.w8.top1: 60 is no share"),
    "out of reach": (("position_db = 90", "position_db = 900"), "nothing that can be reached"),
    "fp32 on the NPU": (("[qnn.w8]", "[qnn.fp32]"), "qnn.fp32: the NPU has no fp32"),
    "a recipe's format": (("# What", "[recipes.llama.onx.fp32]\nposition_db = 1\n# What"), "llama.onx: unknown"),
    "a recipe's key": (("# What", "[recipes.llama.onnx.fp32]\nposition = 1\n# What"), "did you mean position_db?"),
    "no table": (("# What", "recipes = 5\n# What"), "recipes: expected tables"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str, tmp_path: Path) -> None:
    (old, new), words = BAD[name]
    (tmp_path / "t.toml").write_text(TEXT.replace(old, new, 1))
    with pytest.raises(RingstepError, match=re.escape(words)) as caught:
        thresholds_for(spec(), "ort", tmp_path / "t.toml")
    assert str(caught.value).startswith(str(tmp_path / "t.toml")) and "\n" not in str(caught.value)

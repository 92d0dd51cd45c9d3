"""Scheme files: every key and value checked, written and read again."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.grid import Grid
from quantize.scheme import (
    Activations,
    Auto,
    Cache,
    Exceptions,
    Override,
    Ranges,
    Scheme,
    Weights,
    describe,
    fingerprint,
    grid_for,
    weights_for,
)
from quantize.scheme_file import load_scheme, parse_scheme, to_toml
from ringstep.errors import RingstepError

DOWN, UP = "layers.3.mlp.down_proj", "layers.12.mlp.up_proj"
PATHS = ["embedding", DOWN, UP, "layers.3.attn.q_proj", "head"]


def parse(text: str) -> Scheme:
    return parse_scheme(text, "mine", "mine.toml")


def refusal(text: str) -> str:
    with pytest.raises(RingstepError) as caught:
        parse(text)
    line = str(caught.value)
    assert "\n" not in line and line.startswith("mine.toml")
    return line


# Loading


def test_a_file_loads_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "w8a16.toml"  # shares a preset's name, and is meant all the same
    path.write_text("[weights]\nbits = 4\n")
    for given_path in (path, str(path)):
        assert load_scheme(given_path).weights.bits == 4
    assert load_scheme("w8a16").weights.bits == 8


def test_all_keys_arrive() -> None:
    scheme = parse(
        """
        description = "everything"
        sequential = true
        rotate = "hadamard"
        rescale = "awq"
        sink_prefix = "off"
        weights = { bits = 4, block = 64, two_level = true, rounding = "clip", damping = 1 }
        head = { bits = 16 }
        embedding = { symmetric = false, block = 32 }
        cache = { bits = 8 }
        exceptions = { norms = 16, gates = 0, softmax = 8 }
        auto = { target_db = 24, max_bytes = 70000000, steps = ["4 -> 8", "8->16"] }
        [activations]
        bits = 8
        percentile = 99.9
        ranges = { residual = "percentile", scores = "mse", logits = "entropy" }
        [[override]]
        pattern = "layers.3.*"
        bits = 8
        block = 0
        two_level = false
        [[override]]
        pattern = "layers.*.attn.q_proj"
        dtype = "float16"
        """
    )
    per_channel = (("bits", 8), ("block", None), ("two_level", False))
    half = tuple(sorted(dataclasses.asdict(Weights(dtype="float16", bits=16)).items()))
    assert scheme == Scheme(
        "mine", "everything", True, "hadamard", "awq", "off",
        Weights(bits=4, block=64, two_level=True, rounding="clip", damping=1.0),
        Weights(bits=16), Weights(symmetric=False, block=32),
        Activations(8, 99.9, Ranges(residual="percentile", scores="mse", logits="entropy")), Cache(8),
        Exceptions(16, 0, 8), (Override("layers.3.*", per_channel), Override("layers.*.attn.q_proj", half)),
        Auto(24.0, 70_000_000, ("4 -> 8", "8->16")),
    )  # fmt: skip
    assert scheme.auto is not None and scheme.auto.promotions() == ((4, 8), (8, 16))
    assert isinstance(scheme.weights.damping, float)
    assert grid_for(scheme, DOWN) == Grid(8) and grid_for(scheme, "layers.3.attn.q_proj") is None
    assert grid_for(scheme, UP) == Grid(4, True, 64, True) and grid_for(scheme, "head") == Grid(16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wieghts = {}", "mine.toml: unknown key 'wieghts' (did you mean weights?)"),
        ("[weights]\nbit = 4", "mine.toml: [weights] unknown key 'bit' (did you mean bits?)"),
        ("[weights]\nrotate = 'hadamard'", "[weights] unknown key 'rotate'; it belongs above the first table"),
        ("name = 'x'", "mine.toml: unknown key 'name'"),
        ("[activations.ranges]\nresidal = 'mse'", "[activations.ranges] unknown key 'residal' (did you mean resid"),
        ("[[override]]\npattern = 'a'\nbitts = 4", "[[override]] 1: unknown key 'bitts' (did you mean bits?)"),
        ("[weights]\nbits = 5", "[weights] bits must be 2, 3, 4, 8 or 16, not 5"),
        ("[weights]\nbits = true", "[weights] bits must be 2, 3, 4, 8 or 16, not True"),
        ("[weights]\nbits = 4.0", "[weights] bits must be 2, 3, 4, 8 or 16, not 4.0"),
        ("[weights]\nbits = '4'", "[weights] bits must be 2, 3, 4, 8 or 16, not '4'"),
        ("[weights]\nsymmetric = 1", "[weights] symmetric must be true or false, not 1"),
        ("[weights]\nblock = 48", "[weights] block must be a power of two, 16 or more, not 48"),
        ("[weights]\nblock = 8", "[weights] block must be a power of two"),
        ("[weights]\nblock = -32", "[weights] block must be a power of two"),
        ("[weights]\nblock = true", "[weights] block must be a whole number, not True"),
        ("[weights]\nblock = 32.0", "[weights] block must be a whole number, not 32.0"),
        ("[weights]\nrounding = 'gptp'", "'nearest', 'clip', 'gptq' or 'two-sided', not 'gptp' (did you mean gptq?)"),
        ("[weights]\ndamping = inf", "[weights] damping must be finite, not inf"),
        ("[weights]\ndamping = nan", "[weights] damping must be finite, not nan"),
        ("[weights]\ndamping = 0", "[weights] damping must be above 0 and at most 1, not 0.0"),
        ("[weights]\ndamping = '1'", "[weights] damping must be a number, not '1'"),
        ("[weights]\ndamping = " + "9" * 400, "[weights] damping must be a number, not 999"),
        ("[weights]\ntwo_level = true", "[weights] two_level needs blocks"),
        ("[weights]\ntwo_level = true\nblock = 32", "[weights] two_level needs symmetric weights of 4 bits"),
        ("[head]\ntwo_level = true\nbits = 4\nblock = 32\nsymmetric = false", "[head] two_level needs symmetric"),
        ("[head]\ndtype = 'float16'\nbits = 8", "[head] bits has no meaning with dtype = 'float16'"),
        ("[weights]\ndtype = 'fp16'", "[weights] dtype must be 'int' or 'float16', not 'fp16'"),
        ("[embedding]\nrounding = 'gptq'", "[embedding] rounding needs inputs"),
        ("weights = 4", "[weights] must be a table, not 4"),
        ("[[weights]]\nbits = 4", "[weights] must be a table, not [{'bits': 4}]"),
        ("[activations]\nranges = 'mse'", "[activations.ranges] must be a table, not 'mse'"),
        ("[activations]\nbits = 4", "[activations] bits must be 0, 8 or 16, not 4"),
        ("[activations]\npercentile = 101", "[activations] percentile must be above 50 and at most 100, not 101.0"),
        ("[activations]\npercentile = 0.9999", "[activations] percentile must be above 50"),
        ("[cache]\nbits = 4", "[cache] bits must be 8 or 16, not 4"),
        ("[weights]\nblock = 36893488147419103232", "[weights] block = 36893488147419103232 is longer than rows are"),
        ("[exceptions]\nnorms = 32", "[exceptions] norms must be 0, 8 or 16, not 32"),
        ("[activations]\nbits = 0\n[cache]\nbits = 8", "[cache] has no meaning with float activations"),
        ("[activations]\naccuracy_level = 4", "[activations] accuracy_level is of float activations (bits = 0)"),
        ("[activations]\nbits = 0\n[exceptions]\nnorms = 16", "[exceptions] has no meaning with float"),
        ("sequential = 'yes'", "mine.toml: sequential must be true or false, not 'yes'"),
        ("description = 3", "mine.toml: description must be a string, not 3"),
        ("sink_prefix = false", "mine.toml: sink_prefix must be 'auto' or 'off', not False"),
        ("override = 3", "mine.toml: override must be [[override]] tables"),
        ("[override]\npattern = 'a'\nbits = 4", "mine.toml: override must be [[override]] tables"),
        ("override = [3]", "mine.toml: override must be [[override]] tables"),
        ("[[override]]\nbits = 4", "[[override]] 1: pattern must be a string"),
        ("[[override]]\npattern = ''\nbits = 4", "[[override]] 1: pattern must be a string"),
        ("[[override]]\npattern = 3\nbits = 4", "[[override]] 1: pattern must be a string"),
        ("[[override]]\npattern = 'a'", "[[override]] 1: it changes nothing"),
        ("[[override]]\npattern = 'a'\nbits = 4\n[[override]]\npattern = 'b'\nbits = 6", "[[override]] 2: bits must"),
        ("[[override]]\npattern = 'a'\nblock = 24", "[[override]] 1: block must be a power of two"),
        ("[[override]]\npattern = 'a'\ndamping = 2", "[[override]] 1: damping must be above 0"),
        ("[[override]]\npattern = 'a'\nsequential = true", "unknown key 'sequential'; it belongs above"),
        ("[[override]]\npattern = 'a'\ndtype = 'float16'\nbits = 8", "[[override]] 1: bits has no meaning"),
        ("[[override]]\npattern = 'a'\ndtype = 'int'", "[[override]] 1: dtype = 'int' needs bits"),
        ("[auto]", "[auto] needs a goal: target_db or max_bytes"),
        ("[auto]\nmax_bytes = 0", "[auto] max_bytes must be above 0"),
        ("[auto]\nmax_bytes = 1e6", "[auto] max_bytes must be a whole number, not 1000000.0"),
        ("[auto]\ntarget_db = 20\nsteps = '8 -> 16'", "[auto] steps must be a list of strings"),
        ("[auto]\ntarget_db = 20\nsteps = []", "[auto] steps must be a list of strings"),
        ("[auto]\ntarget_db = 20\nsteps = ['8 to 16']", '[auto] steps must read "4 -> 8"'),
        ("[auto]\ntarget_db = 20\nsteps = ['4 -> 8 -> 16']", '[auto] steps must read "4 -> 8"'),
        ("[auto]\ntarget_db = 20\nsteps = ['8 -> 4']", "8 -> 4 is no promotion"),
        ("[auto]\ntarget_db = 20\nsteps = ['8 -> 12']", "8 -> 12 is no promotion"),
        ("[auto]\ntarget_db = 20", "none starts at [weights] bits = 8"),
        ("[auto]\ntarget_db = 20\n[weights]\ndtype = 'float16'", "[auto] raises integer weights"),
        ("[weights\nbits = 4", "mine.toml is not valid TOML: "),
        ("[weights]\nbits = 4\nbits = 8", "mine.toml is not valid TOML: "),
        ("x = " + "[" * 100_000, "mine.toml is not valid TOML: "),
        ("[weights]\nbits = " + "9" * 10_000, "mine.toml is not valid TOML: "),
    ],
)  # fmt: skip
def test_refused(text: str, message: str) -> None:
    line = refusal(text)
    assert message in line and len(line) < 300


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(RingstepError, match=r"unknown scheme 'w4a61' \(did you mean w4a16\?\); there are auto, fp16"):
        load_scheme("w4a61")
    for name in ("", "W8A16", "..", "w8a16\n"):
        with pytest.raises(RingstepError, match="unknown scheme"):
            load_scheme(name)


def test_what_is_no_scheme_file_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "utf16.toml").write_bytes("bits = 4".encode("utf-16"))
    os.mkfifo(tmp_path / "pipe.toml")
    for name, reason in (("missing.toml", "No such file"), ("folder.toml", "directory"), ("utf16.toml", "UTF-8"),
                         ("pipe.toml", "not an ordinary file")):  # fmt: skip
        with pytest.raises(RingstepError, match=reason) as caught:
            load_scheme(str(tmp_path / name))
        assert name in str(caught.value) and "\n" not in str(caught.value)


# Written and read again

NUMBERS = st.sampled_from([2, 3, 4, 8, 16])
METHODS = st.sampled_from(["min-max", "percentile", "mse", "entropy"])


@st.composite
def weights(draw: st.DrawFn, rounded: bool = True) -> Weights:
    if draw(st.integers(0, 5)) == 0:
        return Weights(dtype="float16", bits=16)
    rounding = draw(st.sampled_from(["nearest", "clip", "gptq"] if rounded else ["nearest"]))
    damping = draw(st.floats(0, 1, exclude_min=True))
    block = draw(st.sampled_from([None, 16, 32, 128, 65536]))
    if block and draw(st.booleans()):
        return Weights("int", 4, True, block, True, rounding, damping)
    return Weights("int", draw(NUMBERS), draw(st.booleans()), block, False, rounding, damping)


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    made = Scheme(
        "mine", draw(st.text(st.characters(exclude_categories=["Cs"]))), draw(st.booleans()),
        draw(st.sampled_from(["none", "hadamard"])), draw(st.sampled_from(["none", "awq"])),
        draw(st.sampled_from(["auto", "off"])), draw(weights()), draw(weights()), draw(weights(rounded=False)),
        Activations(
            draw(st.sampled_from([8, 16])), draw(st.floats(50, 100, exclude_min=True)),
            Ranges(*draw(st.tuples(*[METHODS] * 7))),
        ),
        Cache(draw(st.sampled_from([8, 16]))),
        Exceptions(*draw(st.tuples(*[st.sampled_from([None, 0, 8, 16])] * 3))),
    )  # fmt: skip
    patterns = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    keys = st.fixed_dictionaries({"bits": NUMBERS}, optional={
        "dtype": st.just("int"), "symmetric": st.booleans(), "block": st.sampled_from([None, 16, 64]),
        "two_level": st.booleans(), "rounding": st.sampled_from(["nearest", "gptq"]),
        "damping": st.floats(0, 1, exclude_min=True),
    })  # fmt: skip
    found = draw(st.lists(st.tuples(patterns, keys), max_size=3))
    half = tuple(sorted(dataclasses.asdict(Weights(dtype="float16", bits=16)).items()))
    overrides = [Override(pattern, tuple(sorted(entry.items()))) for pattern, entry in found]
    if draw(st.booleans()):
        overrides.append(Override("head", half))
    auto = None
    if made.weights.dtype == "int" and made.weights.bits < 16 and draw(st.booleans()):
        auto = Auto(draw(st.floats(-10, 90)), draw(st.none() | st.integers(1, 10**12)), (f"{made.weights.bits} -> 16",))
    return dataclasses.replace(made, override=tuple(overrides), auto=auto)


@settings(max_examples=100, deadline=None)
@given(schemes())
def test_written_and_read_again_a_scheme_is_the_same(scheme: Scheme) -> None:
    text = to_toml(scheme)
    tomllib.loads(text)
    again = parse(text)
    assert again == scheme and fingerprint(again) == fingerprint(scheme)
    assert json.loads(json.dumps(describe(scheme), allow_nan=False)) == describe(scheme)


KEYS = ["description", "weights", "head", "embedding", "activations", "ranges", "cache", "exceptions", "override",
        "auto", "bits", "block", "pattern", "steps", "dtype", "two_level", "target_db", "max_bytes", "symmetric",
        "residual", "percentile", "damping", "sequential", "x"]  # fmt: skip
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([4, 16, "float16", "4 -> 8"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


def rendered(value: Any) -> str:
    """TOML of a value, tables inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {rendered(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(rendered, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_other_content_is_a_scheme_or_one_line_of_error(data: dict[str, Any]) -> None:
    text = "\n".join(f"{key} = {rendered(value)}" for key, value in data.items())
    try:
        scheme = parse(text)
    except RingstepError as error:
        assert str(error).startswith("mine.toml") and "\n" not in str(error)
    else:
        assert parse(to_toml(scheme)) == scheme
        for path in PATHS:
            weights_for(scheme, path)

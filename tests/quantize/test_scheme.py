"""Schemes: strict files, presets, what they say of a parameter, and what a chip refuses."""

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
    check,
    describe,
    fingerprint,
    grid_for,
    paths_of,
    raised,
    refuse,
    weights_for,
)
from quantize.scheme_file import load_scheme, parse_scheme, presets, to_toml
from recipes import plan_for
from ringstep.devices import Chip, load_devices
from ringstep.errors import RingstepError

CHIPS = {device.chip.htp_arch: device.chip for device in load_devices().values()}
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


# Presets


def test_presets_are_the_promised_ones() -> None:
    assert set(presets()) == {"w8a16", "w4a16", "w4a16-block", "fp16", "auto", "int4-g64", "int4-g128"}


@pytest.mark.parametrize(
    ("name", "linear", "head", "embedding", "activations"),
    [
        ("w8a16", Grid(8), Grid(8), Grid(8), 16),
        ("w4a16", Grid(4), Grid(8), Grid(8), 16),
        ("w4a16-block", Grid(4, True, 32, True), Grid(8), Grid(8), 16),
        ("auto", Grid(4), Grid(8), Grid(8), 16),
        ("fp16", None, None, None, 0),
        ("int4-g64", Grid(4, True, 64), Grid(4, True, 64), None, 0),
        ("int4-g128", Grid(4, True, 128), Grid(4, True, 128), None, 0),
    ],
)
def test_preset(name: str, linear: Grid | None, head: Grid | None, embedding: Grid | None, activations: int) -> None:
    scheme = load_scheme(name)
    check(scheme, PATHS)
    assert [grid_for(scheme, path) for path in (DOWN, "head", "embedding")] == [linear, head, embedding]
    assert scheme.activations.bits == activations and scheme.description


@pytest.mark.parametrize("name", presets())
def test_a_preset_runs_where_it_should(name: str) -> None:
    fits = {
        "w8a16": "v68 v69 v73 v75 v79 v81", "w4a16": "v68 v69 v73 v75 v79 v81", "auto": "v68 v69 v73 v75 v79 v81",
        "w4a16-block": "v69 v73 v75 v79 v81", "fp16": "v69 v73 v75 v79 v81", "int4-g64": "", "int4-g128": "",
    }[name].split()  # fmt: skip
    for arch, chip in CHIPS.items():
        if arch in fits:
            refuse(load_scheme(name), chip, PATHS)
        else:
            with pytest.raises(RingstepError, match=rf"scheme {name} cannot run on \w+ \({arch}\)"):
                refuse(load_scheme(name), chip)


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
        ("[weights]\nrounding = 'gptp'", "'nearest', 'clip' or 'gptq', not 'gptp' (did you mean gptq?)"),
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
        ("[exceptions]\nnorms = 32", "[exceptions] norms must be 0, 8 or 16, not 32"),
        ("[activations]\nbits = 0\n[cache]\nbits = 8", "[cache] has no meaning with float activations"),
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


# What a scheme says


def test_overrides_apply_in_order_and_only_where_they_match() -> None:
    scheme = parse(
        "weights = { bits = 4, block = 32, two_level = true, rounding = 'gptq' }\n"
        "[[override]]\npattern = 'layers.*.mlp.*'\nrounding = 'clip'\n"
        "[[override]]\npattern = '*.down_proj'\nbits = 8\nblock = 0\ntwo_level = false\n"
        "[[override]]\npattern = 'layers.[0-2].*'\ndamping = 0.5\n"
        "[[override]]\npattern = 'LAYERS.*'\nbits = 2\n"
    )
    block = Weights(bits=4, block=32, two_level=True, rounding="gptq")
    assert weights_for(scheme, "layers.3.attn.q_proj") == block
    assert weights_for(scheme, UP) == dataclasses.replace(block, rounding="clip")
    assert weights_for(scheme, DOWN) == Weights(bits=8, rounding="clip")
    assert weights_for(scheme, "layers.2.attn.q_proj") == dataclasses.replace(block, damping=0.5)
    assert weights_for(scheme, "layers.20.attn.q_proj") == block  # [0-2] is one character
    assert weights_for(scheme, "head") == weights_for(scheme, "embedding") == Weights()


def test_a_star_reaches_head_and_embedding() -> None:
    scheme = parse("[[override]]\npattern = '*'\nbits = 16")
    assert {weights_for(scheme, path).bits for path in PATHS} == {16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[override]]\npattern = 'layers.3.mlp.donw_proj'\nbits = 4",
         r"override 'layers.3.mlp.donw_proj' matches none of the model's 5 parameters \(did you mean layers.3.mlp.d"),
        ("[[override]]\npattern = 'Layers.*'\nbits = 4", "override 'Layers.*' matches none"),
        ("weights = { bits = 4, block = 32, two_level = true }\n[[override]]\npattern = '*.down_proj'\nbits = 8",
         "layers.3.mlp.down_proj: two_level needs symmetric weights of 4 bits"),
        ("weights = { dtype = 'float16' }\n[[override]]\npattern = 'layers.*'\nbits = 8",
         "layers.3.mlp.down_proj: other keys have no meaning with dtype = 'float16'"),
        ("[[override]]\npattern = '*'\nrounding = 'gptq'", "embedding: rounding = 'gptq' needs inputs"),
    ],
)  # fmt: skip
def test_check_finds_what_only_a_model_can_tell(text: str, message: str) -> None:
    with pytest.raises(RingstepError, match=message):
        check(parse(text), PATHS)


def test_float16_can_be_taken_back() -> None:
    scheme = parse("weights = { dtype = 'float16' }\n[[override]]\npattern = '*.down_proj'\ndtype = 'int'\nbits = 8")
    check(scheme, PATHS)
    assert grid_for(scheme, DOWN) == Grid(8) and grid_for(scheme, UP) is None


def test_paths_are_the_parameters_with_two_dims() -> None:
    config: dict[str, Any] = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    names = [f"attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    found = paths_of(plan_for(config))
    assert found[0] == "embedding" and found[-1] == "head"
    assert set(found[1:-1]) == {f"layers.{index}.{name}" for index in (0, 1) for name in names}
    assert len(found) == 16


def test_raised() -> None:
    block = load_scheme("w4a16-block")
    higher = raised(block, [DOWN], 8)
    assert grid_for(higher, DOWN) == Grid(8) and grid_for(higher, UP) == grid_for(block, UP)
    assert weights_for(higher, DOWN).rounding == "gptq"
    assert grid_for(raised(higher, [DOWN], 16), DOWN) == Grid(16)
    two = Scheme("two", weights=Weights(bits=2, block=32))
    assert grid_for(raised(two, [DOWN], 4), DOWN) == Grid(4, True, 32)
    check(raised(higher, [UP, DOWN], 16), PATHS)
    assert parse(to_toml(higher)).override == higher.override


# What a chip refuses


@pytest.mark.parametrize(
    ("text", "reason", "taken"),
    [
        ("weights = { bits = 16 }", "16-bit weights with 16-bit activations need v73", "v73 v75 v79 v81"),
        ("head = { bits = 16 }", "16-bit weights with 16-bit activations need v73", "v73 v75 v79 v81"),
        ("embedding = { bits = 16 }", "", "v68 v69 v73 v75 v79 v81"),
        ("embedding = { dtype = 'float16' }", "", "v68 v69 v73 v75 v79 v81"),
        ("weights = { bits = 16 }\nactivations = { bits = 8 }", "16-bit weights are refused with 8-bit activ", ""),
        ("weights = { bits = 4 }\nactivations = { bits = 8 }", "", "v68 v69 v73 v75 v79 v81"),
        ("weights = { bits = 4, block = 32 }", "plain blocks would fall back to the CPU", ""),
        ("weights = { bits = 8, block = 32 }", "plain blocks would fall back to the CPU", ""),
        ("weights = { bits = 4, block = 32, two_level = true }", "two-level blocks .LPBQ. need v69",
         "v69 v73 v75 v79 v81"),
        ("weights = { bits = 4, symmetric = false }", "weights with a zero point", ""),
        ("weights = { bits = 8, symmetric = false }", "weights with a zero point", ""),
        ("weights = { bits = 2 }", "2-bit weights come out wrong", ""),
        ("weights = { bits = 3 }", "3-bit weights come out wrong", ""),
        ("weights = { bits = 8 }\nactivations = { bits = 0 }", r"\[weights\] has integer weights and float activ", ""),
        ("head = { dtype = 'float16' }", r"\[head\] is in float16", "v69 v73 v75 v79 v81"),
        ("exceptions = { softmax = 0 }", "some activations are in float16", "v69 v73 v75 v79 v81"),
        ("weights = { bits = 8 }\nauto = { target_db = 30, steps = ['8 -> 16'] }", "steps to 16 bits",
         "v73 v75 v79 v81"),
    ],
)  # fmt: skip
def test_a_chip_refuses(text: str, reason: str, taken: str) -> None:
    for arch, chip in CHIPS.items():
        if arch in taken.split():
            refuse(parse(text), chip)
            refuse(parse(text), chip, PATHS)
        else:
            with pytest.raises(RingstepError, match=reason):
                refuse(parse(text), chip)
            with pytest.raises(RingstepError, match="cannot run on"):
                refuse(parse(text), chip, PATHS)


def test_overrides_are_refused_too_and_excuse_what_they_replace() -> None:
    chip: Chip = CHIPS["v79"]
    worse = parse("[[override]]\npattern = '*.down_proj'\nsymmetric = false")
    refuse(worse, chip)
    with pytest.raises(RingstepError, match=r"layers\.3\.mlp\.down_proj: weights with a zero point"):
        refuse(worse, chip, PATHS)
    with pytest.raises(RingstepError, match=r"layers\.3\.mlp\.down_proj: weights with a zero point"):
        refuse(worse, chip, iter(PATHS))
    better = parse("weights = { bits = 2 }\n[[override]]\npattern = 'layers.*'\nbits = 4")
    refuse(better, chip, PATHS)


# Identity


def test_a_scheme_is_what_it_does() -> None:
    one, other = parse("description = 'a'\n[weights]\nbits = 8"), parse_scheme("[head]\nbits = 8", "b", "b.toml")
    assert fingerprint(one) == fingerprint(other)
    seen = {fingerprint(load_scheme(name)) for name in presets()}
    assert len(seen) == len(presets())
    for text in ("sequential = true", "head = { damping = 0.02 }", "cache = { bits = 8 }", "sink_prefix = 'off'",
                 "activations = { ranges = { gate = 'mse' } }", "exceptions = { norms = 16 }",
                 "[[override]]\npattern = 'a'\nbits = 4", "[[override]]\npattern = 'b'\nbits = 4"):  # fmt: skip
        seen.add(fingerprint(parse(text)))
    assert len(seen) == len(presets()) + 8


def test_order_of_keys_does_not_count_but_order_of_overrides_does() -> None:
    first, second = "[[override]]\npattern='a'\nbits=4\nblock=32\n", "[[override]]\npattern='a'\nblock=32\nbits=4\n"
    assert fingerprint(parse(first)) == fingerprint(parse(second))
    third = "[[override]]\npattern='*'\nbits=8\n"
    assert fingerprint(parse(first + third)) != fingerprint(parse(third + first))


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

"""Schemes: presets, what they say of a parameter, and what a chip refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quantize.grid import Grid
from quantize.scheme import (
    Scheme,
    Weights,
    check,
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


# Presets


def test_presets_are_the_promised_ones() -> None:
    assert set(presets()) == {"w8a16", "w4a16", "w4a16-block", "w4a16-mixed", "fp16", "auto", "int4-g64", "int4-g128"}


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
        "w4a16-block": "v69 v73 v75 v79 v81", "w4a16-mixed": "v69 v73 v75 v79 v81",
        "fp16": "v69 v73 v75 v79 v81", "int4-g64": "", "int4-g128": "",
    }[name].split()  # fmt: skip
    for arch, chip in CHIPS.items():
        if arch in fits:
            refuse(load_scheme(name), chip, PATHS)
        else:
            with pytest.raises(RingstepError, match=rf"scheme {name} cannot run on \w+ \({arch}\)"):
                refuse(load_scheme(name), chip)


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
    assert weights_for(higher, DOWN).rounding == "two-sided"
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
        ("weights = { bits = 16 }\nactivations = { bits = 8 }", "no norms of 8-bit activations", ""),
        ("weights = { bits = 4 }\nactivations = { bits = 8 }", "no norms of 8-bit activations", ""),
        ("exceptions = { gates = 8 }", "reads 16-bit activations and writes 8-bit", "v69 v73 v75 v79 v81"),
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

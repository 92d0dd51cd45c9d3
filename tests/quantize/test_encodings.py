"""Encodings JSON: against what aimet-onnx 2.42.0 writes, there and back, and hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantize.activations import Activation
from quantize.encodings import WeightEncoding, read_encodings, write_encodings
from quantize.grid import Grid, QuantisedWeight, min_max, on_scales, on_steps, two_levels
from ringstep.contract import Encoding
from ringstep.errors import RingstepError

GRIDS = [
    Grid(4), Grid(8), Grid(16), Grid(2), Grid(4, symmetric=False), Grid(4, block=16),
    Grid(8, symmetric=False, block=20), Grid(4, block=16, two_level=True),
]  # fmt: skip
# Exported by aimet-onnx 2.42.0: QuantizationSimModel(param_type=int4, activation_type=int16), its lists cut to a shape
# of [2, 64] in blocks of 32.
AIMET = {
    "activation_encodings": [
        {"bw": 16, "dtype": "INT", "enc_type": "PER_TENSOR", "is_sym": False, "name": "x", "offset": [-38948.0],
         "scale": [8.620500946568799e-05]},
        {"bw": 16, "dtype": "INT", "enc_type": "PER_TENSOR", "is_sym": False, "name": "r", "offset": [0.0],
         "scale": [0.0005059728071638127]},
    ],
    "param_encodings": [
        {"bw": 4, "dtype": "INT", "enc_type": "PER_CHANNEL", "is_sym": True, "name": "channel", "offset": [-8.0, -8.0],
         "scale": [0.35770201683044434, 0.4083711504936218]},
        {"block_size": 32, "bw": 8, "compressed_bw": 4, "dtype": "INT", "enc_type": "LPBQ", "is_sym": True,
         "name": "lpbq", "offset": [-128, -128], "per_block_int_scale": [16, 15, 14, 16],
         "scale": [0.02235637605190277, 0.025523196373667036]},
        {"block_size": 32, "bw": 4, "dtype": "INT", "enc_type": "PER_BLOCK", "is_sym": True, "name": "block",
         "offset": [-8.0, -8.0, -8.0, -8.0],
         "scale": [0.35770201683044434, 0.34163719415664673, 0.3196415603160858, 0.3400742326463972]},
    ],
    "producer": {"package": "aimet-onnx", "version": "2.42.0"},
    "quantizer_args": {"activation_bitwidth": 16, "dtype": "int", "quant_scheme": "min_max"},
    "version": "1.0.0",
}  # fmt: skip
SHAPES = {"channel": (2, 64), "lpbq": (2, 64), "block": (2, 64)}


def weight(grid: Grid, outputs: int = 6, inputs: int = 52) -> QuantisedWeight:
    values = np.random.default_rng(3).normal(size=(outputs, inputs)).astype(np.float32)
    scale, zero = min_max(values, grid)
    return on_steps(values, grid, *two_levels(scale)) if grid.two_level else on_scales(values, grid, scale, zero)


def test_reads_what_aimet_wrote(tmp_path: Path) -> None:
    path = tmp_path / "aimet.encodings"
    path.write_text(json.dumps(AIMET))
    activations, weights = read_encodings(path, SHAPES)
    assert activations["x"] == Activation("uint16", Encoding(8.620500946568799e-05, 38948))
    assert activations["r"] == Activation("uint16", Encoding(0.0005059728071638127, 0))
    channel, lpbq, block = weights["channel"], weights["lpbq"], weights["block"]
    assert channel is not None and lpbq is not None and block is not None
    assert channel.grid == Grid(4) and channel.scale.shape == (2, 1) and channel.zero is None
    assert lpbq.grid == Grid(4, block=32, two_level=True)
    assert lpbq.scale.shape == (2, 2) and lpbq.scale[1, 0] == np.float32(14) * np.float32(0.025523196373667036)
    assert block.grid == Grid(4, block=32) and block.scale[1, 1] == np.float32(0.3400742326463972)


def test_writes_what_aimet_reads(tmp_path: Path) -> None:
    """The same weights and activations as AIMET's own file become the same entries."""
    path = tmp_path / "ours.encodings"
    path.write_text(json.dumps(AIMET))
    activations, weights = read_encodings(path, SHAPES)
    write_encodings(path, activations, weights.items())
    ours = json.loads(path.read_text())
    for section in ("activation_encodings", "param_encodings"):
        for mine, theirs in zip(ours[section], AIMET[section], strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                # Scales are written with the digits that float32 needs, AIMET's with float64's.
                exact = np.float32 if key == "scale" else lambda same: same
                assert np.array_equal(exact(mine[key]), exact(value)), (mine["name"], key)
    assert ours["version"] == "1.0.0"


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_come_back_bit_by_bit(tmp_path: Path, grid: Grid) -> None:
    path, made = tmp_path / "e.json", weight(grid)
    write_encodings(path, {}, [("w", made), ("norm", None)])
    _, weights = read_encodings(path, {"w": (6, 52), "norm": (6,)})
    read = weights["w"]
    assert weights["norm"] is None and read is not None and read.grid == grid
    for field in ("scale", "zero", "steps", "channel_scale"):
        ours, theirs = getattr(made, field), getattr(read, field)
        assert (ours is None) == (theirs is None)
        assert ours is None or (np.array_equal(ours, theirs) and ours.dtype == theirs.dtype)
    real = QuantisedWeight(grid, made.q, read.scale, read.zero, read.steps, read.channel_scale).dequantised()
    assert np.array_equal(real, made.dequantised())


@pytest.mark.parametrize("grid", GRIDS)
def test_the_json_means_the_same_real_numbers(tmp_path: Path, grid: Grid) -> None:
    """real = scale * (q counted from 0 + offset), computed from the JSON alone."""
    path, made = tmp_path / "e.json", weight(grid)
    write_encodings(path, {}, [("w", made)])
    (entry,) = json.loads(path.read_text())["param_encodings"]
    scale, offset = np.array(entry["scale"]), np.array(entry["offset"])
    if entry["enc_type"] == "LPBQ":
        steps = np.array(entry["per_block_int_scale"]).reshape(len(scale), -1)
        scale, offset = (steps * scale[:, None]).reshape(-1), -(1 << entry["compressed_bw"] - 1)
    bits = entry.get("compressed_bw", entry["bw"])
    unsigned = made.q.astype(np.int64) + (1 << bits - 1) * entry["is_sym"]
    assert unsigned.min() >= 0 and unsigned.max() < 1 << bits
    by_input = lambda v: np.repeat(np.broadcast_to(v, made.scale.size).reshape(6, -1), grid.width(52), 1)[:, :52]
    real = by_input(scale) * (unsigned + by_input(offset))
    assert np.allclose(real, made.dequantised(), rtol=1e-6, atol=0)


def test_activations_keep_their_real_numbers(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    given = {
        "unsigned": Activation("uint8", Encoding(0.1, 128)), "symmetric": Activation("int16", Encoding(3e-5, 0)),
        "shifted": Activation("int8", Encoding(0.25, -3)), "float": None,
    }  # fmt: skip
    write_encodings(path, given, [])
    read, _ = read_encodings(path, {})
    assert read == given | {"shifted": Activation("uint8", Encoding(0.25, 125))}
    values = np.linspace(-40, 40, 999, dtype=np.float32)
    assert np.array_equal(read["shifted"].fake(values), given["shifted"].fake(values))  # type: ignore[union-attr]
    offsets = [entry.get("offset") for entry in json.loads(path.read_text())["activation_encodings"]]
    assert offsets == [[-128], [-32768], [-125], None]


def test_bad_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    for scale, zero in ((0.0, 0), (float("nan"), 0), (1.0, 256), (1.0, -1)):
        with pytest.raises(RingstepError, match=r"tensor 'x': .* are no encoding of uint8"):
            write_encodings(path, {"x": Activation("uint8", Encoding(scale, zero))}, [])
    with pytest.raises(RingstepError, match="tensor 'w' has two encodings"):
        write_encodings(path, {"w": Activation("uint8", Encoding(1.0, 0))}, [("w", weight(Grid(4)))])
    with pytest.raises(RingstepError, match="tensor 'w': a scale is not finite"):
        write_encodings(path, {}, [("w", WeightEncoding(Grid(4), np.array([[np.inf]], np.float32)))])
    assert list(tmp_path.iterdir()) == []  # neither a file nor what was begun


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": [0.1]}, "scale has 1 values, its shape needs 2"),
        ({"scale": [0.1, "a"]}, "scale holds something that is no number"),
        ({"scale": [0.1, True]}, "no number"),
        ({"scale": [0.1, -0.5]}, "not a finite positive float32"),
        ({"scale": [0.1, 1e-60]}, "not a finite positive float32"),
        ({"scale": [0.1, 10**400]}, "beyond float64"),
        ({"offset": [-8, -8.5]}, "no whole number"),
        ({"offset": [-8, -7]}, "an offset is -7; symmetric means -8"),
        ({"bw": 5}, "bw '5' is not one of 2, 3, 4, 8, 16"),
        ({"bw": 4.0}, "bw '4.0'"),
        ({"is_sym": 1}, "is_sym is '1'"),
        ({"dtype": "FLOAT", "bw": 32}, "float of 32 bits"),
        ({"dtype": "FP"}, "dtype 'FP' is not supported"),
        ({"enc_type": "PER_TENSOR"}, "enc_type 'PER_TENSOR' is not supported here"),
        ({"enc_type": ["LPBQ"]}, "enc_type"),
        ({"name": "chanel"}, "no weight of this model .did you mean channel?"),
        ({"name": None}, r"param_encodings\[0\] has no name"),
        ({"name": "block"}, "tensor 'block' has two encodings"),
        ({"ofset": [0]}, "field 'ofset' is unknown .did you mean offset?"),
        ({"is_sym": False, "offset": [-8, 1]}, "an offset is not in -15 to 0"),
    ],
)
def test_bad_entries_are_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "e.json"
    body = json.loads(json.dumps(AIMET))
    body["param_encodings"][0] |= change
    path.write_text(json.dumps(body))
    with pytest.raises(RingstepError, match=reason) as caught:
        read_encodings(path, SHAPES)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ('{"version": "0.6.1"}', "version '0.6.1' is not supported"),
        ('{"version": "1.0.0", "activation_encodings": {}}', "activation_encodings is missing or no list"),
        ('{"version": "1.0.0", "activation_encodings": [], "param_encodings": [1]}', "param_encodings is missing"),
        ('{"version": "1.0.0", "version": "1.0.0"}', "appears twice"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(RingstepError, match=reason):
        read_encodings(path, SHAPES)
    with pytest.raises(RingstepError, match="cannot be"):
        read_encodings(tmp_path / "none", SHAPES)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 4), key=st.sampled_from([*AIMET["param_encodings"][1], "extra"]), value=JUNK)  # type: ignore[index]
def test_junk_in_any_field_is_read_or_refused_in_one_line(tmp_path: Path, which: int, key: str, value: Any) -> None:
    body = json.loads(json.dumps(AIMET))
    entries = body["activation_encodings"] + body["param_encodings"]
    entries[which][key] = value
    path = tmp_path / "e.json"
    path.write_text(json.dumps(body))
    try:
        read_encodings(path, SHAPES)
    except RingstepError as error:
        assert "\n" not in str(error)

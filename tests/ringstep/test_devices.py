import importlib.util
import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from exporters.qnn import compile_context
from ringstep.devices import Chip, Device, find_device, load_devices
from ringstep.errors import RingstepError
from sanitize.lint import lint_file
from sanitize.target import find_target

CHIP = """
[chip.c]
marketing = "C"
soc_model = 1
htp_arch = "v79"
vtcm_mb = 8
fp16 = true
float_io = true
layernorm_16x16 = true
lpbq = true
weight_sharing = true
"""
DEVICE = '[device.d]\nname = "D"\nchip = "c"\n'
DEVICES = list(load_devices().values())
CHIPS = list({device.chip.name: device.chip for device in DEVICES}.values())
# What the compiler calls the chip of a soc_model, where that is not the chip's own name.
CALLED = {"sc8340xp": "SC8380XP", "qcs8550": "SM8550", "qcs9075": "QCS9100", "qcs8275": "QCS8300", "sa8775p": "SA8255",
          "sa7255p": "SA8620P"}  # fmt: skip
HEAD = '<ir_version: 10, opset_import: ["" : 21]> g'
FLOAT = HEAD + "(float[4,32] x) => (float[4,32] y) { m = MatMul(x, w) y = Add(m, x) }"
QUANTISED = HEAD + """(uint16[4,32] x) => (uint16[4,32] y) {
  f = DequantizeLinear(x, s, z) v = DequantizeLinear(q, t, o) m = MatMul(f, v) y = QuantizeLinear(m, s, z) }"""


@pytest.mark.parametrize(
    ("chip", "soc_model", "arch", "vtcm_mb"),
    [
        ("qcs6490", 93, 68, 2),
        ("sm8450", 36, 69, 8),
        ("sm8550", 43, 73, 8),
        ("sm8650", 57, 75, 8),
        ("sm8750", 69, 79, 8),
        ("sm8850", 87, 81, 8),
        ("sc8380xp", 60, 73, 8),
        ("sc8340xp", 60, 73, 8),
        ("sc8480xp", 88, 81, 8),
        ("qcs8550", 43, 73, 8),
        ("qcs9075", 77, 73, 8),
        ("qcs8275", 82, 75, 8),
        ("sa8775p", 52, 73, 8),
        ("sa7255p", 67, 75, 8),
    ],
)
def test_chips_are_what_the_compiler_takes(chip: str, soc_model: int, arch: int, vtcm_mb: int) -> None:
    found = find_device(chip).chip
    assert (found.soc_model, found.arch, found.vtcm_mb) == (soc_model, arch, vtcm_mb)
    assert found.graph_limit_mb == (2048 if arch < 73 else 3584)


def test_abilities_follow_the_architecture() -> None:
    for device in load_devices().values():
        chip = device.chip
        assert chip.fp16 == chip.float_io == chip.lpbq == (chip.arch >= 69), chip.name
        assert chip.layernorm_16x16 == (chip.arch >= 73), chip.name
        assert chip.weight_sharing == (chip.arch >= 73), chip.name


@pytest.mark.parametrize(
    "name",
    [
        "galaxy-s25",
        "GALAXY-S25",
        "Samsung Galaxy S25",
        "samsung  galaxy s25 (family)",
        "SM8750",
        "snapdragon 8 elite",
    ],
)
def test_a_device_answers_to_all_its_names(name: str) -> None:
    assert find_device(name).id == "galaxy-s25"


def model(text: str, path: Path) -> Path:
    random = np.random.default_rng(0)
    constants = {"w": random.standard_normal((32, 32)).astype(np.float32), "s": np.float32(1e-3),
                 "z": np.uint16(32768), "q": random.integers(-99, 99, (32, 32)).astype(np.int8),
                 "t": np.float32(0.01), "o": np.int8(0)}  # fmt: skip
    proto = onnx.parser.parse_model(text)
    used = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items() if k in used)
    onnx.save(proto, path)
    return path


def said(binary: Path) -> dict[str, str]:
    """What the compiler wrote into a context binary of the chip that it planned for."""
    text = binary.read_bytes()
    found = {key: re.search(rb"(?<![a-z_])" + key.encode() + rb"=(\w+);", text)
             for key in ("soc_type", "arch", "vtcm_size", "memory_alloc_limit")}  # fmt: skip
    return {key: match[1].decode() for key, match in found.items() if match}


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime_qnn") is None, reason="needs onnxruntime-qnn")
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_the_compiler_plans_for_the_chip_that_the_table_describes(chip: Chip, tmp_path: Path) -> None:
    path = model(FLOAT if chip.fp16 else QUANTISED, tmp_path / "m.onnx")
    report = compile_context(path, tmp_path / "out", chip=chip, fp16=chip.fp16, name="m")
    assert said(report.files[1]) == {
        "soc_type": CALLED.get(chip.name, chip.name.upper()),
        "arch": str(chip.arch),
        "vtcm_size": str(chip.vtcm_mb << 20),
        "memory_alloc_limit": str(chip.graph_limit_mb),
    }


@pytest.mark.skipif(importlib.util.find_spec("executorch") is None, reason="needs executorch")
def test_executorch_agrees_where_it_has_the_chip() -> None:
    from executorch.backends.qualcomm.serialization.qc_schema import _soc_info_table as theirs

    infos = {info.soc_model.value: info.htp_info for info in theirs.values()}
    both = [chip for chip in CHIPS if chip.soc_model in infos]
    assert len(both) == 11
    for chip in both:
        info = infos[chip.soc_model]
        assert (chip.arch, chip.vtcm_mb) == (info.htp_arch.value, info.vtcm_size_in_mb), chip.name


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.id)
def test_attributes_agree_with_the_chip(device: Device) -> None:
    chip, attributes = device.chip, device.attributes
    assert bool(attributes) == bool(device.aihub)
    if attributes:
        assert any(attribute.startswith("chipset:") for attribute in attributes)
        assert [a for a in attributes if not a.startswith("chipset:")] == [
            f"hexagon:{chip.htp_arch}", f"soc-model:{chip.soc_model}",
            *["htp-supports-fp16:true"] * chip.fp16, *["htp-supports-weight-sharing:true"] * chip.weight_sharing,
            "framework:qnn"]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.id)
def test_lint_judges_models_for_every_device(device: Device, tmp_path: Path) -> None:
    """An architecture without a survey would have every operator refused."""
    target = find_target("qnn-htp", device.id)
    assert lint_file(model(QUANTISED, tmp_path / "quantised.onnx"), target) == []
    errors = [f.rule for f in lint_file(model(FLOAT, tmp_path / "float.onnx"), target) if f.severity == "error"]
    assert bool(errors) != device.chip.fp16, errors


def test_every_required_device_is_there() -> None:
    assert {f"galaxy-s{n}" for n in range(22, 27)} <= load_devices().keys()
    reference = ("8-gen-1", "8-gen-2", "8-gen-3", "8-elite", "8-elite-gen-5")
    assert [find_device(f"qrd-{name}").chip.arch for name in reference] == [69, 73, 75, 79, 81]
    for name in ("Snapdragon X Elite CRD", "QCS6490", "QCS8550 (Proxy)", "SA8775P ADP"):
        assert find_device(name).aihub


def test_a_chip_stands_for_a_device_that_carries_it() -> None:
    for chip in CHIPS:
        assert find_device(chip.name).chip == find_device(chip.marketing).chip == chip


def test_no_name_is_ambiguous_between_devices() -> None:
    for device in load_devices().values():
        for name in filter(None, (device.id, device.name, device.aihub)):
            assert find_device(name) is not None and find_device(name).id == device.id


def test_an_unknown_device_gets_a_hint() -> None:
    with pytest.raises(RingstepError, match=r"'galxy-s25' \(did you mean galaxy-s25\?\); `ringstep devices`"):
        find_device("galxy-s25")
    for name in ("", "  ", "\n"):  # devices without an AI Hub name must not answer to an empty one
        with pytest.raises(RingstepError, match="unknown device"):
            find_device(name)


def test_a_good_file_loads(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(CHIP + DEVICE)
    assert load_devices(tmp_path / "d.toml")["d"].chip.name == "c"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CHIP + DEVICE + "aihb = 'x'\n", r"device.d: unknown key 'aihb' \(did you mean aihub\?\)"),
        (CHIP + DEVICE + "id = 'other'\n", "device.d: unknown key 'id'"),
        (CHIP + "name = 'other'\n" + DEVICE, "chip.c: unknown key 'name'"),
        (CHIP + DEVICE + "[phone.x]\n", "unknown key 'phone'"),
        (CHIP.replace("vtcm_mb = 8", "vtcm_mb = '8'") + DEVICE, "vtcm_mb must be int, got str"),
        (CHIP.replace("vtcm_mb = 8", "vtcm_mb = true") + DEVICE, "vtcm_mb must be int, got bool"),
        (CHIP.replace("fp16 = true", "fp16 = 1") + DEVICE, "fp16 must be bool, got int"),
        (CHIP.replace("fp16 = true", "") + DEVICE, "chip.c: fp16 is missing"),
        (CHIP.replace("v79", "79") + DEVICE, "htp_arch"),
        (CHIP + DEVICE.replace('"c"', '"cc"'), r"unknown chip 'cc'"),
        (CHIP + DEVICE.replace('"c"', "3"), "unknown chip 3"),
        (CHIP + DEVICE + "attributes = 'x'\n", "attributes must be a list of strings"),
        (CHIP + DEVICE + "attributes = ['x', 1]\n", "attributes must be a list of strings"),
        (CHIP + DEVICE + "attributes = [['x']]\n", "attributes must be a list of strings"),
        (CHIP + DEVICE + "memory_gb = 8.5\n", "memory_gb must be int, got float"),
        (CHIP, "device.NAME"),
        ("chip = 3\n" + DEVICE, "chip.NAME"),
        ("[chip.c", "d.toml"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "d.toml").write_text(text)
    with pytest.raises(RingstepError, match=message):
        load_devices(tmp_path / "d.toml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match=r"none\.toml"):
        load_devices(tmp_path / "none.toml")

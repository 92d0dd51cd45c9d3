from pathlib import Path

import pytest

from ringstep.devices import find_device, load_devices
from ringstep.errors import RingstepError

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
    ],
)
def test_chips_are_what_the_compiler_takes(chip: str, soc_model: int, arch: int, vtcm_mb: int) -> None:
    found = find_device(chip).chip
    assert (found.soc_model, found.arch, found.vtcm_mb) == (soc_model, arch, vtcm_mb)
    assert found.graph_limit_mb == (2048 if arch < 73 else 3758)


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

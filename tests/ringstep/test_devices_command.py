"""`ringstep devices`: the table, and its differences to a list that AI Hub might give."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from exporters.cli import cli
from ringstep import console
from ringstep import devices as devices_module
from ringstep.completion import device_names
from ringstep.devices import Device, load_devices
from ringstep.devices_command import Changed, Listed, New, chip_of, compare, toml
from ringstep.profiling import hub

KNOWN = load_devices()
TABLE = Path(devices_module.__file__).with_name("devices.toml")
# As AI Hub lists devices: more attributes than the table records.
LIVE: list[Listed] = [
    (d.aihub, "15", (*d.attributes, "os:android", "framework:onnx", "vendor:x")) for d in KNOWN.values() if d.aihub
]
TABLET = ("chipset:qualcomm-snapdragon-8gen3", "chipset:sm8650", "hexagon:v75", "soc-model:57",
          "htp-supports-fp16:true", "htp-supports-weight-sharing:true", "framework:qnn")  # fmt: skip


@dataclass
class Client:
    """What `devices` asks of qai-hub's client."""

    live: list[Listed]

    def get_devices(self) -> list[Any]:
        print("the client prints")
        return [type("Device", (), {"name": n, "os": o, "attributes": a})() for n, o, a in self.live]


def run(monkeypatch: pytest.MonkeyPatch, live: list[Listed], *args: str) -> int:
    monkeypatch.setattr(hub, "open_client", lambda: Client(live))
    return console.run(cli, ["devices", "--refresh", "-q", *args])


def test_the_same_list_has_no_differences() -> None:
    found = compare(KNOWN, LIVE)
    assert (found.new, found.retired, found.changed, found.others) == ([], [], [], 0)


def test_a_new_device_of_a_known_chip() -> None:
    (new,) = compare(KNOWN, [*LIVE, ("Galaxy Fold 6", "14", (*TABLET, "os:android"))]).new
    assert new == New("Galaxy Fold 6", TABLET, "sm8650")


def test_a_new_device_of_an_unknown_chip_is_shown_without_one() -> None:
    attributes = ("chipset:sm8950", "hexagon:v85", "soc-model:113")
    (new,) = compare(KNOWN, [*LIVE, ("Snapdragon 8 Elite Gen 6 QRD", "17", attributes)]).new
    assert new.chip == "" and toml([new]) == ""


def test_models_of_a_family_are_not_new() -> None:
    models = [(f"Samsung Galaxy S24{more}", "14", TABLET) for more in ("", "+", " Ultra")]
    assert compare(KNOWN, [*LIVE, *models]).new == []
    # Another chip, or another family, is.
    other = ("chipset:qualcomm-snapdragon-8gen9", "hexagon:v75", "soc-model:157")
    names = [new.name for new in compare(KNOWN, [*LIVE, ("Samsung Galaxy S24 FE", "14", other),
                                                 ("Samsung Galaxy S240", "14", TABLET)]).new]  # fmt: skip
    assert names == ["Samsung Galaxy S24 FE", "Samsung Galaxy S240"]


@pytest.mark.parametrize("hexagon", [[], ["hexagon:v66"], ["hexagon:"], ["hexagon:v79x"], ["hexagon:v" + "9" * 5000]])
def test_devices_without_htp_are_counted_alone(hexagon: list[str]) -> None:
    found = compare(KNOWN, [*LIVE, ("Google Pixel 3", "10", ["chipset:sdm845", *hexagon])])
    assert found.new == [] and found.others == 1


def test_a_retired_device() -> None:
    found = compare(KNOWN, [entry for entry in LIVE if entry[0] != "Snapdragon 8 Elite QRD"])
    assert found.retired == ["qrd-8-elite"] and not found.changed


def test_changed_attributes_are_named_on_both_sides() -> None:
    live = [(name, os, tuple(a.replace("hexagon:v79", "hexagon:v80") for a in attributes if a != "framework:qnn"))
            if name == "Samsung Galaxy S25 (Family)" else (name, os, attributes)
            for name, os, attributes in LIVE]  # fmt: skip
    assert compare(KNOWN, live).changed == [
        Changed("galaxy-s25", "Samsung Galaxy S25 (Family)", ("hexagon:v80",), ("framework:qnn", "hexagon:v79"))
    ]


def test_of_several_systems_the_last_counts() -> None:
    old = ("Samsung Galaxy S25 (Family)", "14", ["hexagon:v1"])
    assert not compare(KNOWN, [old, *LIVE]).changed and compare(KNOWN, [*LIVE, old]).changed


@pytest.mark.parametrize(
    ("attributes", "chip"),
    [
        (TABLET, "sm8650"),
        (("chipset:qualcomm-sa8775p", "hexagon:v73", "soc-model:52"), "sa8775p"),
        (("chipset:sc8340xp", "hexagon:v73", "soc-model:60"), "sc8340xp"),  # not X Elite, whose id is 60 too
        (("chipset:qualcomm-qcs7181", "hexagon:v73", "soc-model:60"), None),
        (("chipset:sm8650", "hexagon:v79", "soc-model:57"), None),
        (("chipset:sm8650", "hexagon:v75", "soc-model:69"), None),
        (("chipset:sm8650", "hexagon:v75"), None),
        ((), None),
    ],
)
def test_a_chip_is_known_by_part_architecture_and_id(attributes: tuple[str, ...], chip: str | None) -> None:
    found = chip_of(attributes, KNOWN.values())
    assert (found.name if found else None) == chip


def test_pasted_entries_load(tmp_path: Path) -> None:
    """What is printed goes into devices.toml as it is, whatever the service's names hold."""
    hostile = 'A "phone" \\ \x1b[2J\n[chip.x] \u202e \x9b \u2028 é (Family)'
    snippet = toml([New(hostile, TABLET, "sm8650"), New("!!!", TABLET, "sm8650")])
    assert "\x1b" not in snippet and "\x9b" not in snippet and "\u202e" not in snippet
    path = tmp_path / "devices.toml"
    path.write_text(f"{TABLE.read_text('utf-8')}\n{snippet}\n", "utf-8")
    first, second = list(load_devices(path).values())[-2:]
    assert first.chip.name == "sm8650" and first.attributes == TABLET and first.name.startswith('A "phone" \\')
    assert second.id == "device" and second.aihub == "!!!"


def test_refresh_prints_tables_and_an_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live = [*LIVE[1:], ("Galaxy Fold 6\x1b[2J", "14", TABLET), ("X", "14", ("hexagon:v85", "soc-model:113"))]
    assert run(monkeypatch, live) == 0
    out = capsys.readouterr().out
    assert "the client prints" not in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 110
    assert f"AI Hub lists {len(live)} devices: 2 new, 1 retired, 0 changed; 0 have no HTP" in out
    assert "galaxy-s22" in out and "not in the table" in out
    entry = out[out.index("[device.galaxy-fold-6") : out.index("\n]\n") + 3]
    assert tomllib.loads(entry)["device"]["galaxy-fold-6-2j"]["chip"] == "sm8650"


def test_refresh_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [*LIVE, ("Fold", "14", TABLET)], "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["listed"] == len(LIVE) + 1 and body["differences"]["new"][0]["chip"] == "sm8650"
    assert tomllib.loads(body["toml"])["device"]["fold"]["attributes"] == list(TABLET)


def test_an_attribute_may_be_one_string(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [*LIVE, ("One", "1", "hexagon:v85")], "--json") == 0  # type: ignore[list-item]
    assert json.loads(capsys.readouterr().out)["differences"]["new"][0]["attributes"] == ["hexagon:v85"]


def test_a_failing_service_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        def get_devices(self) -> None:
            raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setattr(hub, "open_client", Failing)
    assert console.run(cli, ["devices", "--refresh", "-q"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "AI Hub's list of devices" in captured.err


def test_without_the_client_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert console.run(cli, ["devices", "--refresh", "-q"]) == 2
    assert "pip install 'ringstep[aihub]'" in capsys.readouterr().err


def test_without_a_configuration_it_says_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("qai_hub")
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(tmp_path / "none.ini"))
    assert console.run(cli, ["devices", "--refresh", "-q"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "qai-hub configure" in captured.err


def test_the_table_has_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(cli, ["devices"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for device in KNOWN.values():
        row = next(line for line in out.splitlines() if line.startswith(device.id + " "))
        assert device.chip.name in row and device.chip.htp_arch in row


def test_json_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(cli, ["devices", "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["galaxy-s25"]["memory_gb"] == 12 and "hexagon:v79" in rows["galaxy-s25"]["attributes"]


def test_tab_offers_every_device_and_chip() -> None:
    offered = device_names()
    for device in KNOWN.values():
        assert device.id in offered and device.chip.name in offered


def test_differences_need_no_attributes_of_a_device_outside_ai_hub() -> None:
    known: dict[str, Device] = {"own": replace(KNOWN["qrd-8-gen-1"], id="own")}
    assert compare(known, []).retired == []

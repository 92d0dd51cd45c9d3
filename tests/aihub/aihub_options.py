"""The options of jobs, which travel as one string, and the devices: what is taken and what is refused with a 400."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence

from packaging.version import Version

from ringstep.devices import Device, load_devices

TARGETS = ("qnn_dlc", "precompiled_qnn_onnx", "onnx", "tflite")
QUANTIZED = ("int8", "int16", "w8a16", "w4a8", "w4a16", "float16")
UNITS = ("all", "npu", "gpu", "cpu")
COMMON = {"qnn_options", "compute_unit", "qairt_version"}
KNOWN = {
    "compile": COMMON | {"target_runtime", "output_names", "truncate_64bit_io", "truncate_64bit_tensors", "quantize_io",
                         "quantize_full_type", "quantize_io_type", "force_channel_last_input",
                         "force_channel_last_output"},
    "link": {"qnn_options", "qairt_version"},
    "quantize": {"range_scheme", "lite_mp"},
    "inference": COMMON | {"max_profiler_iterations", "max_profiler_time", "dequantize_outputs", "tflite_delegates",
                           "tflite_options", "onnx_options", "onnx_execution_providers"},
}  # fmt: skip
# What runs on phones of each chip's year; AI Hub lists an exact version.
ANDROID = {"v68": "12", "v69": "13", "v73": "14", "v75": "14", "v79": "15", "v81": "16"}


class Refused(Exception):
    """What the service answers with an HTTP error and {"detail": ...}."""

    def __init__(self, detail: str, status: int = 400) -> None:
        super().__init__(detail)
        self.status = status


def parse_options(kind: str, text: str) -> dict[str, str]:
    """Flag to value, "true" for a flag without one. Raises Refused for what this kind of job does not know."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Refused(f"Options could not be parsed: {error}") from None
    found: dict[str, str] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            found[flag] = value
        elif flag:
            found[flag] = f"{found[flag]} {word}".strip()
        else:
            raise Refused(f"Unrecognized arguments: {word}")
    for flag in found:
        if flag not in KNOWN[kind]:
            raise Refused(f"Unrecognized arguments: --{flag}")
    found = {flag: value or "true" for flag, value in found.items()}
    _one_of(found, "target_runtime", TARGETS)
    _one_of(found, "quantize_full_type", QUANTIZED)
    for unit in found.get("compute_unit", "all").split(","):
        if unit not in UNITS:
            raise Refused(f"Argument --compute_unit: invalid choice: {unit!r}")
    if "quantize_full_type" in found and found.get("target_runtime") == "onnx":
        raise Refused("Argument --quantize_full_type is not supported with --target_runtime onnx")
    count = found.get("max_profiler_iterations", "100")
    if not count.isdecimal() or int(count) < 1:
        raise Refused(f"Argument --max_profiler_iterations: invalid value: {count!r}")
    return found


def graph_name(options: dict[str, str]) -> str:
    """The graph that --qnn_options context_enable_graphs names, "" for none."""
    for pair in options.get("qnn_options", "").replace(";", " ").split():
        key, _, value = pair.partition("=")
        if key == "context_enable_graphs":
            return value
    return ""


@functools.cache
def hub_devices() -> dict[str, Device]:
    """AI Hub's name to device."""
    return {device.aihub: device for device in load_devices().values() if device.aihub}


def os_version(device: Device) -> str:
    """The version that the list shows: Android's, Windows' for laptops."""
    return "11" if _is_windows(device) else ANDROID.get(device.chip.htp_arch, "14")


def attributes(device: Device) -> list[str]:
    """What the list says of a device: what the table has, and what every device has."""
    system = "windows" if _is_windows(device) else "android"
    common = [f"os:{system}", f"vendor:{device.name.split()[0].lower()}", "framework:qnn", "framework:onnx"]
    common += [] if system == "windows" else ["framework:tflite"]
    return list(dict.fromkeys([*device.attributes, *common]))


def find_devices(name: str, os: str, wanted: Sequence[str], select: bool) -> list[Device]:
    """The devices that fit, one at most with `select`; `os` is a version or an interval such as "[14,16)"."""
    fits = [
        device
        for device in hub_devices().values()
        if name in ("", device.aihub) and set(wanted) <= set(attributes(device)) and _has_os(os, os_version(device))
    ]
    return fits[:1] if select else fits


def _has_os(wanted: str, have: str) -> bool:
    if wanted.startswith("["):
        low, high = wanted[1:-1].split(",")
        return (not low or Version(have) >= Version(low)) and (not high or Version(have) < Version(high))
    return not wanted or Version(wanted) == Version(have)


def _is_windows(device: Device) -> bool:
    return device.chip.name.startswith("sc8")  # laptops


def _one_of(found: dict[str, str], flag: str, choices: Sequence[str]) -> None:
    if flag in found and found[flag] not in choices:
        raise Refused(f"Argument --{flag}: invalid choice: {found[flag]!r} (choose from {', '.join(choices)})")

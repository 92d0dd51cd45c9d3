"""What each target takes, as data: qnn-htp.json asked of the compiler, the others of ONNX Runtime and its documents."""

from __future__ import annotations

import functools
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Support:
    """What a target's compiler or runtime takes."""

    operators: dict[str, dict[str, Any]]
    """qnn-htp: operator -> type -> architectures. ort-mobile: operator -> opset and types. xnnpack: its conditions."""
    ranks: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Operator -> rank -> architectures."""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """"Operator type" -> architectures that take it and compute something else."""
    probes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Question -> architecture -> what became of it."""
    crashes: dict[str, list[str]] = field(default_factory=dict)
    """"Operator type" -> architectures whose compiler it takes down."""
    versions: dict[str, str] = field(default_factory=dict)


@functools.cache
def load_support(target: str) -> Support:
    """Read the data of a target: qnn-htp, ort-mobile or xnnpack."""
    if target == "qnn-htp":
        data = json.loads((FOLDER / "qnn-htp.json").read_text("utf-8"))
        return Support(**{key: data[key] for key in Support.__dataclass_fields__ if key in data})
    data = tomllib.loads((FOLDER / f"{target}.toml").read_text("utf-8"))
    return Support(data["operators"], versions={target: data["version"]})

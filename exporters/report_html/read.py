"""An artifact's files as plain values, none of them trusted: what is damaged becomes a line of the report."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.files import read_small
from ringstep.manifest import FILE, Manifest

STEP, PARITY = "step.json", "parity.json"
MARKS = (FILE, STEP, PARITY)  # a folder with one of these is an artifact
TEXT_LIMIT = 160  # characters; longer names are cut
LARGEST = 1e15  # what no byte count, time or figure reaches


@dataclass
class Artifact:
    """A folder and what could be read of it; `problems` maps a file to why it could not."""

    folder: Path
    name: str
    manifest: Manifest | None = None
    spec: StepSpec | None = None
    problems: dict[str, str] = field(default_factory=dict)

    def json(self, name: str) -> Any:
        """A JSON file of the folder; None where it is missing or damaged."""
        path = self.folder / name
        try:
            if not path.exists():
                return None
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise RingstepError(f"{name} leads out of the folder through a symbolic link")
            return json.loads(read_small(path))
        except RingstepError as error:
            self.problems[name] = self.short(str(error))
        except (ValueError, RecursionError) as error:
            self.problems[name] = f"{name} is not valid JSON: {text(error)}"
        except OSError as error:
            self.problems[name] = f"{name} cannot be read: {error.strerror}"
        return None

    def short(self, message: str) -> str:
        """An error without the folder's path, which is of no use to a reader elsewhere."""
        return text(message.replace(f"{self.folder}/", "").replace(str(self.folder), self.name), 400)


def read_artifact(folder: Path, name: str | None = None) -> Artifact:
    """Read a folder's manifest and contract; what fails is in `problems`."""
    artifact = Artifact(folder, text(name or folder.resolve().name))
    if (folder / FILE).exists():
        try:
            artifact.manifest = Manifest.load(folder)
        except (RingstepError, OSError) as error:
            artifact.problems[FILE] = artifact.short(str(error))
    if (folder / STEP).exists():
        try:
            artifact.spec = StepSpec.load(folder)
        except (RingstepError, OSError) as error:
            artifact.problems[STEP] = artifact.short(str(error))
    return artifact


def find_artifacts(folder: Path) -> list[Artifact]:
    """The folder itself where it is an artifact, else those inside it, by name. Raises RingstepError for neither."""
    if not folder.is_dir():
        raise RingstepError(f"{folder} is {'no folder' if folder.exists() else 'not there'}; give an export's folder")
    if any((folder / mark).is_file() for mark in MARKS):
        return [read_artifact(folder)]
    inside = [f for f in sorted(folder.iterdir()) if not f.name.startswith(".") and f.is_dir()]
    found = [read_artifact(f, f.name) for f in inside if any((f / mark).is_file() for mark in MARKS)]
    if not found:
        raise RingstepError(f"{folder} holds no artifact (none of {', '.join(MARKS)}); give the folder of an export")
    return found


def get(value: Any, *path: str | int) -> Any:
    """What lies at a path of keys and indices; None where anything on the way is missing or of another type."""
    for key in path:
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
            value = value[key]
        else:
            return None
    return value


def items(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; nothing for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number of a sane size, else None; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -LARGEST <= value <= LARGEST:  # NaN too
        return None
    return float(value)


def numbers(value: Any) -> list[float | None]:
    """The numbers of a list, None where one is not finite."""
    return [number(item) for item in value] if isinstance(value, list) else []


def text(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Anything as one line of text of bounded length."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number"
    if isinstance(value, dict | list):
        value = f"{len(value)} entries"
    elif isinstance(value, int) and abs(value) > LARGEST:  # str() of a huge one raises
        value = "huge"
    raw = str(value)[: 4 * limit]
    line = " ".join("".join(c if c.isprintable() else " " for c in raw).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"

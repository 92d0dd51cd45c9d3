"""Toy stages for the tests of manifests and stages."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringstep.manifest import StageRecord, open_folder
from ringstep.stage import run_stage

Build = Callable[[Path], dict[str, Any] | None]


def writes(files: Mapping[str, str | bytes], facts: dict[str, Any] | None = None) -> Build:
    def build(folder: Path) -> dict[str, Any] | None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return facts

    return build


def raises(error: BaseException) -> Build:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    return build


def stage(folder: Path, build: Build, name: str = "a", **options: Any) -> StageRecord:
    with open_folder(folder) as manifest:
        return run_stage(manifest, name, inputs={}, options=options, versions={}, build=build)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

"""A folder imports from those to its right in docs/architecture.md, at the top of a file or inside of a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDERS = ("exporters", "quantize", "sanitize", "recipes", "ringstep")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_from_its_right_alone(folder: str) -> None:
    left = FOLDERS[: FOLDERS.index(folder)]
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
            found += [f"{path.name}:{node.lineno}: {name}" for name in names if name.split(".")[0] in left]
    assert not found

"""Fixtures of the profiling tests; the stand-in for AI Hub in tests/aihub becomes importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "aihub"))

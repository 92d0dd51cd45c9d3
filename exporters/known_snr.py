"""What is known of a model's SNR in a precision: from artifacts that were proven, or the quantisation baseline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ringstep.errors import RingstepError


def known_snr(label: str, precision: str, artifacts: Path = Path("artifacts")) -> str:
    """The logits' SNR of an artifact of this model and precision, or of the quantisation baseline; "" where none is."""
    from ringstep.checkpoint import ALIAS_LABEL

    for report in sorted(artifacts.glob("*/parity.json")):
        found = pooled_snr(report, label, precision)
        if found:
            return found
    baseline = artifacts / "baselines" / "quantize.json"
    if label == ALIAS_LABEL and baseline.is_file():
        for row in _json_list(baseline):
            # What benchmarks/quantize.py measured on the simulator.
            value = _at(row, "simulated", "snr_db") if _at(row, "row") == precision else None
            if isinstance(value, int | float) and math.isfinite(value):
                return f"{value:.1f} dB"
    return ""


def pooled_snr(report: Path, label: str, precision: str) -> str:
    """What parity.json of one artifact says, the simulator's figure before ONNX Runtime's; "" where it is another's."""
    from ringstep.contract import StepSpec

    try:
        spec = StepSpec.load(report.parent)
    except RingstepError:
        return ""
    if spec.model != label or (spec.scheme or {"float16": "fp16", "float32": "fp32"}.get(spec.dtype)) != precision:
        return ""
    figures = {}
    for entry in _json_list(report):
        value = _at(entry, "summary", "snr_db", "pooled")
        if isinstance(value, int | float) and math.isfinite(value):
            figures[_at(entry, "summary", "simulated") is True] = value
    if True in figures:
        return f"{figures[True]:.1f} dB"
    return f"{figures[False]:.1f} dB" if False in figures else ""


def _json_list(path: Path) -> list[Any]:
    import json

    from ringstep.files import read_text

    try:
        body = json.loads(read_text(path))
    except (RingstepError, ValueError, RecursionError):
        return []
    return body if isinstance(body, list) else []


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value

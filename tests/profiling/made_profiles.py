"""Profiles made up for the tests. Those of origin "aihub" stand for a phone's; no phone made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ringstep.profiling.profile import Op, Place, Profile, Subject

SUBJECT = Subject("Spark-X2.5-1.7B", "spark2_5", "sliding", 21, 1, "ring", "w4a16", 1024)
PLACE = Place("galaxy-s25", "sm8750", "qnn", "npu")
OPS = (
    Op("/layers.0/attn/q_proj/Gemm", "MatMul", "NPU", 300.0, 900),
    Op("_layers_0_attn_Softmax_token_1", "Softmax", "NPU", 100.0, 300),
    Op("/layers.0/mlp/down_proj/Gemm:OpId_12", "MatMul", "NPU", 400.0, 1200),
)


def made(job: str = "jabc123", ms: float = 0.84, n: int = 50, noise: float = 0.03, seed: int = 0,
         **fields: Any) -> Profile:  # fmt: skip
    """A profile of n iterations around `ms`; subject and place fields by their names, such as part="head"."""
    times = ms * 1e3 * (1 + noise * np.random.default_rng(seed).standard_normal(n))
    subject = {k: fields.pop(k, v) for k, v in vars(SUBJECT).items()}
    place = {k: fields.pop(k, v) for k, v in vars(PLACE).items()}
    rest = {"origin": "aihub", "job": job, "created": "2026-01-02T03:04:05+00:00", "first_load_us": 90_000.0,
            "warm_load_us": 60_000.0, "peak_bytes": (3_000_000, 5_000_000), "ops": OPS, "snr_db": 61.5,
            "parity": "passed", "versions": {"qairt": "2.40"},
            "times_us": tuple(map(float, times.round()))}  # fmt: skip
    return Profile(Subject(**subject), Place(**place), **{**rest, **fields})


def aihub_body(times: list[Any] | None = None, **summary: Any) -> dict[str, Any]:
    """What AI Hub's client writes for a profile job."""
    times = [850, 840, 860, 900, 845] if times is None else times
    return {
        "execution_summary": {
            "estimated_inference_time": min(times, default=0), "estimated_inference_peak_memory": 4_000_000,
            "first_load_time": 91_000, "warm_load_time": 61_000, "inference_memory_peak_range": [3_000_000, 5_000_000],
            "all_inference_times": times, **summary,
        },
        "execution_detail": [
            {"name": "/layers.0/attn/q_proj/Gemm", "type": "MatMul", "compute_unit": "NPU", "execution_time": 500,
             "execution_cycles": 900},
            {"name": "/layers.0/Add", "type": "Add", "compute_unit": "CPU", "execution_cycles": 100},
        ],
    }  # fmt: skip


def write(path: Path, body: Any) -> Path:
    """Write a value as JSON."""
    path.write_text(json.dumps(body), "utf-8")
    return path

"""benchmarks/full_size.py on four layers of Spark-X2.5-1.7B's true size: its budgets of memory hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_four_layers_of_true_size_stay_within_the_budgets(tmp_path: Path) -> None:
    options = ("--set", "num_hidden_layers=4", "--steps", "fp16", "nearest", "--home", tmp_path / "home", "--json")
    command = [sys.executable, ROOT / "benchmarks" / "full_size.py", "spark2_5-1.7b", *options]
    made = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=500)
    result = json.loads(made.stdout)
    fp16, nearest = result["steps"]
    # The table [131072, 2048] alone is 1.07 GB in float32: nothing may hold it whole.
    assert fp16["anon_bytes"] < 0.8e9 and nearest["anon_bytes"] < 2e9
    assert fp16["disk_bytes"] < 1.05 * result["checkpoint_bytes"]
    names = [stage["stage"] for stage in nearest["stages"]]
    assert {"calibrate", "round", "qdq"} <= set(names) and all(s["seconds"] > 0 for s in nearest["stages"][1:])
    config = json.loads((tmp_path / "home" / "checkpoint" / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (2048, 131072, 4)

"""How the time and memory of an export grow with layers, hidden size, vocabulary and context.

    python benchmarks/growth.py    twenty minutes; a table with fitted slopes, build/growth.json and docs/growth.svg

Made-up checkpoints like Spark-X2.5-1.7B, of seven layers but where layers vary: an export to ONNX fp16, and w4a16
rounded to nearest after 512 tokens of calibration, each a fresh process on its own (full_size.py). Beside them what
`cp` takes for the checkpoint: reading and writing those bytes once.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import full_size
import numpy as np
from measure import BUILD, ROOT, machine

from ringstep import console

MODEL, STEPS = "spark2_5-1.7b", ("fp16", "nearest")
BASE = {"num_hidden_layers": 7}
HIDDEN, HEADS, INTERMEDIATE = 2048, 8, 6656  # of the model: its other widths grow with the hidden size
NAMES = {"fp16": "ONNX fp16", "nearest": "w4a16, nearest"}


@dataclass(frozen=True)
class Point:
    """One model: what is varied, its value, the sizes and the context that makes."""

    axis: str
    value: int
    sizes: dict[str, int]
    context: int = full_size.CONTEXT


def points() -> list[Point]:
    """All models; the one that axes share appears in each."""
    wide = lambda n: {"hidden_size": n, "num_attention_heads": HEADS * n // HIDDEN,
                      "intermediate_size": INTERMEDIATE * n // HIDDEN}  # fmt: skip
    return [
        *(Point("layers", n, {"num_hidden_layers": n}) for n in (7, 14, 28)),
        *(Point("hidden size", n, BASE | (wide(n) if n != HIDDEN else {})) for n in (1024, HIDDEN, 4096)),
        *(Point("vocabulary", n, BASE | ({"vocab_size": n} if n != 131072 else {})) for n in (32768, 131072, 262144)),
        *(Point("context", n, BASE, n) for n in (1024, full_size.CONTEXT, 32768, 131072)),
    ]


def measure(home: Path) -> list[dict[str, Any]]:
    """Every point's row; equal models are measured once."""
    known: dict[str, dict[str, Any]] = {}
    rows = []
    for point in points():
        key = json.dumps([point.sizes, point.context], sort_keys=True)
        if key not in known:
            console.say(f"{point.axis} {point.value}")
            known[key] = full_size.measure(MODEL, point.sizes, point.context, list(STEPS), home)
            shutil.rmtree(home)
        rows.append({"axis": point.axis, "value": point.value, **known[key]})
    return rows


def step(row: dict[str, Any], name: str) -> dict[str, Any]:
    """One step of a row."""
    return next(one for one in row["steps"] if one["step"] == name)


def slope(rows: list[dict[str, Any]], x: str, name: str, y: str) -> tuple[float, float]:
    """Of a straight line by least squares through y of a step over x: its slope and its value at 0."""
    fitted = np.polyfit([row[x] for row in rows], [step(row, name)[y] if name else row[y] for row in rows], 1)
    return float(fitted[0]), float(fitted[1])


def slopes(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """A line for each axis and step: seconds and bytes of memory for one more of it."""
    found = []
    per = {"layers": (1, "layer"), "hidden size": (1024, "1024 of hidden size"), "vocabulary": (1024, "1024 ids"),
           "context": (1024, "1024 tokens")}  # fmt: skip
    for axis, (unit, word) in per.items():
        own = [row for row in rows if row["axis"] == axis]
        for name in STEPS:
            seconds, _ = slope(own, "value", name, "seconds")
            memory, at_zero = slope(own, "value", name, "anon_bytes")
            found.append((f"{NAMES[name]}, by {word}", f"{seconds * unit:+.2f} s", f"{memory * unit / 1e6:+.1f} MB",
                          f"{at_zero / 1e9:.2f} GB"))  # fmt: skip
    own = [row for row in rows if row["axis"] == "layers"]
    for name in (*STEPS, ""):
        seconds, at_zero = slope(own, "checkpoint_bytes", name, "seconds" if name else "copy_seconds")
        found.append((f"{NAMES.get(name, 'cp')}, by GB of checkpoint (layers)", f"{seconds * 1e9:+.2f} s", "",
                      f"{at_zero:.1f} s"))  # fmt: skip
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """The tables."""
    cells = []
    for row in rows:
        both = [step(row, name) for name in STEPS]
        cells.append((row["axis"], str(row["value"]), console.human_bytes(row["checkpoint_bytes"]),
                      f"{row['copy_seconds']:.1f} s",
                      *(word for one in both for word in (f"{one['seconds']:.1f} s",
                                                          console.human_bytes(one["anon_bytes"])))))  # fmt: skip
    columns = ["axis", "value", "checkpoint", "cp"]
    columns += [word for name in STEPS for word in (NAMES[name], "RssAnon")]
    console.table("Growth", columns, cells)
    console.table("Slopes by least squares", ["of", "time", "memory", "at 0"], slopes(rows))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over and memory under each other, an axis a column."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "ringstep", "font.size": 8})
    from matplotlib import pyplot

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figure, grid = pyplot.subplots(2, len(axes), figsize=(11, 5), sharex="col", sharey="row", layout="constrained")
    for column, axis in enumerate(axes):
        own = [row for row in rows if row["axis"] == axis]
        values = [row["value"] for row in own]
        for name, colour in zip(STEPS, ("#0072b2", "#d55e00"), strict=True):
            both = [step(row, name) for row in own]
            grid[0][column].plot(values, [one["seconds"] for one in both], "o-", color=colour, label=NAMES[name])
            grid[1][column].plot(values, [one["anon_bytes"] / 1e9 for one in both], "o-", color=colour)
        grid[0][column].plot(values, [row["copy_seconds"] for row in own], "o:", color="#666666", label="cp")
        grid[1][column].set_xlabel(axis)
        if axis == "context":
            grid[1][column].set_xscale("log", base=2)
        for part in (grid[0][column], grid[1][column]):
            part.set_ylim(bottom=0)
            part.grid(alpha=0.3)
    grid[0][0].set_ylabel("seconds")
    grid[1][0].set_ylabel("peak RssAnon, GB")
    grid[0][0].legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rows = measure(BUILD / "full-size" / "growth")
    (BUILD / "growth.json").write_text(json.dumps({"rows": rows, "machine": machine()}, indent=1) + "\n")
    show(rows)
    draw(rows, ROOT / "docs" / "growth.svg")


if __name__ == "__main__":
    main()

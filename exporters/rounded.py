"""The stage that rounds: onnx/quantised.bin with every linear, onnx/embedding.bin, and where things lie."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.stages import READERS, versions
from ringstep import console

if TYPE_CHECKING:
    import numpy as np

    from exporters.quantised import Quantised
    from quantize.grid import QuantisedWeight
    from quantize.store import Stored

FOLDER = "quantize"
TABLE, AUTO = f"{FOLDER}/embedding.json", f"{FOLDER}/auto.json"
LOW = "low.bin"  # what `auto` starts from, gone when it is done
SAMPLES = 16  # chunks that sensitivity is estimated on
MEASURED = 4  # chunks that SNR is measured on
ROUNDS = 4  # of promotions, each measured
# What the rounded weights do not depend on.
APART = ("name", "description", "activations", "cache", "exceptions")


def stage_round(own: Quantised, done: dict[str, dict[str, str]]) -> Any:
    """Run the stage; with an `auto` scheme its facts hold what was raised, and quantize/auto.json the table."""
    from quantize.scheme import describe

    line = own.line

    def build(folder: Path) -> dict[str, Any]:
        from quantize.store import DATA, INDEX, Writer, save_index

        (folder / "onnx").mkdir()
        (folder / FOLDER).mkdir()
        table = write_embedding(own, folder)
        facts: dict[str, Any] = {}
        if own.scheme.auto is not None:
            facts["raised"] = auto(own, folder, table)
        else:
            with open(folder / "onnx" / DATA, "wb") as file:
                writer = Writer(file)
                round_all(own, folder, keeper(own, writer, table))
            save_index(folder / "onnx" / INDEX, writer.index)
        return facts | {"bytes": (folder / "onnx" / DATA).stat().st_size}

    inputs = {"checkpoint": line.manifest.checkpoint["sha256"], **done["graphs"], **done["calibrate"],
              **done.get("rescale", {})}  # fmt: skip
    scheme = {key: value for key, value in describe(own.scheme).items() if key not in APART}
    return line.stage("round", inputs, scheme, versions(
        "quantize", "recipes", "ringstep/session.py", "exporters/rounded.py", *READERS, libraries=("torch",)), build)


def write_embedding(own: Quantised, folder: Path) -> Stored | None:
    """onnx/embedding.bin and its contract; returns the table as a weight where a tied head can be the same."""
    from quantize.scheme import grid_for, weights_for
    from quantize.table import write_table
    from recipes.weights import key

    plan, grid = own.line.plan, grid_for(own.scheme, "embedding")
    with console.progress("quantising the embedding table"):
        table, stored, largest = write_table(own.line.pieces(plan.embedding), plan, grid, folder / "onnx")
    body = {"embedding": dataclasses.asdict(table), "largest": largest}
    (folder / TABLE).write_text(json.dumps(body, indent=1) + "\n")
    tied = key(plan.head) == key(plan.embedding) and grid_for(own.scheme, "head") == grid
    return stored if tied and weights_for(own.scheme, "head").rounding == "nearest" else None


def keeper(own: Quantised, writer: Any, table: Stored | None) -> Callable[[str, str, QuantisedWeight], None]:
    """What takes each rounded weight into a file; a tied head on the table's own grid is the table."""

    def keep(path: str, name: str, weight: QuantisedWeight) -> None:
        if path == "head" and table is not None:
            writer.index[name] = table
        else:
            writer.weight(name, weight)

    return keep


def round_all(own: Quantised, folder: Path, keep: Callable[[str, str, QuantisedWeight], None]) -> None:
    """Round every linear and the head by the scheme; `folder` takes files of no use afterwards."""
    from quantize.gradients import TOKENS, moments
    from quantize.rounding.walk import round_weights
    from quantize.scheme import weights_for

    sequences, layers = own.sequences, len(own.line.plan.layers)
    two_sided = any(weights_for(own.scheme, path).rounding == "two-sided" for path in linear_sources(own))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        moment: Callable[[str], Any] = lambda _: None
        if two_sided:
            texts = own.chunks[: max(1, TOKENS // own.n)]
            with console.progress("how much each output matters", 3 * layers * own.n * len(texts)) as tick:
                moment = moments(own.model, texts, own.entries, Path(temporary), tick).of
        with console.progress("rounding weights", layers * sum(map(len, sequences))) as tick:
            round_weights(own.model, sequences, own.entries, own.scheme, keep, tick, moment)


def auto(own: Quantised, folder: Path, table: Stored | None) -> list[dict[str, Any]]:
    """Round at the scheme's own bits, then raise linears until its goal is met; returns what was raised.

    The SNR that counts is measured on calibration text, of weights alone.
    """
    from quantize.auto import choose
    from quantize.scheme import grid_for, raised
    from quantize.sensitivity import noise
    from quantize.sizes import HTP, nbytes
    from quantize.store import DATA, INDEX, Writer, save_index, weight_at
    line, home, goal = own.line, folder / "onnx", own.scheme.auto
    assert goal is not None
    ((low, high),) = goal.promotions()
    with open(home / LOW, "wb") as file:
        writer = Writer(file, LOW)
        round_all(own, folder, keeper(own, writer, table))
    index = writer.index
    sources = {name: found for layer in range(len(line.plan.layers))
               for name, found in own.model.sources(layer).items() if name in index}  # fmt: skip
    lows = {path: name for name, (path, _) in sources.items() if index[name].grid.bits == low}
    texts = own.chunks
    with console.progress("how much each linear matters", 2 * SAMPLES * len(line.plan.layers)) as tick:
        energy, _ = noise(own.model, texts[:SAMPLES], own.entries,
                          lambda n: weight_at(home, index[n]).dequantised() if n in sources else None, tick)
    by_path = {path: energy[name] for path, name in lows.items()}
    grids = {path: grid_for(raised(own.scheme, [path], high), path) for path in lows}
    size = lambda name, grid: nbytes(sources[name][1].out_shape, grid, HTP)
    extra = {path: size(name, grids[path]) - size(name, index[name].grid) for path, name in lows.items()}
    taken: list[dict[str, Any]] = []
    chosen: set[str] = set()

    def weight(name: str) -> np.ndarray | None:
        if name not in index:
            return None
        path, source = sources.get(name, ("", None))
        made = high_weight(own, source, grids[path]) if path in chosen else weight_at(home, index[name])
        return made.dequantised()

    start = measured = own.measure(weight, texts[-MEASURED:])
    base = sum(nbytes(s.out_shape, grid_for(own.scheme, p), HTP) for p, s in linear_sources(own).items())
    for _ in range(ROUNDS):
        if goal.target_db is not None and measured >= goal.target_db:
            break
        left = {path: value for path, value in by_path.items() if path not in chosen}
        spent = sum(extra[path] for path in chosen)
        room = None if goal.max_bytes is None else goal.max_bytes - base - spent
        made = choose(left, extra, low, high, measured, goal.target_db, room)
        if not made:
            break
        chosen |= {p.path for p in made}
        measured = own.measure(weight, texts[-MEASURED:])
        taken += [dataclasses.asdict(p) for p in made]
        taken[-1]["measured_db"] = measured
    with open(home / DATA, "wb") as file:
        final = Writer(file)
        for name, stored in index.items():
            if stored.q.file != LOW:
                final.index[name] = stored
            elif name in sources and sources[name][0] in chosen:
                final.weight(name, high_weight(own, sources[name][1], grids[sources[name][0]]))
            else:
                final.weight(name, weight_at(home, stored))
    save_index(home / INDEX, final.index)
    (home / LOW).unlink()
    body = {"start_db": start, "measured_db": measured, "target_db": goal.target_db, "max_bytes": goal.max_bytes,
            "bytes": base + sum(extra[path] for path in chosen), "raised": taken}  # fmt: skip
    (folder / AUTO).write_text(json.dumps(body, indent=1) + "\n")
    if goal.max_bytes is not None and base > goal.max_bytes:
        console.warn(f"auto: the weights take {base} bytes before anything is raised, more than max_bytes")
    if goal.target_db is not None and measured < goal.target_db:
        console.warn(f"auto: {measured:.1f} dB with {len(chosen)} linears raised, short of {goal.target_db:.1f} dB")
    return taken


def linear_sources(own: Quantised) -> dict[str, Any]:
    """Every linear and the head by path."""
    from quantize.parameters import linears

    return dict(linears(own.line.plan))


def high_weight(own: Quantised, source: Any, grid: Any) -> QuantisedWeight:
    """A linear in more bits, rounded to nearest: at 8 bits the method hardly matters beside what stays at 4."""
    from quantize.rounding import nearest

    return nearest.quantise(own.line.read(source), grid)

"""`ringstep bisect`: the command and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringstep import completion, console
from ringstep.options import as_json, common, engine_option

SHOWN_NODES = 12


@click.command(short_help="Find the first layer and node of ARTIFACT that diverges.")
@click.argument("artifact", type=click.Path(path_type=Path))
@engine_option
@click.option("--graph", "n", type=click.IntRange(1), help="The graph of N tokens a step. Default: each in turn "
              "on ort, the smallest on qnn-sim.")  # fmt: skip
@click.option("--model", shell_complete=completion.model,
              help="The original, when it is no longer where the export found it.")  # fmt: skip
@click.option("--all-nodes", is_flag=True, help="Show every node of the block, not the worst dozen.")
@as_json
@common
def bisect(artifact: Path, engine: str, n: int | None, model: str | None, all_nodes: bool, json_: bool) -> int:
    """Name the first block, node and stage at which ARTIFACT leaves the original. Leaves with 1 for a fault."""
    from exporters.artifact import checkpoint_of

    checkpoint = checkpoint_of(artifact, model)  # what is no artifact is refused before torch is waited for
    from exporters.bisect import bisect as run

    body = run(artifact, checkpoint, engine, n)
    if json_:
        console.print_json(body)
    else:
        show(body, all_nodes)
    return console.GATE_FAILED if body["first"]["kind"] == "fault" else 0


def show(body: dict[str, Any], all_nodes: bool) -> None:
    """The tables of a bisection and its verdict."""
    from ringstep.parity.bisect import label

    decibels = lambda value: "" if value is None else f"{value:.1f}"
    measures = ("snr_db", "local_db", "key_db", "value_db")
    rows = [(block["tensor"], *(decibels(block[name]) for name in measures)) for block in body["depth"]]
    simulated = ", simulated" if body["simulated"] else ""
    title = f"{body['engine']}{simulated}, graph of {body['graph']}, {body['tokens']} tokens"
    columns = ["tensor", "depth dB", "by itself dB", "keys dB", "values dB"]
    console.table(f"{title}, against {body['reference']}", columns, rows)
    first = body["first"]
    nodes = sorted((x for x in body["nodes"] if x["layer"] == first["layer"]), key=lambda node: node["effect_db"])
    nodes = nodes if all_nodes else nodes[:SHOWN_NODES]
    if nodes:
        print()
        table = [(label(x["node"], x["fused_with"]), decibels(x["own_db"]), decibels(x["effect_db"])) for x in nodes]
        console.table(f"nodes of {first['tensor']}, each fed the clean step's tensors", ["node", "own dB", "effect dB"],
                      table)  # fmt: skip
        for x in nodes:
            for note in x["notes"]:
                console.line(f"{x['node']}: {note}")
    if first["missing"]:
        console.line(f"nodes of the clean step that are not there: {', '.join(first['missing'][:8])}")
    if body["stages"]:
        print()
        console.table(f"{first['tensor']} by stage", ["stage", "engine", "by itself dB"],
                      [(s["stage"], s["engine"], decibels(s["snr_db"])) for s in body["stages"]])  # fmt: skip
    for warning in body["warnings"]:
        console.warn(warning)
    console.line(body["verdict"])

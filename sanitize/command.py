"""`ringstep sanitize`: what it does with a file, from reading to the report."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringstep import completion, console
from ringstep.errors import RingstepError, did_you_mean
from ringstep.options import as_json, common
from sanitize import completion as offered

if TYPE_CHECKING:
    from sanitize.passes import Pass

HALF_DB = 40.0  # passes promise for float32; two orders of rounding in float16 differ by this much over a deep model
EXCLUSIVE = {"merge-projections", "split-projections"}
ROUNDING = ("QuantizeLinear", "DynamicQuantizeLinear")  # they make a whole step of a difference in the last bit


@click.command(short_help="Make an ONNX model fit for a target.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--target", default="qnn-htp", show_default=True, metavar="NAME", shell_complete=offered.target,
              help="qnn-htp, ort-mobile or xnnpack.")  # fmt: skip
@click.option("--chip", metavar="NAME", shell_complete=completion.device,
              help="Phone or chip for qnn-htp. Default: sm8750.")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp16", "a16", "fp32"]),
              help="What floats are computed in: fp16, 16 bit quantised (a16) or fp32.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Weights go into OUT.data beside it.")
@click.option("--in-place", is_flag=True, help="Change MODEL itself; its data files stay as they are.")
@click.option("--verify", is_flag=True, help="Run both in ONNX Runtime; write only if they agree.")
@click.option("--inputs", type=click.Path(path_type=Path),
              help="An .npz of real inputs: rewrites happen only where their values need them.")  # fmt: skip
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Fix a dynamic dim, as batch=1 (repeatable).")
@click.option("--skip", multiple=True, metavar="PASS", shell_complete=offered.pass_,
              help="Leave a pass out (repeatable).")  # fmt: skip
@click.option("--with", "extra", multiple=True, metavar="LAYOUT", shell_complete=offered.layout,
              help="Add a layout that is off by default.")  # fmt: skip
@as_json
@common
def sanitize(model: Path, target: str, chip: str | None, precision: str | None, out: Path | None,
             in_place: bool, verify: bool, inputs: Path | None, dims: tuple[str, ...], skip: tuple[str, ...],
             extra: tuple[str, ...], json_: bool) -> int:  # fmt: skip
    """Make the ONNX file MODEL fit for a target: remove what its compiler refuses and what its kernels get wrong.

    Without -o and --in-place it only reports what it would change.
    """
    from sanitize.fix_dims import parse_dims

    if out and in_place:
        raise RingstepError("-o and --in-place: give one of them")
    if verify and not (out or in_place):
        raise RingstepError("--verify compares what is written: give -o OUT.onnx or --in-place")
    out, keep = (model, model.parent) if in_place else (out, None)
    body = sanitize_file(model, out, keep=keep, target=target, chip=chip, precision=precision, verify=verify,
                         inputs=inputs, skip=skip, extra=extra, dims=parse_dims(dims))  # fmt: skip
    if json_:
        console.print_json(body)
    else:
        print_report(body, console.settings.verbose)
    return 0


def choose_passes(skip: Sequence[str] = (), extra: Sequence[str] = ()) -> list[Pass]:
    """The passes to run, in order: all of order.py without `skip`, then the layouts of `extra` (both: names or patterns
    such as accurate-*). Raises RingstepError for a name that is no pass, and for layouts that undo each other.
    """
    from sanitize.order import LAYOUTS, PASSES

    for names, known in ((skip, PASSES), (extra, LAYOUTS)):
        for name in names:
            if not any(fnmatch.fnmatchcase(p.name, name) for p in known):
                near = did_you_mean(name, [p.name for p in known])
                raise RingstepError(f"unknown pass {name!r}{near}; there are {', '.join(p.name for p in known)}")
    named = lambda p, names: any(fnmatch.fnmatchcase(p.name, name) for name in names)
    layouts = [p for p in LAYOUTS if named(p, extra)]
    if {p.name for p in layouts} >= EXCLUSIVE:
        raise RingstepError(f"--with {', '.join(sorted(EXCLUSIVE))}: they undo each other; give one of them")
    return [p for p in PASSES if not named(p, skip)] + layouts


def sanitize_file(
    source: Path,
    out: Path | None,
    *,
    target: str,
    chip: str | None = None,
    precision: str | None = None,
    keep: Path | None = None,
    verify: bool = False,
    inputs: Path | None = None,
    skip: Sequence[str] = (),
    extra: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    refuse: bool = False,
) -> dict[str, Any]:
    """Sanitise `source` into `out` (None: only report what would change); returns the report.

    `inputs` (an .npz) is what ranges are found with, and what both models run on under `verify`. Weights
    in files of `keep`, the folder where the result will lie, stay where they are. With `refuse` an error of the lint
    ends it: it is told here, before a compiler is waited for. Raises RingstepError, and
    nothing is written then.
    """
    import onnx_ir as ir

    from sanitize import graph as graphs
    from sanitize.fix_dims import fix_dims
    from sanitize.lint import lint, refuse_errors
    from sanitize.model_file import check_out, read_model, write_model
    from sanitize.pipeline import Applied, promised, sanitize
    from sanitize.target import find_target
    from sanitize.tensors import nbytes
    from sanitize.verify import find_ranges, read_inputs, refuse_unlike
    from sanitize.verify import verify as run_both

    goal = find_target(target, chip, precision)
    passes = choose_passes(skip, extra)
    with console.progress("reading"):
        model = read_model(source)
    if out is not None:
        check_out(model, source, out)
    feeds = read_inputs(inputs) if inputs else None
    fixed = fix_dims(model, dims or {})
    if feeds is not None:
        with console.progress("running it on the inputs"):
            goal = dataclasses.replace(goal, ranges=find_ranges(model, source, feeds))
    before = sum(1 for _ in graphs.every_node(model))
    with console.progress("passes"):
        applied = [Applied("fix-dims", tuple(fixed), 0.0, math.inf)] if fixed else []
        applied += sanitize(model, goal, passes)
    after = sum(1 for _ in graphs.every_node(model))
    if refuse:
        refuse_errors(lint(model, goal, source))
    min_db = promised(applied)
    rounds = graphs.uses(model, ir.DataType.FLOAT16) or any(n.op_type in ROUNDING for n in graphs.every_node(model))
    if math.isfinite(min_db) and rounds:
        min_db = min(min_db, HALF_DB)
    compared: list[Any] = []

    def check(written: Path) -> None:
        with console.progress("verifying in ONNX Runtime"):
            compared.extend(run_both(source, written, inputs=feeds, dims=dims))
        refuse_unlike(compared, min_db, source.name)

    if out is not None:
        weights = sum(nbytes(v.const_value) for g in graphs.every_graph(model) for v in g.initializers.values()
                      if v.const_value is not None)  # fmt: skip
        with console.progress("writing", weights) as tick:
            write_model(model, out, keep=keep, check=check if verify else None, tick=tick)
    return {
        "source": str(source), "written": str(out) if out else None, "target": goal.name,
        "chip": goal.chip.name if goal.chip else None, "precision": goal.precision,
        "nodes_before": before, "nodes_after": after, "min_db": min_db,
        "passes": [dataclasses.asdict(a) for a in applied],
        "verified": [dataclasses.asdict(c) for c in compared] or None,
    }  # fmt: skip


def print_report(body: dict[str, Any], verbose: bool) -> None:
    """The table of what each pass did; with `verbose` every change."""
    rows = [(p["name"], len(p["changes"]), console.human_seconds(p["seconds"]), p["changes"][0]["what"])
            for p in body["passes"] if p["changes"]]  # fmt: skip
    if rows:
        console.table("", ["pass", "changes", "time", "such as"], rows)
    if verbose:
        for p in body["passes"]:
            for change in p["changes"]:
                console.line(f"{p['name']}: {change['node']}: {change['what']}")
    place = body["written"] or "nothing written"
    nodes = f"{body['nodes_before']} -> {body['nodes_after']} nodes" if rows else "already clean"
    console.line(f"{nodes}: {place}")
    if body["verified"]:
        worst = min(body["verified"], key=lambda c: c["snr_db"])
        how = "bit-equal" if all(c["equal"] for c in body["verified"]) else f"{worst['snr_db']:.1f} dB at least"
        skipped = sum(c["skipped"] for c in body["verified"])
        more = f", {skipped} elements were not finite before" if skipped else ""
        console.line(f"verified in ONNX Runtime: {len(body['verified'])} outputs, {how}{more}")

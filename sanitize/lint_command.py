"""`ringstep lint`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ringstep import completion, console
from ringstep.options import as_json, common
from sanitize import completion as offered

if TYPE_CHECKING:
    from sanitize.lint import Finding
    from sanitize.target import Target

FOUND_ERRORS = 1
SHOWN = 3  # findings of one rule in the table; -v and --json have all


@click.command(short_help="Say what a target would refuse in an ONNX model.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--target", default="qnn-htp", show_default=True, metavar="NAME", shell_complete=offered.target,
              help="qnn-htp, ort-mobile or xnnpack.")  # fmt: skip
@click.option("--chip", metavar="NAME", shell_complete=completion.device,
              help="Phone or chip for qnn-htp. Default: sm8750.")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp16", "a16", "fp32"]),
              help="What floats are computed in: fp16, 16 bit quantised (a16) or fp32.")  # fmt: skip
@click.option("--inputs", type=click.Path(path_type=Path),
              help="An .npz of real inputs: operators are judged over the values that they see.")  # fmt: skip
@as_json
@common
def lint(model: Path, target: str, chip: str | None, precision: str | None, inputs: Path | None,
         json_: bool) -> int:  # fmt: skip
    """Say what a target would refuse or get wrong in the ONNX file MODEL. Leaves with 1 when there are errors."""
    from sanitize.lint import lint_file
    from sanitize.target import find_target

    goal = find_target(target, chip, precision)
    if inputs is not None:
        goal = with_ranges(model, goal, inputs)
    with console.progress("linting"):
        findings = lint_file(model, goal)
    counts = {kind: sum(f.severity == kind for f in findings) for kind in ("error", "warning", "note")}
    if json_:
        body = {"model": str(model), "target": goal.name, "chip": goal.chip.name if goal.chip else None,
                "precision": goal.precision, "counts": counts,
                "findings": [dataclasses.asdict(f) for f in findings]}  # fmt: skip
        console.print_json(body)
    else:
        print_findings(findings, goal, console.settings.verbose)
        console.line(summary(model, goal, counts))
    return FOUND_ERRORS if counts["error"] else 0


def with_ranges(model: Path, target: Target, inputs: Path) -> Target:
    """The target with the ranges of every value when the model runs on these inputs."""
    from sanitize.model_file import read_model
    from sanitize.verify import find_ranges, read_inputs

    with console.progress("running it on the inputs"):
        return dataclasses.replace(target, ranges=find_ranges(read_model(model), model, read_inputs(inputs)))


def print_findings(findings: list[Finding], target: Target, every: bool) -> None:
    """A table of the findings, errors first, and how to fix each rule's."""
    order = ("error", "warning", "note")
    findings = sorted(findings, key=lambda f: order.index(f.severity))
    totals = Counter(f.rule for f in findings)
    shown: Counter[str] = Counter()
    rows = []
    for f in findings:
        shown[f.rule] += 1
        if every or shown[f.rule] <= SHOWN:
            place = f"{f.where}: " if f.where else ""
            rows.append((f.severity, f.rule, place + f.node, f.what))
        if not every and shown[f.rule] == SHOWN + 1:
            rows.append((f.severity, f.rule, f"and {totals[f.rule] - SHOWN} more", "(-v shows all)"))
    if not rows:
        return
    console.table("", ["", "rule", "node", "what"], rows)
    print()
    fixes = dict.fromkeys((f.rule, f.fix, f.fixed_by) for f in findings)
    for rule, fix, fixed_by in fixes:
        by = f"; `ringstep sanitize` does it (pass {fixed_by})" if fixed_by else ""
        console.line(f"{rule}: {fix}{by}")


def summary(model: Path, target: Target, counts: dict[str, int]) -> str:
    """The last line, such as "step.onnx for qnn-htp sm8650 fp16: 2 errors, 1 warning"."""
    goal = " ".join(filter(None, (target.name, target.chip.name if target.chip else "", target.precision)))
    found = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items() if n)
    return f"{model.name} for {goal}: {found or 'clean'}"

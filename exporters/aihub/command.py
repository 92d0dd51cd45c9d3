"""`ringstep profile` and `ringstep place`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringstep import completion, console
from ringstep.options import as_json, common
from ringstep.profiling.command import db_option

if TYPE_CHECKING:
    from exporters.aihub.plan import Request

ITERATIONS = 100  # plan.DEFAULT_ITERATIONS, without its imports
PLACES = ("qnn:npu", "tflite:gpu", "tflite:cpu", "onnx:cpu")


def listed(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names between commas."""
    names = tuple(name.strip() for name in (value or "").split(",") if name.strip())
    if value is not None and not names:
        raise click.BadParameter("names nothing")
    return names


def sending_options(command: Any) -> Any:
    """What both commands take."""
    options = (
        click.argument("artifact", type=click.Path(path_type=Path)),
        click.option("--device", "devices", multiple=True, required=True, metavar="NAME",
                     shell_complete=completion.device, help="A phone that AI Hub has; can be repeated."),
        click.option("--layers", callback=listed, metavar="KIND,...", help="One layer of each of these kinds, such as "
                     "sliding,full,head, in the place of the whole step."),
        click.option("--iterations", type=click.IntRange(1, 1000), default=ITERATIONS, show_default=True,
                     help="Runs of each sample on the phone."),
        click.option("--again", is_flag=True, help="Measure anew what was measured or has failed before."),
        click.option("--dry-run", is_flag=True, help="Say what would be sent and how big it is; send nothing."),
        db_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command(short_help="Measure ARTIFACT on real phones, and hold their outputs against the reference.")
@sending_options
@click.option("--whole", is_flag=True, help="The whole step, decode and prefill (the default).")
@click.option("--compile", "compile_", type=click.Choice(["here", "hub"]), default="here", show_default=True,
              help="here: upload context binaries made on this machine. hub: upload ONNX and let AI Hub compile "
              "it.")  # fmt: skip
@as_json
@common
def profile(artifact: Path, devices: tuple[str, ...], layers: tuple[str, ...], whole: bool, iterations: int,
            compile_: Any, again: bool, dry_run: bool, db: Path, json_: bool) -> int:  # fmt: skip
    """Measure ARTIFACT on real phones through Qualcomm AI Hub, and check what they compute in the same run.

    Uploads and jobs are noted in the manifest before they are waited for: after Ctrl-C, a crash or a lost network the
    same command goes on. Leaves with 1 when a job failed or a phone's outputs are not the reference's.
    """
    from exporters.aihub.plan import Request

    if whole and layers:
        raise click.UsageError("--whole and --layers: give one of them")
    request = Request(devices, layers, iterations=iterations, compile=compile_, db=str(db))
    return send(artifact, request, again, dry_run, json_, table="profile")


@click.command(short_help="Compare NPU, GPU and CPU of a phone for ARTIFACT.")
@sending_options
@click.option("--on", "targets", callback=listed, default=",".join(PLACES), show_default=True,
              metavar="RUNTIME:UNIT,...",
              help="Runtimes qnn (npu), tflite (gpu, cpu) and onnx (npu, gpu, cpu).")  # fmt: skip
@as_json
@common
def place(artifact: Path, devices: tuple[str, ...], layers: tuple[str, ...], iterations: int, targets: tuple[str, ...],
          again: bool, dry_run: bool, db: Path, json_: bool) -> int:  # fmt: skip
    """Measure ARTIFACT on the NPU, the GPU and the CPU of phones: where is each part fastest, and right?

    The NPU runs a context binary made here; for the others AI Hub compiles the ONNX graph to TFLite or ONNX.
    """
    from exporters.aihub.plan import Request
    from exporters.aihub.plan import targets as checked

    request = Request(devices, layers, checked(targets), iterations, db=str(db))
    return send(artifact, request, again, dry_run, json_, table="place")


def send(artifact: Path, request: Request, again: bool, dry_run: bool, json_: bool, table: str) -> int:
    """Carry a request out, or say what that would send."""
    from exporters.aihub.parts import opened
    from exporters.aihub.plan import next_repeat, plan
    from exporters.aihub.run import carry_out
    from exporters.aihub.show import lint_of, print_placement, print_results, print_sending, report, sending
    from ringstep.contract import StepSpec
    from ringstep.profiling.ledger import Ledger, is_past

    with opened(artifact, writing=True) as manifest:
        ledger = Ledger(manifest)
        if again:
            request = dataclasses.replace(request, repeat=next_repeat(ledger, request))
        if dry_run:
            planned = plan(manifest, StepSpec.load(artifact), request)
            known = {sha for sha, upload in ledger.uploads.items() if upload.id and not is_past(upload.expires)}
            known |= {key for key, job in ledger.jobs.items() if job.id}
            entries = sending(planned, known)
            if json_:
                findings = {f"{c.part.subject} {c.device.chip.name}": lint_of(c) for c in planned.chains}
                console.print_json({"lint": findings, "would_send": entries})
            else:
                print_sending(planned, entries)
            return 0
        results = carry_out(manifest, request)
    return report(results, json_, print_placement if table == "place" else print_results)

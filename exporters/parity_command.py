"""`ringstep parity`: an artifact against the original, by one engine, by all stages, over long texts; or the gate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from exporters import completion as offered
from exporters.show import print_positions, print_reports
from ringstep import completion, console
from ringstep.errors import RingstepError
from ringstep.options import as_json, common

# opening.NAMES, without its imports.
STAGES = ("original", "recipe", "onnx", "sanitised", "quantised", "compiled", "executorch")
GATE_OPTIONS = ("artifact", "update_baseline", "only", "json_", "quiet", "verbose")


def parse_finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A number that can be compared: with nan every comparison would pass."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


@click.command(short_help="Compare ARTIFACT with the original; without it, run the gate.")
@click.argument("artifact", type=click.Path(path_type=Path), required=False)
@click.option("--engine", type=click.Choice(["ort", "qnn-sim", "executorch"]),
              help="ort: ONNX Runtime on the CPU (the default). qnn-sim: Qualcomm's HTP simulator. "
              "executorch: its runtime. --stages runs what there is unless told ort.")  # fmt: skip
@click.option("--model", shell_complete=completion.model,
              help="The original, when it is no longer where the export found it.")  # fmt: skip
@click.option("--golden", type=click.Path(path_type=Path),
              help="Compare with what ringstep reference recorded; needs no original.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1), help="Length of the text. Default: 200, or two windows.")
@click.option("--prompt", help="Let the engine answer this and compare the answers.")
@click.option("--min-db", type=float, callback=parse_finite, help="Fail below this logits SNR. Default: by precision.")
@click.option("--windows", type=click.Choice(["off", "fast", "full"]), help="How much of the window gate to run. "
              "Default: fast, off on the simulator.")  # fmt: skip
@click.option("--stages", is_flag=True, help="All stages of the export side by side; ARTIFACT may be a folder of them.")
@click.option("--against", type=click.Choice(STAGES), help="With --stages: hold what follows this stage against it.")
@click.option("--layers", is_flag=True, help="With --stages: every layer's cache entries.")
@click.option("--blocks", is_flag=True, help="Every layer and the head by itself against ONNX Runtime, over one chunk: "
              "needs the memory of one block.")  # fmt: skip
@click.option("--drift", is_flag=True, help="Generate --tokens (default: 300): does it leave the original in time?")
@click.option("--positions", is_flag=True, help="Show every position and every cache.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the result as one HTML file too.")
@click.option("--update-baseline", is_flag=True, help="Of the gate: show what has changed, then write its baseline.")
@click.option("--only", multiple=True, metavar="NAME", shell_complete=offered.gated,
              help="Of the gate: this tiny model (can be repeated).")  # fmt: skip
@as_json
@common
@click.pass_context
def parity(context: click.Context, artifact: Path | None, html: Path | None, windows: Any, blocks: bool,
           update_baseline: bool, only: tuple[str, ...], **options: Any) -> int:  # fmt: skip
    """Compare ARTIFACT with the original: SNR, tokens, caches, windows. Leaves with 1 when it fails.

    Without ARTIFACT it is the gate: tiny models of every recipe through precisions and engines, against thresholds
    and the baseline in artifacts/baselines/parity.json.
    """
    if artifact is None:
        from exporters.gate_command import gate

        default = click.core.ParameterSource.DEFAULT
        for name in context.params:
            if name not in GATE_OPTIONS and context.get_parameter_source(name) is not default:
                raise RingstepError(f"--{name.replace('_', '-')}: is about an artifact; name its folder")
        return gate(update_baseline, only, options["json_"])
    if update_baseline or only:
        raise RingstepError("--update-baseline and --only are about the gate; leave the artifact out")
    if blocks:
        default = click.core.ParameterSource.DEFAULT
        for name in context.params:
            known = name in ("artifact", "blocks", "engine", "json_", "quiet", "verbose")
            if not known and context.get_parameter_source(name) is not default:
                raise RingstepError(f"--blocks: takes --engine and --json, not --{name.replace('_', '-')}")
        return run_blocks(artifact, options["engine"] or "qnn-sim", options["json_"])
    from exporters.parity_runs import Asked, golden_reports, run_more

    asked = Asked(artifact, **options)
    alone = {"--html": html, "--windows": windows}
    if (asked.stages or asked.against or asked.drift) and (given := [name for name, value in alone.items() if value]):
        raise RingstepError(f"{given[0]}: goes with the proof of one engine; ringstep report shows stages and drift")
    passed = run_more(asked)
    if passed is not None:
        return 0 if passed else console.GATE_FAILED
    if asked.golden and windows:
        raise RingstepError("--windows: needs the original, which a golden stands in for; leave one of them out")
    reports = golden_reports(asked) if asked.golden else engine_reports(asked, windows)
    if html:
        from exporters.report_html.page import parity_report, write

        write(html, parity_report(artifact, reports))
        console.say(f"{html} written")
    if asked.json_:
        console.print_json(reports)
    else:
        print_reports(reports)
        if asked.positions:
            print_positions(reports[0])
    return 0 if all(r["summary"]["passed"] for r in reports) else console.GATE_FAILED


def run_blocks(artifact: Path, engine: str, json_: bool) -> int:
    """Every block by itself, over the artifact's largest chunk."""
    from exporters.block_parity import block_parity, print_blocks
    from ringstep.contract import StepSpec

    if engine == "executorch":
        raise RingstepError("--blocks: ort or qnn-sim; a .pte is one program")
    spec = StepSpec.load(artifact)
    with console.progress("each block by itself", len(spec.caches) + 1) as tick:
        report = block_parity(artifact, engine, max(graph.n for graph in spec.graphs), tick)
    (console.print_json if json_ else print_blocks)(report)
    return 0 if report["passed"] else console.GATE_FAILED


def engine_reports(asked: Any, windows: Any) -> list[dict[str, Any]]:
    """One engine held against the original."""
    from exporters.artifact import checkpoint_of
    from ringstep.contract import StepSpec
    from ringstep.text import Text

    spec = StepSpec.load(asked.artifact)
    if asked.tokens and asked.prompt:
        raise RingstepError("--tokens and --prompt: a proof takes one of them")
    if asked.prompt and not Text(asked.artifact).template:
        raise RingstepError(f"--prompt: {asked.artifact} has no chat template; leave it out to compare a text")
    if asked.tokens and asked.tokens > spec.context:
        raise RingstepError(f"--tokens {asked.tokens}: must lie in 1..{spec.context}, the artifact's context")
    checkpoint = checkpoint_of(asked.artifact, asked.model)
    from exporters.prove import prove  # torch and transformers are waited for when all that was given is right

    return prove(asked.artifact, checkpoint, {asked.engine or "ort": asked.prompt}, tokens=asked.tokens,
                 threshold_db=asked.min_db, windows=windows)  # fmt: skip

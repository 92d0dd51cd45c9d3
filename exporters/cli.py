"""The ringstep command. Everything heavy is imported inside the commands, so that --help answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from exporters import completion as offered
from exporters.aihub.command import place, profile
from exporters.aihub.jobs_command import jobs
from exporters.bisect_command import bisect
from exporters.compose_command import compose
from exporters.options import calibration_options, size_options
from exporters.parity_command import parity
from exporters.plan_command import plan
from exporters.quantize_command import quantize, schemes
from exporters.reference_command import reference
from exporters.report_command import report
from exporters.show import finish, show_manifest
from ringstep import __version__, completion, console
from ringstep.devices_command import devices
from ringstep.errors import RingstepError, did_you_mean
from ringstep.options import as_json, common, engine_option
from ringstep.profiling.command import profiles
from ringstep.qairt_command import fetch_qairt
from sanitize.command import sanitize
from sanitize.lint_command import lint
from sanitize.ops.command import ops

LAYOUTS = ("ring", "roll", "append", "join")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ringstep")
@click.option("-v", "--verbose", is_flag=True, help="Show each stage's time and memory, and tracebacks of errors.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def cli(verbose: bool, quiet: bool) -> None:
    """From a language model checkpoint to a phone's NPU, proven equal at every stage."""
    console.settings.verbose |= verbose
    console.settings.quiet |= quiet


def parse_layout(context: click.Context, parameter: click.Parameter, value: str) -> dict[str, Any]:
    """`auto`, one layout for all layers, or KIND=LAYOUT pairs."""
    if value == "auto":
        return {}
    pairs = {kind or "*": layout for kind, _, layout in (p.rpartition("=") for p in value.split(","))}
    for layout in pairs.values():
        if layout not in LAYOUTS:
            raise click.BadParameter(f"{layout!r} is none of auto, {', '.join(LAYOUTS)}{did_you_mean(layout, LAYOUTS)}")
    return pairs


@cli.command(short_help="Export MODEL for a device and prove the result.")
@click.argument("model", shell_complete=completion.model)
@click.option("--device", metavar="NAME", shell_complete=completion.device,
              help="Phone or chip, such as galaxy-s25 (see ringstep devices).")  # fmt: skip
@click.option("--format", "format_", type=click.Choice(["onnx", "qnn", "executorch"]), default="qnn",
              show_default=True, help="onnx: ONNX graphs alone. qnn: those, and a context binary for the device. "
              "executorch: those, and a .pte.")  # fmt: skip
@click.option("--backend", type=click.Choice(["xnnpack", "qnn"]), help="Of executorch: what the .pte is lowered to, "
              "xnnpack for CPUs, qnn for the NPU. Default: qnn with --device, else xnnpack.")  # fmt: skip
@click.option("--method", metavar="NAME[=N,...]", help="Of executorch: one module of the model with fixed shapes, such "
              "as head, a .pte for each chunk size N. Default sizes: 1 and --chunk.")  # fmt: skip
@click.option("--precision", metavar="NAME", shell_complete=offered.precision,
              help="fp32, fp16, or a quantisation scheme such as w8a16 (see ringstep schemes); of XNNPACK also 8da4w. "
              "Default: fp16 for the NPU, fp32 for CPUs.")  # fmt: skip
@click.option("--scheme", type=click.Path(path_type=Path), help="A quantisation scheme of your own, a .toml file.")
@calibration_options
@size_options
@click.option("--out", type=click.Path(path_type=Path), help="Default: artifacts/MODEL-DEVICE-PRECISION.")
@click.option("--activations", type=click.Choice(["accurate", "native"]),
              help="accurate: forms that HTP computes right in fp16 (the default there).")  # fmt: skip
@click.option("--gelu", type=click.Choice(["auto", "exact", "tanh", "sigmoid"]), default="auto", show_default=True,
              help="GELU's form; auto is the one the model was trained with.")  # fmt: skip
@click.option("--layout", callback=parse_layout, default="auto", show_default=True,
              help="Cache layout: ring, roll, append, join, or by kind: sliding=ring,full=append.")  # fmt: skip
@click.option("--embedding", type=click.Choice(["outside", "inside"]), default="outside", show_default=True,
              help="outside: the host looks rows up in embedding.bin.")  # fmt: skip
@click.option("--max-part-mb", type=click.IntRange(1), default=1024, show_default=True,
              help="Weights in one QNN graph; larger models are split by layers.")  # fmt: skip
@click.option("--parity/--no-parity", default=True, show_default=True, help="Prove the result against the original.")
@click.option("--prompt", default="What is the capital of France?", show_default=True,
              help="What the simulator answers in the proof.")  # fmt: skip
@click.option("--revision", help="Revision of a Hub model.")
@as_json
@common
def export(model: str, device: str | None, format_: Any, backend: Any, method: str | None, precision: str | None,
           scheme: Path | None, calibration: Path | None, calibration_tokens: int, sink_prefix: Any,
           context: int | None, chunk: int, out: Path | None, activations: Any, gelu: Any, layout: dict[str, Any],
           embedding: Any, max_part_mb: int, parity: bool, prompt: str, revision: str | None,
           json_: bool) -> int:  # fmt: skip
    """Export MODEL (a Hugging Face folder, a GGUF file, a Hub id, or smollm2-135m) and prove the result.

    A repeated export redoes only what changed; a killed one resumes. Leaves with 1 when the proof fails.
    """
    from exporters.job import Job
    from exporters.line import Line

    job = Job(model=model, out=out or Path(), format=format_, backend=backend, method=method,
              device=device, precision=precision, scheme=scheme,
              calibration=calibration, calibration_tokens=calibration_tokens, sink_prefix=sink_prefix,
              context=context, chunk=chunk, layout=layout, activations=activations, gelu=gelu, embedding=embedding,
              part_bytes=max_part_mb << 20, parity=parity, prompt=prompt, revision=revision)  # fmt: skip
    line = Line(job, default_out=out is None)
    manifest = line.run()
    body = show_manifest(manifest) | {"redone": line.redone}
    finish(body, json_)
    return 0 if body["passed"] is not False else console.GATE_FAILED


@cli.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="What to answer.")
@engine_option
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Stop after so many tokens.")
@click.option("--raw", is_flag=True, help="Plain text, without the chat template.")
@as_json
@common
def generate(artifact: Path, prompt: str, engine: str, max_tokens: int, raw: bool, json_: bool) -> int:
    """Answer a prompt greedily with ARTIFACT."""
    import time

    from ringstep.contract import StepSpec
    from ringstep.parity.report import stream
    from ringstep.session import DecodeSession, is_simulated
    from ringstep.text import Text

    spec = StepSpec.load(artifact)
    context = spec.context
    text = Text(artifact)
    ids = text.encode(prompt) if raw else text.chat(prompt)
    prefix = spec.prefix.ids if spec.prefix else ()
    if ids and tuple(ids[: len(prefix)]) != prefix:
        ids = [*prefix, *ids]  # what every text of this artifact begins with
    if not ids:
        raise RingstepError("--prompt: there is nothing in it to answer")
    if len(ids) >= context:
        raise RingstepError(
            f"the prompt has {len(ids)} tokens, the artifact's context is {context}: shorten it, or export with a "
            "larger --context"
        )
    with DecodeSession.open(artifact, engine) as session:
        answer: list[int] = []
        shown, first, start = "", 0.0, time.perf_counter()
        for token, _ in stream(session, ids, max_tokens, session.spec.eos):
            first = first or time.perf_counter() - start
            answer.append(token)
            whole = text.decode(answer)
            # An unfinished character decodes to U+FFFD: hold it back until the rest is there.
            if not json_ and not whole.endswith("�"):
                print(whole[len(shown) :], end="", flush=True)
                shown = whole
        seconds = time.perf_counter() - start - first
    simulated = is_simulated(spec, engine)
    if json_:
        console.print_json({"text": text.decode(answer), "ids": answer, "prompt_tokens": len(ids), "engine": engine,
                            "simulated": simulated,
                            "first_token_seconds": first, "decode_seconds": seconds})  # fmt: skip
    else:
        print()
        rate = f"{(len(answer) - 1) / seconds:.1f} tokens/s" if len(answer) > 1 else ""
        note = "simulated, no phone's time" if simulated else rate
        console.say(f"{len(ids)} + {len(answer)} tokens on {engine} ({note})")
    return 0


@cli.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@as_json
@common
def inspect(artifact: Path, json_: bool) -> int:
    """Show ARTIFACT's inputs, caches, files, and KV bytes by context; of a .pte its methods, delegates and kernels."""
    from exporters.inspect import describe, describe_pte, print_description, print_pte

    if (artifact / "modules.json").exists() and not (artifact / "step.json").exists():
        from exporters.executorch.module import read_modules
        from exporters.show import print_module

        modules = read_modules(artifact)
        (console.print_json if json_ else print_module)(modules)
        return 0
    single = artifact.suffix == ".pte" and not artifact.is_dir()
    body = describe_pte(artifact) if single else describe(artifact)
    if json_:
        console.print_json(body)
    else:
        (print_pte if single else print_description)(body)
    return 0


cli.add_command(parity)
cli.add_command(reference)
cli.add_command(report)
cli.add_command(profile)
cli.add_command(place)
cli.add_command(jobs)
cli.add_command(bisect)
cli.add_command(quantize)
cli.add_command(schemes)
cli.add_command(sanitize)
cli.add_command(lint)
cli.add_command(ops)
cli.add_command(devices)
cli.add_command(fetch_qairt)
cli.add_command(profiles)
profiles.add_command(compose)
cli.add_command(plan)


@cli.command()
@as_json
@common
def recipes(json_: bool) -> int:
    """List architectures."""
    from recipes import MODEL_TYPES, SUMMARIES

    rows = [{"recipe": name, "model_types": [m for m, r in MODEL_TYPES.items() if r == name], "summary": text}
            for name, text in SUMMARIES.items()]  # fmt: skip
    if json_:
        console.print_json(rows)
    else:
        console.table("", ["recipe", "model_type", ""],
                      [(r["recipe"], ", ".join(r["model_types"]), r["summary"]) for r in rows])  # fmt: skip
    return 0


def main() -> None:
    """Entry point."""
    sys.exit(console.run(cli))


if __name__ == "__main__":
    main()

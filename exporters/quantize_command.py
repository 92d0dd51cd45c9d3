"""`ringstep quantize` and `ringstep schemes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from exporters import completion as offered
from exporters.options import calibration_options, size_options
from exporters.show import finish, show_manifest
from ringstep import completion, console
from ringstep.errors import RingstepError, did_you_mean
from ringstep.options import as_json, common


def parse_formats(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Names of formats, each given alone or several between commas."""
    from exporters.job import FORMATS

    names = [name.strip() for value in values for name in value.split(",")]
    for name in names:
        if name not in FORMATS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    return tuple(dict.fromkeys(names))


@click.command(short_help="Quantise MODEL and write its weights in one or several formats.")
@click.argument("model", shell_complete=completion.model)
@click.option("--scheme", required=True, metavar="NAME|FILE", shell_complete=offered.scheme_or_file,
              help="A preset (see ringstep schemes), or a .toml file of your own.")  # fmt: skip
@click.option("--device", metavar="NAME", shell_complete=completion.device,
              help="Phone or chip whose NPU the graphs are for (see ringstep devices).")  # fmt: skip
@click.option("--format", "formats", multiple=True, callback=parse_formats, metavar="NAME",
              shell_complete=offered.format_,
              help="qdq, gptq, matmulnbits, encodings or genie-table; several times, or a,b. "
              "Default: qdq, or matmulnbits for a scheme of weights alone.")  # fmt: skip
@calibration_options
@size_options
@click.option("--out", type=click.Path(path_type=Path), help="Default: artifacts/MODEL-DEVICE-SCHEME, as for export.")
@click.option("--revision", help="Revision of a Hub model.")
@as_json
@common
def quantize(model: str, scheme: str, device: str | None, formats: tuple[str, ...], calibration: Path | None,
             calibration_tokens: int, sink_prefix: Any, context: int | None, chunk: int, out: Path | None,
             revision: str | None, json_: bool) -> int:  # fmt: skip
    """Quantise MODEL: calibrate, round, and write the weights in every format asked for, rounded once.

    Nothing is compiled or proven: `ringstep export` with the same scheme and folder goes on from here.
    """
    from exporters.job import Job
    from exporters.line import Line

    job = Job(model=model, out=out or Path(), format="onnx", device=device, scheme=scheme, calibration=calibration,
              calibration_tokens=calibration_tokens, sink_prefix=sink_prefix, context=context, chunk=chunk,
              parity=False, revision=revision, formats=formats)  # fmt: skip
    line = Line(job, default_out=out is None)
    if line.scheme is None:
        raise RingstepError(f"scheme {scheme} quantises nothing; use ringstep export --precision fp16")
    finish(show_manifest(line.run()) | {"redone": line.redone}, json_)
    return 0


@click.command(short_help="List quantisation schemes, or print one as a file.")
@click.argument("name", required=False, shell_complete=offered.scheme)
@as_json
@common
def schemes(name: str | None, json_: bool) -> int:
    """List the quantisation schemes that ship with ringstep, or print NAME's file, to change and give to --scheme."""
    from quantize.scheme import describe
    from quantize.scheme_file import load_scheme, preset_text, presets

    if name is not None:
        if json_:
            console.print_json(describe(load_scheme(name)))
        else:
            print(preset_text(name), end="")
        return 0
    found = [load_scheme(preset) for preset in presets()]
    if json_:
        console.print_json([describe(scheme) for scheme in found])
    else:
        console.table("", ["scheme", ""], [(scheme.name, scheme.description) for scheme in found])
    return 0

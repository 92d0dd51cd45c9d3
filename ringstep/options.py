"""Options that several commands share."""

from __future__ import annotations

from typing import Any

import click

from ringstep import console

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON instead of tables.")

engine_option = click.option(
    "--engine", type=click.Choice(["ort", "qnn-sim", "executorch"]), default="ort", show_default=True,
    help="ort: ONNX Runtime on the CPU. qnn-sim: Qualcomm's HTP simulator. executorch: ExecuTorch's runtime.",
)  # fmt: skip


def common(command: Any) -> Any:
    """-v and -q after the command's name too, where people type them."""

    def set_flag(name: str) -> Any:
        def callback(context: click.Context, parameter: click.Parameter, value: bool) -> None:
            if value:
                setattr(console.settings, name, True)

        return callback

    verbose = click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=set_flag("verbose"),
                           help="Show each stage's time and memory, and tracebacks of errors.")  # fmt: skip
    quiet = click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=set_flag("quiet"),
                         help="No progress.")  # fmt: skip
    return verbose(quiet(command))

"""`ringstep report`: one HTML file about an artifact, or about a folder of them."""

from __future__ import annotations

from pathlib import Path

import click

from ringstep import console
from ringstep.options import as_json, common


@click.command(short_help="Put what is known of an artifact on one HTML page.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: DIR/report.html.")
@as_json
@common
def report(folder: Path, output: Path | None, json_: bool) -> int:
    """Write what is known of DIR, an artifact or a folder of artifacts, as one HTML file without outside requests."""
    from exporters.report_html.page import FILE, report_of, write

    found = report_of(folder)
    path = output or folder / FILE
    write(path, found.html)
    if json_:
        console.print_json({"file": str(path), "bytes": len(found.html.encode()), "artifacts": found.artifacts,
                            "charts": found.charts, "problems": found.problems})  # fmt: skip
        return 0
    for artifact, lines in found.problems.items():
        for line in lines:
            console.warn(f"{artifact}: {line}")
    many = f"{len(found.artifacts)} artifact{'s' * (len(found.artifacts) > 1)}, {found.charts} charts"
    console.line(f"{path}: {many}, {console.human_bytes(len(found.html.encode()))}")
    return 0

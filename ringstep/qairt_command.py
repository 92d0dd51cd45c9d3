"""`ringstep fetch-qairt`."""

from __future__ import annotations

from pathlib import Path

import click

from ringstep import console
from ringstep.options import common


@click.command(name="fetch-qairt", short_help="Fetch Qualcomm's libraries for ExecuTorch's QNN backend.")
@click.option("--wheel", type=click.Path(path_type=Path), help="The wheel, where pip cannot reach an index.")
@common
def fetch_qairt(wheel: Path | None) -> int:
    """Put Qualcomm's libraries for --format executorch --backend qnn into the cache.

    They come in the wheel of onnxruntime-qnn 2.5.0 (90 MB, its sha256 is checked), which pip downloads and nothing
    installs. Not needed where QNN_SDK_ROOT names an SDK.
    """
    from ringstep import qairt

    with console.progress("fetching Qualcomm's libraries"):
        root = qairt.fetch(wheel)
    console.line(str(root))
    return 0

"""Options that `ringstep export` and `ringstep quantize` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def calibration_options(command: Any) -> Any:
    """--calibration, --calibration-tokens and --sink-prefix."""
    text = click.option("--calibration", type=click.Path(path_type=Path),
                        help="Text to calibrate with, .txt or .jsonl. Default: what ships with ringstep.")  # fmt: skip
    tokens = click.option("--calibration-tokens", type=click.IntRange(1), default=16384, show_default=True,
                          help="How much text calibration reads.")  # fmt: skip
    sink = click.option("--sink-prefix", type=click.Choice(["auto", "off"]),
                        help="Keep the first token's keys and values in float where it carries massive activations. "
                        "Default: as the scheme says.")  # fmt: skip
    return text(tokens(sink(command)))


def size_options(command: Any) -> Any:
    """--context and --chunk."""
    context = click.option("--context", type=int, metavar="N",
                           help="Tokens the caches hold. Default: 1024, or the model's limit.")  # fmt: skip
    chunk = click.option("--chunk", type=int, metavar="N", default=1, show_default=True,
                         help="Also export a prefill graph of N tokens.")  # fmt: skip
    return context(chunk(command))

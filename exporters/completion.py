"""What Tab offers for the names of schemes, formats and the gate's models."""

from __future__ import annotations

from ringstep.completion import listed, names


def scheme_names() -> list[str]:
    """The presets."""
    from quantize.scheme_file import presets

    return presets()


def precision_names() -> list[str]:
    """What --precision of an export takes."""
    from exporters.job import XNNPACK

    return list(dict.fromkeys(["fp32", "fp16", *scheme_names(), *XNNPACK]))


def format_names() -> tuple[str, ...]:
    """What --format of `ringstep quantize` takes."""
    from exporters.job import FORMATS

    return FORMATS


def gated_names() -> tuple[str, ...]:
    """The tiny models of the gate."""
    from exporters.tiny import GATED

    return GATED


scheme = names(scheme_names)
scheme_or_file = names(scheme_names, files=True)
precision = names(precision_names)
format_ = listed(format_names)
gated = names(gated_names)

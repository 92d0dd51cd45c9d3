"""What Tab offers for the names of targets, passes and layouts."""

from __future__ import annotations

from ringstep.completion import names


def target_names() -> tuple[str, ...]:
    """What ONNX models are made fit for."""
    from sanitize.target import TARGETS

    return TARGETS


def pass_names() -> list[str]:
    """The passes that always run."""
    from sanitize.order import PASSES

    return [p.name for p in PASSES]


def layout_names() -> list[str]:
    """The layouts that are off by default."""
    from sanitize.order import LAYOUTS

    return [p.name for p in LAYOUTS]


target = names(target_names)
pass_ = names(pass_names)
layout = names(layout_names)

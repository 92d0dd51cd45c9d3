"""One file a pass. A pass changes the model it is given and returns what it changed; a second run returns nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from sanitize.target import Target


@dataclass(frozen=True)
class Change:
    """One thing that a pass did."""

    node: str
    """The node (or tensor) it was done to, by its name before."""
    what: str
    """One clause, such as "NaN guard removed"."""


@dataclass(frozen=True)
class Pass:
    """A pass as the table in order.py lists it."""

    name: str
    """With dashes, as --skip takes it."""
    about: str
    """What it does, in one line."""
    run: Callable[[ir.Model, Target], list[Change]]
    min_db: float = math.inf
    """Outputs before and after agree to this SNR in float32; inf: bit for bit."""

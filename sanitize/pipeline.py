"""Run the passes of order.py over a model until none changes anything."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target

ROUNDS = 8


@dataclass(frozen=True)
class Applied:
    """What one pass did to a model, over all rounds."""

    name: str
    changes: tuple[Change, ...]
    seconds: float
    min_db: float
    """What the pass promises; inf where it changed nothing."""


@graphs.no_collection()
def sanitize(
    model: ir.Model, target: Target, passes: Sequence[Pass], tell: Callable[[str], None] = lambda _: None
) -> list[Applied]:
    """Change `model` in place; returns what each pass did. `tell` hears the pass that starts.

    Raises RingstepError where a pass cannot do its work (it names the node), and when passes undo each other.
    """
    changes: dict[str, list[Change]] = {p.name: [] for p in passes}
    seconds = dict.fromkeys(changes, 0.0)
    latest: list[str] = []
    for _ in range(ROUNDS):
        latest = []
        for p in passes:
            tell(p.name)
            start = time.perf_counter()
            try:
                made = p.run(model, target)
            except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
                # Types that no operator takes (float indices) and their like; wellformed.py has caught the rest.
                what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise RingstepError(f"the pass {p.name} trips over this model ({what}); does it run in ONNX Runtime? "
                                    f"--skip {p.name} leaves the pass out") from error  # fmt: skip
            seconds[p.name] += time.perf_counter() - start
            if made:
                changes[p.name] += made
                latest.append(p.name)
        if not latest:
            break
        graphs.infer_types(model)
    else:
        raise RingstepError(f"the passes {', '.join(latest)} undo each other; leave one out with --skip")
    model.graph.sort()
    kept = lambda p: p.min_db if changes[p.name] else math.inf
    return [Applied(p.name, tuple(changes[p.name]), round(seconds[p.name], 4), kept(p)) for p in passes]


def promised(applied: Sequence[Applied]) -> float:
    """The SNR in dB that outputs keep in float32 after all of this: each change may add noise, and their powers add up.

    inf: bit for bit.
    """
    noise = sum(len(each.changes) * 10.0 ** (-each.min_db / 10.0) for each in applied)
    return -10.0 * math.log10(noise) if noise else math.inf

"""What a user should know of a calibration: tensors it never moved, and values that the encodings cut off."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from quantize.activations import Activation, masks
from quantize.calibrate import constant
from quantize.observe import BINS, Seen
from ringstep.contract import INTEGERS

CLIPPED = 0.01  # the share of a tensor's values outside its range from which a user is told


def outside(seen: Seen, own: Activation) -> float:
    """The share of the values seen that an activation's range cuts off; a bin that its end lies in counts as kept."""
    total = seen.counts.sum()
    if not total:
        return 0.0
    low, high = (own.encoding.scale * (bound - own.encoding.zero) for bound in INTEGERS[own.dtype])
    width = 2 * seen.edge / BINS
    centres = seen.centres
    return float(seen.counts[(centres + width / 2 < low) | (centres - width / 2 > high)].sum() / total)


def clipped(graph: ir.Graph, seen: Mapping[str, Seen], activations: Mapping[str, Activation | None],
            ) -> dict[str, float]:  # fmt: skip
    """The share cut off of each tensor that loses more than CLIPPED; masked scores, which ought to, do not count."""
    masked = {str(node.outputs[0].name) for node in graph if masks(node)}
    known = {name: own for name, own in activations.items() if own and name in seen and name not in masked}
    shares = {name: outside(seen[name], own) for name, own in known.items()}
    return {name: share for name, share in shares.items() if share > CLIPPED}


def warnings(seen: Mapping[str, Seen], cut: Mapping[str, float]) -> list[str]:
    """One line for each kind of fault, the tensors counted and the first of them named."""
    found = []
    if fixed := constant(seen):
        value = f"{seen[fixed[0]].low:.3g}"
        found.append(f"{_count(fixed)} had one value throughout calibration ({fixed[0]}: {value}); is the text varied?")
    if cut:
        worst = max(cut, key=lambda name: cut[name])
        found.append(
            f"{_count(list(cut))} lose more than {100 * CLIPPED:.0f} % of their values to clipping "
            f"({worst}: {100 * cut[worst]:.1f} %); min-max keeps them ([activations.ranges])"
        )
    if broken := [name for name, own in seen.items() if not np.isfinite([own.low, own.high]).all()]:
        found.append(f"{_count(broken)} had values that are not finite ({broken[0]})")
    return found


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"

"""Give dynamic dims their size: `batch` and `sequence` of an export with dynamic axes become numbers everywhere."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ringstep.errors import RingstepError, did_you_mean
from sanitize import graph as graphs
from sanitize.passes import Change


def fix_dims(model: ir.Model, sizes: Mapping[str, int]) -> list[Change]:
    """Set every dim of these names in the inputs, and infer all shapes anew.

    Raises RingstepError for a name that no input has.
    """
    if not sizes:
        return []
    changes, seen = [], set()
    for value in model.graph.inputs:
        if value.shape is None:
            continue
        fixed = [sizes.get(str(dim.value), dim) if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape]
        seen |= {str(dim.value) for dim in value.shape if isinstance(dim, ir.SymbolicDim)}
        if fixed != list(value.shape):
            value.shape = ir.Shape(fixed)
            changes.append(Change(str(value.name), f"shape fixed to [{', '.join(map(_text, fixed))}]"))
    if unknown := [name for name in sizes if name not in seen]:
        found = f"the inputs have {', '.join(sorted(seen))}" if seen else "no input has a dynamic dim"
        raise RingstepError(f"--dim {unknown[0]}: no such dim{did_you_mean(unknown[0], seen)}; {found}")
    for node in graphs.every_node(model):
        for value in node.outputs:
            # What was inferred with the names in place would stay as it is.
            if value.shape is not None and not value.shape.is_static():
                value.shape = None
    graphs.infer_types(model)
    return changes


def _text(dim: object) -> str:
    return str(dim.value) if isinstance(dim, ir.SymbolicDim) else str(dim)


def parse_dims(pairs: tuple[str, ...]) -> dict[str, int]:
    """NAME=SIZE pairs of the command line. Raises RingstepError."""
    sizes = {}
    for pair in pairs:
        name, equals, size = pair.rpartition("=")
        if not equals or not size.isascii() or not size.isdigit() or not 0 < int(size) < 1 << 31:
            raise RingstepError(f"--dim {pair}: want NAME=SIZE, such as batch=1")
        sizes[name] = int(size)
    return sizes

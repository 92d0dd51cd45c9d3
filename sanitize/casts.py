"""Casts that change nothing, and casts around what HTP refuses (bools in places) or gets wrong (uint8 to float)."""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change

D = ir.DataType
BOOL_DATA = {"Equal": (0, 1), "Where": (1, 2), "Pad": (0, 2), "ReduceMax": (0,), "ReduceMin": (0,),
             "GatherND": (0,), "ScatterElements": (0, 2)}  # fmt: skip
"""Operators that HTP refuses on bools, with the inputs that hold them."""
THROUGH_FLOAT = ("Pad", "GatherND")
"""Those that it refuses in int32 too, or takes and does not compute (sanitize/support)."""
BITS = {D.FLOAT16: (11, 5), D.BFLOAT16: (8, 8), D.FLOAT: (24, 8), D.DOUBLE: (53, 11)}
"""Bits of the significand and of the exponent."""
INTEGERS = {D.INT8: (7, 1), D.INT16: (15, 1), D.INT32: (31, 1), D.INT64: (63, 1), D.UINT8: (8, 0),
            D.UINT16: (16, 0), D.UINT32: (32, 0), D.UINT64: (64, 0), D.BOOL: (1, 0)}  # fmt: skip
"""Bits of the magnitude, and whether there is a sign."""

SMALL = (D.UINT8, D.INT16)
"""HTP casts uint8 to float32 as if it were bool (1 for all but 0, simulated) and refuses int16."""


def widen_small(model: ir.Model) -> list[Change]:
    """Cast small integers to int32 before they become float."""
    changes = []
    for node in graphs.every_node(model):
        if node.op_type != "Cast" or node.outputs[0].dtype not in BITS:
            continue
        value = node.inputs[0]
        if value is not None and value.dtype in SMALL:
            name = f"{node.name or 'Cast'}/int32"
            wide = graphs.insert(node, "Cast", [value], {"to": D.INT32}, name=name, like=value, dtype=D.INT32)
            node.replace_input_with(0, wide)
            changes.append(Change(node.name or "Cast", f"cast of {value.dtype.name.lower()} taken through int32"))
    return changes


def free_bools(model: ir.Model) -> list[Change]:
    """Take the operators that HTP refuses on bools through a type that it takes."""
    changes = []
    for node in graphs.every_node(model):
        graph, slots = node.graph, BOOL_DATA.get(node.op_type, ())
        data = [i for i in slots if i < len(node.inputs) and node.inputs[i] is not None]
        assert isinstance(graph, ir.Graph)
        if not data or any(node.inputs[i].dtype != D.BOOL for i in data):  # type: ignore[union-attr]
            continue
        kind = D.FLOAT if node.op_type in THROUGH_FLOAT else D.INT32
        for i in data:
            value, name = node.inputs[i], f"{node.name or node.op_type}/{kind.name.lower()}"
            wide = graphs.insert(node, "Cast", [value], {"to": kind}, name=name, like=value, dtype=kind)
            node.replace_input_with(i, wide)
        if node.op_type != "Equal":
            old = node.outputs[0]
            back = ir.node("Cast", [old], {"to": D.BOOL}, name=graphs.unique_name(graph, f"{node.name}/bool"))
            back.outputs[0].name = graphs.unique_name(graph, f"{node.name}/bool_output")
            back.outputs[0].dtype, back.outputs[0].shape = D.BOOL, old.shape
            graph.insert_after(node, back)
            graphs.replace(old, back.outputs[0])
            back.replace_input_with(0, old)
            old.dtype = kind
        changes.append(Change(node.name or node.op_type, f"{node.op_type} on bools taken through {kind.name.lower()}"))
    return changes


def collapse(model: ir.Model, htp: bool) -> list[Change]:
    """Read past casts that lose nothing; remove casts to the type a value has. `htp`: keep those of widen_small."""
    changes = []
    for node in graphs.every_node(model):
        if node.op_type != "Cast" or node.domain not in ("", "ai.onnx") or node.inputs[0] is None:
            continue
        first = graphs.made_by(node.inputs[0], "Cast")
        source = first.inputs[0] if first is not None else None
        detour = source is not None and htp and source.dtype in SMALL and node.outputs[0].dtype in BITS
        if first is not None and source is not None and not detour and holds(source.dtype, node.inputs[0].dtype):
            node.replace_input_with(0, source)
            changes.append(Change(node.name or "Cast", "cast chain collapsed"))
            graphs.prune(first.outputs[0])
        if node.inputs[0].dtype == node.outputs[0].dtype is not None and node.graph is not None:
            changes.append(Change(node.name or "Cast", "cast to its own type removed"))
            graphs.swap(node, node.inputs[0])
    return changes


def holds(narrow: ir.DataType | None, wide: ir.DataType | None) -> bool:
    """Whether every value of the first type is one of the second."""
    if narrow is None or wide is None:
        return False
    if narrow == wide:
        return narrow in BITS or narrow in INTEGERS
    if wide == D.BOOL:
        return False
    if narrow in BITS and wide in BITS:
        return all(a <= b for a, b in zip(BITS[narrow], BITS[wide], strict=True))
    if narrow in INTEGERS and wide in BITS:
        return INTEGERS[narrow][0] <= BITS[wide][0]
    if narrow in INTEGERS and wide in INTEGERS:
        return INTEGERS[narrow][0] <= INTEGERS[wide][0] and INTEGERS[narrow][1] <= INTEGERS[wide][1]
    return False

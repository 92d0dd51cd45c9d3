"""Cache inputs and outputs: what one step writes, the next one reads.

Names are those of optimum (past_key_values.0.key, present.0.key) and of ringstep (past_key_0 with present_key_0, the
whole cache, or new_key_0, the new entries alone).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.rules.subject import Hit, Subject, element

PAST = re.compile(r"(?:past_key_values|past|cache_in|state_in)([._].+)")
PRESENT = re.compile(r"(present_key_values|present|new|cache_out|state_out)([._].+)")
Pair = tuple[ir.Value, ir.Value, bool]
"""Cache input, cache output, and whether the output holds the new entries alone."""


def pairs(subject: Subject) -> list[Pair]:
    """Cache inputs with the outputs that are fed back into them."""
    past = {match[1]: v for v in subject.model.graph.inputs if (match := PAST.fullmatch(str(v.name)))}
    found = []
    for value in subject.model.graph.outputs:
        match = PRESENT.fullmatch(str(value.name))
        if match and match[2] in past:
            found.append((past[match[2]], value, match[1] == "new"))
    return found


def shapes(subject: Subject) -> Iterator[Hit]:
    """Cache shapes that do not fit each other."""
    for past, present, new in pairs(subject):
        a, b = graphs.dims(past), graphs.dims(present)
        if a is None or b is None or a == b:
            continue
        differing = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        what = f"{past.name} is {list(a)}, {present.name} is {list(b)}"
        if len(a) != len(b) or len(differing) > 1:
            yield Hit(str(present.name), what)
        elif not new:
            fix = "return the cache at its fixed length, or the new entries alone"
            yield Hit(str(present.name), f"{what}: the host must cut it after every step", severity="warning", fix=fix)


def unpaired(subject: Subject) -> Iterator[Hit]:
    """A cache that is read and never written, in a model that writes others."""
    found = pairs(subject)
    if not found:
        return
    fed = {past.name for past, _, _ in found}
    for value in subject.model.graph.inputs:
        if PAST.fullmatch(str(value.name)) and value.name not in fed:
            yield Hit(str(value.name), f"no output is fed back into {value.name}")


def types(subject: Subject) -> Iterator[Hit]:
    """Cache types that differ."""
    for past, present, _ in pairs(subject):
        if past.dtype != present.dtype:
            yield Hit(str(present.name), f"{past.name} is {element(past)}, {present.name} is {element(present)}")


def encodings(subject: Subject) -> Iterator[Hit]:
    """Quantised caches written in one encoding and read in another."""
    for past, present, _ in pairs(subject):
        read, written = _read(past), _written(present)
        if read is None or written is None:
            continue
        (scale, zero), (other, middle) = read, written
        if abs(scale / other - 1) > 1e-5 or zero != middle:
            what = f"written with scale {other:.6g}, zero point {middle:.0f}, read with {scale:.6g}, {zero:.0f}"
            yield Hit(str(present.name), what)


def _read(past: ir.Value) -> tuple[float, float] | None:
    """The encoding that a cache input is read in: of its DequantizeLinear, or of the QuantizeLinear of a float one."""
    for user in graphs.users(past):
        if user.op_type in ("DequantizeLinear", "QuantizeLinear"):
            return _encoding(user)
    return None


def _written(present: ir.Value) -> tuple[float, float] | None:
    node = present.producer()
    return _encoding(node) if node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear") else None


def _encoding(node: ir.Node) -> tuple[float, float] | None:
    scale = graphs.scalar(node.inputs[1])
    zero = graphs.scalar(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else 0.0
    return None if not scale or zero is None else (scale, zero)

"""Kernels that compile, run, and are poor over the range that their inputs take; reads the tables of sanitize.ops."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.ops import table
from sanitize.rules.operators import FLOATS, dequantised, gelu_input
from sanitize.rules.subject import Hit, Subject

Range = tuple[float, float]
# Operator -> its form in the tables, the pass that writes a better one.
FORMS: dict[str, tuple[str, str | None]] = {
    "Sigmoid": ("Sigmoid/native", "accurate-sigmoid"), "Swish": ("SiLU/swish", "accurate-sigmoid"),
    "Gelu": ("Gelu/native", "accurate-gelu"), "Softmax": ("Softmax/native", "accurate-softmax"),
    "LogSoftmax": ("LogSoftmax/native", "accurate-softmax"), "Exp": ("Exp/native", "accurate-exp"),
    "Softplus": ("Softplus/native", None), "Mish": ("Mish/native", None), "Sin": ("Sin/native", None),
    "Cos": ("Cos/native", None), "Tanh": ("Tanh", None), "HardSwish": ("HardSwish/native", None),
    "Elu": ("Elu/native", None), "Reciprocal": ("Reciprocal/native", "accurate-divide"),
}  # fmt: skip
SIXTEEN = (ir.DataType.UINT16, ir.DataType.INT16)
POOR_DB = 55.0
LOSS_DB = 10.0  # below correct rounding: a form whose best is poor is not the kernel's fault
TYPICAL = (-7.9, 7.9)  # where nothing is known of a range
LARGEST_ROOT = 255.9  # its square is the largest number of half precision


def poor(subject: Subject) -> Iterator[Hit]:
    """Operators measured to be poor over their range; a note where the range is not known."""
    for place in subject.ops(*FORMS, "Erf"):
        op = "Gelu" if place.node.op_type == "Erf" else place.node.op_type
        data = gelu_input(place.node) if place.node.op_type == "Erf" else place.node.inputs[0]
        if data is None:
            continue
        form, fixed_by = FORMS[op]
        if op == "Gelu" and graphs.attribute(place.node, "approximate", "none") == "tanh":
            form = "GeluTanh/native"
        precision = _precision(subject, place.node)
        measured = _table(subject, precision) if precision else None
        if measured is None:
            continue
        span = input_range(subject, data)
        low, high = span or TYPICAL
        dims = graphs.dims(data)
        size = dims[-1] if dims and op.endswith("Softmax") else None
        rows = [r for r in measured.overlapping(form, low, high, size) if r.snr_db < POOR_DB and r.loss_db > LOSS_DB]
        if rows:
            row = max(rows, key=lambda r: r.loss_db)
            where = f"between {max(low, row.low):.3g} and {min(high, row.high):.3g}"
            what = f"{op} in {precision} reaches {max(row.snr_db, 0):.0f} dB {where} (simulated)"
            if span is None:
                what += "; its range is not known"
            # The passes write floats, and only for models that are computed in fp16.
            passes = fixed_by if precision == subject.target.precision == "fp16" else None
            yield Hit(place.name, what, place.where, fixed_by=passes, severity=None if span else "note")
    yield from _squares(subject)


def _squares(subject: Subject) -> Iterator[Hit]:
    """x * x and x ** 2 of values whose square is no half precision number."""
    for place in subject.ops("Mul", "Pow"):
        a, b = place.node.inputs[:2]
        square = a is b if place.node.op_type == "Mul" else graphs.scalar(b) == 2
        if not square or _precision(subject, place.node) != "fp16":
            continue
        span = input_range(subject, a)
        if span and max(map(abs, span)) > LARGEST_ROOT:
            what = f"the square of values up to {max(map(abs, span)):.4g} overflows in fp16"
            yield Hit(place.name, what, place.where, fixed_by="accurate-square")


def _precision(subject: Subject, node: ir.Node) -> str | None:
    chip = subject.target.chip
    data = node.inputs[0]
    if chip is None or data is None or data.dtype not in FLOATS:
        return None
    stored = dequantised(data)
    if stored is not None:
        return "a16" if stored.dtype in SIXTEEN else None  # kernels of 8 bits were not measured
    if subject.target.precision == "fp32":
        return None
    return "fp16" if chip.fp16 and (subject.target.precision != "a16" or subject.quantised) else None


def _table(subject: Subject, precision: str) -> table.OpTable | None:
    assert subject.target.chip is not None
    try:
        return table.load(subject.target.chip.name, precision)
    except RingstepError:
        return None  # nothing was measured


def input_range(subject: Subject, value: ir.Value | None) -> Range | None:
    """The smallest and largest element that a value can take: as calibrated, by its encoding, or behind a Clip."""
    if value is None:
        return None
    seen = subject.target.ranges.get(str(value.name))
    if seen is not None:
        return seen
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].dtype is not None:
        scale = graphs.scalar(node.inputs[1])
        zero = graphs.scalar(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else 0.0
        bits = node.inputs[0].dtype.bitwidth
        low = 0 if node.inputs[0].dtype.name.startswith("U") else -(1 << (bits - 1))
        if scale is not None and zero is not None:
            return (low - zero) * scale, (low + (1 << bits) - 1 - zero) * scale
    if node.op_type == "Clip":
        bounds = [graphs.scalar(v) if v is not None else None for v in (*node.inputs[1:3], None, None)[:2]]
        if None not in bounds and all(math.isfinite(b) for b in bounds if b is not None):
            return bounds[0], bounds[1]  # type: ignore[return-value]
    return None

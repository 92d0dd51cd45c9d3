"""Kernels that compile, run, and are poor over the range that their inputs take; reads the tables of sanitize.ops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import onnx_ir as ir

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.ops import table
from sanitize.passes import forms
from sanitize.ranges import span as span_of
from sanitize.rules.operators import FLOATS, dequantised, gelu_input
from sanitize.rules.subject import SIXTEEN, Hit, Subject

# Operator -> its form in the tables; the form that a pass writes, and which pass.
FORMS: dict[str, tuple[str, str, str]] = {
    "Sigmoid": ("Sigmoid/native", "Sigmoid/tanh-abs", "accurate-sigmoid"),
    "Swish": ("SiLU/swish", "SiLU/tanh-abs", "accurate-sigmoid"),
    "Gelu": ("Gelu/native", "Gelu/relu5", "accurate-gelu"),
    "Softmax": ("Softmax/native", "Softmax/pow", "accurate-softmax"),
    "LogSoftmax": ("LogSoftmax/native", "LogSoftmax/explicit", "accurate-softmax"),
    "Exp": ("Exp/native", "Exp/clip", "accurate-exp"),
    "Reciprocal": ("Reciprocal/native", "Reciprocal/pow", "accurate-divide"),
    "Softplus": ("Softplus/native", "Softplus/fit", "accurate-softplus"),
    "Mish": ("Mish/native", "Mish/fit", "accurate-softplus"),
    "Elu": ("Elu/native", "Elu/exp", "accurate-softplus"),
    "Sin": ("Sin/native", "", ""), "Cos": ("Cos/native", "", ""), "Tanh": ("Tanh", "", ""),
    "HardSwish": ("HardSwish/native", "", ""),
}  # fmt: skip
TANH_GELU = ("GeluTanh/native", "GeluTanh/abs", "accurate-gelu")
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
        by_tanh = op == "Gelu" and graphs.attribute(place.node, "approximate", "none") == "tanh"
        form, better, fixed_by = TANH_GELU if by_tanh else FORMS[op]
        precision = _precision(subject, place.node)
        measured = _table(subject, precision) if precision else None
        if measured is None or precision is None:
            continue
        span = span_of(data, subject.target)
        low, high = max(span[0], TYPICAL[0]), min(span[1], TYPICAL[1])
        if known := all(map(math.isfinite, span)):
            low, high = span
        elif low > high:
            continue
        dims = graphs.dims(data)
        size = dims[-1] if dims and op.endswith("Softmax") else None
        rows = [r for r in measured.overlapping(form, low, high, size) if r.snr_db < POOR_DB and r.loss_db > LOSS_DB]
        if rows:
            row = max(rows, key=lambda r: r.loss_db)
            where = f"between {max(low, row.low):.3g} and {min(high, row.high):.3g}"
            what = f"{op} in {precision} reaches {max(row.snr_db, 0):.0f} dB {where} (simulated)"
            if not known:
                what += "; its range is not known"
            target = dataclasses.replace(subject.target, precision=precision)
            # The passes write floats, and only for models that are computed in fp16.
            written = precision == subject.target.precision == "fp16" and forms.floating(data) and better
            if not written or not forms.gain(target, form, better, span, size):
                fixed_by = ""
            yield Hit(place.name, what, place.where, fixed_by=fixed_by, severity=None if known else "note")
    yield from _squares(subject)


def _squares(subject: Subject) -> Iterator[Hit]:
    """x * x and x ** 2 of values whose square is no half precision number."""
    for place in subject.ops("Mul", "Pow"):
        a, b = place.node.inputs[:2]
        square = a is b if place.node.op_type == "Mul" else graphs.scalar(b) == 2
        if not square or _precision(subject, place.node) != "fp16":
            continue
        largest = max(map(abs, span_of(a, subject.target)))
        if LARGEST_ROOT < largest < math.inf:
            what = f"the square of values up to {largest:.4g} overflows in fp16"
            in_norm = any(user.op_type == "ReduceMean" for user in graphs.users(place.node.outputs[0]))
            yield Hit(place.name, what, place.where, fixed_by="accurate-square" if in_norm else "")


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

"""Ranks, unknown dims, empty and rank-0 tensors, Reshape."""

from __future__ import annotations

from collections.abc import Iterator

from sanitize import graph as graphs
from sanitize.passes import rank0
from sanitize.rules.operators import full_name
from sanitize.rules.subject import Hit, Subject

MAX_RANK, SAFE_RANK = 5, 4
DATA_SHAPED = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit")


def ranks(subject: Subject) -> Iterator[Hit]:
    """Tensors of rank above 5, and of rank 5 where the operator takes 4."""
    assert subject.target.chip is not None
    chip = subject.target.chip
    for place in subject.live:
        values = [v for v in (*place.node.inputs, *place.node.outputs) if v is not None and v.shape is not None]
        rank = max((len(v.shape) for v in values if v.shape is not None), default=0)
        if rank <= SAFE_RANK:
            continue
        name = full_name(place.node)
        if rank > MAX_RANK:
            yield Hit(place.name, f"{name} on a tensor of rank {rank}; HTP ends at {MAX_RANK}", place.where)
        elif name in subject.support.ranks:
            # Asked in floats: a chip without them is judged by the others.
            takes = subject.support.ranks[name]["5"]
            if (chip.htp_arch not in takes) if chip.fp16 else not takes:
                yield Hit(place.name, f"{name} is refused at rank 5", place.where)
        else:
            yield Hit(place.name, f"{name} at rank 5, which was not tried", place.where, severity="warning")


def unknown_dims(subject: Subject) -> Iterator[Hit]:
    """Inputs without a fixed shape, and values whose shape depends on data."""
    dynamic = False
    for value in subject.model.graph.inputs:
        if not value.is_initializer() and graphs.dims(value) is None:
            dynamic = True
            shape = "unknown" if value.shape is None else str(value.shape)
            yield Hit(str(value.name), f"input {value.name} has the shape {shape}")
    if dynamic:
        return  # what follows from it would be named a thousand times
    for place in subject.live:
        for value in place.node.outputs:
            if value.shape is None or value.shape.is_static():
                continue  # without a shape: inference knows nothing of other domains
            name = full_name(place.node)
            if name in DATA_SHAPED:
                yield Hit(place.name, f"{name} makes {value.name} of a shape that depends on data", place.where)
            else:
                what = f"the shape of {value.name} cannot be told from the graph"
                fix = "fold what computes shapes; ONNX Runtime may do it"
                yield Hit(place.name, what, place.where, fix=fix, fixed_by="fold", severity="warning")
            break


def empty(subject: Subject) -> Iterator[Hit]:
    """Tensors without elements."""
    for value in (*subject.model.graph.inputs, *subject.model.graph.outputs):
        dims = graphs.dims(value)
        if dims is not None and 0 in dims:
            yield Hit(str(value.name), f"{value.name} has the shape {list(dims)}: no elements")
    for place in subject.live:
        for value in place.node.outputs:
            dims = graphs.dims(value)
            if dims is not None and 0 in dims and not value.is_graph_output():
                yield Hit(place.name, f"{value.name} has the shape {list(dims)}: no elements", place.where)


def scalars(subject: Subject) -> Iterator[Hit]:
    """Rank-0 tensors as inputs, outputs and values in between."""
    for side, values in (("input", subject.model.graph.inputs), ("output", subject.model.graph.outputs)):
        for value in values:
            if graphs.dims(value) == () and not value.is_initializer():
                yield Hit(str(value.name), f"{side} {value.name} is a scalar of rank 0")
    for place in subject.live:
        for value in place.node.outputs:
            if graphs.dims(value) == () and not value.is_graph_output():
                yield Hit(place.name, f"{value.name} is a scalar of rank 0", place.where)


def scalar_axes(subject: Subject) -> Iterator[Hit]:
    """Axes and starts that ONNX wants as a list of one, given as a scalar."""
    for place in subject.live:
        for value in rank0.scalars(place.node).values():
            what = f"{place.node.op_type}: {value.name} is a scalar, not a list of one"
            yield Hit(place.name, what, place.where)


def allowzero(subject: Subject) -> Iterator[Hit]:
    """Reshape with allowzero=1."""
    for place in subject.ops("Reshape"):
        if not graphs.attribute(place.node, "allowzero", 0):
            continue
        shape = graphs.array(place.node.inputs[1])
        if shape is None:
            yield Hit(place.name, "Reshape has allowzero=1 and a shape that is computed", place.where)
        elif 0 in shape:
            yield Hit(place.name, f"Reshape has allowzero=1 and the shape {shape.tolist()}: an empty tensor",
                      place.where, severity="error", fixed_by="")  # fmt: skip
        else:
            yield Hit(place.name, "Reshape has allowzero=1 without a zero in its shape", place.where)

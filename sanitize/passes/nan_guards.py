"""Where(IsNaN(x), c, x): guards that exporters put behind Softmax, for rows in which everything is masked.

    x ──┬── IsNaN ──[Not]── Where ──▶          x ──▶
        └─────────────────────┘
              c ──────────────┘

The guard belongs to masks of -inf: a row of nothing but -inf makes Softmax return NaN. The infinities pass makes such
masks finite, so the two belong together: this pass takes the guard away, that one the reason for it, and a fully
masked row stays finite. It becomes an ordinary softmax row where the guard returned c (mostly 0); no token attends to
it, and rows with one key or more keep every bit.

HTP has no NaN in fp16: 0/0 gives 0 there, and IsNaN is true for infinities and for values above 65504 (simulated), so a
guard there replaces large values. A guard stays where NaN is an ordinary answer: behind Sqrt, Log, Pow, Div and the
like, and on inputs of the graph. It also stays for CPU targets where a mask of the caller reaches the Softmax as an
input, since that mask can hold -inf.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target
from sanitize.tensors import ALL_FLOATS

WRAPPERS = ("Cast", "Identity")
MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand", "Gather", "Split", "Concat")
ARITHMETIC = ("Add", "Sub", "Mul", "Neg", "Where", "Max", "Min", "Clip", "Abs")
NAN_MAKERS = ("Sqrt", "Log", "Pow", "Div", "Mod", "Acos", "Asin", "Acosh", "Atanh")
KNOWN = ("", "ai.onnx", "com.microsoft")  # nobody knows what others make
LOOK_BACK = 32  # values


def run(model: ir.Model, target: Target) -> list[Change]:
    """Remove the guards of every graph; the test that is left without a reader goes too."""
    changes = []
    for node in graphs.every_node(model):
        for where, guarded in guards(node, target):
            changes.append(Change(where.name or node.name or "Where", "NaN guard removed"))
            graphs.swap(where, guarded)
    return changes


def guards(node: ir.Node, target: Target) -> list[tuple[ir.Node, ir.Value]]:
    """The Where nodes that an IsNaN decides for nothing, each with the value that it guards; none for other nodes."""
    if node.op_type != "IsNaN" or node.domain not in ("", "ai.onnx") or node.graph is None:
        return []
    tested = node.inputs[0]
    if tested is None or _may_be_nan(_root(tested), target):
        return []
    found = []
    for where, branch in _decided(node.outputs[0]):
        guarded, other = where.inputs[branch], where.inputs[3 - branch]
        if guarded is None or other is None or _root(guarded) is not _root(tested):
            continue
        if _keeps_shape(where.outputs[0], guarded, other):
            found.append((where, guarded))
    return found


def _decided(test: ir.Value) -> list[tuple[ir.Node, int]]:
    """The Where nodes that this test decides, with the branch taken where nothing is NaN."""
    found, todo = [], [(test, 2)]
    while todo:
        value, branch = todo.pop()
        for use in list(value.uses()):
            kind = use.node.op_type
            if kind == "Where" and use.idx == 0:
                found.append((use.node, branch))
            elif kind == "Not":
                todo.append((use.node.outputs[0], 3 - branch))
            elif kind in WRAPPERS and use.node.outputs[0].dtype == ir.DataType.BOOL:
                todo.append((use.node.outputs[0], branch))
    return found


def _root(value: ir.Value) -> ir.Value:
    """What a value is before Identity and float casts, which keep NaN what it is."""
    while node := graphs.made_by(value, *WRAPPERS):
        source = node.inputs[0]
        if source is None or (node.op_type == "Cast" and not {source.dtype, value.dtype} <= set(ALL_FLOATS)):
            break
        value = source
    return value


def _may_be_nan(value: ir.Value, target: Target) -> bool:
    """Whether a value can be NaN without a mask of -inf: it is made of a function with poles, or the caller's."""
    todo, seen = [value], {value}
    while todo and len(seen) < LOOK_BACK:
        value = todo.pop()
        node = value.producer()
        if node is None:
            if not value.is_initializer():
                return True
            continue
        if node.op_type in NAN_MAKERS or node.domain not in KNOWN or graphs.bodies(node):
            return True
        if node.op_type == "Softmax":
            if not target.htp and _callers_mask(node.inputs[0]):
                return True
            continue
        inputs: list[ir.Value | None] = []
        if node.op_type in ("Concat", *ARITHMETIC):
            inputs = list(node.inputs)
        elif node.op_type in (*WRAPPERS, *MOVES):
            inputs = list(node.inputs[:1])
        fresh = [v for v in inputs if v is not None and v not in seen and v.dtype in (None, *ALL_FLOATS)]
        todo += fresh
        seen.update(fresh)
    return bool(todo)  # too far to look is not never


def _callers_mask(scores: ir.Value | None) -> bool:
    """Whether a float input of the graph is added to the scores of a Softmax."""
    todo, seen = [scores], {scores}
    while todo and len(seen) < LOOK_BACK:
        value = todo.pop()
        if value is None:
            continue
        node = value.producer()
        if node is None:
            if not value.is_initializer():
                return True
            continue
        if node.op_type in ("Add", "Where", *WRAPPERS, *MOVES):
            inputs = node.inputs if node.op_type in ("Add", "Where", "Concat") else node.inputs[:1]
            fresh = [v for v in inputs if v is not None and v not in seen and v.dtype in (None, *ALL_FLOATS)]
            todo += fresh
            seen.update(fresh)
    return bool(todo)


def _keeps_shape(result: ir.Value, guarded: ir.Value, other: ir.Value) -> bool:
    """Whether the guarded value has the shape of the result: the other branch did not stretch it."""
    if result.dtype is not None and guarded.dtype is not None and result.dtype != guarded.dtype:
        return False
    small = graphs.dims(other)
    if small is not None and all(dim == 1 for dim in small):
        return not small or (guarded.shape is not None and len(guarded.shape) >= len(small))
    shapes = guarded.shape, other.shape
    return shapes[0] is not None and shapes[1] is not None and shapes[0] == shapes[1]


PASS = Pass("nan-guards", "remove Where(IsNaN(x), c, x) behind Softmax and other values that are never NaN", run)

"""Linear layers that read the same activation become one with a Split behind it.

    x ─ q_proj ─ q                      x ─ q_proj+k_proj+v_proj ─ Split ─ q
    x ─ k_proj ─ k          becomes                                      ─ k
    x ─ v_proj ─ v                                                       ─ v

The same for gate and up. A weight that something else reads too (a tied head) stays as it is: it would be stored twice.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.linear import Linear, joined, linears, reshaped
from sanitize.passes import Change, Pass
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Merge every group of sibling projections."""
    if graphs.opset(model) < 13:
        return []  # Split took its sizes as an attribute then
    groups: dict[tuple[object, ...], list[Linear]] = {}
    for found in linears(model):
        shared = [v for v in (found.weight, found.bias) if v is not None and len(v.uses()) > 1]
        if not shared and found.y.shape is not None:
            kind = (id(found.node.graph), found.x, found.rows, found.bias is None, found.weight.dtype)
            groups.setdefault(kind, []).append(found)
    changes: list[Change] = []
    for members in groups.values():
        if len(members) > 1:
            _merge(members)
            names = [member.node.name or member.node.op_type for member in members]
            changes.append(Change(names[0], f"merged with {', '.join(names[1:])}"))
    return changes


def _merge(members: list[Linear]) -> None:
    first = members[0]
    node, name = first.node, first.node.name or first.node.op_type
    # Where the weights lie side by side in another order, that order costs no copy.
    ordered = sorted(members, key=_place) if first.rows else members
    weight = graphs.initializer(
        first.weight, f"{first.weight.name}_merged", joined([_data(m.weight) for m in ordered], 0 if first.rows else 1)
    )
    inputs: list[ir.Value | None] = [first.x, weight]
    if first.bias is not None:
        parts = [reshaped(_data(m.bias), (m.n,)) for m in ordered]
        inputs.append(graphs.initializer(first.bias, f"{first.bias.name}_merged", joined(parts, 0)))
    assert first.y.shape is not None
    leading = list(first.y.shape)[:-1]
    attributes = {a.name: a.value for a in node.attributes.values()}
    y = graphs.insert(
        node, node.op_type, inputs, attributes, name=f"{name}/merged", like=first.y,
        shape=[*leading, sum(m.n for m in members)],
    )  # fmt: skip
    outputs = graphs.split(node, y, [m.n for m in ordered], -1, name=f"{name}/split")
    for member, output in zip(ordered, outputs, strict=True):
        graphs.swap(member.node, output)


def _place(member: Linear) -> tuple[str, int]:
    data = graphs.tensor(member.weight)
    return (data.path, data.offset or 0) if isinstance(data, ir.ExternalTensor) else ("", 0)


def _data(value: ir.Value | None) -> ir.TensorProtocol:
    data = graphs.tensor(value)
    assert data is not None
    return data


PASS = Pass("merge-projections", "linear layers that read the same activation as one", run, min_db=100.0)

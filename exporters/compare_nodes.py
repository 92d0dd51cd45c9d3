"""The nodes of one block, each by itself: the artifact's on its engine, the clean step's in float32 on ONNX Runtime.

Both blocks are cut at every tensor that they have in common, and both are fed the clean step's values as far as the
artifact stores them. What then differs is the node's own doing. What it does to the block is found by adding that
difference to the clean block, where everything after it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from exporters.surgery import IN, Graph, Tensors, in_memory, perturb, unchain, values
from ringstep.errors import RingstepError
from ringstep.parity.bisect import FP16_MAX, Node, rows_db, value_notes

QUANTISED = "_quantised"
LOSS_DB = 6.0  # what a kernel must lose against correct rounding to be called inaccurate
CONTENT = 64  # elements of a constant that are compared by value


class Codes(Protocol):
    """Floats to and from what the artifact's tensors hold."""

    def encode(self, name: str, array: np.ndarray) -> np.ndarray:
        """Floats as the tensor holds them."""

    def decode(self, name: str, array: np.ndarray) -> np.ndarray:
        """The reverse, in float32."""


@dataclass(frozen=True)
class Scope:
    """One block twice, and what its tensors hold."""

    artifact: ir.Model
    clean: ir.Model
    codec: Codes
    chip: str | None = None
    precision: str = "fp16"


def compare_nodes(scope: Scope, feeds: Sequence[Tensors], target: str, open_on: Callable[[ir.Model], Graph],
                  ) -> tuple[list[Node], list[str]]:  # fmt: skip
    """Every node with a tensor in common, and the names of the clean block's nodes whose tensors the artifact lacks.

    `feeds` are the block's inputs of a few calls as the artifact stores them; `target` is the output of the block on
    which effects are measured.
    """
    clean = values(scope.clean.graph)
    names = [name for name, value in clean.items() if value.dtype == ir.DataType.FLOAT]
    own = values(scope.artifact.graph)
    held = {name: name if name in own else name + QUANTISED for name in names if {name, name + QUANTISED} & own.keys()}
    lacking = [str(clean[name].producer().name) for name in names if name not in held]  # type: ignore[union-attr]
    differing = differences(scope) if not any(a.endswith(QUANTISED) for a in held.values()) else {}

    # Inputs go by their plain names in both.
    plain = [{name: scope.codec.decode(name, array) for name, array in call.items()} for call in feeds]
    whole = copied(scope.clean)
    perturb(whole, list(held))
    still = {f"{name}.delta": np.zeros(shape(clean[name]), np.float32) for name in held}
    chained = in_memory(whole)
    truth = [chained.run(call | still) for call in plain]

    apart = copied(scope.clean)
    unchain(apart, held)
    inputs = {str(v.name) for v in apart.graph.inputs}
    unchain(scope.artifact, held.values())
    stored: list[Tensors] = []
    with np.errstate(over="ignore"):
        for call, known in zip(feeds, truth, strict=True):
            fed = {f"{own}{IN}": scope.codec.encode(name, known[name]) for name, own in held.items()}
            stored.append({**call, **{k + QUANTISED: v for k, v in call.items()}, **fed})
    exact = in_memory(apart)
    wanted = [exact.run(call | {name + IN: scope.codec.decode(name, s[own + IN]) for name, own in held.items()
                                if name + IN in inputs})
              for call, s in zip(plain, stored, strict=True)]  # fmt: skip
    graph = open_on(scope.artifact)
    try:
        made = [graph.run(call) for call in stored]
    finally:
        graph.close()

    nodes = []
    rest = target.replace("hidden_", "hidden_rest_")
    total = lambda run: run[f"{target}.sum"] + (run[f"{rest}.sum"] if rest != target and f"{rest}.sum" in run else 0.0)
    outputs = [f"{name}.sum" for name in (target, rest) if name in held]
    for name, own_name in held.items():
        raw = [run[own_name] for run in made]
        have = [scope.codec.decode(name, array) for array in raw]
        want = [run[name] for run in wanted]
        deltas = [h - w for h, w in zip(have, want, strict=True)]
        own_db = rows_db(stacked(want), stacked(have))
        effect = 300.0
        if not all(np.isfinite(d).all() for d in deltas):
            effect = -300.0
        elif any(d.any() for d in deltas) and outputs:
            moved = [chained.run(call | still | {f"{name}.delta": delta}, outputs)
                     for call, delta in zip(plain, deltas, strict=True)]  # fmt: skip
            effect = rows_db(stacked([total(t) for t in truth]), stacked([total(m) for m in moved]))
        producer = clean[name].producer()
        assert producer is not None
        notes = list(differing.get(str(producer.name), []))
        notes += value_notes(name, np.concatenate([r.reshape(-1) for r in raw]))
        clean_largest = max(float(np.abs(t[name]).max(initial=0.0)) for t in truth)
        if clean_largest > FP16_MAX and raw[0].dtype == np.float16:
            notes.append(f"should reach {clean_largest:.3g}, beyond fp16's 65504")
        notes += inaccurate(scope, producer, [{**call, **t} for call, t in zip(plain, truth, strict=True)])
        largest = max(float(np.abs(h).max(initial=0.0)) for h in have)
        nodes.append(Node(str(producer.name), producer.op_type, name, own_db, effect, largest, notes))
    chained.close()
    exact.close()
    return nodes, lacking


def copied(model: ir.Model) -> ir.Model:
    """A model of its own with the same content."""
    return ir.from_proto(ir.to_proto(model))


def shape(value: ir.Value) -> tuple[int, ...]:
    """A static shape."""
    assert value.shape is not None
    return tuple(value.shape.numpy())


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Calls of one tensor as rows of its last dim."""
    return np.concatenate([a.reshape(-1, a.shape[-1] if a.ndim else 1) for a in arrays])


def inaccurate(scope: Scope, node: ir.Node, runs: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
    """Whether the chip is known to compute this operator poorly over the values it takes here."""
    if scope.chip is None:
        return []
    from sanitize.ops.table import load

    try:
        table = load(scope.chip, scope.precision)
    except RingstepError:
        return []
    first = node.inputs[0]
    taken = [run[str(first.name)] for run in runs if first is not None and str(first.name) in run]
    if not taken:
        return []
    low, high = min(float(t.min()) for t in taken), max(float(t.max()) for t in taken)
    sized = taken[0].shape[-1] if node.op_type in ("Softmax", "LogSoftmax") else None
    row = table.worst(f"{node.op_type}/native", *((-64.0, 64.0) if sized else (low, high)), sized)
    if row is None or row.loss_db < LOSS_DB:
        return []
    return [f"inaccurate on {scope.chip}: {row.snr_db:.0f} dB on {row.low:g}..{row.high:g} where rounding allows "
            f"{row.ideal_db:.0f} (ringstep ops)"]  # fmt: skip


def differences(scope: Scope) -> dict[str, list[str]]:
    """What the artifact's nodes have otherwise than the clean block's, by node name: operator, inputs, attributes."""
    theirs = {str(node.name): node for node in scope.clean.graph}
    found: dict[str, list[str]] = {}
    for node in scope.artifact.graph:
        clean = theirs.get(str(node.name))
        if clean is None:
            continue
        notes = []
        if node.op_type != clean.op_type:
            notes.append(f"is {node.op_type} where the recipe has {clean.op_type}")
        for have, want in zip(node.inputs, clean.inputs, strict=False):
            if note := unlike(have, want):
                notes.append(note)
        mine = {name: attribute.value for name, attribute in node.attributes.items()}
        for name, attribute in clean.attributes.items():
            if name in mine and not same(mine[name], attribute.value):
                notes.append(f"{name} is {mine[name]} where the recipe has {attribute.value}")
        if notes:
            found[str(node.name)] = notes
    return found


def unlike(have: ir.Value | None, want: ir.Value | None) -> str:
    """How an input differs from the clean one; "" where it does not."""
    if have is None or want is None:
        return "" if have is want else "has other inputs than the recipe's"
    mine, theirs = have.const_value, want.const_value
    if (mine is None) != (theirs is None):
        return f"reads {have.name} where the recipe reads {want.name}"
    if mine is None or theirs is None:
        return "" if have.name == want.name else f"reads {have.name} where the recipe reads {want.name}"
    if tuple(mine.shape.numpy()) != tuple(theirs.shape.numpy()):
        return f"{have.name} is {list(mine.shape.numpy())} where the recipe has {list(theirs.shape.numpy())}"
    a, b = np.asarray(mine.numpy(), np.float32), np.asarray(theirs.numpy(), np.float32)
    if np.allclose(a, b, rtol=2e-3, atol=1e-6):
        return ""
    if a.size <= 1:
        return f"constant {float(a.reshape(-1)[0]):g} where the recipe has {float(b.reshape(-1)[0]):g}"
    return f"{have.name} is not the checkpoint's: {rows_db(b, a):.1f} dB"


def same(a: Any, b: Any) -> bool:
    """Whether two attributes are equal, floats as float32."""
    return bool(abs(a - b) <= 1e-6 * abs(b)) if isinstance(a, float) and isinstance(b, float) else bool(a == b)

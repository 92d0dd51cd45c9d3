"""The nodes of one block, each by itself: the artifact's on its engine, the clean step's in float32 on ONNX Runtime.

Both blocks are cut at every tensor that they have in common, and both are fed the clean step's values as far as the
artifact stores them. What then differs is the node's own doing. What it does to the block is found by adding that
difference to the clean block, where everything after it is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from exporters.surgery import IN, Graph, Tensors, groups, in_memory, perturb, unchain, values
from ringstep.errors import RingstepError
from ringstep.parity.bisect import FP16_MAX, Node, explained_db, rows_db, value_notes
from ringstep.parity.metrics import SILENT_DB

QUANTISED = "_quantised"
MOVES = ("Reshape", "Transpose", "Split", "Slice", "Squeeze", "Unsqueeze", "Concat", "Identity", "Expand")
WORSE_DB = 1.5  # neighbours together must lose this much more than apart to count as one
GROUP = 10  # pieces that are tried together
LOSS_DB = 6.0  # what a kernel must lose against correct rounding to be called inaccurate


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


@dataclass(frozen=True)
class Calls:
    """A few calls of one block: what it is fed and what it should compute, a dict for each call."""

    feeds: Sequence[Tensors]
    """The block's inputs as the artifact stores them."""
    plain: Sequence[Tensors]
    """The same in float32."""
    truth: Sequence[Tensors]
    """Every tensor of the clean block, and with `.sum` the same again."""


class Effects:
    """The clean block with a way to disturb each of its tensors."""

    def __init__(self, clean: ir.Model, names: Sequence[str], target: str, feeds: Sequence[Tensors],
                 plain: Sequence[Tensors]) -> None:  # fmt: skip
        model, known = copied(clean), values(clean.graph)
        perturb(model, names)
        self.still = {f"{name}.delta": np.zeros(shape(known[name]), np.float32) for name in names}
        self.graph = in_memory(model)
        rest = target.replace("hidden_", "hidden_rest_")
        self.outputs = [f"{name}.sum" for name in dict.fromkeys((target, rest)) if name in names]
        self.calls = Calls(feeds, plain, [self.graph.run(call | self.still) for call in plain])

    def db(self, name: str, deltas: Sequence[np.ndarray]) -> float:
        """What errors of one tensor, an array a call, do to the target; its SNR in dB."""
        if not all(np.isfinite(d).all() for d in deltas):
            return -SILENT_DB
        if not any(d.any() for d in deltas) or not self.outputs:
            return SILENT_DB
        moved = [self.graph.run(call | self.still | {f"{name}.delta": delta}, self.outputs)
                 for call, delta in zip(self.calls.plain, deltas, strict=True)]  # fmt: skip
        total = lambda run: sum(run[output] for output in self.outputs)
        return rows_db(stacked([total(run) for run in self.calls.truth]), stacked([total(run) for run in moved]))


def compare_nodes(scope: Scope, feeds: Sequence[Tensors], target: str, open_on: Callable[[ir.Model], Graph],
                  fuses: bool) -> tuple[list[Node], list[str]]:  # fmt: skip
    """Every node with a tensor in common, and the names of the clean block's nodes whose tensors the artifact lacks.

    `feeds` are the block's inputs of a few calls as the artifact stores them; `target` is the output of the block on
    which effects are measured. With `fuses` neighbours are tried together too, and stand as one node where that is
    worse than both apart.
    """
    clean = values(scope.clean.graph)
    own = values(scope.artifact.graph)
    names = [name for name, value in clean.items() if value.dtype == ir.DataType.FLOAT]
    held = {name: name if name in own else name + QUANTISED for name in names if {name, name + QUANTISED} & own.keys()}
    lacking = [str(clean[name].producer().name) for name in names if name not in held]  # type: ignore[union-attr]
    if fuses and any(mine.endswith(QUANTISED) for mine in held.values()):
        # The compiler does not finish a graph in which quantised moves stand alone; what computes next names them.
        computes = lambda name: (made := clean[name].producer()) is not None and made.op_type not in MOVES
        held = {name: mine for name, mine in held.items() if computes(name)}
    differing = {} if any(a.endswith(QUANTISED) for a in held.values()) else differences(scope)
    # Inputs go by their plain names in both.
    plain = [{name: scope.codec.decode(name, array) for name, array in call.items()} for call in feeds]
    effects = Effects(scope.clean, list(held), target, feeds, plain)

    stored: list[Tensors] = []
    with np.errstate(over="ignore"):
        for call, known in zip(feeds, effects.calls.truth, strict=True):
            fed = {f"{mine}{IN}": scope.codec.encode(name, known[name]) for name, mine in held.items()}
            stored.append({**call, **{k + QUANTISED: v for k, v in call.items()}, **fed})
    exact = copied(scope.clean)
    unchain(exact, held)
    as_stored = [call | {name + IN: scope.codec.decode(name, fed[mine + IN]) for name, mine in held.items()}
                 for call, fed in zip(plain, stored, strict=True)]  # fmt: skip
    joined = copied(exact) if fuses else None
    wanted = run_all(in_memory(exact), as_stored)
    apart = ir.from_proto(ir.to_proto(scope.artifact)) if fuses else None
    unchain(scope.artifact, held.values())
    made = run_all(open_on(scope.artifact), stored)

    nodes: dict[str, Node] = {}
    errors: dict[str, float] = {}
    for name, mine in held.items():
        raw = [run[mine] for run in made]
        have = [scope.codec.decode(name, array) for array in raw]
        want = [run[name] for run in wanted]
        producer = clean[name].producer()
        assert producer is not None
        notes = [*differing.get(str(producer.name), []), *value_notes(name, np.concatenate([r.ravel() for r in raw]))]
        reach = max(float(np.abs(run[name]).max(initial=0.0)) for run in effects.calls.truth)
        if reach > FP16_MAX and raw[0].dtype == np.float16:
            notes.append(f"should reach {reach:.3g}, beyond fp16's 65504")
        notes += inaccurate(scope, producer, effects.calls)
        largest = max(float(np.abs(h).max(initial=0.0)) for h in have)
        deltas = [h - w for h, w in zip(have, want, strict=True)]
        errors[name] = effects.db(name, deltas)
        nodes[name] = Node(str(producer.name), producer.op_type, name, rows_db(stacked(want), stacked(have)),
                           errors[name], largest, None, "", notes)  # fmt: skip
    if apart is not None and joined is not None:
        unchain(apart, held.values())
        back = {mine: name for name, mine in held.items()}
        fused(scope, effects, nodes, back, (apart, joined), stored, as_stored, open_on)
    return list(nodes.values()), lacking


def fused(scope: Scope, effects: Effects, nodes: dict[str, Node], back: Mapping[str, str],
          models: tuple[ir.Model, ir.Model], stored: Sequence[Tensors], plain: Sequence[Tensors],
          open_on: Callable[[ir.Model], Graph]) -> None:  # fmt: skip
    """Put one node in the place of neighbours wherever the engine computes them worse together than apart."""
    artifact, clean = models
    mine = {output: tuple(back[name] for name in inside) for output, inside in groups(artifact, back, GROUP).items()}
    theirs = {inside: output for output, inside in groups(clean, list(back.values()), GROUP).items()}
    mine = {output: inside for output, inside in mine.items() if inside in theirs}
    if not mine:
        return
    made, wanted = run_all(open_on(artifact), stored), run_all(in_memory(clean), plain)
    worse: list[tuple[float, tuple[str, ...], Node]] = []
    for output, inside in mine.items():
        last = inside[-1]
        have = [scope.codec.decode(last, run[output]) for run in made]
        want = [run[theirs[inside]] for run in wanted]
        db = effects.db(last, [h - w for h, w in zip(have, want, strict=True)])
        members = [nodes[name] for name in inside if nodes[name].op not in MOVES]
        apart = explained_db(members)
        if len(members) < 2 or db > apart - WORSE_DB:
            continue
        known = [m for m in members if any(note.startswith("inaccurate") for note in m.notes)]
        lead = min(known or members, key=lambda m: m.effect_db)
        others = ", ".join(m.node for m in members if m is not lead)
        notes = [*lead.notes, f"computed as one with {others}: {db:.1f} dB together, {apart:.1f} apart"]
        own = rows_db(stacked(want), stacked(have))
        worse.append((db - apart, inside, dataclasses.replace(lead, tensor=last, own_db=own, effect_db=db,
                                                              fused_with=others, notes=notes)))  # fmt: skip
    # The smallest group that explains a loss, not one that only holds it.
    taken: set[str] = set()
    for _, inside, node in sorted(worse, key=lambda found: (found[0] > min(w[0] for w in worse) + 1.0, len(found[1]))):
        if not taken & set(inside):
            taken |= set(inside)
            for name in inside:
                if nodes[name].op not in MOVES:
                    del nodes[name]
            nodes[inside[-1]] = node


def run_all(graph: Graph, calls: Sequence[Tensors]) -> list[Tensors]:
    """Run a graph on every call and close it."""
    try:
        return [graph.run(call) for call in calls]
    finally:
        graph.close()


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


def inaccurate(scope: Scope, node: ir.Node, calls: Calls) -> list[str]:
    """Whether the chip is known to compute this operator poorly over the values it takes here."""
    if scope.chip is None:
        return []
    from sanitize.ops.table import load

    try:
        table = load(scope.chip, scope.precision)
    except RingstepError:
        return []
    first = node.inputs[0]
    runs = [{**fed, **made} for fed, made in zip(calls.plain, calls.truth, strict=True)]
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
    try:
        a, b = np.asarray(mine.numpy(), np.float32), np.asarray(theirs.numpy(), np.float32)
    except ValueError:  # onnx-ir does not follow links to weight files; the figures say enough without this
        return ""
    if np.allclose(a, b, rtol=2e-3, atol=1e-6):
        return ""
    if a.size <= 1:
        return f"constant {float(a.reshape(-1)[0]):g} where the recipe has {float(b.reshape(-1)[0]):g}"
    return f"{have.name} is not the checkpoint's: {rows_db(b, a):.1f} dB"


def same(a: Any, b: Any) -> bool:
    """Whether two attributes are equal, floats as float32."""
    return bool(abs(a - b) <= 1e-6 * abs(b)) if isinstance(a, float) and isinstance(b, float) else bool(a == b)

"""What a rule is and what it looks at: the model walked once, with the facts that several rules ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.graph import CONVERSIONS
from sanitize.support import Support, load_support
from sanitize.target import Target

Severity = Literal["error", "warning", "note"]
ONNX = ("", "ai.onnx")
SIXTEEN = (ir.DataType.UINT16, ir.DataType.INT16)
QUANTISED = (ir.DataType.UINT8, ir.DataType.INT8, *SIXTEEN)
# Of constant inputs these compute constants; a random one does not.
RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")


@dataclass(frozen=True)
class Hit:
    """One place where a rule is broken."""

    node: str
    """Node or tensor."""
    what: str
    """What is wrong there, one clause."""
    where: str = ""
    """The subgraph, such as "branch/then_branch"; "" in the main graph."""
    fix: str | None = None
    fixed_by: str | None = None
    severity: Severity | None = None
    """These three: where they differ from the rule's; `fixed_by` "": no pass fixes this one."""


@dataclass(frozen=True)
class Rule:
    """A row of the table in rules/__init__.py."""

    id: str
    severity: Severity
    targets: tuple[str, ...]
    title: str
    why: str
    fix: str
    fixed_by: str | None
    check: Callable[[Subject], Iterator[Hit]]


@dataclass(frozen=True)
class Place:
    """A node and the subgraph it is in."""

    node: ir.Node
    where: str

    @property
    def name(self) -> str:
        """The node's name, or what it makes if it has none."""
        made = self.node.outputs[0].name if self.node.outputs else ""
        return self.node.name or f"{self.node.op_type} -> {made}"


@dataclass(frozen=True)
class Subject:
    """A model and its target, as the checks see them."""

    model: ir.Model
    target: Target
    path: Path | None
    places: tuple[Place, ...]
    support: Support
    folded: frozenset[int] = field(repr=False)
    """Ids of nodes that compute constants: compilers fold them, so they need no kernel."""
    quantised: bool
    """Whether activations pass through QuantizeLinear and DequantizeLinear."""

    @property
    def live(self) -> Iterator[Place]:
        """The nodes that are left after folding."""
        return (place for place in self.places if id(place.node) not in self.folded)

    def ops(self, *names: str) -> Iterator[Place]:
        """The live nodes of these types in ONNX's own domain."""
        return (p for p in self.live if p.node.op_type in names and p.node.domain in ONNX)

    def constant(self, value: ir.Value | None) -> bool:
        """Whether a value is known before the model runs."""
        node = value.producer() if value is not None else None
        return value is None or (node is not None and id(node) in self.folded) or graphs.tensor(value) is not None


def look_at(model: ir.Model, target: Target, path: Path | None = None) -> Subject:
    """Walk a model once."""
    places = tuple(_walk(model.graph, ""))
    folded: set[int] = set()
    quantised = False
    for place in places:
        node = place.node
        if _folds(node, folded):
            folded.add(id(node))
        elif node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].dtype in QUANTISED:
            quantised |= graphs.tensor(node.inputs[0]) is None
    return Subject(model, target, path, places, load_support(target.name), frozenset(folded), quantised)


def _walk(graph: ir.Graph, where: str) -> Iterator[Place]:
    for node in graph:
        yield Place(node, where)
        for attribute in node.attributes.values():
            if attribute.is_ref():
                continue
            inner = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else []
            inner = list(attribute.value) if attribute.type == ir.AttributeType.GRAPHS else inner
            for subgraph in inner:
                yield from _walk(subgraph, f"{where}{'/' if where else ''}{node.name or node.op_type}/{attribute.name}")


def _folds(node: ir.Node, folded: set[int]) -> bool:
    if (node.domain not in ONNX and node.op_type not in CONVERSIONS) or node.op_type in RANDOM:
        return False
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
        return False
    if node.op_type == "Shape":
        return graphs.dims(node.inputs[0]) is not None
    for value in node.inputs:
        made = value.producer() if value is not None else None
        if value is not None and graphs.tensor(value) is None and (made is None or id(made) not in folded):
            return False
    return True


def element(value: ir.Value | None) -> str:
    """An element type in words, such as float32."""
    return value.dtype.name.lower().replace("double", "float64") if value is not None and value.dtype else "unknown"

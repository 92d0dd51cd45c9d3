"""Opening graphs up: tensors inside made outputs, chains cut so that every piece can be fed by itself.

    chained      x ─ layer 0 ─ hidden_0 ─ layer 1 ─ hidden_1 ─ ...          hidden_0, hidden_1 are outputs too
    unchained    x ─ layer 0 ─ hidden_0     hidden_0.in ─ layer 1 ─ hidden_1     ...        in one compiled graph
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir

from ringstep.child import is_running
from ringstep.engines.ort import open_session
from ringstep.errors import RingstepError

Tensors = dict[str, np.ndarray]
IN = ".in"


class Graph(Protocol):
    """One graph on an engine."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> Tensors:
        """Every output by name; `feeds` may hold more than the graph takes."""

    def close(self) -> None:
        """Free it."""


class OrtGraph:
    """An ONNX file or model on ONNX Runtime's CPU provider."""

    def __init__(self, model: Path | bytes, name: str, optimised: bool = True) -> None:
        """Without `optimised` nodes stay what they are."""
        source = str(model) if isinstance(model, Path) else model
        self.session = open_session(source, name, os.cpu_count() or 1, optimised)
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.outputs, self.name = [o.name for o in self.session.get_outputs()], name

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> Tensors:
        wanted = outputs or self.outputs
        try:
            results = self.session.run(wanted, {name: feeds[name] for name in self.inputs})
        except Exception as error:
            raise RingstepError(f"{self.name}: ONNX Runtime cannot run it: {str(error)[:300]}") from None
        return dict(zip(wanted, results, strict=True))

    def close(self) -> None:
        del self.session


class SimulatedGraph:
    """An ONNX file compiled in memory for a chip and run on the simulator, in a child process."""

    def __init__(self, path: Path, soc_model: int) -> None:
        from ringstep.engines.qnn_sim import open_graph

        self.graph = open_graph(path, soc_model=soc_model, fp16=True)

    def run(self, feeds: Mapping[str, np.ndarray]) -> Tensors:
        return self.graph.run({name: np.ascontiguousarray(feeds[name]) for name in self.graph.inputs})

    def close(self) -> None:
        self.graph.close()


def open_graph(path: Path, soc_model: int | None) -> Graph:
    """A graph on the simulator of a chip, or on ONNX Runtime with None."""
    return OrtGraph(path, path.name) if soc_model is None else SimulatedGraph(path, soc_model)


def in_memory(model: ir.Model) -> OrtGraph:
    """A model whose tensors all lie in memory, on ONNX Runtime."""
    return OrtGraph(ir.to_proto(model).SerializeToString(), str(model.graph.name), optimised=False)


def values(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value that a node makes, by name."""
    return {str(value.name): value for node in graph for value in node.outputs if value.name}


def expose(model: ir.Model, names: Iterable[str]) -> list[str]:
    """Make tensors outputs (those that the graph has); returns which."""
    known, have = values(model.graph), {str(v.name) for v in model.graph.outputs}
    found = [name for name in names if name in known]
    model.graph.outputs.extend(known[name] for name in found if name not in have)
    return found


def unchain(model: ir.Model, names: Iterable[str], siblings: Mapping[str, str] | None = None) -> list[str]:
    """Cut a graph at tensors: each becomes an output, and its readers take an input NAME.in; returns which were cut.

    `siblings` maps a tensor to another that the same piece returns: what leads there goes on reading the tensor itself.
    """
    found = expose(model, names)
    known = values(model.graph)
    before = {name: piece(known[other]) for name, other in (siblings or {}).items() if other in known}
    for name in found:
        value = known[name]
        readers = [(node, index) for node, index in value.uses() if node not in before.get(name, ())]
        if not readers:
            continue
        fed = ir.Value(name=name + IN, shape=value.shape, type=value.type)
        for node, index in readers:
            node.replace_input_with(index, fed)
        model.graph.inputs.append(fed)
    return found


def groups(model: ir.Model, names: Iterable[str], limit: int) -> dict[str, tuple[str, ...]]:
    """Make an unchained model one of groups: every piece joined with all that is made of its result, up to where the
    ways meet again. SiLU's linear is joined with Sigmoid and Mul, a lone reader with what it reads.

    Compilers fuse neighbours, and the fused kernel may round otherwise than they do apart. Returns the outputs NAME@k,
    each with the tensors inside, the one made last. Groups of more than `limit` pieces are left out.
    """
    graph, known = model.graph, values(model.graph)
    pieces = {name: piece(known[name]) for name in names}
    reads = {name: {str(v.name).removesuffix(IN) for node in nodes for v in node.inputs
                    if v is not None and str(v.name).endswith(IN)} for name, nodes in pieces.items()}  # fmt: skip
    readers = {name: [other for other in pieces if name in reads[other]] for name in pieces}
    made: dict[str, tuple[str, ...]] = {}
    nodes: list[ir.Node] = []
    outputs: list[ir.Value] = []
    for first, last in meeting(readers).items():
        inside = [n for n in pieces if n in between(readers, first, last)]
        if len(inside) > limit:
            continue
        tag = f"@{len(made)}"
        copies: dict[ir.Value | None, ir.Value | None] = {}
        done = list[ir.Node]()
        for name in inside:
            for node in pieces[name]:
                if node in done:
                    continue
                done.append(node)
                joined = {known[n].name + IN: copies.get(known[n]) for n in inside}  # type: ignore[operator]
                inputs = [copies.get(v) or (joined.get(str(v.name)) if v is not None else None) or v
                          for v in node.inputs]  # fmt: skip
                results = [ir.Value(name=f"{v.name}{tag}", shape=v.shape, type=v.type) for v in node.outputs]
                copies.update(zip(node.outputs, results, strict=True))
                nodes.append(ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), outputs=results,
                                     name=f"{node.name}{tag}"))  # fmt: skip
        result = copies[known[last]]
        assert result is not None
        outputs.append(result)
        made[str(result.name)] = tuple(inside)
    graph.outputs.clear()
    graph.remove(list(graph), safe=True)
    graph.extend(nodes)
    graph.outputs.extend(outputs)
    used = {v for node in nodes for v in node.inputs}
    kept = [v for v in graph.inputs if v in used]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    return made


def meeting(readers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """For each piece the first that every way from it leads through; pieces in order, their readers after them.

    A piece that ends without a reader, the block's own output, meets nothing.
    """
    after: dict[str, set[str]] = {}
    order = list(readers)
    for name in reversed(order):
        own = [after[reader] | {reader} for reader in readers[name]]
        after[name] = set.intersection(*own) if own else set()
    return {name: min(after[name], key=order.index) for name in order if after[name]}


def between(readers: Mapping[str, Sequence[str]], first: str, last: str) -> set[str]:
    """Everything on a way from `first` to `last`, both included."""
    found, left = {first, last}, [first]
    while left:
        for reader in readers[left.pop()]:
            if reader not in found:
                found.add(reader)
                left.append(reader)
    return found


def piece(value: ir.Value) -> list[ir.Node]:
    """The nodes that make a value out of a graph's inputs, in order."""
    found: dict[ir.Node, None] = {}
    left = [value.producer()]
    while left:
        node = left.pop()
        if node is None or node in found:
            continue
        inside = [made for v in node.inputs if v is not None and (made := v.producer()) is not None]
        if all(made in found for made in inside):
            found[node] = None
        else:
            left += [node, *inside]  # again when all it reads is there
    return list(found)


def perturb(model: ir.Model, names: Sequence[str]) -> None:
    """Add an input NAME.delta to each tensor: its readers see the sum, which is the output NAME.sum where it is one.

    The tensors themselves become outputs as they were before.
    """
    graph, known = model.graph, values(model.graph)
    expose(model, names)
    for name in names:
        value = known[name]
        delta = ir.Value(name=f"{name}.delta", shape=value.shape, type=value.type)
        total = ir.Value(name=f"{name}.sum", shape=value.shape, type=value.type)
        for node, index in list(value.uses()):
            node.replace_input_with(index, total)
        maker = value.producer()
        assert maker is not None
        graph.insert_after(maker, ir.Node("", "Add", [value, delta], outputs=[total], name=f"{name}/delta"))
        graph.inputs.append(delta)
        graph.outputs.append(total)


def extract(model: ir.Model, inputs: Iterable[str], outputs: Sequence[str]) -> ir.Model:
    """The part of a model between tensors; of `inputs` only those it reads are kept."""
    try:
        body = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    except (ValueError, KeyError) as error:
        raise RingstepError(f"graph {model.graph.name}: {str(error)[:200]}; export again") from None
    used = [v for v in body.inputs if v.uses()]
    body.inputs.clear()
    body.inputs.extend(used)
    body.name = model.graph.name
    return ir.Model(body, ir_version=model.ir_version, producer_name="ringstep")


@contextlib.contextmanager
def workshop(artifact: Path) -> Iterator[Callable[[str], Path]]:
    """A way to name files for changed graphs beside the artifact's weights; they are gone at the end.

    ONNX Runtime takes external data only from beside or below the graph, and not through links.
    """
    home, made = artifact / "onnx", list[Path]()
    for left in home.glob(".bisect.tmp-*.onnx"):
        # Of a run that was killed; another that still runs keeps its own.
        if not is_running(left.name.removeprefix(".bisect.tmp-").split(".")[0]):
            left.unlink(missing_ok=True)

    def place(name: str) -> Path:
        made.append(home / f".bisect.tmp-{os.getpid()}.{name}.onnx")
        return made[-1]

    try:
        yield place
    finally:
        for path in made:
            path.unlink(missing_ok=True)

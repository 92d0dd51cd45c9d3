"""`ringstep bisect`: the first block, node and stage at which an artifact leaves the original.

    1. depth    a text through the whole graph, hidden states exposed          cumulative SNR, own caches
    2. blocks   all blocks in one graph, unchained, fed the original's states   what each adds by itself
    3. nodes    the block to blame, every node unchained and fed the clean      what each adds, and what its error
                step's tensors                                                  does to the block's output
    4. stages   that block as traced, sanitised, quantised, compiled            where the error comes in
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from exporters.clean import Clean, entries_at, watch
from exporters.compare_nodes import Scope, compare_nodes
from exporters.onnx import graph_file, hidden_names, traced_file
from exporters.prove import PROOF_TOKENS, Reference, as_stored, open_reference, proof_ids, two_windows
from exporters.surgery import IN, Graph, Tensors, expose, extract, in_memory, open_graph, unchain, workshop
from exporters.tapped import Call, Codec, Exposed
from ringstep import console
from ringstep.checkpoint import Checkpoint
from ringstep.contract import StepSpec
from ringstep.devices import find_device
from ringstep.encoding import open_prefix, open_table
from ringstep.errors import RingstepError
from ringstep.files import write_json
from ringstep.parity import bisect as judge
from ringstep.parity.bisect import Block, rows_db
from ringstep.session import DecodeSession

TOKENS = 48
DECODE_CALLS, CHUNK_CALLS = 6, 2  # calls that the local measure looks at
SLOW_BYTES = 64 << 20  # of weights, above which the simulator takes seconds a call
SLOW_TOKENS, SLOW_CALLS = 6, 3
LAYERS_OF_A_LOSS = 3  # a loss of arithmetic is looked for in so many layers


class Bisection:
    """One run over one graph of an artifact."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, engine: str, n: int, reference: Reference) -> None:
        self.folder, self.engine = folder, engine
        self.spec = StepSpec.load(folder)
        self.clean = Clean(folder, self.spec, checkpoint)
        self.n, self.graph, self.reference = n, self.spec.graph(n), reference
        self.soc: int | None = None
        if engine == "qnn-sim":
            chip = self.spec.target.get("chip")
            if not chip:
                raise RingstepError(f"{folder}: made for no chip, and the simulator needs one; export with --device")
            self.soc = find_device(chip).chip.soc_model
        self.codec = Codec(folder, self.spec, n)
        weights = sum(p.stat().st_size for p in (folder / "onnx").glob("*.bin") if p.name != "embedding.bin")
        self.slow = self.soc is not None and (weights > SLOW_BYTES or bool(self.spec.scheme))
        self.skip = len(self.spec.prefix.ids) if self.spec.prefix else 0

    # What is fed.

    def text(self) -> list[int]:
        """As many tokens as show every cache: past the second wrap of windows, whole chunks."""
        spec, n = self.spec, self.n
        count = min(max(TOKENS, min(two_windows(spec), PROOF_TOKENS)), spec.context)
        if self.slow and n == 1:
            count = min(count, self.skip + SLOW_TOKENS)
        count = max(1, (count - self.skip) // n) * n + self.skip
        return proof_ids(spec, self.folder, min(count, spec.context))

    def calls(self) -> list[Call]:
        """A few calls spread over the text, each with the original's caches up to there."""
        last = len(self.ids) - self.n
        wanted = (SLOW_CALLS if self.slow else DECODE_CALLS) if self.n == 1 else CHUNK_CALLS
        spots = np.unique(np.linspace(min(self.skip, last), last, wanted).astype(int))
        session = DecodeSession(self.spec, Exposed("", [], []), open_table(self.folder, self.spec),
                                open_prefix(self.folder, self.spec))  # fmt: skip
        buffers = session.buffers[self.n]
        found = []
        for position in map(int, spots):
            session.reset()
            if position:
                session.seed(self.stored(position))
            ids = np.asarray(self.ids[position : position + self.n])
            buffers.fill(position, ids, session.table)
            feeds = {**buffers.inputs, **{name: session.caches[c.layer, what] for name, c, what in buffers.past}}
            feeds = {name: array.copy() for name, array in feeds.items()}
            for layer, hidden in enumerate(self.hidden):
                rows = self.clean.turned(hidden[position : position + self.n])
                name = self.clean.entry(layer) if layer == 0 else hidden_names(layer - 1, 1)[0]
                if name in ("x", "input_ids"):
                    continue
                feeds[name + IN] = self.codec.encode(name, rows)
                if layer and self.clean.streams > 1:
                    rest = hidden_names(layer - 1, 2)[1]
                    feeds[rest + IN] = self.codec.encode(rest, rows - self.codec.decode(name, feeds[name + IN]))
            found.append(Call(position, feeds))
        return found

    def stored(self, position: int) -> dict[tuple[int, str], np.ndarray]:
        """The original's entries before a position as the caches hold them, zeros where a window has passed."""
        lengths = [c.length for c in self.spec.caches]
        caches = entries_at(self.reference, self.truth, position, lengths)
        own = as_stored(dataclasses.replace(self.truth, caches=caches), self.folder).caches
        entries: dict[tuple[int, str], np.ndarray] = {}
        for cache, (positions, keys, vals) in zip(self.spec.caches, own, strict=True):
            for what, array in (("key", keys), ("value", vals)):
                whole = np.zeros((1, cache.kv_heads, position, cache.head_dim), np.float32)
                whole[0][:, positions] = array
                entries[cache.layer, what] = self.codec.encode(f"past_{what}_{cache.layer}", whole, cache.dtype)
        return entries

    # The steps.

    def run(self) -> dict[str, Any]:
        """All of it; returns the body of bisect.json."""
        self.ids = self.text()
        with console.progress("the original's hidden states"):
            self.truth, self.hidden = watch(self.reference, self.ids)
        with workshop(self.folder) as shop:
            self.shop = shop
            label = "simulated: " if self.soc else ""
            with console.progress(f"{label}depth, {len(self.ids)} tokens"):
                cumulative, warnings = self.depth()
            with console.progress(f"{label}each block by itself"):
                self.probes = self.calls()
                blocks = self.blocks(cumulative)
            found = judge.find(blocks, judge.limits_of(self.spec.dtype, self.soc is not None))
            index = found.block - 1
            with console.progress(f"{label}the nodes of {blocks[found.block].tensor}"):
                nodes, missing = self.nodes(index, found.what)
            alike: list[int] = []
            others: list[judge.Node] = []
            if found.kind == "loss" and self.soc:
                with console.progress(f"{label}the nodes of other layers"):
                    alike, others = self.same_loss(blocks, found.block, nodes)
            with console.progress(f"{label}the stages"):
                stages = self.stages(index, found.what, blocks[found.block].measures[found.what])
        stage = judge.stage_of(stages)
        guilty = judge.guilty(nodes)
        first = {
            "kind": found.kind, "tensor": blocks[found.block].tensor, "layer": blocks[found.block].layer,
            "output": found.what, "local_db": found.db, "typical_db": found.typical_db,
            "node": guilty[0].node if guilty else None, "op": guilty[0].op if guilty else None, "stage": stage,
            "missing": missing, "alike": alike,
        }  # fmt: skip
        return {
            "engine": self.engine, "simulated": self.soc is not None, "reference": self.truth.source,
            "tokens": len(self.ids), "graph": self.n, "dtype": self.spec.dtype, "scheme": self.spec.scheme,
            "depth": judge.as_json(blocks), "nodes": [dataclasses.asdict(node) for node in [*nodes, *others]],
            "first": first, "stages": stages, "warnings": warnings,
            "verdict": judge.verdict(blocks, found, nodes, stage, alike),
        }  # fmt: skip

    def same_loss(self, blocks: Sequence[Block], chosen: int, nodes: Sequence[judge.Node],
                  ) -> tuple[list[int], list[judge.Node]]:  # fmt: skip
        """The next worst layers: which of them lose most at the same node, and all their nodes."""
        plain = lambda name: name.split("/", 2)[-1]
        ranked = sorted((i for i, b in enumerate(blocks) if b.layer is not None and i != chosen),
                        key=lambda i: blocks[i].local_db)  # fmt: skip
        alike, others = [], list[judge.Node]()
        worst = judge.guilty(nodes)
        for at in ranked[: LAYERS_OF_A_LOSS - 1]:
            own, _ = self.nodes(at - 1, "hidden")
            others += own
            first = judge.guilty(own)
            if worst and first and plain(first[0].node) == plain(worst[0].node):
                alike.append(at - 1)
        return alike, others

    def sources(self) -> list[Path]:
        """The ONNX files that the engine's graph comes from, in order: one, or the parts it was cut into."""
        whole = self.folder / "onnx" / graph_file(self.n)
        parts = self.graph.parts.get("qnn", ()) if self.soc else ()
        if len(parts) < 2:
            return [whole]
        return [whole.with_name(f"{whole.stem}.part{k + 1}.onnx") for k in range(len(parts))]

    def opened(self, how: Any, names: Sequence[str], tag: str) -> list[Graph]:
        """The graph's files changed by `how` (expose, unchain) and opened on the engine."""
        opened: list[Graph] = []
        try:
            for path in self.sources():
                model = ir.load(path)
                how(model, names)
                opened.append(self.save(model, f"{path.stem}.{tag}"))
        except BaseException:
            for graph in opened:
                graph.close()
            raise
        return opened

    def save(self, model: ir.Model, name: str, on_cpu: bool = False) -> Graph:
        """A model beside the weights, opened on the engine."""
        path = self.shop(name)
        try:
            ir.save(model, path)
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); copy the artifact first"
            raise RingstepError(f"{path.parent}: {reason}") from None
        return open_graph(path, None if on_cpu else self.soc)

    def hidden_tensors(self) -> list[str]:
        """Everything that crosses from block to block."""
        names = ["embedded"] if self.clean.has_embed else []
        for layer in range(self.clean.count):
            names += hidden_names(layer, self.clean.streams if layer < self.clean.count - 1 else 1)
        return [name for plain in names for name in (plain, f"{plain}_quantised")]

    def depth(self) -> tuple[list[float], list[str]]:
        """Cumulative SNR of x, each hidden state and the logits, the text fed with the engine's own caches."""
        names = self.hidden_tensors()
        spec = dataclasses.replace(self.spec, graphs=(self.graph,))
        engine = Exposed(self.engine, self.opened(expose, names, "exposed"), names)
        with DecodeSession(spec, engine, open_table(self.folder, spec), open_prefix(self.folder, spec)) as session:
            logits = session.step(self.ids)
        text, warnings = slice(self.skip, None), []
        found = []
        for layer, hidden in enumerate(self.hidden):
            want = self.clean.turned(hidden)[text]
            name = self.clean.entry(0) if layer == 0 else hidden_names(layer - 1, 1)[0]
            if name == "x":
                table = open_table(self.folder, self.spec)
                assert table is not None
                have = np.asarray(table[np.asarray(self.ids)], np.float32)[text]
            else:
                raw = self.gathered(engine, name)
                warnings += [f"{name}: {note}" for note in judge.value_notes(name, raw)]
                have = self.codec.decode(name, raw)
                if layer and layer < self.clean.count and self.clean.streams > 1:
                    rest = hidden_names(layer - 1, 2)[1]
                    have = have + self.codec.decode(rest, self.gathered(engine, rest))
            found.append(rows_db(want, have[: len(want)]))
        found.append(rows_db(self.truth.logits[text], logits[text]))
        return found, warnings

    def gathered(self, engine: Exposed, name: str) -> np.ndarray:
        """A kept tensor of all steps, [tokens, width]."""
        return np.concatenate([k[name] if name in k else k[f"{name}_quantised"] for k in engine.kept])

    def blocks(self, cumulative: Sequence[float]) -> list[Block]:
        """Every block fed the original's states, against the recipe's block in eager torch on the same values."""
        # The rest of a sum is made of the sum itself, not of what the next block is fed.
        siblings = {plain: rest for plain, rest in (hidden_names(i, 2) for i in range(self.clean.count))}
        apart = lambda model, names: unchain(model, names, siblings)
        graphs = self.opened(apart, self.hidden_tensors(), "unchained")
        results: list[Tensors] = []
        try:
            for call in self.probes:
                made: Tensors = {}
                for graph in graphs:
                    made |= graph.run(self.fed(call))
                results.append(made)
        finally:
            for graph in graphs:
                graph.close()
        found = []
        for index in range(-1, self.clean.count + 1):
            tensor = self.clean.first if index < 0 else self.clean.outputs(index)[0]
            if index < 0 and not self.clean.has_embed:
                # No node of the graph: the host's table, which the depth has compared already.
                found.append(Block(tensor, None, cumulative[0], cumulative[0]))
                continue
            eager = self.clean.eager(index)
            want = [eager(self.floats(index, call)) for call in self.probes]
            dbs = {}
            for name in want[0]:
                have = [self.result(results[k], name) for k in range(len(results))]
                dbs[name] = rows_db(np.concatenate([w[name].reshape(-1, w[name].shape[-1]) for w in want]),
                                    np.concatenate([h.reshape(-1, h.shape[-1]) for h in have]))  # fmt: skip
            recipe = None
            if 0 <= index < self.clean.count:
                spots = [c.position for c in self.probes]
                truth = np.concatenate([self.clean.turned(self.hidden[index + 1][p : p + self.n]) for p in spots])
                recipe = rows_db(truth, np.concatenate([w[tensor] for w in want]))
            layer = index if 0 <= index < self.clean.count else None
            keys, vals = [*dbs.values(), None, None][1:3] if layer is not None else (None, None)
            found.append(Block(tensor, layer, cumulative[index + 1], dbs[tensor], keys, vals, recipe))
        return found

    def fed(self, call: Call) -> Tensors:
        """Feeds of an unchained graph, under the names that floats and quantised tensors go by."""
        more = {name.removesuffix(IN) + "_quantised" + IN: array for name, array in call.feeds.items()
                if name.endswith(IN)}  # fmt: skip
        return {**call.feeds, **more}

    def floats(self, index: int, call: Call) -> Tensors:
        """A block's inputs in float32, exactly as far as the artifact stores them."""
        found = {}
        for name in self.clean.inputs(index):
            array = call.feeds[name + IN] if name + IN in call.feeds else call.feeds[name]
            found[name] = self.codec.decode(name, array)
        return found

    def result(self, made: Tensors, name: str) -> np.ndarray:
        """A block's output in float32; the residual stream with its rest."""
        have = made[name] if name in made else made[f"{name}_quantised"]
        total = self.codec.decode(name, have)
        rest = name.replace("hidden_", "hidden_rest_")
        if rest != name and rest in made:
            total = total + self.codec.decode(rest, made[rest])
        return total

    def nodes(self, index: int, what: str) -> tuple[list[judge.Node], list[str]]:
        """Every node of a block by itself; and the clean block's nodes that the artifact lacks."""
        if index < 0 and not self.clean.has_embed:
            return [], []
        if index < 0:
            what = "hidden"
        chip, precision = self.spec.target.get("chip"), "a16" if self.spec.scheme else "fp16"
        scope = Scope(self.part(index), self.clean.block(index, self.n), self.codec, chip, precision)
        feeds = [{name: call.feeds[name + IN] if name + IN in call.feeds else call.feeds[name]
                  for name in self.clean.inputs(index)} for call in self.probes]  # fmt: skip
        outputs = self.clean.outputs(index)
        target = {"hidden": outputs[0], "key": outputs[-2] if len(outputs) > 1 else outputs[0], "value": outputs[-1]}
        nodes, lacking = compare_nodes(scope, feeds, target[what], lambda model: self.save(model, "nodes"),
                                       fuses=self.soc is not None)  # fmt: skip
        for node in nodes:
            node.layer = index if 0 <= index < self.clean.count else None
        return nodes, lacking

    def part(self, index: int, name: str | None = None) -> ir.Model:
        """The artifact's block as a model of its own."""
        model = ir.load(self.folder / "onnx" / (name or graph_file(self.n)))
        known = {str(v.name) for node in model.graph for v in node.outputs} | {str(v.name) for v in model.graph.inputs}
        named = lambda plain: plain if plain in known or f"{plain}_quantised" not in known else f"{plain}_quantised"
        contract = [t.name for t in self.graph.inputs]
        stream = [named(n) for n in self.clean.inputs(index) if n not in contract]
        outputs = [named(n) for n in self.clean.outputs(index)]
        return extract(model, [*stream, *contract], [n for n in outputs if n in known])

    def stages(self, index: int, what: str, final_db: float) -> list[dict[str, Any]]:
        """The block's local SNR after each stage, worst output first found."""
        if index < 0 and not self.clean.has_embed:
            return []
        eager = self.clean.eager(index)
        want = [eager(self.floats(index, call)) for call in self.probes]
        names = self.clean.outputs(index)
        name = {"hidden": names[0], "key": names[-2] if len(names) > 1 else names[0], "value": names[-1]}[what]
        rows: list[dict[str, Any]] = []

        def add(stage: str, engine: str, graph: Graph, codec: Codec | None) -> None:
            have = []
            try:
                for call in self.probes:
                    feeds = self.floats(index, call)
                    if codec is not None:
                        feeds = {k: v if v.dtype.kind in "iu" else codec.encode(k, v) for k, v in feeds.items()}
                    feeds |= {f"{k}_quantised": v for k, v in feeds.items()}
                    made = graph.run(feeds)
                    have.append(self.result(made, name) if codec is not None else plain_result(made, name))
            finally:
                graph.close()
            rows.append({"stage": stage, "engine": engine, "snr_db": rows_db(
                np.concatenate([w[name].reshape(-1, w[name].shape[-1]) for w in want]),
                np.concatenate([h.reshape(-1, h.shape[-1]) for h in have]))})  # fmt: skip

        add("recipe's form", "ort, float32", in_memory(self.clean.block(index, self.n)), None)
        if not self.clean.quantised and (self.folder / "onnx" / traced_file(self.n)).is_file():
            add("traced", "ort", self.save(self.part(index, traced_file(self.n)), "traced", True), self.codec)
        last = "quantised" if self.clean.quantised else "sanitised"
        if self.soc is None:
            rows.append({"stage": last, "engine": "ort", "snr_db": final_db})
        else:
            add(last, "ort", self.save(self.part(index), last, True), self.codec)
            rows.append({"stage": "compiled", "engine": "qnn-sim", "snr_db": final_db})
        return rows


def plain_result(made: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A float block's output with its rest."""
    rest = name.replace("hidden_", "hidden_rest_")
    return made[name] + made[rest] if rest != name and rest in made else made[name]


def bisect(folder: Path, checkpoint: Checkpoint, engine: str, n: int | None = None) -> dict[str, Any]:
    """Bisect an artifact and write bisect.json; returns its body.

    `n`: the graph of so many tokens a step. None: on ONNX Runtime each in turn, and the first at fault is told of; on
    the simulator the smallest, which every answer is made with.
    """
    sizes = sorted(graph.n for graph in StepSpec.load(folder).graphs)
    if n is not None and n not in sizes:
        raise RingstepError(f"--graph {n}: this artifact has graphs of {', '.join(map(str, sizes))} tokens")
    wanted = [n] if n is not None else sizes if engine == "ort" else sizes[:1]
    reference = open_reference(checkpoint)
    bodies = []
    for size in wanted:
        bodies.append(Bisection(folder, checkpoint, engine, size, reference).run())
        if bodies[-1]["first"]["kind"] == "fault":
            break
    body = bodies[-1] if bodies[-1]["first"]["kind"] == "fault" else min(bodies, key=lambda b: b["first"]["local_db"])
    body["graphs"] = [b["graph"] for b in bodies]
    write_json(folder / "bisect.json", body)
    return body

"""What an artifact's blocks should compute: made anew from the checkpoint, nothing of the artifact's graphs in it.

    recipe + checkpoint ─ eager torch, float32, native forms ─ a block's outputs
                        └ traced and sanitised as the artifact was, float32 ─ every tensor inside a block
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from exporters.artifact import Artifact
from exporters.onnx import IR_VERSION, Blocks, Stamp, hidden_names, trace_blocks
from exporters.trace import OPSET
from recipes.blocks import Embed, Head
from recipes.plan import Plan, Source
from recipes.step import bind, head_sources, layer_inputs, layer_outputs
from recipes.weights import key
from ringstep.checkpoint import Checkpoint
from ringstep.contract import StepSpec, TensorSpec

if TYPE_CHECKING:
    from exporters.prove import Reference
    from ringstep.parity.report import Truth

Read = Callable[[Source], np.ndarray]


class Loaded(Stamp):
    """A stamp whose weights are arrays in memory, float32."""

    def __init__(self, read: Read) -> None:
        super().__init__("float32", {}, Path())
        self.read = read

    def weight(self, source: Source) -> ir.Value:
        name = key(source)
        if name not in self.initializers:
            self.initialize(name, ir.tensor(np.ascontiguousarray(self.read(source)), name=name))
        return self.initializers[name]


class Clean:
    """The recipe's blocks for one artifact: same options, weights of the checkpoint (rotated where its own are)."""

    def __init__(self, artifact: Path, spec: StepSpec, checkpoint: Checkpoint) -> None:
        """Raises RingstepError where the manifest does not say how the artifact was made."""
        made = Artifact(artifact, checkpoint)
        self.spec, self.stages, self.options = spec, made.manifest.stages, made.options
        self.quantised, self.rotated = "graphs" in self.stages, made.rotated
        self.plan: Plan
        self.read: Read
        self.plan, self.read = made.weights
        self.traced: dict[int, Blocks] = {}
        self.streams = self.options.streams

    @property
    def count(self) -> int:
        """Layers."""
        return len(self.plan.layers)

    @cached_property
    def has_embed(self) -> bool:
        """Whether the graph begins with a block of its own before layer 0."""
        return self.options.embedding_inside or self.plan.embedding_scale != 1.0

    @property
    def first(self) -> str:
        """The tensor that enters layer 0."""
        return "embedded" if self.has_embed else "x"

    def entry(self, index: int) -> str:
        """The tensor that block `index` (-1 the embedding, then layers, then the head) reads."""
        if index < 0:
            return "input_ids" if self.options.embedding_inside else "x"
        return hidden_names(index - 1, 1)[0] if index else self.first

    def inputs(self, index: int) -> list[str]:
        """What a block takes, by name: the residual stream, its rest, and the contract's."""
        if index < 0 or index == self.count:
            return [self.entry(index)]
        stream = hidden_names(index - 1, self.streams) if index else [self.first]
        return [*stream, *layer_inputs(self.spec.caches[index])]

    def outputs(self, index: int) -> list[str]:
        """What a block returns, by name."""
        if index < 0:
            return ["embedded"]
        if index == self.count:
            return ["logits"]
        # The last layer's rest goes nowhere.
        streams = self.streams if index < self.count - 1 else 1
        return [*hidden_names(index, streams), *layer_outputs(self.spec.caches[index])]

    def eager(self, index: int) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
        """A block in eager torch, float32, native forms, one stream: float arrays by name in and out."""
        plan, options = self.plan, dataclasses.replace(self.options, dtype="float32", activations="native")
        module: torch.nn.Module
        with torch.device("meta"):
            if index < 0:
                module = Embed(plan.vocab, plan.hidden, plan.embedding_scale, options.embedding_inside)
            elif index == self.count:
                module = Head(plan.hidden, plan.vocab, plan.norm_eps)
            else:
                module = plan.layer(plan.kinds[plan.layers[index]], options)
        if index < 0:
            bind(module, {"weight": plan.embedding} if options.embedding_inside else {}, self.read)
        else:
            bind(module, head_sources(plan) if index == self.count else plan.layer_sources(index), self.read)
        module.eval()
        names = self.inputs(index)
        stream = [name for name in names if name.startswith("hidden_rest_")]

        def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            x = feeds[names[0]]
            for rest in stream:
                x = x + feeds[rest]
            others = [feeds[name] for name in names[1:] if name not in stream]
            with torch.inference_mode():
                made = module(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (x, *others)))
            made = made if isinstance(made, tuple) else (made,)
            wanted = [name for name in self.outputs(index) if not name.startswith("hidden_rest_")]
            return {name: tensor.numpy() for name, tensor in zip(wanted, made, strict=True)}

        return run

    def block(self, index: int, n: int) -> ir.Model:
        """A block as the artifact's pipeline writes it, in float32 with its weights inside."""
        if n not in self.traced:
            alone = dataclasses.replace(self.spec, graphs=(self.spec.graph(n),))
            self.traced[n] = trace_blocks(self.plan, self.options, alone)
        stamp, plan, graph = Loaded(self.read), self.plan, self.spec.graph(n)
        shapes: dict[str, TensorSpec] = {t.name: t for t in graph.inputs}
        names, inputs = self.inputs(index), []
        for name in names:
            own = shapes.get(name)
            integer = own is not None and own.role == "ids"
            shape = own.shape if own is not None else (n, plan.hidden)
            inputs.append(stamp.value(TensorSpec(name, shape, "int32" if integer else "float32", "hidden")))
        if index < 0:
            made = stamp.block(self.traced[n]["embed", n], "/embed", inputs, ["embedded"], {"weight": plan.embedding})
        elif index == self.count:
            made = stamp.block(self.traced[n]["head", n], "/head", inputs, ["logits"], head_sources(plan))
        else:
            kind, args = plan.layers[index], list(inputs)
            if self.streams > 1 and index == 0:
                args.insert(1, stamp.zeros((n, plan.hidden)))
            every = [*hidden_names(index, self.streams), *layer_outputs(self.spec.caches[index])]
            made = stamp.block(self.traced[n][kind, n], f"/layers.{index}", args, every, plan.layer_sources(index))
            made = [value for value in made if value.name in self.outputs(index)]
        for value in made:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        body = ir.Graph(inputs, made, nodes=stamp.nodes, initializers=list(stamp.initializers.values()),
                        opset_imports={"": OPSET}, name=f"clean block {index}")  # fmt: skip
        model = ir.Model(body, ir_version=IR_VERSION, producer_name="ringstep")
        self.sanitise(model)
        return model

    def sanitise(self, model: ir.Model) -> None:
        """The passes that the artifact's graphs went through."""
        from onnx_ir.passes.common import RemoveUnusedNodesPass

        from exporters.quantised import SKIPPED
        from sanitize import graph as graphs
        from sanitize.command import choose_passes
        from sanitize.pipeline import sanitize
        from sanitize.target import find_target

        RemoveUnusedNodesPass()(model)
        record = self.stages["graphs" if self.quantised else "sanitize"]
        own = record.options
        precision = own.get("precision") if not self.quantised else ("a16" if own["chip"] else None)
        skip: Sequence[str] = own.get("skip", SKIPPED)
        sanitize(model, find_target(own["target"], own["chip"], precision), choose_passes(skip))
        graphs.infer_types(model)

    def turned(self, hidden: np.ndarray) -> np.ndarray:
        """A residual stream [rows, hidden] of the original as the artifact carries it, rotated as its weights."""
        if not self.rotated:
            return hidden
        from quantize.folding.rotate import rotation

        return rotation(self.plan.hidden).after(hidden)


def watch(reference: Reference, ids: Sequence[int]) -> tuple[Truth, list[np.ndarray]]:
    """The original on a text, with what enters layer 0 and what each layer returns, [tokens, hidden] each."""
    held: Any = reference
    layers = list(held.model.model.layers) if hasattr(held, "model") else list(held.step.layers)
    rows: list[list[np.ndarray]] = [[] for _ in range(len(layers) + 1)]

    def keep(index: int, tensor: Any) -> None:
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        rows[index].append(tensor.detach().numpy().reshape(-1, tensor.shape[-1]).copy())

    handles = [layers[0].register_forward_pre_hook(lambda _, args: keep(0, args[0]))]
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(lambda _, args, out, i=index: keep(i + 1, out)))
    try:
        truth = reference.truth(ids)
    finally:
        for handle in handles:
            handle.remove()
    return truth, [np.concatenate(own) for own in rows]


def entries_at(reference: Reference, truth: Truth, position: int, lengths: Sequence[int]) -> list[Any]:
    """The original's cache entries when `position` tokens were fed: (positions, keys, values) of each layer.

    A window that the original has already moved on from is computed again.
    """
    enough = all(own[0][0] <= max(0, position - length) for own, length in zip(truth.caches, lengths, strict=True))
    if not enough:
        return list(reference.truth(truth.ids[:position]).caches)
    found = []
    for positions, keys, vals in truth.caches:
        count = int((positions < position).sum())
        found.append((positions[:count], keys[:, :count], vals[:, :count]))
    return found

"""The whole decode step as one module: embed, layers, head, with the contract's names for inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recipes.blocks import Embed, Head
from recipes.plan import Options, Plan, Source
from ringstep.contract import CacheSpec, DType, GraphSpec, MaskSpec, StepSpec, io_tensors

Read = Callable[[Source], Any]


def step_spec(plan: Plan, options: Options, *, model: str, context: int, chunks: tuple[int, ...], eos: tuple[int, ...],
              ) -> StepSpec:  # fmt: skip
    """The contract of a plan: caches, masks, rotary, and one graph for each n of `chunks` (files not yet known).

    Decode and prefill share one cache length (window - 1, or context - 1), so a host never lays caches out again
    between them.
    """
    dtype: DType = options.dtype
    masks: dict[str, MaskSpec] = {}
    caches = []
    for index, name in enumerate(plan.layers):
        kind = plan.kinds[name]
        layout = options.layout_of(kind)
        if layout == "join":
            layout = "append" if kind.window is None else "ring"
        full = context - 1 or 1
        if layout == "ring" and (kind.window is None or kind.window >= context):
            # It would never wrap: a ring of window - 1 slots is longer than everything there is.
            layout = "append"
        length = full if layout == "append" or kind.window is None else max(1, min(full, kind.window - 1))
        masks[name] = MaskSpec(name, layout, length, kind.window)
        caches.append(
            CacheSpec(index, layout, length, kind.kv_heads, kind.head_dim, dtype, kind.rotary.name, name, kind.window)
        )
    rotary = tuple({kind.rotary.name: kind.rotary for kind in plan.kinds.values()}.values())
    graphs = []
    for n in chunks:
        inputs, outputs = io_tensors(
            n, plan.vocab, plan.hidden, dtype, rotary, tuple(masks.values()), tuple(caches), options.embedding_inside
        )
        graphs.append(GraphSpec(n, inputs, outputs))
    return StepSpec(
        recipe=plan.recipe, model=model, vocab=plan.vocab, hidden=plan.hidden, context=context, dtype=dtype,
        mask_value=-10000.0, eos=eos, rotary=rotary, masks=tuple(masks.values()), caches=tuple(caches),
        graphs=tuple(graphs), activations=options.activations,
    )  # fmt: skip


def layer_inputs(cache: CacheSpec) -> tuple[str, ...]:
    """The contract's names of what layer `cache.layer` takes after x, in the order of its forward."""
    i = cache.layer
    return (f"cos_{cache.rotary}", f"sin_{cache.rotary}", f"mask_{cache.mask}", f"past_key_{i}", f"past_value_{i}")


def layer_outputs(cache: CacheSpec) -> tuple[str, str]:
    """The contract's names of the two cache outputs of a layer."""
    prefix = "present" if cache.kind == "roll" else "new"
    return f"{prefix}_key_{cache.layer}", f"{prefix}_value_{cache.layer}"


class DecodeStep(nn.Module):
    """The step in eager torch, weights given by `read`; forward takes and returns the contract's tensors by name."""

    def __init__(self, plan: Plan, options: Options, spec: StepSpec, read: Read) -> None:
        super().__init__()
        self.spec, self.streams = spec, options.streams
        with torch.device("meta"):
            self.embed = Embed(plan.vocab, plan.hidden, plan.embedding_scale, options.embedding_inside)
            self.layers = nn.ModuleList(plan.layer(plan.kinds[name], options) for name in plan.layers)
            self.head = Head(plan.hidden, plan.vocab, plan.norm_eps)
        bind(self.embed, {"weight": plan.embedding} if options.embedding_inside else {}, read)
        for index, layer in enumerate(self.layers):
            bind(layer, plan.layer_sources(index), read)
        bind(self.head, head_sources(plan), read)
        self.eval().to(getattr(torch, options.dtype))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.embed(inputs["input_ids"] if "input_ids" in inputs else inputs["x"])
        stream = [x, torch.zeros_like(x)][: self.streams]
        outputs: dict[str, Tensor] = {}
        for layer, cache in zip(self.layers, self.spec.caches, strict=True):
            *stream, key, value = layer(*stream, *(inputs[name] for name in layer_inputs(cache)))
            outputs.update(zip(layer_outputs(cache), (key, value), strict=True))
        return outputs | {"logits": self.head(stream[0])}


def head_sources(plan: Plan) -> dict[str, Source]:
    """Where the head block's parameters come from."""
    return {"norm.weight": plan.norm, "lm_head.weight": plan.head}


def bind(module: nn.Module, sources: dict[str, Source], read: Read) -> None:
    """Replace a module's meta parameters by tensors from `read(source)` (numpy, the parameter's shape)."""
    for name, source in sources.items():
        owner, _, leaf = name.rpartition(".")
        tensor = torch.from_numpy(read(source))
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))

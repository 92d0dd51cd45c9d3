"""Contracts for tests: any mix of cache kinds, without a model behind them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from ringstep.contract import (
    CacheKind,
    CacheSpec,
    EmbeddingSpec,
    GraphSpec,
    MaskSpec,
    PartSpec,
    RotarySpec,
    StepSpec,
    TensorSpec,
    io_tensors,
)

ANGLE = 1e-3  # a rotary that says which position it is for


def make_spec(
    layers: list[tuple[CacheKind, int | None]],
    context: int,
    chunks: tuple[int, ...] = (1,),
    *,
    vocab: int = 50,
    hidden: int = 4,
    kv_heads: int = 1,
    head_dim: int = 2,
    dtype: Any = "float32",
    key_layout: Any = "plain",
    ids: bool = True,
) -> StepSpec:
    """A contract with one cache a (kind, window)."""
    rotary = (RotarySpec("rope", (ANGLE,)),)
    masks: dict[str, MaskSpec] = {}
    caches = []
    for layer, (kind, window) in enumerate(layers):
        length = max(1, context - 1 if kind == "append" or window is None else window - 1)
        name = f"{kind}_{window}"
        masks[name] = MaskSpec(name, kind, length, window)
        caches.append(CacheSpec(layer, kind, length, kv_heads, head_dim, dtype, "rope", name, window, key_layout))
    graphs = []
    for n in chunks:
        inputs, outputs = io_tensors(n, vocab, hidden, dtype, rotary, tuple(masks.values()), tuple(caches), ids)
        graphs.append(GraphSpec(n, inputs, outputs))
    embedding = None if ids else EmbeddingSpec("onnx/embedding.bin", 4096, (vocab, hidden), dtype)
    return StepSpec(
        recipe="test", model="a/b", vocab=vocab, hidden=hidden, context=context, dtype=dtype, mask_value=-10000.0,
        eos=(1,), rotary=rotary, masks=tuple(masks.values()), caches=tuple(caches), graphs=tuple(graphs),
        embedding=embedding,
    )  # fmt: skip


def with_parts(spec: StepSpec) -> StepSpec:
    """The same contract with every graph cut in two files."""
    graphs = []
    for graph in spec.graphs:
        between = TensorSpec("hidden_0", (graph.n, spec.hidden), spec.dtype, "hidden")
        inputs, outputs = tuple(t.name for t in graph.inputs), tuple(t.name for t in graph.outputs)
        parts = (
            PartSpec(f"onnx/n{graph.n}.part0.onnx", inputs, ("hidden_0",)),
            PartSpec(f"onnx/n{graph.n}.part1.onnx", ("hidden_0", *inputs[1:]), outputs),
        )
        whole = (PartSpec(f"onnx/n{graph.n}.onnx", inputs, outputs),)
        graphs.append(dataclasses.replace(graph, hidden=(between,), parts={"onnx": whole, "qnn": parts}))
    return dataclasses.replace(spec, graphs=tuple(graphs), target={"device": "galaxy-s25", "chip": "sm8750"})


@st.composite
def specs(draw: st.DrawFn) -> StepSpec:
    """Any contract that this project writes."""
    context = draw(st.integers(1, 40))
    windows = st.integers(2, 20)
    layer = st.one_of(
        st.tuples(st.sampled_from(["ring", "roll"]), windows),
        st.tuples(st.sampled_from(["append", "roll"]), st.none()),
        st.tuples(st.just("append"), windows),
    )
    chunks = draw(st.lists(st.integers(1, context), min_size=1, max_size=3, unique=True))
    spec = make_spec(
        draw(st.lists(layer, max_size=4)), context, tuple(chunks),  # type: ignore[arg-type]
        vocab=draw(st.integers(1, 1 << 18)), hidden=draw(st.integers(1, 1 << 13)), kv_heads=draw(st.integers(1, 8)),
        head_dim=2 * draw(st.integers(1, 128)), dtype=draw(st.sampled_from(["float32", "float16"])),
        key_layout=draw(st.sampled_from(["plain", "transposed"])), ids=draw(st.booleans()),
    )  # fmt: skip
    frequency = st.floats(1e-12, 1.0)
    rope = RotarySpec("rope", (draw(frequency),), draw(frequency), draw(st.floats(1, 1e9)), draw(st.text(max_size=9)))
    eos = tuple(draw(st.lists(st.integers(0, 1 << 18), max_size=3)))
    spec = dataclasses.replace(spec, rotary=(rope,), eos=eos, model=draw(st.text(max_size=9)))
    return with_parts(spec) if draw(st.booleans()) else spec

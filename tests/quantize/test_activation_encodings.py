"""Encodings of activations: what shares one, decode and prefill alike, masks that mask, bits by role, refusals."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from float_models import Recorder, calibrated, model_of, open_session, texts, traced
from onnx import TensorProto, helper

from quantize.activations import FIXED, MOVES, Activation, encode, from_range, groups, is_float, masks
from quantize.calibrate import calibrate
from quantize.observe import Seen
from quantize.scheme import Activations, Cache, Exceptions, Ranges, Scheme
from ringstep.contract import Encoding
from ringstep.devices import Chip, find_device
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession

NAMES = ("llama", "gemma3", "spark", "qwen3")
TYPES = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}
W8A16 = Scheme("test")
NEW: Chip = find_device("galaxy-s25").chip


def seen_of(name: str, skip: int = 1) -> dict[str, Seen]:
    """Calibration's histories, and the table's reach as the line adds it."""
    table = np.abs(model_of(name).table(np.arange(model_of(name).plan.vocab))).max()
    return calibrated(name, skip).seen | {"x": Seen(-float(table), float(table))}


@functools.cache
def encoded(name: str, n: int, scheme: Scheme = W8A16) -> dict[str, Activation]:
    return encode(traced(name, n)[1].graph, seen_of(name), scheme, None)


def ends(own: Activation) -> tuple[float, float]:
    """The smallest and largest number that an encoding has."""
    low, high = TYPES[own.dtype]
    return own.encoding.scale * (low - own.encoding.zero), own.encoding.scale * (high - own.encoding.zero)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("span", [(-1.0, 1.0), (-0.3, 7.0), (-9e4, 1.0), (0.0, 6.5), (-5.0, 0.0), (-1e-9, 1e-9),
                                  (0.0, 0.0), (0.0, 1e-40)])  # fmt: skip
def test_a_range_fills_its_type(dtype: Any, symmetric: bool, span: tuple[float, float]) -> None:
    own = from_range(*span, dtype, symmetric)
    low, high = ends(own)
    scale, zero = own.encoding.scale, own.encoding.zero
    assert scale >= np.finfo(np.float32).tiny and np.float32(scale) == scale
    assert TYPES[dtype][0] <= zero <= TYPES[dtype][1]  # 0.0 is a number of the type
    slack = 0.51 * scale  # the zero is rounded
    assert low - slack <= span[0] and span[1] <= high + slack
    if symmetric:
        assert zero == (0 if dtype.startswith("int") else (TYPES[dtype][1] + 1) // 2)
    elif span[1] - span[0] > 1e-30:
        assert abs((high - low) / (span[1] - span[0]) - 1) < 1e-6  # and nothing is wasted


@pytest.mark.parametrize("dtype", TYPES)
def test_fake_is_quantise_and_dequantise(dtype: Any) -> None:
    own = Activation(dtype, Encoding(0.037, 5))
    kind = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "uint16": TensorProto.UINT16,
            "int16": TensorProto.INT16}[dtype]  # fmt: skip
    x = np.random.default_rng(0).normal(0, 900, 4000).astype(np.float32)
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])]  # fmt: skip
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, (4000,))
    constants = [helper.make_tensor("s", TensorProto.FLOAT, [], [0.037]), helper.make_tensor("z", kind, [], [5])]
    graph = helper.make_graph(nodes, "g", [value("x")], [value("y")], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = open_session(model.SerializeToString(), optimised=False)
    np.testing.assert_array_equal(own.fake(x), session.run(None, {"x": x})[0])


def test_fixed_grids_hold_what_their_operators_give() -> None:
    for op, (low, high) in {"Sigmoid": (0, 1), "Softmax": (0, 1), "Tanh": (-1, 1)}.items():
        own = Activation("uint16", FIXED[op])
        assert ends(own)[0] == low and abs(ends(own)[1] - high) <= own.encoding.scale
    assert len(FIXED) == 3


def test_groups_of_a_small_graph() -> None:
    """Moves share through any chain; a computed tensor, a cache's new entry and integers are on their own."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["k"], name="/mul"),
        helper.make_node("Reshape", ["k", "shape"], ["k2"], name="/reshape"),
        helper.make_node("Transpose", ["k2"], ["new_key_0"], name="/transpose", perm=[1, 0]),
        helper.make_node("Concat", ["past_key_0", "k2"], ["all"], name="/concat", axis=0),
        helper.make_node("Split", ["all"], ["l", "r"], name="/split", axis=0, num_outputs=2),
        helper.make_node("Add", ["l", "r"], ["sum"], name="/add"),
        helper.make_node("Squeeze", ["sum"], ["new_value_0"], name="/squeeze"),
        helper.make_node("Neg", ["past_value_0"], ["y"], name="/neg"),
    ]
    value = lambda name, kind=TensorProto.FLOAT: helper.make_tensor_value_info(name, kind, (2, 2))
    inputs = [value("x"), value("past_key_0"), value("past_value_0"), value("ids", TensorProto.INT64)]
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [2, 2])
    floats = [value(n) for n in ("k", "k2", "all", "l", "r", "sum")]
    graph = helper.make_graph(nodes, "g", inputs, [value(n) for n in ("new_key_0", "new_value_0", "y")], [shape],
                              value_info=floats)  # fmt: skip
    found = groups(ir.from_proto(helper.make_model(graph)).graph)
    together = [{n for n, top in found.items() if top == root} for root in set(found.values())]
    assert sorted(map(sorted, together)) == [
        ["all", "k", "k2", "l", "new_key_0", "past_key_0", "r"], ["new_value_0", "past_value_0"], ["sum"], ["x"], ["y"],
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_rounded_twice(name: str, n: int) -> None:
    """A move has one encoding, what goes into a cache has the cache's, and every float tensor has one at all."""
    spec, model = traced(name, n)
    have = encoded(name, n)
    every = [v for node in model.graph for v in node.outputs] + list(model.graph.inputs)
    assert set(have) == {str(v.name) for v in every if is_float(v)}
    entries = {t.name for t in spec.graphs[0].outputs if t.layer is not None}
    for node in model.graph:
        if node.op_type in MOVES:
            moved = {have[str(v.name)] for v in (*node.inputs, *node.outputs)
                     if is_float(v) and str(v.name) not in entries}  # fmt: skip
            assert len(moved) == 1, node.name
    for tensor in spec.graphs[0].outputs:
        if tensor.layer is not None:
            assert have[tensor.name] == have[tensor.name.replace("new_", "past_")]


SCHEMES = [W8A16, dataclasses.replace(W8A16, cache=Cache(8), activations=Activations(bits=8))]
SCHEMES += [dataclasses.replace(W8A16, exceptions=Exceptions(**{f.name: 8})) for f in dataclasses.fields(Exceptions)]
for f in dataclasses.fields(Ranges):
    own_method = Activations(percentile=90.0, ranges=Ranges(**{f.name: "percentile"}))
    SCHEMES.append(dataclasses.replace(W8A16, activations=own_method))


@pytest.mark.parametrize("scheme", SCHEMES, ids=range(len(SCHEMES)))
@pytest.mark.parametrize("name", NAMES)
def test_decode_and_prefill_have_the_same_encodings(name: str, scheme: Scheme) -> None:
    one, eight = encoded(name, 1, scheme), encoded(name, 8, scheme)
    # What moves is another tensor under the same name: the two graphs move things otherwise.
    moved = {str(v.name) for n in (1, 8) for node in traced(name, n)[1].graph if node.op_type in MOVES
             for v in node.outputs if not str(v.name).startswith("new_")}  # fmt: skip
    inputs = {t.name for t in (*traced(name, 1)[0].graphs[0].inputs, *traced(name, 1)[0].graphs[0].outputs)}
    assert inputs <= set(one) and inputs <= set(eight)
    assert set(one) - moved == set(eight) - moved
    for tensor in set(one) - moved:
        assert one[tensor] == eight[tensor], tensor


@pytest.mark.parametrize("name", NAMES)
def test_names_mean_the_same_in_decode_and_prefill(name: str) -> None:
    """What is computed under a name has the same values one token at a time, in ONNX Runtime, as in the chunks that
    calibration ran."""
    model, ids = model_of(name), texts(160)[0][:24]
    spec, graph = traced(name, 1)
    engine = Recorder(model, graph.graph)
    session = DecodeSession(dataclasses.replace(spec, embedding=None), engine, None)
    table = model.table(np.arange(model.plan.vocab))
    session.step(table[ids])
    seen = calibrate(model, [ids], []).seen
    masked = {str(v.name) for node in graph.graph if masks(node) for v in node.outputs}
    moved = {n for n, kind in engine.kinds.items() if kind in MOVES}
    checked = 0
    for tensor in set(engine.kinds) - moved - masked:
        if tensor.startswith("/embed/"):
            continue
        values = np.concatenate([array.ravel() for array in engine.seen[tensor]])
        reach = np.abs(values).max()
        assert seen[tensor].low <= values.min() + 1e-4 * reach and values.max() - 1e-4 * reach <= seen[tensor].high
        if not tensor.endswith("attn/MatMul_output_0"):  # a chunk's scores reach into its future, which is masked
            assert abs(seen[tensor].low - values.min()) <= 1e-4 * reach, tensor
            assert abs(seen[tensor].high - values.max()) <= 1e-4 * reach, tensor
        checked += 1
    assert checked > 20 * len(model.plan.layers)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_seen_fits(name: str) -> None:
    """16 bits hold half as much again as calibration saw; fixed grids hold what their operator can give."""
    model, have = traced(name, 8)[1], encoded(name, 8)
    fixed = {str(node.outputs[0].name): node.op_type for node in model.graph if node.op_type in FIXED}
    masked = {str(node.outputs[0].name) for node in model.graph if masks(node)}
    for tensor, seen in seen_of(name).items():
        if tensor not in have or tensor in masked or tensor.startswith("mask_"):
            continue
        low, high = ends(have[tensor])
        if tensor in fixed:
            assert have[tensor] == Activation("uint16", FIXED[fixed[tensor]])
            assert low - 1e-4 <= seen.low and seen.high <= high + 1e-4
            continue
        step = have[tensor].encoding.scale
        assert low - step <= 1.5 * min(seen.low, 0) and 1.5 * max(seen.high, 0) <= high + step, tensor


@pytest.mark.parametrize("name", NAMES)
def test_masks_mask(name: str) -> None:
    """A masked score keeps less than half a step of a 16-bit softmax whatever it was, and visible ones are whole."""
    graph, have = traced(name, 8)[1].graph, encoded(name, 8)
    seen = seen_of(name)
    random = np.random.default_rng(0)
    nodes = [node for node in graph if masks(node)]
    assert len(nodes) == len(model_of(name).plan.layers)
    for node in nodes:
        score, mask = (str(v.name) for v in node.inputs if v is not None)
        own, out = have[mask], have[str(node.outputs[0].name)]
        assert own.encoding.zero == 65535 and ends(own)[1] == 0
        assert all(have[n] == own for n in have if n.startswith("mask_"))
        maker = next(v for v in node.inputs if v is not None and str(v.name) == score)
        while str(maker.name) not in seen:
            maker = maker.producer().inputs[0]  # type: ignore[union-attr]
        own_seen = seen[str(maker.name)]
        visible = have[score].fake(random.uniform(own_seen.low, own_seen.high, (500, 12)).astype(np.float32))
        worst = np.full((500, 4), own_seen.high, np.float32)
        visible[0] = own_seen.low
        rows = out.fake(np.concatenate([visible, worst + np.float32(ends(own)[0])], 1))
        assert np.abs(rows[:, :12] - visible).max() <= out.encoding.scale
        weights = np.exp(rows - rows.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        assert weights[:, 12:].max() < 0.5 / 65535


def test_bits_of_exceptions() -> None:
    """8 bits for what goes in and out of norms, gates, or scores, and 16 for the rest."""
    plain = encoded("spark", 8)
    cases: dict[str, Any] = {
        "norms": ("hidden_3", "/layers.0/attn/q_proj/Gemm_output_0"),
        "gates": ("/layers.2/attn/g_proj/Gemm_output_0", "hidden_3"),
        "softmax": ("/layers.1/attn/Softmax_output_0", "hidden_3"),
    }
    for key, (inside, outside) in cases.items():
        scheme = dataclasses.replace(W8A16, exceptions=dataclasses.replace(Exceptions(), **{key: 8}))
        have = encode(traced("spark", 8)[1].graph, seen_of("spark"), scheme, None)
        assert have[outside] == plain[outside]
        changed = {tensor for tensor in have if have[tensor] != plain[tensor]}
        assert all(have[tensor].dtype == "uint8" for tensor in changed)
        if key != "softmax":  # what Softmax gives has a grid of its own in 16 bits
            assert inside in changed, (key, sorted(changed)[:5])
        assert changed, key


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("key", ["norms", "gates", "softmax"])
def test_linears_and_ends_are_no_exceptions(key: str, bits: Any) -> None:
    """HTP's linears read and write one width, and the inputs of a step are of one type."""
    scheme = dataclasses.replace(W8A16, exceptions=dataclasses.replace(Exceptions(), **{key: bits}))
    spec, model = traced("spark", 8)
    have = encode(model.graph, seen_of("spark"), scheme, find_device("galaxy-s25").chip)
    plain = {t.name for g in spec.graphs for t in (*g.inputs, *g.outputs) if t.layer is None and t.name in have}
    for node in model.graph:
        if node.op_type == "Gemm":
            plain |= {str(v.name) for v in (node.inputs[0], node.outputs[0]) if v is not None}
    for tensor in plain:
        own = have[tensor]
        assert own is not None and own.dtype == "uint16", tensor
    if key == "gates":  # what a gate gives has its fixed grid in 16 bits only
        gate = have[next(str(node.outputs[0].name) for node in model.graph if node.op_type == "Sigmoid")]
        assert (gate is None) if bits == 0 else (gate is not None and gate.dtype == "uint8")


def test_a_sink_that_overflows_a_linear_widens_it() -> None:
    """HTP refuses a linear of floats on integer weights."""
    graph, seen = traced("spark", 8)[1].graph, seen_of("spark")
    name = "/layers.0/mlp/down_proj/Gemm_output_0"
    far = 100 * max(abs(seen[name].low), abs(seen[name].high))
    scheme = dataclasses.replace(W8A16, sink_prefix="off")
    made = encode(graph, seen, scheme, find_device("galaxy-s25").chip, {name: Seen(-far, far, far)})[name]
    assert made is not None and made.encoding.scale * 65535 >= 2 * far


def test_8_bits_throughout() -> None:
    scheme = dataclasses.replace(W8A16, activations=Activations(bits=8), cache=Cache(bits=8))
    have = encode(traced("llama", 8)[1].graph, seen_of("llama"), scheme, None)
    masks = {n for n in have if n.startswith("mask_")}
    assert {have[n].dtype for n in have if n not in masks} == {"uint8"}
    seen = seen_of("llama")
    for tensor in ("hidden_0", "logits"):
        low, high = ends(have[tensor])
        assert abs((high - low) / (seen[tensor].high - seen[tensor].low) - 1) < 0.02  # no headroom: it costs accuracy


@pytest.mark.parametrize(("device", "bits", "dtype", "zero"), [("galaxy-s25", 16, "int16", 0),
    ("galaxy-s25", 8, "uint8", 128), ("qcs6490", 16, "uint8", 128), ("qcs6490", 8, "uint8", 128)])  # fmt: skip
def test_caches_by_chip(device: str, bits: Any, dtype: str, zero: int) -> None:
    chip = find_device(device).chip
    scheme = dataclasses.replace(W8A16, cache=Cache(bits=bits))
    have = encode(traced("llama", 8)[1].graph, seen_of("llama"), scheme, chip)
    for layer in range(2):
        for what in ("key", "value"):
            own = have[f"past_{what}_{layer}"]
            assert (own.dtype, own.encoding.zero) == (dtype, zero) and own == have[f"new_{what}_{layer}"]
    if dtype == "uint8":
        # 8 bits are 8 bits, whichever way they came about.
        small = encode(traced("llama", 8)[1].graph, seen_of("llama"), dataclasses.replace(W8A16, cache=Cache(8)), NEW)
        assert have["past_key_0"] == small["past_key_0"]


def test_ranges_by_role() -> None:
    """A method changes the tensors of its role alone."""
    tight = Activations(percentile=80.0)
    graph, seen, plain = traced("llama", 8)[1].graph, seen_of("llama"), encoded("llama", 8)
    inside = {"linear_input": "/layers.0/input_norm/RMSNormalization_output_0", "residual": "hidden_0",
              "scores": "/layers.0/attn/MatMul_output_0", "cache": "past_key_1", "logits": "logits",
              "gate": "/layers.1/mlp/gate_proj/Gemm_output_0",
              "other": "/layers.1/mlp/up_proj/Gemm_output_0"}  # fmt: skip
    assert set(inside) == {f.name for f in dataclasses.fields(Ranges)}
    for role, tensor in inside.items():
        ranges = dataclasses.replace(Ranges(), **{role: "percentile"})
        scheme = dataclasses.replace(W8A16, activations=dataclasses.replace(tight, ranges=ranges))
        have = encode(graph, seen, scheme, None)
        assert have[tensor].encoding.scale < 0.95 * plain[tensor].encoding.scale, role
        for other, name in inside.items():
            assert other == role or have[name] == plain[name], (role, other)


def test_a_tensor_never_seen_is_named() -> None:
    for gone in ("hidden_0", "/layers.1/mlp/up_proj/Gemm_output_0", "logits"):
        seen = {n: s for n, s in seen_of("llama").items() if n != gone}
        with pytest.raises(RingstepError, match=f"tensor {gone}: calibration never saw it"):
            encode(traced("llama", 8)[1].graph, seen, W8A16, None)


@pytest.mark.parametrize("gone", ["hidden_0", "new_value_1", "logits"])
def test_a_tensor_that_was_not_finite_is_named(gone: str) -> None:
    seen = seen_of("llama") | {gone: Seen(np.nan, np.nan)}
    with pytest.raises(RingstepError, match=r"tensor .*: values that are not finite") as caught:
        encode(traced("llama", 8)[1].graph, seen, W8A16, None)
    assert "\n" not in str(caught.value)
    assert gone.split("_")[-1] in str(caught.value)

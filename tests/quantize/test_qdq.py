"""QDQ graphs: what ONNX Runtime computes of them, what lies in their files, and that nothing in them stays float."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from float_models import N, model_of, open_session, texts, traced
from onnx import TensorProto, helper
from qdq_models import Quantised, quantised
from qdq_models import integers as whole_numbers

from quantize.activations import MOVES, Activation, encode
from quantize.fake import logits
from quantize.grid import Grid
from quantize.observe import Seen
from quantize.qdq import to_qdq
from quantize.scheme import Activations, Cache, Exceptions, Scheme
from quantize.store import Place, Stored
from quantize.torch_graph import OPERATORS
from recipes.weights import key, sources
from ringstep.contract import Encoding
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession

CASES = [("llama", "w8"), ("llama", "w4"), ("llama", "lpbq"), ("llama", "w16"), ("qwen3", "w8"), ("gemma3", "w8"),
         ("gemma3", "lpbq"), ("spark", "w4"), ("spark", "lpbq")]  # fmt: skip
INTEGERS = {TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16}
KV8 = Scheme("kv8", cache=Cache(bits=8))
A8 = Scheme("a8", activations=Activations(bits=8), cache=Cache(bits=8))


def rows_of(own: Quantised, count: int, text: int = 1) -> tuple[list[int], np.ndarray]:
    """Ids of a text behind its first token, and the rows that go into the graph."""
    vocab = own.model.plan.vocab
    ids = texts(vocab)[text][1 : count + 1]
    return ids, own.model.table(np.array(ids))


def by_onnx_runtime(own: Quantised, rows: np.ndarray, each: int) -> np.ndarray:
    """Logits of rows behind the sink prefix, `each` at a time."""
    with own.open() as session:
        session.seed(own.entries())
        return np.concatenate([session.step(rows[at : at + each]) for at in range(0, len(rows), each)])


def faked(own: Quantised, ids: list[int], activations: Any) -> np.ndarray:
    weight = lambda name: own.weights[name].dequantised() if name in own.weights else None
    return logits(own.model, ids, own.found.entries, weight, activations)


@pytest.mark.parametrize(("name", "grids"), CASES)
def test_onnx_runtime_computes_the_fake_quantised_model(name: str, grids: str) -> None:
    """Token by token, in chunks, and as torch has it: past the sliding windows of gemma3 and spark."""
    own = quantised(name, grids)
    ids, rows = rows_of(own, 32)
    want = faked(own, ids, own.activations)
    weights_alone = faked(own, ids, None)
    floats = logits(own.model, ids, own.found.entries, lambda _: None, None)
    for each in (1, N, 32):
        have = by_onnx_runtime(own, rows, each)
        # Values next to the middle of two steps may go either way, and what follows differs from there on.
        assert snr_db(want, have) >= (57 if name == "spark" else 60), each
        assert snr_db(floats, have) >= min(60, snr_db(floats, weights_alone)) - 1.5
    assert {"w8": 25, "w4": 3, "lpbq": 5, "w16": 55}[grids] <= snr_db(floats, want)


class Everything:
    """An engine over one graph as it is written, unoptimised; keeps every tensor of the last call."""

    name = "everything"

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        shaped = onnx.shape_inference.infer_shapes(model, data_prop=True)
        have = {v.name for v in model.graph.output}
        own = [v for v in shaped.graph.value_info if v.type.tensor_type.elem_type in INTEGERS]
        model.graph.output.extend(v for v in own if v.name not in have)
        self.session = open_session(model.SerializeToString(), optimised=False)
        self.last: dict[str, np.ndarray] = {}

    def run(self, n: int, inputs: Any, outputs: Any) -> None:
        names = [o.name for o in self.session.get_outputs()]
        self.last = dict(zip(names, (np.asarray(v) for v in self.session.run(names, dict(inputs))), strict=True))
        self.last |= {name: array.copy() for name, array in inputs.items()}
        for name, array in outputs.items():
            array[...] = self.last[name]

    def close(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize(("name", "grids"), CASES)
def test_every_operator_rounds_as_its_encoding_says(name: str, grids: str, n: int) -> None:
    """Each node on its own: the float operator on what the graph's integers stand for, rounded, is the next integer."""
    own = quantised(name, grids)
    engine = Everything(own.folder / f"{n}.onnx")
    session = DecodeSession(dataclasses.replace(own.spec, graphs=(own.spec.graph(n),)), engine)
    session.seed(own.entries())
    _, rows = rows_of(own, 16)
    session.step(rows)
    graph = traced(name, n)[1].graph
    have = encode(graph, own.found.seen | {"x": Seen(-1, 1)}, Scheme("test"), None) | {"x": own.activations["x"]}
    parameters = {k: w.dequantised() for k, w in own.weights.items()}
    parameters |= {key(s): own.model.read(s) for s in sources(own.model.plan) if len(s.out_shape) == 1}

    def integers(value: ir.Value) -> np.ndarray:
        inner = f"{value.name}_quantised"
        return engine.last[inner if inner in engine.last else str(value.name)]

    def real(value: ir.Value | None) -> torch.Tensor | None:
        if value is None:
            return None
        if value.const_value is not None:
            array = parameters.get(str(value.name))
            return torch.from_numpy(np.array(value.const_value.numpy() if array is None else array))
        own = have[str(value.name)]
        assert own is not None
        q = integers(value)
        assert q.dtype == own.dtype
        return torch.from_numpy(((q.astype(np.float64) - own.encoding.zero) * own.encoding.scale).astype(np.float32))

    for node in graph:
        attributes = {k: a.value for k, a in node.attributes.items()}
        made = OPERATORS[node.op_type](attributes, *map(real, node.inputs))
        for value, result in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
            encoding = have[str(value.name)]
            assert encoding is not None
            want = whole_numbers(result.numpy(), encoding).astype(np.int64)
            steps = np.abs(want - integers(value).astype(np.int64))
            # Norms' weights have 16 bits in the graph.
            often = {"RMSNormalization": 0.2}.get(node.op_type, 0.02)
            few = 0 if node.op_type in MOVES else max(1, often * steps.size)
            assert steps.max() <= 1 and (steps > 0).sum() <= few, node.name


def test_8_bit_caches() -> None:
    own = quantised("llama", "w8", KV8)
    assert {c.dtype for c in own.spec.caches} == {"uint8"}
    ids, rows = rows_of(own, 32)
    want = faked(own, ids, own.activations)
    for each in (1, N):
        assert snr_db(want, by_onnx_runtime(own, rows, each)) >= 50
    floats = logits(own.model, ids, own.found.entries, lambda _: None, None)
    wide = by_onnx_runtime(quantised("llama", "w8"), rows, N)
    narrow = by_onnx_runtime(own, rows, N)
    assert snr_db(floats, wide) - 12 < snr_db(floats, narrow) <= snr_db(floats, wide) + 0.5


def test_8_bit_activations() -> None:
    own = quantised("llama", "w8", A8)
    ids, rows = rows_of(own, 16)
    want = faked(own, ids, own.activations)
    have = by_onnx_runtime(own, rows, N)
    assert snr_db(want, have) >= 40  # fused kernels saturate on x86 without VNNI: 16 dB
    assert {t.dtype for t in own.spec.graphs[0].outputs} == {"uint8"}


@pytest.mark.parametrize("key", ["norms", "gates", "softmax"])
def test_activations_that_stay_in_float(key: str) -> None:
    """No pair of Q and DQ where the scheme says 0, and the rest as before."""
    scheme = Scheme(key, exceptions=dataclasses.replace(Exceptions(), **{key: 0}))
    own, plain = quantised("spark", "w8", scheme), quantised("spark", "w8")
    left = {n for n, a in own.activations.items() if a is None}
    for n in (1, N):
        made = onnx.load(own.folder / f"{n}.onnx", load_external_data=False).graph
        names = {o for node in made.node for o in node.output}
        assert not {f"{x}_quantised" for x in left} & names
    if key != "softmax":  # what Softmax gives has a grid of its own
        assert left and left < {n for n, a in plain.activations.items() if a is not None}
    ids, rows = rows_of(own, 16)
    assert snr_db(faked(own, ids, own.activations), by_onnx_runtime(own, rows, N)) >= 57


def files(own: Quantised) -> dict[int, onnx.ModelProto]:
    return {n: onnx.load(own.folder / f"{n}.onnx", load_external_data=False) for n in (1, N)}


def external(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """File, offset and length."""
    about = {e.key: e.value for e in tensor.external_data}
    return about["location"], int(about["offset"]), int(about["length"])


@pytest.mark.parametrize(("name", "grids"), CASES)
def test_decode_and_prefill_share_every_weight(name: str, grids: str) -> None:
    """The same bytes of the same file, by the files themselves: the rounded weights; nothing else is large."""
    own = quantised(name, grids)
    places: dict[int, dict[str, tuple[Any, ...]]] = {}
    for n, model in files(own).items():
        onnx.checker.check_model(str(own.folder / f"{n}.onnx"))
        places[n] = {}
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                places[n][tensor.name] = (*external(tensor), tensor.data_type, tuple(tensor.dims))
            else:
                assert len(tensor.raw_data) <= 2 * 2048, tensor.name
    assert places[1] == places[N]
    parts = {"lpbq": 3}.get(grids, 2)
    assert len(places[1]) == parts * len(own.weights) - (grids == "lpbq")  # the head is per channel
    raw = (own.folder / "quantised.bin").read_bytes()
    ends = sorted((at, at + size) for _, at, size, *_ in places[1].values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends)) and ends[-1][1] == len(raw)
    assert all(at % 64 == 0 for at, _ in ends)
    for weight, want in own.weights.items():
        _, at, size, kind, dims = places[1][f"{weight}_q"]
        assert dims == want.q.shape
        if kind == TensorProto.INT4:
            both = np.frombuffer(raw, np.uint8, size, at)
            q = np.stack([both & 15, both >> 4], -1).reshape(-1)[: want.q.size].astype(np.int16)
            q = np.where(q > 7, q - 16, q).reshape(dims)
        else:
            q = np.frombuffer(raw, {TensorProto.INT8: np.int8, TensorProto.INT16: np.int16}[kind], want.q.size, at)
            q = q.reshape(dims)
        np.testing.assert_array_equal(q, want.q)


@pytest.mark.parametrize(("name", "grids"), CASES)
def test_nothing_stays_in_float(name: str, grids: str) -> None:
    """Every operator reads DequantizeLinear and is read by QuantizeLinear alone, the head's too; ends are integers."""
    own = quantised(name, grids)
    for model in files(own).values():
        graph = model.graph
        assert {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)} <= INTEGERS
        maker = {o: node for node in graph.node for o in node.output}
        readers: dict[str, list[str]] = {}
        for node in graph.node:
            for i in node.input:
                readers.setdefault(i, []).append(node.op_type)
        floats = {t.name for t in graph.initializer if t.data_type == TensorProto.FLOAT}
        computing = [node for node in graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
        gemms = 0
        for node in computing:
            gemms += node.op_type == "Gemm" or node.name.endswith("proj/Gemm")
            turned = node.name.endswith("/weight/Transpose")  # int4, which the compiler folds
            for i in node.input:
                made = maker.get(i)
                assert i not in floats, (node.name, i)
                assert turned or made is None or made.op_type in ("DequantizeLinear",), (node.name, i)
            for o in node.output:
                assert set(readers[o]) == ({"DequantizeLinear"} if turned else {"QuantizeLinear"}), (node.name, o)
        assert gemms == len(own.weights)
        for node in graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                # A scale is a constant, or of a two-level block made of constants.
                assert node.input[1] in floats or maker[node.input[1]].name.endswith("/scales/DequantizeLinear")


@pytest.mark.parametrize("case", [("llama", "w8", None), ("spark", "w4", None), ("llama", "w8", KV8)])
def test_caches_go_out_as_they_come_in(case: tuple[str, str, Scheme | None]) -> None:
    """By the graphs' own scales and zero points, in decode and prefill."""
    own = quantised(*case)
    found: dict[str, set[tuple[float, int, int]]] = {}
    for model in files(own).values():
        graph = model.graph
        values = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer
                  if t.data_location != TensorProto.EXTERNAL}  # fmt: skip
        kinds = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
        for node in graph.node:
            name = node.input[0] if node.op_type == "DequantizeLinear" else node.output[0]
            if node.op_type in ("QuantizeLinear", "DequantizeLinear") and name.startswith(("past_", "new_")):
                if name not in kinds:
                    continue
                encoding = float(values[node.input[1]]), int(values[node.input[2]]), kinds[name]
                found.setdefault(name.split("_", 1)[1], set()).add(encoding)
    assert len(found) == 2 * len(own.spec.caches) and all(len(v) == 1 for v in found.values()), found
    for tensor, encodings in found.items():
        (scale, zero, _), want = next(iter(encodings)), own.activations[f"past_{tensor}"]
        assert want is not None and np.float32(want.encoding.scale) == np.float32(scale) and want.encoding.zero == zero


def small_model(array: np.ndarray) -> ir.Model:
    """y = x + constant."""
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 4))
    constant = onnx.numpy_helper.from_array(array.astype(np.float32), "c")
    graph = helper.make_graph([helper.make_node("Add", ["x", "c"], ["y"], name="/add")], "g", [value("x")],
                              [value("y")], [constant])  # fmt: skip
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.17677669, -3.7e-8, 1e30, -1e30, 65504.0])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_number_is_exact(value: float, shape: tuple[int, ...], tmp_path: Path) -> None:
    wide = Activation("uint16", Encoding(1.0, 0))
    made = to_qdq(small_model(np.full(shape, value)), tmp_path, {"x": wide, "y": wide}, {}, {})
    kept = {str(v.name): v.const_value.numpy() for v in made.graph.initializers.values()}  # type: ignore[union-attr]
    q, scale, zero = (kept[f"c_{what}"] for what in ("q", "scale", "zero"))
    assert q.shape == shape and scale.dtype == np.float32 and q.dtype == zero.dtype == np.uint16
    have = (q.astype(np.float64) - zero) * scale
    assert np.abs(have - np.float32(value)).max() <= 2e-7 * abs(value)


def test_small_constants_have_16_bits(tmp_path: Path) -> None:
    values = np.array([0.5, -7.0, 0.0, 3e-3])
    wide = Activation("uint16", Encoding(1.0, 0))
    made = to_qdq(small_model(values), tmp_path, {"x": wide, "y": wide}, {}, {})
    kept = {str(v.name): v.const_value.numpy() for v in made.graph.initializers.values()}  # type: ignore[union-attr]
    assert kept["c_q"].dtype == np.int16 and kept["c_zero"] == 0
    assert np.abs(kept["c_q"] * kept["c_scale"] - values).max() <= 0.51 * 7 / 32767
    for bad in (np.nan, np.inf):
        with pytest.raises(RingstepError, match="tensor c: values that are not finite"):
            to_qdq(small_model(np.array([1.0, bad])), tmp_path, {"x": wide, "y": wide}, {}, {})


def refused(message: str, *args: Any) -> None:
    with pytest.raises(RingstepError, match=message) as caught:
        to_qdq(*args)
    assert "\n" not in str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    own = quantised("llama", "w8")
    graph, model = traced("llama", N)[1], model_of("llama")
    small = {"model.norm.weight": model.read(model.plan.norm)}
    some = {n: a for n, a in own.activations.items() if n != "hidden_0"}
    refused("tensor hidden_0: no encoding", graph, tmp_path, some, own.stored, small)
    place = Place("quantised.bin", 0, (64, 64), "int8")
    for grid, word in ((Grid(8, False), "zero points"), (Grid(4, True, 16), "blocks"), (Grid(3), "3 bits")):
        stored = dict.fromkeys(own.stored, Stored(grid, (64, 64), place, place))
        refused(f"tensor model.layers.0.self_attn.q_proj.weight: .*{word}", graph, tmp_path, own.activations, stored,
                small)  # fmt: skip
    wide = Activation("uint16", Encoding(1.0, 0))
    refused("weight c is no linear layer's; it would stay in float", small_model(np.zeros((300, 300))), tmp_path,
            {"x": wide, "y": wide}, {}, {})  # fmt: skip

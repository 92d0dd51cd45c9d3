"""Quantised numbers against ONNX Runtime's own operators, tables and sink prefixes byte for byte."""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from quantised_specs import quantised
from step_specs import make_spec

from ringstep.contract import EmbeddingSpec, Encoding, PrefixSpec, StepSpec, TensorSpec
from ringstep.encoding import Table, dequantise, open_prefix, open_table, put, quantise, write_prefix
from ringstep.errors import RingstepError

TYPES = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}
ONNX = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "uint16": TensorProto.UINT16, "int16": TensorProto.INT16}


def by_onnx_runtime(op: str, x: np.ndarray, encoding: Encoding, dtype: str) -> np.ndarray:
    """QuantizeLinear or DequantizeLinear of a vector."""
    kinds = (TensorProto.FLOAT, ONNX[dtype]) if op == "QuantizeLinear" else (ONNX[dtype], TensorProto.FLOAT)
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [encoding.scale]),
        helper.make_tensor("zero", ONNX[dtype], [], [encoding.zero]),
    ]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "scale", "zero"], ["y"])], "g",
        [helper.make_tensor_value_info("x", kinds[0], x.shape)],
        [helper.make_tensor_value_info("y", kinds[1], x.shape)], constants,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def encodings(dtype: str) -> list[Encoding]:
    low, high = TYPES[dtype]
    scales = (0.5, 0.1, 3.1e-5, 1 / 65535, 700.0)
    return [Encoding(scale, zero) for scale in scales for zero in (low, high, (low + high + 1) // 2, low + 77)]


@pytest.mark.parametrize("dtype", TYPES)
def test_the_integers_of_onnx_runtime(dtype: str) -> None:
    low, high = TYPES[dtype]
    random = np.random.default_rng(0)
    for encoding in encodings(dtype):
        halves = np.arange(-9, 10) * 0.5  # exactly between two integers where the scale is a power of two
        steps = np.concatenate([random.uniform(low - high - 99, high - low + 99, 3000), halves, [0.0, -0.0]])
        x = (steps * encoding.scale).astype(np.float32)
        np.testing.assert_array_equal(
            quantise(x, encoding, dtype), by_onnx_runtime("QuantizeLinear", x, encoding, dtype), str(encoding)
        )
        q = random.integers(low, high + 1, 3000).astype(dtype)
        want = by_onnx_runtime("DequantizeLinear", q, encoding, dtype)
        have = dequantise(q, encoding)
        assert have.dtype == np.float32
        np.testing.assert_array_equal(have, want, str(encoding))
        np.testing.assert_array_equal(quantise(have, encoding, dtype), q)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_ends_clip(dtype: str) -> None:
    encoding = Encoding(0.5, 5)
    far = np.array([-np.inf, -1e38, 1e38, np.inf], np.float32)
    assert quantise(far, encoding, dtype).tolist() == [TYPES[dtype][0]] * 2 + [TYPES[dtype][1]] * 2


def test_a_tensor_without_an_encoding_is_cast() -> None:
    values = np.array([1.5, -2.25], np.float16)
    made = dequantise(values, None)
    assert made.dtype == np.float32 and made.tolist() == [1.5, -2.25]
    made[0] = 9  # a copy: logits belong to the caller
    assert values[0] == 1.5
    same = np.zeros(3, np.float32)
    dequantise(same, None)[0] = 1
    assert same[0] == 0


def test_put_quantises_where_there_is_an_encoding() -> None:
    into = np.zeros((1, 1, 2, 3), np.int16)
    put(into[0, 0], np.array([[1, 2, 3], [-1, 0, 100]]), TensorSpec("m", (1, 1, 2, 3), "int16", "mask", "m", None,
                                                                   Encoding(0.5, 4)))  # fmt: skip
    assert into[0, 0].tolist() == [[6, 8, 10], [2, 4, 204]]
    plain = np.zeros(2, np.float16)
    put(plain, np.array([0.1, 7]), TensorSpec("x", (2,), "float16", "embedding"))
    assert plain.tolist() == [np.float16(0.1), 7]


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_a_table_of_integers(tmp_path: Path, dtype: Any) -> None:
    """Rows at `offset`, scales at `scales`, both anywhere in the file; only the asked rows are made float."""
    random = np.random.default_rng(1)
    low, high = TYPES[dtype]
    rows = random.integers(low, high + 1, (50, 4)).astype(dtype)
    scales = random.uniform(1e-4, 1e-2, 50).astype(np.float32)
    spec = make_spec([("ring", 4)], 8, ids=False)
    (tmp_path / "onnx").mkdir()
    blob = b"\7" * 100 + scales.tobytes() + b"\7" * 28 + rows.tobytes()
    (tmp_path / "onnx" / "embedding.bin").write_bytes(blob)
    spec = dataclasses.replace(spec, embedding=EmbeddingSpec("onnx/embedding.bin", 328, (50, 4), dtype, 100))
    table = open_table(tmp_path, spec)
    assert table is not None and table.shape == (50, 4)
    ids = np.array([3, 49, 0, 3])
    want = rows[ids].astype(np.float64) * scales[ids][:, None]
    have = table[ids]
    assert have.dtype == np.float32
    np.testing.assert_allclose(have, want, rtol=1e-6)
    for at in (100, 328):
        (tmp_path / "onnx" / "embedding.bin").write_bytes(blob[: at + 150])
        with pytest.raises(RingstepError, match=r"embedding\.bin: no .* there .*, which is the embedding table"):
            open_table(tmp_path, spec)
    (tmp_path / "onnx" / "embedding.bin").unlink()
    os.mkfifo(tmp_path / "onnx" / "embedding.bin")
    with pytest.raises(RingstepError, match="not an ordinary file"):
        open_table(tmp_path, spec)


def test_a_float_table_keeps_its_type() -> None:
    rows = np.arange(8, dtype=np.float16).reshape(4, 2)
    assert Table(rows)[np.array([2])].dtype == np.float16


IDS = (4, 0, 49)


def prefix_spec(cache: str, key_layout: str = "plain") -> StepSpec:
    spec = make_spec([("ring", 4), ("append", None), ("roll", 3)], 16, (1, 4), kv_heads=2, key_layout=key_layout)
    spec = quantised(spec, cache, halve=True) if cache else spec
    return dataclasses.replace(spec, prefix=PrefixSpec("sink.bin", IDS))


def floats() -> dict[tuple[int, str], np.ndarray]:
    """Entries [kv_heads, count, head_dim], every number another."""
    values = iter(range(1000))
    number = lambda *shape: np.array([next(values) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)
    return {(layer, what): number(2, 3, 2) % 50 for layer in range(3) for what in ("key", "value")}


LOGITS = np.linspace(-3, 3, 3 * 50, dtype=np.float32).reshape(3, 50)


@pytest.mark.parametrize("key_layout", ["plain", "transposed"])
@pytest.mark.parametrize("cache", ["", "uint8", "int16"])
def test_a_prefix_is_written_as_documented(tmp_path: Path, cache: str, key_layout: str) -> None:
    """For each cache keys, then values, [kv_heads, ids, head_dim] in the cache's type; then logits float32."""
    spec = prefix_spec(cache, key_layout)
    entries = floats()
    assert write_prefix(tmp_path / "sink.bin", spec, list(IDS), entries, LOGITS) == spec.prefix
    want = b""
    code = {"": "f", "uint8": "B", "int16": "h"}[cache]
    tensors = {t.name: t for t in spec.graphs[1].inputs}
    for layer in range(3):
        for what in ("key", "value"):
            encoding = tensors[f"past_{what}_{layer}"].encoding
            for value in entries[layer, what].ravel().tolist():
                if encoding is None:
                    want += struct.pack("<f", value)
                else:
                    low, high = TYPES[cache]
                    want += struct.pack(code, min(high, max(low, round(value / encoding.scale) + encoding.zero)))
    for value in LOGITS.ravel().tolist():
        want += struct.pack("<f", value)
    assert (tmp_path / "sink.bin").read_bytes() == want
    found = open_prefix(tmp_path, spec)
    assert found is not None and found.ids == IDS
    np.testing.assert_array_equal(found.logits, LOGITS)
    for (layer, what), array in found.entries.items():
        own = tensors[f"past_{what}_{layer}"]
        assert array.shape == (1, 2, 3, 2) and array.dtype == own.dtype
        if cache != "uint8":  # there some clip
            np.testing.assert_array_equal(dequantise(array, own.encoding)[0], entries[layer, what])


@pytest.mark.parametrize("spoil", ["missing", "shorter", "longer", "empty", "folder", "logits", "entries"])
def test_a_prefix_that_is_not_what_step_json_says(tmp_path: Path, spoil: str) -> None:
    spec = prefix_spec("")
    path = tmp_path / "sink.bin"
    entries, logits = floats(), LOGITS.copy()
    if spoil == "logits":
        logits[1, 7] = np.nan
    if spoil == "entries":
        entries[1, "value"][1, 2, 1] = np.inf
    write_prefix(path, spec, IDS, entries, logits)
    raw = path.read_bytes()
    if spoil in ("missing", "folder"):
        path.unlink()
    if spoil == "folder":
        path.mkdir()
    if spoil in ("shorter", "longer", "empty"):
        path.write_bytes({"shorter": raw[:-1], "longer": raw + b"\0", "empty": b""}[spoil])
    with pytest.raises(RingstepError, match=r"sink\.bin: .*export again") as caught:
        open_prefix(tmp_path, spec)
    assert "\n" not in str(caught.value)


def test_no_prefix() -> None:
    assert open_prefix(Path("/nowhere"), make_spec([("ring", 4)], 8)) is None


"""Packing against ONNX Runtime, against onnx's own packing, and on the HTP simulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantize.pack import ONNX_TYPES, onnx_tensor, pack, unpack
from ringstep.devices import find_device
from ringstep.engines.qnn_sim import open_graph
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13, 32, 33])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_numbers_are_a_little_endian_stream_of_bits(bits: int, signed: bool, count: int) -> None:
    low = -(1 << bits - 1) if signed else 0
    q = np.random.default_rng(count).integers(low, low + (1 << bits), (3, count))
    packed = pack(q, bits, signed=signed)
    assert packed.shape == (3, -(-count * bits // 8))
    for row, stored in zip(q.tolist(), packed, strict=True):
        # Python's own whole numbers as the reference: number i stands i * bits up.
        whole = sum((value % (1 << bits)) << (i * bits) for i, value in enumerate(row))
        assert stored.tobytes() == whole.to_bytes(packed.shape[1], "little")
    assert np.array_equal(unpack(packed, bits, count, signed=signed), q)


def test_signs_and_order_of_nibbles() -> None:
    assert pack(np.array([-3, 5, 7], np.int8), 4, signed=True).tolist() == [0x5D, 0x07]
    assert pack(np.array([1, -2, 0, -1, 1], np.int8), 2, signed=True).tolist() == [0b11_00_10_01, 0b01]


@pytest.mark.parametrize(
    ("q", "bits", "signed", "reason"),
    [
        (np.array([0, 8]), 4, True, "8 is no signed number of 4 bits"),
        (np.array([-9]), 4, True, "-9 is no"),
        (np.array([-1]), 4, False, "-1 is no unsigned number of 4 bits"),
        (np.array([1.0]), 4, True, "float64 numbers cannot be packed"),
        (np.array([1]), 5, True, "numbers of 5 bits cannot be packed"),
    ],
)
def test_what_does_not_fit_is_refused(q: np.ndarray, bits: int, signed: bool, reason: str) -> None:
    with pytest.raises(RingstepError, match=reason):
        pack(q, bits, signed=signed)


def test_bytes_of_another_count_are_refused() -> None:
    with pytest.raises(RingstepError, match="does not hold 5 numbers"):
        unpack(np.zeros(2, np.uint8), 4, 5, signed=True)
    with pytest.raises(RingstepError, match="no type of 3 bits"):
        onnx_tensor(np.zeros(2, np.int8), 3, signed=True, name="w")
    with pytest.raises(RingstepError, match="tensor w"):
        onnx_tensor(np.array([70000]), 16, signed=False, name="w")


@pytest.mark.parametrize("shape", [(16,), (3, 5), (1, 1), (7, 3)])
@pytest.mark.parametrize(("bits", "signed"), list(ONNX_TYPES))
def test_onnx_reads_the_tensor_back(bits: int, signed: bool, shape: tuple[int, ...]) -> None:
    low = -(1 << bits - 1) if signed else 0
    q = np.random.default_rng(0).integers(low, low + (1 << bits), shape)
    proto = ir.serde.serialize_tensor(onnx_tensor(q, bits, signed=signed, name="w"))
    assert proto.data_type == ONNX_TYPES[bits, signed]
    assert np.array_equal(numpy_helper.to_array(proto).astype(np.int64), q)


@pytest.mark.parametrize("count", [16, 15, 17, 1])
@pytest.mark.parametrize(("bits", "signed"), [(4, True), (4, False), (2, True), (2, False), (8, True), (16, False)])
def test_onnx_runtime_dequantises_what_was_packed(bits: int, signed: bool, count: int) -> None:
    low = -(1 << bits - 1) if signed else 0
    q = low + np.arange(count) % (1 << bits)
    tensor = ir.serde.serialize_tensor(onnx_tensor(q, bits, signed=signed, name="q"))
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["q", "scale"], ["y"])], "g", [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [count])],
        [tensor, numpy_helper.from_array(np.float32(0.5), "scale")],
    )  # fmt: skip
    opset = 25 if bits == 2 else 21
    model = helper.make_model(graph, ir_version=13 if bits == 2 else 10, opset_imports=[helper.make_opsetid("", opset)])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {})[0], q * np.float32(0.5))


def test_the_npu_multiplies_by_what_was_packed(tmp_path: Path) -> None:
    """MatMul of uint16 activations with an odd count of int4 weights of all 16 values, on the simulator."""
    pytest.importorskip("onnxruntime_qnn")
    rows, columns = 33, 15
    q = ((5 * np.arange(rows)[:, None] + 7 * np.arange(columns)) % 16 - 8).astype(np.int8)
    scales = (0.01 * (1 + np.arange(columns))).astype(np.float32)
    constants = {
        "w_scale": scales, "x_scale": np.float32(1 / 8192), "x_zero": np.uint16(32768),
        "y_scale": np.float32(1 / 2048), "y_zero": np.uint16(32768),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"], "x_q"),
        helper.make_node("DequantizeLinear", ["x_q", "x_scale", "x_zero"], ["x_d"], "x_d"),
        helper.make_node("DequantizeLinear", ["q", "w_scale", "w_zero"], ["w"], "w", axis=1),
        helper.make_node("MatMul", ["x_d", "w"], ["m"], "m"),
        helper.make_node("QuantizeLinear", ["m", "y_scale", "y_zero"], ["y_q"], "y_q"),
        helper.make_node("DequantizeLinear", ["y_q", "y_scale", "y_zero"], ["y"], "y_d"),
    ]
    tensors = [ir.serde.serialize_tensor(onnx_tensor(q, 4, signed=True, name="q"))]
    zeros = onnx_tensor(np.zeros(columns, np.int8), 4, signed=True, name="w_zero")
    tensors += [ir.serde.serialize_tensor(zeros)]
    tensors += [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, columns])], tensors,
    )  # fmt: skip
    path = tmp_path / "int4.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), path)
    x = np.random.default_rng(1).uniform(-2, 2, (4, rows)).astype(np.float32)
    x = np.round(x * 8192) / np.float32(8192)
    with open_graph(path, soc_model=find_device("sm8750").chip.soc_model, fp16=False) as npu:
        found = npu.run({"x": x})["y"]
    assert snr_db(x @ (q * scales), found) > 60

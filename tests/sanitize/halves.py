"""Models in float16, which the textual form cannot spell."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper


def in_float16(model: onnx.ModelProto, keep: tuple[str, ...] = ()) -> onnx.ModelProto:
    """The model with its float32 inputs, outputs and initializers in float16, but for those named in `keep`."""
    half = onnx.ModelProto.FromString(model.SerializeToString())
    for value in (*half.graph.input, *half.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in keep:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in half.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in keep:
            values = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return half

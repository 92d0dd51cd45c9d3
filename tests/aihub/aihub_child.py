"""What the stand-in runs in child processes: ONNX Runtime on the CPU, and its quantiser."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Samples = list[dict[str, np.ndarray]]


def run_cpu(path: Path, samples: Samples) -> Samples:
    """Run an ONNX file on every sample: outputs by name."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, feeds), strict=True)) for feeds in samples]


def quantise(path: Path, out: Path, samples: Samples, weights: str, activations: str) -> None:
    """Write the QDQ form of an ONNX file; int8 or int16 for each of weights and activations."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    kinds = {"int8": QuantType.QInt8, "int16": QuantType.QInt16}
    unsigned = {"int8": QuantType.QUInt8, "int16": QuantType.QUInt16}
    quantize_static(
        str(path), str(out), Reader(), quant_format=QuantFormat.QDQ, weight_type=kinds[weights],
        activation_type=unsigned[activations], extra_options={"WeightSymmetric": True},
    )  # fmt: skip

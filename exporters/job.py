"""What an export was asked for, and what that comes down to before a checkpoint is opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ringstep.checkpoint import Checkpoint
from ringstep.contract import DType
from ringstep.devices import Device, find_device
from ringstep.errors import RingstepError, did_you_mean

if TYPE_CHECKING:
    from quantize.scheme import Scheme

DTYPES: dict[str, DType] = {"fp32": "float32", "fp16": "float16"}
XNNPACK = ("fp32", "8da4w", "8da4w-g128")  # ExecuTorch's precisions for CPUs, the default first
FORMATS = ("qdq", "gptq", "matmulnbits", "encodings", "genie-table")
DEFAULT_CONTEXT = 1024
# Well under the 2 GB that HTP can address in one graph, with room for what it adds to the weights.
DEFAULT_PART_BYTES = 1 << 30
PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class Job:
    """What `ringstep export` or `ringstep quantize` was asked for; see their options."""

    model: str
    out: Path
    format: Literal["onnx", "qnn", "executorch"] = "qnn"
    device: str | None = None
    precision: str | None = None
    """fp32, fp16, or the name of a quantisation scheme; of ExecuTorch's CPU backend one of XNNPACK."""
    backend: Literal["xnnpack", "qnn"] | None = None
    """Of ExecuTorch: what the .pte is lowered to; None: the NPU of the device that was named, else the CPU."""
    method: str | None = None
    """Of ExecuTorch: NAME or NAME=N,N, a module of the recipe in the place of the step (recipes/fixed.py)."""
    scheme: Path | str | None = None
    """A scheme of the user's own, in the place of a precision; a name for `ringstep quantize`."""
    calibration: Path | None = None
    """Text to calibrate with; None: the text that ships with ringstep."""
    calibration_tokens: int = 16384
    sink_prefix: Literal["auto", "off"] | None = None
    """In the place of the scheme's."""
    context: int | None = None
    chunk: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    activations: Literal["accurate", "native"] | None = None
    gelu: Literal["auto", "exact", "tanh", "sigmoid"] = "auto"
    embedding: Literal["outside", "inside"] = "outside"
    part_bytes: int = DEFAULT_PART_BYTES
    parity: bool = True
    prompt: str = PROMPT
    revision: str | None = None
    formats: tuple[str, ...] | None = None
    """Of `ringstep quantize`: what to write of the rounded weights, () for its default; None is an export."""

    @property
    def lowered_to(self) -> str:
        """Of ExecuTorch: the backend, as asked or by what else was said."""
        return self.backend or ("qnn" if self.device else "xnnpack")

    @property
    def for_npu(self) -> bool:
        """Whether the NPU's own arithmetic computes what is shipped."""
        return self.format == "qnn" or (self.format == "executorch" and self.lowered_to == "qnn")


def find_scheme(job: Job) -> tuple[str, Scheme | None]:
    """The precision of a job by name, and its scheme; None where nothing is quantised. Raises RingstepError."""
    if job.scheme is not None and job.precision is not None:
        raise RingstepError(f"--scheme {job.scheme} and --precision {job.precision}: give one of them")
    if job.format == "executorch" and not job.for_npu:
        return xnnpack_precision(job), None
    for option, value in (("backend", job.backend), ("method", job.method)):
        if job.format != "executorch" and value is not None:
            raise RingstepError(f"--{option} {value}: goes with --format executorch")
    precision = job.precision if job.precision is not None else "fp16" if job.for_npu else "fp32"
    if job.scheme is None and precision in DTYPES:
        return precision, None
    import dataclasses

    from quantize.scheme_file import load_scheme, presets

    if job.scheme is None and precision not in presets() and not precision.endswith(".toml"):
        known = list(dict.fromkeys([*DTYPES, *presets()]))
        hint = did_you_mean(precision, known)
        if job.format == "executorch" and precision in XNNPACK:
            raise RingstepError(f"--precision {precision}: is XNNPACK's, give --backend xnnpack; for the NPU there are "
                                "fp16 and schemes such as w8a16")  # fmt: skip
        raise RingstepError(
            f"--precision {precision!r} is unknown{hint}; there are {', '.join(known)}, or your own with --scheme FILE"
        )
    scheme = load_scheme(job.scheme or precision)
    if job.sink_prefix:
        scheme = dataclasses.replace(scheme, sink_prefix=job.sink_prefix)
    if floats(scheme):
        return "fp16", None
    return scheme.name, scheme


def xnnpack_precision(job: Job) -> str:
    """The precision of an export for ExecuTorch's CPU backend. Raises RingstepError for one that it has not."""
    if job.scheme is not None:
        raise RingstepError(f"--scheme {job.scheme}: xnnpack has precisions of its own: {', '.join(XNNPACK)}")
    precision = job.precision if job.precision is not None else XNNPACK[0]
    if precision not in XNNPACK:
        hint = did_you_mean(precision, list(XNNPACK))
        raise RingstepError(f"--precision {precision!r}: xnnpack has {', '.join(XNNPACK)}{hint}; for the NPU give "
                            "--device")  # fmt: skip
    return precision


def check_executorch(job: Job, device: Device, scheme: Scheme | None) -> None:
    """Refuse what ExecuTorch's QNN backend cannot do. Raises RingstepError."""
    for key, bits in vars(scheme.exceptions).items() if scheme else ():
        if scheme and bits not in (None, scheme.activations.bits):
            raise RingstepError(f"scheme {scheme.name}: [exceptions] {key} = {bits}: ExecuTorch's backend takes "
                                "activations of one width; leave it out, or use --format qnn")  # fmt: skip
    from exporters.executorch.qnn import known_chip
    from ringstep import qairt

    known_chip(device.chip)
    qairt.require()
    if job.chunk > 1 and not device.chip.weight_sharing and job.method is None:
        raise RingstepError(f"--chunk {job.chunk}: decode and prefill cannot share weights on {device.chip.name} "
                            f"({device.chip.htp_arch}), which takes v73 or newer; leave --chunk out")  # fmt: skip


def floats(scheme: Scheme) -> bool:
    """Whether a scheme quantises nothing."""
    weights = (scheme.weights, scheme.head, scheme.embedding)
    return not scheme.activations.bits and not scheme.override and all(w.dtype == "float16" for w in weights)


def find_target(job: Job, precision: str, scheme: Scheme | None) -> Device | None:
    """The device of a job, which can run its precision. Raises RingstepError."""
    device = find_device(job.device) if job.device else None
    if scheme is not None and not scheme.activations.bits and (device or job.format == "qnn"):
        instead = "leave --device out" + (" and use --format onnx" if job.format != "onnx" else "")
        raise RingstepError(
            f"scheme {scheme.name} leaves activations in float ([activations] bits = 0), which no NPU takes beside "
            f"integer weights: {instead} for a CPU, or use a scheme such as w8a16"
        )
    if not job.for_npu:
        return device
    if device is None:
        instead = "--format onnx" if job.format == "qnn" else "--backend xnnpack"
        raise RingstepError(f"what the NPU runs is for one chip: give --device (see ringstep devices) or {instead}")
    if job.format == "executorch":
        check_executorch(job, device, scheme)
    if scheme is not None:
        return device
    if precision == "fp32":
        raise RingstepError("the NPU computes in fp16: use --precision fp16, or --format onnx for fp32")
    if not device.chip.fp16:
        raise RingstepError(
            f"{device.id} ({device.chip.name}, {device.chip.htp_arch}) has no fp16: use --precision w8a16, or choose "
            "another device (see ringstep devices)"
        )
    return device


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """Refuse a folder whose weights are quantised already: config.json says by which method, or a file beside it.

    A GGUF is read dequantised and passes.
    """
    config = checkpoint.config
    for key in ("quantization_config", "compression_config", "quantization"):
        if not (own := config.get(key)):
            continue
        # Of the three names only the first is transformers' own; MLX writes no method.
        method = own.get("quant_method") if isinstance(own, dict) else None
        said = f"config.json {key}: quant_method {method or 'not given'}"
        raise RingstepError(f"{checkpoint.path}: quantised already ({said}); give the unquantised checkpoint")
    for name in ("quantize_config.json", "hf_quant_config.json"):
        if (checkpoint.path / name).is_file():
            raise RingstepError(f"{checkpoint.path}: quantised already ({name}); give the unquantised checkpoint")

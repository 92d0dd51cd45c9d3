"""Compile an ONNX file into a QNN context binary for one chip, ahead of time, with Qualcomm's compiler."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx

from ringstep import child, qnn
from ringstep.devices import Chip
from ringstep.errors import RingstepError

TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class CompileReport:
    """What a compilation made. Nothing fell back to the CPU: a node that the NPU lacks is an error."""

    files: tuple[Path, ...]
    """NAME_ctx.onnx, the wrapper that ONNX Runtime opens, and NAME_ctx_qnn.bin, the context binary."""
    chip: str
    seconds: float
    binary_bytes: int
    peak_bytes: int
    """Most anonymous resident memory of the compiling process."""
    source_ops: dict[str, int]
    """Nodes of the ONNX file by type."""
    npu_ops: dict[str, int]
    """Nodes that the NPU took by type, after ONNX Runtime's own rewrites (constant folding, fusions)."""
    version: str
    """Plugin and SDK: part of every result, since versions differ in arithmetic."""


def compile_context(
    onnx_path: Path,
    out_dir: Path,
    *,
    chip: Chip,
    fp16: bool,
    name: str,
    timeout_s: float = TIMEOUT_SECONDS,
    memory_bytes: int | None = None,
) -> CompileReport:
    """Write `name`_ctx.onnx and `name`_ctx_qnn.bin into out_dir, both or neither.

    `fp16` computes float32 tensors in float16; graphs typed float16 and quantised ones ignore it.
    `timeout_s` and `memory_bytes` (None: what is free) bound the compiling process. Raises RingstepError for
    an unreadable or dynamic graph, a node that the NPU refuses (named), a graph that falls into several
    partitions, and a compiler that crashes, hangs or outgrows its memory.
    """
    qnn.require()
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RingstepError(f"{name!r} is no file name for a context: letters, digits, '_', '-' and '.'")
    source_ops = check_source(onnx_path)
    start = time.perf_counter()
    out_dir.mkdir(parents=True, exist_ok=True)
    # In the parent folder, so that the files move without being copied; named as manifest's temporaries are.
    plain = re.sub(r"\W", "_", f"{out_dir.name}-{name}")
    temporary = out_dir.resolve().parent / f".{plain}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        context = temporary / f"{name}_ctx.onnx"
        outcome = child.run(
            f"{onnx_path.name}: compiling for {chip.name}",
            _compile,
            onnx_path.resolve(),
            context,
            chip.soc_model,
            fp16,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            explain=qnn.explain,
        )
        binary = check_context(context)
        binary_bytes = binary.stat().st_size
        files = (out_dir / context.name, out_dir / binary.name)
        # The wrapper goes first and comes last: whenever it is there, the binary beside it is its own.
        files[0].unlink(missing_ok=True)
        os.replace(binary, files[1])
        os.replace(context, files[0])
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return CompileReport(
        files=files,
        chip=chip.name,
        seconds=round(time.perf_counter() - start, 3),
        binary_bytes=binary_bytes,
        peak_bytes=outcome.peak_bytes,
        source_ops=source_ops,
        npu_ops=outcome.value,
        version=qnn.version(),
    )


def check_source(path: Path) -> dict[str, int]:
    """Count an ONNX file's nodes by type. Raises RingstepError if it is unreadable or a shape is dynamic."""
    model = read_graph(path)
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        # ONNX Runtime hands a dynamic node to the CPU without naming it.
        if value.name not in constants and not all(dim.HasField("dim_value") for dim in dims):
            raise RingstepError(f"{path}: input {value.name} has a dynamic shape; the NPU needs fixed ones")
    return dict(Counter(node.op_type for node in model.graph.node))


def check_context(path: Path) -> Path:
    """Return the binary of a *_ctx.onnx that is one EPContext node; RingstepError for anything else."""
    nodes = list(read_graph(path).graph.node)
    kinds = Counter(node.op_type for node in nodes)
    if kinds != {"EPContext": 1}:
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        raise RingstepError(
            f"{path.name}: the graph is not one context but {found or 'empty'}; it cannot be shipped"
        )
    names = [a.s.decode() for a in nodes[0].attribute if a.name == "ep_cache_context"]
    binary = path.parent / names[0] if names else path
    if binary.parent != path.parent or binary == path or not binary.is_file():
        raise RingstepError(f"{path.name}: the compiler left no binary beside it")
    return binary


def read_graph(path: Path) -> onnx.ModelProto:
    """Read an ONNX file without its external weights. Raises RingstepError when it cannot be read."""
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError has no base class of its own
        raise RingstepError(f"{path}: cannot be read as ONNX: {child.one_line(str(error))}") from None


def _compile(model: Path, context: Path, soc_model: int, fp16: bool) -> dict[str, int]:
    """Runs in the child."""
    # ONNX Runtime names the graph in the binary by a hash of the path it is given: a bare name makes the same
    # bytes wherever the artifact lies.
    os.chdir(model.parent)
    return qnn.assigned_ops(qnn.open_session(Path(model.name), soc_model=soc_model, fp16=fp16, context=context))

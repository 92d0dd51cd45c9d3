"""What a .pte holds: methods, delegates, kernels, tensors, segments. Nothing of it is run."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ringstep.console import quiet_libraries
from ringstep.engines.executorch import first_line, require
from ringstep.errors import RingstepError
from ringstep.files import ordinary_size
from ringstep.pte_qnn import contexts

HEAD_BYTES = 64
IDENTIFIER = b"ET12"
DTYPES = {"FLOAT": "float32", "HALF": "float16", "INT": "int32", "LONG": "int64", "BYTE": "uint8", "CHAR": "int8",
          "SHORT": "int16"}  # fmt: skip
LEAST_BLOB_BYTES = 1024  # below this, equal data means nothing


def describe(path: Path) -> dict[str, Any]:
    """A .pte as plain values. Raises RingstepError for a file that is none, damaged, or of another version."""
    size = ordinary_size(path) if path.exists() else 0
    if not size:
        raise RingstepError(f"{path}: no such file, or an empty one")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return described(path, data, size)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
            # A program whose numbers lead nowhere: every field of it may be anything.
            raise RingstepError(f"{path}: damaged: {first_line(error)}; export again") from None


def described(path: Path, data: mmap.mmap, size: int) -> dict[str, Any]:
    """What describe returns, of a mapped file of `size` bytes."""
    program_bytes, base, segment_bytes = header(path, data[:HEAD_BYTES], size)
    program = parse(path, data[:program_bytes])
    segments = [(s.offset, s.size) for s in program.segments]
    for offset, length in segments:
        if offset + length > max(segment_bytes, size - base):
            raise RingstepError(f"{path}: truncated: a segment ends behind the file's {size} bytes")
    copies = equal_blobs(blobs(data, base, segments, program))
    try:
        compiled = list(contexts(program, data, base).values())
    except RingstepError as error:
        raise RingstepError(f"{path}: {error}") from None
    if not program.execution_plan:
        raise RingstepError(f"{path}: damaged: ExecuTorch cannot read a method in it")
    constants = {plan.name: returned(plan) for plan in program.execution_plan if not plan.inputs}
    return {
        "file": str(path), "bytes": size, "version": program.version, "program_bytes": program_bytes,
        "segment_bytes": [length for _, length in segments],
        "named_data": [data.key for data in program.named_data or []],
        "methods": methods(program, constants), "constants": constants, "contexts": compiled,
        "warnings": [f"{' and '.join(names)} hold the same {length} bytes" for names, length in copies],
    }  # fmt: skip


def header(path: Path, head: bytes, size: int) -> tuple[int, int, int]:
    """Bytes of the program, where the segments begin, and their bytes, of a file of `size` bytes."""
    if len(head) < 8 or head[4:6] != IDENTIFIER[:2]:
        raise RingstepError(f"{path}: no .pte: its first bytes are not ExecuTorch's")
    if head[4:8] != IDENTIFIER:
        have = head[4:8].decode("ascii", "replace")
        raise RingstepError(f"{path}: a .pte of another version ({have}, this ExecuTorch reads {IDENTIFIER.decode()})")
    number = lambda at: int.from_bytes(head[at : at + 8], "little")
    if head[8:12] != b"eh00":
        return size, 0, 0  # everything inside the program
    long_enough = int.from_bytes(head[12:16], "little") >= 32
    program_bytes, base, segment_bytes = number(16), number(24), number(32) if long_enough else 0
    if max(program_bytes, base + segment_bytes) > size:
        wanted = max(program_bytes, base + segment_bytes)
        raise RingstepError(f"{path}: truncated: {size} bytes of {wanted}")
    return program_bytes, base, segment_bytes


def parse(path: Path, data: bytes) -> Any:
    """The program of a .pte in ExecuTorch's own classes."""
    require()
    with quiet_libraries():
        from executorch.exir._serialize._program import _flatbuffer_to_program

    try:
        return _flatbuffer_to_program(data)
    except Exception as error:  # flatc's exit code, JSON, or a field that the schema has not
        raise RingstepError(f"{path}: ExecuTorch cannot read its program: {first_line(error)}") from None


def methods(program: Any, constants: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Delegates, CPU kernels, inputs and outputs of each method that computes something."""
    found: dict[str, dict[str, Any]] = {}
    for plan in program.execution_plan:
        if not plan.inputs:
            continue
        delegates = Counter(delegate.id for delegate in plan.delegates)
        kernels = Counter(f"{op.name}.{op.overload}" if op.overload else op.name for op in called(plan))
        found[plan.name] = {"delegates": dict(delegates), "cpu_kernels": dict(sorted(kernels.items()))}
        for side, indices in (("inputs", plan.inputs), ("outputs", plan.outputs)):
            names = (constants or {}).get(f"{plan.name}_{side}") or [f"{side[:-1]} {i}" for i in range(len(indices))]
            tensors = [tensor(plan.values[index].val) for index in indices]
            found[plan.name][side] = [{"name": n, **t} for n, t in zip(names, tensors, strict=False)]
    return found


def called(plan: Any) -> Iterator[Any]:
    """The operator of every kernel call of a method."""
    for chain in plan.chains:
        for instruction in chain.instructions:
            index = getattr(instruction.instr_args, "op_index", None)
            if index is not None:
                yield plan.operators[index]


def tensor(value: Any) -> dict[str, Any]:
    """Shape and type of an input or output; of what is no tensor the kind of value."""
    if not hasattr(value, "sizes"):
        return {"shape": [], "dtype": type(value).__name__.lower()}
    name = value.scalar_type.name
    return {"shape": list(value.sizes), "dtype": DTYPES.get(name, name.lower())}


def returned(plan: Any) -> Any:
    """What a constant method returns: one value, or a list."""
    values = [next(iter(vars(plan.values[index].val).values()), None) for index in plan.outputs]
    listed = "builtins." in plan.container_meta_type.encoded_out_str  # a list or tuple, by its type in Python
    return values if listed or len(values) != 1 else values[0]


def blobs(data: mmap.mmap, base: int, segments: list[tuple[int, int]], program: Any,
          ) -> Iterator[tuple[str, memoryview | bytes]]:  # fmt: skip
    """Names and bytes of what a .pte carries, the segments as views of the file."""
    for i, (offset, length) in enumerate(segments):
        with memoryview(data) as whole, whole[base + offset : base + offset + length] as view:
            yield f"segment {i}", view
    for i, inside in enumerate(program.backend_delegate_data):
        yield f"delegate data {i}", bytes(inside.data)


def equal_blobs(blobs: Iterable[tuple[str, memoryview | bytes]]) -> list[tuple[list[str], int]]:
    """Names of blobs that hold the same bytes, and how many bytes."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, data in blobs:
        if len(data) >= LEAST_BLOB_BYTES:
            groups.setdefault((hashlib.sha256(data).hexdigest(), len(data)), []).append(name)
    return [(names, length) for (_, length), names in groups.items() if len(names) > 1]

"""What QNN delegates of a .pte were compiled for, and the graphs inside their context binaries."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from ringstep import child, qairt
from ringstep.console import quiet_libraries
from ringstep.engines.executorch import first_line
from ringstep.errors import RingstepError

BACKEND = "QnnBackend"
LIMIT_SECONDS = 300.0


def contexts(program: Any, data: mmap.mmap, base: int) -> dict[int, dict[str, Any]]:
    """By the index of its data what each context binary of a program is; {} where no delegate is QNN's.

    The compiler's options are ExecuTorch's own record beside the binary, the QAIRT version is read from the binary.
    """
    found: dict[int, dict[str, Any]] = {}
    for plan in program.execution_plan:
        for delegate in plan.delegates:
            if delegate.id != BACKEND:
                continue
            index = delegate.processed.index
            if index not in found:
                blob, start, end = delegate_data(program, delegate, data, base)
                version = qairt.BUILD_ID.search(blob, start, end)
                found[index] = {"bytes": end - start, "qairt": version[0].decode() if version else None,
                                **compiled_for(delegate), "methods": []}  # fmt: skip
            found[index]["methods"].append(plan.name)
    return found


def delegate_data(program: Any, delegate: Any, data: mmap.mmap, base: int) -> tuple[bytes | mmap.mmap, int, int]:
    """Where the bytes of a delegate begin and end, in the program or in a segment of the file, which is not copied."""
    at = delegate.processed
    if at.location.name == "INLINE":
        inside = bytes(program.backend_delegate_data[at.index].data)
        return inside, 0, len(inside)
    segment = program.segments[at.index]
    return data, base + segment.offset, base + segment.offset + segment.size


def compiled_for(delegate: Any) -> dict[str, Any]:
    """SoC, HTP architecture, precision and weight sharing of a delegate. Raises RingstepError for unknown options."""
    with quiet_libraries():
        from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option

    try:
        options = flatbuffer_to_option(bytes(delegate.compile_specs[0].value))
        htp = options.backend_options.htp_options
        return {
            "soc": options.soc_info.soc_model.name, "arch": options.soc_info.htp_info.htp_arch.name.lower(),
            "precision": {"kHtpFp16": "fp16", "kHtpQuantized": "quantised"}[htp.precision.name],
            "weight_sharing": htp.use_weight_sharing,
        }  # fmt: skip
    except Exception as error:  # flatc's exit code, JSON, or a field of another version
        raise RingstepError(f"the options of a QNN delegate cannot be read: {first_line(error)}") from None


def graphs(path: Path) -> dict[str, dict[str, Any]]:
    """Graph names of a .pte's context binaries, with names, shapes and types of inputs and outputs.

    Qualcomm's libraries read them, in a child process. Raises RingstepError where those are missing or refuse.
    """
    found: dict[str, dict[str, Any]] = child.run(
        f"{path.name}: reading its context", read_graphs, path.resolve(), timeout_s=LIMIT_SECONDS,
        explain=qairt.explain, env=qairt.environment(qairt.require()),
    ).value  # fmt: skip
    return found


def read_graphs(path: Path) -> dict[str, dict[str, Any]]:
    """What graphs() returns, in a process that finds Qualcomm's libraries."""
    from executorch.backends.qualcomm.partition.utils import generate_qnn_executorch_option
    from executorch.backends.qualcomm.python.PyQnnManagerAdaptor import QnnManager
    from executorch.exir._serialize._program import deserialize_pte_binary

    program = deserialize_pte_binary(path.read_bytes()).program
    done: set[int] = set()
    found: dict[str, dict[str, Any]] = {}
    for plan in program.execution_plan:
        for delegate in plan.delegates:
            index = delegate.processed.index
            if delegate.id != BACKEND or index in done:
                continue
            done.add(index)
            manager = QnnManager(generate_qnn_executorch_option(delegate.compile_specs),
                                 bytes(program.backend_delegate_data[index].data))  # fmt: skip
            for step in (manager.InitBackend, manager.InitContextCache):
                if (answer := step()).name != "Ok":
                    raise RingstepError(f"{step.__name__} of ExecuTorch's QNN backend says {answer.name}")
            for name in manager.GetGraphNames():
                manager.AllocateTensor(name)
                found[name] = {"inputs": [_tensor(t) for t in manager.GetGraphInputs(name)],
                               "outputs": [_tensor(t) for t in manager.GetGraphOutputs(name)]}  # fmt: skip
    return found


def _tensor(tensor: Any) -> dict[str, Any]:
    dtype = tensor.GetDataType().name.removeprefix("QNN_DATATYPE_").lower()
    return {"name": tensor.GetName(), "shape": [int(d) for d in tensor.GetDims()], "dtype": dtype}

"""Models as files: what is inside, packed and unpacked. Stand-ins for formats that only Qualcomm's tools write.

A "DLC" here is the source ONNX in a zip, a "TFLite" the same behind TFLite's magic, and a linked "context binary" a zip
of one compiled context a graph: the real ones are Qualcomm's and hold no ONNX.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from ringstep.errors import RingstepError

if TYPE_CHECKING:
    from aihub_store import Model, Spec, Store

ONNX, AIMET = 6, 12  # the client's numbers of model types
TFLITE_HEAD = b"\0\0\0\0TFL3 stand-in\n"
DTYPES = ("float16", "float32", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16")


def open_model(store: Store, model: Model, graph: str = "") -> Path:
    """The ONNX file in a model, unpacked beside it; `graph` picks one of a linked model's.

    Raises RingstepError for a model without a file or without exactly one ONNX file, and for a graph it does not have.
    """
    file, folder = store.path("models", model.id), store.path("models", model.id, "open")
    if not file.exists():
        raise RingstepError(f"Model {model.id} has no file")
    if not folder.exists():
        unpacked = folder.with_name("open.tmp")
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.mkdir()
        if model.type == ONNX and not model.directory:
            shutil.copyfile(file, unpacked / "model.onnx")
        elif zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                archive.extractall(unpacked)
        else:
            raise RingstepError(f"Model {model.id} is nothing that this stand-in runs: a bare binary, or damaged")
        unpacked.rename(folder)
    if len(model.graphs) > 1:
        if graph not in model.graphs:
            names = ", ".join(model.graphs)
            raise RingstepError(f"The context has no graph {graph!r}; context_enable_graphs takes: {names}")
        folder = folder / file_name(graph)
    elif graph and model.graphs and graph not in model.graphs:
        raise RingstepError(f"The context has no graph {graph!r} but {model.graphs[0]!r}")
    found = sorted(path for path in folder.rglob("*.onnx") if path.is_file())
    if len(found) != 1:
        raise RingstepError(f"Model {model.id} holds {len(found)} ONNX files, want 1")
    return found[0]


def file_name(graph: str) -> str:
    """A graph's name as a file's."""
    name = re.sub(r"[^\w.-]", "_", graph).lstrip(".-")
    return name or "model"


def pack(files: list[Path], out: Path, top: str = "", head: bytes = b"") -> bytes:
    """Zip files into the folder `top`, behind `head`; `out` is scratch. The bytes."""
    with zipfile.ZipFile(out, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file in files:
            archive.write(file, f"{top}/{file.name}" if top else file.name)
    data = head + out.read_bytes()
    out.unlink()
    return data


def read(path: Path) -> onnx.ModelProto:
    """An ONNX file without its external data. Raises RingstepError."""
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError has no base class of its own
        raise RingstepError(f"The model cannot be read as ONNX: {error}") from None


def is_context(path: Path) -> bool:
    """Whether it is the wrapper of a compiled context."""
    return any(node.op_type == "EPContext" for node in read(path).graph.node)


def specs(model: onnx.ModelProto, graph: str | None = None) -> tuple[list[Spec], list[Spec]]:
    """Inputs and outputs but for types that AI Hub lacks; 0 stands for a dimension that is not fixed."""
    constants = {tensor.name for tensor in model.graph.initializer}

    def listed(values: list[onnx.ValueInfoProto]) -> list[Spec]:
        found: list[Spec] = []
        for value in values:
            tensor = value.type.tensor_type
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name if tensor.elem_type else ""
            if value.name not in constants and dtype in DTYPES:
                found.append([value.name, dtype, [dim.dim_value for dim in tensor.shape.dim], graph])
        return found

    return listed(list(model.graph.input)), listed(list(model.graph.output))


def specs_of(store: Store, model: Model) -> tuple[list[Spec], list[Spec]]:
    """Inputs and outputs of an uploaded model, empty where it is nothing that can be read."""
    try:
        return specs(read(open_model(store, model)))
    except (RingstepError, ValueError, KeyError, OSError, zipfile.BadZipFile):
        return [], []


def write_ops(store: Store, model: Model, source: onnx.ModelProto) -> None:
    """Keep name and type of every node of the graph that a model was made from, for its profiles."""
    ops = [[node.name or f"{node.op_type}_{index}", node.op_type] for index, node in enumerate(source.graph.node)]
    store.path("models", model.id, "ops.json").write_text(json.dumps(ops), "utf-8")


def read_ops(store: Store, model: Model, path: Path) -> list[list[str]]:
    """The nodes that write_ops kept, else those of the ONNX file `path`."""
    kept = store.path("models", model.id, "ops.json")
    if not kept.exists():
        write_ops(store, model, read(path))
    ops: list[list[str]] = json.loads(kept.read_text("utf-8"))
    return ops

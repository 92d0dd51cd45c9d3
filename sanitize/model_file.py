"""ONNX files in and out: weights are checked, referred to, and copied from file to file, never parsed.

Nothing here holds the weights of a model: a tensor of 1 KiB and more is an ir.ExternalTensor into the file it came
from until write_model copies its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
import psutil
from onnx_ir.passes.common import InlinePass

from ringstep.errors import RingstepError
from ringstep.files import ordinary_size
from sanitize import graph as graphs
from sanitize.tensors import nbytes
from sanitize.wellformed import check, check_calls
from sanitize.wire import INLINE_BYTES, read_skeleton

CHUNK = 16 << 20  # bytes copied at a time where the kernel cannot copy by itself
PAGE = 4096  # large tensors start on a page, so that a runtime can map them
SMALL_ALIGN = 64
Tick = Callable[[float], None]
logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of what is refused here in one line


@graphs.no_collection()
def read_model(path: Path) -> ir.Model:
    """Read an ONNX file, inline its functions, sort its nodes, infer its types; its weights stay in files.

    Raises RingstepError for a file that is missing, cut off or no ONNX model, for external data that is missing, too
    short or outside the model's folder, for a graph with a cycle, a value that nothing makes, or a name made twice.
    """
    proto = read_skeleton(path)
    if not proto.HasField("graph"):
        raise RingstepError(f"{path} holds no graph; is it an ONNX model?")
    check(proto, path)
    _check_names(proto.graph, path, set())
    try:
        proto = graphs.inferred(proto)
        model = ir.serde.deserialize_model(proto)
        complete = not model.functions
        ir.external_data.set_base_dir(model.graph, path.parent)
        if model.functions:
            for function in model.functions.values():
                for tensor in _tensors(function.graph):
                    if isinstance(tensor, ir.ExternalTensor):
                        tensor.base_dir = path.parent
            InlinePass()(model)
            check_calls(model, path)
            model.functions.clear()
        if not _in_order(model.graph, set()):
            complete = False
            model.graph.sort()
    except RingstepError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        message = "its nodes form a cycle" if "cycle" in str(cause) else " ".join(str(cause).split())[:200]
        raise RingstepError(f"{path} is no valid ONNX model: {message}") from None
    for tensor in _tensors(model.graph):
        if isinstance(tensor, ir.ExternalTensor):
            check_external(tensor, path)
    if complete:
        graphs.adopt(model)
    else:
        graphs.infer_types(model)
    return model


def _check_names(graph: onnx.GraphProto, path: Path, known: set[str]) -> None:
    """Every value is made once (static single assignment), in subgraphs too; `known` is left as it was."""
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    made = [name for name in given if name not in known]
    known.update(made)
    for node in graph.node:
        for name in node.output:
            if name and name in known:
                raise RingstepError(
                    f"{path}: node {node.name or node.op_type!r} makes {name!r}, which exists already; export it again"
                )
            known.add(name)
            made.append(name)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _check_names(inner, path, known)
    known.difference_update(made)


def _in_order(graph: ir.Graph, seen: set[ir.Node]) -> bool:
    """Whether every node comes after those it reads from."""
    for node in graph:
        for value in node.inputs:
            maker = value.producer() if value is not None else None
            if maker is not None and maker not in seen:
                return False
        if not all(_in_order(body, seen) for body in graphs.bodies(node)):
            return False
        seen.add(node)
    return True


def _tensors(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    """Every tensor of a graph and its subgraphs: initializers and attributes."""
    for inner in (graph, *graph.subgraphs()):
        for value in inner.initializers.values():
            if value.const_value is not None:
                yield value.const_value
    for node in graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                yield attribute.as_tensor()
            elif attribute.type == ir.AttributeType.TENSORS:
                yield from attribute.as_tensors()


def check_external(tensor: ir.ExternalTensor, model_path: Path) -> None:
    """Raise RingstepError unless the tensor's bytes lie whole in a file within the model's folder."""
    where = f"{model_path}: tensor {tensor.name!r}"
    location = Path(str(tensor.location))
    if location.is_absolute() or ".." in location.parts or "\\" in str(tensor.location):
        raise RingstepError(f"{where}: its data lies at {str(location)!r}, outside the model's folder: refused")
    path = model_path.parent / location
    try:
        real = path.resolve(strict=True)
        size = ordinary_size(real)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a zero byte
        what = getattr(error, "strerror", None) or error
        raise RingstepError(f"{where}: its data file {path} cannot be read: {what}") from None
    if real.is_dir():
        raise RingstepError(f"{where}: its data file {path} is a folder")
    # A download cache links model and data to one folder elsewhere; a link to any other place is refused.
    if not real.is_relative_to(model_path.parent.resolve()) and real.parent != model_path.resolve().parent:
        raise RingstepError(f"{where}: its data file {path} is a link out of the model's folder: refused")
    offset, needed = tensor.offset or 0, nbytes(tensor)
    length = tensor.length if tensor.length is not None else needed
    if offset < 0 or length != needed or offset + length > size:
        raise RingstepError(
            f"{where}: needs {needed} bytes, has bytes {offset} to {offset + length} of {location}, which has "
            f"{size}; the files do not belong together"
        )


def check_out(model: ir.Model, source: Path, out: Path) -> None:
    """Raise RingstepError if a model read from `source` cannot become `out`: a folder, or weights of the source."""
    for path in (out, out.with_name(f"{out.name}.data")):
        if path.is_dir():
            raise RingstepError(f"{path} is a folder; give the name of a file")
    if _entry(out) == _entry(source):
        return
    files = {Path(t.path) for t in _tensors(model.graph) if isinstance(t, ir.ExternalTensor)} | {source}
    taken = {place for file in files for place in (_entry(file), file.resolve())}
    for path in (out, out.with_name(f"{out.name}.data")):
        if _entry(path) in taken:
            raise RingstepError(f"{path} is a file of {source}, which would be lost; give another name")


def _entry(path: Path) -> Path:
    """A file by the name in its folder, which is what is replaced: not what a link there leads to."""
    return path.parent.resolve() / path.name


def write_model(
    model: ir.Model,
    path: Path,
    *,
    keep: Path | None = None,
    check: Callable[[Path], None] | None = None,
    tick: Tick = lambda _: None,
) -> None:
    """Write `path` and its weights into `path`.data beside it, both or neither.

    `keep`: weights in data files of this folder, where the model will lie, stay where they are; only what passes made
    is written. `check` sees the finished file under a temporary name; what it raises leaves the old files alone.
    `tick` is told the bytes copied. Raises RingstepError when the disk is full or the folder cannot be written.
    """
    data_name = _data_name(model, path, keep)
    with staged(model, path, keep=keep, data_name=data_name, tick=tick) as temporary:
        if check is not None:
            check(temporary)
        try:
            with _locked(path.parent):
                # The graph goes first and comes last: whenever it is there, the data beside it is its own.
                data, place = temporary.parent / data_name, path.parent / data_name
                if data.exists():
                    if place.exists():
                        path.unlink(missing_ok=True)
                    os.replace(data, place)
                os.replace(temporary, path)
        except OSError as error:
            raise RingstepError(f"{path} cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def staged(
    model: ir.Model,
    path: Path,
    *,
    keep: Path | None = None,
    data_name: str | None = None,
    tick: Tick = lambda _: None,
) -> Iterator[Path]:
    """Write the model into a temporary folder beside `path` for as long as the block runs; see write_model."""
    folder = path.parent
    temporary = folder / f".{path.name}.tmp-{os.getpid()}"
    lock = -1
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder, path.name)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            lock = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            data_name = data_name or _data_name(model, path, keep)
            places, moved = _place(model, data_name, keep)
            _need_space(folder, moved)
            if moved:
                with open(temporary / data_name, "wb") as out:
                    for tensor, offset in moved:
                        out.seek(offset)  # a hole, not zeros: the file system stores nothing for it
                        _copy(tensor, out, tick)
            (temporary / path.name).write_bytes(_serialize(model, places))
            if keep is not None:
                _link_kept(places, keep, temporary, data_name)
        except OSError as error:
            hint = "; free some space" if error.errno == errno.ENOSPC else ""
            raise RingstepError(f"{path} cannot be written: {error.strerror or error}{hint}") from None
        yield temporary / path.name
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _sweep(folder: Path, name: str) -> None:
    """Remove what a killed run left behind; one that lives holds a lock on its folder, whatever machine it is on."""
    start = f".{name}.tmp-"
    for left in [entry for entry in os.listdir(folder) if entry.startswith(start) and entry[len(start) :].isdigit()]:
        with contextlib.suppress(OSError):
            handle = os.open(folder / left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not psutil.pid_exists(int(left[len(start) :])):
                    shutil.rmtree(folder / left)
            finally:
                os.close(handle)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder while a graph and its data go there: two runs at once would leave one's graph with the other's."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


Place = tuple[str, int, int]
"""Data file, offset and length of a tensor, by id of the tensor object."""


def _data_name(model: ir.Model, path: Path, keep: Path | None) -> str:
    if keep is None:
        return f"{path.name}.data"
    # The data file of an earlier run may hold weights that stay, of this model or, in place, of another: never
    # overwrite it. What lies in `keep` alone is not asked, or a second export's files would be called otherwise.
    stay = {Path(t.path).name for t in _tensors(model.graph) if isinstance(t, ir.ExternalTensor)}
    count = 1
    while (name := f"{path.name}.data{count}") in stay or path.with_name(name).exists():
        count += 1
    return name


def _place(
    model: ir.Model, data_name: str, keep: Path | None
) -> tuple[dict[int, Place], list[tuple[ir.TensorProtocol, int]]]:
    """Decide where every large tensor goes; equal sources are stored once."""
    places: dict[int, Place] = {}
    moved: list[tuple[ir.TensorProtocol, int]] = []
    known: dict[tuple[str, int, int], Place] = {}
    end, home = 0, keep.resolve() if keep is not None else None
    for tensor in _tensors(model.graph):
        size = nbytes(tensor)
        if size < INLINE_BYTES and not isinstance(tensor, ir.ExternalTensor):
            continue
        if id(tensor) in places:
            continue
        source = None
        if isinstance(tensor, ir.ExternalTensor):
            file = Path(tensor.path)
            source = (str(file.resolve()), tensor.offset or 0, size)
            if home and file.resolve().is_relative_to(home) and file.suffix != ".onnx":
                places[id(tensor)] = (str(file.resolve().relative_to(home)), source[1], size)
                continue
            if source in known:
                places[id(tensor)] = known[source]
                continue
        align = PAGE if size >= 1 << 20 else SMALL_ALIGN
        offset = -(-end // align) * align
        places[id(tensor)] = (data_name, offset, size)
        if source:
            known[source] = places[id(tensor)]
        moved.append((tensor, offset))
        end = offset + size
    return places, moved


def _need_space(folder: Path, moved: list[tuple[ir.TensorProtocol, int]]) -> None:
    needed = sum(nbytes(tensor) for tensor, _ in moved)
    if needed > (free := shutil.disk_usage(folder).free):
        raise RingstepError(f"{folder}: {needed} bytes of weights do not fit on the disk, {free} are free")


def _copy(tensor: ir.TensorProtocol, out: BinaryIO, tick: Tick) -> None:
    """Append a tensor's bytes; those of an external one go from file to file, through the kernel where it can."""
    if not isinstance(tensor, ir.ExternalTensor):
        # One tensor at a time: a converted weight lives only here, or not even here (sanitize/stream.py).
        if isinstance(tensor, ir.LazyTensor):
            tensor.tofile(out)
        else:
            out.write(tensor.tobytes())
        tick(nbytes(tensor))
        return
    left, at = nbytes(tensor), tensor.offset or 0
    out.flush()
    target = out.tell()
    with open(tensor.path, "rb") as source:
        while left:
            try:
                count = os.copy_file_range(source.fileno(), out.fileno(), min(left, CHUNK), at, target)
            except OSError:
                chunk = os.pread(source.fileno(), min(left, CHUNK), at)
                count = os.pwrite(out.fileno(), chunk, target)
            if not count:
                raise RingstepError(f"{tensor.path} ends inside tensor {tensor.name!r}: it changed meanwhile")
            left, at, target = left - count, at + count, target + count
            tick(count)
    out.seek(target)


def _serialize(model: ir.Model, places: dict[int, Place]) -> bytes:
    """The model's protobuf with references in place of the tensors that were placed."""
    swapped: list[Callable[[], None]] = []
    try:
        for inner in graphs.every_graph(model):
            for value in inner.initializers.values():
                tensor = value.const_value
                if tensor is not None and id(tensor) in places:
                    swapped.append(_swap_value(value, tensor, places[id(tensor)]))
        for node in graphs.every_node(model):
            for attribute in list(node.attributes.values()):
                if attribute.type == ir.AttributeType.TENSOR and id(attribute.value) in places:
                    swapped.append(_swap_attribute(node, attribute, places[id(attribute.value)]))
        proto = ir.serde.serialize_model(model)
        if proto.ByteSize() >= 1 << 31:
            raise RingstepError(f"the graph alone takes {proto.ByteSize()} bytes; a protobuf holds less than 2 GiB")
        return proto.SerializeToString()
    finally:
        for undo in swapped:
            undo()


def _swap_value(value: ir.Value, tensor: ir.TensorProtocol, place: Place) -> Callable[[], None]:
    value.const_value = _reference(tensor, place)

    def undo() -> None:
        value.const_value = tensor

    return undo


def _swap_attribute(node: ir.Node, attribute: ir.Attr, place: Place) -> Callable[[], None]:
    reference = _reference(attribute.as_tensor(), place)
    node.attributes[attribute.name] = ir.Attr(attribute.name, ir.AttributeType.TENSOR, reference)

    def undo() -> None:
        node.attributes[attribute.name] = attribute

    return undo


def _reference(tensor: ir.TensorProtocol, place: Place) -> ir.ExternalTensor:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(place[0], place[1], place[2], tensor.dtype, shape=shape, name=tensor.name or "")


def _link_kept(places: dict[int, Place], folder: Path, temporary: Path, data_name: str) -> None:
    """Weights that stay are seen from the temporary folder through hard links, which no loader refuses."""
    for name in {place[0] for place in places.values()} - {data_name}:
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link((folder / name).resolve(), temporary / name)

"""Run a model before and after on the same inputs, in ONNX Runtime in a child process; find ranges the same way."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ringstep import child
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import ordinary_size
from sanitize.model_file import staged
from sanitize.tensors import FLOATS
from sanitize.wire import read_skeleton

TIMEOUT_SECONDS = 1800.0
INPUT_LIMIT = 1 << 30  # bytes of one array in an --inputs file
INPUTS_LIMIT = 8 << 30  # bytes of all arrays of one
SIZES = (4, 2, 1)  # tried for dynamic dims
RANGED = ("Sigmoid", "Swish", "Softmax", "LogSoftmax", "Exp", "Log", "Gelu", "Erf", "Tanh", "Pow", "Mul", "Div",
          "Reciprocal", "Sqrt", "ReduceSumSquare", "ReduceL2", "RMSNormalization", "LayerNormalization",
          "QuickGelu", "FastGelu", "BiasGelu")  # fmt: skip
Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Compared:
    """One output, before and after."""

    name: str
    snr_db: float
    """300 where bit-equal."""
    skipped: int
    """Elements that were not finite before: a mask of -inf or a NaN that a pass is there to remove."""
    equal: bool


def read_inputs(path: Path) -> Feeds:
    """Read an .npz of arrays by input name. Raises RingstepError; never unpickles."""
    feeds = {}
    try:
        ordinary_size(path)
        with zipfile.ZipFile(path) as archive:
            total = sum(info.file_size for info in archive.infolist())
            if total > INPUTS_LIMIT:
                raise RingstepError(f"{path}: its arrays take {total} bytes; at most 8 GiB")
            for info in archive.infolist():
                if info.file_size > INPUT_LIMIT:
                    raise RingstepError(f"{path}: {info.filename} is {info.file_size} bytes; at most 1 GiB an array")
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                feeds[name] = arrays[name]
    except RingstepError:
        raise
    except Exception as error:  # zip, numpy and system errors alike
        raise RingstepError(f"{path} cannot be read as an .npz of plain arrays: {child.one_line(str(error))}") from None
    return feeds


def verify(
    before: Path, after: Path, *, inputs: Feeds | None = None, dims: Mapping[str, int] | None = None, seed: int = 0
) -> list[Compared]:
    """Compare every output of two models of the same inputs, which are random unless given; `dims` sizes named dims.

    Raises RingstepError where one of them does not run.
    """
    with child.Worker(f"{after.name}: verifying in ONNX Runtime", explain=child.last_error) as worker:
        feeds, want = worker.call(_first_run, before.resolve(), inputs, seed, dims, timeout_s=TIMEOUT_SECONDS).value
        have = worker.call(_run, after.resolve(), feeds, timeout_s=TIMEOUT_SECONDS).value
    if missing := sorted(want.keys() - have.keys()):
        raise RingstepError(f"{after.name}: the output {missing[0]!r} is gone")
    return [compare(name, want[name], have[name]) for name in want]


def compare(name: str, want: np.ndarray, have: np.ndarray) -> Compared:
    """Compare two arrays; where the first is not finite only the shape counts."""
    from ringstep.parity.metrics import SILENT_DB, snr_db

    if want.shape != have.shape:
        return Compared(name, -SILENT_DB, 0, False)
    if want.dtype.kind not in "fc":
        same = want.tolist() == have.astype(want.dtype).tolist()
        return Compared(name, SILENT_DB if same else -SILENT_DB, 0, same)
    finite = np.isfinite(want)
    a, b = want[finite].astype(np.float64), have[finite].astype(np.float64)
    equal = bool((a == b.astype(a.dtype)).all())
    return Compared(name, snr_db(a, b), int((~finite).sum()), equal)


def refuse_unlike(compared: list[Compared], min_db: float, file: str) -> None:
    """Raise RingstepError unless every output agrees to `min_db` (inf: bit for bit)."""
    for output in compared:
        if output.snr_db < min_db if np.isfinite(min_db) else not output.equal:
            asked = f"{min_db:.0f} dB" if np.isfinite(min_db) else "bit for bit"
            raise RingstepError(
                f"{file}: output {output.name!r} is {output.snr_db:.1f} dB from the original, want {asked}; "
                "nothing was written. Find the pass with --skip, or give real inputs with --inputs"
            )


def find_ranges(model: ir.Model, path: Path, inputs: Feeds | None, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Run the model once and return the smallest and largest element of what its nonlinear operators read.

    `path` is where the model was read from. Values within If and Loop bodies are not seen. Raises RingstepError.
    """
    wanted = {
        value.name: value
        for node in model.graph
        if node.op_type in RANGED
        for value in node.inputs
        if value is not None and value.producer() is not None and value.dtype in FLOATS
    }  # fmt: skip
    names = {output.name for output in model.graph.outputs}
    added = [value for name, value in wanted.items() if name not in names]
    model.graph.outputs.extend(added)
    try:
        what = f"{path.name}: finding ranges in ONNX Runtime"
        with staged(model, path, keep=path.parent) as probe, child.Worker(what, explain=child.last_error) as worker:
            probe, named = probe.resolve(), sorted(filter(None, wanted))
            found = worker.call(_ranges, probe, inputs, seed, named, timeout_s=TIMEOUT_SECONDS).value
    finally:
        for _ in added:
            model.graph.outputs.pop()
    ranges: dict[str, tuple[float, float]] = found
    return ranges


def spans(arrays: Feeds) -> dict[str, tuple[float, float]]:
    """The smallest and largest finite element of every float array that has one."""
    found = {}
    for name, array in arrays.items():
        finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array[:0]
        if finite.size:
            found[name] = (float(finite.min()), float(finite.max()))
    return found


# What follows runs in the child.

TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}


def _session(path: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    exact = _exact(path)
    if exact is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    # Rewrites of the runtime would be compared along with ours.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return ort.InferenceSession(exact or str(path), options, providers=["CPUExecutionProvider"])


def _exact(path: Path) -> bytes | None:
    """The model without accuracy levels, None where it has none: they let the CPU's MatMulNBits round activations to 8
    bits, which is 40 dB from the weights' own product.
    """
    model = read_skeleton(path)
    levels = [(node, level) for node in model.graph.node if node.op_type == "MatMulNBits"
              for level in node.attribute if level.name == "accuracy_level"]  # fmt: skip
    for node, level in levels:
        node.attribute.remove(level)
    return model.SerializeToString() if levels else None


def _first_run(
    path: Path, given: Feeds | None, seed: int, dims: Mapping[str, int] | None = None, names: list[str] | None = None
) -> tuple[Feeds, Feeds]:
    """Run a model on what is given, or on the first random inputs that it takes; returns inputs and outputs.

    `names`: the outputs to return, None: all.
    """
    session = _session(path)
    names = names if names is not None else [output.name for output in session.get_outputs()]
    run = lambda feeds: dict(zip(names, session.run(names, feeds), strict=True)) if names else {}
    wanted = {value.name: value for value in session.get_inputs()}
    if given is not None:
        for name in given:
            if name not in wanted:
                raise RingstepError(f"--inputs: the model has no input {name!r}{did_you_mean(name, wanted)}")
        for name in wanted:
            if name not in given:
                raise RingstepError(f"--inputs: the input {name!r} is missing")
        feeds = {name: _fit(name, given[name], _kind(value)) for name, value in wanted.items()}
        return feeds, run(feeds)
    error: Exception | None = None
    # A dynamic dim may be a batch, a length or a sum of two: the first size with which the model runs is taken.
    for size in SIZES:
        feeds = _random(wanted, size, dims or {}, np.random.default_rng(seed))
        try:
            return feeds, run(feeds)
        except Exception as caught:
            error = caught
    raise RingstepError(f"does not run on random inputs, give --inputs FILE.npz: {child.one_line(str(error))}")


def _fit(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    """An array in the type of its input, which a pass may have narrowed, where it loses no more than digits."""
    if kind not in np.sctypeDict or array.dtype == kind:
        return array
    cast = array.astype(kind) if array.dtype.kind in "fiub" else None
    if cast is None or not (array.dtype.kind == cast.dtype.kind == "f" or np.array_equal(cast, array)):
        raise RingstepError(f"--inputs: {name!r} is {array.dtype} and does not fit in {kind}, which the model wants")
    return cast


def _random(wanted: Mapping[str, Any], size: int, dims: Mapping[str, int], rng: np.random.Generator) -> Feeds:
    feeds = {}
    for name, value in wanted.items():
        default = lambda dim, size=size: 1 if "batch" in str(dim) else size
        shape = [dim if isinstance(dim, int) else dims.get(str(dim)) or default(dim) for dim in value.shape]
        kind = _kind(value)
        if kind.startswith("float"):
            feeds[name] = np.asarray(rng.normal(size=shape), kind)
        elif kind == "bool":
            feeds[name] = np.asarray(rng.random(shape) < 0.7)
        elif kind == "string":
            feeds[name] = np.full(shape, "a", object)
        else:
            # Small enough for an index anywhere; masks, which are mostly ones, get some of each.
            feeds[name] = np.asarray(rng.integers(0, 2, shape), kind)
            if "mask" in name:
                feeds[name] = np.ones(shape, kind)
    return feeds


def _kind(value: Any) -> str:
    return TYPES.get(value.type) or str(value.type).removeprefix("tensor(").removesuffix(")")


def _run(path: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    session = _session(path)
    # A pass may have narrowed an input's type or dropped one that nothing reads.
    kinds = {value.name: _kind(value) for value in session.get_inputs()}
    fitted = {name: feeds[name] if kind == "string" else feeds[name].astype(kind) for name, kind in kinds.items()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, fitted), strict=True))


def _ranges(path: Path, given: Feeds | None, seed: int, names: list[str]) -> dict[str, tuple[float, float]]:
    feeds, found = _first_run(path, given, seed, names=names)
    return spans(feeds) | spans(found)

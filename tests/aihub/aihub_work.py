"""What the jobs of the stand-in do: the real HTP compiler and simulator, or quick stand-ins with the same protocol.

Times of profiles are SYNTHETIC in both, see aihub_profile.py.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aihub_child
import h5py
import numpy as np
from aihub_files import store_dataset, store_model
from aihub_graphs import TFLITE_HEAD, file_name, is_context, open_model, pack, read, read_ops, specs, write_ops
from aihub_options import graph_name, hub_devices, parse_options
from aihub_profile import profile
from aihub_store import Job, Model, Store
from qai_hub import public_api_pb2 as pb
from qai_hub.util.dataset_entries_converters import dataset_entries_to_h5, h5_to_dataset_entries

from ringstep import child
from ringstep.devices import Chip
from ringstep.errors import RingstepError

TIMEOUT_SECONDS = 600.0
QUANTISED = {"int8": ("int8", "int8"), "int16": ("int16", "int16"), "w8a16": ("int8", "int16")}
Arrays = dict[str, np.ndarray]


@dataclass
class Work:
    """A job and what it works with."""

    store: Store
    job: Job
    fast: bool
    scratch: Path

    @property
    def options(self) -> dict[str, str]:
        return parse_options(self.job.kind, self.job.options)

    @property
    def chip(self) -> Chip:
        return hub_devices()[self.job.device].chip


def do(store: Store, job: Job, fast: bool) -> str:
    """Do a job's work and store what it makes; text for the hub log. Raises RingstepError for what makes it fail."""
    kinds: dict[str, Callable[[Work], str]] = {
        "compile": _compile, "link": _link, "quantize": _quantize, "inference": _infer,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="aihub-", dir=store.folder) as scratch:
        return kinds[job.kind](Work(store, job, fast, Path(scratch)))


def _compile(work: Work) -> str:
    store, options = work.store, work.options
    source, target = store.models[work.job.models[0]], store.models[work.job.target]
    path = open_model(store, source, graph_name(options))
    if source.type == pb.MODEL_TYPE_QNN_CONTEXT_BINARY:  # a linked model, put into an ONNX wrapper
        target.chip, target.graphs = source.chip, source.graphs
        store_model(store, target, pack(_beside(path), work.scratch / "x.zip", f"{path.stem}.onnx"))
        return "embedded the context in ONNX\n"
    full = options.get("quantize_full_type", "float16")
    if full != "float16" and not work.fast:
        path = _quantised(work, path, *_bits(full))
    onnx_model = read(path)
    name = graph_name(options) or onnx_model.graph.name or "model"
    runtime = options.get("target_runtime", "tflite")
    if runtime == "precompiled_qnn_onnx":
        files = _context(work, path, name)
        data, target.chip = pack(files, work.scratch / "x.zip", f"{file_name(name)}.onnx"), work.chip.name
    elif runtime == "onnx":
        target.directory = source.directory
        data = store.path("models", source.id).read_bytes() if full == "float16" else path.read_bytes()
    else:
        data = pack(_beside(path), work.scratch / "x.zip", head=TFLITE_HEAD if runtime == "tflite" else b"")
    target.graphs = [name]
    target.inputs, target.outputs = specs(onnx_model)
    write_ops(store, target, onnx_model)
    store_model(store, target, data)
    return f"compiled {name} to {runtime} for {work.job.device}\n"


def _link(work: Work) -> str:
    store, target = work.store, work.store.models[work.job.target]
    models = [store.models[ident] for ident in work.job.models]
    names = [model.graphs[0] if model.graphs else "model" for model in models]
    if len(set(names)) != len(names):
        raise RingstepError(f"Graph names must differ: {', '.join(names)}")
    if len(names) > 1 and not work.chip.weight_sharing:
        raise RingstepError(f"{work.job.device} does not support several graphs with shared weights")
    folder = work.scratch / "graphs"
    inputs, outputs = [], []
    for name, model in zip(names, models, strict=True):
        path = open_model(store, model)
        _context(work, path, name, folder / file_name(name))
        read_in, read_out = specs(read(path), name if len(names) > 1 else None)
        inputs, outputs = inputs + read_in, outputs + read_out
    archive = work.scratch / "x.zip"
    store_zip(folder, archive)
    target.graphs, target.chip, target.inputs, target.outputs = names, work.chip.name, inputs, outputs
    write_ops(store, target, read(open_model(store, models[0])))
    store_model(store, target, archive.read_bytes())
    return f"linked {', '.join(names)} for {work.job.device}\n"


def store_zip(folder: Path, out: Path) -> None:
    """Zip a folder's files with their paths."""
    import zipfile

    with zipfile.ZipFile(out, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, str(file.relative_to(folder)))


def _quantize(work: Work) -> str:
    store, target = work.store, work.store.models[work.job.target]
    source = store.models[work.job.models[0]]
    path = open_model(store, source)
    if not work.fast:
        kinds = {pb.QUANTIZE_DTYPE_INT8: "int8", pb.QUANTIZE_DTYPE_INT16: "int16"}
        if work.job.weights not in kinds or work.job.activations not in kinds:
            raise RingstepError("The stand-in quantises to int8 and int16 only")
        path = _quantised(work, path, kinds[work.job.weights], kinds[work.job.activations])
    store_model(store, target, path.read_bytes())
    return f"quantised {source.name}\n"


def _infer(work: Work) -> str:
    store, job, chip = work.store, work.job, work.chip
    model, graph = store.models[job.models[0]], graph_name(work.options)
    if model.chip not in ("", chip.name):
        raise RingstepError(f"The context was compiled for {model.chip}, and {job.device} has {chip.name}")
    path = open_model(store, model, graph)
    samples = _samples(work) if job.dataset else [_random(model, graph)]
    outputs = _run(work, model, path, samples)
    if job.dataset:
        how = job.faults.get("outputs", {}).get("how", "")
        if how != "none":
            entries = {name: [sample[name] for sample in outputs] for name in outputs[0]}
            job.output = _store_outputs(work, _broken(entries, how))
    size = sum(file.stat().st_size for file in _beside(path))
    detail = profile(size, model.sha256, read_ops(store, model, path), work.options, len(samples), job.faults)
    job.execution_us = detail.execution_time
    if job.profiling and job.faults.get("profile", {}).get("how") != "no_detail":
        store.path("jobs", job.id, "profile.pb").write_bytes(detail.SerializeToString())
    return f"ran {len(samples)} samples; the times of the profile are synthetic, no phone ran\n"


def _run(work: Work, model: Model, path: Path, samples: list[Arrays]) -> list[Arrays]:
    names = {name for name, *_ in model.inputs}
    if len(model.graphs) < 2 and names and samples and set(samples[0]) != names:
        given, wanted = ", ".join(sorted(samples[0])), ", ".join(sorted(names))
        raise RingstepError(f"The data set has inputs {given}; the model takes {wanted}")
    if work.fast:
        return _run_fast(model, path, samples)
    on_npu = is_context(path) or model.type == pb.MODEL_TYPE_QNN_DLC
    if not on_npu:
        what = f"{model.name} on ONNX Runtime"
        outputs: list[Arrays] = child.run(what, aihub_child.run_cpu, path, samples, timeout_s=TIMEOUT_SECONDS).value
        return outputs
    from ringstep.engines.qnn_sim import open_graph

    soc = None if is_context(path) else work.chip.soc_model
    with open_graph(path, soc_model=soc, fp16=work.chip.fp16, timeout_s=TIMEOUT_SECONDS) as graph:
        return [graph.run(sample) for sample in samples]


def _run_fast(model: Model, path: Path, samples: list[Arrays]) -> list[Arrays]:
    try:
        return aihub_child.run_cpu(path, samples)
    except Exception:  # whatever ONNX Runtime cannot do: a context of another compiler, say
        shapes = {name: np.zeros(shape, dtype) for name, dtype, shape, _ in model.outputs}
        return [shapes or {"output_0": np.ones(4, np.float32)} for _ in samples]


def _context(work: Work, path: Path, name: str, out: Path | None = None) -> list[Path]:
    out = out or work.scratch / "context"
    if work.fast:
        import onnx

        out.mkdir(parents=True)
        wrapper, binary = out / f"{file_name(name)}_ctx.onnx", out / f"{file_name(name)}_ctx_qnn.bin"
        onnx.save(onnx.load(str(path)), str(wrapper))  # the source in one file, which ONNX Runtime runs
        binary.write_bytes(b"no context: the stand-in does no work\n")
        return [wrapper, binary]
    from exporters.qnn import compile_context

    out.parent.mkdir(parents=True, exist_ok=True)
    report = compile_context(
        path, out, chip=work.chip, fp16=work.chip.fp16, name=file_name(name), timeout_s=TIMEOUT_SECONDS
    )
    return list(report.files)


def _beside(path: Path) -> list[Path]:
    return sorted(file for file in path.parent.iterdir() if file.is_file())


def _bits(full: str) -> tuple[str, str]:
    if full not in QUANTISED:
        raise RingstepError(f"The stand-in does not quantise to {full}")
    return QUANTISED[full]


def _quantised(work: Work, path: Path, weights: str, activations: str) -> Path:
    if not work.job.dataset:
        raise RingstepError("Quantisation needs calibration data")
    out = work.scratch / "quantised" / "model.onnx"
    out.parent.mkdir()
    what = f"{path.name}: quantising"
    child.run(what, aihub_child.quantise, path, out, _samples(work), weights, activations, timeout_s=TIMEOUT_SECONDS)
    return out


def _samples(work: Work) -> list[Arrays]:
    try:
        with h5py.File(work.store.path("datasets", work.job.dataset), "r") as file:
            entries = h5_to_dataset_entries(file)
    except (OSError, KeyError, ValueError) as error:
        raise RingstepError(f"Dataset {work.job.dataset} cannot be read: {error}") from None
    counts = {len(arrays) for arrays in entries.values()}
    if len(counts) != 1:
        raise RingstepError(f"Dataset {work.job.dataset} has inputs of different lengths")
    return [{name: arrays[index] for name, arrays in entries.items()} for index in range(counts.pop())]


def _random(model: Model, graph: str) -> Arrays:
    random = np.random.default_rng(0)
    mine = [spec for spec in model.inputs if spec[3] in (None, graph)]
    return {name: random.random([max(1, dim) for dim in shape]).astype(dtype) for name, dtype, shape, _ in mine}


def _store_outputs(work: Work, entries: dict[str, list[np.ndarray]]) -> str:
    path = work.scratch / "out.h5"
    with h5py.File(path, "w") as file:
        dataset_entries_to_h5(entries, file)
        file.require_group("data")  # the client fails on a file without
    with work.store.lock:
        dataset = work.store.new_dataset(f"{work.job.name} outputs")
        store_dataset(work.store, dataset, path.read_bytes())
    return dataset.id


def _broken(entries: dict[str, list[np.ndarray]], how: str) -> dict[str, list[np.ndarray]]:
    random = np.random.default_rng(1)
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "shapes": lambda array: np.append(array.reshape(-1), array.reshape(-1)[:1]),
        "noise": lambda array: random.normal(0, max(float(np.std(array)), 1e-3), array.shape).astype(array.dtype),
        "nan": lambda array: np.full(array.shape, np.nan).astype(array.dtype),
    }
    if how == "missing":
        return dict(list(entries.items())[:-1])
    if how == "names":
        return {f"output_{index}": arrays for index, arrays in enumerate(entries.values())}
    if how in changes:
        return {name: [changes[how](array) for array in arrays] for name, arrays in entries.items()}
    return entries


def split_log(error: RingstepError) -> tuple[str, str]:
    """The reason of a failure, and the log that a child process left behind."""
    reason, _, path = str(error).partition("; log: ")
    reason = re.sub(r"^.*?/models/\w+/open/", "", reason)
    if not path or not Path(path).is_file():
        return reason, ""
    log = Path(path).read_text("utf-8", "replace")
    Path(path).unlink()
    return reason, log

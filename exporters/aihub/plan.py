"""What a request comes down to: the graphs, where each runs, and the chain of jobs that measures it there."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from exporters.aihub.parts import HOME, Part, graph_name, kinds, layer_parts, samples, sources, stage, whole_parts
from ringstep import console, qnn
from ringstep.contract import StepSpec
from ringstep.devices import Device, find_device
from ringstep.errors import RingstepError
from ringstep.manifest import Manifest
from ringstep.profiling.jobs import Content
from ringstep.profiling.ledger import TAG, Job, Ledger, key_of, now
from ringstep.profiling.profile import Place, Subject
from ringstep.profiling.store import DEFAULT

NPU = "qnn:npu"
TARGETS = (NPU, "tflite:gpu", "tflite:cpu", "onnx:gpu", "onnx:cpu", "onnx:npu")
MAX_ITERATIONS = 1000
DEFAULT_ITERATIONS = 100  # what the service runs unless told otherwise
LABEL = 60  # characters of a job's name before its hash


@dataclass(frozen=True)
class Request:
    """What a command was asked for."""

    devices: tuple[str, ...]
    layers: tuple[str, ...] = ()
    """Kinds of layers and "head"; none: the whole step."""
    targets: tuple[str, ...] = (NPU,)
    """RUNTIME:UNIT."""
    iterations: int = DEFAULT_ITERATIONS
    compile: Literal["here", "hub"] = "here"
    """Who makes the NPU's binary: Qualcomm's compiler on this machine, or the service from the ONNX source."""
    db: str = str(DEFAULT)
    """The profile store."""
    repeat: int = 0
    """More for every time that the same is measured again."""


@dataclass
class Chain:
    """The jobs that measure one part on one device, in order."""

    part: Part
    device: Device
    target: str
    jobs: list[Job]
    source: Path
    """The part's ONNX file, for the lint."""
    precision: str
    refused: str = ""
    """Why there are no jobs: the compiler here refuses the graph for this chip."""

    @property
    def label(self) -> str:
        """The line it has in tables: "sliding galaxy-s25 qnn:npu"."""
        return f"{self.part.subject} {self.device.id} {self.target}"


@dataclass
class Planned:
    """All of a request."""

    chains: list[Chain]
    contents: dict[str, Content]
    samples: dict[str, list[tuple[Any, Any]]]


def plan(manifest: Manifest, spec: StepSpec, request: Request) -> Planned:
    """Cut, compile and sample what a request needs, all of it in stages; nothing is sent. Raises RingstepError."""
    devices = list({device.id: device for device in map(measured_device, request.devices)}.values())
    parts = layer_parts(spec, request.layers) if request.layers else whole_parts(spec, manifest)
    # Of every kind at once, so that a request for others runs no text again.
    found = samples(manifest, spec, layer_parts(spec, kinds(spec)) if request.layers else parts)
    from_source = request.compile == "hub" or any(target != NPU for target in request.targets)
    written = all(own_source(manifest, part).is_file() for part in parts)
    cut = sources(manifest, parts) if from_source or not written else {}
    planned = Planned([], {}, found)
    files = {part.name: cut.get(part.name) or own_source(manifest, part) for part in parts}
    for device in devices:
        for part in parts:
            for target in request.targets:
                try:
                    chain = chain_of(manifest, spec, request, planned, part, parts, device, target, files)
                except Refused as error:
                    chain = Chain(part, device, target, [], files[part.name], precision_of(spec, target), str(error))
                planned.chains.append(chain)
    return planned


class Refused(RingstepError):
    """The compiler here takes a graph for no or another chip; other devices and runtimes may."""


def linked(part: Part, parts: Sequence[Part], device: Device) -> list[Part]:
    """The parts that share one context binary with this one, so that the phone holds their weights once: decode and
    prefill of the same layers, where the chip can."""
    if not part.whole or not device.chip.weight_sharing:
        return [part]
    return [other for other in parts if other.name.partition(".")[2] == part.name.partition(".")[2]]


def measured_device(name: str) -> Device:
    """A device that AI Hub has. Raises RingstepError."""
    device = find_device(name)
    if not device.aihub:
        raise RingstepError(f"--device {name}: AI Hub does not offer it; `ringstep devices` shows which it has")
    return device


def own_source(manifest: Manifest, part: Part) -> Path:
    """The ONNX file of a part as the export wrote it, beside the weights of the whole."""
    return manifest.folder / part.io.file


def chain_of(
    manifest: Manifest, spec: StepSpec, request: Request, planned: Planned, part: Part, parts: Sequence[Part],
    device: Device, target: str, files: dict[str, Path],
) -> Chain:  # fmt: skip
    """The jobs for one part on one device; what they upload goes into `planned.contents`."""
    runtime, unit = target.split(":")
    source = files[part.name]
    floats, precision = not spec.scheme, precision_of(spec, target)
    jobs: list[Job] = []
    label = f"{spec.model} {part.subject} {precision} {target} {device.id}"[:LABEL]
    subject = Subject(spec.model, spec.recipe, part.subject, part.count, part.n, part.layout, precision, spec.context)
    here = target == NPU and request.compile == "here"
    about = {"subject": dataclasses.asdict(subject), "part": part.name,
             "compiler": qnn.version() if here else "AI Hub",
             "place": dataclasses.asdict(Place(device.id, device.chip.name, runtime, unit))}  # fmt: skip

    def add(kind: Literal["compile", "link", "inference"], options: str, models: Sequence[str],
            dataset: str = "") -> str:  # fmt: skip
        key = key_of([kind, options, models, dataset, device.aihub, request.repeat])
        name = f"{label} {kind} {key[:TAG]}"
        jobs.append(Job(key, kind, name, device.aihub, options, tuple(models), now(), dataset, dict(about)))
        return key

    graph = ""
    if here:
        home, taken = binary(manifest, part, device, source, spec)
        model = add_model(planned, f"{label} binary", home)
    elif target == NPU:
        taken = source
        half = " --qnn_options default_graph_htp_precision=FLOAT16" if floats else ""
        group = linked(part, parts, device)
        uploads = [add_model(planned, f"{label} {own.name} onnx", files[own.name].parent) for own in group]
        made = [add("compile", f"--target_runtime qnn_dlc{half}", [upload]) for upload in uploads]
        model = add("link", "", made)
        graph = f" --qnn_options context_enable_graphs={graph_name(part)}" if len(group) > 1 else ""
    else:
        taken = source
        upload = add_model(planned, f"{label} onnx", source.parent)
        model = add("compile", f"--target_runtime {runtime}", [upload])
    fed = inputs_of(taken)
    pairs = planned.samples[part.name]
    if lacking := [name for name in fed if name not in pairs[0][0]]:
        raise RingstepError(f"{taken}: takes {lacking[0]}, which the step has no value for; export again")
    dataset = add_dataset(planned, f"{label} inputs", {name: [pair[0][name] for pair in pairs] for name in fed})
    # The service divides what it is told by the number of samples.
    options = f"--compute_unit {unit} --max_profiler_iterations {request.iterations * len(pairs)}{graph}"
    add("inference", options, [model], dataset)
    return Chain(part, device, target, jobs, source, precision)


def precision_of(spec: StepSpec, target: str) -> str:
    """What an artifact is computed in at a place: floats in fp16 on the NPU, whatever the graph's type."""
    return spec.scheme or ("fp16" if target == NPU or spec.dtype == "float16" else "fp32")


def binary(manifest: Manifest, part: Part, device: Device, source: Path, spec: StepSpec) -> tuple[Path, Path]:
    """A folder with the context binary of a part for a chip and its wrapper, and the wrapper; a stage, so made once.

    The export's own where it is for this chip. Raises RingstepError, also where there is no compiler here.
    """
    chip, plain = device.chip, graph_name(part)
    place = f"{HOME}/{chip.name}/{plain}.onnx"
    own = [manifest.folder / f"qnn/{plain}_ctx{end}" for end in (".onnx", "_qnn.bin")]
    exported = part.whole and spec.target.get("chip") == chip.name and all(path.is_file() for path in own)

    def build(home: Path) -> None:
        folder = home / place
        if exported:
            folder.mkdir(parents=True)
            for path in own:
                link(path, folder / path.name)
            return
        from exporters.qnn import compile_context

        with console.progress(f"compiling {part.name} for {chip.name}"):
            try:
                compile_context(source, folder, chip=chip, fp16=chip.fp16, name=plain)
            except RingstepError as error:
                raise Refused(str(error)) from None

    if not exported:
        try:
            qnn.require()
        except RingstepError as error:
            raise RingstepError(f"{error}; --compile hub lets AI Hub compile the ONNX source") from None
    stage(manifest, f"profile-{chip.name}-{plain}", [part], ("exporters/aihub/plan.py", "exporters/qnn.py"), build,
          {"chip": chip.name, "soc_model": chip.soc_model, "exported": exported,
           "plugin": qnn.version() if not exported else ""})  # fmt: skip
    return manifest.folder / place, manifest.folder / place / f"{plain}_ctx.onnx"


def link(path: Path, place: Path) -> None:
    """The same file in another place, without a copy where the disk allows it."""
    try:
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)


def inputs_of(path: Path) -> list[str]:
    """What an ONNX file takes, in its order, which is the one AI Hub asks datasets for."""
    from exporters.qnn import read_graph

    graph = read_graph(path).graph
    constants = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in constants]


def add_model(planned: Planned, label: str, folder: Path) -> str:
    """Note a folder to upload; returns its content hash."""
    from ringstep.hashing import sha256_file

    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    sha = key_of([[path.name, sha256_file(path)] for path in files])
    size = sum(path.stat().st_size for path in files)
    planned.contents.setdefault(sha, Content("model", label, sha, size, path=folder))
    return sha


def add_dataset(planned: Planned, label: str, arrays: dict[str, list[np.ndarray]]) -> str:
    """Note samples to upload; returns their content hash."""
    digest = hashlib.sha256()
    for name, values in arrays.items():
        for value in values:
            digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
    sha = digest.hexdigest()
    size = sum(value.nbytes for values in arrays.values() for value in values)
    planned.contents.setdefault(sha, Content("dataset", label, sha, size, samples=arrays))
    return sha


def next_repeat(ledger: Ledger, request: Request) -> int:
    """The number of a new measurement: one that no job of the artifact has, or that of the same request left open."""
    repeats = [other["repeat"] for other in ledger.body.requests if type(other.get("repeat")) is int]
    for other in ledger.open_requests:
        if {**other, "repeat": 0} == {**as_json(request), "repeat": 0} and other.get("repeat"):
            return int(other["repeat"])
    return max(repeats, default=-1) + 1


def as_json(request: Request) -> dict[str, Any]:
    """A request as the manifest keeps it."""
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(request).items()}  # fmt: skip


def read_request(body: dict[str, Any], where: str) -> Request:
    """A request that a manifest kept. Raises RingstepError."""
    from ringstep.contract import build

    request = cast(Request, build(Request, body, where))
    targets(request.targets)
    if not request.devices or not request.targets or not 1 <= request.iterations <= MAX_ITERATIONS:
        raise RingstepError(f"{where}: no devices, no targets, or iterations out of 1..{MAX_ITERATIONS}")
    return request


def targets(values: Sequence[str]) -> tuple[str, ...]:
    """RUNTIME:UNIT pairs, checked. Raises RingstepError."""
    for value in values:
        if value not in TARGETS:
            raise RingstepError(f"{value!r} is none of {', '.join(TARGETS)}")
    return tuple(dict.fromkeys(values))

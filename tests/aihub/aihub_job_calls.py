"""Calls about jobs: what is taken and refused, and what a job came to."""

from __future__ import annotations

from typing import Any

import aihub_messages as messages
from aihub_answer import Answer, Request, Service, created, find, message, page, url
from aihub_files import model_download
from aihub_options import Refused, find_devices, graph_name, parse_options
from aihub_store import Job, Model, Store
from qai_hub import api_utils
from qai_hub import public_api_pb2 as pb

ONNX, TFLITE = pb.MODEL_TYPE_ONNX, pb.MODEL_TYPE_TFLITE
CONTEXT, DLC = pb.MODEL_TYPE_QNN_CONTEXT_BINARY, pb.MODEL_TYPE_QNN_DLC
TAKEN = {"compile": (ONNX, CONTEXT), "link": (DLC,), "quantize": (ONNX,), "inference": (ONNX, TFLITE, CONTEXT, DLC)}
MADE = {"qnn_dlc": (DLC, False), "precompiled_qnn_onnx": (ONNX, True), "onnx": (ONNX, False), "tflite": (TFLITE, False)}


def new_job(service: Service, request: Request) -> Answer:
    """POST jobs: all checks that the service makes before it takes a job. Refuses with 400."""
    sent = pb.Job.FromString(request.body)
    kind = (sent.WhichOneof("job") or "").removesuffix("_job")
    if kind not in TAKEN:
        raise Refused(f"Jobs of kind {kind!r} are not taken.")
    part = getattr(sent, f"{kind}_job")
    options = parse_options(kind, part.options)
    store = service.store
    subjects = part.models.models if kind == "link" else [part.model]
    models = [_usable_model(store, kind, subject.model_id) for subject in subjects]
    if kind == "compile" and models[0].type == CONTEXT and part.options:
        raise Refused("A QNN context binary is compiled without options.")
    job = store.new_job(kind, part.name, part.options, _usable_device(kind, part), [model.id for model in models])
    try:
        job.dataset = _usable_dataset(store, kind, part)
    except Refused:
        del store.jobs[job.id]
        raise
    if kind in ("compile", "link", "quantize"):
        job.target = _target(store, job, options, models).id
    if kind == "inference":
        job.profiling = part.is_profiling_on
    if kind == "quantize":
        job.weights, job.activations = part.weights_dtype, part.activations_dtype
    job.specs = _sent_specs(part) if kind == "compile" else []
    job.specs = job.specs or models[0].inputs
    service.accept(job)
    return created(job)


def _target(store: Store, job: Job, options: dict[str, str], models: list[Model]) -> Model:
    kind, directory = CONTEXT, False
    if job.kind == "quantize":
        kind, directory = ONNX, False
    elif job.kind == "compile":
        embedded = models[0].type == CONTEXT
        kind, directory = MADE["precompiled_qnn_onnx" if embedded else options.get("target_runtime", "tflite")]
    model = store.new_model(job.name, kind, directory, producer=job.id)
    named = graph_name(options)
    model.graphs = [named] if named else []
    return model


def _sent_specs(part: Any) -> list[list[Any]]:
    shapes = api_utils.tensor_type_list_pb_to_list_shapes(part.tensor_type_list)
    return [[name, dtype, list(shape), None] for name, (shape, dtype) in shapes]


def _usable_model(store: Store, kind: str, ident: str) -> Model:
    model: Model = find(store.models, ident, "Model ID", 400)
    if model.expired:
        raise Refused(f"Model {ident} is expired.")
    if not model.uploaded and not model.producer:
        raise Refused(f"Model {ident} was not uploaded completely.")
    if model.type not in TAKEN[kind]:
        raise Refused(f"A {kind} job does not take a model of type {pb.ModelType.Name(model.type)}.")
    return model


def _usable_dataset(store: Store, kind: str, part: Any) -> str:
    if kind == "link":
        return ""
    ident: str = (part.dataset if kind == "inference" else part.calibration_dataset).dataset_id
    if not ident and kind == "quantize":
        raise Refused("A quantize job needs calibration data.")
    if ident:
        dataset = find(store.datasets, ident, "Dataset ID", 400)
        if dataset.expired:
            raise Refused(f"Dataset {ident} is expired.")
        if not dataset.uploaded:
            raise Refused(f"Dataset {ident} was not uploaded completely.")
    return ident


def _usable_device(kind: str, part: Any) -> str:
    if kind == "quantize":
        return ""
    asked = part.devices.devices[0] if kind == "compile" and part.devices.devices else part.device
    found = find_devices(asked.name, asked.os, list(asked.attributes), True)
    if not found:
        raise Refused(f"Device {asked.name!r} is not available.")
    return found[0].aihub


def job(service: Service, request: Request, ident: str) -> Answer:
    """GET jobs/ID."""
    return message(messages.job(service.store, find(service.store.jobs, ident, "Job ID")))


def rename_job(service: Service, request: Request, ident: str) -> Answer:
    """PATCH jobs/ID."""
    job = find(service.store.jobs, ident, "Job ID")
    job.name = pb.JobPublicUpdate.FromString(request.body).name
    return created(job)


def _fitting_jobs(service: Service, request: Request) -> list[Job]:
    states = [int(state) for state in request.first("state").split(",") if state]
    kind, creator = request.first("type"), request.first("creator")
    return [
        job
        for job in service.store.jobs.values()
        if (not states or job.state in states) and kind in ("", job.kind) and creator in ("", messages.USER)
    ]


def jobs(service: Service, request: Request) -> Answer:
    """GET jobs."""
    fits = _fitting_jobs(service, request)
    found = [messages.job(service.store, job) for job in page(request, fits)]
    return message(pb.JobList(jobs=found, total_query_count=len(fits)))


def summaries(service: Service, request: Request) -> Answer:
    """GET job_summaries."""
    fits = _fitting_jobs(service, request)
    found = [messages.summary(job) for job in page(request, fits)]
    return message(pb.JobSummaryList(job_summaries=found, total_query_count=len(fits)))


def result(service: Service, request: Request, ident: str) -> Answer:
    """GET jobs/ID/result."""
    job: Job = find(service.store.jobs, ident, "Job ID")
    if not job.ended or job.faults.get("profile", {}).get("how") == "not_found":
        raise Refused("Not found.", 404)
    result = pb.JobResult()
    if job.kind == "inference":
        result.inference_job_result.inference_job_id = ident
        result.inference_job_result.output_dataset_id = job.output
        detail = service.store.path("jobs", ident, "profile.pb")
        if detail.exists():
            result.inference_job_result.detail.ParseFromString(detail.read_bytes())
    return message(result)


def artifacts(service: Service, request: Request, ident: str, kind: str) -> Answer:
    """GET jobs/ID/device_runs/N/artifact_list/KIND."""
    find(service.store.jobs, ident, "Job ID")
    name = {messages.HUB_LOG: "hub.log", messages.DEVICE_LOG: "device.log"}.get(int(kind), "")
    if not name or not service.store.path("jobs", ident, name).exists():
        raise Refused("Not found.", 404)
    found = pb.NamedArtifactDownloadURL(url=url(service, f"jobs/{ident}/{name}"), filename=f"{ident}_{name}", name=name)
    return message(pb.NamedArtifactDownloadURLList(artifacts=[found]))


def compiled(service: Service, request: Request, ident: str) -> Answer:
    """GET jobs/ID/download_compiled_model."""
    return model_download(service, request, find(service.store.jobs, ident, "Job ID").target)

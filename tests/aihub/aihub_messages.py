"""The stand-in's records as the client's own protobuf messages."""

from __future__ import annotations

from typing import Any

from aihub_options import attributes, hub_devices, os_version
from aihub_store import DONE, Dataset, Job, Model, Spec, Store
from qai_hub import api_utils
from qai_hub import public_api_pb2 as pb

USER = "tester@example.com"
DATASET_SECONDS = 30 * 24 * 3600
HUB_LOG, DEVICE_LOG = 5, 1
TYPES = {"compile": 3, "link": 5, "quantize": 4, "inference": 2}


def user() -> pb.User:
    """The one user."""
    return pb.User(id=1, first_name="Test", last_name="User", email=USER)


def device(name: str) -> pb.Device:
    """A device by AI Hub's name."""
    found = hub_devices()[name]
    return pb.Device(name=name, os=os_version(found), attributes=attributes(found), soc_description=found.chip.name)


def model(record: Model) -> pb.Model:
    """A model."""
    message = pb.Model(
        model_id=record.id, owner=user(), name=record.name, model_type=record.type, is_directory=record.directory,
        file_upload_complete=record.uploaded, input_spec=specs(record.inputs), output_spec=specs(record.outputs),
    )  # fmt: skip
    message.creation_time.FromSeconds(int(record.created))
    if record.producer:
        message.producer_id = record.producer
    if record.graphs:
        message.metadata.entries[pb.MODEL_METADATA_KEY_QNN_MODEL_GRAPH_NAMES] = ",".join(record.graphs)
    if record.chip:
        message.metadata.entries[pb.MODEL_METADATA_KEY_QNN_CONTEXT_BIN_SOC_MODEL] = record.chip
    return message


def dataset(record: Dataset) -> pb.Dataset:
    """A data set."""
    message = pb.Dataset(
        dataset_id=record.id, owner=user(), name=record.name, permanent=record.permanent,
        file_upload_complete=record.uploaded,
    )  # fmt: skip
    message.creation_time.FromSeconds(int(record.created))
    if not record.permanent:
        message.expiration_time.FromSeconds(int(expires(record)))
    return message


def expires(record: Dataset) -> float:
    """When a data set goes, in seconds since 1970."""
    return record.created + (-1 if record.expired else DATASET_SECONDS)


def specs(entries: list[Spec]) -> pb.NamedTensorTypeList:
    """Names, types and shapes of tensors."""
    found = pb.NamedTensorTypeList()
    for name, dtype, shape, graph in entries:
        kind = pb.TensorType(shape=shape, dtype=api_utils.get_type_value_from_str(dtype))
        entry = found.types.add(name=name, tensor_type=kind)
        if graph is not None:
            entry.graph_name = graph
    return found


def job(store: Store, record: Job) -> pb.Job:
    """A job with all that it came to."""
    message = pb.Job(hub_version="stand-in")
    part = getattr(message, f"{record.kind}_job")
    setattr(part, f"{record.kind}_job_id", record.id)
    part.user.CopyFrom(user())
    part.job_state, part.name, part.options = record.state, record.name, record.options
    part.creation_time.FromSeconds(int(record.created))
    if record.ended:
        part.completion_time.FromSeconds(int(record.finished))
        kinds = {HUB_LOG: "hub.log", DEVICE_LOG: "device.log"}
        there = [kind for kind, name in kinds.items() if store.path("jobs", record.id, name).exists()]
        message.available_artifacts.extend(there)
    if record.reason:
        part.failure_reason = record.reason
    _put_subjects(store, record, part)
    if record.kind == "inference":
        part.is_profiling_on = record.profiling
        if record.state == DONE:
            part.execution_time = record.execution_us
    return message


def _put_subjects(store: Store, record: Job, part: Any) -> None:
    models = [model(store.models[ident]) for ident in record.models]
    if record.kind == "link":
        part.models.CopyFrom(pb.ModelList(models=models, total_query_count=len(models)))
    else:
        part.model.CopyFrom(models[0])
        part.tensor_type_list.CopyFrom(specs(record.specs))
    if record.device:
        part.device.CopyFrom(device(record.device))
    if record.kind == "compile":
        part.devices.CopyFrom(pb.DeviceList(devices=[device(record.device)], total_query_count=1))
        part.target_tensor_type_list.CopyFrom(specs(store.models[record.target].inputs))
    if record.kind == "quantize":
        part.weights_dtype, part.activations_dtype = record.weights, record.activations
    if record.dataset:
        field = part.dataset if record.kind == "inference" else part.calibration_dataset
        field.CopyFrom(dataset(store.datasets[record.dataset]))
    if record.target:
        part.target_model.CopyFrom(model(store.models[record.target]))


def summary(record: Job) -> pb.JobSummary:
    """What the list of jobs shows of one."""
    message = pb.JobSummary()
    part = getattr(message, f"{record.kind}_job_summary")
    part.job_id, part.name, part.job_state = record.id, record.name, record.state
    part.user.CopyFrom(user())
    part.creation_time.FromSeconds(int(record.created))
    if record.kind != "quantize":
        part.device_name, part.device_os_version = record.device, os_version(hub_devices()[record.device])
    if record.kind == "inference":
        part.is_profiling_on = record.profiling
        if record.state == DONE:
            part.execution_time = record.execution_us
    return message

"""Models, data sets and their files: uploads through pre-signed URLs in parts, as S3 takes them, and downloads."""

from __future__ import annotations

import hashlib
import re
import secrets

import aihub_messages as messages
from aihub_answer import Answer, Request, Service, created, find, message, page, url
from aihub_graphs import specs_of
from aihub_options import Refused
from aihub_store import Dataset, Model, Store
from qai_hub import public_api_pb2 as pb

PART_BYTES = 4 << 20  # small, so that tests upload in several parts
MODEL_BYTES = 10 << 30
SUFFIX = {
    pb.MODEL_TYPE_ONNX: ".onnx", pb.MODEL_TYPE_TFLITE: ".tflite", pb.MODEL_TYPE_QNN_CONTEXT_BINARY: ".bin",
    pb.MODEL_TYPE_QNN_DLC: ".dlc",
}  # fmt: skip


def new_model(service: Service, request: Request) -> Answer:
    """POST models: a model without a file yet."""
    sent = pb.Model.FromString(request.body)
    model = service.store.new_model(sent.name, sent.model_type, sent.is_directory)
    return created(model)


def model_urls(service: Service, request: Request, ident: str) -> Answer:
    """GET models/ID/multipart_upload: one URL a part."""
    model = find(service.store.models, ident, "Model ID")
    model.upload_bytes = int(request.first("file_size", "0"))
    if not 0 < model.upload_bytes <= MODEL_BYTES:
        raise Refused(f"A model of {model.upload_bytes} bytes cannot be uploaded.", 413)
    model.upload_id = secrets.token_hex(8)
    count = -(-model.upload_bytes // PART_BYTES)
    urls = [url(service, f"models/{ident}/{model.upload_id}.{number}") for number in range(count)]
    found = pb.FileMultipartUploadURL(urls=urls, upload_id=model.upload_id, max_part_size=PART_BYTES)
    return message(pb.FileUploadResponse(multipart_url=found))


def model_complete(service: Service, request: Request, ident: str) -> Answer:
    """POST models/ID/multipart_upload: put the parts together. Refuses parts that do not add up."""
    model = find(service.store.models, ident, "Model ID")
    sent = pb.FileMultipartUploadComplete.FromString(request.body)
    if model.uploaded and sent.upload_id == model.upload_id:
        return created(model)  # the client asks again when the first answer was lost
    count = -(-model.upload_bytes // PART_BYTES)
    paths = [service.store.path("models", ident, f"{model.upload_id}.{number}") for number in range(count)]
    if sent.upload_id != model.upload_id or not all(path.exists() for path in paths):
        raise Refused("The upload is not complete.")
    parts = [path.read_bytes() for path in paths]
    if [_etag(part) for part in parts] != list(sent.etags) or sum(map(len, parts)) != model.upload_bytes:
        raise Refused("The uploaded parts do not add up to the file.")
    store_model(service.store, model, b"".join(parts))
    for path in paths:
        path.unlink()
    return created(model)


def store_model(store: Store, model: Model, data: bytes) -> None:
    """Keep a model's file and what can be read off it."""
    store.path("models", model.id).write_bytes(data)
    model.bytes, model.sha256 = len(data), hashlib.sha256(data).hexdigest()
    if not model.inputs:
        model.inputs, model.outputs = specs_of(store, model)
    model.uploaded = True


def models(service: Service, request: Request) -> Answer:
    """GET models."""
    producer = request.first("producer")
    fits = [model for model in service.store.models.values() if producer in ("", model.producer)]
    found = [messages.model(model) for model in page(request, fits)]
    return message(pb.ModelList(models=found, total_query_count=len(fits)))


def model(service: Service, request: Request, ident: str) -> Answer:
    """GET models/ID."""
    return message(messages.model(find(service.store.models, ident, "Model ID")))


def model_download(service: Service, request: Request, ident: str) -> Answer:
    """GET models/ID/download."""
    model = find(service.store.models, ident, "Model ID")
    if not model.uploaded:
        raise Refused(f"Model ID {ident!r} has no file.", 404)
    stem = re.sub(r"[^\w.-]", "_", model.name).removesuffix(".zip").removesuffix(SUFFIX.get(model.type, ""))
    name = f"{stem}{SUFFIX.get(model.type, '.bin')}{'.zip' if model.directory else ''}"
    found = pb.FileDownloadURL(url=url(service, f"models/{ident}/file"), filename=name)
    return message(pb.FileDownloadResponse(url=found))


# Data sets.


def new_dataset(service: Service, request: Request) -> Answer:
    """POST datasets: a data set without a file yet."""
    sent = pb.Dataset.FromString(request.body)
    return created(service.store.new_dataset(sent.name, sent.permanent))


def dataset_url(service: Service, request: Request, ident: str) -> Answer:
    """GET datasets/ID/upload_url: where to send the form."""
    find(service.store.datasets, ident, "Dataset ID")
    found = pb.FileUploadURL(url=url(service, f"datasets/{ident}/new"), file_field_name="file", fields={"key": ident})
    return message(pb.FileUploadResponse(url=found))


def dataset_complete(service: Service, request: Request, ident: str) -> Answer:
    """PATCH datasets/ID: the upload is done."""
    dataset = find(service.store.datasets, ident, "Dataset ID")
    new = service.store.path("datasets", ident, "new")
    if not dataset.uploaded:
        if not new.exists():
            raise Refused("The upload is not complete.")
        store_dataset(service.store, dataset, new.read_bytes())
        new.unlink()
    return created(dataset)


def store_dataset(store: Store, dataset: Dataset, data: bytes) -> None:
    """Keep a data set's .h5 file."""
    store.path("datasets", dataset.id).write_bytes(data)
    dataset.bytes, dataset.sha256, dataset.uploaded = len(data), hashlib.sha256(data).hexdigest(), True


def datasets(service: Service, request: Request) -> Answer:
    """GET datasets."""
    records = list(service.store.datasets.values())
    found = [messages.dataset(dataset) for dataset in page(request, records)]
    return message(pb.DatasetList(datasets=found, total_query_count=len(records)))


def dataset(service: Service, request: Request, ident: str) -> Answer:
    """GET datasets/ID."""
    return message(messages.dataset(find(service.store.datasets, ident, "Dataset ID")))


def dataset_download(service: Service, request: Request, ident: str) -> Answer:
    """GET datasets/ID/download_data."""
    dataset = find(service.store.datasets, ident, "Dataset ID")
    if not dataset.uploaded:
        raise Refused(f"Dataset ID {ident!r} has no file.", 404)
    found = pb.FileDownloadURL(url=url(service, f"datasets/{ident}/file"), filename=f"dataset-{ident}.h5")
    # download_dataset_info, and a data set downloaded again into a folder, ask for the bare URL.
    bare = "supports_s3_credentials" not in request.query
    return message(found if bare else pb.FileDownloadResponse(url=found))


# Storage.


def storage(service: Service, request: Request) -> Answer:
    """What the pre-signed URLs lead to."""
    found = re.fullmatch(r"/storage/(models|datasets|jobs)/(\w+)/([\w.]+)", request.path)
    if request.first("signature") != service.store.signature:
        return storage_error(403, "AccessDenied", "Request has expired")
    if not found:
        return storage_error(404, "NoSuchKey", "The specified key does not exist.")
    path = service.store.path(*found.groups())
    if request.method == "PUT":
        if len(request.body) > PART_BYTES:
            return storage_error(400, "EntityTooLarge", "Your proposed upload exceeds the maximum allowed size")
        path.write_bytes(request.body)
        return Answer(200, b"", "", {"ETag": _etag(request.body)})
    if request.method == "POST":
        path.write_bytes(_form_file(request))
        return Answer(204, b"", "")
    if not path.is_file():
        return storage_error(404, "NoSuchKey", "The specified key does not exist.")
    return Answer(200, path.read_bytes(), "application/octet-stream")


def storage_error(status: int, code: str, text: str) -> Answer:
    """An error as S3 writes it."""
    return Answer(status, f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode(), "application/xml")


def _etag(part: bytes) -> str:
    return f'"{hashlib.md5(part, usedforsecurity=False).hexdigest()}"'


def _form_file(request: Request) -> bytes:
    found = re.search(r'boundary="?([^";]+)', request.headers.get("content-type", ""))
    boundary = b"--" + (found[1].encode() if found else b"")
    for section in request.body.split(boundary):
        head, _, data = section.partition(b"\r\n\r\n")
        if b'name="file"' in head:
            return data.removesuffix(b"\r\n")
    raise Refused("The form has no file.")

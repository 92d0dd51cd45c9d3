"""The calls of AI Hub's protocol: one function a call, from a request to an answer, over the store.

Read off the client (qai_hub.public_rest_api): bodies and answers are protobuf messages, errors {"detail": ...}; files
travel through pre-signed URLs, whose errors are S3's XML.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import aihub_files as files
import aihub_job_calls as jobs
import aihub_messages as messages
from aihub_answer import Answer, Request, Service, error_answer, message
from aihub_options import Refused, find_devices
from google.protobuf.message import DecodeError
from qai_hub import public_api_pb2 as pb


def answer(service: Service, request: Request) -> Answer:
    """Answer a request."""
    try:
        if request.path.startswith("/storage/"):
            return files.storage(service, request)
        if request.headers.get("authorization") != f"token {service.store.token}":
            raise Refused("Invalid token.", 401)
        for method, pattern, call in CALLS:
            found = re.fullmatch(pattern, request.path)
            if found and method == request.method:
                return call(service, request, *found.groups())
        raise Refused("Not found.", 404)
    except DecodeError as error:
        return error_answer(400, f"Malformed request: {error}")
    except Refused as error:
        return error_answer(error.status, str(error))


def _user(service: Service, request: Request) -> Answer:
    return message(messages.user())


def _devices(service: Service, request: Request) -> Answer:
    wanted = [text for text in request.query.get("attributes", []) if text]
    found = find_devices(request.first("name"), request.first("os"), wanted, request.first("select") == "True")
    devices = [messages.device(device.aihub) for device in found]
    return message(pb.DeviceList(devices=devices, total_query_count=len(devices)))


def _frameworks(service: Service, request: Request) -> Answer:
    qairt = pb.Framework(name="QAIRT", api_version="2.51", api_tags=["default", "latest"], full_version="2.51.0")
    return message(pb.FrameworkList(frameworks=[qairt], total_query_count=1))


_ID = r"/([\w-]+)"
CALLS: tuple[tuple[str, str, Callable[..., Answer]], ...] = (
    ("GET", "/api/v1/users/auth/user/", _user),
    ("GET", "/api/v1/devices/", _devices),
    ("GET", "/api/v1/frameworks/", _frameworks),
    ("POST", "/api/v1/models/", files.new_model),
    ("GET", "/api/v1/models/", files.models),
    ("GET", f"/api/v1/models{_ID}/", files.model),
    ("GET", f"/api/v1/models{_ID}/multipart_upload/", files.model_urls),
    ("POST", f"/api/v1/models{_ID}/multipart_upload/", files.model_complete),
    ("GET", f"/api/v1/models{_ID}/download/", files.model_download),
    ("POST", "/api/v1/datasets/", files.new_dataset),
    ("GET", "/api/v1/datasets/", files.datasets),
    ("GET", f"/api/v1/datasets{_ID}/", files.dataset),
    ("PATCH", f"/api/v1/datasets{_ID}/", files.dataset_complete),
    ("GET", f"/api/v1/datasets{_ID}/upload_url/", files.dataset_url),
    ("GET", f"/api/v1/datasets{_ID}/download_data/", files.dataset_download),
    ("POST", "/api/v1/jobs/", jobs.new_job),
    ("GET", "/api/v1/jobs/", jobs.jobs),
    ("GET", f"/api/v1/jobs{_ID}/", jobs.job),
    ("PATCH", f"/api/v1/jobs{_ID}/", jobs.rename_job),
    ("GET", f"/api/v1/jobs{_ID}/result/", jobs.result),
    ("GET", f"/api/v1/jobs{_ID}/device_runs/\\w+/artifact_list/(\\d+)/", jobs.artifacts),
    ("GET", f"/api/v1/jobs{_ID}/download_compiled_model/", jobs.compiled),
    ("GET", "/api/v1/job_summaries/", jobs.summaries),
)

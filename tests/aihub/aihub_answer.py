"""Requests and answers of the stand-in for AI Hub, and what its calls share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aihub_messages as messages
from aihub_options import Refused
from aihub_store import Dataset, Job, Model, Store
from qai_hub import public_api_pb2 as pb

PROTOBUF = "application/x-protobuf"


@dataclass
class Request:
    """What a client sent."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    def first(self, name: str, default: str = "") -> str:
        """A parameter's first value."""
        return self.query.get(name, [default])[0]


@dataclass
class Answer:
    """What goes back."""

    status: int = 200
    body: bytes = b""
    type: str = PROTOBUF
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Service:
    """What calls need beside the request."""

    store: Store
    storage_url: str
    """Where pre-signed URLs point, without a trailing slash."""
    accept: Callable[[Job], None]
    """Run a job that was accepted."""


def error_answer(status: int, detail: str) -> Answer:
    """An error as the service's own web framework writes it."""
    return Answer(status, json.dumps({"detail": detail}).encode(), "application/json")


def message(content: Any, status: int = 200) -> Answer:
    """An answer that is a protobuf message."""
    return Answer(status, content.SerializeToString())


def created(record: Model | Dataset | Job) -> Answer:
    """The answer to a call that made or changed something."""
    response = pb.CreateUpdateResponse(id=record.id)
    response.creation_time.FromSeconds(int(record.created))
    if isinstance(record, Dataset) and not record.permanent:
        response.expiration_time.FromSeconds(int(messages.expires(record)))
    return message(response, 201)


def find(records: dict[str, Any], ident: str, what: str, status: int = 404) -> Any:
    """A record by id. Raises Refused for none, and where a 404 is due for one that expired."""
    if ident not in records or (status == 404 and getattr(records[ident], "expired", False)):
        raise Refused(f"{what} {ident!r} could not be found.", status)
    return records[ident]


def page(request: Request, records: list[Any]) -> list[Any]:
    """The part of a list that was asked for, newest first."""
    offset, limit = int(request.first("offset", "0")), int(request.first("limit", "50"))
    return records[::-1][offset : offset + limit]


def url(service: Service, path: str) -> str:
    """A pre-signed URL of a stored file."""
    return f"{service.storage_url}/storage/{path}?signature={service.store.signature}"

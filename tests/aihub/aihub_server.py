"""A stand-in for Qualcomm AI Hub on 127.0.0.1, for the real qai-hub client; all times that it tells are SYNTHETIC.

It speaks the client's protocol (aihub_calls.py), does real work behind it with Qualcomm's compiler and simulator, or
quick stand-ins for it (aihub_work.py), and breaks as a test tells it to (aihub_faults.py). What it knows stands in a
folder and outlives it. Where it differs from the service, see aihub_graphs.py; nothing of it was compared with the
service itself.

For clients in other processes, without a token: POST /test/arm {"kind": ..., "match": ..., ...}, POST /test/disarm,
POST /test/expire {"id": ...}, GET /test/log.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from aihub_answer import Answer, Request, Service, error_answer
from aihub_calls import answer
from aihub_faults import Faults
from aihub_files import storage_error
from aihub_jobs import Runner
from aihub_store import Dataset, Job, Model, Store


class HubServer:
    """The stand-in: a context manager that listens from start to end."""

    def __init__(
        self, folder: Path, *, job_seconds: float = 0.0, work: Literal["real", "fast"] = "real", port: int = 0
    ) -> None:
        """Keep the state in `folder`, with what is there. Jobs take `job_seconds` at least; port 0: a free one."""
        self.store = Store(folder)
        self.faults = Faults()
        self.log: list[tuple[str, str, int]] = []
        """Method, path and status of every request; status 0: the connection was reset."""
        self.port = port
        self.runner = Runner(self.store, job_seconds, work == "fast")
        self.http: ThreadingHTTPServer | None = None
        self.thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the service is, for api_url."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        """The secret that the server wants."""
        return self.store.token

    @property
    def models(self) -> dict[str, Model]:
        """Models by id, oldest first."""
        return self.store.models

    @property
    def datasets(self) -> dict[str, Dataset]:
        """Data sets by id, oldest first."""
        return self.store.datasets

    @property
    def jobs(self) -> dict[str, Job]:
        """Jobs by id, oldest first."""
        return self.store.jobs

    def write_ini(self, path: Path) -> Path:
        """Write the file that QAIHUB_CLIENT_INI names."""
        text = f"[api]\napi_url = {self.url}\nweb_url = {self.url}\napi_token = {self.token}\nverbose = False\n"
        path.write_text(text, "utf-8")
        return path

    def expire(self, ident: str) -> None:
        """Let a model or data set expire: a 404 when asked for, a 400 when a job wants it."""
        with self.store.lock:
            (self.models.get(ident) or self.datasets[ident]).expired = True
            self.store.save()

    def start(self) -> None:
        """Listen, and go on with unfinished jobs that no thread runs."""
        self.http = _Http(("127.0.0.1", self.port), _Handler)
        self.http.hub = self
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        if not self.runner.threads:
            self.runner.resume()

    def stop(self) -> None:
        """Stop listening; jobs go on."""
        if self.http and self.thread:
            self.http.shutdown()
            self.thread.join()
            self.http.server_close()
            self.http = None

    def restart(self) -> None:
        """Stop listening and listen again on the same port, with the state as it is on disk."""
        self.stop()
        self.start()

    def __enter__(self) -> HubServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.runner.close()

    def requests(self, method: str, pattern: str) -> int:
        """How many requests of that method fit the regular expression in whole."""
        return sum(entry[0] == method and bool(re.fullmatch(pattern, entry[1])) for entry in self.log)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: HubServer


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        text = f"{self.command} {url.path}"
        size = int(self.headers.get("Content-Length", 0))
        if hub.faults.take(text, "drop"):
            self.rfile.read(size // 2)
            self._reset(url.path)
            return
        body = self.rfile.read(size)
        if url.path.startswith("/test/"):
            self._send(_told(hub, url.path, body))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = parse_qs(url.query, keep_blank_values=True)
        fault = hub.faults.take(text, "status")
        if fault:
            reply = _failing(url.path, fault.value)
        else:
            reply = _answer(hub, Request(self.command, url.path, query, headers, body))
        if hub.faults.take(text, "drop_answer"):
            self._reset(url.path)
            return
        slow = hub.faults.take(text, "slow_answer")
        if slow:
            time.sleep(slow.value["seconds"])
        hub.log.append((self.command, url.path, reply.status))
        wrong = hub.faults.take(text, "content_type")
        reply.type = wrong.value["type"] if wrong else reply.type
        self._send(reply, text)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _send(self, reply: Answer, text: str = "") -> None:
        body, faults = reply.body, self.server.hub.faults
        half = body[: len(body) // 2]
        if text and faults.take(text, "shorten"):
            body = half
        cut = text and faults.take(text, "truncate")
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.type:
            self.send_header("Content-Type", reply.type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(half if cut else body)
        self.close_connection = True

    def _reset(self, path: str) -> None:
        self.server.hub.log.append((self.command, path, 0))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def _answer(hub: HubServer, request: Request) -> Answer:
    def accept(job: Job) -> None:
        job.faults = hub.faults.of_job(f"{job.kind} {job.name}")
        hub.store.save()
        hub.runner.start(job)

    # A name of its own for the storage, as the service's has: the client tells the two apart by their URLs.
    service = Service(hub.store, f"http://localhost:{hub.port}", accept)
    with hub.store.lock:
        reply = answer(service, request)
        if request.method != "GET" and not request.path.startswith("/storage/"):
            hub.store.save()
    return reply


def _failing(path: str, value: dict[str, object]) -> Answer:
    code = int(str(value["code"]))
    detail = str(value.get("detail", f"The stand-in was told to answer {code}."))
    reply = storage_error(code, "SlowDown", detail) if path.startswith("/storage/") else error_answer(code, detail)
    if "retry_after" in value:
        reply.headers["Retry-After"] = str(value["retry_after"])
    return reply


def _told(hub: HubServer, path: str, body: bytes) -> Answer:
    told = json.loads(body or b"{}")
    if path == "/test/arm":
        hub.faults.arm(**told)
    elif path == "/test/disarm":
        hub.faults.disarm(**told)
    elif path == "/test/expire":
        hub.expire(told["id"])
    return Answer(200, json.dumps({"log": hub.log, "struck": hub.faults.struck}).encode(), "application/json")


@contextmanager
def fast_retries() -> Iterator[None]:
    """Let the client of this process wait milliseconds between tries, and poll jobs often; how often it tries stays.

    The retries of one storage transfer keep their own pace, which the client fixes when it is imported.
    """
    from qai_hub.client import Job as ClientJob
    from qai_hub.util import session

    kept = session.BACKOFF_FACTOR, session.MAX_WAIT, ClientJob._polling_interval
    # A power of two: the client polls when the sum of its sleeps is a multiple, which 0.05 misses.
    session.BACKOFF_FACTOR, session.MAX_WAIT, ClientJob._polling_interval = 0.002, 0.01, 0.015625
    try:
        yield
    finally:
        session.BACKOFF_FACTOR, session.MAX_WAIT, ClientJob._polling_interval = kept

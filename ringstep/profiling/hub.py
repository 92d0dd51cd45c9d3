"""Qualcomm AI Hub's own client: quiet, its errors in one line each, its secrets kept out of them.

The token is read by the client alone, from the ini file that QAIHUB_CLIENT_INI names or ~/.qai_hub/client.ini.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ringstep.child import one_line
from ringstep.errors import RingstepError

LONGEST = 4000  # characters of a message that are looked at
RETRIED = (429, 500, 502, 503, 504)
CONFIGURE = "`qai-hub configure --api_token TOKEN` writes it, with the token from the account page of AI Hub"


class Unreachable(RingstepError):
    """The service did not answer, or asks to come back later: the same call may succeed soon."""


class Gone(RingstepError):
    """What was asked for is not there: deleted, expired, or another account's."""


_secrets: set[str] = set()


def require() -> None:
    """Raise RingstepError where the client is not installed."""
    if importlib.util.find_spec("qai_hub") is None:
        raise RingstepError("Qualcomm AI Hub's client is not installed: pip install 'ringstep[aihub]'")


def open_client() -> Any:
    """The client, configured as it configures itself. Raises RingstepError without it, or without a token."""
    require()
    with translated("AI Hub's configuration"):
        import qai_hub
        from qai_hub import api_utils

        path = api_utils.get_config_path(expanduser=False)
        try:
            config = api_utils.load_default_api_config()
        except FileNotFoundError:
            raise RingstepError(f"AI Hub's client has no configuration at {path}: {CONFIGURE}") from None
        except Exception as error:
            # A parser's message holds the line that it stopped at, and that may be the token.
            kind = type(error).__name__
            raise RingstepError(f"{path} is no configuration of AI Hub's client ({kind}): {CONFIGURE}") from None
        if config.api_token:
            _secrets.add(config.api_token)
        if not config.api_token.isascii() or not config.api_url.startswith(("https://", "http://")):
            raise RingstepError(f"{path}: api_token or api_url is none: {CONFIGURE}")
        config.verbose = False
        return qai_hub.Client(config=config)


def origin(client: Any) -> Literal["aihub", "synthetic"]:
    """Where figures of this client's service come from: one on this machine has no phones, it is a stand-in."""
    import socket
    from ipaddress import ip_address
    from urllib.parse import urlsplit

    import psutil

    host = urlsplit(client.config.api_url).hostname or "localhost"
    own = {address.address.split("%")[0] for found in psutil.net_if_addrs().values() for address in found}
    try:
        names = {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return "aihub"
    here = lambda name: name in own or ip_address(name).is_loopback or ip_address(name).is_unspecified
    return "synthetic" if any(here(name.removeprefix("::ffff:")) for name in names) else "aihub"


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn what the client raises into RingstepErrors and keep what it prints off stdout; `what` opens the message.

    Raises Unreachable for a service that may answer later, Gone for a 404 or something expired.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except RingstepError:
        raise
    except Exception as error:
        raise _translate(what, error) from None


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[None]:
    """Within, temporary files of this process lie in `folder`, and all are gone afterwards.

    The client leaves some behind: the whole archive of every folder that it uploaded, for one.
    """
    before = tempfile.tempdir
    home = folder / f".aihub.tmp-{os.getpid()}"  # a form of name that opening the folder cleans up after a killed run
    home.mkdir()
    tempfile.tempdir = str(home)
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def single_attempt() -> Iterator[None]:
    """Within, the client sends a POST once.

    By itself it repeats one whose answer was lost, and the service then has two of what was made.
    """
    from qai_hub import public_rest_api as rest

    before = rest.retry_call_with_backoff
    rest.retry_call_with_backoff = lambda func: func()
    try:
        yield
    finally:
        rest.retry_call_with_backoff = before


def redacted(text: str) -> str:
    """The text in one line without tokens, the secrets in signed URLs, or the boxes that the client draws."""
    for secret in _secrets:
        text = text.replace(secret, "***")
    text = text[:LONGEST]
    text = re.sub(r"(?i)\b(token|bearer)\s+[\w.~+/-]{8,}=*", r"\1 ***", text)
    text = re.sub(r"(https?://[^\s?#'\"]+)\?[^\s'\"]*", r"\1", text)
    text = re.sub(r"//[^\s/@]+@", "//", text)
    return one_line(re.sub(r"[─━┌┐└┘┏┓┗┛═╔╗╚╝╭╮╰╯]+|[│┃║]|[-+|=]{4,}|(?<!\S)\|(?!\S)", " ", text))


def _translate(what: str, error: Exception) -> RingstepError:
    import requests

    status = _status(error)
    text = redacted(str(error)) or type(error).__name__
    if status == 401 or "Failed to authenticate" in text or "API token is missing" in text:
        return RingstepError(f"{what}: AI Hub does not accept the token, or there is none: {CONFIGURE}")
    if status in (404, 410) or re.search(r"\bexpired\b|could not be found", text):
        return Gone(f"{what}: {text}")
    networks = (requests.exceptions.RequestException, ConnectionError, TimeoutError)
    if status in RETRIED or isinstance(error, networks) or _is_internal(error, status):
        return Unreachable(f"{what}: {text}")
    return RingstepError(f"{what}: {text}")


def _is_internal(error: Exception, status: int | None) -> bool:
    from qai_hub.client import InternalError, RateLimitedError

    # Without a status the service was not reached, or its answer broke off.
    return isinstance(error, RateLimitedError) or (isinstance(error, InternalError) and (status or 500) >= 500)


def _status(error: BaseException | None) -> int | None:
    seen = 0
    while error is not None and seen < 8:
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            return status
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None

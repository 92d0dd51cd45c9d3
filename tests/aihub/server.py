"""The stand-in for AI Hub as a process: python tests/aihub/server.py FOLDER. Killed and started again, it goes on.

Prints its URL, and writes FOLDER/client.ini for QAIHUB_CLIENT_INI. Ended by SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from aihub_server import HubServer


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--job-seconds", type=float, default=0.0)
    parser.add_argument("--work", choices=("real", "fast"), default="real")
    given = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with HubServer(given.folder, job_seconds=given.job_seconds, work=given.work, port=given.port) as hub:
        hub.write_ini(given.folder / "client.ini")
        print(hub.url, flush=True)
        ended.wait()


if __name__ == "__main__":
    main()

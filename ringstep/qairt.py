"""Qualcomm's libraries for ExecuTorch's QNN backend: those of a pinned onnxruntime-qnn wheel, or a real SDK's.

ExecuTorch's wheel has the adaptor alone. Left to itself it downloads an SDK in the middle of a lowering, so nothing
of it is imported before a folder is found here; fetching happens in `ringstep fetch-qairt` and nowhere else.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ringstep.child import last_error
from ringstep.errors import RingstepError
from ringstep.hashing import cache_home

# The only release whose compiler ExecuTorch 1.5.1 gets along with: 2.3, 2.4, 2.6 and 2.7 are refused with "unknown
# custom config socModel 0". The libraries do not depend on Python, so one wheel serves all.
VERSION = "2.5.0"
WHEEL_SHA256 = "6a6a8db1e36584b4ac2e5ba356f4943b1916303b7f1fd44e27f4ca056f145dfe"
# The compiler and simulator, their parts, and the C++ runtime that they were built with.
LIBRARIES = r"onnxruntime_qnn/lib(QnnHtp|HtpPrepare|QnnSystem|QnnIr|QnnSaver)\.so|onnxruntime_qnn\.libs/lib.+"
FOLDER = "lib/x86_64-linux-clang"  # where an SDK keeps libraries for such hosts
COMPILER = "libQnnHtp.so"
FETCH = "ringstep fetch-qairt"
KNOWN_GOOD = "v2.49.40"  # what the pinned wheel holds
BUILD_ID = re.compile(rb"v\d+\.\d+\.\d+\.\d{6,}")
UNPACKED_LIMIT = 1 << 30  # bytes of one library


def require() -> Path:
    """The root of an SDK, QNN_SDK_ROOT or what was fetched. Raises RingstepError where there is neither."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise RingstepError("ExecuTorch's QNN backend lowers on Linux on x86-64 only")
    given = os.environ.get("QNN_SDK_ROOT")
    root = Path(given) if given else fetched()
    if not (root / FOLDER / COMPILER).is_file():
        raise RingstepError(
            f"QNN_SDK_ROOT: {root} holds no {FOLDER}/{COMPILER}; name an SDK's root, or unset it" if given else
            f"Qualcomm's libraries for ExecuTorch are not here: {FETCH} (90 MB by pip)"
        )  # fmt: skip
    if given and version(root) == "unknown":
        raise RingstepError(f"QNN_SDK_ROOT: {root / FOLDER / COMPILER} carries no version of QAIRT: damaged, or not "
                            "Qualcomm's; name an SDK's root, or unset it")  # fmt: skip
    return root.resolve()


def fetched() -> Path:
    """Where the libraries of the pinned wheel go."""
    return cache_home() / "qairt" / f"onnxruntime-qnn-{VERSION}"


def environment(root: Path) -> dict[str, str]:
    """Variables that a process needs from its start for ExecuTorch to load the libraries of this SDK."""
    paths = [str(root / FOLDER), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"QNN_SDK_ROOT": str(root), "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def fetch(wheel: Path | None = None) -> Path:
    """Put the libraries into the cache, with pip or from a wheel that is here already; returns the root.

    Safe beside others doing the same: a folder appears whole or not at all. Raises RingstepError where pip fails, the
    wheel is not the pinned one, or the cache cannot be written.
    """
    root = fetched()
    if (root / FOLDER / COMPILER).is_file():
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=".tmp-") as temporary:
            made = Path(temporary, "root")
            unpack(wheel or download(Path(temporary)), made / FOLDER)
            if not (root / FOLDER / COMPILER).is_file():  # without it a folder is of no use to anyone
                shutil.rmtree(root, ignore_errors=True)
            try:
                os.rename(made, root)
            except OSError:
                if not (root / FOLDER / COMPILER).is_file():
                    raise
    except OSError as error:
        raise RingstepError(f"{root}: {error.strerror or error}") from None
    return root


def download(folder: Path) -> Path:
    """The pinned wheel, by pip and its own settings. Raises RingstepError with pip's last error."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"onnxruntime-qnn=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_35_x86_64", "--require-hashes",
         "--requirement", str(wanted), "--dest", str(folder)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        cause = last_error(done.stderr) or done.stderr.strip()[-300:] or "no wheel came"
        raise RingstepError(f"pip cannot download onnxruntime-qnn {VERSION}: {cause}; with a wheel at hand: "
                            f"{FETCH} --wheel FILE")  # fmt: skip
    return found[0]


def unpack(wheel: Path, folder: Path) -> None:
    """The libraries of the pinned wheel, side by side in `folder`. Raises RingstepError for another file."""
    if not wheel.is_file():
        raise RingstepError(f"{wheel}: no such file")
    with wheel.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != WHEEL_SHA256:
            raise RingstepError(f"{wheel}: not the cp311 wheel of onnxruntime-qnn {VERSION} (its sha256 differs)")
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if re.fullmatch(LIBRARIES, entry.filename) and entry.file_size < UNPACKED_LIMIT:
                with archive.open(entry) as source, (folder / Path(entry.filename).name).open("wb") as target:
                    shutil.copyfileobj(source, target)


def version(root: Path) -> str:
    """The version that the libraries of an SDK carry, "unknown" without one."""
    with (root / FOLDER / COMPILER).open("rb") as stream:
        if not os.fstat(stream.fileno()).st_size:
            return "unknown"
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = BUILD_ID.search(data)
            return found[0].decode() if found else "unknown"


def explain(log: str) -> str:
    """The cause in a log of ExecuTorch's QNN backend, "" for none."""
    if "custom config socModel" in log:
        return (f"this ExecuTorch does not get along with QAIRT {version(require())}, only with {KNOWN_GOOD}: unset "
                f"QNN_SDK_ROOT, then {FETCH}")  # fmt: skip
    if "Shared weights buffer isn't supported" in log:
        return "a file with shared weights does not run on this machine"
    errors = re.findall(r"^.*\[ERROR\].*$", log, re.MULTILINE)
    return errors[0] if errors else last_error(log)

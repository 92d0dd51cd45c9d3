"""An export of real size under bad conditions: killed in every stage, a full disk, a limit of memory, two at once.

    python benchmarks/robust.py spark2_5-1.7b                               half an hour
    python benchmarks/robust.py spark2_5-1.7b --set num_hidden_layers=4     the same in little

killed     SIGKILL in the middle of each stage, then the same command again; in the end every file is byte for byte
           what an export that nobody disturbed wrote, and nothing temporary is left
disk       on a file system too small, and on one that gets full in the middle of each stage: one line that says so
           and nothing half-written; the same command ends well with room made (needs the right to mount, else left out)
memory     every process limited to 10 GB of address space (ulimit -v), mapped files included
two        the same export twice at once in one folder: one writes, the other says that it does
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_size
from make_checkpoint import CONFIGS, sizes_of
from measure import run, size_bytes

from ringstep import console

STEPS = ("fp16", "compile")  # the latter from the checkpoint on: calibrate, round and all
MEMORY_LIMIT_BYTES = 10 * 2**30
Command = list[str | Path]
Process = subprocess.Popen[bytes]
Disturb = Callable[[Process, str], None]
Row = tuple[str, bool, str]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--set", metavar="SIZE=N", nargs="*", default=[], help="sizes other than the model's")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    args = parser.parse_args()
    home = full_size.home_of(args.model, args.set).resolve()
    model = full_size.checkpoint(args.model, sizes_of(args.set), home)
    os.environ["XDG_CACHE_HOME"] = str(home / "robust-cache")
    todo = full_size.commands(model, home, full_size.CONTEXT)
    rows = []
    for step in args.steps:
        console.say(f"{step}, undisturbed")
        run(todo[step][1], home / "undisturbed.log")  # at once where full_size.py has left it
        for check in args.checks:
            for what, good, said in CHECKS[check](step, todo[step], home):
                rows.append((check, step, what, "yes" if good else "NO", said))
                console.say(" ".join(rows[-1]))
    shutil.rmtree(home / "robust", ignore_errors=True)
    console.table("", ["check", "step", "what", "held", ""], rows)
    sys.exit(any(row[3] == "NO" for row in rows))


def moved(command: Command, old: Path, new: Path) -> Command:
    """The command with another folder to write."""
    return [new if word == old else word for word in command]


def start(command: Command, log: Path, address_space: int = resource.RLIM_INFINITY) -> Process:
    """A command in a session of its own."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        return subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=stream,
                                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limit)  # fmt: skip


def last_line(log: Path) -> str:
    """What a command said in the end."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def outputs(folder: Path) -> dict[str, str]:
    """sha256 of every file of an artifact by its manifest, if it has got that far."""
    path = folder / "manifest.json"
    stages = json.loads(path.read_text())["stages"] if path.is_file() else {}
    return {name: one["sha256"] for stage in stages.values() for name, one in stage["outputs"].items()}


def left(folder: Path) -> list[str]:
    """What is temporary in a folder."""
    return [path.name for path in folder.glob("*") if ".tmp" in path.name]


def ended_well(what: str, process: subprocess.Popen[bytes], log: Path, new: Path, out: Path) -> Row:
    """Exit code 0, the undisturbed export's files, nothing temporary."""
    said = [last_line(log)] if process.wait() else []
    wrong = [*said, *sorted(dict(outputs(new).items() ^ outputs(out).items())), *left(new)]
    return what, not wrong, " ".join(wrong)


def anew(home: Path, folder: Path) -> Path:
    """An empty cache and no output folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(home / "robust-cache", ignore_errors=True)
    return folder


def in_every_stage(todo: tuple[Path, Command], new: Path, log: Path, disturb: Disturb) -> tuple[list[str], Process]:
    """Start the export until it ends; disturb it once in each stage that lasts, half-way by the undisturbed one's time.

    Returns the stages that were disturbed and the last process.
    """
    out, command = todo
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    seconds = {name: one["seconds"] for name, one in stages.items()}
    done: list[str] = []
    while True:
        process = start(moved(command, out, new), log)
        stage = wait_for_stage(process, new, seconds, done)
        if stage is None:
            return done, process
        done.append(stage)
        disturb(process, stage)


def wait_for_stage(process: Process, folder: Path, seconds: dict[str, float], done: list[str]) -> str | None:
    """Wait until a stage that was not yet disturbed is half through; None when the command ends first."""
    begun: dict[str, float] = {}
    while process.poll() is None:
        for path in folder.glob(".*.tmp-*") if folder.is_dir() else ():
            stage = path.name[1:].split(".tmp-")[0]
            since = time.monotonic() - begun.setdefault(stage, time.monotonic())
            if stage not in done and since > seconds.get(stage, 0) / 2:
                return stage
        time.sleep(0.002)
    return None


def killed(step: str, todo: tuple[Path, Command], home: Path) -> list[Row]:
    """SIGKILL to the whole process group."""
    new, log = anew(home, home / "robust" / step), home / "killed.log"

    def disturb(process: Process, stage: str) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stages, process = in_every_stage(todo, new, log, disturb)
    row = ended_well(f"killed in {', '.join(stages)}: the same files in the end", process, log, new, todo[0])
    shutil.rmtree(new)
    return [row]


def disk(step: str, todo: tuple[Path, Command], home: Path) -> list[Row]:
    """Export into a file system of half the size that is needed, then into one that gets full in every stage."""
    out, command = todo
    mount = home / "robust" / "small"  # its name is in what is said
    new, log, size = anew(home, mount / "artifact"), home / "disk.log", size_bytes(out)
    mount.mkdir(parents=True, exist_ok=True)
    mounted = lambda options: subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mount, "-o", options],
                                             capture_output=True).returncode == 0  # fmt: skip
    if not mounted(f"size={size // 2}"):
        return []
    rows: list[Row] = []

    def refused(what: str, process: Process) -> None:
        code, said = process.wait(), last_line(log)
        mounted(f"remount,size={3 * size}")
        if code:  # else it had written all
            clean = not left(new) and all((new / name).is_file() for name in outputs(new))
            rows.append((what, code == 2 and clean and "disk" in said, said.replace(str(home), "...")))

    def disturb(process: Process, stage: str) -> None:
        os.killpg(process.pid, signal.SIGSTOP)  # what it writes on meanwhile would be more than the new size
        for _ in range(500):
            if mounted(f"remount,size={shutil.disk_usage(mount).used}"):
                break
            time.sleep(0.01)  # a write under way ends first
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise SystemExit(f"{mount} cannot be made smaller")
        os.killpg(process.pid, signal.SIGCONT)
        refused(f"full in {stage}: the same", process)

    try:
        refused("too small: exit code 2, one line that says so, nothing half-written",
                start(moved(command, out, new), log))
        anew(home, new)
        _, process = in_every_stage(todo, new, log, disturb)
        return [*rows, ended_well("with room made the same files in the end", process, log, new, out)]
    finally:
        subprocess.run(["umount", mount], check=True)


def memory(step: str, todo: tuple[Path, Command], home: Path) -> list[Row]:
    """The whole export in processes that cannot have more than 10 GB."""
    out, command = todo
    new, log = anew(home, home / "robust" / "memory"), home / "memory.log"
    process = start(moved(command, out, new), log, MEMORY_LIMIT_BYTES)
    row = ended_well("in 10 GB of address space the same files", process, log, new, out)
    shutil.rmtree(new, ignore_errors=True)
    return [row]


def two(step: str, todo: tuple[Path, Command], home: Path) -> list[Row]:
    """Two exports at once in one folder."""
    out, command = todo
    if step != "fp16":
        return []
    new, log, second_log = anew(home, home / "robust" / "two"), home / "two.log", home / "two-second.log"
    first = start(moved(command, out, new), log)
    while not (new / "manifest.json").is_file() and first.poll() is None:
        time.sleep(0.05)
    second = start(moved(command, out, new), second_log)
    code, said = second.wait(), last_line(second_log)
    rows = [("the second one leaves with 2 and says why", code == 2 and "another export" in said,
             said.replace(str(home), "...")),
            ended_well("the first one is undisturbed", first, log, new, out)]  # fmt: skip
    shutil.rmtree(new, ignore_errors=True)
    return rows


CHECKS: dict[str, Any] = {"killed": killed, "disk": disk, "memory": memory, "two": two}


if __name__ == "__main__":
    main()

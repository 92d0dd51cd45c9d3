"""A model of real size through the whole line: wall time and peak memory of every step, each a fresh process.

    python benchmarks/full_size.py spark2_5-1.7b                                all steps, half an hour on two cores
    python benchmarks/full_size.py spark2_5-1.7b --set num_hidden_layers=4      the same for four layers
    python benchmarks/full_size.py spark2_5-1.7b --steps fp16 nearest

    checkpoint   made up, of the real size (make_checkpoint.py)
    copy         the checkpoint read and written once by cp: what the disk alone takes
    fp16         ringstep export to ONNX fp16, decode and a prefill chunk
    nearest      w4a16 rounded to nearest, calibrated on 512 tokens
    compile      the same artifact's context binaries for sm8750, parts of at most 1 GB
    blocks       every block on the simulator, one chunk
    gptq         w4a16 by GPTQ on 512 tokens
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from make_checkpoint import CONFIGS, config_of, sizes_of
from measure import BUILD, ROOT, machine, run, size_bytes

from ringstep import console

STEPS = ("fp16", "nearest", "compile", "blocks", "gptq")
CONTEXT, CHUNK, TOKENS = 4096, 32, 512
SCHEME = """description = "w4a16 by {rounding}: for budgets"
rotate = "auto"

[weights]
bits = 4
rounding = "{rounding}"

[head]
bits = 8

[embedding]
bits = 8

[activations]
bits = 16

[cache]
bits = 16
"""


def home_of(name: str, words: list[str]) -> Path:
    """Where all of a model is written; `words` are the sizes of the command line."""
    return BUILD / "full-size" / "-".join([name, *words])


def checkpoint(name: str, sizes: dict[str, int], home: Path) -> Path:
    """The made-up checkpoint, made on first use."""
    folder = home / "checkpoint"
    wanted, path = json.dumps(config_of(name, sizes), indent=1) + "\n", folder / "config.json"
    maker = ROOT / "benchmarks" / "make_checkpoint.py"
    if not path.is_file() or path.read_text() != wanted or path.stat().st_mtime < maker.stat().st_mtime:
        words = [f"{size}={number}" for size, number in sizes.items()]
        made = subprocess.run([sys.executable, maker, name, folder, "--set", *words], stdout=sys.stderr)
        if made.returncode:
            sys.exit(made.returncode)
    return folder


def commands(model: Path, home: Path, context: int) -> dict[str, tuple[Path, list[str | Path]]]:
    """For each step the folder it writes and its command."""
    ringstep = [Path(sys.executable).parent / "ringstep"]
    size = ["--context", str(context), "--chunk", str(CHUNK), "--no-parity"]
    quantised = ["--device", "galaxy-s25", "--calibration-tokens", str(TOKENS), *size]
    found: dict[str, tuple[Path, list[str | Path]]] = {}
    fp16 = home / "fp16"
    found["fp16"] = fp16, [*ringstep, "export", model, "--format", "onnx", "--precision", "fp16", *size, "--out", fp16]
    for rounding in ("nearest", "gptq"):
        scheme = home / f"w4-{rounding}.toml"
        scheme.parent.mkdir(parents=True, exist_ok=True)
        scheme.write_text(SCHEME.format(rounding=rounding))
        out = home / rounding
        found[rounding] = out, [*ringstep, "export", model, "--format", "onnx", "--scheme", scheme, *quantised,
                                "--out", out]  # fmt: skip
    nearest, again = found["nearest"]
    found["compile"] = nearest, ["qnn" if word == "onnx" else word for word in again]
    found["blocks"] = nearest, [*ringstep, "parity", nearest, "--blocks", "--engine", "qnn-sim"]
    return {step: found[step] for step in STEPS}


def stages(out: Path, before: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages that a step has run, with their seconds and peak memory, from the manifest."""
    path = out / "manifest.json"
    now = json.loads(path.read_text())["stages"] if path.is_file() else {}
    return [{"stage": name, "seconds": s["seconds"], "peak_rss_anon_bytes": s["peak_rss_anon_bytes"],
             "bytes": sum(o["bytes"] for o in s["outputs"].values())}
            for name, s in now.items() if s != before.get(name)]  # fmt: skip


def measure(name: str, sizes: dict[str, int], context: int, steps: list[str], home: Path) -> dict[str, Any]:
    """Run the steps in order; a step's folder is removed first, but for those that go on in another's."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / ".lock").open("w")  # held while this process lives: folders in there are removed
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{home} is being measured by another run; wait or name another --home")
    except OSError as error:
        sys.exit(f"{home} cannot be written: {error.strerror}")
    model = checkpoint(name, sizes, home)
    todo, rows = commands(model, home, context), []
    shutil.rmtree(home / "copy", ignore_errors=True)
    copied = run(["cp", "-r", "--reflink=never", model, home / "copy"], home / "copy.log")
    shutil.rmtree(home / "copy")
    for step in steps:
        out, command = todo[step]
        if step in ("fp16", "nearest", "gptq"):
            shutil.rmtree(out, ignore_errors=True)
        path = out / "manifest.json"
        before = json.loads(path.read_text())["stages"] if path.is_file() else {}
        # A cache of its own and empty: a calibration found there would cost nothing.
        shutil.rmtree(home / "cache", ignore_errors=True)
        took = run(["env", f"XDG_CACHE_HOME={home / 'cache'}", *command], home / f"{step}.log")
        rows.append({"step": step, **asdict(took), "disk_bytes": size_bytes(out), "stages": stages(out, before)})
        console.say(f"{step}: {console.human_seconds(took.seconds)}, {console.human_bytes(took.anon_bytes)} RssAnon")
    return {"model": name, "sizes": sizes, "context": context, "chunk": CHUNK,
            "checkpoint_bytes": size_bytes(model), "copy_seconds": copied.seconds, "steps": rows,
            "machine": machine()}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """The table, a row a stage."""
    rows = []
    for step in result["steps"]:
        rows.append((step["step"], console.human_seconds(step["seconds"]), console.human_seconds(step["cpu_seconds"]),
                     console.human_bytes(step["anon_bytes"]), console.human_bytes(step["max_rss_bytes"]),
                     console.human_bytes(step["disk_bytes"])))  # fmt: skip
        rows += [(f"  {s['stage']}", console.human_seconds(s["seconds"]), "",
                  console.human_bytes(s["peak_rss_anon_bytes"]), "", console.human_bytes(s["bytes"]))
                 for s in step["stages"]]  # fmt: skip
    size, copied = console.human_bytes(result["checkpoint_bytes"]), console.human_seconds(result["copy_seconds"])
    sizes = "".join(f", {name} {number}" for name, number in result["sizes"].items())
    console.line(f"{result['model']}{sizes}, context {result['context']}, {size}; cp takes {copied}")
    console.table("", ["step", "wall", "CPU", "RssAnon", "max RSS", "written"], rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--set", metavar="SIZE=N", nargs="*", default=[], help="sizes other than the model's")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens that the caches hold")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--home", type=Path, default=None, help="where all is written; default: build/full-size/MODEL")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    home = (args.home or home_of(args.model, args.set)).resolve()
    result = measure(args.model, sizes_of(args.set), args.context, args.steps, home)
    (home / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        console.print_json(result)
    else:
        show(result)


if __name__ == "__main__":
    main()

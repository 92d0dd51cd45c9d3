"""`--method`: a module of the recipe with fixed shapes, one .pte for each chunk size, and modules.json that lists them.

    recipes/fixed.py ─ torch.export ─▶ executorch/NAME_N.pte ─▶ run against the module in eager torch, float32
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exporters.executorch.stage import LIBRARIES
from exporters.stages import READERS, versions
from ringstep import child, console, qairt
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import read_text
from ringstep.manifest import Manifest, open_folder
from ringstep.stage import library_versions
from ringstep.tensor_file import parse_json

if TYPE_CHECKING:
    from exporters.job import Job
    from exporters.line import Line
    from recipes.plan import FixedModule

FILE = "modules.json"
LIMIT_SECONDS = 1800.0
LARGEST = 1 << 20  # tokens of a chunk, not included
SNR_DB = {"float32": 90.0, "float16": 35.0}  # what a .pte must have against eager torch, as of a step (thresholds.toml)


def parse(text: str) -> tuple[str, tuple[int, ...]]:
    """NAME or NAME=N,N as name and chunk sizes, () for none. Raises RingstepError."""
    name, _, sizes = text.partition("=")
    parts = sizes.split(",") if sizes else []
    if not name:
        raise RingstepError(f"--method {text!r}: names no module; it is NAME or NAME=N,N, such as head=1,32")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < LARGEST for part in parts):
        raise RingstepError(f"--method {text}: chunk sizes are numbers from 1 to {LARGEST - 1}, such as {name}=1,32")
    return name, tuple(dict.fromkeys(map(int, parts)))


def export_module(line: Line, method: str) -> Manifest:
    """Write a .pte for each chunk size and modules.json; returns the folder's manifest. Raises RingstepError."""
    from recipes.fixed import fixed_modules
    from ringstep.engines.executorch import require

    require()
    name, chunks = parse(method)
    chunks = chunks or line.chunks
    known = fixed_modules(line.plan)
    if name not in known:
        raise RingstepError(f"--method {name}: this model has {', '.join(known)}{did_you_mean(name, known)}")
    if line.scheme or line.precision not in ("fp32", "fp16"):
        raise RingstepError(f"--method: modules are exported in fp32 or fp16, not in {line.precision}")
    backend = line.job.lowered_to
    options = {"method": name, "chunks": list(chunks), "backend": backend, "precision": line.precision,
               "chip": line.device.chip.name if line.device and backend == "qnn" else None,
               "config": line.checkpoint.config, **dataclasses.asdict(line.options)}  # fmt: skip
    sources = versions("recipes", "exporters/executorch", *READERS, libraries=("torch", *LIBRARIES))
    with open_folder(line.job.out) as manifest:
        if manifest.stages.keys() - {"module"}:
            raise RingstepError(f"{line.job.out}: holds a whole model; give --method a folder of its own with --out")
        line.manifest = manifest
        manifest.model, manifest.checkpoint = line.job.model, {"sha256": line.checkpoint.fingerprint()}
        manifest.options = {"format": "executorch", "method": name, "device": line.device.id if line.device else None}
        manifest.versions = library_versions("ringstep", "torch", *LIBRARIES)
        line.stage("module", dict(manifest.checkpoint), options, sources,
                   lambda folder: build(line, known[name], name, chunks, folder))  # fmt: skip
        manifest.save()
        return manifest


def build(line: Line, fixed: FixedModule, name: str, chunks: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Lower, run and describe the programs of all chunk sizes."""
    import torch

    from recipes.fixed import build as module_of
    from ringstep.parity.metrics import snr_db

    (folder / "executorch").mkdir()
    files = {n: folder / f"executorch/{name}_{n}.pte" for n in chunks}
    env = None
    if line.job.lowered_to == "qnn":
        assert line.device is not None
        env = qairt.environment(qairt.require())
        what, soc = f"lowering for {line.device.chip.name} with ExecuTorch", line.device.chip.soc_model
    else:
        what, soc = "lowering for XNNPACK", None
    with console.progress(what):
        made = child.run(what, _lower, line.job, soc, name, files, timeout_s=LIMIT_SECONDS, explain=qairt.explain,
                         env=env)  # fmt: skip
    module = module_of(fixed, dataclasses.replace(line.options, dtype="float32", activations="native"), line.read)
    programs, limit = [], SNR_DB[line.dtype]
    for n, file in files.items():
        feeds = seeded(fixed.inputs(n), line.dtype)
        with torch.no_grad():
            want = module(*(torch.from_numpy(x.astype(np.float32)) for x in feeds.values()))
        wanted = [want] if isinstance(want, torch.Tensor) else list(want)
        have = child.run(f"{file.name} on ExecuTorch's runtime", _execute, file, list(feeds.values()),
                         timeout_s=LIMIT_SECONDS, explain=qairt.explain, env=env).value  # fmt: skip
        snr = {output: round(snr_db(w.numpy(), h), 1) for output, w, h in zip(fixed.outputs, wanted, have, strict=True)}
        programs.append({
            "chunk": n, "file": f"executorch/{file.name}", **made.value[n], "snr_db": snr,
            "inputs": [{"name": k, "shape": x.shape, "dtype": line.dtype} for k, x in feeds.items()],
            "outputs": [{"name": k, "shape": x.shape, "dtype": line.dtype}
                        for k, x in zip(fixed.outputs, have, strict=True)],
        })  # fmt: skip
    passed = all(db >= limit for program in programs for db in program["snr_db"].values())
    body = {"method": name, "model": line.checkpoint.label, "backend": line.job.lowered_to, "precision": line.precision,
            "chip": line.device.chip.name if line.device and soc else None, "simulated": soc is not None,
            "reference": "recipe, eager torch, float32", "limit_db": limit, "passed": passed,
            "programs": programs}  # fmt: skip
    (folder / FILE).write_text(json.dumps(body, indent=1) + "\n")
    return body | {"seconds": round(made.seconds, 1), "peak_bytes": made.peak_bytes}


def read_modules(folder: Path) -> dict[str, Any]:
    """modules.json of a folder. Raises RingstepError where it is not what build wrote."""
    path = folder / FILE
    try:
        body = parse_json(read_text(path).encode(), str(path))
        programs = [(p["file"], p["chunk"], p["methods"], p["bytes"], p["snr_db"]) for p in body["programs"]]
        _ = body["method"], body["reference"], body["simulated"], body["passed"], body["limit_db"], programs
    except (KeyError, TypeError) as error:
        raise RingstepError(f"{path}: not written by ringstep, or damaged ({error}); export again") from None
    return body


def seeded(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, np.ndarray]:
    """Normal numbers in the shapes of a module's inputs, the same each time."""
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


# What follows runs in a child.


def _lower(job: Job, soc: int | None, name: str, files: dict[int, Path]) -> dict[int, dict[str, Any]]:
    import torch
    from torch import nn

    from exporters.executorch.faster_fx import faster_fx
    from exporters.executorch.method import write_pte
    from exporters.line import Line
    from recipes.fixed import build, fixed_modules

    line = Line(job)
    fixed = fixed_modules(line.plan)[name]
    facts = {}
    for n, file in files.items():
        shapes = fixed.inputs(n)
        described = {"get_chunk": n, "forward_inputs": list(shapes), "forward_outputs": list(fixed.outputs)}
        module: nn.Module = build(fixed, line.options, line.read)
        zeros = tuple(torch.zeros(shape, dtype=getattr(torch, line.dtype)) for shape in shapes.values())
        if soc is None:
            from exporters.executorch.xnnpack import ForXnnpack, lower, replace_norms

            with torch.no_grad(), faster_fx(), ForXnnpack():
                replace_norms(module)
                program = torch.export.export(module, zeros)
            facts[n] = write_pte(lower({"forward": program}, described), file)
            continue
        from exporters.executorch.qnn import check_whole
        from exporters.executorch.qnn_lower import compiler_spec, to_backend, to_edge

        with torch.no_grad(), faster_fx():
            spec = compiler_spec(soc, share=False, fp16=True)
            edge = to_edge({"forward": torch.export.export(module, zeros)}, spec, {}, described)
            facts[n] = write_pte(to_backend(edge, spec), file)
        check_whole(facts[n]["methods"], file.name)
    return facts


def _execute(file: Path, inputs: list[np.ndarray]) -> list[np.ndarray]:
    import torch

    from ringstep.engines.executorch import load_program

    method = load_program(file).load_method("forward")
    return [np.array(x.numpy()) for x in method.execute([torch.from_numpy(x) for x in inputs])]

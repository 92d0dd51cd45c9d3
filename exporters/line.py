"""The line: the stages of an export in order, each skipped when nothing it depends on has changed.

    tokenizer, weights ─▶ onnx ─▶ sanitize ─▶ qnn (a stage for each graph and part) ─▶ contract (step.json) ─▶ parity
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from exporters.compiled import compile_stages
from exporters.executorch.stage import LIBRARIES, executorch_stage, refuse_too_large
from exporters.job import DEFAULT_CONTEXT, DTYPES, FORMATS, Job, find_scheme, find_target, refuse_quantised
from exporters.stages import READERS, flat, versions
from ringstep import console
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.contract import DTYPE_BYTES, StepSpec
from ringstep.devices import Device
from ringstep.errors import RingstepError
from ringstep.manifest import Manifest, StageRecord, open_folder
from ringstep.stage import intact, library_versions, remove_output, run_stage

if TYPE_CHECKING:
    import numpy as np

    from exporters.quantised import Quantised
    from recipes.plan import Options, Plan, Source


class Line:
    """One export: what the job comes down to for this checkpoint and device, and the stages that build it."""

    def __init__(self, job: Job, default_out: bool = False) -> None:
        """Check everything that can be checked without reading weights. Raises RingstepError.

        With `default_out` the folder is artifacts/MODEL-DEVICE-PRECISION.
        """
        self.job = job
        self.redone: list[str] = []
        self.scales: dict[str, np.ndarray] = {}  # what the stage `rescale` found
        precision, self.scheme = find_scheme(job)
        self.device: Device | None = find_target(job, precision, self.scheme)
        self.precision = precision
        self.dtype = "float32" if self.scheme else DTYPES.get(precision, "float32")
        # Accurate forms are for fp16's kernels; those of 16-bit integers are good (docs/htp-accuracy.md).
        accurate = self.scheme is None and (job.for_npu or precision == "fp16")
        self.activations = job.activations or ("accurate" if accurate else "native")
        if self.scheme and self.activations == "accurate":
            raise RingstepError("--activations accurate: these forms are for fp16; leave it out of a quantised export")
        self.checkpoint: Checkpoint = open_checkpoint(job.model, revision=job.revision)
        refuse_quantised(self.checkpoint)
        if default_out:
            plain = re.sub(r"[^\w.-]+", "-", self.checkpoint.label).lower()
            method = [job.method.partition("=")[0]] if job.method else []
            name = "-".join([plain, *method, *([self.device.id] if self.device else []), precision])
            self.job = dataclasses.replace(job, out=Path("artifacts") / name)
        limit = self.checkpoint.config.get("max_position_embeddings")
        longest = limit if type(limit) is int and limit > 0 else DEFAULT_CONTEXT
        self.context = job.context if job.context is not None else min(DEFAULT_CONTEXT, longest)
        if not 1 <= self.context <= longest:
            raise RingstepError(f"--context {self.context}: must lie in 1..{longest}, the model's own limit")
        if not 1 <= job.chunk <= self.context:
            raise RingstepError(f"--chunk {job.chunk}: must lie in 1..{self.context}, the context")
        self.chunks = (1,) if job.chunk == 1 else (1, job.chunk)

    @cached_property
    def options(self) -> Options:
        """The recipe's options."""
        from recipes.plan import Options

        return Options(
            dtype=cast(Any, self.dtype), activations=self.activations, gelu=self.job.gelu, layout=self.job.layout,
            embedding_inside=self.job.embedding == "inside", quantised=self.scheme is not None,
        )  # fmt: skip

    @cached_property
    def quantised(self) -> Quantised | None:
        """The stages of a quantised export; None for floats."""
        from exporters.quantised import Quantised

        return Quantised(self) if self.scheme else None

    @cached_property
    def weights(self) -> tuple[Plan, Callable[[Source], np.ndarray]]:
        """The recipe's plan, checked against the checkpoint's tensors, and a way to its parameters."""
        from recipes import plan_for

        plan = plan_for(self.checkpoint.config)
        for kind in self.job.layout:
            if kind not in (*plan.kinds, "*"):
                raise RingstepError(f"--layout {kind}=...: this model has layers of kind {', '.join(plan.kinds)}")
        self.checkpoint.check(plan.expected(), plan.optional)
        for warning in plan.warnings:
            console.warn(warning)
        if self.scheme is None or self.scheme.rotate == "none":
            return plan, self.read_original
        from quantize.folding.rotate import rotated

        try:
            return rotated(plan, self.read_original)
        except RingstepError as error:
            if self.scheme.rotate != "auto":
                raise
            console.warn(f"scheme {self.scheme.name}: not rotated: {error}")
            return plan, self.read_original

    def read_original(self, source: Source) -> np.ndarray:
        """A parameter of the checkpoint in float32."""
        from recipes.weights import read

        return read(self.checkpoint, source)

    @property
    def plan(self) -> Plan:
        """The recipe's plan; where the scheme rotates, with a head apart from the embedding."""
        return self.weights[0]

    @property
    def read(self) -> Callable[[Source], np.ndarray]:
        """A parameter of the plan in float32: the checkpoint's, or what rotating and rescaling have made of it."""
        if not self.scales:
            return self.weights[1]
        from quantize.folding.rescale import rescaled

        return rescaled(self.weights[1], self.scales)

    @property
    def rotates(self) -> bool:
        """Whether the plan's weights are rotated ones."""
        return self.weights[1] != self.read_original

    def pieces(self, source: Source) -> Iterator[np.ndarray]:
        """The parameter in float32, a few rows at a time; a layer's whole where the scheme rotates, or rescales it."""
        from quantize.folding.rescale import changes
        from recipes.weights import parts, pieces

        if not self.rotates and not changes(self.scales, source):
            return pieces(self.checkpoint, source)
        by_rows = source in (self.plan.embedding, self.plan.head)
        return (self.read(part) for part in (parts(source) if by_rows else [source]))

    @cached_property
    def spec(self) -> StepSpec:
        """The contract without files."""
        from recipes.step import step_spec

        eos = tuple(e for e in self.checkpoint.eos_ids() if e < self.plan.vocab)
        return step_spec(self.plan, self.options, model=self.checkpoint.label, context=self.context,
                         chunks=self.chunks, eos=eos)  # fmt: skip

    def run(self) -> Manifest:
        """Run the line; returns the manifest of the artifact folder."""
        # Importing torch and tracing make millions of objects that stay: collecting them costs a fifth of an export.
        gc.disable()
        try:
            return self.run_stages()
        finally:
            gc.enable()

    def run_stages(self) -> Manifest:
        """The stages in order."""
        if self.job.method is not None:
            from exporters.executorch.module import export_module

            return export_module(self, self.job.method)
        if not (self.job.out / "manifest.json").exists():
            _ = self.spec, self.quantised  # refuse what is bad before a folder is made for it
        if self.job.format == "executorch":
            refuse_too_large(self)
        with open_folder(self.job.out) as manifest:
            self.manifest = manifest
            manifest.model = self.job.model
            manifest.checkpoint = {"sha256": self.checkpoint.fingerprint()}
            before = manifest.options
            manifest.options = {
                "format": self.job.format, "device": self.device.id if self.device else None, "dtype": self.dtype,
                "context": self.context, "chunk": self.job.chunk, "activations": self.activations,
                "scheme": self.scheme.name if self.scheme else None,
            }  # fmt: skip
            # The same export but for its format, so that what the other command made may still hold.
            alike = self.quantised is not None and before == manifest.options | {"format": before.get("format")}
            if alike and self.job.formats is not None:
                manifest.options = before
            manifest.versions = library_versions(
                "ringstep", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-qnn", "transformers",
                *LIBRARIES)  # fmt: skip
            done = {"tokenizer": self.stage_tokenizer().hashes}
            if self.quantised:
                self.quantised.run(done)
            else:
                done["weights"] = self.stage_weights().hashes
                done["onnx"] = self.stage_onnx(done["weights"]).hashes
                done["sanitize"] = self.stage_sanitize(done).hashes
            if self.job.format == "qnn":
                for n in self.chunks:
                    done.update(compile_stages(self, n, done))
            if self.job.format == "executorch":
                done["executorch"] = executorch_stage(self, done).hashes
            if self.quantised is None or self.quantised.graphs:
                done["contract"] = self.stage_contract(done, alike)
            proved = flat(done) | {"checkpoint": manifest.checkpoint["sha256"]}
            if self.quantised:
                self.quantised.run_formats(done)
            current = self.drop_old(done, alike)
            gc.enable()
            proof = manifest.stages.get("parity")
            if self.job.parity:
                self.stage_parity(proved)
            elif proof and not (set(proof.inputs.values()) <= current and intact(manifest, proof)):
                del manifest.stages["parity"]  # it is about an earlier export, or not what was written
                (self.job.out / "parity.json").unlink(missing_ok=True)
            manifest.save()
            return manifest

    def stage(self, name: str, inputs: dict[str, str], options: dict[str, Any], versions: dict[str, str],
              build: Callable[[Path], dict[str, Any] | None], needs_bytes: int = 0) -> StageRecord:  # fmt: skip
        """Run one stage under a line of progress."""
        # With -v each stage gets a line of its own below.
        with contextlib.nullcontext() if console.settings.verbose else console.progress(name):
            record = run_stage(self.manifest, name, inputs=inputs, options=options, versions=versions, build=build,
                               needs_bytes=needs_bytes)  # fmt: skip
        if not record.skipped:
            self.redone.append(name)
        if console.settings.verbose:
            peak = console.human_bytes(record.peak_rss_anon_bytes)
            took = "up to date" if record.skipped else f"{console.human_seconds(record.seconds)}, peak RssAnon {peak}"
            console.say(f"{name}: {took}")
        return record

    def stage_tokenizer(self) -> StageRecord:
        """tokenizer/: what the artifact needs to speak text."""
        files = self.checkpoint.tokenizer_files

        def build(folder: Path) -> None:
            (folder / "tokenizer").mkdir()
            try:
                found = files()
            except RingstepError as error:
                console.warn(f"{error}; the artifact gets no tokenizer")
                found = {}
            for name, content in found.items():
                (folder / "tokenizer" / name).write_bytes(content)

        return self.stage("tokenizer", self.tokenizer_inputs(), {}, versions(*READERS), build)  # fmt: skip

    def tokenizer_inputs(self) -> dict[str, str]:
        """sha256 of the files the tokenizer comes from."""
        from ringstep.hashing import sha256_file

        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
                 "generation_config.json")  # fmt: skip
        folder = self.checkpoint.path
        found = {name: sha256_file(folder / name) for name in names if (folder / name).is_file()}
        return found | {"checkpoint": self.manifest.checkpoint["sha256"]}

    def stage_weights(self) -> StageRecord:
        """onnx/weights.bin, onnx/embedding.bin, onnx/index.json."""

        def build(folder: Path) -> dict[str, Any]:
            from exporters.weights import write_weights
            from recipes.weights import sources

            (folder / "onnx").mkdir()
            total = sum(_size(s.out_shape) for s in sources(self.plan)) * DTYPE_BYTES[self.dtype]
            with console.progress("writing weights", total) as tick:
                return {"bytes": write_weights(self.checkpoint, self.plan, self.dtype, folder / "onnx", tick)}

        return self.stage(
            "weights", {"checkpoint": self.manifest.checkpoint["sha256"]}, {"dtype": self.dtype},
            versions("recipes", "exporters/weights.py", *READERS), build, self.weight_bytes(),
        )  # fmt: skip

    def weight_bytes(self) -> int:
        """What the weights will take on disk, from the checkpoint's shapes; slightly too high when heads are tied."""
        return sum(_size(self.checkpoint.shape(n)) for n in self.checkpoint.names()) * DTYPE_BYTES[self.dtype]

    def stage_onnx(self, weights: dict[str, str]) -> StageRecord:
        """onnx/decode.traced.onnx, and prefill_N.traced.onnx for a chunk."""

        def build(folder: Path) -> dict[str, Any]:
            from exporters.onnx import export_graphs, traced_file
            from exporters.weights import load_index

            (folder / "onnx").mkdir()
            placed = load_index(self.job.out / "onnx")
            with console.progress("tracing and stamping"):
                files = export_graphs(self.plan, self.options, self.spec, placed, folder / "onnx", traced_file)
            return {"graphs": {str(n): path.name for n, path in files.items()}}

        # Where parameters lie is all a graph knows of the weights: other values in the same places change nothing.
        inputs = {"index": weights["onnx/index.json"]}
        options = {"context": self.context, "chunks": list(self.chunks), "config": self.checkpoint.config,
                   **dataclasses.asdict(self.options)}  # fmt: skip
        return self.stage("onnx", inputs, options, versions(
            "recipes", "exporters/onnx.py", "exporters/trace.py", "ringstep/contract.py",
            libraries=("torch", "onnxscript", "onnx-ir")), build)  # fmt: skip

    def stage_sanitize(self, done: dict[str, dict[str, str]]) -> StageRecord:
        """onnx/decode.onnx (and prefill_N.onnx) fit for the target, and sanitize.json: what was changed."""

        chip = self.device.chip.name if self.device else None
        target = "qnn-htp" if chip else "ort-mobile"
        precision = {"float16": "fp16", "float32": "fp32"}[self.dtype]
        # What layers share would cross the parts of a model that is cut by layers; native kernels were asked for.
        skip = ["common-subexpressions"] if self.weight_bytes() > self.job.part_bytes else []
        skip += [] if self.activations == "accurate" else ["accurate-*"]

        def build(folder: Path) -> dict[str, Any]:
            from exporters.onnx import graph_file, traced_file
            from sanitize.command import sanitize_file

            home, reports = self.job.out / "onnx", {}
            for n in self.chunks:
                with console.progress(f"sanitizing {graph_file(n)}"):
                    report = sanitize_file(
                        home / traced_file(n), folder / "onnx" / graph_file(n), target=target, chip=chip,
                        precision=precision, keep=home, skip=skip, refuse=self.job.format == "qnn",
                    )  # fmt: skip
                # No times and paths: a file that differs from run to run would redo what depends on it.
                reports[graph_file(n)] = {
                    "nodes_before": report["nodes_before"], "nodes_after": report["nodes_after"],
                    "changes": {p["name"]: p["changes"] for p in report["passes"] if p["changes"]},
                }  # fmt: skip
            (folder / "sanitize.json").write_text(json.dumps(reports, indent=1) + "\n")
            counts = {name: {p: len(changes) for p, changes in report["changes"].items()}
                      for name, report in reports.items()}  # fmt: skip
            return {"changes": counts}

        options = {"target": target, "chip": chip, "precision": precision, "skip": skip}
        # Passes look at values: two weights that are equal in one checkpoint are stored once, in the next they differ.
        inputs = {**done["onnx"], **done["weights"]}
        return self.stage("sanitize", inputs, options, versions("sanitize", libraries=("onnx", "onnx-ir")), build)

    def stage_contract(self, done: dict[str, dict[str, str]], alike: bool) -> dict[str, str]:
        """step.json: the contract with the files that now exist; returns its hash."""
        before = self.manifest.stages.get("contract")
        if self.job.formats is not None and alike and before and flat(done).items() <= before.inputs.items():
            return before.hashes  # an export's, which says all this and what was compiled

        def build(folder: Path) -> None:
            from exporters.step_file import write_step

            cuts = {name.removeprefix("cut-"): self.manifest.stages[name].facts["cut_after_layers"]
                    for name in done if name.startswith("cut-")}  # fmt: skip
            write_step(self, cuts, folder)

        options = {"format": self.job.format, "label": self.checkpoint.label,
                   "eos": self.checkpoint.eos_ids(), "device": self.device.id if self.device else None,
                   "sink_prefix": self.scheme.sink_prefix if self.scheme else None,
                   "scheme": self.scheme.name if self.scheme else None}  # fmt: skip
        return self.stage("contract", flat(done), options, versions(
            "ringstep/contract.py", "exporters/step_file.py", "ringstep/encoding.py"), build).hashes

    def drop_old(self, done: dict[str, dict[str, str]], alike: bool) -> set[str]:
        """Forget stages of an earlier export that this one does not have, their files being stale.

        Formats of quantised weights, what was sent to phones, and for `ringstep quantize` what an export made, stay
        while all they were made from is as it was. Returns the hashes of everything that holds.
        """
        adding = self.job.formats is not None
        current = {self.manifest.checkpoint["sha256"], *flat(done).values()}
        for name in [n for n in self.manifest.stages if n not in done and n != "parity"]:
            record = self.manifest.stages[name]
            wanted = name in FORMATS or name.startswith("profile-") or (alike and adding)
            if wanted and set(record.inputs.values()) <= current and intact(self.manifest, record):
                current.update(record.hashes.values())
                continue
            del self.manifest.stages[name]
            kept = {path for other in self.manifest.stages.values() for path in other.outputs}
            for path in record.outputs:
                if path not in kept:
                    remove_output(self.manifest, path)
        self.manifest.save()
        return current

    def stage_parity(self, proved: dict[str, str]) -> StageRecord:
        """parity.json: the proof, on ONNX Runtime over a text and, for QNN, on the simulator over an answer.

        `proved` is what it is about: every file, and the checkpoint whose config the reference reads.
        """

        def build(folder: Path) -> dict[str, Any]:
            from exporters.prove import proof_engines, prove

            reports = prove(self.job.out, self.checkpoint, proof_engines(self.job, self.scheme))
            (folder / "parity.json").write_text(json.dumps(reports, indent=1) + "\n")
            return {"passed": all(r["summary"]["passed"] for r in reports)}

        return self.stage("parity", proved, {"prompt": self.job.prompt}, versions(
            "ringstep/parity", "ringstep/parity/thresholds.toml", "ringstep/session.py", "ringstep/slots.py",
            "ringstep/engines", "exporters/prove.py", "exporters/window_gate.py", "exporters/own_weights.py",
            "exporters/artifact.py", "exporters/whole_text.py",
            libraries=("transformers", "onnxruntime", "onnxruntime-qnn", "executorch")), build)  # fmt: skip


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size

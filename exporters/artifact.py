"""An artifact folder as exported, and the checkpoint it was made from: what every later look at it begins with."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ringstep import console
from ringstep.contract import StepSpec, build
from ringstep.errors import RingstepError
from ringstep.files import refuse_pipes
from ringstep.manifest import FILE, Manifest, StageRecord, manifest_of

if TYPE_CHECKING:
    import numpy as np

    from recipes.plan import Options, Plan, Source
    from ringstep.checkpoint import Checkpoint

STAGES_PREFIX = "ringstep-stages-"


def is_rotated(stages: Mapping[str, StageRecord]) -> bool:
    """Whether the weights of an artifact, and with them the values in caches, are rotated ones."""
    calibrated = stages.get("calibrate")
    return bool(calibrated and calibrated.options.get("rotate"))


def remove_left() -> None:
    """Remove float weights, gigabytes of a large model, that killed runs of this user left in the temporary folder."""
    from ringstep.child import is_running

    for left in Path(tempfile.gettempdir()).glob(f"{STAGES_PREFIX}*-*"):
        pid = left.name.removeprefix(STAGES_PREFIX).split("-")[0]
        with contextlib.suppress(OSError):
            own = not left.is_symlink() and left.stat().st_uid == os.getuid()
            if own and pid.isdecimal() and not is_running(pid):
                shutil.rmtree(left, ignore_errors=True)


class Artifact:
    """An artifact folder and, where it is at hand, the checkpoint it was made from; close() frees what was made."""

    def __init__(self, folder: Path, checkpoint: Checkpoint | None) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.spec = StepSpec.load(folder)
        refuse_pipes(folder)
        self.manifest: Manifest = manifest_of(folder)
        # Of an artifact inside another, such as matmulnbits/, what the export made lies in the outer one.
        self.home = self.manifest.folder
        self.temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def rotated(self) -> bool:
        """Whether the weights, and with them the values in caches, are rotated ones."""
        return is_rotated(self.manifest.stages)

    @cached_property
    def options(self) -> Options:
        """How the export wrote the step down. Raises RingstepError."""
        from recipes.plan import Options

        record = self.manifest.stages.get("graphs") or self.manifest.stages.get("onnx")
        if record is None:
            raise RingstepError(f"{self.folder}: its manifest knows no stage that traced a graph; export it again")
        names = {field.name for field in dataclasses.fields(Options)}
        own = {name: value for name, value in record.options.items() if name in names}
        options: Options = build(Options, own, f"{self.home / FILE}: stages.{record.name}.options")
        return options

    @cached_property
    def weights(self) -> tuple[Plan, Callable[[Source], np.ndarray]]:
        """The plan of the artifact's float graphs and a way to their parameters, rotated and rescaled as they were."""
        plan, read = self.original
        if self.rotated:
            from quantize.folding.rotate import rotated

            plan, read = rotated(plan, read)
        if "rescale" in self.manifest.stages:
            from exporters.rescaled import RESCALE, load
            from quantize.folding.rescale import rescaled

            read = rescaled(read, load(self.home / RESCALE))
        return plan, read

    @cached_property
    def original(self) -> tuple[Plan, Callable[[Source], np.ndarray]]:
        """The recipe's plan and a way to the checkpoint's own parameters."""
        from recipes import plan_for
        from recipes.weights import read

        checkpoint = self.needed()
        return plan_for(checkpoint.config), lambda source: read(checkpoint, source)

    def needed(self) -> Checkpoint:
        """The checkpoint. Raises RingstepError without one."""
        if self.checkpoint is None:
            raise RingstepError(f"{self.folder}: this stage is made from the checkpoint, which is not at hand")
        return self.checkpoint

    def float_spec(self, plan: Plan, options: Options) -> StepSpec:
        """The contract of the float step: the artifact's layouts, context and chunks, no files."""
        from recipes.step import step_spec

        chunks = tuple(sorted(graph.n for graph in self.spec.graphs))
        return step_spec(plan, options, model=self.spec.model, context=self.spec.context, chunks=chunks,
                         eos=self.spec.eos)  # fmt: skip

    @cached_property
    def float_files(self) -> Path:
        """A temporary folder with the float weights of a quantised artifact, its traced and its float graphs."""
        from exporters.onnx import export_graphs, traced_file
        from exporters.quantised import float_file
        from exporters.weights import load_index, write_weights

        plan, read = self.weights
        remove_left()
        self.temporary = tempfile.TemporaryDirectory(prefix=f"{STAGES_PREFIX}{os.getpid()}-")
        home = Path(self.temporary.name)
        with console.progress("writing float weights and graphs"):
            write_weights(self.needed(), plan, "float32", home, read=lambda source: [read(source)])
            spec = self.float_spec(plan, self.options)
            export_graphs(plan, self.options, spec, load_index(home), home, traced_file)
            for graph in spec.graphs:
                shutil.copyfile(self.home / "onnx" / float_file(graph.n), home / float_file(graph.n))
        return home

    def close(self) -> None:
        """Remove the temporary folder."""
        if self.temporary:
            self.temporary.cleanup()
            self.temporary = None

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checkpoint_of(folder: Path, model: str | None) -> Checkpoint:
    """The checkpoint an artifact was made from. Raises RingstepError where it is not there, or is another one."""
    from ringstep.checkpoint import open_checkpoint
    from ringstep.manifest import manifest_of

    manifest = manifest_of(folder)
    try:
        checkpoint = open_checkpoint(model or manifest.model)
    except RingstepError as error:
        hint = "" if model else f"; {folder} was made from it: say where it is now with --model"
        raise RingstepError(f"{error}{hint}") from None
    if checkpoint.fingerprint() != manifest.checkpoint.get("sha256"):
        raise RingstepError(
            f"{model or manifest.model}: not the checkpoint of this artifact (its sha256 differs); give --model"
        )
    return checkpoint


def artifacts_in(folder: Path) -> Iterator[Path]:
    """The folder itself where it is an artifact, else those directly in it. Raises RingstepError for none."""
    if (folder / "step.json").exists() or not folder.is_dir():
        yield folder
        return
    found = sorted(path.parent for path in folder.glob("*/step.json"))
    if not found:
        raise RingstepError(f"{folder}/step.json: no such file; is this an artifact made by ringstep export?")
    yield from found

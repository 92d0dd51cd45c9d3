"""Proving an artifact: reference and engines side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from exporters.artifact import is_rotated
from exporters.job import Job
from ringstep import console
from ringstep.checkpoint import Checkpoint
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.manifest import manifest_of
from ringstep.parity import metrics
from ringstep.parity.report import Report, Truth, answer_parity, generate, teacher_forced
from ringstep.parity.windows import Mode
from ringstep.session import DecodeSession, is_simulated
from ringstep.text import Text

if TYPE_CHECKING:
    from quantize.scheme import Scheme

PROOF_TOKENS = 200
ANSWER_TOKENS = 16
SIMULATED_TOKENS = 48
QUANTISED_CALLS = 6


class Reference(Protocol):
    """What a proof asks of the original."""

    source: str

    def truth(self, ids: Sequence[int]) -> Truth:
        """Logits and caches after feeding `ids`."""

    def answer(self, prompt: Sequence[int], limit: int, eos: Sequence[int]) -> Truth:
        """The greedy answer to a prompt."""


class RecipeReference:
    """The recipe in eager torch, float32: for architectures that the installed transformers does not know.

    It checks the export, not the recipe, which the project's tests hold against an independent reference.
    """

    source = "recipe, eager torch, float32"

    def __init__(self, checkpoint: Checkpoint) -> None:
        from recipes import plan_for
        from recipes.plan import Options
        from recipes.step import DecodeStep
        from recipes.weights import read

        self.plan = plan_for(checkpoint.config)
        # Append everywhere keeps every entry for the comparison.
        self.options = Options(layout={"*": "append"}, embedding_inside=True)
        self.step = DecodeStep(self.plan, self.options, self.spec(1), lambda source: read(checkpoint, source))

    def spec(self, context: int) -> StepSpec:
        """The contract for a text of `context` tokens: caches no longer than it needs."""
        from recipes.step import step_spec

        return step_spec(self.plan, self.options, model="reference", context=context, chunks=(1,), eos=())

    def session(self, context: int) -> DecodeSession:
        """A session for a text of `context` tokens."""
        from ringstep.engines.torch_eager import TorchEngine

        self.step.spec = self.spec(context)
        return DecodeSession(self.step.spec, TorchEngine(self.step))

    def truth(self, ids: Sequence[int]) -> Truth:
        from exporters.whole_text import whole_text

        logits, caches = whole_text(self.step, np.array(ids))
        return Truth(self.source, list(ids), logits, caches)

    def answer(self, prompt: Sequence[int], limit: int, eos: Sequence[int]) -> Truth:
        have, _ = generate(self.session(len(prompt) + limit), prompt, limit, eos)
        ids = [*prompt, *have]
        return dataclasses.replace(self.truth(ids[:-1]), ids=ids)


def open_reference(checkpoint: Checkpoint) -> Reference:
    """transformers where it knows the architecture, else the recipe itself."""
    from ringstep.parity.reference import TransformersReference, has_reference

    with console.progress("loading the original in float32"):
        if has_reference(checkpoint):
            return TransformersReference(checkpoint)
        return RecipeReference(checkpoint)


def two_windows(spec: StepSpec) -> int:
    """Tokens past the second wrap of every window."""
    return 2 * max((c.window or 0 for c in spec.caches if (c.window or 0) < spec.context), default=0) + 8


def proof_tokens(spec: StepSpec, engine: str) -> int:
    """How long a text proves an engine: past the second wrap of every window, as far as a simulator's pace allows."""
    count = max(PROOF_TOKENS, two_windows(spec))
    if is_simulated(spec, engine) and spec.scheme:
        # A simulated call of a quantised graph takes seconds, one token or 32; the last token runs the decode graph.
        largest = max(graph.n for graph in spec.graphs)
        count = QUANTISED_CALLS if largest == 1 else largest * -(-SIMULATED_TOKENS // largest) + 1
    elif is_simulated(spec, engine):
        count = max(SIMULATED_TOKENS, min(two_windows(spec), PROOF_TOKENS))
    return min(spec.context, count)


def shipped_text() -> str:
    """The text that comes with ringstep."""
    return (Path(metrics.__file__).parent / "text.txt").read_text(encoding="utf-8")


def proof_ids(spec: StepSpec, folder: Path, count: int) -> list[int]:
    """`count` ids: of the shipped text where there is a tokenizer, else seeded random ones."""
    first = spec.prefix.ids if spec.prefix else ()
    try:
        ids = Text(folder).encode(shipped_text())
        if ids and max(ids) < spec.vocab:
            return [*first, *(ids * (count // len(ids) + 1))][:count]
    except RingstepError:
        pass
    return [*first, *(int(i) for i in np.random.default_rng(0).integers(0, spec.vocab, count))][:count]


def proof_engines(job: Job, scheme: Scheme | None) -> dict[str, str | None]:
    """What the proof of an export runs on, and what each answers; None: it reads a text."""
    if job.format == "executorch" and not scheme:
        # A float16 graph on a CPU says nothing about the NPU.
        return {"executorch": job.prompt} if job.for_npu else {"ort": None, "executorch": None}
    if scheme:
        # Quantised, the simulator takes seconds a token: ONNX Runtime answers, the simulator reads a text.
        simulated = {"qnn": "qnn-sim", "executorch": "executorch"}.get(job.format)
        return {"ort": job.prompt, **({simulated: None} if simulated else {})}
    return {"ort": None, "qnn-sim": job.prompt} if job.format == "qnn" else {"ort": None}


def prove(
    folder: Path,
    checkpoint: Checkpoint,
    engines: Mapping[str, str | None],
    *,
    tokens: int | None = None,
    threshold_db: float | None = None,
    windows: Mode | None = None,
) -> list[dict[str, Any]]:
    """Compare engines with the original; returns one plain report an engine.

    `engines` maps each engine to a prompt that it answers by itself, or to None for a text of `tokens` (default:
    200, or past the second wrap of the longest window; fewer on the simulator, which takes seconds a step). A
    prompt needs a tokenizer with a chat template, without which the text is taken. `windows` is how much of the
    window gate runs, None: the fast part, and nothing on the simulator.
    """
    from exporters.window_gate import window_gate

    spec = StepSpec.load(folder)
    reference = open_reference(checkpoint)
    reports = []
    for engine, prompt in engines.items():
        with DecodeSession.open(folder, engine) as session:
            label = "simulated: " if is_simulated(spec, engine) else ""
            chat = chat_ids(folder, spec, prompt)
            if chat:
                with console.progress("the original's answer"):
                    truth = reference.answer(chat, min(ANSWER_TOKENS, spec.context - len(chat)), spec.eos)
                truth = as_stored(truth, folder)
                with console.progress(f"{label}answering on {engine}", len(truth.ids) - 1) as tick:
                    report = answer_parity(session, truth, len(chat), spec.eos, threshold_db, tick)
            else:
                truth = reference.truth(proof_ids(spec, folder, tokens or proof_tokens(spec, engine)))
                truth = as_stored(truth, folder)
                with console.progress(f"{label}{len(truth.ids)} tokens on {engine}", len(truth.ids)) as tick:
                    report = teacher_forced(session, truth, threshold_db, tick)
            mode = windows or ("off" if is_simulated(spec, engine) else "fast")
            found = window_gate(session, folder, checkpoint, mode, reference, None if spec.scheme else threshold_db)
        reports.append(plain(report, folder, prompt if chat else None))
        reports[-1]["windows"] = found
        if found and not found["passed"]:
            summary = reports[-1]["summary"]
            summary |= {"passed": False, "failures": [*summary["failures"], *found["failures"]]}
    return reports


def as_stored(truth: Truth, folder: Path) -> Truth:
    """The original's entries as the artifact's caches hold them: rotated values where its weights were rotated."""
    try:
        stages = manifest_of(folder).stages
    except RingstepError:  # an artifact without its manifest; nothing is known of it
        return truth
    if not is_rotated(stages):
        return truth
    from quantize.folding.rotate import HEAD_SEED, rotation

    caches = []
    for positions, keys, values in truth.caches:
        turn = rotation(values.shape[-1], HEAD_SEED)
        caches.append((positions, keys, turn.after(values.reshape(-1, values.shape[-1])).reshape(values.shape)))
    return dataclasses.replace(truth, caches=caches)


def chat_ids(folder: Path, spec: StepSpec, prompt: str | None) -> list[int] | None:
    """The prompt's ids through the chat template; None without a prompt, a template, or room in the context."""
    if not prompt:
        return None
    try:
        text = Text(folder)
    except RingstepError:
        return None
    ids = text.chat(prompt)
    first = spec.prefix.ids if spec.prefix else ()
    if tuple(ids[: len(first)]) != first:
        ids = [*first, *ids]
    return ids if text.template and 0 < len(ids) < spec.context and max(ids) < spec.vocab else None


def plain(report: Report, folder: Path, prompt: str | None) -> dict[str, Any]:
    """A report as JSON values, the answer's ids decoded."""
    if report.answer:
        text = Text(folder)
        report.answer |= {
            "prompt": prompt,
            "reference_text": text.decode(report.answer["reference_ids"]),
            "text": text.decode(report.answer["ids"]),
        }
    body = dataclasses.asdict(report)
    return {"summary": report.summary(), "positions": body["positions"], "caches": body["caches"],
            "answer": report.answer}  # fmt: skip


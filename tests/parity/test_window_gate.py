"""The window gate: places it tries, nothing found in ten clean models, and every planted fault."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import planted_faults as planted
import pytest
import torch

from exporters.line import Job, Line
from exporters.own_weights import OwnWeights
from exporters.prove import RecipeReference, open_reference
from exporters.tiny import CHUNK, CONTEXT, MODELS, tiny_ids, write_tiny
from recipes import plan_for
from recipes.plan import Options
from recipes.step import DecodeStep, step_spec
from recipes.weights import read
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import GraphSpec, StepSpec, io_tensors
from ringstep.engines.torch_eager import TorchEngine
from ringstep.errors import RingstepError
from ringstep.parity.report import Truth
from ringstep.parity.windows import Mode, feedings, judge
from ringstep.session import DecodeSession

torch.set_num_threads(1)  # tensors this small only lose by a second thread
WINDOWED = [name for name, config in MODELS.items() if "sliding_window" in config]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, written when first asked for."""
    folder = tmp_path_factory.mktemp("tiny")
    places: dict[str, Path] = {}

    def at(name: str) -> Path:
        if name not in places:
            places[name] = write_tiny(folder / name, name)
        return places[name]

    return at


def made(folder: Path, chunks: tuple[int, ...] = (1, CHUNK), **options: Any) -> DecodeSession:
    """A session of a checkpoint in eager torch, laid out as an export is."""
    checkpoint = open_checkpoint(str(folder))
    plan, own = plan_for(checkpoint.config), Options(embedding_inside=True, **options)
    spec = step_spec(plan, own, model="tiny", context=CONTEXT, chunks=chunks, eos=())
    return DecodeSession(spec, TorchEngine(DecodeStep(plan, own, spec, lambda source: read(checkpoint, source))))


def truth_of(folder: Path) -> Truth:
    checkpoint = open_checkpoint(str(folder))
    return RecipeReference(checkpoint).truth(tiny_ids(checkpoint.config["vocab_size"], CONTEXT))


def failures(session: DecodeSession, truth: Truth, mode: Mode, windows: tuple[int, ...] = ()) -> list[str]:
    found = judge(session, truth, feedings(session.spec, mode, windows))
    assert found
    return [f"{j.feeding}: {text}" for j in found for text in j.failures]


def test_places_that_are_tried(models: Callable[[str], Path]) -> None:
    """Window 8, rings of 7, chunks of 8, context 64: every place that a fault was ever seen at."""
    session = made(models("gemma3"))
    full, fast = feedings(session.spec, "full"), feedings(session.spec, "fast")
    single = {f.lead + i for f in full if set(f.calls) == {1} for i in range(len(f.calls))}
    assert {7, 8, 9} <= single  # W-1, W, W+1
    assert {6, 7, 13, 14, 15, 20, 21, 22} <= single  # first, second and third wrap of 7 slots
    assert {61, 62, 63} <= single  # the context's end
    begun = {f.lead for f in full if f.calls[:1] == (8,)}
    assert set(range(1, 8)) <= begun and {14 - i for i in range(1, 8)} <= begun  # over the edge at every place
    assert any(f.lead == 56 and f.calls == (8,) for f in full)  # the last chunk ends with the context
    assert any(f.calls[0] > 8 and f.lead % 7 for f in full) and any(f.calls == (64,) for f in full)
    assert any(1 < f.calls[0] < 8 and len(f.calls) > 1 for f in full)  # padded, then on
    assert 3 <= len(fast) <= 5 and all(f.end <= 24 for f in fast)
    assert all(f.lead >= 0 and f.end <= 64 and min(f.calls) > 0 for f in (*full, *fast))
    assert len({(f.lead, f.calls) for f in full}) == len(full)


def test_without_windows() -> None:
    assert feedings(spec_of("llama"), "fast") == [] and feedings(spec_of("llama"), "off") == []
    assert {f.case for f in feedings(spec_of("llama"), "full")} == {"whole", "full", "full, padded"}
    assert feedings(spec_of("llama"), "fast", [8])  # the original is said to have one


def spec_of(name: str, context: int = CONTEXT) -> StepSpec:
    return step_spec(plan_for(MODELS[name]), Options(), model="", context=context, chunks=(1, CHUNK), eos=())


@pytest.mark.parametrize("context", [2, 8, 9, 10, 17])
def test_short_contexts(context: int) -> None:
    for name in WINDOWED:
        spec = step_spec(plan_for(MODELS[name]), Options(), model="", context=context, chunks=(1, 2), eos=())
        for mode in ("fast", "full"):
            assert all(f.end <= context and f.lead >= 0 for f in feedings(spec, mode))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_clean_models(name: str, models: Callable[[str], Path]) -> None:
    """Against transformers where it has the architecture: ten models, nothing is found."""
    checkpoint = open_checkpoint(str(models(name)))
    truth = open_reference(checkpoint).truth(tiny_ids(checkpoint.config["vocab_size"], CONTEXT))
    assert failures(made(models(name)), truth, "full") == []


@pytest.mark.parametrize("layout", ["roll", "append"])
def test_clean_layouts(layout: str, models: Callable[[str], Path]) -> None:
    folder = models("gemma3")
    assert failures(made(folder, layout={"*": layout}), truth_of(folder), "full") == []


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "fast") for name in WINDOWED), ("gemma3", "full"), ("spark2_5", "full")]
)
@pytest.mark.parametrize("fault", planted.HOST)
def test_faults_of_the_host(name: str, fault: str, mode: Mode, models: Callable[[str], Path]) -> None:
    folder = models(name)
    session, truth = made(folder), truth_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        planted.HOST[fault](patch)
        assert failures(session, truth, mode), fault
    assert failures(session, truth, mode) == []  # it was the fault, and it left nothing behind


@pytest.mark.parametrize("mode", ["fast", "full"])
@pytest.mark.parametrize(
    ("name", "fault"),
    [("spark2_5", "gate after the output projection"), ("spark2_5-silu", "gate after the output projection"),
     *((name, "heads grouped in the wrong order") for name in WINDOWED if name != "gemma3-w5")],
)  # fmt: skip
def test_faults_of_the_recipe(name: str, fault: str, mode: Mode, models: Callable[[str], Path]) -> None:
    folder = models(name)
    truth = truth_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        planted.RECIPE[fault](patch)
        assert failures(made(folder), truth, mode)
    assert failures(made(folder), truth, mode) == []


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_the_recipe_dropped(name: str, models: Callable[[str], Path]) -> None:
    """Every layer is a full one: the artifact knows of no window, config.json does."""
    folder = models(name)
    checkpoint, truth = open_checkpoint(str(folder)), truth_of(folder)
    plan, own = plan_for(checkpoint.config), Options(embedding_inside=True)
    plan = dataclasses.replace(plan, kinds={n: dataclasses.replace(k, window=None) for n, k in plan.kinds.items()})
    spec = step_spec(plan, own, model="tiny", context=CONTEXT, chunks=(1, CHUNK), eos=())
    session = DecodeSession(spec, TorchEngine(DecodeStep(plan, own, spec, lambda s: read(checkpoint, s))))
    assert failures(session, truth, "fast", (MODELS[name]["sliding_window"],))


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_rings_of_length_w_in_memory(mode: Mode, models: Callable[[str], Path]) -> None:
    """Unseen by the contract: rings one entry longer, and masks that hide only what was never written."""
    folder = models("gemma3")
    session = made(folder)
    longer = lambda part: dataclasses.replace(part, length=part.length + 1) if part.kind == "ring" else part
    spec = session.spec
    masks, caches = tuple(map(longer, spec.masks)), tuple(map(longer, spec.caches))
    graphs = tuple(GraphSpec(g.n, *io_tensors(g.n, spec.vocab, spec.hidden, "float32", spec.rotary, masks, caches,
                                              True)) for g in spec.graphs)  # fmt: skip
    wrong = dataclasses.replace(spec, masks=masks, caches=caches, graphs=graphs)
    session.engine.step.spec = wrong  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        planted.mask_too_wide(patch)
        assert failures(DecodeSession(wrong, session.engine), truth_of(folder), mode)


@pytest.fixture(scope="module")
def artifact(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A quantised gemma3 with a prefill graph."""
    out = tmp_path_factory.mktemp("w8") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(out.parent / "cache"))
        Line(Job(model=str(models("gemma3")), out=out, format="onnx", precision="w8a16", context=CONTEXT, chunk=CHUNK,
                 calibration_tokens=320, parity=False)).run()  # fmt: skip
        yield out


@pytest.fixture
def out(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "out"))


def quantised_truth(out: Path, model: Path) -> Truth:
    ids = tiny_ids(StepSpec.load(out).vocab, CONTEXT)
    return OwnWeights(out, open_checkpoint(str(model))).truth(ids)


def test_encodings_that_differ(out: Path, models: Callable[[str], Path]) -> None:
    """In step.json: refused. In the graphs alone: seen in the caches."""
    truth = quantised_truth(out, models("gemma3"))
    with DecodeSession.open(out, threads=1) as session:
        assert failures(session, truth, "full") == []
    planted.graph_encodings_differ(out)
    with DecodeSession.open(out, threads=1) as session:
        assert any("cache" in line for line in failures(session, truth, "fast"))
    planted.encodings_differ(out)
    with pytest.raises(RingstepError, match="differs from the same cache elsewhere"):
        DecodeSession.open(out, threads=1)


def test_rings_of_length_w_are_refused(out: Path) -> None:
    planted.ring_of_length_w(out)
    with pytest.raises(RingstepError, match="a ring of window 8 holds window - 1 entries"):
        DecodeSession.open(out, threads=1)


@pytest.mark.parametrize("fault", planted.HOST)
def test_faults_in_a_quantised_artifact(fault: str, artifact: Path, models: Callable[[str], Path]) -> None:
    """16-bit activations leave 50 dB against the artifact's own weights: enough to see one key of eight."""
    truth = quantised_truth(artifact, models("gemma3"))
    with DecodeSession.open(artifact, threads=1) as session:
        with pytest.MonkeyPatch.context() as patch:
            planted.HOST[fault](patch)
            assert failures(session, truth, "fast"), fault
        assert failures(session, truth, "fast") == []

"""`ringstep plan`: choices, what the device cannot do, targets, measured rows, and what is printed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exporters.known_snr import known_snr
from exporters.plan_command import plan, verdict
from ringstep import console
from ringstep.profiling.profile import Place, Profile, Subject
from ringstep.profiling.store import add, open_store

TINY = Path(__file__).parent.parent / "data" / "spark2_5_tiny"
LABEL = "Spark-X2.5-1.7B"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that holds the config of Spark-X2.5-1.7B's size alone; the current folder holds nothing."""
    config = json.loads((TINY / "config.json").read_text())
    types = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(28)]
    config |= {"hidden_size": 2048, "intermediate_size": 6656, "num_hidden_layers": 28, "num_attention_heads": 8,
               "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512, "vocab_size": 131072,
               "layer_types": types, "max_position_embeddings": 1 << 20}  # fmt: skip
    folder = tmp_path / LABEL
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return str(folder)


def run_json(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> list[dict[str, Any]]:
    assert console.run(plan, [*args, "--json"]) == code
    choices: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["choices"]
    return choices


def measured(label: str = LABEL, ms: float = 25.0, **fields: Any) -> Profile:
    subject = Subject(label, "spark2_5", "step", 1, 1, "ring+append", "w4a16", 1024)
    times = tuple(1000 * ms + i for i in range(-5, 6))
    place = Place("galaxy-s25", "sm8750", "qnn", "npu")
    return dataclasses.replace(Profile(subject, place, "aihub", "jtest1", "2026-01-02T03:04:05Z", times,
                                       snr_db=17.5, parity="passed"), **fields)  # fmt: skip


def test_every_choice_is_listed_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    choices = run_json(capsys, model, "--device", "galaxy-s25")
    have = [(c["precision"], c["context"], c["layout"]) for c in choices]
    assert have == [(p, n, layout) for p in ("fp16", "w8a16", "w4a16") for n in (1024, 4096)
                    for layout in ("ring+append", "roll")]  # fmt: skip
    for c in choices:
        assert not {"ms", "tokens_per_second", "latency_ms"} & c.keys()
        assert c["predicted_ms"] * c["predicted_tokens_per_second"] == pytest.approx(1000)
        assert 0 < c["predicted_error"]["median"] <= c["predicted_error"]["worst"] and c["predicted_error"]["nearest"]
        assert c["snr"] == "not measured"


def test_memory_by_hand(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (choice, *_) = run_json(capsys, model, "--device", "galaxy-s25", "--precision", "fp16", "--context", "4096")
    layer = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 6656 * 2048 + 8 * 2048
    assert choice["memory_bytes"] == {
        "weights": 2 * (28 * layer + 131072 * 2048), "kv": 2048 * (21 * 511 + 7 * 4095), "embedding": 2 * 131072 * 2048,
    }  # fmt: skip
    (four, *_) = run_json(capsys, model, "--device", "galaxy-s25", "--precision", "w4a16", "--context", "4096")
    rows = 2048 + 512 + 512 + 2048 + 6656 + 6656 + 2048 + 8
    assert four["memory_bytes"]["weights"] == 28 * (layer // 2 + 4 * rows) + 131072 * (2048 + 4)


@pytest.mark.parametrize(("target", "code"), [("10", 0), ("300", 1)])
def test_the_target_decides_the_exit_code(model: str, target: str, code: int,
                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    args = (model, "--device", "galaxy-s25", "--target-tokens-per-second", target)
    verdicts = {c["meets_target"] for c in run_json(capsys, *args, code=code)}
    assert verdicts == ({"no"} if code else {"yes", "likely"})
    assert {c["meets_target"] for c in run_json(capsys, model, "--device", "galaxy-s25")} == {None}


def test_verdicts() -> None:
    # 20 ms are 50 tokens a second, 45 to 55 with an error of 10 %.
    want = {44.0: "yes", 46.0: "likely", 50.0: "likely", 54.0: "perhaps", 56.0: "no"}
    assert {target: verdict(20.0, 0.1, target) for target in want} == want
    assert verdict(20.0, 0.1, 44.0, extrapolated=True) == "likely"
    assert (verdict(20.0, None, 50.0), verdict(20.0, None, 50.1), verdict(None, None, 1.0)) == ("yes", "no", "no")


def test_what_a_device_cannot_do(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    choices = run_json(capsys, model, "--device", "qcs6490", "--target-tokens-per-second", "1", code=1)
    by_precision = {c["precision"]: c for c in choices}
    assert by_precision["fp16"]["impossible"] == "v68 has no fp16"
    assert all(c["predicted_ms"] is None and c["meets_target"] == "no" for c in choices)
    assert by_precision["fp16"]["graph_parts"] == 2 and by_precision["w4a16"]["graph_parts"] == 1
    assert console.run(plan, [model, "--device", "qcs6490"]) == 0
    text = capsys.readouterr().out
    assert "no prediction for qcs6490: its memory bandwidth" in text and "fp16: v68 has no fp16" in text
    assert "fp16: weights need at least 2 graphs (a graph may allocate 2048 MiB)" in text
    assert "v68 shares no weights" in text


def test_other_chips_are_extrapolations(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    choices = run_json(capsys, model, "--device", "galaxy-s24", "--device", "galaxy-s25")
    for c in choices:
        said = any("nothing was measured on sm8650" in why for why in c["predicted_by_extrapolation"])
        assert said == (c["device"] == "galaxy-s24")


def test_a_measured_step_replaces_the_prediction(model: str, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    db = tmp_path / "some.db"
    other = Place("galaxy-s24", "sm8650", "qnn", "npu")
    subject = measured().subject
    with open_store(db, write=True) as store:
        add(store, measured())
        # None of these is the step that is asked for.
        add(store, measured(ms=1.0, job="j2", place=other))
        add(store, measured(ms=1.0, job="j3", subject=dataclasses.replace(subject, part="full")))
        add(store, measured(ms=1.0, job="j4", subject=dataclasses.replace(subject, tokens=16)))
        add(store, measured(ms=1.0, job="j5", subject=dataclasses.replace(subject, layout="roll", precision="fp16")))
        add(store, measured(ms=1.0, job="j6", origin="synthetic"))
        add(store, measured(ms=1.0, job="j7", place=dataclasses.replace(measured().place, unit="cpu")))
    args = (model, "--device", "galaxy-s25", "--precision", "w4a16", "--context", "1024", "--db", str(db))
    first, second = run_json(capsys, *args, "--target-tokens-per-second", "39.9")
    assert first["measured_ms"] == 25.0 and first["measured_tokens_per_second"] == 40.0 and first["snr"] == "17.5 dB"
    assert first["meets_target"] == "yes" and not any("predicted" in key for key in first)
    assert "predicted_ms" in second
    assert console.run(plan, list(args)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("measured  " in line and "25.0" in line for line in lines) == 1


def test_a_measured_step_of_failed_parity_meets_nothing(model: str, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    with open_store(tmp_path / "some.db", write=True) as store:
        add(store, measured(parity="failed"))
    args = (model, "--device", "galaxy-s25", "--precision", "w4a16", "--context", "1024", "--db",
            str(tmp_path / "some.db"), "--target-tokens-per-second", "35")  # fmt: skip
    first, second = run_json(capsys, *args, code=1)
    assert first["meets_target"] == "no" and "its parity is failed" in first["impossible"]
    assert second["meets_target"] == "perhaps"


def test_every_line_of_a_prediction_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(plan, [model, "--device", "galaxy-s25", "--target-tokens-per-second", "30", "-v"]) == 0
    console.settings.verbose = False
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("fp16 ", "w8a16 ", "w4a16 "))]
    assert len(rows) == 12 and all("predicted" in row and "6-38 %" in row for row in rows)
    assert max(map(len, lines[: len(rows) + 3])) <= 80
    assert all("predicted" in line for line in lines if " ms" in line and "context" not in line and "ctx" not in line)
    assert sum("nearest measurement" in line for line in lines) == 12


def test_a_short_context_never_wraps(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    choices = run_json(capsys, model, "--device", "galaxy-s25", "--precision", "fp16", "--context", "512")
    assert [c["layout"] for c in choices] == ["append", "roll"]
    choices = run_json(capsys, model, "--device", "galaxy-s25", "--precision", "fp16", "--context", "513")
    assert [c["layout"] for c in choices] == ["ring+append", "roll"]


def artifact(folder: Path, label: str, reports: list[dict[str, Any]]) -> None:
    from recipes import plan_for
    from recipes.plan import Options
    from recipes.step import step_spec

    laid_out = plan_for(json.loads((TINY / "config.json").read_text()))
    options = Options(dtype="float16", embedding_inside=True)
    spec = step_spec(laid_out, options, model=label, context=64, chunks=(1,), eos=())
    folder.mkdir(parents=True)
    spec.save(folder / "step.json")
    (folder / "parity.json").write_text(json.dumps(reports))


def report(simulated: bool, pooled: float) -> dict[str, Any]:
    return {"summary": {"simulated": simulated, "snr_db": {"pooled": pooled}}}


def test_snr_of_an_artifact(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact(tmp_path / "artifacts" / "a", "another", [report(True, 1.0)])
    artifact(tmp_path / "artifacts" / "b", LABEL, [report(False, 120.0), report(True, 47.25)])
    for c in run_json(capsys, model, "--device", "galaxy-s25"):
        assert c["snr"] == ("47.2 dB" if c["precision"] == "fp16" else "not measured")


def test_snr_of_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "baselines").mkdir()
    rows = [3, {"row": "w4a16", "simulated": {"snr_db": 17.42}}, {"row": "w8a16", "simulated": {}}]
    (tmp_path / "baselines" / "quantize.json").write_text(json.dumps(rows))
    assert known_snr("SmolLM2-135M-Instruct", "w4a16", tmp_path) == "17.4 dB"
    assert known_snr("SmolLM2-135M-Instruct", "w8a16", tmp_path) == known_snr("other", "w4a16", tmp_path) == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "--device", "galaxy-s25"], "no such file or folder: nowhere"),
        (["org/model", "--device", "galaxy-s25"], "nothing is downloaded for a plan"),
        (["MODEL", "--device", "galaxy-s52"], "did you mean galaxy-s2"),
        (["MODEL", "--device", "galaxy-s25", "--precision", "w4a8"], "no latency is known in precision 'w4a8'"),
        (["MODEL", "--device", "galaxy-s25", "--context", "9999999"], "was trained for 1048576 tokens"),
        (["MODEL", "--device", "galaxy-s25", "--target-tokens-per-second", "nan"], "nan"),
        (["MODEL", "--device", "galaxy-s25", "--target-tokens-per-second", "0"], "0"),
        (["MODEL"], "Missing option '--device'"),
    ],
)
def test_refusals(args: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(plan, [model if arg == "MODEL" else arg for arg in args]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = ("import sys; from exporters.plan_command import plan; from exporters.compose_command import compose; "
            "print([m for m in ('torch', 'scipy', 'numpy', 'recipes') if m in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_known_snr_ignores_what_is_no_report(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for text in ("{", "[]", '[{"summary": 3}]', "null", '[{"summary": {"snr_db": {"pooled": NaN}}}]'):
        (folder / "parity.json").write_text(text)
        (folder / "step.json").write_text(text)
        assert known_snr("m", "fp16", tmp_path) == ""

"""`ringstep profile`, `place` and `jobs` against the stand-in, with the real compiler and simulator behind it."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("qai_hub")
pytest.importorskip("onnxruntime_qnn")

from profile_runs import Desk, desk, export, run

from exporters.aihub.verdict import joined
from ringstep.profiling.profile import Profile
from ringstep.profiling.store import find, open_store


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("profile") / "artifact", "--chunk", "4")


@pytest.fixture
def real(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with desk(artifact, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def fast(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with desk(artifact, tmp_path, monkeypatch, work="fast") as made:
        yield made


def stored(work: Desk) -> list[Profile]:
    with open_store(work.db) as store:
        return find(store)


def test_layers_run_on_the_npu_and_say_the_same(real: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert real.profile("--json", "--iterations", "20") == 0
    results = json.loads(capsys.readouterr().out)
    counts = {r["part"]: r["profile"]["subject"]["count"] for r in results}
    assert counts == {"sliding": 6, "full": 2, "head": 1}
    for r, profile in zip(results, stored(real), strict=True):
        assert r["profile"]["parity"] == "passed" and 50 < r["profile"]["snr_db"] < 90, "fp16, and really computed"
        assert r["profile"]["min_us"] <= r["profile"]["median_us"] <= r["profile"]["p95_us"]
        assert profile.subject.precision == "fp16" and profile.place.chip == "sm8750" and len(profile.times_us) == 20
        assert profile.job in real.server.jobs and profile.origin == "synthetic"


def test_what_the_stand_in_computed_is_what_the_simulator_computes(real: Desk) -> None:
    from ringstep.engines.qnn_sim import open_graph

    real.profile(layers="head")
    (job,) = real.noted["jobs"].values()
    outputs = np.load(real.artifact / job["results"]["folder"] / "outputs.npz")
    samples = np.load(real.artifact / "profiles" / "samples" / "head.npz")
    feeds = {key.partition(":")[2]: samples[key] for key in samples.files if key.startswith("i2:")}
    with open_graph(real.artifact / "profiles/sm8750/head.onnx/head_ctx.onnx", fp16=True) as graph:
        assert np.array_equal(graph.run(feeds)["logits"], outputs["logits@2"])


def test_the_whole_step_uses_the_exported_binary(real: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-q", "profile", real.artifact, "--device", "galaxy-s25", "--db", real.db, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert [r["part"] for r in results] == ["step", "prefill-4"]
    assert [r["profile"]["subject"]["tokens"] for r in results] == [1, 4]
    own = real.artifact / "qnn" / "decode_ctx_qnn.bin"
    sent = real.artifact / "profiles" / "sm8750" / "decode.onnx" / "decode_ctx_qnn.bin"
    assert sent.read_bytes() == own.read_bytes()


def test_the_service_compiles_links_and_runs_the_source(real: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert real.profile("--compile", "hub", "--json", layers="sliding") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [job["kind"] for job in result["jobs"]] == ["compile", "link", "inference"]
    assert result["profile"]["snr_db"] > 50
    assert "--target_runtime qnn_dlc" in next(iter(real.server.jobs.values())).options


def test_decode_and_prefill_are_linked_and_picked_by_name(real: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--device", "galaxy-s25", "--compile", "hub", "--db", real.db, "--json")
    assert run("-q", "profile", real.artifact, *asked) == 0
    step, prefill = json.loads(capsys.readouterr().out)
    kinds = lambda result: [job["kind"] for job in result["jobs"]]
    assert kinds(step) == kinds(prefill) == ["compile", "compile", "link", "inference"]
    assert [job["id"] for job in step["jobs"][:3]] == [job["id"] for job in prefill["jobs"][:3]], "made once, for both"
    assert len(real.server.jobs) == 5
    ran = [job.options for job in real.server.jobs.values() if job.kind == "inference"]
    assert "context_enable_graphs=decode" in ran[0] and "context_enable_graphs=prefill_4" in ran[1]


def test_another_phone_gets_a_binary_of_its_own(real: Desk) -> None:
    assert run("-q", "profile", real.artifact, "--device", "galaxy-s25", "--device", "galaxy-s23", "--layers", "head",
               "--db", real.db) == 0  # fmt: skip
    assert {profile.place.chip for profile in stored(real)} == {"sm8750", "sm8550"}
    binaries = {model.sha256 for model in real.server.models.values()}
    assert len(binaries) == 2


def test_place_compares_units(real: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-q", "place", real.artifact, "--device", "galaxy-s25", "--layers", "head", "--db", real.db) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("qnn:npu", "tflite:gpu", "tflite:cpu", "onnx:cpu"))
    assert [(p.place.runtime, p.place.unit) for p in stored(real)] == [
        ("qnn", "npu"), ("tflite", "gpu"), ("tflite", "cpu"), ("onnx", "cpu")]  # fmt: skip
    assert all(p.parity == "passed" for p in stored(real))


def test_only_a_service_elsewhere_has_phones() -> None:
    from types import SimpleNamespace

    from ringstep.profiling.hub import origin

    at = lambda url: origin(SimpleNamespace(config=SimpleNamespace(api_url=url)))
    assert at("https://192.0.2.7") == "aihub"
    hosts = ("127.0.0.1:8000", "localhost", "[::1]:9", "0.0.0.0:8911", "[::ffff:127.0.0.1]:8911", socket.gethostname())
    assert {at(f"http://{host}") for host in hosts} == {"synthetic"}


def test_wrong_numbers_are_a_latency_without_parity(real: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    real.server.faults.arm("outputs", "inference", how="noise")
    assert real.profile(layers="head") == 1
    out, err = capsys.readouterr()
    assert "FAILED" in out and "does not work" in err
    assert [p.parity for p in stored(real)] == ["failed"]


@pytest.mark.parametrize("how, words", [
    ("none", "returned no such output"), ("missing", "returned no such output"), ("names", "returned no such output"),
    ("shapes", "want 4 of"), ("nan", "-300.0 dB")])  # fmt: skip
def test_outputs_that_are_none_fail_parity(
    how: str, words: str, real: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    real.server.faults.arm("outputs", "inference", how=how)
    assert real.profile(layers="head") == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("how, words", [
    ("empty_times", "nothing was measured"), ("zero_times", "no measurement"), ("headline", "lies outside"),
    ("no_detail", "the profile is empty")])  # fmt: skip
def test_a_wrong_profile_is_no_figure(how: str, words: str, fast: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    fast.server.faults.arm("profile", "inference", how=how)
    assert fast.profile(layers="head") == 1
    out, err = capsys.readouterr()
    assert words in err and "refused" in out
    assert not fast.db.exists() or not stored(fast)


def test_a_failed_job_shows_reason_log_and_lint(fast: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    fast.server.faults.arm("fail", "inference", reason="Converter exit 14", log="line one\nerror: op Sigmoid refused\n")
    assert fast.profile(layers="head") == 1
    out, err = capsys.readouterr()
    assert "Converter exit 14" in err and "op Sigmoid refused" in out
    (job,) = fast.noted["jobs"].values()
    assert run("jobs", "explain", fast.artifact, job["id"][:4]) == 0
    out = capsys.readouterr().out
    assert "Converter exit 14" in out and "op Sigmoid refused" in out
    assert fast.profile(layers="head") == 1 and len(fast.server.jobs) == 1  # a failure is not tried again by itself
    assert fast.profile("--again", layers="head") == 1 and len(fast.server.jobs) == 2


def test_lint_findings_that_fit_a_failure_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from exporters.aihub.show import matching
    from sanitize.lint import Finding

    kinds: list[tuple[str, Any, str]] = [("a", "warning", "/x/Sigmoid"), ("b", "error", "/y"), ("c", "warning", "/z")]
    found = [Finding(rule, severity, node, "", "", "", "", None) for rule, severity, node in kinds]
    assert [f.rule for f in matching(found, "node /x/Sigmoid was refused")] == ["a", "b"]


def test_what_fell_to_the_cpu_is_said_loudly(real: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    real.server.faults.arm("on_cpu", "inference", count=1)
    real.profile(layers="head")
    assert "RAN ON THE CPU" in capsys.readouterr().err


def test_a_dry_run_needs_no_service(artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("QAIHUB_CLIENT_INI", "/nowhere")
    assert run("-q", "profile", artifact, "--device", "galaxy-s25", "--layers", "sliding,head", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.index("lint of sliding") < out.index("model") and "nothing was sent" in out and "2 jobs to submit" in out
    assert not json.loads((artifact / "manifest.json").read_text())["aihub"].get("jobs")


def test_jobs_are_listed_and_given_up(fast: Desk, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from ringstep.profiling import jobs

    fast.server.faults.arm("never", "inference", None)
    poll = jobs.poll
    monkeypatch.setattr(jobs, "poll", lambda hub, job: (_ for _ in ()).throw(KeyboardInterrupt))
    assert fast.profile(layers="sliding,head") == 2
    monkeypatch.setattr(jobs, "poll", poll)
    capsys.readouterr()
    assert run("jobs", "list", fast.artifact) == 0
    out, err = capsys.readouterr()
    assert out.count("galaxy-s25") == 2 and "jobs resume" in err
    assert run("jobs", "cancel", fast.artifact) == 0
    assert "2 jobs given up" in capsys.readouterr().out
    assert run("jobs", "resume", fast.artifact, "--db", fast.db) == 0
    assert fast.profile(layers="sliding,head") == 1  # not waited for any more
    assert "abandoned" in capsys.readouterr().out


BAD = [
    (["--device", "galaxy-s25", "--layers", "slidng"], "did you mean sliding"),
    (["--device", "galaxy-s99"], "unknown device"),
    (["--device", "qrd-8-gen-2"], "AI Hub does not offer it"),
    (["--device", "galaxy-s25", "--layers", ","], "names nothing"),
    (["--device", "galaxy-s25", "--layers", "head", "--whole"], "give one of them"),
]  # fmt: skip


@pytest.mark.parametrize("options, words", BAD)
def test_bad_requests_are_one_line(options: list[str], words: str, fast: Desk, capsys: Any) -> None:
    assert run("-q", "profile", fast.artifact, *options) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1
    assert not fast.server.models


def test_a_folder_that_is_none_and_a_damaged_note(fast: Desk, tmp_path: Path, capsys: Any) -> None:
    assert run("profile", tmp_path / "none", "--device", "galaxy-s25") == 2
    assert not (tmp_path / "none").exists()
    path = fast.artifact / "manifest.json"
    body = json.loads(path.read_text())
    damaged = {"jobs": []}, {"jobs": {"x": {}}}, {"uploads": {"x": {"id": 7}}}, {"requests": [1]}, {"surprise": 1}
    for damage in damaged:
        path.write_text(json.dumps(body | {"aihub": damage}))
        capsys.readouterr()
        assert run("jobs", "list", fast.artifact) == 2
        err = capsys.readouterr().err
        assert "aihub" in err and len(err.splitlines()) == 1


def test_a_request_that_cannot_be_planned_is_no_request(fast: Desk, capsys: Any) -> None:
    assert fast.profile(layers="slidng") == 2
    assert run("profile", fast.artifact, "--device", "galaxy-s99", "--db", fast.db) == 2
    assert not fast.noted.get("requests")
    capsys.readouterr()
    assert run("jobs", "resume", fast.artifact, "--db", fast.db) == 0


def test_one_request_that_fails_does_not_keep_the_others(fast: Desk, capsys: Any) -> None:
    fast.profile(layers="head")
    path = fast.artifact / "manifest.json"
    body = json.loads(path.read_text())
    (request,) = body["aihub"]["requests"]
    body["aihub"]["requests"] = [request | {"devices": ["galaxy-s99"]}, request | {"layers": ["full"]}]
    body["aihub"]["concluded"] = []
    path.write_text(json.dumps(body))
    capsys.readouterr()
    assert run("-q", "jobs", "resume", fast.artifact, "--db", fast.db) == 2
    out, err = capsys.readouterr()
    assert "full" in out and "galaxy-s99" in err
    assert len(stored(fast)) == 2


def test_a_chip_that_refuses_the_graph_does_not_keep_the_others(real: Desk, capsys: Any) -> None:
    places = ("--device", "qcs6490", "--layers", "head", "--on", "qnn:npu,onnx:cpu", "--db", real.db)
    assert run("-q", "place", real.artifact, *places, "--dry-run") == 0
    out, err = capsys.readouterr()
    assert "lint of head for qcs6490" in out and "error" in out and "refuses" in err
    assert run("-q", "place", real.artifact, *places) == 1
    out, err = capsys.readouterr()
    assert "refused here" in out and "refuses" in err
    assert [profile.place.runtime for profile in stored(real)] == ["onnx"]


def test_a_result_that_cannot_be_fetched_does_not_hide_the_others(fast: Desk, capsys: Any) -> None:
    fast.server.faults.arm("profile", "inference.* sliding", how="not_found")
    assert fast.profile() == 1
    out, err = capsys.readouterr()
    assert "not fetched" in out and "--again" in err and len(stored(fast)) == 2
    assert run("-q", "jobs", "resume", fast.artifact, "--db", fast.db) == 1  # asked for again
    assert len(fast.server.jobs) == 3


def test_what_an_earlier_job_made_is_made_again_when_it_expires(real: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringstep.profiling import jobs

    send, expired = jobs.send, []

    def expiring(hub: Any, job: Any) -> Any:
        if job.kind == "inference" and not expired:
            expired.append(hub.ledger.jobs[job.models[0]].target)
            real.server.expire(expired[0])
        return send(hub, job)

    monkeypatch.setattr(jobs, "send", expiring)
    assert real.profile("--compile", "hub", layers="head") == 0
    kinds = [job.kind for job in real.server.jobs.values()]
    assert kinds == ["compile", "link", "link", "inference"] and expired


def test_a_composed_step_says_what_its_parts_are_worth(real: Desk, capsys: Any) -> None:
    compose = ("profiles", "compose", "spark2_5_tiny", "--device", "galaxy-s25", "--precision", "fp16", "--db", real.db)
    run("-q", "profile", real.artifact, "--device", "galaxy-s25", "--db", real.db)  # a step and a prefill beside them
    real.profile()
    capsys.readouterr()
    assert run(*compose) == 0
    out, err = capsys.readouterr()
    assert "6 x" in out and "2 x" in out and "tokens/s" in out and "PARITY" not in out + err
    real.server.faults.arm("outputs", "inference.* head", how="noise")
    real.profile("--again", layers="head")
    capsys.readouterr()
    assert run(*compose) == 0
    assert "PARITY FAILED: head" in capsys.readouterr().err


def test_no_token_appears_anywhere(real: Desk, capsys: Any, caplog: Any) -> None:
    token = real.server.token
    caplog.set_level(0)
    asked = ("-v", "profile", real.artifact, "--device", "galaxy-s25", "--layers", "head", "--db", real.db)
    run(*asked)
    for path in ("/api/v1/models/", "/api/v1/jobs/", "/storage/", "/api/v1/devices/"):
        for fault in ({"code": 401}, {"code": 400, "detail": f"bad token {token}"}, {"code": 403, "detail": token}):
            real.server.faults.arm("status", path, None, **fault)
            run(*asked, "--again")
            run("-v", "jobs", "resume", real.artifact, "--db", real.db)
            real.server.faults.disarm()
    run("-v", "devices", "--refresh")
    run("jobs", "list", real.artifact, "--json")
    out, err = capsys.readouterr()
    assert "token" in err  # the faults were met
    kept = [path for path in (real.db, *real.artifact.rglob("*")) if path.is_file()]
    assert any(path.name == "manifest.json" for path in kept) and len(kept) > 10
    for text in (out.encode(), err.encode(), caplog.text.encode(), *(path.read_bytes() for path in kept)):
        assert token.encode() not in text
    with sqlite3.connect(real.db) as db:
        assert token not in "".join(db.iterdump())


TOKEN = "SECRETtok3n9876543210abcdef"


@pytest.mark.parametrize("text", [
    f"api_token = {TOKEN}\n", f"[api]\napi_token {TOKEN}\n",
    f"[api]\napi_url = http://127.0.0.1:1\nweb_url = x\napi_token = %{TOKEN}\n",
    f"[api]\napi_token = {TOKEN}\n", f"[api]\napi_url = {TOKEN}\nweb_url = x\napi_token = {TOKEN}\n",
    f"[api]\napi_url = http://x\nweb_url = x\napi_token = {TOKEN}\nverbose = maybe\n",
    f"[api]\napi_url = http://x\nweb_url = x\napi_token = {TOKEN}\u00e9\n"])  # fmt: skip
def test_a_damaged_ini_file_is_one_line_without_the_token(
    text: str, fast: Desk, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = fast.db.parent / "bad.ini"
    path.write_text(text)
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(path))
    assert fast.profile(layers="head") == 2
    err = capsys.readouterr().err
    assert TOKEN not in err and "configure" in err and len(err.splitlines()) == 1


def test_the_service_names_no_file_of_ours(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from qai_hub import public_rest_api as rest

    victim = fast.db.parent / "victim"
    victim.write_text("mine")
    listed = rest.download_job_artifacts_info

    def hostile(*args: Any, **options: Any) -> Any:
        found = listed(*args, **options)
        for entry in found.artifacts:
            entry.filename = str(victim)
        return found

    monkeypatch.setattr(rest, "download_job_artifacts_info", hostile)
    monkeypatch.setattr(rest, "_get_job_artifacts_download_info", hostile)
    fast.profile(layers="head")
    assert victim.read_text() == "mine"
    (job,) = fast.noted["jobs"].values()
    logs = fast.artifact / job["results"]["folder"] / "logs"
    assert [path.name for path in logs.iterdir()] and all(path.name.endswith(".log") for path in logs.iterdir())


@pytest.mark.parametrize("change", [
    {"key": "../../../../pwned"}, {"id": "./j123"}, {"id": "j\x1b[31m"}, {"id": "x" * 300}, {"models": []},
    {"about": {"subject": None}}, {"dataset": ""}])  # fmt: skip
def test_a_note_that_no_run_has_written_is_refused(change: dict[str, Any], fast: Desk, capsys: Any) -> None:
    fast.profile(layers="head")
    path = fast.artifact / "manifest.json"
    body = json.loads(path.read_text())
    ((key, job),) = body["aihub"]["jobs"].items()
    body["aihub"]["jobs"] = {change.get("key", key): job | change}
    path.write_text(json.dumps(body))
    for command in (("list",), ("explain", job["id"]), ("cancel",)):
        capsys.readouterr()
        assert run("jobs", command[0], fast.artifact, *command[1:]) == 2
        err = capsys.readouterr().err
        assert "aihub.jobs" in err and "\x1b" not in err and len(err.splitlines()) == 1


def test_a_profile_that_only_the_store_refuses_is_a_row(
    fast: Desk, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from ringstep.errors import RingstepError
    from ringstep.profiling import store

    add = store.add

    def refuse(own: Any, profile: Profile) -> Any:
        if profile.subject.part == "sliding":
            raise RingstepError("no bounds")
        return add(own, profile)

    monkeypatch.setattr(store, "add", refuse)
    assert fast.profile() == 1
    out, err = capsys.readouterr()
    assert "refused" in out and "no bounds" in err and len(stored(fast)) == 2


def test_outputs_that_are_no_numbers_fail_parity(artifact: Path) -> None:
    from exporters.aihub.verdict import compare
    from ringstep.contract import StepSpec

    want = [({}, {"logits": np.ones((1, 320), np.float16)})]
    for wrong in (np.array([[b"abc"] * 320]), np.ones((1, 320), np.complex64)):
        verdict = compare(artifact, StepSpec.load(artifact), 1, "npu", want, {"logits": [wrong]})
        assert "no number" in verdict.failures[0] and verdict.worst_db is None


def test_a_long_reason_is_looked_at_in_no_time() -> None:
    import time

    from ringstep.profiling.hub import redacted

    start = time.perf_counter()
    assert len(redacted("http://" * 200_000)) < 1000
    assert time.perf_counter() - start < 0.5
    text = "at https://x.y/z?sig=abc and --compute_unit npu | boxed |"
    assert redacted(text) == "at https://x.y/z and --compute_unit npu boxed"


def test_downloads_that_were_damaged_are_fetched_again(fast: Desk) -> None:
    fast.profile(layers="head")
    (job,) = fast.noted["jobs"].values()
    folder = fast.artifact / job["results"]["folder"]
    for name, content in (("outputs.npz", b"cut"), ("profile.json", b"{"), ("outputs.npz", None)):
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        assert fast.profile(layers="head") == 1
        with np.load(folder / "outputs.npz") as arrays:
            assert len(arrays.files) == 4
    assert len(fast.server.jobs) == 1


def test_a_store_that_cannot_be_written_is_said_before_anything_is_sent(fast: Desk, capsys: Any) -> None:
    plain = fast.db.parent / "plain"
    plain.write_text("")
    for path in (plain / "x.db", fast.db.parent, Path("/proc/x/y.db")):
        assert run("-q", "profile", fast.artifact, "--device", "galaxy-s25", "--layers", "head", "--db", path) == 2
        err = capsys.readouterr().err
        assert str(path.name) in err and "internal" not in err and len(err.splitlines()) == 1
    assert not fast.server.models


def test_the_residual_stream_counts_as_one_tensor() -> None:
    a, b = np.array([1.0, 2.0]), np.array([0.1, 0.2])
    pairs = {"hidden_3": (a, a), "hidden_rest_3": (b, -b), "hidden_4": (a, a), "logits": (b, b)}
    found = joined(pairs)
    assert list(found) == ["hidden_3", "hidden_4", "logits"]
    assert np.array_equal(found["hidden_3"][0], a + b) and np.array_equal(found["hidden_3"][1], a - b)

"""The stand-in for AI Hub under the real qai-hub client: real work in it, and each fault as a client meets it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

hub = pytest.importorskip("qai_hub")

from aihub_files import PART_BYTES  # noqa: E402
from aihub_server import HubServer, fast_retries  # noqa: E402
from qai_hub import client as hub_client  # noqa: E402
from qai_hub import public_rest_api  # noqa: E402
from qai_hub.client import InternalError, JobStatus, RateLimitedError, SourceModelType, UserError  # noqa: E402

from ringstep.profiling.profile import read_profile  # noqa: E402

S25 = hub.Device("Samsung Galaxy S25 (Family)")
PRECOMPILED = "--target_runtime precompiled_qnn_onnx"
DLC = "--target_runtime qnn_dlc"
SERVER = Path(__file__).parents[1] / "aihub" / "server.py"


def npu_test(function: Callable[..., None]) -> Callable[..., None]:
    import importlib.util

    missing = importlib.util.find_spec("onnxruntime_qnn") is None
    return pytest.mark.skipif(missing, reason="needs onnxruntime-qnn")(function)


def weights(seed: int = 0, size: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, (64, size)).astype(np.float32)


def matmul(path: Path, array: np.ndarray | None = None, graph: str = "tiny", extra: str = "") -> Path:
    array = weights() if array is None else array
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m" if extra else "y"], name="/mlp/MatMul")]
    nodes += [helper.make_node(extra, ["m"], ["y"], name=f"/mlp/{extra}")] if extra else []
    info = lambda name, width: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width])
    made = helper.make_graph(
        nodes, graph, [info("x", 64)], [info("y", array.shape[1])], [numpy_helper.from_array(array, "w")]
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def x(seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (1, 64)).astype(np.float32)


def snr_db(want: np.ndarray, have: np.ndarray) -> float:
    return float(10 * np.log10(np.sum(want**2) / max(np.sum((want - have.astype(np.float64)) ** 2), 1e-300)))


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with fast_retries():
        yield


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", work="fast") as server:
        yield server


@pytest.fixture
def real(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        yield server


def client(server: HubServer, token: str = "") -> Any:
    return hub.Client(config=hub.ClientConfig(token or server.token, server.url, server.url))


def ended(job: Any) -> JobStatus:
    return job.wait(60)


# Real work.


@npu_test
def test_a_matmul_runs_on_the_simulator_and_comes_back_with_a_profile(real: HubServer, tmp_path: Path) -> None:
    api = client(real)
    model = api.upload_model(str(matmul(tmp_path / "tiny.onnx")), name="tiny")
    compiled = api.submit_compile_job(model, S25, "tiny v1", options=PRECOMPILED)
    inputs = [x(1), x(2)]
    # Before the compile job is done: its target is known from the start.
    job = api.submit_inference_job(
        compiled.get_target_model(), S25, {"x": inputs}, "tiny v1", "--max_profiler_iterations 60"
    )
    assert ended(job).success, job.get_status().message
    outputs = job.download_output_data()["y"]
    for given, have in zip(inputs, outputs, strict=True):
        assert 40 < snr_db(given @ weights(), have) < 120  # fp16, not a copy of the reference
    profile = job.download_profile()
    found = read_profile(profile, "test")
    assert len(found["times_us"]) == 30
    assert profile["execution_summary"]["estimated_inference_time"] == min(found["times_us"])
    assert [(op.name, op.type, op.unit) for op in found["ops"]] == [("/mlp/MatMul", "MatMul", "NPU")]
    folder = Path(compiled.get_target_model().download(str(tmp_path / "target.onnx.zip")))
    assert folder.name == "target.onnx.zip"
    logs = job.download_job_logs(str(tmp_path / "logs"))
    assert sorted(Path(log).name for log in logs) == [f"{job.job_id}_device.log", f"{job.job_id}_hub.log"]
    assert "SYNTHETIC" in Path(logs[0]).read_text()
    # What was downloaded is a model that can be uploaded as it is.
    again = api.submit_inference_job(str(folder), S25, {"x": inputs[:1]}, "own binary")
    assert ended(again).success, again.get_status().message
    assert np.array_equal(again.download_output_data()["y"][0], outputs[0])


@npu_test
def test_two_linked_graphs_and_one_is_picked(real: HubServer, tmp_path: Path) -> None:
    api = client(real)
    targets = []
    for name, seed in (("decode", 1), ("prefill", 2)):
        path = matmul(tmp_path / f"{name}.onnx", weights(seed))
        options = f"{DLC} --qnn_options context_enable_graphs={name}"
        targets.append(api.submit_compile_job(str(path), S25, name, options=options).get_target_model())
    linked = api.submit_link_job(targets, S25, "both")
    assert ended(linked).success, linked.get_status().message
    model = linked.get_target_model()
    assert model.model_type is SourceModelType.QNN_CONTEXT_BINARY
    assert set(api.get_model(model.model_id).input_spec) == {"decode", "prefill"}
    job = api.submit_inference_job(model, S25, {"x": [x()]}, options="--qnn_options context_enable_graphs=prefill")
    assert ended(job).success, job.get_status().message
    assert snr_db(x() @ weights(2), job.download_output_data()["y"][0]) > 40
    none = api.submit_inference_job(model, S25, {"x": [x()]})
    assert ended(none).failure and "decode, prefill" in none.get_status().message
    wrong = api.submit_inference_job(model, hub.Device("Samsung Galaxy S24 (Family)"), {"x": [x()]})
    assert ended(wrong).failure and "sm8750" in wrong.get_status().message


@npu_test
def test_an_operation_that_the_npu_lacks_fails_the_job_with_reason_and_log(real: HubServer, tmp_path: Path) -> None:
    api = client(real)
    job = api.submit_compile_job(str(refused(tmp_path / "det.onnx")), S25, "det", options=PRECOMPILED)
    status = ended(job)
    assert status.failure and "/det/Det (Det)" in status.message and "/tmp" not in status.message
    (log,) = job.download_job_logs(str(tmp_path / "logs"))
    text = Path(log).read_text()
    assert "Unsupported nodes in QNN EP" in text and text.endswith(status.message + "\n")
    with pytest.raises(UserError):
        job.download_target_model(str(tmp_path / "none.zip"))
    after = api.submit_inference_job(job.get_target_model(), S25, {"x": [x()]})
    assert ended(after).failure and job.job_id in after.get_status().message
    assert after.download_profile() == {} and after.download_output_data() is None


def refused(path: Path) -> Path:
    info = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Det", ["a"], ["y"], name="/det/Det")]
    graph = helper.make_graph(nodes, "det", [info("x", [1, 8, 8])], [info("y", [1])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def test_onnx_and_tflite_run_on_the_cpu_and_say_so(real: HubServer, tmp_path: Path) -> None:
    api = client(real)
    path = str(matmul(tmp_path / "tiny.onnx", extra="Relu"))
    for runtime, unit in (("onnx", "cpu"), ("tflite", "gpu")):
        target = api.submit_compile_job(path, S25, options=f"--target_runtime {runtime}").get_target_model()
        job = api.submit_inference_job(target, S25, {"x": [x()]}, options=f"--compute_unit {unit}")
        assert ended(job).success, job.get_status().message
        assert snr_db(np.maximum(x() @ weights(), 0), job.download_output_data()["y"][0]) > 100
        ops = read_profile(job.download_profile(), "test")["ops"]
        assert [(op.type, op.unit) for op in ops] == [("MatMul", unit.upper()), ("Relu", unit.upper())]
    calibration = {"x": [x(seed) for seed in range(8)]}
    quantised = api.submit_quantize_job(path, calibration, hub.QuantizeDtype.INT8, hub.QuantizeDtype.INT16)
    job = api.submit_inference_job(quantised.get_target_model(), S25, {"x": [x(3)]})
    assert ended(job).success, job.get_status().message
    assert 20 < snr_db(np.maximum(x(3) @ weights(), 0), job.download_output_data()["y"][0]) < 80


# The protocol.


def test_uploads_arrive_whole_in_parts(fast: HubServer, tmp_path: Path) -> None:
    api = client(fast)
    path = matmul(tmp_path / "big.onnx", weights(size=40_000))
    model = api.upload_model(str(path), name="big")
    record = fast.models[model.model_id]
    assert path.stat().st_size > 2 * PART_BYTES and fast.requests("PUT", "/storage/models/.*") == 3
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and record.bytes == path.stat().st_size
    assert [tuple(spec) for spec in api.get_model(model.model_id).input_spec[None]] == [
        ("x", "float32", (1, 64), None, None)
    ]
    dataset = api.upload_dataset({"x": [x(), x(1)]}, name="two")
    assert fast.datasets[dataset.dataset_id].uploaded
    back = api.get_dataset(dataset.dataset_id).download()
    assert np.array_equal(back["x"][1], x(1))
    assert 29 < (dataset.expiration_time - dataset.creation_time).total_seconds() / 86400 < 31
    assert [model.name for model in api.get_models()] == ["big"] and len(api.get_datasets(offset=1)) == 0


def test_parts_that_do_not_add_up_are_refused(fast: HubServer, tmp_path: Path, monkeypatch: Any) -> None:
    api, upload = client(fast), public_rest_api.api_utils.upload_asset
    monkeypatch.setattr(public_rest_api.api_utils, "upload_asset", lambda **given: upload(**given) and '"0"')
    with pytest.raises(UserError, match="do not add up"):
        api.upload_model(str(matmul(tmp_path / "a.onnx")))
    monkeypatch.setattr(public_rest_api.api_utils, "upload_asset", lambda **_: '"0"')
    with pytest.raises(UserError, match="not complete"):
        api.upload_model(str(matmul(tmp_path / "a.onnx")))
    model, _ = fast.models.values()
    assert not model.uploaded
    left = hub_client.Model(api, model.id, None, SourceModelType.ONNX, "a", {}, None, False, None, {}, {})
    with pytest.raises(UserError, match="not uploaded"):
        api.submit_compile_job(left, S25, options=PRECOMPILED)


def test_a_directory_with_a_wrapper_and_its_binary_is_a_model(fast: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    matmul(folder / "mine_ctx.onnx")
    (folder / "mine_ctx_qnn.bin").write_bytes(b"binary")
    model = client(fast).upload_model(str(folder))
    record = fast.models[model.model_id]
    assert record.directory and [spec[0] for spec in record.inputs] == ["x"]


def test_a_linked_model_goes_into_a_wrapper(fast: HubServer, tmp_path: Path) -> None:
    api = client(fast)
    compiled, linked, embedded = api.submit_compile_and_link_jobs(
        str(matmul(tmp_path / "a.onnx")), S25, embed_in_onnx=True
    )
    assert [job.job_type for job in (*compiled, linked, embedded)] == ["compile", "link", "compile"]
    job = run(fast, embedded.get_target_model())
    assert snr_db(x() @ weights(), job.download_output_data()["y"][0]) > 100
    own = api.upload_model(str(Path(embedded.download_target_model(str(tmp_path / "own.onnx.zip")))))
    assert own.model_type is SourceModelType.ONNX and fast.models[own.model_id].directory


def test_devices_are_found_by_name_system_and_attributes(fast: HubServer) -> None:
    api = client(fast)
    names = {device.name for device in api.get_devices()}
    assert {"Samsung Galaxy S25 (Family)", "Snapdragon X Elite CRD", "QCS8550 (Proxy)"} <= names
    (found,) = api.get_devices(S25.name)
    assert {"hexagon:v79", "soc-model:69", "framework:qnn", "framework:onnx"} <= set(found.attributes)
    assert "htp-supports-weight-sharing:true" in found.attributes
    v79 = api.get_devices(attributes=["hexagon:v79", "os:android"])
    assert S25.name in {device.name for device in v79} and len(v79) < len(names)
    assert {device.os for device in api.get_devices(os="[15,16)", attributes="os:android")} == {"15"}
    v68 = api.get_devices(attributes="hexagon:v68")
    assert v68 and not any("htp-supports-fp16:true" in device.attributes for device in v68)
    assert api._get_device(hub.Device(attributes=["hexagon:v79"])).name in {device.name for device in v79}
    assert [framework.name for framework in api.get_frameworks()] == ["QAIRT"]
    with pytest.raises(UserError, match="not available"):
        api._check_devices(hub.Device("Nokia 3310"), SourceModelType.ONNX)


def test_jobs_are_listed_newest_first_and_found_by_name(fast: HubServer, tmp_path: Path) -> None:
    api = client(fast)
    model = api.upload_model(str(matmul(tmp_path / "a.onnx")))
    first = api.submit_compile_job(model, S25, "one", options=DLC)
    ended(first)
    fast.faults.arm("fail", "inference two", reason="no such luck", log="line\n")
    second = api.submit_inference_job(first.get_target_model(), S25, {"x": [x()]}, "two")
    assert ended(second).message == "no such luck"
    summaries = api.get_job_summaries()
    assert [(job.name, job.status.code) for job in summaries] == [("two", "FAILED"), ("one", "SUCCESS")]
    assert [job.name for job in api.get_job_summaries(limit=1, offset=1)] == ["one"]
    assert [job.name for job in api.get_job_summaries(type=hub.JobType.COMPILE)] == ["one"]
    assert [job.name for job in api.get_job_summaries(state=JobStatus.State.FAILED)] == ["two"]
    assert api.get_job_summaries(creator="nobody@example.com") == []
    second.set_name("three")
    assert api.get_job(second.job_id).name == "three" == api.get_job_summaries()[0].name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--target_runtime qnn_context_binary", "invalid choice"),
        ("--target_runtime qnn_dlc --fast", "--fast"),
        ("--target_runtime onnx --quantize_full_type int8", "not supported"),
        ("fast", "fast"),
    ],
)
def test_bad_options_are_refused(fast: HubServer, tmp_path: Path, options: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        client(fast).submit_compile_job(str(matmul(tmp_path / "a.onnx")), S25, options=options)
    assert not fast.jobs


def test_what_is_not_there_is_a_404_with_its_reason(fast: HubServer) -> None:
    api = client(fast)
    for call in (api.get_job, api.get_model, api.get_dataset):
        with pytest.raises(UserError, match="could not be found"):
            call("nothing")
    with pytest.raises(UserError, match="authenticate"):
        client(fast, "tok-wrong").get_models()


# Faults of requests.


@pytest.fixture
def uploaded(fast: HubServer, tmp_path: Path) -> Any:
    return client(fast).upload_model(str(matmul(tmp_path / "a.onnx")))


def test_a_connection_that_drops_mid_upload_is_tried_again(fast: HubServer, tmp_path: Path) -> None:
    fast.faults.arm("drop", "PUT /storage/models")
    path = matmul(tmp_path / "a.onnx")
    model = client(fast).upload_model(str(path))
    assert fast.models[model.model_id].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [status for method, _, status in fast.log if method == "PUT"] == [0, 200]


def test_an_inference_job_whose_answer_is_lost_is_sent_twice_by_the_client(fast: HubServer, uploaded: Any) -> None:
    fast.faults.arm("drop_answer", "POST /api/v1/jobs/")
    job = client(fast).submit_inference_job(uploaded, S25, {"x": [x()]}, "twin")
    assert [record.name for record in fast.jobs.values()] == ["twin", "twin"]
    assert job.job_id == list(fast.jobs)[1]


def test_a_quantize_job_whose_answer_is_lost_is_not(fast: HubServer, uploaded: Any) -> None:
    fast.faults.arm("drop_answer", "POST /api/v1/jobs/")
    with pytest.raises(InternalError, match="Could not connect"):
        client(fast).submit_quantize_job(uploaded, {"x": [x()]}, name="once")
    assert [record.name for record in fast.jobs.values()] == ["once"]


def test_every_try_can_be_lost(fast: HubServer, uploaded: Any) -> None:
    fast.faults.arm("drop_answer", "POST /api/v1/jobs/", times=None)
    with pytest.raises(InternalError, match="Could not connect"):
        client(fast).submit_inference_job(uploaded, S25, {"x": [x()]}, retry=False)
    assert len(fast.jobs) == 7


def test_a_token_that_stops_working(fast: HubServer, uploaded: Any) -> None:
    fast.faults.arm("status", times=None, code=401)
    with pytest.raises(UserError, match="authenticate") as caught:
        client(fast).get_models()
    assert fast.token not in str(caught.value) and len([entry for entry in fast.log if entry[2] == 401]) == 1


def test_429_storms(fast: HubServer, uploaded: Any) -> None:
    api = client(fast)
    fast.faults.arm("status", "POST /api/v1/jobs/", times=6, code=429, detail="slow down")
    api.submit_inference_job(uploaded, S25, {"x": [x()]}, retry=False)
    assert len(fast.jobs) == 1
    fast.faults.arm("status", "POST /api/v1/jobs/", times=7, code=429, detail="slow down")
    with pytest.raises(RateLimitedError, match="slow down"):
        api.submit_inference_job(uploaded, S25, {"x": [x()]}, retry=False)
    assert len(fast.jobs) == 1


@pytest.mark.parametrize(("code", "words"), [(503, "unavailable"), (500, "reported errors")])
def test_503_and_500_are_tried_again_and_then_told(fast: HubServer, code: int, words: str) -> None:
    api = client(fast)
    fast.faults.arm("status", "GET /api/v1/models/", times=6, code=code)
    assert api.get_models() == []
    fast.faults.arm("status", "GET /api/v1/models/", times=7, code=code)
    with pytest.raises(InternalError, match=words):
        api.get_models()
    assert len(fast.faults.struck) == 13


def test_a_wrong_content_type_is_an_exception_of_the_api(fast: HubServer) -> None:
    fast.faults.arm("content_type", "GET /api/v1/models/", type="text/html")
    with pytest.raises(hub.public_rest_api.APIException, match="status code 200"):
        client(fast).get_models()


def test_downloads_that_end_early(fast: HubServer, tmp_path: Path) -> None:
    api = client(fast)
    dataset = api.upload_dataset({"x": [x(seed) for seed in range(50)]})
    fast.faults.arm("truncate", "GET /storage/")
    back = api.get_dataset(dataset.dataset_id).download()
    assert len(back["x"]) == 50 and fast.requests("GET", "/storage/.*") == 2
    fast.faults.arm("shorten", "GET /storage/")
    with pytest.raises(OSError, match="truncated"):
        api.get_dataset(dataset.dataset_id).download()


def test_a_slow_answer_is_waited_for(fast: HubServer) -> None:
    fast.faults.arm("slow_answer", "GET /api/v1/models/", seconds=0.2)
    start = time.monotonic()
    assert client(fast).get_models() == [] and time.monotonic() - start > 0.2


def test_expired_models_and_data_sets(fast: HubServer, uploaded: Any) -> None:
    api = client(fast)
    dataset = api.upload_dataset({"x": [x()]})
    fast.expire(dataset.dataset_id)
    with pytest.raises(UserError, match="is expired"):
        api.submit_inference_job(uploaded, S25, dataset)
    with pytest.raises(UserError, match="could not be found"):
        api.get_dataset(dataset.dataset_id)
    (listed,) = api.get_datasets()
    assert listed.is_expired()
    fast.expire(uploaded.model_id)
    with pytest.raises(UserError, match="is expired"):
        api.submit_inference_job(uploaded, S25, {"x": [x()]})


# Faults of jobs.


def run(server: HubServer, model: Any) -> Any:
    job = client(server).submit_inference_job(model, S25, {"x": [x()]})
    assert ended(job).success, job.get_status().message
    return job


def test_wrong_profiles(fast: HubServer, uploaded: Any) -> None:
    for how in ("empty_times", "zero_times", "headline", "no_detail", "not_found"):
        fast.faults.arm("profile", how=how)
        job = run(fast, uploaded)
        if how == "not_found":
            with pytest.raises(UserError):
                job.download_profile()
            continue
        profile = job.download_profile()
        summary = profile.get("execution_summary", {})
        times = summary.get("all_inference_times", [])
        seen = {
            "empty_times": times == [] and "all_inference_times" in summary,
            "zero_times": set(times) == {0},
            "headline": bool(times) and summary["estimated_inference_time"] not in times,
            "no_detail": profile == {},
        }
        assert seen[how]


def test_wrong_outputs(fast: HubServer, uploaded: Any) -> None:
    right = run(fast, uploaded).download_output_data()["y"][0]
    assert snr_db(x() @ weights(), right) > 100
    fast.faults.arm("outputs", how="noise")
    assert snr_db(right, run(fast, uploaded).download_output_data()["y"][0]) < 3
    fast.faults.arm("outputs", how="shapes")
    assert run(fast, uploaded).download_output_data()["y"][0].shape == (65,)
    fast.faults.arm("outputs", how="names")
    assert list(run(fast, uploaded).download_output_data()) == ["output_0"]
    fast.faults.arm("outputs", how="none")
    assert run(fast, uploaded).download_output_data() is None
    fast.faults.arm("outputs", how="missing")
    assert not run(fast, uploaded).download_output_data()


def test_operations_that_fell_to_the_cpu(fast: HubServer, tmp_path: Path) -> None:
    model = client(fast).upload_model(str(matmul(tmp_path / "b.onnx", extra="Relu")))
    fast.faults.arm("on_cpu", count=1)
    ops = read_profile(run(fast, model).download_profile(), "test")["ops"]
    assert [op.unit for op in ops] == ["CPU", "NPU"]


def test_jobs_that_take_their_time_or_never_end(fast: HubServer, uploaded: Any) -> None:
    api = client(fast)
    fast.faults.arm("never", "inference stuck")
    fast.faults.arm("slow", "inference late", seconds=0.4)
    stuck = api.submit_inference_job(uploaded, S25, {"x": [x()]}, "stuck")
    late = api.submit_inference_job(uploaded, S25, {"x": [x()]}, "late")
    time.sleep(0.1)
    assert stuck.get_status().running and late.get_status().running
    assert ended(late).success
    with pytest.raises(TimeoutError):
        stuck.wait(1)


# Restarts.


def test_a_restart_between_submit_and_wait(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub", work="fast", job_seconds=0.3) as server:
        api = client(server)
        job = api.submit_inference_job(str(matmul(tmp_path / "a.onnx")), S25, {"x": [x()]})
        server.restart()
        assert ended(job).success and len(server.jobs) == 1


def test_a_killed_process_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, str(SERVER), str(tmp_path / "hub"), "--work", "fast", "--job-seconds", "1"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = first.stdout.readline().strip()
    ini = tmp_path / "hub" / "client.ini"
    api = hub.Client(config=hub_client.api_utils.load_api_config_from_file(str(ini)))
    job = api.submit_inference_job(str(matmul(tmp_path / "a.onnx")), S25, {"x": [x()]}, "survivor")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.Popen([*command, "--port", url.rpartition(":")[2]], stdout=subprocess.PIPE, text=True)
    try:
        assert second.stdout.readline().strip() == url
        assert ended(job).success
        assert snr_db(x() @ weights(), job.download_output_data()["y"][0]) > 100
        state = json.loads((tmp_path / "hub" / "state.json").read_text())
        assert [job["name"] for job in state["jobs"]] == ["survivor"]
    finally:
        second.terminate()
        assert second.wait(30) == 0


def test_faults_can_be_armed_over_http(fast: HubServer) -> None:
    import requests

    body = {"kind": "status", "match": "GET /api/v1/models/", "code": 400, "detail": "told to"}
    requests.post(f"{fast.url}/test/arm", json=body, timeout=5)
    with pytest.raises(UserError, match="told to"):
        client(fast).get_models()
    assert requests.get(f"{fast.url}/test/log", timeout=5).json()["struck"] == [["status", "GET /api/v1/models/"]]


def test_the_ini_file_is_one_for_the_client(fast: HubServer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(fast.write_ini(tmp_path / "client.ini")))
    assert hub.Client().get_models() == []
    assert dataclasses.asdict(hub.Client().config)["api_token"] == fast.token

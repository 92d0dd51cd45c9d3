"""The command: every bad input is one line and exit code 2, --json parses, tables fit a terminal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from export_runs import LLAMA, SPARK, run, write_checkpoint, write_tokenizer

CONTEXT = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: llama/ a checkpoint that speaks, spoken/ its proven export, spark/ a mute one, fp16 for a phone."""
    folder = tmp_path_factory.mktemp("cli")
    write_tokenizer(write_checkpoint(folder / "llama", LLAMA), LLAMA["vocab_size"])
    write_checkpoint(folder / "other", LLAMA, seed=6)
    options = ["--format", "onnx", "--context", CONTEXT, "--no-parity", "-q"]
    assert run("export", folder / "llama", "--out", folder / "spoken", *options) == 0
    assert run("export", SPARK, "--out", folder / "spark", *options, "--device", "galaxy-s25", "--chunk", 4) == 0
    return folder


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def inside(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Working in that folder, so that paths are short."""
    monkeypatch.chdir(made)
    yield made


def one_line(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds the words."""
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "", captured
    assert captured.err.count("\n") == 1 and captured.err.startswith("ringstep: error: "), captured.err
    assert "internal error" not in captured.err
    for word in words:
        assert word in captured.err


BAD_EXPORTS: dict[str, tuple[list[Any], list[str]]] = {
    "no such path": (["./nowhere"], ["no such file or folder: ./nowhere"]),
    "alias misspelt": (["smollm2-135"], ["no such file or folder", "did you mean smollm2-135m?"]),
    "a file": ([SPARK / "config.json"], ["is not a .gguf file", "give the folder"]),
    "a folder without a model": (["."], ["holds no config.json", "is it a checkpoint's folder?"]),
    "revision of a folder": ([SPARK, "--revision", "main"], ["revision 'main' only applies to a Hub id"]),
    "context 0": ([SPARK, "--context", 0], ["--context 0: must lie in 1..1048576"]),
    "context -1": ([SPARK, "--context", -1], ["--context -1: must lie in 1..1048576"]),
    "context beyond": (["llama", "--context", 129], ["--context 129: must lie in 1..128, the model's own limit"]),
    "context no number": (["llama", "--context", "many"], ["'many' is not a valid integer", "--help"]),
    "chunk 0": ([SPARK, "--context", 64, "--chunk", 0], ["--chunk 0: must lie in 1..64, the context"]),
    "chunk beyond": ([SPARK, "--context", 64, "--chunk", 65], ["--chunk 65: must lie in 1..64, the context"]),
    "qnn without device": ([SPARK, "--format", "qnn"], ["give --device (see ringstep devices)"]),
    "qnn is the default": ([SPARK], ["give --device (see ringstep devices)"]),
    "qnn in fp32": ([SPARK, "--format", "qnn", "--device", "galaxy-s25", "--precision", "fp32"],
                    ["the NPU computes in fp16", "use --precision fp16, or --format onnx"]),
    "no fp16 on the chip": ([SPARK, "--format", "qnn", "--device", "qcs6490", "--precision", "fp16"],
                            ["qcs6490 (qcs6490, v68) has no fp16", "use --precision w8a16"]),
    "unknown device": ([SPARK, "--device", "galaxy-s52"], ["unknown device 'galaxy-s52' (did you mean galaxy-s2",
                                                           "`ringstep devices` lists them"]),
    "unknown layout": ([SPARK, "--layout", "rings"], ["'rings' is none of auto, ring", "(did you mean ring?)"]),
    "unknown layout of a kind": ([SPARK, "--layout", "sliding=rol"], ["'rol' is none of", "(did you mean roll?)"]),
    "layout without a value": ([SPARK, "--layout", "sliding="], ["'' is none of auto"]),
    "unknown kind": ([SPARK, "--layout", "linear=ring"],
                     ["--layout linear=...: this model has layers of kind sliding, full"]),
    "unknown format": ([SPARK, "--format", "onxx"],
                       ["'onxx' is not one of 'onnx', 'qnn', 'executorch' (did you mean onnx?)"]),
    "unknown precision": ([SPARK, "--precision", "int8"],
                          ["--precision 'int8' is unknown", "there are fp32, fp16, auto,"]),
    "unknown option": ([SPARK, "--contxt", 64], ["no such option '--contxt' (did you mean --context?)"]),
    "part size 0": ([SPARK, "--max-part-mb", 0], ["--max-part-mb", "x>=1"]),
    "nothing": ([], ["Missing argument 'MODEL'", "ringstep export --help"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_EXPORTS)
def test_bad_export(name: str, inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args, words = BAD_EXPORTS[name]
    args = args if "--device" in args or "--format" in args or "qnn" in name else [*args, "--format", "onnx"]
    code = run("export", *args, "--out", tmp_path / "out")
    one_line(capsys, code, *words)
    assert not (tmp_path / "out").exists()


def test_unknown_model_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "model", LLAMA)
    for name, hint in (("lama", "(did you mean llama?)"), ("mamba2", "(see ringstep recipes)")):
        (tmp_path / "model/config.json").write_text(json.dumps(LLAMA | {"model_type": name}))
        code = run("export", tmp_path / "model", "--format", "onnx", "--out", tmp_path / "out")
        one_line(capsys, code, f"config.json: model_type: {name!r} has no recipe", hint)
    assert not (tmp_path / "out").exists()


def test_foreign_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    code = run("export", SPARK, "--format", "onnx", "--out", tmp_path)
    one_line(capsys, code, "holds files that are not ringstep's (thesis.txt); use another")
    code = run("export", SPARK, "--format", "onnx", "--out", tmp_path / "thesis.txt")
    one_line(capsys, code, "thesis.txt is not a folder")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("command", ["parity", "generate", "inspect"])
def test_no_artifact(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prompt", "w5"] if command == "generate" else []
    code = run(command, tmp_path / "nowhere", *more)
    one_line(capsys, code, "nowhere: no such file; is this an artifact made by ringstep export?")
    code = run(command, tmp_path, *more)
    one_line(capsys, code, "step.json: no such file; is this an artifact made by ringstep export?")
    (tmp_path / "step.json").write_text("{}")
    code = run(command, tmp_path, *more)
    one_line(capsys, code, "step.json: format: not 'ringstep.step'")


BAD_USES: dict[str, tuple[list[Any], list[str]]] = {
    "another checkpoint": (["parity", "spoken", "--model", "other"],
                           ["other: not the checkpoint of this artifact", "give --model"]),
    "tokens beyond": (["parity", "spark", "--tokens", CONTEXT + 1], [f"--tokens {CONTEXT + 1}: must lie in 1..32"]),
    "tokens 0": (["parity", "spark", "--tokens", 0], ["--tokens", "x>=1"]),
    "threshold nan": (["parity", "spark", "--min-db", "nan"], ["--min-db", "nan is not a finite number"]),
    "threshold inf": (["parity", "spark", "--min-db", "-inf"], ["--min-db", "-inf is not a finite number"]),
    "no text": (["generate", "spoken", "--raw", "--prompt", "\udcff"], ["cannot encode this text"]),
    "tokens and prompt": (["parity", "spark", "--tokens", 5, "--prompt", "w5"], ["a proof takes one of them"]),
    "unknown engine": (["parity", "spark", "--engine", "qnnsim"], ["did you mean qnn-sim?"]),
    "no chip": (["generate", "spoken", "--engine", "qnn-sim", "--prompt", "w5"],
                ["ONNX files for no chip", "export with --device"]),
    "no chip for parity": (["parity", "spoken", "--engine", "qnn-sim", "--tokens", 2, "-q"], ["export with --device"]),
    "no tokenizer": (["generate", "spark", "--prompt", "hello"], ["this artifact has no tokenizer"]),
    "long prompt": (["generate", "spoken", "--prompt", "w5 " * 40],
                    ["the prompt has 41 tokens, the artifact's context is 32", "larger --context"]),
    "no room to answer": (["generate", "spoken", "--raw", "--prompt", "w5 " * CONTEXT], ["the prompt has 32 tokens"]),
    "empty prompt": (["generate", "spoken", "--raw", "--prompt", ""], ["--prompt: there is nothing in it"]),
    "no prompt": (["generate", "spoken"], ["Missing option '--prompt'"]),
    "max tokens 0": (["generate", "spoken", "--prompt", "w5", "--max-tokens", 0], ["--max-tokens", "x>=1"]),
    "unknown command": (["exprt"], ["no such command 'exprt' (did you mean export?)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_USES)
def test_bad_use(name: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args, words = BAD_USES[name]
    capsys.readouterr()
    one_line(capsys, run(*args), *words)


def test_missing_original(inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = inside / "spoken/manifest.json"
    kept = manifest.read_text()
    body = json.loads(kept) | {"model": "/moved/away"}
    manifest.write_text(json.dumps(body))
    try:
        one_line(capsys, run("parity", "spoken"), "no such file or folder: /moved/away")
    finally:
        manifest.write_text(kept)


def test_damaged_graph(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = inside / "spoken/onnx/decode.onnx"
    kept = graph.read_bytes()
    graph.write_bytes(kept[:1000])
    try:
        code = run("generate", "spoken", "--prompt", "w5")
        one_line(capsys, code, "decode.onnx: ONNX Runtime refuses it")
    finally:
        graph.write_bytes(kept)


def test_inspect_guesses_nothing_from_names(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = inside / "spoken/step.json"
    kept = step.read_text()
    step.write_text(kept.replace('"past_key_', '"keys-of-').replace('"model": "', '"model": "\\u001b[31m'))
    try:
        assert run("inspect", "spoken") == 0
        out = capsys.readouterr().out
        assert "keys-of-0_{0-1}" in out and "\x1b" not in out
    finally:
        step.write_text(kept)


def test_an_endless_name_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("export", SPARK, "--format", "onnx", "--out", tmp_path / ("a" * 300))
    one_line(capsys, code, "File name too long")


def test_a_tokenizer_that_says_nothing_is_proven_on_random_ids(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "llama", tmp_path / "m")
    file = tmp_path / "m/tokenizer.json"
    cut = {"max_length": 0, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": cut}))
    assert run("export", tmp_path / "m", "--format", "onnx", "--context", 8, "--out", tmp_path / "o", "-q") == 0


def test_a_config_that_only_transformers_refuses(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", tmp_path / "m", "--format", "onnx", "--context", 8, "-q", "--out"]
    shutil.copytree(made / "llama", tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps(LLAMA | {"dtype": "nonsense", "torch_dtype": {"a": 1}}))
    assert run(*args, tmp_path / "one") == 0
    (tmp_path / "m/config.json").write_text(json.dumps(LLAMA | {"pad_token_id": "x"}))
    capsys.readouterr()
    one_line(capsys, run(*args, tmp_path / "two"), "transformers refuses its config.json")


def test_a_changed_proof_is_not_shown(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["export", made / "llama", "--format", "onnx", "--context", 8, "--out", tmp_path / "o", "-q"]
    assert run(*args) == 0
    (tmp_path / "o/parity.json").write_text("[3]")
    capsys.readouterr()
    assert run(*args, "--no-parity") == 0
    assert "parity" not in capsys.readouterr().out and not (tmp_path / "o/parity.json").exists()


def parsed(capsys: pytest.CaptureFixture[str], *args: Any, code: int = 0) -> Any:
    capsys.readouterr()
    assert run(*args, "--json", "-q") == code  # -q: a busy machine's progress lines
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_json_of_lists(capsys: pytest.CaptureFixture[str]) -> None:
    devices = parsed(capsys, "devices")
    assert {"id", "name", "chip", "aihub", "attributes", "memory_gb"} == devices[0].keys()
    (s25,) = [d for d in devices if d["id"] == "galaxy-s25"]
    assert (s25["chip"]["name"], s25["chip"]["soc_model"], s25["chip"]["fp16"]) == ("sm8750", 69, True)
    recipes = parsed(capsys, "recipes")
    assert all(r.keys() == {"recipe", "model_types", "summary"} for r in recipes)
    assert {m for r in recipes for m in r["model_types"]} >= {"llama", "mistral", "qwen3", "gemma3_text", "spark2_5"}


def test_json_of_inspect(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = parsed(capsys, "inspect", "spark")
    assert body.keys() == {
        "folder", "model", "recipe", "dtype", "activations", "context", "vocab", "hidden", "target", "versions",
        "graphs", "caches", "kv_bytes", "memory", "files",
    }  # fmt: skip
    assert [g["n"] for g in body["graphs"]] == [1, 4] and body["target"]["chip"] == "sm8750"
    sliding, full = body["caches"]
    assert (sliding["layers"], sliding["length"], full["layers"]) == ([0, 1, 2, 4, 5, 6], 15, [3, 7])
    assert sliding["bytes"] == 6 * 2 * 2 * 15 * 32 * 4
    assert set(body["files"]) >= {"step.json", "onnx/decode.onnx", "onnx/prefill_4.onnx", "onnx/weights.bin"}
    assert all((inside / "spark" / name).stat().st_size == size for name, size in body["files"].items())
    long = {k["context"]: k["flat"] / k["hybrid"] for k in body["kv_bytes"]}
    assert long[131072] == pytest.approx(4, rel=0.01)  # six of eight layers hold a window only


def test_json_of_parity_and_the_gate(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = parsed(capsys, "parity", "spark", "--tokens", 20)
    assert report.keys() == {"summary", "positions", "caches", "answer", "windows"}
    summary = report["summary"]
    assert summary["passed"] and summary["tokens"] == 20 and summary["snr_db"]["min"] > 100
    assert summary.keys() >= {"engine", "simulated", "reference", "threshold_db", "top1", "top5", "kl", "failures"}
    assert [p["position"] for p in report["positions"]] == list(range(20)) and len(report["caches"]) == 8
    (report,) = parsed(capsys, "parity", "spark", "--tokens", 4, "--min-db", 500, code=1)
    assert not report["summary"]["passed"] and "below 500 dB" in report["summary"]["failures"][0]
    assert run("parity", "spark", "--tokens", 4, "--min-db", 500) == 1
    assert "ort: FAILED: logits" in capsys.readouterr().out


def test_json_of_generate(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = parsed(capsys, "generate", "spoken", "--prompt", "w5 w6", "--max-tokens", 6)
    assert body.keys() == {
        "text", "ids", "prompt_tokens", "engine", "simulated", "first_token_seconds", "decode_seconds",
    }  # fmt: skip
    assert body["prompt_tokens"] == 3 and 1 <= len(body["ids"]) <= 6 and not body["simulated"]
    capsys.readouterr()
    assert run("generate", "spoken", "--prompt", "w5 w6", "--max-tokens", 6) == 0
    captured = capsys.readouterr()
    assert captured.out == body["text"] + "\n"
    assert re.fullmatch(r"3 \+ \d tokens on ort \(.*\)\n", captured.err)


def test_generate_to_the_end_of_the_context(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = parsed(capsys, "generate", "spoken", "--raw", "--prompt", "w5 " * (CONTEXT - 1), "--max-tokens", 99)
    assert len(body["ids"]) <= 2


def test_json_of_export(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["export", "llama", "--out", "spoken", "--format", "onnx", "--context", CONTEXT]
    body = parsed(capsys, *args)
    assert body.keys() == {"folder", "options", "versions", "stages", "parity", "passed", "redone"}
    assert body["passed"] is True and body["folder"] == "spoken" and body["options"]["context"] == CONTEXT
    assert [s["stage"] for s in body["stages"]] == ["tokenizer", "weights", "onnx", "sanitize", "contract", "parity"]
    assert body["parity"][0]["summary"]["reference"].startswith("transformers 5.")
    capsys.readouterr()
    assert run(*args) == 0
    fits(capsys.readouterr().out, "spoken", "contract", "parity with transformers", "ort: passed")
    body = parsed(capsys, *args, "--no-parity")
    assert body["passed"] is True and body["redone"] == []  # the proof still holds


def fits(text: str, *words: str) -> None:
    longest = max(text.splitlines(), key=len)
    assert len(longest) <= 80, longest
    for word in words:
        assert word in text


def test_tables_fit_80_columns(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("devices") == 0
    fits(capsys.readouterr().out, "galaxy-s25", "sm8750", "Snapdragon 8 Elite")
    assert run("recipes") == 0
    fits(capsys.readouterr().out, "spark2_5", "gemma3_text")
    assert run("inspect", "spark") == 0
    fits(capsys.readouterr().out, "graph of 1 token ", "graph of 4 tokens", "past_key_{0-2,4-6}", "KV bytes")
    assert run("parity", "spark", "--tokens", 18, "--positions") == 0
    fits(capsys.readouterr().out, "parity with recipe", "positions", "caches", "ort: passed (at least 90 dB")


def test_end_of_a_qnn_export_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from exporters.show import print_export

    facts = {"npu_ops": {"Gemm": 714}, "binary_bytes": 123_456_789, "chip": "sc8380xp",
             "version": "onnxruntime-qnn 2.7.0, QAIRT 2.51.0"}  # fmt: skip
    names = ["weights", "onnx", "sanitize", "cut-prefill_128", "qnn-decode_part10", "qnn-prefill_128_part10"]
    stages = [
        {"stage": name, "seconds": 5000.0, "peak_rss_anon_bytes": 10**10, "bytes": 10**10, "facts": facts}
        for name in names
    ]
    print_export({"folder": "artifacts/x", "stages": stages, "parity": None})
    fits(capsys.readouterr().out, "qnn-prefill_128_part10", "714", "sc8380xp", "QAIRT 2.51.0")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ringstep import console\nfrom exporters.cli import cli\ncode = console.run(cli, ['--help'])\n"
        "heavy = {'numpy', 'torch', 'rich', 'onnx', 'onnxruntime', 'transformers', 'jinja2', 'psutil'}\n"
        "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)\n"
    )
    times = []
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        times.append(time.monotonic() - start)
        assert done.stderr == "[] 0\n" and "Commands:" in done.stdout
    assert min(times) < 0.5

import errno
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringstep import console
from ringstep.errors import RingstepError


@pytest.fixture(autouse=True)
def _default_settings() -> Iterator[None]:
    yield
    console.settings.quiet = console.settings.verbose = False


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def group(body: Callable[[], object]) -> click.Group:
    @click.group()
    def cli() -> None:
        pass

    @cli.command()
    @click.option("--device", type=click.Choice(["galaxy-s24", "qcs6490"]))
    def export(device: str | None) -> object:
        return body()

    return cli


def run(body: Callable[[], object], *args: str) -> int:
    return console.run(group(body), args or ("export",))


def raising(error: BaseException) -> Callable[[], object]:
    def body() -> object:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RingstepError("no such\nmodel\x1b[31mred"), "no such model [31mred"),
        (RingstepError("w\u202egnp.\u2066x"), "w gnp. x"),
        (KeyboardInterrupt(), "interrupted; nothing is half-written, the same command resumes"),
        (MemoryError(), "out of memory"),
        (MemoryError("Unable to allocate 8 GiB"), "out of memory: Unable to allocate 8 GiB"),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), "out/x: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "out: Permission denied"),
        (KeyError("x"), "internal error: KeyError: 'x' (run with -v for the traceback)"),
        (OSError("odd"), "internal error: OSError: odd (run with -v for the traceback)"),
        (click.ClickException("bad file."), "bad file"),
        (SystemExit("left"), "left"),
    ],
)
def test_every_failure_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], error: BaseException, line: str
) -> None:
    assert run(raising(error)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.strip() == f"ringstep: error: {line}"


def test_verbose_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    console.settings.verbose = True
    assert run(raising(KeyError("x"))) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("ringstep: error: internal error: KeyError: 'x'\n")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("exprot",), "no such command 'exprot' (did you mean export?); see `ringstep --help`"),
        (("zzz",), "no such command 'zzz'; see `ringstep --help`"),
        (
            ("export", "--devise", "x"),
            "no such option '--devise' (did you mean --device?); see `ringstep export --help`",
        ),
        (
            ("export", "--device", "galxy-s24"),
            "Invalid value for '--device': 'galxy-s24' is not one of 'galaxy-s24', 'qcs6490' "
            "(did you mean galaxy-s24?); see `ringstep export --help`",
        ),
        (("export", "--device"), "Option '--device' requires an argument"),
    ],
)
def test_a_mistyped_command_gets_a_hint(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], line: str
) -> None:
    assert run(lambda: None, *args) == 2
    assert capsys.readouterr().err == f"ringstep: error: {line}\n"


def test_exit_codes_pass_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: None) == 0
    assert run(raising(SystemExit(1))) == 1
    assert run(raising(SystemExit())) == 0
    assert run(lambda: click.get_current_context().exit(3)) == 3
    assert run(lambda: console.fail("no")) == 2
    assert capsys.readouterr().err == "ringstep: error: no\n"
    assert run(lambda: None, "--help") == 0
    assert "Usage: ringstep" in capsys.readouterr().out
    assert console.run(group(lambda: None), ()) == 2
    assert "Usage: ringstep" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_pipe_is_quiet(monkeypatch: pytest.MonkeyPatch, lines: int, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    code = f"""
import sys, click
from ringstep import console
@click.command()
def cli():
    for _ in range({lines}):
        print("line")
sys.exit(console.run(cli, []))
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout and child.stderr
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(10) == 1


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, ringstep.console, ringstep.devices, ringstep.manifest; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = {"torch", "transformers", "onnx", "onnxruntime", "numpy", "rich", "click", "psutil"}
    assert not heavy & set(loaded.split())


def test_a_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a" * 100, 1, "97.8 MB"], ["[red]b", 22, None], ["x\ny\x1b[1m", 333, "-"]]
    console.table("Outputs [of] a run", ["name", "ops", "size"], rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("a") >= 100 and "[red]b" in out and "[of]" in out and "\x1b" not in out
    assert re.search(r"\[red\]b +22\b", out) and re.search(r"x y \[1m +333\b", out)
    with pytest.raises(ValueError, match="as long as"):
        console.table("", ["a"], [["1", "2"]])
    console.table("", ["a", "b"], [])


@given(st.lists(st.lists(st.text(max_size=90), min_size=3, max_size=3), max_size=4))
def test_any_table_fits(rows: list[list[str]]) -> None:
    from rich.cells import cell_len

    stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        console.table("title", ["a", "b", "c"], rows)
        out = sys.stdout.getvalue()
    finally:
        sys.stdout = stdout
    assert all(cell_len(line) <= 80 for line in out.split("\n"))


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass
    class Report:
        path: Path
        snr: list[float]

    console.print_json({"r": Report(Path("a/b"), [1.5, float("inf")]), "n": np.float32(2), "a": np.arange(2)})
    assert json.loads(capsys.readouterr().out) == {
        "r": {"path": "a/b", "snr": [1.5, None]},
        "n": 2.0,
        "a": [0, 1],
    }
    with pytest.raises(TypeError):
        console.print_json(object())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"),
        (9_996, "10.0 kB"), (99_960, "100 kB"),
        (999_499, "999 kB"), (999_500, "1.00 MB"), (97.8e6, "97.8 MB"), (2.15e9, "2.15 GB"),
        (1e19, "10000 PB"),
    ],
)  # fmt: skip
def test_human_bytes(count: float, text: str) -> None:
    assert console.human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 µs"), (0.0123, "12.3 ms"), (0.9996, "1.0 s"), (3.44, "3.4 s"), (59.96, "1 min 00 s"),
        (125, "2 min 05 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 00 min"), (3725, "1 h 02 min"),
    ],
)  # fmt: skip
def test_human_seconds(seconds: float, text: str) -> None:
    assert console.human_seconds(seconds) == text


@given(st.integers(0, 10**17))
def test_sizes_keep_three_digits(count: int) -> None:
    number, unit = console.human_bytes(count).split()
    factor = 1000.0 ** ("B", "kB", "MB", "GB", "TB", "PB").index(unit)
    assert float(number) * factor == pytest.approx(count, rel=0.006)
    assert float(number) < 1000


def test_progress_off_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with console.progress("quick", 3) as advance:
        advance(1)
        now = 1.0
    with console.progress("slow"):
        now = 4.5
    console.settings.quiet = True
    with console.progress("slow too"):
        now = 9.0
    console.say("nothing")
    console.warn("odd rope")
    assert capsys.readouterr().err == "slow: 3.5 s\nringstep: warning: odd rope\n"


def test_progress_off_a_terminal_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with console.progress("calibrating", 200) as advance:
        for seconds in (10.0, 29.0, 31.0, 40.0, 62.0):
            now = seconds
            advance(30)
    with console.progress("without a total") as advance:
        now = 95.0
        advance(1)
    console.settings.quiet = True
    with console.progress("quiet", 1) as advance:
        now = 200.0
        advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating: 45 % after 31.0 s", "calibrating: 75 % after 1 min 02 s", "calibrating: 1 min 02 s",
        "without a total: after 33.0 s", "without a total: 33.0 s",
    ]  # fmt: skip


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError), console.progress("outer [x]", 2) as advance:
        advance(1)
        with console.progress("inner", 5):
            console.say("a line [y]")
        raise ValueError
    shown = terminal.getvalue()
    assert "outer [x]" in shown and "inner" in shown and "a line [y]" in shown
    assert console._live is None
    console.settings.quiet = True
    with console.progress("quiet"):
        pass
    assert terminal.getvalue() == shown

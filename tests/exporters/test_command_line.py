"""What Tab offers, asked as bash asks; that every option says what it is; that bad input is refused at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from exporters.cli import cli

ROOT = Path(__file__).parents[2]


def offered(*words: str) -> list[str]:
    """What bash is told for the last of these words, as TYPE,VALUE."""
    code = "from exporters.cli import main\nmain()"
    asked = {"_RINGSTEP_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["ringstep", *words]),
             "COMP_CWORD": str(len(words)), "PATH": "/usr/bin:/bin"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=asked)
    assert done.stderr == "", done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["exp"], ["plain,export"]),
        (["export", "smol"], ["plain,smollm2-135m", "file,smol"]),
        (["export", "x", "--device", "qrd-8-gen-"], ["plain,qrd-8-gen-1", "plain,qrd-8-gen-2", "plain,qrd-8-gen-3"]),
        (["export", "x", "--precision", "w8"], ["plain,w8a16"]),
        (["quantize", "x", "--scheme", "w8"], ["plain,w8a16", "file,w8"]),
        (["quantize", "x", "--format", "gptq,mat"], ["plain,gptq,matmulnbits"]),
        (["quantize", "x", "--format", "gptq,gp"], []),
        (["schemes", "int4-g6"], ["plain,int4-g64"]),
        (["parity", "--only", "qwen"], ["plain,qwen3-w12"]),
        (["sanitize", "x.onnx", "--target", "xn"], ["plain,xnnpack"]),
        (["sanitize", "x.onnx", "--skip", "nan-"], ["plain,nan-guards"]),
        (["sanitize", "x.onnx", "--with", "split-"], ["plain,split-projections", "plain,split-heads"]),
        (["lint", "x.onnx", "--chip", "sm8650"], ["plain,sm8650"]),
        (["ops", "--chip", "sm8750"], ["plain,sm8750"]),
    ],
)
def test_tab_offers_names_and_files(words: list[str], found: list[str]) -> None:
    assert offered(*words) == found


def test_every_option_is_explained() -> None:
    for command in cli.commands.values():
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert [option.opts for option in options if not option.help] == [], command.name
        assert command.get_short_help_str(80).rstrip(".") in (command.short_help or command.help or ""), command.name


@pytest.mark.parametrize("words", [["bisect", "nowhere"], ["parity", "nowhere"], ["inspect", "nowhere"]])
def test_no_artifact_is_said_before_anything_heavy_is_waited_for(words: list[str]) -> None:
    code = (
        "import sys\nfrom ringstep import console\nfrom exporters.cli import cli\n"
        f"code = console.run(cli, {words!r})\n"
        "print(sorted({'torch', 'transformers', 'onnx_ir', 'onnxruntime'} & set(sys.modules)), code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[] 2\n" and "nowhere" in done.stderr, done

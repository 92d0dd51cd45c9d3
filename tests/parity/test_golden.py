"""Goldens survive a round trip; files that are none, damaged or about something else are refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ringstep.contract import CacheSpec, GraphSpec, MaskSpec, PrefixSpec, RotarySpec, StepSpec, io_tensors
from ringstep.errors import RingstepError
from ringstep.parity.golden import FORMAT, Golden, fit, golden_bytes, load_golden, save_golden, shortened
from ringstep.parity.report import Truth

VOCAB, TOKENS, PROMPT = 11, 6, 4
FACTS = {"model": "m", "checkpoint": "abc", "source": "by hand", "ringstep": "0", "transformers": "1", "torch": "2"}


def golden() -> Golden:
    """Two layers, the second of which holds the last three positions only."""
    random = np.random.default_rng(0)
    entry = lambda m: random.standard_normal((2, m, 4)).astype(np.float32)
    caches = [(np.arange(TOKENS), entry(TOKENS), entry(TOKENS)), (np.arange(3, 6), entry(3), entry(3))]
    logits = random.standard_normal((TOKENS, VOCAB)).astype(np.float32)
    return Golden(Truth("by hand", [1, 2, 3, 4, 5, 6, 7], logits, caches), PROMPT, FACTS)


def spec(**changes: Any) -> StepSpec:
    rotary, masks = (RotarySpec("r", (0.5,)),), (MaskSpec("full", "append", 15, None),)
    caches = tuple(CacheSpec(i, "append", 15, 2, 4, "float32", "r", "full") for i in range(changes.pop("layers", 2)))
    vocab = changes.pop("vocab", VOCAB)
    graph = GraphSpec(1, *io_tensors(1, vocab, 4, "float32", rotary, masks, caches, True))
    return StepSpec(recipe="t", model="t", vocab=vocab, hidden=4, context=16, dtype="float32", mask_value=-1e4, eos=(),
                    rotary=rotary, masks=masks, caches=caches, graphs=(graph,), **changes)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_golden(golden(), tmp_path / "g.safetensors")
    return tmp_path / "g.safetensors"


def test_round_trip(file: Path) -> None:
    want, have = golden(), load_golden(file)
    assert have.truth.ids == want.truth.ids and have.truth.source == "by hand"
    assert (have.prompt, have.facts, have.fed) == (PROMPT, FACTS, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(have.truth.logits, want.truth.logits)
    for (p, k, v), (q, m, n) in zip(want.truth.caches, have.truth.caches, strict=True):
        np.testing.assert_array_equal(p, q)
        np.testing.assert_array_equal(k, m)
        np.testing.assert_array_equal(v, n)
    assert os.listdir(file.parent) == [file.name]  # nothing temporary is left
    full = golden_bytes(TOKENS, VOCAB, [(2, 4)] * 2)
    assert abs(file.stat().st_size - full) < 1200  # the header, and the layer that holds half


def test_it_is_plain_safetensors(file: Path) -> None:
    """Read without ringstep."""
    tensors = load_file(file)
    assert tensors["ids"].tolist() == [1, 2, 3, 4, 5, 6, 7] and tensors["logits"].shape == (TOKENS, VOCAB)
    assert tensors["positions.1"].tolist() == [3, 4, 5] and tensors["keys.1"].shape == (2, 3, 4)
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    assert header["__metadata__"] == {"format": FORMAT, "version": "1", "prompt": "4", **FACTS}


def test_shortened() -> None:
    cut = shortened(golden(), 4)
    assert cut.fed == [1, 2, 3, 4] and cut.truth.ids == [1, 2, 3, 4, 5] and cut.prompt == PROMPT
    assert [len(p) for p, _, _ in cut.truth.caches] == [4, 1] and cut.truth.caches[1][1].shape == (2, 1, 4)
    assert shortened(golden(), 2).prompt == 3  # nothing of the answer is left
    assert shortened(golden(), 6).truth.ids == golden().truth.ids


Change = Callable[[dict[str, np.ndarray], dict[str, str]], Any]
BAD: dict[str, tuple[Change, str]] = {
    "no logits": (lambda t, m: t.pop("logits"), "no tensor logits"),
    "no ids": (lambda t, m: t.pop("ids"), "no tensor ids"),
    "another dtype": (lambda t, m: t.update(logits=t["logits"].astype(np.float64)), "logits is float64"),
    "another rank": (lambda t, m: t.update(logits=t["logits"].reshape(-1)), r"logits is float32 \[66\]"),
    "no tokens": (lambda t, m: t.update(logits=t["logits"][:0]), "logits of 0 tokens"),
    "too few logits": (lambda t, m: t.update(logits=t["logits"][:3]), "logits of 3 tokens beside 7 ids"),
    "too many logits": (lambda t, m: t.update(ids=t["ids"][:4]), "logits of 6 tokens beside 4 ids"),
    "nan logits": (lambda t, m: t["logits"].__setitem__((2, 3), np.nan), "logits holds values that are not finite"),
    "infinite keys": (lambda t, m: t["keys.0"].__setitem__((0, 0, 0), np.inf), "keys.0 holds values that are not fin"),
    "id beyond": (lambda t, m: t["ids"].__setitem__(2, VOCAB), "ids outside its vocabulary of 11"),
    "negative id": (lambda t, m: t["ids"].__setitem__(2, -1), "ids outside its vocabulary"),
    "keys of another length": (lambda t, m: t.update({"keys.1": t["keys.1"][:, :2]}), "in layer 1"),
    "values of other heads": (lambda t, m: t.update({"values.1": t["values.1"][:1]}), "in layer 1"),
    "positions out of order": (lambda t, m: t["positions.0"].__setitem__(0, 3), "positions of layer 0 out of order"),
    "positions never fed": (lambda t, m: t["positions.1"].__setitem__(2, 99), "positions of layer 1 out of order"),
    "a layer left out": (lambda t, m: [t.pop(f"{w}.0") for w in ("positions", "keys", "values")], "no tensor"),
    "half a layer": (lambda t, m: t.pop("keys.1"), "belong to no layer"),
    "no prompt": (lambda t, m: m.pop("prompt"), "a prompt of '' tokens"),
    "prompt beyond": (lambda t, m: m.update(prompt="8"), "a prompt of '8' tokens in a text of 7"),
    "prompt no number": (lambda t, m: m.update(prompt="٣"), "a prompt of"),
    "another format": (lambda t, m: m.update(format="other"), "no golden of this ringstep"),
    "a later version": (lambda t, m: m.update(version="2"), "no golden of this ringstep"),
    "no metadata": (lambda t, m: m.clear(), "no golden of this ringstep"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damaged_files(case: str, file: Path) -> None:
    change, message = BAD[case]
    tensors = {name: array.copy() for name, array in load_file(file).items()}
    facts = {"format": FORMAT, "version": "1", "prompt": str(PROMPT), **FACTS}
    change(tensors, facts)
    save_file(tensors, file, facts)
    with pytest.raises(RingstepError, match=message) as caught:
        load_golden(file)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path, file: Path) -> None:
    whole = file.read_bytes()
    cases = {"cut": whole[: len(whole) // 2], "header alone": whole[:40], "empty": b"", "text": b"hello " * 100,
             "huge header": (1 << 62).to_bytes(8, "little") + whole[8:]}  # fmt: skip
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RingstepError, match="cannot be read as a golden") as caught:
            load_golden(tmp_path / name)
        assert "\n" not in str(caught.value), name
    with pytest.raises(RingstepError, match="no such file; make it with ringstep reference"):
        load_golden(tmp_path / "nowhere")
    with pytest.raises(RingstepError):
        load_golden(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RingstepError, match="not an ordinary file"):
        load_golden(tmp_path / "pipe")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="cannot be written"):
        save_golden(golden(), tmp_path / "nowhere" / "g.safetensors")


def test_fit() -> None:
    fit(golden(), spec(), "abc")
    fit(golden(), spec(), None)
    for own, sha, message in (
        (spec(), "abd", "another checkpoint"), (spec(vocab=12), "abc", "a vocabulary of 11, the artifact's is 12"),
        (spec(layers=3), "abc", "2 layers, the artifact has 3"),
        (spec(prefix=PrefixSpec("sink.bin", (9,))), "abc", r"begins with \[1\].*--begin 9"),
    ):  # fmt: skip
        with pytest.raises(RingstepError, match=message):
            fit(golden(), own, sha)
    fit(golden(), spec(prefix=PrefixSpec("sink.bin", (1,))), "abc")

"""Tokenizer and chat template: a template comes with a model and is not trusted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ringstep.checkpoint import open_checkpoint
from ringstep.errors import RingstepError
from ringstep.text import Text, render

MESSAGES = [{"role": "user", "content": "Hi"}]
SMOLLM2 = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


def refused(template: str) -> str:
    """The refusal, one line, within seconds."""
    start = time.monotonic()
    with pytest.raises(RingstepError) as caught:
        render(template, MESSAGES, {})
    line, _, log = str(caught.value).partition("; log: ")
    if log:
        Path(log).unlink()
    assert time.monotonic() - start < 30
    assert "\n" not in line and line.startswith("chat_template.jinja: ") and len(line) < 900
    return line


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "tokenizer").mkdir()
    for name, content in open_checkpoint("smollm2-135m").tokenizer_files().items():
        (folder / "tokenizer" / name).write_bytes(content)
    return Text(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set x = namespace(a=1) %}{{ x.__class__.__bases__ }}",
    ],
)
def test_attack_reaches_nothing(template: str) -> None:
    try:
        shown = render(template, MESSAGES, {})
    except RingstepError as error:
        assert "\n" not in str(error)
    else:
        # The sandbox may give an undefined value, which is printed as nothing.
        assert not any(word in shown for word in ("class", "object", "module", "builtins", "Environment"))
    assert MESSAGES == [{"role": "user", "content": "Hi"}]


def test_attack_is_refused_by_name() -> None:
    assert "__class__" in refused("{{ ''.__class__.__mro__ }}") or "unsafe" in refused("{{ ''.__class__.__mro__ }}")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 'x' * 10 ** 11 }}",
    ],
    ids=["range", "nested", "recursion", "memory"],
)
def test_endless_template_ends(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringstep.text.TIMEOUT_SECONDS", 1.5)
    refused(template)


def test_broken_template_says_why() -> None:
    assert "endif" in refused("{% if x %}")
    assert "is undefined" in refused("{{ nothing.there.at.all }}")
    assert refused("{{ raise_exception('only\nuser messages') }}").endswith("only")
    assert "division" in refused("{{ 1 / 0 }}")


def test_plain_templates() -> None:
    template = "{{ bos_token }}{% for m in messages %}\n  [{{ m.role }}] {{ m['content'] }}\n{% endfor %}"
    assert render(template, MESSAGES, {"bos_token": "<s>"}) == "<s>  [user] Hi\n"
    assert render("{{ add_generation_prompt }}{{ strftime_now('%Y') }}", MESSAGES, {}).startswith("True20")


def test_smollm2_template(smollm2: Text) -> None:
    ids = smollm2.chat("Hi")
    assert smollm2.template is not None and render(smollm2.template, MESSAGES, smollm2.specials()) == SMOLLM2
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == SMOLLM2
    assert ids == list(smollm2.tokenizer.encode(SMOLLM2, add_special_tokens=False).ids)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2  # <|im_start|> and <|im_end|> are one token each
    assert smollm2.specials()["eos_token"] == "<|im_end|>"


def test_words_of_a_template_in_a_prompt_are_text(smollm2: Text) -> None:
    ids = smollm2.chat("{{ 1 / 0 }} {% if %}")
    assert "{{ 1 / 0 }} {% if %}" in smollm2.decode(ids)


def test_partial_utf8(smollm2: Text) -> None:
    """A character of several tokens shows as U+FFFD until the last one is there."""
    text = "né 😀 你"
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    shown = [smollm2.decode(ids[:count]) for count in range(1, len(ids) + 1)]
    assert any(part.endswith("�") for part in shown)
    assert all(text.startswith(part.rstrip("�")) for part in shown)
    assert smollm2.decode([]) == ""


def test_no_template_is_plain_text(smollm2: Text) -> None:
    smollm2.template, kept = None, smollm2.template
    try:
        assert smollm2.chat("Hi there") == smollm2.encode("Hi there")
    finally:
        smollm2.template = kept


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="this artifact has no tokenizer"):
        Text(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(RingstepError, match=r"tokenizer\.json: no readable tokenizer") as caught:
        Text(tmp_path)
    assert "\n" not in str(caught.value)


UNREADABLE = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}  # a panic in Rust
MUTE = {
    "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 5, "direction": "Right"},  # another
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "absent"},
}


@pytest.mark.parametrize("changes", [UNREADABLE, *({name: value} for name, value in MUTE.items())])
def test_a_tokenizer_that_panics_or_raises_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "tokenizer").mkdir()
    model = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    body = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps(body | changes))
    with pytest.raises(RingstepError, match=r"tokenizer\.json") as caught:
        Text(tmp_path).encode("b b b b")
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_and_a_template_that_is_no_text(smollm2: Text, tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="cannot encode this text"):
        smollm2.encode("\udcff")
    (tmp_path / "tokenizer").mkdir()
    smollm2.tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    (tmp_path / "tokenizer/chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(RingstepError, match=r"chat_template\.jinja is not UTF-8 text"):
        Text(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"bos_token": null}'])
def test_bad_generation_file_leaves_tokens_empty(smollm2: Text, tmp_path: Path, content: bytes) -> None:
    smollm2.generation, kept = tmp_path / "generation.json", smollm2.generation
    smollm2.generation.write_bytes(content)
    try:
        assert smollm2.specials() == {"bos_token": "", "eos_token": ""}
    finally:
        smollm2.generation = kept

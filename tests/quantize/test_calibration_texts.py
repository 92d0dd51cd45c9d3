"""Calibration text: what ships, what a user brings, and how it is packed into sequences."""

from __future__ import annotations

import codecs
import fnmatch
import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

import quantize.corpus as corpus
from quantize.corpus import FOLDER, HELD_OUT, PASSAGE, Document, fingerprint, held_out, load_texts, mixed, sequences
from ringstep.checkpoint import open_checkpoint
from ringstep.errors import RingstepError
from ringstep.text import Text

IM_START, VOCAB = 1, 49152  # SmolLM2's
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
BROKEN = "{{ raise_exception('System role not supported') }}"


def text_of(folder: Path, files: dict[str, bytes]) -> Text:
    (folder / "tokenizer").mkdir()
    for name, content in files.items():
        (folder / "tokenizer" / name).write_bytes(content)
    return Text(folder)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return text_of(tmp_path_factory.mktemp("smollm2"), open_checkpoint("smollm2-135m").tokenizer_files())


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A tokenizer of one id a byte-sized character, which is its code point."""
    vocabulary = {chr(code): code for code in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    return text_of(tmp_path_factory.mktemp("letters"), {"tokenizer.json": tokenizer.to_str().encode()})


def plain(*texts: str, kind: str = "text") -> list[Document]:
    return [Document(kind, "here", text) for text in texts]


def refusal(path: Path | str) -> str:
    with pytest.raises(RingstepError) as caught:
        load_texts(path)
    line = str(caught.value)
    assert "\n" not in line and str(path) in line and len(line) < len(str(path)) + 200
    return line


# What ships


def test_what_ships_is_enough_and_of_all_kinds(smollm2: Text) -> None:
    documents = load_texts()
    counts = Counter(document.kind for document in documents)
    assert set(counts) == {"chat", "prose", "technical", "general", "code", "structured", "languages"}
    found = sequences(documents, smollm2, length=512, tokens=8192, prefix=[IM_START], vocab=VOCAB)
    assert len(found) == 16 and {len(ids) for ids in found} == {512} and {ids[0] for ids in found} == {IM_START}
    assert sum(len(document.messages) > 2 for document in documents) >= 10
    together = "".join(document.text for document in documents)
    for script in ("[а-я]{5}", "[ぁ-ん]{2}", "[一-鿿]{4}", "[ء-ي]{3}", "[ऀ-ॿ]{3}", "ß", "más", "ç", "ã", "à"):
        assert re.search(script, together), script


def test_the_beginning_of_what_ships_has_all_kinds(smollm2: Text) -> None:
    beginning = mixed(load_texts())[:24]
    assert len({document.kind for document in beginning}) == 7
    assert len(sequences(load_texts(), smollm2, length=128, tokens=128)) == 1


def test_held_out_text_is_long_enough_and_shares_nothing_with_calibration(smollm2: Text) -> None:
    assert len(smollm2.encode(held_out())) >= 700
    pieces = lambda text: {tuple(words[i : i + 5]) for words in [text.split()] for i in range(len(words) - 4)}
    measured = pieces(held_out())
    for document in load_texts():
        seen = pieces(document.text or " ".join(content for _, content in document.messages))
        assert not seen & measured, document.where
    assert HELD_OUT.name not in corpus.SHIPPED


def test_every_shipped_file_is_read_and_packaged() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*corpus.SHIPPED, HELD_OUT.name}
    with (FOLDER.parents[1] / "pyproject.toml").open("rb") as stream:
        patterns = tomllib.load(stream)["tool"]["setuptools"]["package-data"]["*"]
    for path in FOLDER.iterdir():
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), path.name


# A user's file


def test_plain_text_is_cut_at_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.TXT"
    long = "word " * (PASSAGE // 5) + "end"
    path.write_text(f"\n\none\ntwo\n\nthree\n\n\n  indented\n \n\n{long}\n\nlast  \n\n", "utf-8")
    assert [d.text for d in load_texts(path)] == [
        "one\ntwo\n\nthree", "  indented", "word " * (PASSAGE // 5 - 1) + "word", "end\n\nlast",
    ]  # fmt: skip
    assert {(d.kind, d.where, d.messages) for d in load_texts(path)} == {("text", str(path), ())}


def test_bom_and_line_ends_do_not_matter(tmp_path: Path) -> None:
    texts = []
    for name, raw in (("a", "eins\nzwei ü"), ("b", "eins\r\nzwei ü"), ("c", "eins\rzwei ü")):
        for mark in (b"", codecs.BOM_UTF8):
            path = tmp_path / f"{name}{len(mark)}.txt"
            path.write_bytes(mark + raw.encode())
            texts += [d.text for d in load_texts(path)]
    assert texts == ["eins\nzwei ü"] * 6


def test_jsonl_holds_texts_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        {"text": "one\n\ntwo", "id": 7},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u2028c", "name": "x"}]},
        {"text": "  "}, {"messages": [{"role": "user", "content": " "}]},
    ]  # fmt: skip
    path.write_text("\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    text, chat = load_texts(path)
    assert (text.kind, text.text, text.where) == ("text", "one\n\ntwo", f"{path} line 1")
    assert (chat.kind, chat.text, chat.where) == ("chat", "", f"{path} line 3")
    assert chat.messages == (("user", "a"), ("assistant", "b\u2028c"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\t\n\n ", "holds no text"),
        (codecs.BOM_UTF8, "holds no text"),
        ("Grüße".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        (codecs.BOM_UTF16_BE + "Hi".encode("utf-16-be"), "is UTF-16 text"),
        ("Hi".encode("utf-32"), "is UTF-32 text"),
        ("Hi there".encode("utf-16-le"), "is no text: byte 1 is 0"),
        ("Grüße".encode("latin-1"), "is not UTF-8: byte 2 is 0xfc; save it as UTF-8"),
        (b"ok\n" * 40000 + b"\x93quoted\x94", "is not UTF-8: byte 120000 is 0x93"),
        ("abc€".encode()[:-1], "is not UTF-8: byte 3 is 0xe2"),
        (b"\x7fELF\x02\x01\x01\0\0\0", "is no text: byte 7 is 0"),
        (b"GGUF\x03\0\0\0", "is no text: byte 5 is 0"),
    ],
)
def test_what_is_no_utf8_text_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    for suffix in (".txt", ".jsonl"):
        path = tmp_path / f"t{suffix}"
        path.write_bytes(content)
        assert message in refusal(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON: "),
        ('{"text": "a"} x', "is not JSON: Extra data"),
        ("plain words", "is not JSON: "),
        ("[" * 100_000, "is not JSON: nested too deep"),
        ('{"text": ' + "9" * 5000 + "}", "is not JSON: "),
        ('"text"', "must be an object with either text or messages"),
        ("[]", "must be an object with either text or messages"),
        ("null", "must be an object with either text or messages"),
        ("{}", "must be an object with either text or messages"),
        ('{"id": 1, "texts": "a"}', "must be an object with either text or messages (did you mean text?)"),
        ('{"text": "a", "messages": []}', "must be an object with either text or messages"),
        ('{"text": null}', "text must be a string, not NoneType"),
        ('{"text": ["a"]}', "text must be a string, not list"),
        ('{"text": "\\ud83d"}', "text holds half a surrogate pair"),
        ('{"messages": []}', "messages must be a list of {role, content} objects, not empty"),
        ('{"messages": "hi"}', "messages must be a list of {role, content} objects"),
        ('{"messages": ["hi"]}', "messages[0] must be an object with role and content"),
        ('{"messages": [{"role": "user"}]}', "messages[0] must be an object with role and content"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}',
         "messages[1] role must be system, user, assistant, tool, not 'bot'"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "messages[0] role must be"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0] content must be a string, not NoneType"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "content must be a string, not list"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "messages[0] content holds half a surrogate pair"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + '\n{"text": "fine"}\n', "utf-8")
    assert f"{path} line 3" in refusal(path) and message in refusal(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "book.pdf").write_bytes(b"words")
    os.mkfifo(tmp_path / "pipe.txt")
    os.symlink("/dev/zero", tmp_path / "zero.txt")
    os.symlink("loop.txt", tmp_path / "loop.txt")
    with (tmp_path / "huge.jsonl").open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    for name, message in (
        ("missing.txt", "No such file"), ("missing", "No such file"), ("folder.txt", "is a folder"),
        ("", "is a folder"), ("book.pdf", "neither .txt nor .jsonl"), ("pipe.txt", "not an ordinary file"),
        ("loop.txt", "symbolic links"), ("zero.txt", "not an ordinary file"),
        ("huge.jsonl", "is 67108865 bytes"), ("a" * 300 + ".txt", "too long"),
    ):  # fmt: skip
        assert message in refusal(tmp_path / name), name


def test_a_long_file_without_a_break_takes_no_time(tmp_path: Path) -> None:
    for name, content in (("line", "x" * 20_000_000), ("blank", "\n" * 2_000_000 + "x"), ("space", " " * 20_000_000)):
        (tmp_path / f"{name}.txt").write_text(content)
    assert len(load_texts(tmp_path / "line.txt")) == 10_000
    assert [d.text for d in load_texts(tmp_path / "blank.txt")] == ["x"]
    assert "holds no text" in refusal(tmp_path / "space.txt")


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab \n\t\r\f\u2028\u3000ü漢")), st.integers(1, 12))
def test_no_visible_character_is_lost(tmp_path_factory: pytest.TempPathFactory, text: str, passage: int) -> None:
    path = tmp_path_factory.getbasetemp() / "lost.txt"
    path.write_text(text, "utf-8", newline="")
    before, corpus.PASSAGE = corpus.PASSAGE, passage
    try:
        documents = load_texts(path)
    except RingstepError:
        documents = []
    finally:
        corpus.PASSAGE = before
    assert "".join("".join(d.text.split()) for d in documents) == "".join(text.split())
    assert all(d.text.strip() and len(d.text) <= passage + 2 for d in documents)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode), st.sampled_from([".txt", ".jsonl"]))
def test_any_bytes_are_text_or_one_line_of_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"bytes{suffix}"
    path.write_bytes(content)
    try:
        assert load_texts(path)
    except RingstepError as error:
        assert str(path) in str(error) and "\n" not in str(error)


# Sequences


def test_sequences_hold_the_documents_behind_the_prefix(letters: Text) -> None:
    found = sequences(plain("aaa", "bb", "cccccc"), letters, length=5, tokens=10, prefix=[7, 8])
    assert [ids[:2] for ids in found] == [[7, 8], [7, 8]]
    bodies = ["".join(map(chr, ids[2:])) for ids in found]
    assert len(found) == 2 and all(len(body) == 3 for body in bodies)
    order = "".join(d.text for d in mixed(plain("aaa", "bb", "cccccc")))
    assert bodies[0] == order[:3]


def test_a_sequence_begins_with_a_fresh_document_and_rests_come_last(letters: Text) -> None:
    # Golden steps: .618, .236, .854, so the second document comes first.
    found = sequences(plain("aaaaa", "bbbbb", "ccccc"), letters, length=3, tokens=15)
    assert ["".join(map(chr, ids)) for ids in found] == ["bbb", "aaa", "ccc", "bba", "cca"]


def test_a_prefix_that_a_document_begins_with_is_not_doubled(letters: Text) -> None:
    found = sequences(plain("<a<", "<b<"), letters, length=4, tokens=4, prefix=[ord("<")])
    assert "".join(map(chr, found[0])) == "<b<<"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.text(st.characters(min_codepoint=97, max_codepoint=255), min_size=1)),
             min_size=1, max_size=12),
    st.integers(1, 9), st.integers(0, 3), st.integers(1, 60),
)  # fmt: skip
def test_nothing_is_used_twice_and_what_is_missing_is_told(
    letters: Text, entries: list[tuple[str, str]], room: int, prefix: int, tokens: int
) -> None:
    documents = [Document(kind, "here", text) for kind, text in entries]
    length, wanted = room + prefix, -(-tokens // (room + prefix))
    every = Counter(code for _, text in entries for code in map(ord, text))
    head = list(range(prefix))  # below any letter
    if every.total() < wanted * room:
        have = every.total() // room * length + every.total() % room
        with pytest.raises(RingstepError, match=rf"has {have} tokens, needs at least {wanted * length} "):
            sequences(documents, letters, length=length, tokens=tokens, prefix=head)
        return
    found = sequences(documents, letters, length=length, tokens=tokens, prefix=head)
    assert len(found) == wanted and all(len(ids) == length and ids[:prefix] == head for ids in found)
    assert Counter(code for ids in found for code in ids[prefix:]) <= every
    assert found == sequences(documents, letters, length=length, tokens=tokens, prefix=head)
    fewer = sequences(documents, letters, length=length, tokens=1, prefix=head)
    assert found[:1] == fewer


@pytest.mark.parametrize("counts", [{"a": 3, "b": 30}, {"a": 1, "b": 1}, {"a": 10, "b": 20, "c": 40}, {"a": 5}])
def test_every_beginning_is_mixed_in_proportion(counts: dict[str, int]) -> None:
    documents = [Document(kind, str(i), "t") for kind, count in counts.items() for i in range(count)]
    order = mixed(documents)
    assert sorted(map(id, order)) == sorted(map(id, documents))
    for size in range(1, len(order) + 1):
        for kind, count in counts.items():
            share = sum(d.kind == kind for d in order[:size])
            assert abs(share - size * count / len(order)) < len(counts)
    # Any ten in a row come from all over their file.
    places = [int(d.where) for d in order if d.kind == "b"][:10]
    assert not places or max(places) - min(places) >= min(counts.get("b", 0), 10) // 2


def test_a_long_file_is_only_encoded_as_far_as_needed(letters: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = letters.encode
    monkeypatch.setattr(letters, "encode", lambda text: encoded.append(text) or encode(text))
    sequences(plain(*["abcdef"] * 1000), letters, length=4, tokens=8)
    assert len(encoded) == 2


@pytest.mark.parametrize(
    ("length", "tokens", "prefix"), [(4, 8, [1, 2, 3, 4]), (0, 8, []), (-5, 8, []), (4, 0, []), (4, -1, [])]
)
def test_sizes_that_hold_nothing_are_refused(letters: Text, length: int, tokens: int, prefix: list[int]) -> None:
    with pytest.raises(RingstepError, match="give a longer sequence and a positive number"):
        sequences(plain("abc"), letters, length=length, tokens=tokens, prefix=prefix)


def test_ids_of_another_model_are_refused(letters: Text) -> None:
    assert sequences(plain("az"), letters, length=2, tokens=2, vocab=ord("z") + 1)
    with pytest.raises(RingstepError, match=r"^here: token 122 is outside the model's vocabulary of 122; tokenizer"):
        sequences(plain("az"), letters, length=2, tokens=2, vocab=ord("z"))
    for wrong in (-1, 122):
        with pytest.raises(RingstepError, match=rf"^the prefix: token {wrong} is outside"):
            sequences(plain("aa"), letters, length=2, tokens=2, prefix=[wrong], vocab=122)


# Conversations


def chat(*contents: str) -> Document:
    roles = ("user", "assistant")
    return Document("chat", "c.jsonl line 1", messages=tuple((roles[i % 2], c) for i, c in enumerate(contents)))


def with_template(letters: Text, template: str | None, monkeypatch: pytest.MonkeyPatch) -> Text:
    monkeypatch.setattr(letters, "template", template)
    return letters


def test_conversations_go_through_the_template(letters: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    text = with_template(letters, TEMPLATE, monkeypatch)
    want = "<user>hi</user><assistant>yo</assistant>"
    (ids,) = sequences([chat("hi", "yo")], text, length=len(want), tokens=1)
    assert "".join(map(chr, ids)) == want


def test_without_a_template_conversations_are_plain(letters: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    text = with_template(letters, None, monkeypatch)
    (ids,) = sequences([chat("hi", "yo")], text, length=6, tokens=1)
    assert "".join(map(chr, ids)) == "hi\n\nyo"


def test_the_template_writes_the_special_tokens_and_the_tokenizer_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(models.BPE({chr(code): code for code in range(256)}, []))
    tokenizer.post_processor = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", ord("^"))])
    text = text_of(tmp_path, {"tokenizer.json": tokenizer.to_str().encode()})
    assert sequences(plain("ab"), text, length=3, tokens=1) == [list(b"^ab")]
    text = with_template(text, "^" + TEMPLATE, monkeypatch)
    assert sequences([chat("a")], text, length=9, tokens=1) == [list(b"^<user>a<")]


def test_smollm2_sees_its_own_chat_format(smollm2: Text) -> None:
    (ids,) = sequences([chat("Hi", "Hello")], smollm2, length=34, tokens=1, prefix=[IM_START], vocab=VOCAB)
    said = smollm2.tokenizer.decode(ids, skip_special_tokens=False)
    assert said.startswith("<|im_start|>system\nYou are") and said.count("<|im_start|>system") == 1
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>" in said


def test_a_template_that_refuses_is_named_with_the_line(letters: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    text = with_template(letters, BROKEN, monkeypatch)
    with pytest.raises(RingstepError, match=r"^c.jsonl line 1: chat_template.jinja: .*System role not supported"):
        sequences([chat("hi")], text, length=2, tokens=1)


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    seen: set[str] = set()
    variants: list[Any] = [plain("a", "b"), plain("ab"), plain("b", "a"), [chat("a", "b")], [chat("ab")], []]
    for documents in variants:
        seen.add(fingerprint(documents))
    assert len(seen) == len(variants)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("same")
    assert fingerprint(load_texts(tmp_path / "one.txt")) == fingerprint(load_texts(tmp_path / "two.txt"))

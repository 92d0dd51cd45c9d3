"""Calibration text: what ships with the package, what a user brings, and both as sequences of token ids.

texts/ holds conversations, prose, code, tables and ten languages, all written for this project, and heldout.txt, which
benchmarks measure on and calibration never sees.

    load_texts ─ [Document] ─ mixed ─▶ tokens ─▶ | prefix, document, document, doc| prefix, document, ... |
                                                   one sequence of `length` ids
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ringstep import child
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import ordinary_size
from ringstep.text import MEMORY_BYTES, TIMEOUT_SECONDS, Text, _render, refusing

FOLDER = Path(__file__).with_name("texts")
SHIPPED = ("chat.jsonl", "prose.txt", "technical.txt", "general.txt", "code.txt", "structured.txt", "languages.txt")
HELD_OUT = FOLDER / "heldout.txt"
LIMIT_BYTES = 64 << 20  # a book has one; calibration reads a few kilobytes of it
PASSAGE = 2000  # characters, about 500 tokens: context enough, and short enough to mix
ROLES = ("system", "user", "assistant", "tool")
GOLDEN = 0.6180339887498949  # steps by it spread evenly over a range, wherever they stop
BOMS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


@dataclass(frozen=True)
class Document:
    """A piece of text, or a conversation."""

    kind: str
    """Documents of different kinds are mixed: chat, prose, code, ..."""
    where: str
    """File and place, for messages."""
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    """Roles and contents in their order; the text is empty then."""


def load_texts(path: Path | str | None = None) -> list[Document]:
    """Read a .txt or .jsonl file, or with None the texts that ship with the package.

    .txt is UTF-8; two empty lines separate documents, and long ones are cut at empty lines into passages. A line of
    .jsonl is {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}, other keys of the object
    do not matter. Raises RingstepError, with the line or the byte, for a file that is missing, no ordinary file, of
    another format or encoding, binary, empty, malformed, or above 64 MiB.
    """
    if path is None:
        return [document for name in SHIPPED for document in load_texts(FOLDER / name)]
    path = Path(path)
    kind = path.stem if path.parent == FOLDER else ""
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl") and path.is_file():
        raise RingstepError(f"{path} is neither .txt nor .jsonl; calibration reads plain text or a document a line")
    text = _read(path)
    documents = list(_lines(text, path, kind) if suffix == ".jsonl" else _passages(text, str(path), kind or "text"))
    if not documents:
        raise RingstepError(f"{path} holds no text; calibration needs some thousand words")
    return documents


def held_out() -> str:
    """The English text that benchmarks measure on, whole."""
    return _read(HELD_OUT)


def fingerprint(documents: Sequence[Document]) -> str:
    """A sha256 (hex) over the content of documents in their order, wherever they were read from."""
    text = json.dumps([[d.kind, d.text, d.messages] for d in documents])
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sequences(
    documents: Sequence[Document],
    text: Text,
    *,
    length: int,
    tokens: int,
    prefix: Sequence[int] = (),
    vocab: int | None = None,
) -> list[list[int]]:
    """Pack documents into at least `tokens` ids: sequences of `length`, each of which begins with `prefix`.

    Kinds are mixed in proportion, and each kind is sampled all over, so that the first sequences stand for all. A
    sequence begins with a document as long as there are fresh ones; what did not fit into its last one comes at the
    end. Conversations go through the chat template, plain text is encoded as it is; where a document begins with
    `prefix` itself, it is not doubled.
    Raises RingstepError when the documents are too short (with the tokens they have and the tokens needed), the
    prefix fills a sequence, the template refuses a conversation, or an id is not below `vocab`.
    """
    room = length - len(prefix)
    if room < 1 or tokens < 1:
        raise RingstepError(
            f"calibration in sequences of {length} tokens, {len(prefix)} of them a prefix, {tokens} in all: "
            "give a longer sequence and a positive number"
        )
    head = list(prefix)
    _check_ids(head, vocab, "the prefix")
    wanted = -(-tokens // length)
    found: list[list[int]] = []
    current: list[int] = []
    rest: deque[list[int]] = deque()
    for ids in _fresh_then(_encoded(mixed(documents), text, vocab), rest):
        if not current and head and ids[: len(head)] == head:
            ids = ids[len(head) :]
        taken, left = ids[: room - len(current)], ids[room - len(current) :]
        current += taken
        if left:
            rest.append(left)
        if len(current) == room:
            found.append(head + current)
            current = []
            if len(found) == wanted:
                return found
    have = sum(len(ids) for ids in found) + len(current)
    raise RingstepError(
        f"the calibration text has {have} tokens, needs at least {wanted * length} "
        f"({wanted} sequences of {length}); give a longer file or ask for fewer tokens"
    )


def mixed(documents: Sequence[Document]) -> list[Document]:
    """The documents in an order of which every beginning has the kinds in proportion, sampled all over each kind."""
    counts = Counter(document.kind for document in documents)
    seen: Counter[str] = Counter()
    spread: dict[str, list[tuple[float, Document]]] = {kind: [] for kind in counts}
    for document in documents:
        seen[document.kind] += 1
        spread[document.kind].append((seen[document.kind] * GOLDEN % 1.0, document))
    placed: list[tuple[float, Document]] = []
    for kind, found in spread.items():
        found.sort(key=lambda entry: entry[0])
        placed += [((rank + 0.5) / counts[kind], document) for rank, (_, document) in enumerate(found)]
    return [document for _, document in sorted(placed, key=lambda entry: entry[0])]


def _fresh_then(fresh: Iterator[list[int]], rest: deque[list[int]]) -> Iterator[list[int]]:
    yield from fresh
    while rest:
        yield rest.popleft()


def _encoded(documents: list[Document], text: Text, vocab: int | None) -> Iterator[list[int]]:
    """Token ids of each document, one at a time: a long file is only encoded as far as it is needed."""
    worker: child.Worker | None = None
    try:
        for document in documents:
            if not document.messages:
                ids = text.encode(document.text)
            elif text.template is None:
                ids = text.encode("\n\n".join(content for _, content in document.messages))
            else:
                # One process for all conversations; starting one takes longer than rendering a hundred.
                worker = worker or child.Worker("chat_template.jinja", memory_bytes=MEMORY_BYTES)
                messages = [{"role": role, "content": content} for role, content in document.messages]
                try:
                    rendered = worker.call(
                        _render, text.template, messages, text.specials(), timeout_s=TIMEOUT_SECONDS
                    ).value
                except RingstepError as error:
                    raise RingstepError(f"{document.where}: {error}") from None
                with refusing(f"{document.where}: tokenizer.json cannot encode the chat template's text"):
                    ids = list(text.tokenizer.encode(str(rendered), add_special_tokens=False).ids)
            _check_ids(ids, vocab, document.where)
            yield ids
    finally:
        if worker is not None:
            worker.close()


def _check_ids(ids: list[int], vocab: int | None, where: str) -> None:
    if vocab is not None and ids and not 0 <= min(ids) <= max(ids) < vocab:
        wrong = next(index for index in ids if not 0 <= index < vocab)
        raise RingstepError(
            f"{where}: token {wrong} is outside the model's vocabulary of {vocab}; tokenizer and weights belong to "
            "different models"
        )


def _read(path: Path) -> str:
    """A file as text, line ends as newlines. Raises RingstepError saying what it is instead."""
    try:
        size = ordinary_size(path)
        if path.is_dir():
            raise RingstepError(f"{path} is a folder; calibration reads one file, .txt or .jsonl")
        if size > LIMIT_BYTES:
            raise RingstepError(f"{path} is {size} bytes; calibration reads {LIMIT_BYTES} at most, and a few hundred "
                                "thousand are plenty: cut it")  # fmt: skip
        with path.open("rb") as stream:
            raw = stream.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise RingstepError(f"{path} cannot be read: {error.strerror or error}") from None
    for mark, name in BOMS:
        if raw.startswith(mark):
            raise RingstepError(f"{path} is {name} text; save it as UTF-8")
    if (zero := raw.find(b"\0")) >= 0:
        raise RingstepError(f"{path} is no text: byte {zero} is 0; give plain text in UTF-8")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise RingstepError(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; save it as UTF-8"
        ) from None


def _passages(text: str, where: str, kind: str) -> Iterator[Document]:
    """Documents of plain text: parts between two empty lines, the long ones in passages."""
    for part in re.split(r"\n(?:[ \t]*\n){2,}", text):
        held = ""
        for paragraph in re.split(r"\n[ \t]*\n", part):
            for piece in _pieces(paragraph):
                if held and len(held) + len(piece) > PASSAGE:
                    yield Document(kind, where, held)
                    held = ""
                held = f"{held}\n\n{piece}" if held else piece
        if held:
            yield Document(kind, where, held)


def _pieces(paragraph: str) -> Iterator[str]:
    """A paragraph without empty lines at its ends, cut behind white space where it is longer than a passage."""
    paragraph = paragraph.strip("\n").rstrip()
    start = 0
    while start < len(paragraph):
        end = start + PASSAGE
        if end < len(paragraph):
            end = max(paragraph.rfind(space, start + PASSAGE // 2, end) for space in " \n") + 1 or end
        if (piece := paragraph[start:end].rstrip()).strip():
            yield piece
        start = end


def _lines(text: str, path: Path, kind: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path} line {number}"
            yield from _line(line, where, kind)


def _line(line: str, where: str, kind: str) -> Iterator[Document]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
        raise RingstepError(f"{where} is not JSON: {reason}") from None
    if not isinstance(entry, dict) or ("text" in entry) == ("messages" in entry):
        hints = [did_you_mean(key, ("text", "messages")) for key in entry] if isinstance(entry, dict) else []
        hint = next(filter(None, hints), "")
        _refuse_line(where, f"must be an object with either text or messages{hint}")
    if "text" in entry:
        _string(entry["text"], where, "text")
        yield from _passages(entry["text"].replace("\r\n", "\n"), where, kind or "text")
        return
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        _refuse_line(where, "messages must be a list of {role, content} objects, not empty")
    found = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            _refuse_line(where, f"{at} must be an object with role and content")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            _refuse_line(where, f"{at} role must be {', '.join(ROLES)}, not {str(role)[:40]!r}")
        _string(content, where, f"{at} content")
        found.append((role, content))
    if any(content.strip() for _, content in found):
        yield Document(kind or "chat", where, messages=tuple(found))


def _string(value: Any, where: str, name: str) -> None:
    if not isinstance(value, str):
        _refuse_line(where, f"{name} must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse_line(where, f"{name} holds half a surrogate pair, which is no text")


def _refuse_line(where: str, reason: str) -> NoReturn:
    raise RingstepError(f"{where}: {reason}")

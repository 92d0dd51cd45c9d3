"""Tokenizer and chat template of an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from ringstep.errors import RingstepError
from ringstep.files import read_text

FOLDER = "tokenizer"
TIMEOUT_SECONDS, MEMORY_BYTES = 20.0, 1 << 30  # for a template, which takes milliseconds and kilobytes


class Text:
    """tokenizer/tokenizer.json and, where the model has one, tokenizer/chat_template.jinja."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the artifact's. Raises RingstepError when it has no readable tokenizer."""
        from tokenizers import Tokenizer

        path = folder / FOLDER / "tokenizer.json"
        if not path.is_file():
            raise RingstepError(f"{path}: no such file; this artifact has no tokenizer")
        with refusing(f"{path}: no readable tokenizer"):
            self.tokenizer = Tokenizer.from_file(str(path))
        template = folder / FOLDER / "chat_template.jinja"
        self.generation = folder / FOLDER / "generation.json"
        self.template = read_text(template) if template.is_file() else None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, special tokens as the tokenizer adds them."""
        with refusing("tokenizer.json cannot encode this text"):
            return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        with refusing("tokenizer.json cannot decode its ids"):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def chat(self, prompt: str) -> list[int]:
        """Token ids of a user's message through the chat template, ready for the answer; plain text without one."""
        if self.template is None:
            return self.encode(prompt)
        rendered = render(self.template, [{"role": "user", "content": prompt}], self.specials())
        with refusing("tokenizer.json cannot encode the chat template's text"):
            return list(self.tokenizer.encode(rendered, add_special_tokens=False).ids)

    def specials(self) -> dict[str, str]:
        """bos_token and eos_token for the template, from tokenizer/generation.json; empty where unknown."""
        try:
            fields = json.loads(read_text(self.generation))
        except (RingstepError, ValueError, RecursionError):
            fields = {}
        fields = fields if isinstance(fields, dict) else {}
        return {name: str(fields.get(name) or "") for name in ("bos_token", "eos_token")}


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what a tokenizer raises into a RingstepError; Rust's panics are not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RingstepError(f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None


def render(template: str, messages: list[dict[str, str]], extra: dict[str, Any]) -> str:
    """Render a chat template, which comes with the model and is not trusted. Raises RingstepError.

    A sandbox keeps it from everything but its messages; a child process from running or growing for ever.
    """
    from ringstep import child

    outcome = child.run(
        "chat_template.jinja", _render, template, messages, extra, timeout_s=TIMEOUT_SECONDS, memory_bytes=MEMORY_BYTES
    )
    return str(outcome.value)


def _render(template: str, messages: list[dict[str, str]], extra: dict[str, Any]) -> str:
    """Runs in the child."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **extra)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RingstepError(f"cannot be rendered: {reason}") from None

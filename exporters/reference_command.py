"""`ringstep reference`: what the original says of a text, recorded as a golden."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringstep import completion, console
from ringstep.errors import RingstepError
from ringstep.options import as_json, common

if TYPE_CHECKING:
    from exporters.prove import Reference
    from recipes.plan import Plan
    from ringstep.checkpoint import Checkpoint
    from ringstep.text import Text

TOKENS = 200
TINY_BYTES = 64 << 20  # of float32 weights, below which float64 costs nothing


def parse_ids(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Token ids between commas."""
    if value is None:
        return None
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of token ids such as 1,2") from None


@click.command(short_help="Record what the original says of a text, for parity without transformers.")
@click.argument("model", shell_complete=completion.model)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The golden, a .safetensors file.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A text file to feed.")
@click.option("--text", help="A text to feed. Default: the one that ships with ringstep.")
@click.option("--chat", is_flag=True, help="Feed it as a user's message, through the chat template.")
@click.option("--tokens", type=click.IntRange(1), help="Feed no more tokens than this. Default: all; 200 of the "
              "text that ships.")  # fmt: skip
@click.option("--answer", type=click.IntRange(0), default=16, show_default=True,
              help="Then answer greedily, up to this many tokens.")  # fmt: skip
@click.option("--begin", callback=parse_ids,
              help="Ids to begin with, between commas. Default: what the model's texts begin with.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["auto", "float32", "float64"]), default="auto", show_default=True,
              help="auto: float64 for a tiny model in transformers, else float32.")  # fmt: skip
@click.option("--revision", help="Revision of a Hub model.")
@as_json
@common
def reference(model: str, out: Path, prompt_file: Path | None, text: str | None, chat: bool, tokens: int | None,
              answer: int, begin: list[int] | None, dtype: Any, revision: str | None, json_: bool) -> int:  # fmt: skip
    """Record what MODEL says of a text as a golden: logits, every cache entry, and its greedy answer.

    `ringstep parity ARTIFACT --golden FILE` compares with it, without transformers and without the checkpoint.
    """
    from recipes import plan_for
    from ringstep.checkpoint import open_checkpoint
    from ringstep.files import read_text
    from ringstep.parity.golden import Golden, save_golden

    if prompt_file is not None and text is not None:
        raise RingstepError("--prompt-file and --text: give one of them")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise RingstepError(f"--out {out}: " + ("is a folder; name a file" if out.is_dir() else "no such folder"))
    given = read_text(prompt_file) if prompt_file else text
    if chat and given is None:
        raise RingstepError("--chat: needs --text or --prompt-file")
    checkpoint = open_checkpoint(model, revision=revision)
    plan = plan_for(checkpoint.config)
    ids = ids_of(checkpoint, plan.vocab, given, chat, tokens, begin)
    check_size(plan, checkpoint, len(ids), answer)
    made = open_in(checkpoint, dtype)
    with console.progress(f"{len(ids)} tokens and the answer in the original"):
        truth = made.answer(ids, answer, checkpoint.eos_ids()) if answer else made.truth(ids)
    golden = Golden(truth, len(ids), facts(checkpoint, made))
    save_golden(golden, out)
    body: dict[str, Any] = {
        "file": str(out), "bytes": out.stat().st_size, "tokens": len(truth.logits), "prompt_tokens": len(ids),
        "answer_ids": truth.ids[len(ids) :], "begins_with": ids[0], **golden.facts,
    }  # fmt: skip
    if json_:
        console.print_json(body)
    else:
        console.line(f"{out}: {len(ids)} tokens and {len(truth.ids) - len(ids)} of its answer by {truth.source}, "
                     f"{console.human_bytes(out.stat().st_size)}")  # fmt: skip
    return 0


def ids_of(checkpoint: Checkpoint, vocab: int, given: str | None, chat: bool, tokens: int | None,
           begin: list[int] | None) -> list[int]:  # fmt: skip
    """The ids to feed: of a text where the checkpoint has a tokenizer, else seeded random ones."""
    import tempfile

    import numpy as np

    from exporters.calibration import first_token
    from exporters.prove import shipped_text

    with tempfile.TemporaryDirectory(prefix="ringstep-text-") as folder:
        text = tokenizer_of(checkpoint, Path(folder))
        if text is None and given is not None:
            raise RingstepError(f"{checkpoint.path}: has no tokenizer to read a text with; leave the text out")
        if text is None:
            body = [int(i) for i in np.random.default_rng(0).integers(0, vocab, tokens or TOKENS)]
            first = begin or []
        else:
            said = shipped_text() if given is None else given
            body = text.chat(said) if chat else text.encode(said)
            first = [first_token(text, vocab)] if begin is None else begin
    if given is None and body:
        body = body * (-(-(tokens or TOKENS) // len(body)))
    ids = body if body[: len(first)] == first else [*first, *body]
    ids = ids[: tokens or (TOKENS if given is None else None)]
    if not ids:
        raise RingstepError("there is nothing in the text to feed")
    if min(ids) < 0 or max(ids) >= vocab:
        raise RingstepError(f"token id {max(ids) if max(ids) >= vocab else min(ids)} lies outside 0..{vocab - 1}")
    return ids


def tokenizer_of(checkpoint: Checkpoint, folder: Path) -> Text | None:
    """The checkpoint's tokenizer, its files in a temporary folder; None where it has none."""
    from ringstep.text import FOLDER, Text

    files = checkpoint.tokenizer_files()
    if not files:
        return None
    (folder / FOLDER).mkdir()
    for name, content in files.items():
        (folder / FOLDER / name).write_bytes(content)
    return Text(folder)


def check_size(plan: Plan, checkpoint: Checkpoint, tokens: int, answer: int) -> None:
    """Raises RingstepError for a golden beyond the limit, or a text beyond the model's own; warns of a large one."""
    from ringstep.parity.golden import LIMIT_BYTES, WARN_BYTES, golden_bytes

    limit = checkpoint.config.get("max_position_embeddings")
    if type(limit) is int and tokens + answer > limit > 0:
        raise RingstepError(f"{tokens} tokens and {answer} of an answer: the model takes {limit}; lower --tokens")
    kinds = [plan.kinds[name] for name in plan.layers]
    size = golden_bytes(tokens + answer, plan.vocab, [(k.kv_heads, k.head_dim) for k in kinds])
    if size > LIMIT_BYTES:
        raise RingstepError(f"a golden of {console.human_bytes(size)}, logits [{tokens + answer}, {plan.vocab}] in "
                            f"float32; at most {console.human_bytes(LIMIT_BYTES)}: lower --tokens")  # fmt: skip
    if size > WARN_BYTES:
        console.warn(f"the golden will take {console.human_bytes(size)}; --tokens makes it shorter")


def open_in(checkpoint: Checkpoint, dtype: Any) -> Reference:
    """The reference in the dtype asked for."""
    import math

    from exporters.prove import RecipeReference
    from ringstep.parity.reference import TransformersReference, has_reference

    with console.progress("loading the original"):
        if not has_reference(checkpoint):
            if dtype == "float64":
                raise RingstepError("--dtype float64: this transformers does not know the model, and the recipe that "
                                    "stands in for it computes in float32")  # fmt: skip
            return RecipeReference(checkpoint)
        size = sum(4 * math.prod(checkpoint.shape(name)) for name in checkpoint.names())
        if dtype == "auto":
            dtype = "float64" if size <= TINY_BYTES else "float32"
        return TransformersReference(checkpoint, dtype)


def facts(checkpoint: Checkpoint, made: Reference) -> dict[str, str]:
    """What made a golden."""
    from ringstep.stage import library_versions

    return {"model": checkpoint.label, "checkpoint": checkpoint.fingerprint(), "source": made.source,
            **library_versions("ringstep", "transformers", "torch")}  # fmt: skip

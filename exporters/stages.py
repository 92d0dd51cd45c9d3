"""What the stages of a line name their inputs by: sources, libraries, hashes of what came before."""

from __future__ import annotations

from ringstep.stage import library_versions, source_hash

# What turns a checkpoint's files into tensors and texts.
READERS = tuple(f"ringstep/{name}.py" for name in (
    "checkpoint", "files", "tensor_file", "gguf_file", "gguf_names", "gguf_tokenizer"))  # fmt: skip


def versions(*sources: str, libraries: tuple[str, ...] = ()) -> dict[str, str]:
    """What a stage depends on besides its inputs: ringstep's own sources and libraries."""
    return {"source": source_hash(*sources), **library_versions(*libraries)}


def flat(done: dict[str, dict[str, str]]) -> dict[str, str]:
    """All outputs so far, STAGE/FILE to sha256."""
    return {f"{stage}/{name}": sha for stage, files in done.items() for name, sha in files.items()}

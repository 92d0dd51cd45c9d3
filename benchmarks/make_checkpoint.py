"""A checkpoint of a real model's size with made-up weights: sharded bf16 safetensors, seeded, streamed.

    python benchmarks/make_checkpoint.py spark2_5-1.7b build/spark-1.7b
    python benchmarks/make_checkpoint.py spark2_5-1.7b build/spark-4-layers --set num_hidden_layers=4

Config, tensor names and shapes are the real model's. The weights say nothing, but their statistics are like those of
trained ones where it matters for quantisation: rows of different spread, a few input channels an order of magnitude
larger, and an attention sink: the first token (id 0) carries a massive activation in one channel of the residual
stream, and all keys and queries look for it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ringstep.errors import RingstepError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARD_BYTES = 1_000_000_000
ROWS_BYTES = 32_000_000  # of float32, at a time
SPREAD = 0.25  # of the logarithm of a row's scale
OUTLIERS, OUTLIER_SCALE = 4, 8.0  # input channels of every matrix
EMBEDDING_STD = 0.02
SINK_ID, SINK_VALUE, COMMON_VALUE = 0, 4000.0, 0.5

SPARK = json.loads((ROOT / "tests" / "data" / "spark2_5_tiny" / "config.json").read_text()) | {
    "dtype": "bfloat16", "vocab_size": 131072, "head_dim": 256, "sliding_window": 512}  # fmt: skip
TOKENS = 3 + 256  # of the tokenizer: special ones, and one a byte
MARK = "made-up.txt"  # in every folder written here
# Figures of the published models; 1.7B's intermediate_size follows from its file's size.
CONFIGS: dict[str, dict[str, Any]] = {
    "spark2_5-1.7b": SPARK | {"hidden_size": 2048, "intermediate_size": 6656, "num_hidden_layers": 28,
                              "num_attention_heads": 8, "num_key_value_heads": 2},
    "spark2_5-4b": SPARK | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 36,
                            "num_attention_heads": 16, "num_key_value_heads": 4},
    "llama-1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 0, "eos_token_id": 1},
    "qwen3-1.7b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "bos_token_id": 0,
        "eos_token_id": 1},
}  # fmt: skip


def config_of(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """The config of a model, some of its sizes changed: {"num_hidden_layers": 4} keeps the first four layers."""
    config = CONFIGS[name] | sizes
    known = {key for key, value in CONFIGS[name].items() if type(value) is int and not key.endswith("_token_id")}
    if unknown := sizes.keys() - known:
        sys.exit(f"{name} has no size {', '.join(sorted(unknown))}")
    count = config["num_hidden_layers"]
    if config["model_type"] == "spark2_5":
        config["layer_types"] = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(count)]
    return config


def make(config: dict[str, Any], folder: Path) -> int:
    """Write the checkpoint; returns its bytes of weights. One made here before is replaced when all is written.

    Exits where the folder holds anything else: a real checkpoint's files have the same names.
    """
    from recipes import plan_for

    if folder.exists() and not (folder / MARK).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        sys.exit(f"{folder} is no checkpoint made by {Path(__file__).name}; move it away or name another")
    if config["vocab_size"] < TOKENS:
        sys.exit(f"vocab_size={config['vocab_size']}: the tokenizer alone has {TOKENS}")
    try:
        shapes = plan_for(config).expected()
    except RingstepError as error:
        sys.exit(str(error))
    if config.get("tie_word_embeddings"):
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        needed, free = 2 * sum(map(math.prod, shapes.values())), shutil.disk_usage(temporary).free
        if needed > free:
            sys.exit(f"{folder} needs {needed} bytes of disk, {free} are free")
        total = write(config, shapes, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError as error:
        sys.exit(f"{folder} cannot be written: {error.strerror}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return total


def write(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], folder: Path) -> int:
    """Write all files; returns the bytes of weights."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / MARK).write_text("Random weights of the right sizes and statistics, for measuring. No model.\n")
    write_tokenizer(folder)
    shards = list(split(shapes))
    places: dict[str, str] = {}
    total = 0
    for index, names in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        total += write_shard(folder / file, {name: shapes[name] for name in names}, config)
        places |= dict.fromkeys(names, file)
        print(f"{file}: {len(names)} tensors, {total / 1e9:.2f} GB", file=sys.stderr, flush=True)
    index_file = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1) + "\n")
    return total


def split(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Tensor names by shard of at most SHARD_BYTES, or one tensor."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if names and size + nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> int:
    """One safetensors file: a header of eight bytes of its length, JSON, then the tensors."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for rows in weights(name, shape, config):
                file.write(rows.astype(ml_dtypes.bfloat16).tobytes())
    return end


def weights(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> Iterator[np.ndarray]:
    """A tensor a few rows at a time, float32; the same for the same name and shape."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    hidden = config["hidden_size"]
    sink, common = hidden // 3, hidden // 5
    if len(shape) == 1:
        yield (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
        return
    table = shape[0] == config["vocab_size"]
    # Residual branches start small, as trained ones do, so that the stream grows slowly with depth.
    branch = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
    depth = 1 / math.sqrt(2 * config["num_hidden_layers"]) if branch else 1.0
    std = EMBEDDING_STD if table else depth / math.sqrt(shape[1])
    columns = np.ones(shape[1], np.float32)
    if not table:
        columns[random.choice(shape[1], min(OUTLIERS, shape[1]), replace=False)] = OUTLIER_SCALE
    seeks = name.endswith(("q_k_v_proj.weight", "q_proj.weight", "k_proj.weight"))
    heads = np.random.default_rng(1).standard_normal(config["head_dim"]).astype(np.float32)
    step = max(1, ROWS_BYTES // (4 * shape[1]))
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        rows = random.standard_normal((count, shape[1]), np.float32) * std * columns
        rows *= np.exp(SPREAD * random.standard_normal((count, 1), np.float32))
        if table:
            rows[:, common] = COMMON_VALUE
            rows[:, sink] = 0
            if start <= SINK_ID < start + count:
                rows[SINK_ID - start, sink] = SINK_VALUE
        elif seeks and shape[1] == hidden:
            # Keys answer the sink's channel and queries the channel that all tokens have, in the same direction.
            along = heads[(start + np.arange(count)) % config["head_dim"]] / math.sqrt(hidden)
            rows[:, sink] = along
            rows[:, common] = along
        yield rows


def write_tokenizer(folder: Path) -> None:
    """A token a byte, after three special ones; a text begins with id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", **names}  # transformers would ask for it
    (folder / "tokenizer_config.json").write_text(json.dumps(body, indent=1) + "\n")


def sizes_of(words: list[str]) -> dict[str, int]:
    """Sizes of the command line, "hidden_size=1024"."""
    found = {}
    for word in words:
        name, _, number = word.partition("=")
        if not number.isascii() or not number.isdecimal() or len(number) > 10 or not 0 < int(number) < 1 << 31:
            sys.exit(f"{word}: a size is written NAME=NUMBER, such as num_hidden_layers=4")
        found[name] = int(number)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", metavar="SIZE=N", nargs="*", default=[], help="sizes other than the model's")
    args = parser.parse_args()
    total = make(config_of(args.model, sizes_of(args.set)), args.folder)
    print(f"{args.folder}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()

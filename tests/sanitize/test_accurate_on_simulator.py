"""Models as torch.onnx exports them, before and after the accurate forms, on the HTP simulator in fp16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ringstep.engines.qnn_sim import open_graph
from ringstep.parity.metrics import snr_db
from sanitize import graph as graphs
from sanitize.model_file import read_model, write_model
from sanitize.passes import accurate_exp, accurate_gelu, accurate_sigmoid, accurate_softmax
from sanitize.target import find_target

pytest.importorskip("onnxruntime_qnn")
transformers = pytest.importorskip("transformers")

HTP = find_target("qnn-htp")
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

"""What the export tests share: tiny random checkpoints, exports without the line, runs of the command."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from exporters.cli import cli
from exporters.cut import part_specs, write_parts
from exporters.onnx import export_graphs, graph_file
from exporters.weights import load_index, write_weights
from recipes import plan_for
from recipes.plan import Options, Plan
from recipes.step import step_spec
from ringstep import console
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.contract import EmbeddingSpec, PartSpec, StepSpec, TensorSpec

SPARK = Path(__file__).parent.parent / "data" / "spark2_5_tiny"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA = {
    **LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 2, "sliding_window": 8, "sliding_window_pattern": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 5) -> Path:
    """A folder with a config and random weights that keep the activations near 1."""
    random, tensors = np.random.default_rng(seed), {}
    for name, shape in plan_for(config).expected().items():
        noise = random.standard_normal(shape).astype(np.float32)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * np.float32(1.4 * shape[1] ** -0.5)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of words w3 .. wN and "user", with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", "user", *(f"w{i}" for i in range(4, vocab))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@dataclass(frozen=True)
class Export:
    """An export without the line: no manifest, no step.json until `save`."""

    checkpoint: Checkpoint
    plan: Plan
    options: Options
    spec: StepSpec
    folder: Path

    def save(self, cuts: list[int] | None = None) -> Path:
        """Write step.json for the whole graphs, or for parts cut after these layers; returns the folder."""
        graphs = []
        for graph in self.spec.graphs:
            file = graph_file(graph.n)
            names = tuple(t.name for t in graph.inputs), tuple(t.name for t in graph.outputs)
            parts: tuple[PartSpec, ...] = (PartSpec(file, *names),)
            if cuts:
                parts = part_specs(self.spec, graph, cuts, Path(file).stem)
                write_parts(self.folder / file, parts, self.folder)
            returned = {t.name for t in graph.outputs}
            shape = (graph.n, self.spec.hidden)
            passed = [name for part in parts for name in part.outputs if name not in returned]
            hidden = tuple(TensorSpec(name, shape, self.spec.dtype, "hidden") for name in passed)
            graphs.append(dataclasses.replace(graph, parts={"onnx": parts}, hidden=hidden))
        inside, shape = self.options.embedding_inside, (self.spec.vocab, self.spec.hidden)
        table = None if inside else EmbeddingSpec("embedding.bin", 0, shape, self.spec.dtype)
        dataclasses.replace(self.spec, graphs=tuple(graphs), embedding=table).save(self.folder / "step.json")
        return self.folder


def export(model: Path, folder: Path, context: int = 64, chunks: tuple[int, ...] = (1,), **options: Any) -> Export:
    """Write the weights and the graphs of a checkpoint into `folder`."""
    checkpoint, made = open_checkpoint(str(model)), Options(**options)
    plan = plan_for(checkpoint.config)
    checkpoint.check(plan.expected(), plan.optional)
    spec = step_spec(plan, made, model="test", context=context, chunks=chunks, eos=())
    write_weights(checkpoint, plan, made.dtype, folder)
    export_graphs(plan, made, spec, load_index(folder), folder)
    return Export(checkpoint, plan, made, spec, folder)


def run(*args: object) -> int:
    """Run the command as the entry point does; returns its exit code."""
    try:
        return console.run(cli, [str(arg) for arg in args])
    finally:
        console.settings.quiet = console.settings.verbose = False

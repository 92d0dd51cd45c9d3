"""The reference: Hugging Face transformers in float32 or float64, eager attention, on the checkpoint's own tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal

import numpy as np

from ringstep.checkpoint import Checkpoint
from ringstep.console import quiet_libraries
from ringstep.errors import RingstepError
from ringstep.parity.report import Truth


def has_reference(checkpoint: Checkpoint) -> bool:
    """Whether the installed transformers knows the checkpoint's architecture."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = str(checkpoint.config.get("model_type"))
    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING


class TransformersReference:
    """The model in transformers; holds all weights in `dtype`."""

    def __init__(self, checkpoint: Checkpoint, dtype: Literal["float32", "float64"] = "float32") -> None:
        import torch
        import transformers
        from transformers.initialization import no_init_weights

        transformers.logging.set_verbosity_error()
        self.source = f"transformers {version('transformers')}, {dtype}, eager"
        kind = checkpoint.config["model_type"]
        unused = ("model_type", "architectures", "dtype", "torch_dtype")
        fields = {key: value for key, value in checkpoint.config.items() if key not in unused}
        try:
            config = transformers.AutoConfig.for_model(kind, **fields)
            with quiet_libraries(), no_init_weights():
                self.model: Any = transformers.AutoModelForCausalLM.from_config(
                    config, attn_implementation="eager", dtype=getattr(torch, dtype)
                )
        except Exception as error:  # fields that change nothing here may still be of a type it refuses
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RingstepError(f"{checkpoint.path}: transformers refuses its config.json: {reason}") from None
        have = set(checkpoint.names())
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        tied = {name for name in parameters if name not in have}
        if tied - {"lm_head.weight"} or (tied and not config.tie_word_embeddings):
            raise RingstepError(f"{checkpoint.path}: transformers expects tensor {sorted(tied)[0]}, which is not there")
        with torch.no_grad():
            for name in sorted(set(parameters) - tied):
                if config.tie_word_embeddings and name == "lm_head.weight":
                    continue  # transformers ties whatever the file says
                parameters[name].copy_(torch.from_numpy(np.asarray(checkpoint.read(name)).astype(np.float32)))
        self.model.tie_weights()
        self.model.eval()

    def truth(self, ids: Sequence[int]) -> Truth:
        """Logits and caches after feeding `ids` at once."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()  # told of the config it would forget what windows leave behind
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 5.24 renames past_key_values, 5.20 knows no other name
            out = self.model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True)
        entries = []
        layers: Any = cache.layers
        for layer in layers:
            keys, values = layer.keys[0].numpy(), layer.values[0].numpy()
            entries.append((np.arange(len(ids) - keys.shape[1], len(ids)), keys, values))
        return Truth(self.source, list(ids), out.logits[0].numpy(), entries)

    def answer(self, prompt: Sequence[int], limit: int, eos: Sequence[int]) -> Truth:
        """The greedy answer (an eos included) to a prompt, with logits and caches of all that was fed."""
        import torch

        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=limit, do_sample=False, eos_token_id=list(eos) or None, pad_token_id=0,
                temperature=None, top_p=None, top_k=None, repetition_penalty=None,
            )  # fmt: skip
        ids = out[0].tolist()
        truth = self.truth(ids[:-1])
        return Truth(truth.source, ids, truth.logits, truth.caches)

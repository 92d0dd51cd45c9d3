"""Decode greedily with one tool, in that tool's environment; prints one line of JSON.

    python decode_worker.py TOOL FOLDER IDS N THREADS CONTEXT

IDS is the prompt, ids joined by commas. Each tool gets an open function that returns (start, next): start(ids)
forgets everything, reads the prompt and returns the first new id; next(id) returns the one after it. Every
token is generated, an end-of-sequence token is one like any other.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Loop = tuple[Callable[[list[int]], int], Callable[[int], int]]
WARM_TOKENS = 8


def open_ringstep(folder: str, threads: int, context: int, engine: str = "ort") -> Loop:
    """DecodeSession on ONNX Runtime, or on ExecuTorch's, which takes no number of threads.

    Its context is the artifact's.
    """
    from ringstep import DecodeSession

    options = {"threads": threads} if engine == "ort" else {}
    session = DecodeSession.open(folder, engine=engine, **options)
    if session.spec.context != context:
        sys.exit(f"{folder} was exported for a context of {session.spec.context}, not {context}")

    def start(ids: list[int]) -> int:
        session.reset()
        return int(session.step(ids)[-1].argmax())

    return start, lambda token: int(session.step([token])[0].argmax())


def open_genai(folder: str, threads: int, context: int) -> Loop:
    """Generator with its cache buffers of `context` tokens (the default would be the model's 8192)."""
    import onnxruntime_genai as og

    config = og.Config(folder)
    options = {"intra_op_num_threads": threads}
    # Never stop: the last id ends a text, which no text reaches. (A list here would be added to the model's own id.)
    vocab = json.loads(Path(folder, "genai_config.json").read_text())["model"]["vocab_size"]
    config.overlay(json.dumps({"model": {"eos_token_id": vocab - 1, "decoder": {"session_options": options}}}))
    model = og.Model(config)
    state: dict[str, Any] = {}

    def advance(_: int) -> int:
        state["generator"].generate_next_token()
        if state["generator"].is_done():  # every further call would do nothing, very fast
            sys.exit("the generator stopped at an end-of-sequence token or at its length")
        return int(state["generator"].get_next_tokens()[0])

    def start(ids: list[int]) -> int:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=context)
        state["generator"] = og.Generator(model, params)
        state["generator"].append_tokens(ids)
        return advance(0)

    return start, advance


def open_optimum(folder: str, threads: int, context: int) -> Loop:
    """ORTModelForCausalLM called step by step, which spares it generate()'s own work. Its cache grows."""
    import onnxruntime as ort
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    model = ORTModelForCausalLM.from_pretrained(folder, session_options=options, provider="CPUExecutionProvider")
    state: dict[str, Any] = {}

    def advance(ids: list[int]) -> int:
        state["seen"] += len(ids)
        mask = torch.ones(1, state["seen"], dtype=torch.int64)
        with torch.no_grad():
            out = model(torch.tensor([ids]), attention_mask=mask, past_key_values=state["past"], use_cache=True)
        state["past"] = out.past_key_values
        return int(out.logits[0, -1].argmax())

    def start(ids: list[int]) -> int:
        state.update(seen=0, past=None)
        return advance(ids)

    return start, lambda token: advance([token])


def open_pte(folder: str, threads: int, context: int, every_position: bool) -> Loop:
    """A peer's .pte in the runtime's own binding: ids [1, n] and positions, the caches inside.

    `every_position`: positions are [n], as optimum-executorch's takes them, else the first one alone, [1].
    """
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  its attention and cache operators
    import torch
    from executorch.extension.pybindings.portable_lib import _load_for_executorch

    module = _load_for_executorch(str(next(Path(folder).rglob("*.pte"))))
    state = {"seen": 0}

    def advance(ids: list[int]) -> int:
        begin = state["seen"]
        state["seen"] += len(ids)
        positions = torch.arange(begin, begin + (len(ids) if every_position else 1))
        logits = module.forward((torch.tensor([ids]), positions))[0]
        return int(logits.reshape(-1, logits.shape[-1])[-1].argmax())

    def start(ids: list[int]) -> int:
        state["seen"] = 0
        return advance(ids)

    return start, lambda token: advance([token])


TOOLS = {
    "executorch": (partial(open_pte, every_position=False), "executorch"),
    "ringstep-executorch": (partial(open_ringstep, engine="executorch"), "executorch"),
    "optimum-executorch": (partial(open_pte, every_position=True), "optimum-executorch"),
    "ringstep": (open_ringstep, "ringstep"),
    "genai": (open_genai, "onnxruntime-genai"),
    "optimum": (open_optimum, "optimum-onnx"),
}


def main() -> None:
    """Warm up, then time the prompt and n tokens; seconds are those of the n - 1 steps after the first."""
    tool, folder, prompt, n, threads, context = sys.argv[1:]
    opener, package = TOOLS[tool]
    ids = [int(part) for part in prompt.split(",")]
    start, advance = opener(folder, int(threads), int(context))
    token = start(ids)
    for _ in range(WARM_TOKENS):
        token = advance(token)
    begin = time.perf_counter()
    made = [start(ids)]
    first = time.perf_counter()
    while len(made) < int(n):
        made.append(advance(made[-1]))
    end = time.perf_counter()
    print(json.dumps({"ids": made, "prompt_seconds": first - begin, "decode_seconds": end - first,
                      "version": importlib.metadata.version(package)}))  # fmt: skip


if __name__ == "__main__":
    main()

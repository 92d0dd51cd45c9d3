"""Sanitise a model of 4 GB of weights: seconds against a plain copy, and memory.

The model is a chain of linear layers with a norm and a SiLU between them, its weights random and all different, in a
data file. Three runs: into a new file, in place, and a copy of the data file by the system's cp.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
from measure import BUILD, Run, run
from onnx import TensorProto, helper

from ringstep import console

OUT = BUILD / "bench" / "sanitize-large"
WIDTH = 4096


def make(folder: Path, layers: int) -> Path:
    """A model of `layers` weights [4096, 4096], float32 in one data file."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes, tensors, last = [], [], "x"
    rng = np.random.default_rng(0)
    with open(folder / "big.bin", "wb") as data:
        for layer in range(layers):
            name = f"layers.{layer}.weight"
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH],
                                 data_location=TensorProto.EXTERNAL)  # fmt: skip
            for key, value in (("location", "big.bin"), ("offset", data.tell()), ("length", WIDTH * WIDTH * 4)):
                tensor.external_data.add(key=key, value=str(value))
            for _ in range(16):
                data.write(rng.standard_normal((WIDTH // 16, WIDTH), np.float32).tobytes())
            tensors.append(tensor)
            nodes += [
                helper.make_node("MatMul", [last, name], [f"p{layer}"], f"matmul_{layer}"),
                helper.make_node("Sigmoid", [f"p{layer}"], [f"s{layer}"], f"sigmoid_{layer}"),
                helper.make_node("Mul", [f"p{layer}", f"s{layer}"], [f"m{layer}"], f"mul_{layer}"),
                helper.make_node("Reshape", [f"m{layer}", "shape"], [f"r{layer}"], f"reshape_{layer}", allowzero=1),
            ]  # fmt: skip
            last = f"r{layer}"
    tensors.append(helper.make_tensor("shape", TensorProto.INT64, [2], [1, WIDTH]))
    info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, WIDTH])
    graph = helper.make_graph(nodes, "large", [info("x")], [info(last)], tensors)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(model, folder / "big.onnx")
    return folder / "big.onnx"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0)
    args = parser.parse_args()
    source = make(OUT, round(args.gib * 2**30 / (WIDTH * WIDTH * 4)))
    size = (OUT / "big.bin").stat().st_size
    ringstep = [Path(sys.executable).parent / "ringstep", "-q", "sanitize", source]
    rows: dict[str, Run] = {
        "cp": run(["cp", "--reflink=never", OUT / "big.bin", OUT / "copy.bin"], OUT / "cp.log"),
    }
    os.remove(OUT / "copy.bin")
    rows["into a new file"] = run([*ringstep, "-o", OUT / "out" / "big.onnx"], OUT / "out.log")
    shutil.rmtree(OUT / "out")
    rows["in place"] = run([*ringstep, "--in-place"], OUT / "in-place.log")
    table = [
        (name, f"{r.seconds:.1f}", f"{size / r.seconds / 1e9:.2f}", f"{r.seconds / rows['cp'].seconds:.2f}",
         console.human_bytes(r.anon_bytes), console.human_bytes(r.max_rss_bytes)) for name, r in rows.items()
    ]  # fmt: skip
    columns = ["", "seconds", "GB/s", "of cp", "RssAnon", "max RSS"]
    console.table(f"{console.human_bytes(size)} of weights", columns, table)
    shutil.rmtree(OUT)


if __name__ == "__main__":
    main()

"""The peers' environments: build/peers/NAME, a venv each with pinned packages."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from measure import BUILD

# Every direct dependency that does the work is pinned; torch and onnxruntime are the releases ringstep uses.
PINS = {
    "optimum": [
        "optimum==2.1.0",
        "optimum-onnx==0.1.0",
        "transformers==4.57.6",  # optimum-onnx 0.1.0 does not take transformers 5
        "torch==2.13.0",
        "onnx==1.23.2",
        "onnxruntime==1.32.0",
        "numpy==2.4.6",
    ],
    "genai": [
        "onnxruntime-genai==0.18.0",
        "onnxruntime==1.32.0",
        "transformers==5.24.0",
        "torch==2.13.0",
        "onnx==1.23.2",
        "onnx-ir==1.1.0",
        "numpy==2.4.6",
    ],
    "optimum-executorch": [
        "optimum-executorch==1.1.0",
        "optimum==2.0.0",
        "transformers==5.0.0rc1",
        "executorch==1.5.1",
        "torchao==0.18.0",
        "torch==2.13.0",
    ],
    "executorch": [
        "executorch==1.5.1",
        "torchao==0.18.0",
        "torch==2.13.0",
        "hydra-core==1.3.8",
        "omegaconf==2.3.1",
        "transformers==5.24.0",
        "safetensors==0.8.0",
        "numpy==2.4.6",
    ],
    "onnxslim": ["onnxslim==0.1.98", "onnx==1.23.2", "onnxruntime==1.32.0", "numpy==2.4.6"],
    "onnxsim": ["onnxsim==0.8.1", "onnx==1.23.2", "onnxruntime==1.32.0", "numpy==2.4.6"],
}


def env(name: str) -> Path:
    """Return a peer's environment folder, made on first use and again when its pins change."""
    folder, pins = BUILD / "peers" / name, "\n".join(PINS[name]) + "\n"
    stamp = folder / "pins.txt"
    if stamp.is_file() and stamp.read_text() == pins:
        return folder
    print(f"making {folder.relative_to(BUILD.parent)}", file=sys.stderr)
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *PINS[name]], check=True)
    stamp.write_text(pins)  # last: an interrupted install leaves no stamp
    return folder


def python(name: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return env(name) / "bin" / "python"


if __name__ == "__main__":
    for peer in PINS:
        print(env(peer))

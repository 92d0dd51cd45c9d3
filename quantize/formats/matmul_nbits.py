"""Float step graphs for CPUs: every linear a com.microsoft MatMulNBits, its numbers in one file for all graphs.

    Gemm(x, weight [out, in] float)  ─▶  MatMulNBits(x, B, scales, zero_points)

    B            uint8 [out, blocks, block * b / 8]  along in, the first number in the lowest bits
    scales       like x [out, blocks]
    zero_points  uint8 [out, ceil(blocks * b / 8)]   packed likewise; none for symmetric weights: zero is 2^(b-1)

weights.nbits.bin holds them, written one weight at a time, and what else of the float graphs lies in files (norms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantize.grid import Grid, QuantisedWeight
from quantize.pack import pack
from quantize.parameters import GridOf, WeightOf, linears
from recipes.plan import Plan
from recipes.weights import key
from ringstep.errors import RingstepError
from ringstep.files import new_file
from sanitize import graph as graphs
from sanitize import tensors
from sanitize.model_file import read_model, write_model

DATA = "weights.nbits.bin"
DOMAIN = "com.microsoft"
BITS = (2, 4, 8)
BLOCKS = (16, 32, 64, 128, 256)  # what the operator takes
ALIGN = 64
LEVELS = (0, 1, 2, 3, 4)  # unset, float32, float16, bfloat16, int8: the least precision the products may have

Tick = Callable[[float], None]


@dataclass(frozen=True)
class Place:
    """An array in the data file."""

    offset: int
    shape: tuple[int, ...]
    dtype: ir.DataType

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize  # type: ignore[return-value]


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] in the data file."""

    shape: tuple[int, int]
    bits: int
    block: int
    numbers: Place
    scales: Place
    zeros: Place | None


def write_matmul_nbits(
    plan: Plan, sources: Sequence[Path], folder: Path, grid_of: GridOf, weight_of: WeightOf, *, accuracy_level: int = 0,
    tick: Tick = lambda _: None,
) -> list[Path]:  # fmt: skip
    """Rewrite the float graphs `sources` (decode, prefill chunks) into `folder` under their names; returns the files.

    Every linear whose grid_of(path) is not None becomes a MatMulNBits with the weight that weight_of(path) gives, asked
    for once. `accuracy_level` 4 lets the CPU round activations to 8 bits as it goes: faster, and no longer the weights'
    own product. `tick` is told the bytes of weights written. Graphs that refer to old weights are removed before the
    weights change. Raises RingstepError naming the tensor for what the operator cannot hold, for a linear that a graph
    lacks, and when the files cannot be written.
    """
    if accuracy_level not in LEVELS:
        raise RingstepError(f"accuracy_level {accuracy_level} does not exist; use one of {', '.join(map(str, LEVELS))}")
    targets = [folder / source.name for source in sources]
    for source, target in zip(sources, targets, strict=True):
        if target.resolve() == source.resolve():
            raise RingstepError(f"{target} would replace the float graph; give another folder")
    paths = {key(source): path for path, source in linears(plan).items() if grid_of(path) is not None}
    models = [read_model(source) for source in sources]
    found = [_gemms(model, paths, source) for model, source in zip(models, sources, strict=True)]
    types = {node.inputs[0].dtype for gemms in found for node in gemms.values()}  # type: ignore[union-attr]
    if len(types) != 1 or (dtype := types.pop()) not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise RingstepError(f"{sources[0]}: its linears must all be of float32 or all of float16")
    with new_file(folder / DATA) as file:
        packed = {}
        for name, path in paths.items():
            shape = linears(plan)[path].out_shape
            packed[name] = _write(file, weight_of(path), f"tensor {name} ({path})", shape, dtype)
            tick(packed[name].numbers.nbytes + packed[name].scales.nbytes)
        for model, gemms in zip(models, found, strict=True):
            for name, node in gemms.items():
                _replace(node, name, packed[name], folder, accuracy_level)
            model.graph.opset_imports[DOMAIN] = 1
        _carry(file, models, folder)
        for target in targets:
            target.unlink(missing_ok=True)
    for model, target in zip(models, targets, strict=True):
        write_model(model, target, keep=folder)
    return targets


def check_matmul_nbits(plan: Plan, grid_of: GridOf) -> None:
    """Raise RingstepError naming the tensor for a grid that the operator cannot hold."""
    for path, source in linears(plan).items():
        if grid := grid_of(path):
            block_of(grid, source.out_shape[1], f"tensor {key(source)} ({path})")


def _gemms(model: ir.Model, paths: dict[str, str], source: Path) -> dict[str, ir.Node]:
    """The linears of a graph by the name of their weight, each of `paths` there once."""
    found: dict[str, ir.Node] = {}
    for node in model.graph:
        weight = node.inputs[1] if node.op_type == "Gemm" and len(node.inputs) > 1 else None
        if weight is None or weight.const_value is None or weight.name not in paths:
            continue
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}
        have = {name: graphs.attribute(node, name, 0 if "trans" in name else 1.0) for name in plain}
        if have != plain or (len(node.inputs) > 2 and node.inputs[2] is not None) or weight.name in found:
            raise RingstepError(f"{source}: node {node.name} is not the one Gemm(x, weight, transB=1) of {weight.name}")
        found[weight.name] = node
    for name in paths:
        if name not in found:
            raise RingstepError(f"{source}: no Gemm reads the weight {name}; is it the graph of this model?")
    return found


def _write(file: BinaryIO, weight: QuantisedWeight, where: str, shape: tuple[int, ...], dtype: ir.DataType) -> Packed:
    grid, (outputs, inputs) = weight.grid, weight.q.shape
    if (outputs, inputs) != shape:
        raise RingstepError(f"{where}: quantised as {[outputs, inputs]}, the model has {list(shape)}")
    block = block_of(grid, inputs, where)
    blocks = -(-inputs // block)
    middle = 1 << grid.bits - 1 if grid.symmetric else 0
    # Scales and zeros of wider blocks, and of whole rows, are repeated.
    owners = np.arange(blocks) * block // grid.width(inputs)
    scale = weight.scale[:, owners].astype(dtype.numpy())
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise RingstepError(f"{where}: a scale is not finite and positive in {dtype.name}")
    zero = None if weight.zero is None else weight.zero[:, owners]
    q = weight.q.view(np.uint8) + np.uint8(middle)  # in bytes that wrap, -8 + 8 is 0
    if left := blocks * block - inputs:
        fill = np.full((outputs, left), middle, np.uint8) if zero is None else np.repeat(zero[:, -1:], left, axis=1)
        q = np.concatenate([q, fill.astype(np.uint8)], axis=1)
    numbers = pack(q, grid.bits, signed=False).reshape(outputs, blocks, block * grid.bits // 8)
    zeros = None if zero is None else pack(zero, grid.bits, signed=False)
    return Packed(
        (outputs, inputs), grid.bits, block, _append(file, numbers, ir.DataType.UINT8), _append(file, scale, dtype),
        None if zeros is None else _append(file, zeros, ir.DataType.UINT8),
    )  # fmt: skip


def block_of(grid: Grid, inputs: int, where: str) -> int:
    """The operator's block for a grid's: the largest that divides it, the one of fewest bytes for one scale a row."""
    if grid.bits not in BITS:
        raise RingstepError(f"{where}: MatMulNBits has no {grid.bits} bits, only {', '.join(map(str, BITS))}")
    if grid.block is None or grid.block >= inputs:
        # The last block is filled up, and every block has a scale: 64 for 576 inputs, 128 for 1536.
        return min((128, 64, 32, 16), key=lambda size: -(-inputs // size) * (size * grid.bits + 32))
    block = max((size for size in BLOCKS if grid.block % size == 0), default=None)
    if block is None:
        raise RingstepError(f"{where}: blocks of {grid.block} are no multiple of one of {', '.join(map(str, BLOCKS))}")
    return block


def _append(file: BinaryIO, values: NDArray[Any], dtype: ir.DataType) -> Place:
    file.write(b"\0" * (-file.tell() % ALIGN))
    place = Place(file.tell(), values.shape, dtype)
    file.write(np.ascontiguousarray(values).data)
    return place


def _external(place: Place, name: str, folder: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        DATA, place.offset, place.nbytes, place.dtype, name=name, shape=ir.Shape(place.shape), base_dir=folder
    )


def _replace(node: ir.Node, name: str, packed: Packed, folder: Path, accuracy_level: int) -> None:
    add = lambda part, place: graphs.initializer(node, f"{name}.{part}", _external(place, name, folder))
    inputs = [node.inputs[0], add("numbers", packed.numbers), add("scales", packed.scales)]
    if packed.zeros is not None:
        inputs.append(add("zeros", packed.zeros))
    attributes = {"K": packed.shape[1], "N": packed.shape[0], "bits": packed.bits, "block_size": packed.block}
    if accuracy_level:
        attributes["accuracy_level"] = accuracy_level
    base = (node.name or name).removesuffix("/Gemm")
    made = graphs.insert(
        node, "MatMulNBits", inputs, attributes, name=f"{base}/MatMulNBits", like=node.outputs[0], domain=DOMAIN
    )
    graphs.swap(node, made)


def _carry(file: BinaryIO, models: Sequence[ir.Model], folder: Path) -> None:
    """Take over what else the graphs keep in files, each once."""
    known: dict[tuple[str, int, int], Place] = {}
    for model in models:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor) or tensor.location == DATA:
                continue
            at = tensors.place(tensor)
            assert at is not None
            if at not in known:
                file.write(b"\0" * (-file.tell() % ALIGN))
                known[at] = Place(file.tell(), tuple(tensor.shape.numpy()), tensor.dtype)
                for chunk in tensors.chunks(tensor):
                    file.write(chunk)
            value.const_value = _external(known[at], value.name or "", folder)

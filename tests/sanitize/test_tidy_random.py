"""Random graphs of what the tidying passes look at: outputs keep their bits, a second run finds nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import in_if, run
from onnx import helper, numpy_helper
from test_scale import PASSES, TARGET

from sanitize.model_file import read_model, write_model
from sanitize.pipeline import sanitize

TYPES = {np.dtype(np.float32): 1, np.dtype(np.int64): 7, np.dtype(np.bool_): 9, np.dtype(np.float64): 11,
         np.dtype(np.float16): 10, np.dtype(np.int32): 6}  # fmt: skip


class Maker:
    """Grows a graph one node at a time; every value's array is known, so that every node is valid."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.dims: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, np.dtype] = {}
        for name in ("x", "z"):
            self.know(
                name, tuple(int(d) for d in self.rng.choice([1, 1, 2, 3, 4], self.rng.integers(1, 4))), np.float32
            )

    def know(self, name: str, dims: tuple[int, ...], dtype: object) -> str:
        self.dims[name], self.types[name] = dims, np.dtype(dtype)  # type: ignore[call-overload]
        return name

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.tensors) + len(self.nodes)}"
        if self.rng.random() < 0.3:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        else:
            self.tensors.append(numpy_helper.from_array(array, name))
        return self.know(name, array.shape, array.dtype)

    def add(self, op: str, inputs: list[str], dims: tuple[int, ...], dtype: object, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return self.know(name, tuple(int(d) for d in dims), dtype)

    def pick(self, kind: str = "f") -> str:
        return str(self.rng.choice([n for n in self.dims if self.types[n].kind in kind]))

    def step(self) -> None:
        rng, a = self.rng, self.pick()
        dims, dtype = self.dims[a], self.types[a]
        choice = rng.integers(0, 16)
        if choice == 0:
            self.add(str(rng.choice(["Neg", "Identity", "Abs", "Exp", "Tanh", "Dropout"])), [a], dims, dtype)
        elif choice == 1:
            number = rng.choice(np.array([0.0, -0.0, 1.0, 2.0])).astype(dtype)
            shape = [(), (1,), (1,) * len(dims), dims][rng.integers(0, 4)]
            pair = [a, self.constant(np.full(shape, number, dtype))]
            op = str(rng.choice(["Add", "Sub", "Mul", "Div"]))
            out = np.broadcast_shapes(dims, shape)
            self.add(op, pair if rng.random() < 0.7 else pair[::-1], out, dtype)
        elif choice == 2:
            self.add("Transpose", [a], dims[::-1], dtype) if rng.random() < 0.3 else self.permute(a)
        elif choice in (3, 4):
            self.reshape(a)
        elif choice == 5:
            axis = int(rng.integers(0, len(dims) + 1))
            axes = self.constant(np.array([axis - (len(dims) + 1 if rng.random() < 0.3 else 0)]))
            if len(dims) < 5:
                self.add("Unsqueeze", [a, axes], (*dims[:axis], 1, *dims[axis:]), dtype)
        elif choice == 6 and 1 in dims:
            axis = dims.index(1)
            self.add("Squeeze", [a, self.constant(np.array([axis]))], dims[:axis] + dims[axis + 1 :], dtype)
        elif choice == 7:
            # No float16: ONNX Runtime computes it in float32 and drops casts on the way, so no two graphs agree.
            to = np.dtype(rng.choice(["float32", "float64"]))
            self.add("Cast", [a], dims, to, to=TYPES[to])
        elif choice == 8 and dims:
            axis, dim = int(rng.integers(0, len(dims))), dims[0]
            dim = dims[axis]
            start, stop = sorted(int(i) for i in rng.integers(0, dim + 1, 2)) if rng.random() < 0.4 else (0, dim)
            end = stop if stop < dim or rng.random() < 0.5 else np.iinfo(np.int64).max
            arrays = [np.array([start]), np.array([end]), np.array([axis])]
            if stop > start:
                new = (*dims[:axis], stop - start, *dims[axis + 1 :])
                self.add("Slice", [a, *map(self.constant, arrays)], new, dtype)
        elif choice == 9:
            self.add("Expand", [a, self.constant(np.array(dims, np.int64))], dims, dtype)
        elif choice == 10:
            same = [n for n in self.dims if self.dims[n] == dims and self.types[n] == dtype]
            other = str(rng.choice(same))
            self.add(str(rng.choice(["Add", "Mul", "Max"])), [a, other], dims, dtype)
        elif choice == 11 and dims:
            axis = int(rng.integers(0, len(dims)))
            self.add("Concat", [a], dims, dtype, axis=axis)
        elif choice == 12:
            self.constant(rng.normal(size=rng.choice([1, 2, 3], rng.integers(0, 3))).astype(np.float32))
        elif choice == 13 and dims:
            self.add("Flatten", [a], (int(np.prod(dims[:1])), int(np.prod(dims[1:]))), dtype, axis=1)
        elif choice == 14 and np.prod(dims) > 1:
            # Not all alike: ONNX Runtime's Where turns -0.0 into 0.0, which a copy does not.
            mask = np.arange(np.prod(dims)).reshape(dims) % 2 == 0
            other = str(rng.choice([n for n in self.dims if self.dims[n] == dims and self.types[n] == dtype]))
            self.add("Where", [self.constant(mask), a, other], dims, dtype)
        elif choice == 15 and self.nodes and self.nodes[-1].op_type != "Constant":
            again = onnx.NodeProto.FromString(self.nodes[-1].SerializeToString())
            again.output[0] = f"v{len(self.nodes)}"
            first = self.nodes[-1].output[0]
            self.nodes.append(again)
            self.know(again.output[0], self.dims[first], self.types[first])

    def permute(self, a: str) -> None:
        perm = [int(axis) for axis in self.rng.permutation(len(self.dims[a]))]
        if perm:
            self.add("Transpose", [a], tuple(self.dims[a][axis] for axis in perm), self.types[a], perm=perm)

    def reshape(self, a: str) -> None:
        rng, dims = self.rng, self.dims[a]
        size = int(np.prod(dims))
        new = [dims, (size,), (1, size), (size, 1), (*dims, 1)][rng.integers(0, 5)]
        if rng.random() < 0.5 and new:
            # Through the shape of a value, entry by entry.
            shape = self.add("Shape", [a], (len(dims),), np.int64)
            parts = []
            for axis, dim in enumerate(new):
                if axis < len(dims) and dims[axis] == dim:
                    at = self.constant(np.array(axis))
                    entry = self.add("Gather", [shape, at], (), np.int64)
                    parts.append(self.add("Unsqueeze", [entry, self.constant(np.array([0]))], (1,), np.int64))
                else:
                    parts.append(self.constant(np.array([dim])))
            to = self.add("Concat", parts, (len(new),), np.int64, axis=0)
        else:
            entries = list(new)
            if entries and rng.random() < 0.4:
                entries[int(rng.integers(0, len(entries)))] = -1
            to = self.constant(np.array(entries, np.int64))
        self.add("Reshape", [a, to], new, self.types[a])

    def model(self) -> onnx.ModelProto:
        info = lambda n: helper.make_tensor_value_info(n, TYPES[self.types[n]], self.dims[n])
        used = {name for node in self.nodes for name in node.input}
        made = [n.output[0] for n in self.nodes if self.types[n.output[0]].kind == "f"]
        ends = [name for name in made if name not in used or self.rng.random() < 0.1] or made
        graph = helper.make_graph(self.nodes, "g", [info("x"), info("z")], [info(n) for n in ends], self.tensors)
        for index, node in enumerate(graph.node):
            node.name = f"n{index}"
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def attempt(seed: int, folder: Path) -> None:
    maker = Maker(seed)
    while len(maker.nodes) < 25:
        maker.step()
    rng = np.random.default_rng(seed)
    feeds = {n: rng.choice([0.0, -0.0, 1.5, -2.25, 0.375], maker.dims[n]).astype(np.float32) for n in ("x", "z")}
    feeds["choose_branch"] = np.array(bool(seed % 2))
    model = maker.model()
    flat = all(tensor.name not in {o.name for o in model.graph.output} for tensor in model.graph.initializer)
    for case, proto in (("plain", model), ("if", in_if(model))) if flat else (("plain", model),):
        before, after = folder / f"{case}.onnx", folder / f"{case}.after.onnx"
        onnx.save(proto, before)
        loaded = read_model(before)
        sanitize(loaded, TARGET, PASSES)
        assert not any(part.changes for part in sanitize(loaded, TARGET, PASSES))
        write_model(loaded, after)
        onnx.checker.check_model(str(after))
        want, have = run(before, feeds), run(after, feeds)
        assert list(want) == list(have)
        for name in want:
            assert want[name].shape == have[name].shape and want[name].dtype == have[name].dtype
            assert (
                np.where(np.isnan(want[name]), 0, want[name]).tobytes()
                == np.where(np.isnan(have[name]), 0, have[name]).tobytes()
            ), name
        again = read_model(after)
        assert not any(part.changes for part in sanitize(again, TARGET, PASSES))


@pytest.mark.parametrize("seed", range(16))
def test_random_graphs_keep_their_bits(tmp_path: Path, seed: int) -> None:
    attempt(seed, tmp_path)

"""How exact each way to write a quantised linear layer or a K/V cache is on HTP, and which ones its compiler refuses.

    python -m benchmarks.htp_quantised_forms [--chip sm8750 ...] [--what linear storage cache] [--json]

Activations are uint16 throughout. dB is the SNR against float64 on the integers that the NPU got; "grid" is that of
the truth rounded to the output. ONNX Runtime's CPU provider is no reference here: unless told otherwise it computes a
MatMul with constant quantised weights on 8-bit activations (45 dB). "linear" compares forms and shapes, "storage" what
the ONNX file and the context binary of a two-level (LPBQ) layer spend on a weight, "cache" the products q k' and p v of
640 keys. All comes from the compiler and the simulator on a PC: nothing is a latency.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from exporters.qnn import compile_context
from quantize.grid import Grid, QuantisedWeight, min_max, on_scales, on_steps, two_levels
from ringstep import console
from ringstep.devices import Chip, find_device
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db
from sanitize.support.cases import Built
from sanitize.support.compiler import Compiler
from sanitize.support.probes import build

CHIPS = ["qcs6490", "sm8450", "sm8550", "sm8650", "sm8750", "sm8850"]
SHAPES = [(1, 576, 1536), (32, 576, 1536), (32, 2048, 2048)]
BLOCK, KEYS, HEADS, ROWS = 32, 640, 3, 3
# Opset 23 knows every operator here; HTP's plugin and ONNX Runtime 1.32 take it.
OPSET = 23
LINEARS = {
    "int8": ["Gemm transB", "Gemm", "MatMul", "Conv"],
    "int4": ["Gemm transB", "Gemm", "MatMul", "Conv"],
    "lpbq": ["int4 [out, in] transposed", "float32 requantised", "Gemm transB"],
}
STORAGE = ["int4 [out, in] transposed", "int4 [in, out]", "float16 requantised", "float32 requantised"]
CACHES = [
    "uint16", "uint16 as int16", "int16", "int16 behind Concat", "uint8", "uint8 zero 128", "uint8 halves", "float16",
]  # fmt: skip


@dataclass(frozen=True)
class Coded:
    """Integers with their scale and zero point."""

    q: np.ndarray
    scale: np.float32
    zero: np.ndarray

    def real(self) -> np.ndarray:
        """The numbers they stand for, in float64."""
        return (self.q.astype(np.float64) - float(self.zero)) * float(self.scale)


@dataclass(frozen=True)
class Trial:
    """A graph of one output, what it should give in float64, and the output's grid."""

    built: Built
    truth: np.ndarray
    out: Coded


@dataclass(frozen=True)
class Row:
    """One measurement; `snr_db` is None where the NPU refused the graph."""

    chip: str
    what: str
    kind: str
    form: str
    shape: str
    snr_db: float | None
    best_db: float
    file_bits: float | None = None
    """Bits a weight in the ONNX file."""
    binary_bits: float | None = None
    """Bits a weight in the compiled context."""


def coded(values: np.ndarray, dtype: str, zero: int | None = None) -> Coded:
    """Quantise to the values' own range; with `zero` to a symmetric one."""
    info = np.iinfo(dtype)
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if zero is None:
        scale = np.float32((high - low) / (info.max - info.min))
        zero = round(info.min - low / float(scale))
    else:
        scale = np.float32(max(-low, high) / (info.max - zero))
    q = np.clip(np.rint(values / float(scale)) + zero, info.min, info.max).astype(dtype)
    return Coded(q, scale, np.array(zero, dtype))


def pair(x: str, out: str, grid: str) -> str:
    """x quantised on a grid (s<grid>, z<grid>) and dequantised again."""
    return f"{out}q = QuantizeLinear({x}, s{grid}, z{grid}) {out} = DequantizeLinear({out}q, s{grid}, z{grid}) "


def graph(inputs: dict[str, np.ndarray], body: str, truth: np.ndarray, constants: dict[str, Any]) -> Trial:
    """Inputs -> body -> g -> uint16 y on the truth's own range (sy, zy)."""
    out = coded(truth, "uint16")
    kinds = ", ".join(f"{a.dtype}[{','.join(map(str, a.shape))}] {name}" for name, a in inputs.items())
    text = f"({kinds}) => (uint16[{','.join(map(str, truth.shape))}] y) {{ {body} y = QuantizeLinear(g, sy, zy) }}"
    built = build(text, {**constants, "sy": out.scale, "zy": out.zero}, OPSET)
    return Trial(Built(built.model, inputs), truth, out)


def linear(kind: str, form: str, n: int, inner: int, outer: int) -> Trial:
    """n rows of N(0, 1) through random weights [outer, inner]."""
    random = np.random.default_rng(0)
    x = coded(random.standard_normal((n, inner)), "uint16")
    weight = random.standard_normal((outer, inner)) * random.uniform(0.3, 1, (outer, 1)) * inner**-0.5
    grid = Grid(8) if kind == "int8" else Grid(4, block=BLOCK, two_level=True) if kind == "lpbq" else Grid(4)
    scales, _ = min_max(weight, grid)
    made = on_steps(weight, grid, *two_levels(scales)) if grid.two_level else on_scales(weight, grid, scales)
    constants: dict[str, Any] = {"sx": x.scale, "zx": x.zero}
    if made.steps is None:
        body = per_channel(form, kind, made.q, made.scale.reshape(-1), n, constants)
        real = made.q * made.scale.astype(np.float64)
    else:
        assert made.channel_scale is not None
        real = made.q * np.repeat(made.steps * made.channel_scale[:, None].astype(np.float64), BLOCK, 1)
        constants |= {
            "steps": np.ascontiguousarray(made.steps.T), "channel": made.channel_scale,
            "none": np.zeros(outer, np.uint8),
            "z": ("int4", np.zeros(made.steps.T.shape)),
        }  # fmt: skip
        body = two_level(form, made, constants)
    truth = x.real() @ real.T
    out = coded(truth, "uint16")
    constants |= {"so": out.scale, "zo": out.zero}
    return graph({"x": x.q}, f"f = DequantizeLinear(x, sx, zx) {body}", truth, constants)


def per_channel(form: str, kind: str, q: np.ndarray, scale: np.ndarray, n: int, constants: dict[str, Any]) -> str:
    """f -> g on weights with one scale an output channel."""
    turned = form in ("Gemm", "MatMul")
    kept = q.T.copy() if turned else q[:, :, None, None] if form == "Conv" else q
    zero = np.zeros(len(q), np.int8)
    constants |= {"q": ("int4", kept) if kind == "int4" else kept, "s": scale,
                  "z": ("int4", zero) if kind == "int4" else zero}  # fmt: skip
    weight = f"w = DequantizeLinear<axis = {int(turned)}>(q, s, z) "
    if form != "Conv":
        return f"{weight} g = {form.replace(' transB', '<transB = 1>')}(f, w)"
    constants |= {"rows": np.array([1, 1, n, q.shape[1]]), "flat": np.array([n, q.shape[0]])}
    return (
        f"{weight} a = Reshape(f, rows) {pair('a', 'b', 'x')} c = Transpose<perm = [0, 3, 1, 2]>(b) "
        f"{pair('c', 'd', 'x')} e = Conv(d, w) {pair('e', 'h', 'o')} i = Transpose<perm = [0, 2, 3, 1]>(h) "
        f"{pair('i', 'j', 'o')} "
        "g = Reshape(j, flat)"
    )


def two_level(form: str, made: QuantisedWeight, constants: dict[str, Any]) -> str:
    """f -> g on int4 blocks whose scales are a step times the channel's."""
    scales = "scales = DequantizeLinear<axis = 1>(steps, channel, none) "
    blocks = f"<axis = 0, block_size = {BLOCK}>"
    again = f"wq = QuantizeLinear{blocks}(real, scales, z) w = DequantizeLinear{blocks}(wq, same, z) g = MatMul(f, w)"
    direct = f"w = DequantizeLinear{blocks}(q, scales, z) g = MatMul(f, w)"
    if form.endswith("requantised"):
        real = np.ascontiguousarray(made.dequantised().T)
        constants["same"] = np.ascontiguousarray(made.scale.T)
        half = form.startswith("float16")
        constants["half" if half else "real"] = real.astype(np.float16) if half else real
        return scales + ("real = Cast<to = 1>(half) " if half else "") + again
    if form == "int4 [in, out]":
        constants["q"] = ("int4", made.q.T)
        return scales + direct
    constants["stored"] = ("int4", made.q)
    if form == "Gemm transB":
        constants |= {"steps": constants["steps"].T.copy(), "z": ("int4", np.zeros(constants["steps"].T.shape))}
        return (
            "scales = DequantizeLinear<axis = 0>(steps, channel, none) "
            f"w = DequantizeLinear<axis = 1, block_size = {BLOCK}>(stored, scales, z) g = Gemm<transB = 1>(f, w)"
        )
    # ONNX Runtime folds the Transpose before HTP's plugin sees the graph.
    return f"{scales} q = Transpose<perm = [1, 0]>(stored) {direct}"


def cache(product: str, form: str, head_dim: int) -> Trial:
    """q k' with keys, or p v with values, whose channels differ in size as trained ones do."""
    random = np.random.default_rng(0)
    channels = np.exp(0.6 * random.standard_normal((HEADS, 1, head_dim)))
    entries = random.standard_normal((HEADS, KEYS, head_dim)) * channels
    if product == "qk":
        first = coded(random.standard_normal((HEADS, ROWS, head_dim)), "uint16")
        entries = np.ascontiguousarray(entries.swapaxes(1, 2))
    else:
        scores = np.exp(3 * random.standard_normal((HEADS, ROWS, KEYS)))
        p = np.rint(scores / scores.sum(2, keepdims=True) * 65535).astype(np.uint16)
        first = Coded(p, np.float32(1 / 65535), np.array(0, np.uint16))
    if form == "float16":
        half = entries.astype(np.float16)
        body = "f = DequantizeLinear(x, sx, zx) k = Cast<to = 1>(c) g = MatMul(f, k)"
        truth = first.real() @ half.astype(np.float64)
        return graph({"x": first.q, "c": half}, body, truth, {"sx": first.scale, "zx": first.zero})
    dtype = form.split()[0]
    zero = {"int16": 0, "uint16": 32768, "uint8": 128 if form.endswith("128") else None}[dtype]
    own = coded(entries, dtype, zero)
    truth = first.real() @ own.real()
    constants = {"sx": first.scale, "zx": first.zero, "sc": own.scale, "zc": own.zero}
    constants |= {"si": own.scale, "zi": np.array(0, np.int16)}
    inputs = {"x": first.q, "c": own.q}
    body = "f = DequantizeLinear(x, sx, zx) d = DequantizeLinear(c, sc, zc) "
    if form == "uint16 as int16":
        body += pair("d", "k", "i") + "g = MatMul(f, k)"
    elif form == "int16 behind Concat":
        axis = 2 if product == "qk" else 1
        old, new = np.split(own.q, [KEYS - 1], axis)
        inputs = {"x": first.q, "c": np.ascontiguousarray(old), "n": np.ascontiguousarray(new)}
        body += f"e = DequantizeLinear(n, sc, zc) j = Concat<axis = {axis}>(d, e) "
        body += pair("j", "k", "i") + "g = MatMul(f, k)"
    elif form == "uint8 halves":
        return halves(first, coded(entries, "uint16", 32768))
    else:
        body += "g = MatMul(f, d)"
    return graph(inputs, body, truth, constants)


def halves(first: Coded, own: Coded) -> Trial:
    """A uint16 cache split in the graph into uint8 upper parts and uint8 rests, two products, and their sum."""
    step = np.float32(own.scale * 257)
    upper = (np.clip(np.rint(own.real() / step) + 128, 0, 255) - 128) * float(step)
    parts = [coded(first.real() @ part, "uint16") for part in (upper, own.real() - upper)]
    constants: dict[str, Any] = {
        "sx": first.scale, "zx": first.zero, "sc": own.scale, "zc": own.zero, "su": step, "zu": np.uint8(128),
        "sl": np.float32(own.scale * 1.02), "zl": np.uint8(128), "sa": parts[0].scale, "za": parts[0].zero,
        "sb": parts[1].scale, "zb": parts[1].zero,
    }  # fmt: skip
    body = (
        f"f = DequantizeLinear(x, sx, zx) d = DequantizeLinear(c, sc, zc) {pair('d', 'u', 'u')} {pair('u', 'w', 'c')}"
        f"r = Sub(d, w) {pair('r', 't', 'c')} {pair('t', 'l', 'l')} m = MatMul(f, u) {pair('m', 'a', 'a')}"
        f"o = MatMul(f, l) {pair('o', 'b', 'b')} g = Add(a, b)"
    )
    return graph({"x": first.q, "c": own.q}, body, first.real() @ own.real(), constants)


def measure(trial: Trial, compiler: Compiler) -> tuple[float | None, float]:
    """SNR of the simulated output, None if refused, and of the rounded truth."""
    best = snr_db(trial.truth, trial.out.real())
    result = compiler.attempt(trial.built, fp16=compiler.chip.fp16, outputs=True)
    if "out" not in result:
        return None, round(best, 1)
    got = dataclasses.replace(trial.out, q=result["out"][0])
    return round(snr_db(trial.truth, got.real()), 1), round(best, 1)


def bits(trial: Trial, chip: Chip, weights: int) -> tuple[float, float | None]:
    """Bits a weight in the ONNX file and in the context that it compiles to."""
    for tensor in trial.built.model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT4:
            packed = np.array(tensor.int32_data, np.uint8).tobytes()
            tensor.ClearField("int32_data")
            tensor.raw_data = packed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "linear.onnx"
        onnx.save(trial.built.model, path)
        in_file = round(path.stat().st_size * 8 / weights, 2)
        try:
            report = compile_context(path, Path(folder) / "out", chip=chip, fp16=chip.fp16, name="linear")
        except RingstepError:
            return in_file, None
        return in_file, round(report.binary_bytes * 8 / weights, 2)


def rows_of(chip: Chip, what: str) -> Iterator[Row]:
    """Measure one chip."""
    compiler = Compiler(chip)
    try:
        if what == "linear":
            for kind, forms in LINEARS.items():
                for form in forms:
                    for shape in SHAPES:
                        trial = linear(kind, form, *shape)
                        yield Row(chip.name, what, kind, form, "x".join(map(str, shape)), *measure(trial, compiler))
        elif what == "storage":
            for form in STORAGE:
                trial = linear("lpbq", form, 1, 2048, 2048)
                found = measure(trial, compiler)
                yield Row(chip.name, what, "lpbq", form, "1x2048x2048", *found, *bits(trial, chip, 2048 * 2048))
        else:
            for form in CACHES:
                for head_dim in (64, 128):
                    for product in ("qk", "pv"):
                        found = measure(cache(product, form, head_dim), compiler)
                        yield Row(chip.name, what, "cache", form, f"{product} {head_dim}", *found)
    finally:
        compiler.close()


def show(rows: list[Row]) -> None:
    """Print one table for each chip and question."""
    for chip, what in dict.fromkeys((row.chip, row.what) for row in rows):
        mine = [row for row in rows if (row.chip, row.what) == (chip, what)]
        title = f"{chip}, {what}: dB, simulated"
        number = lambda value: "refused" if value is None else value
        if what == "storage":
            lines = [(r.form, number(r.snr_db), r.best_db, r.file_bits, number(r.binary_bits)) for r in mine]
            console.table(title, ["form", "dB", "grid", "file bit/weight", "binary bit/weight"], lines)
            continue
        shapes = list(dict.fromkeys(row.shape for row in mine))
        table = []
        for kind, form in dict.fromkeys((row.kind, row.form) for row in mine):
            cells = {row.shape: number(row.snr_db) for row in mine if (row.kind, row.form) == (kind, form)}
            table.append((kind, form, *(cells[shape] for shape in shapes)))
        best = {row.shape: row.best_db for row in reversed(mine)}
        table.append(("", "grid", *(best[shape] for shape in shapes)))
        console.table(title, ["weights" if what == "linear" else "", "form", *shapes], table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="+", default=["sm8750"], help=f"such as {', '.join(CHIPS)}")
    questions = ["linear", "storage", "cache"]
    parser.add_argument("--what", choices=questions, nargs="+", default=questions)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [row for name in asked.chip for what in asked.what for row in rows_of(find_device(name).chip, what)]
    if asked.json:
        console.print_json([dataclasses.asdict(row) for row in rows])
        return
    show(rows)


if __name__ == "__main__":
    main()

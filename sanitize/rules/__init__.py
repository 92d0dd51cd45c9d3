"""The rules of the lint, one table: docs/lint.md is made from it, `ringstep lint` runs down it."""

from __future__ import annotations

from sanitize.rules import accuracy, caches, memory, operators, shapes, types, weights
from sanitize.rules.subject import Rule

HTP = ("qnn-htp",)
CPU = ("ort-mobile", "xnnpack")
ALL = HTP + CPU

RULES = (
    Rule(
        "unsupported-operator", "error", HTP, "an operator that the chip lacks",
        "The compiler refused the operator's smallest model on this architecture. A node that it refuses runs on the "
        "CPU, or stops the compilation.",
        "rewrite it with operators that the chip has", None, operators.unsupported,
    ),
    Rule(
        "wrong-operator", "error", HTP, "an operator that compiles and computes something else",
        "The compiler takes it without a word; on the simulator its result has nothing to do with the operator's.",
        "rewrite it with other operators", None, operators.wrong,
    ),
    Rule(
        "missing-kernel", "error", CPU, "an operator without a kernel on the CPU",
        "ONNX Runtime opens no session with a node for which its CPU provider has no kernel of that type and opset.",
        "rewrite it, or convert the model to an older opset", None, operators.on_cpu,
    ),
    Rule(
        "beside-xnnpack", "warning", ("xnnpack",), "a node that XNNPACK leaves to the CPU provider",
        "XNNPACK takes few operators, most of them over matrices or images; the rest runs on the CPU provider.",
        "nothing is wrong; where such nodes dominate, the CPU provider alone is as fast", None,
        operators.beside_xnnpack,
    ),
    Rule(
        "if-branches", "error", HTP, "an If whose branch reads a weight of the graph around it",
        "HTP takes an If whose branches hold all their constants; with weights from outside the whole If is refused.",
        "choose outside of the model, or compute both branches and select with Where", None, operators.branches,
    ),
    Rule(
        "norm-rows", "error", HTP, "RMSNormalization over more than 8 rows",
        "HTP's kernel returns garbage rows, without an error, when the third dim from the end exceeds 8.",
        "reshape to [rows, size] around it", "fuse-rms-norm", operators.norm_rows,
    ),
    Rule(
        "output-encoding", "error", HTP, "a 16-bit Sigmoid, Tanh or Log in an encoding that its kernel cannot write",
        "HTP's 16-bit Sigmoid and HardSigmoid always write in scale 2^-16, zero point 0, Tanh in 2^-15, 32768. With "
        "any other output encoding the graph compiles and misreads the result. Log collapses when the output "
        "scale is 2^-14 or finer.",
        "quantise its output in the kernel's encoding", None, operators.output_encodings,
    ),
    Rule(
        "nan-guard", "warning", ALL, "a NaN guard left by an exporter",
        "Exporters guard softmax rows that are masked whole; finite masks make no NaN, and the guard costs two kernels "
        "a layer and hides what goes wrong.",
        "remove the IsNaN and its Where", "nan-guards", operators.nan_guards,
    ),
    Rule(
        "rank", "error", HTP, "tensors of rank 5 and more",
        "HTP's tensors end at rank 5, and most of its kernels at rank 4.",
        "fold dims together with a Reshape", None, shapes.ranks,
    ),
    Rule(
        "dynamic-shape", "error", HTP, "a shape that is not known before the model runs",
        "An HTP graph is compiled for fixed shapes.",
        "export with fixed sizes, or fix them by `ringstep sanitize --dim NAME=SIZE`; for several, one graph each",
        None, shapes.unknown_dims,
    ),
    Rule(
        "empty-tensor", "error", HTP, "a tensor without elements",
        "The compiler crashes on dims of 0, which dynamic exports use for a cache that is still empty.",
        "leave the tensor out, or start from a cache of fixed length", None, shapes.empty,
    ),
    Rule(
        "rank-0", "note", HTP, "scalars of rank 0",
        "This compiler takes them, as the observations say; converters of older SDKs do not, and hosts disagree on how "
        "to feed them.",
        "give it the shape [1]", None, shapes.scalars,
    ),
    Rule(
        "rank-0-axes", "error", ALL, "axes given as a scalar",
        "ONNX wants axes, starts and the like as lists. HTP's compiler lets it pass; ONNX Runtime stops at it, so "
        "nothing can check the model.",
        "give the axes the shape [1]", "rank0", shapes.scalar_axes,
    ),
    Rule(
        "allowzero", "warning", HTP, "Reshape with allowzero=1",
        "Without a zero in the shape it means nothing, but converters refuse it; with one the tensor is empty.",
        "clear the attribute", "reshape-allowzero", shapes.allowzero,
    ),
    Rule(
        "wide-io", "warning", HTP, "inputs or outputs of int64 or bool",
        "HTP has neither: they are converted at the graph's edge on every step, and other converters refuse them.",
        "use int32, or uint8 for flags", "narrow-types", types.wide_io,
    ),
    Rule(
        "float64", "warning", HTP, "double precision",
        "HTP has no float64: inputs and outputs of it are refused, values between are computed in half precision.",
        "use float32", "narrow-types", types.doubles,
    ),
    Rule(
        "bfloat16", "error", HTP, "bfloat16",
        "The compiler refuses every bfloat16 tensor that is not a constant.",
        "export in float32 or float16", None, types.brain_floats,
    ),
    Rule(
        "floats", "error", HTP, "floats on a chip without them",
        "v68 computes quantised integers only; every float operator and every float input or output is refused.",
        "quantise the model (16-bit activations), its inputs and outputs too", None, types.floats_on_fixed_point,
    ),
    Rule(
        "16x16", "error", HTP, "16-bit weights on a chip that multiplies 16 by 8 bits",
        "Older architectures multiply 16-bit data with 8-bit weights only.",
        "quantise these weights to 8 bits", None, types.wide_products,
    ),
    Rule(
        "infinity", "warning", ALL, "an infinite constant",
        "HTP computes with its largest number instead, other engines with infinity: a row that is masked whole is NaN "
        "on one and finite on the other.",
        "mask with a finite number, such as -10000 in half precision", "infinities", types.infinities,
    ),
    Rule(
        "blocked-weights", "error", HTP, "weights in blocks behind one DequantizeLinear",
        "HTP refuses a DequantizeLinear with block_size over constants and leaves it to the CPU.",
        "quantise per channel, or in HTP's two-level form: a float weight, then QuantizeLinear and DequantizeLinear in "
        "blocks",
        None, types.blocked,
    ),
    Rule(
        "int4-zero-point", "error", HTP, "int4 weights without a zero point, and int2 weights",
        "The compiler misreads negative int4 weights that have no zero point, and int2 weights with and without: the "
        "graph compiles and computes garbage.",
        "give the DequantizeLinear a zero point of int4 zeros", None, types.signed_nibbles,
    ),
    Rule(
        "inline-weights", "error", ALL, "weights inside a protobuf of more than 2 GiB",
        "A protobuf ends at 2 GiB: no other tool opens the file.",
        "let `ringstep sanitize -o` store the weights in a file beside the model", None, weights.inline,
    ),
    Rule(
        "duplicate-weights", "warning", ALL, "a tensor stored twice",
        "Tied weights that an exporter wrote twice double the file, the upload and the memory.",
        "let both nodes read one tensor", "duplicates", weights.duplicates,
    ),
    Rule(
        "float-weights", "warning", ALL, "a float weight in a quantised model",
        "Most often the head: it is the largest matrix of a small model and eats what quantising the rest gained.",
        "quantise it too, at 8 bits if 4 lose too much", None, weights.float_head,
    ),
    Rule(
        "cache-shape", "error", ALL, "a cache that comes out in another shape",
        "What a step returns is the next step's input.",
        "make the shapes equal", None, caches.shapes,
    ),
    Rule(
        "cache-type", "error", ALL, "a cache that comes out in another type",
        "What a step returns is the next step's input; a host that copies bytes feeds garbage.",
        "make the types equal", None, caches.types,
    ),
    Rule(
        "cache-encoding", "error", ALL, "a quantised cache read in another encoding than it is written in",
        "The host copies integers: another scale or zero point turns them into other numbers.",
        "give input and output one scale and zero point", None, caches.encodings,
    ),
    Rule(
        "cache-unpaired", "warning", ALL, "a cache that nothing writes",
        "Its output is missing or has another name, so a host cannot feed it back.",
        "return it, and name it as the others are", None, caches.unpaired,
    ),
    Rule(
        "graph-memory", "error", HTP, "a graph larger than the chip allows",
        "The compiler stops with \"graph requires estimated allocation of ... KB, limit is ... KB\", after it has done "
        "most of its work.",
        "cut the model by layers into parts", None, memory.over_limit,
    ),
    Rule(
        "inaccurate-operator", "warning", HTP, "an operator whose kernel is poor over its range",
        "Some of HTP's kernels are far from the correctly rounded result over part of their range "
        "(docs/htp-accuracy.md). Without known ranges (`--inputs`) this is a note.",
        "write it in a form that HTP computes right", None, accuracy.poor,
    ),
)  # fmt: skip
"""In the order in which findings are worth reading."""

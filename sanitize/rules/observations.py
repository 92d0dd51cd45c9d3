"""What was seen when the rules were checked against the compiler and its simulator; docs/lint.md shows it."""

from __future__ import annotations

OBSERVED: dict[str, tuple[str, ...]] = {
    "unsupported-operator": (
        "Dynamic data was needed to see it: ONNX Runtime folds Shape, Range, Trilu and the like over constants "
        "before the NPU is asked, so the lint skips what folds. Size is refused even of a static shape.",
        "ONNX functions without a kernel are inlined first: FastGelu, Mish, SwiGLU, NegativeLogLikelihoodLoss are "
        "taken in parts. In float16 ReduceL1, ReduceLogSum and ReduceSumSquare are; in float32 they are not.",
        "MatMulNBits between quantised activations ends the compiler's process (SIGSEGV) from v69 on; in floats it "
        "is taken and right. Tile of rank 5 does the same.",
        "Of 28 models out of torch's two exporters (plain, slimmed, dynamic) the compiler and the lint agreed on "
        "26; the other two held Erf, which is refused alone and taken in 1 + erf(x / sqrt 2), where it becomes a "
        "Gelu.",
        "The fusion to Gelu does not look at the constant: 2 + erf(...) compiles to the same Gelu (4 dB).",
        "Mean in float16 fails at composition (a divisor of the wrong size), in float32 it is taken.",
        "The opset does not matter: the same nodes are taken at 21 to 28.",
    ),
    "wrong-operator": (
        "RandomNormalLike, RandomUniformLike and GatherND of int32 compile and stop when run; STFT in float16 runs "
        "and is far off.",
        "A 16-bit Log looked wrong at first: it is its output scale, see output-encoding.",
    ),
    "if-branches": (
        "If was expected to be refused. It is taken, and right on both branches, while the branches read data and "
        "constants of their own; a weight of the outer graph, or one operator that the NPU lacks, and all of it is "
        "refused. Loop, Scan and sequences are always refused.",
    ),
    "norm-rows": (
        'The rule was "exceeds 8". In a float32 graph the rows are garbage for 9 to 12, and from 9 up where the '
        "last dim is 32 or less; 13 and more with a last dim of 33 and more are right. In a float16 graph 9 up are "
        "garbage, with a last dim of 2048 9 to 12. The leading dims do not matter, rank 2 and 16-bit quantised "
        "norms are right, and so is LayerNormalization. What was seen to be wrong is an error, the rest beyond 8 a "
        "warning.",
    ),
    "output-encoding": (
        "A Sigmoid calibrated to 0..0.75 has 12 dB, a Tanh to -0.8..0.8 has 14: the codes are right for scale 2^-16"
        " and 2^-15. 1/65535 is close enough (89 dB). int16 Sigmoid wants 2^-15, 0. 8-bit kernels write any "
        "encoding.",
        "Log gives one code for everything at output scale 2^-14 and below, whatever its input, and 80 dB at "
        "4/65535, just above. Thirty other 16-bit operators were tried at scales from 2^-11 to 2^-16 and are right.",
    ),
    "nan-guard": ("IsNaN was expected to be refused. Every chip with floats takes it, and the guard's Where too.",),
    "rank": (
        "Rank 5 is taken by data movement and by Add, Sub, Mul, Div, comparisons, Softmax, Sigmoid, Gelu, Exp, "
        "Relu, Abs and the reductions, and refused for MatMul, the norms, Neg, Sqrt, Pow, Max, Min, Not, TopK, "
        "ArgMax; rank 6 is refused for everything.",
    ),
    "dynamic-shape": ("A dynamic dim is not named: the whole graph goes to the CPU.",),
    "rank-0": (
        "Scalars are taken as inputs, outputs, constants and between nodes, and computed right on every float chip.",
    ),
    "rank-0-axes": (
        "The HTP compiler reads a scalar as a list of one; ONNX Runtime's CPU kernels for Squeeze and Reduce stop "
        "when the model runs.",
    ),
    "allowzero": ("allowzero=1 is taken while the shape holds no zero.",),
    "empty-tensor": (
        "As the input of Abs it ends the compiler's process (SIGFPE); as one part of a Concat the graph compiles "
        "and fails when run; Reshape with allowzero=1 to an empty tensor is refused.",
    ),
    "wide-io": (
        "int64 and bool are taken as inputs, outputs and between nodes (comparisons, And, Or, Not, Where, Gather's "
        "ids), so this is a warning. int64 is refused by Transpose and GatherND where int32 is taken.",
    ),
    "float64": ("Refused as input or output; Cast, compute, Cast inside the graph is taken, in half precision.",),
    "floats": (
        "v68 refuses every float computation; Reshape, Squeeze and Cast of floats are taken, and so are float "
        "inputs and outputs that only pass QuantizeLinear and DequantizeLinear (134 dB). Devices with v68 were "
        "reported to refuse float inputs, so those are a warning.",
    ),
    "16x16": (
        "16-bit weights (MatMul, Gemm, Conv) and a LayerNormalization with 16-bit weights are refused on v68 and "
        "v69 and taken from v73 on. A MatMul of two 16-bit activations, as attention has it, is taken by every "
        "chip, v68 included, and so is RMSNormalization with 16-bit weights: the rule looks at constants only.",
    ),
    "infinity": (
        "-inf on its own becomes the largest number. It is taken in masks, Where, Max, Clip and Pad, and right "
        "where a row has one finite element. A row that is masked whole is finite on HTP and NaN in ONNX Runtime. "
        "With -10000 such a row differs too (15 dB): in half precision the scores vanish beside the mask; nobody "
        "reads that row.",
    ),
    "blocked-weights": (
        "Refused with int4 and int8, float and 16-bit activations; MatMulNBits itself is taken in floats.",
    ),
    "int4-zero-point": (
        "-10 dB without the zero point and 48 dB with it, per tensor and per channel; all-positive weights are "
        "right either way, which is how the cause was found. int8 needs none. int2 with a zero point: -10 dB. uint4"
        " is refused.",
    ),
    "graph-memory": (
        "A chain of MatMuls with 64 MiB of int8 weights each: 2240 MiB are refused for v68 and v69 "
        "(QNN_COMMON_ERROR_MEM_ALLOC) and compile for v73 and v75 to a binary of 2244 MB; for v79 3264 and 3456 MiB"
        " compile, 3648 and 3840 are refused. So the 2 GiB are the limit of v68 and v69 only, and the compiler "
        "counts some percent more than the weights. Where all weights were equal 3840 MiB compiled: they are stored"
        " once. The estimate counts floats as 2 bytes, 64-bit integers as 4, quantised weights as stored, 5 % over,"
        " and the activations alive at one time.",
    ),
}

"""What every pass takes for granted of a file, checked once: no pass looks for an input that an operator must have.

onnx's own checker is too strict for that: it refuses what rank0 mends, and what ONNX Runtime takes in passing (a
LayerNormalization of opset 13). Here only what would trip passes is refused: text that is no text, nodes without
inputs, outputs, attributes or bodies that their operator demands, values that nothing makes, and tensors that
are not as long as their shape says.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import AttributeProto, TensorProto, defs

from ringstep.errors import RingstepError

LATEST = defs.onnx_opset_version()
SEVERAL: dict[int, int] = {
    AttributeProto.INT: AttributeProto.INTS,
    AttributeProto.FLOAT: AttributeProto.FLOATS,
    AttributeProto.STRING: AttributeProto.STRINGS,
}
"""One number where a list belongs: rank0 makes a list of it."""
HOLDERS: dict[int, Any] = {AttributeProto.TENSOR: "t", AttributeProto.GRAPH: "g", AttributeProto.TYPE_PROTO: "tp"}
LISTS: dict[int, str] = {
    TensorProto.FLOAT: "float_data", TensorProto.COMPLEX64: "float_data", TensorProto.DOUBLE: "double_data",
    TensorProto.COMPLEX128: "double_data", TensorProto.INT64: "int64_data", TensorProto.UINT64: "uint64_data",
    TensorProto.UINT32: "uint64_data", TensorProto.STRING: "string_data",
}  # fmt: skip
"""Where a tensor's numbers lie that are not in raw_data; int32_data for all others."""
SPARSE = "sparse tensors are not taken, here nor by the targets; export it dense"
MOST = 1 << 62  # bytes; more is no size
ANY = 1 << 31
KINDS: dict[object, int] = {
    kind: int(getattr(AttributeProto, name))
    for name, kind in defs.OpSchema.AttrType.__members__.items()  # type: ignore[attr-defined]
}
INT, FLOAT, INTS = map(int, (AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.INTS))
_ATTENTION: dict[str, int] = dict(scale=FLOAT, num_heads=INT, mask_filter_value=FLOAT, unidirectional=INT,
                                  do_rotary=INT, softcap=FLOAT, rotary_embedding_dim=INT, interleaved=INT)  # fmt: skip
MICROSOFT: dict[str, tuple[int, int, dict[str, int], tuple[str, ...]]] = {
    "SkipLayerNormalization": (3, 4, dict(epsilon=FLOAT), ()),
    "SkipSimplifiedLayerNormalization": (3, 4, dict(epsilon=FLOAT), ()),
    "Attention": (2, 2, _ATTENTION | dict(qkv_hidden_sizes=INTS), ("num_heads",)),
    "MultiHeadAttention": (1, 4, _ATTENTION, ("num_heads",)),
    "GroupQueryAttention": (7, 4, _ATTENTION | dict(kv_num_heads=INT, causal=INT, local_window_size=INT,
                            rotary_interleaved=INT), ("num_heads", "kv_num_heads")),
    "RotaryEmbedding": (4, 1, _ATTENTION | dict(is_packed_batching=INT), ()),
    "MatMulNBits": (3, 1, dict(bits=INT, block_size=INT, K=INT, N=INT), ("block_size", "K", "N")),
    "FusedMatMul": (2, 1, dict(alpha=FLOAT, transA=INT, transB=INT, transBatchA=INT, transBatchB=INT), ()),
    "Gelu": (1, 1, {}, ()), "BiasGelu": (2, 1, {}, ()), "FastGelu": (1, 1, {}, ()),
    "QuickGelu": (1, 1, dict(alpha=FLOAT), ()),
}  # fmt: skip
"""Operators of ONNX Runtime that passes take apart, of which onnx has no schemas: the first inputs that must be given,
outputs at most, types of attributes, and those that must be given."""


@dataclass(frozen=True)
class _Needs:
    """What a schema demands of a node."""

    inputs: range
    outputs: range
    kinds: Mapping[str, int]
    """Attribute types by name."""
    required: tuple[str, ...]
    given: tuple[bool, ...]
    """Which inputs may not be left out (""); the last one speaks for all that follow."""


def check(proto: onnx.ModelProto, path: Path) -> None:
    """Raise RingstepError, naming the node or tensor, for what no pass should have to look out for.

    Dims below zero, which some exporters write for open ones, become open.
    """
    versions = _imports(proto.opset_import, str(path))
    _text(str(path), "the producer", proto.producer_name, proto.producer_version, proto.domain)
    _graph(proto.graph, str(path), versions, set(), str(path))
    for function in proto.functions:
        where = f"{path}: function {function.name!r}"
        _text(where, "its signature", function.name, function.domain, *function.input, *function.output,
              *function.attribute)  # fmt: skip
        inner = versions | _imports(function.opset_import, where)
        _nodes(function.node, where, inner, set(function.input))
        made = {*function.input, *(name for node in function.node for name in node.output)}
        _need_all(function.output, made, where)


def check_calls(model: ir.Model, path: Path) -> None:
    """Raise RingstepError where a function was called without an input that a node within it needs; inlined by now."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        domain = "" if node.domain == "ai.onnx" else node.domain
        needs = _needs(node.op_type, domain, model.graph.opset_imports.get(domain, 1))
        for index, value in enumerate(node.inputs if needs is not None else ()):
            if value is None and needs is not None and needs.given[min(index, len(needs.given) - 1)]:
                raise RingstepError(f"{path}: node {node.op_type!r} of a function lacks its input {index}, which the "
                                    "caller leaves out; export it again")  # fmt: skip


def _imports(imports: Iterable[onnx.OperatorSetIdProto], where: str) -> dict[str, int]:
    versions = {}
    for item in imports:
        _text(where, "an operator domain", item.domain)
        if not 0 < item.version < 1 << 31:
            raise RingstepError(f"{where}: imports version {item.version} of the operators of {item.domain!r}")
        versions["" if item.domain == "ai.onnx" else item.domain] = item.version
    return versions


def _text(where: str, what: str, *texts: str) -> None:
    """Protobuf hands out as bytes what is no UTF-8."""
    for text in texts:
        if not isinstance(text, str):
            raise RingstepError(f"{where}: {what} is {bytes(text)!r}, no text; the file is damaged: fetch it again")


def _graph(graph: onnx.GraphProto, where: str, versions: Mapping[str, int], around: set[str], path: str) -> None:
    """`around`: values of the graphs around this one, which its nodes may read; left as it was."""
    _text(where, "the graph's name", graph.name)
    inputs = [value.name for value in graph.input]
    tensors = list(graph.initializer)
    if graph.sparse_initializer:
        raise RingstepError(f"{where}: initializer {graph.sparse_initializer[0].values.name!r}: {SPARSE}")
    for value in (*graph.input, *graph.output, *graph.value_info):
        _text(where, "a value's name", value.name)
        for dim in value.type.tensor_type.shape.dim:
            _text(where, f"a dim of {value.name!r}", dim.dim_param)
            if dim.dim_value < 0:
                dim.ClearField("dim_value")
    for kind, names in (("input", inputs), ("initializer", [tensor.name for tensor in tensors])):
        _text(where, f"an {kind}'s name", *names)
        if "" in names or len(set(names)) < len(names):
            twice = next(name for name in names if not name or names.count(name) > 1)
            raise RingstepError(f"{where}: {f'two {kind}s are named {twice!r}' if twice else f'an {kind} has no name'}")
    for tensor in tensors:
        _tensor(tensor, where)
    own = {*inputs, *(tensor.name for tensor in tensors)}
    # Added and taken away again: a copy for each body would take the square of the nodes.
    added = own - around
    around.update(added)
    own |= _nodes(graph.node, path, versions, around)
    around.difference_update(added)
    outputs = [value.name for value in graph.output]
    for name in outputs:
        if name in around and name not in own:
            raise RingstepError(
                f"{where}: its body returns {name!r} of the graph around it as it is, which ONNX Runtime refuses; put "
                "an Identity between"
            )
    _need_all(outputs, own, where)


def _need_all(outputs: Iterable[str], made: set[str], where: str) -> None:
    for name in outputs:
        if name not in made:
            raise RingstepError(f"{where}: nothing makes the output {name!r}")


def _nodes(nodes: Iterable[onnx.NodeProto], where: str, versions: Mapping[str, int], known: set[str]) -> set[str]:
    """Check nodes, which may stand in any order; returns the names of what they make. `known` is left as it was."""
    made = {name for node in nodes for name in node.output}
    added = (made | {""}) - known
    known.update(added)
    for node in nodes:
        _text(where, f"a name of node {node.name!r}", node.name, node.op_type, node.domain, node.overload)
        here = f"{where}: node {node.name or node.op_type!r}"
        _text(here, "an input or output", *node.input, *node.output)
        for name in node.input:
            if name not in known:
                raise RingstepError(f"{here} reads {name!r}, which nothing makes")
        _node(node, f"{here} ({node.op_type})", versions)
        for attribute in node.attribute:
            for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                _tensor(tensor, here)
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise RingstepError(f"{here}: {SPARSE}")
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _graph(body, here, versions, known, where)
    known.difference_update(added)
    return made


def _node(node: onnx.NodeProto, here: str, versions: Mapping[str, int]) -> None:
    domain = "" if node.domain == "ai.onnx" else node.domain
    given = {}
    for attribute in node.attribute:
        _text(here, "an attribute's name", attribute.name, attribute.ref_attr_name)
        if attribute.name in given:
            raise RingstepError(f"{here}: has the attribute {attribute.name!r} twice; export it again")
        given[attribute.name] = attribute
        field = HOLDERS.get(attribute.type)
        if field is not None and not attribute.HasField(field) and not attribute.ref_attr_name:
            raise RingstepError(f"{here}: its attribute {attribute.name!r} holds nothing; export it again")
    if domain not in versions and not domain:
        raise RingstepError(f"{here}: the file imports no version of ONNX's operators; export it again")
    needs = _needs(node.op_type, domain, versions.get(domain, 1))
    if needs is None:
        return
    for what, names, range_ in (("inputs", node.input, needs.inputs), ("outputs", node.output, needs.outputs)):
        if len(names) not in range_:
            least, most = range_.start, range_.stop - 1
            count = f"{least}" if least == most else f"{least} to {most}" if most < 1 << 30 else f"{least} or more"
            raise RingstepError(f"{here}: has {len(names)} {what}, its operator takes {count}; export it again")
    for index, name in enumerate(node.input):
        if not name and needs.given[min(index, len(needs.given) - 1)]:
            raise RingstepError(f"{here}: its input {index} is left out, which its operator needs; export it again")
    for name in needs.required:
        if name not in given:
            raise RingstepError(f"{here}: lacks the attribute {name!r}; export it again")
    for name, attribute in given.items():
        kind = needs.kinds.get(name)
        if kind in (None, attribute.type, SEVERAL.get(attribute.type)) or attribute.ref_attr_name:
            continue
        raise RingstepError(f"{here}: its attribute {name!r} is of the wrong type; export it again")
    if not domain:
        _bodies(node, given, here, versions.get("", 1))


@functools.lru_cache(maxsize=4096)
def _needs(op: str, domain: str, version: int) -> _Needs | None:
    if domain == "com.microsoft" and op in MICROSOFT:
        inputs, outputs, kinds, required = MICROSOFT[op]
        # MultiHeadAttention and GroupQueryAttention may leave out all but the query.
        first = 1 if op in ("MultiHeadAttention", "GroupQueryAttention") else inputs
        return _Needs(
            range(inputs, 3 if op == "FusedMatMul" else ANY),
            range(1, outputs + 1),
            kinds,
            required,
            (True,) * first + (False,),
        )
    try:
        schema = defs.get_schema(op, min(version, LATEST) if not domain else version, domain)
    except defs.SchemaError:
        if domain or not defs.has(op):
            return None
        schema = defs.get_schema(op)  # newer than the model's operators, as ONNX Runtime has some
    if schema.deprecated:
        return None
    attributes = schema.attributes
    return _Needs(
        range(schema.min_input, schema.max_input + 1),
        range(schema.min_output, schema.max_output + 1),
        {name: KINDS[attribute.type] for name, attribute in attributes.items()},
        tuple(name for name, attribute in attributes.items() if attribute.required),
        tuple(slot.option != defs.OpSchema.FormalParameterOption.Optional for slot in schema.inputs),
    )


def _bodies(node: onnx.NodeProto, given: Mapping[str, AttributeProto], here: str, version: int) -> None:
    """Bodies must take and return what their node does."""
    inputs, outputs = len(node.input), len(node.output)
    if node.op_type == "If":
        wanted = {"then_branch": (0, outputs), "else_branch": (0, outputs)}
    elif node.op_type == "Loop":
        wanted = {"body": (inputs, outputs + 1)}
    elif node.op_type == "Scan":
        wanted = {"body": (inputs - (version < 9), outputs)}
        scanned = given["num_scan_inputs"].i
        if not 0 < scanned <= wanted["body"][0]:
            raise RingstepError(f"{here}: scans {scanned} of {wanted['body'][0]} inputs; export it again")
    else:
        return
    for name, counts in wanted.items():
        body = given[name].g
        if (len(body.input), len(body.output)) != counts:
            raise RingstepError(
                f"{here}: its {name} has {len(body.input)} inputs and {len(body.output)} outputs, where {counts[0]} "
                f"and {counts[1]} belong; export it again"
            )


def _tensor(tensor: TensorProto, where: str) -> None:
    """A tensor's dims and type are some, and what it holds is as long as they say."""
    _text(where, "a tensor's name", tensor.name)
    _text(where, f"where {tensor.name!r} lies", *(text for e in tensor.external_data for text in (e.key, e.value)))
    here = f"{where}: tensor {tensor.name!r}"
    try:
        dtype = ir.DataType(tensor.data_type)
        bits = 0 if dtype == ir.DataType.STRING else dtype.bitwidth
    except (ValueError, TypeError):
        raise RingstepError(f"{here}: is of an unknown type ({tensor.data_type})") from None
    count = math.prod(tensor.dims)
    if any(dim < 0 for dim in tensor.dims) or math.prod(max(dim, 1) for dim in tensor.dims) * max(bits, 8) > MOST:
        raise RingstepError(f"{here}: has the shape {list(tensor.dims)[:8]}, which no tensor has")
    if tensor.data_location == TensorProto.EXTERNAL:
        if dtype == ir.DataType.STRING:
            raise RingstepError(f"{here}: its strings lie in another file, which ONNX does not allow")
        places = {entry.key: entry.value for entry in tensor.external_data}
        if not places.get("location"):
            raise RingstepError(f"{here}: lies in another file, which is not named; export it again")
        for key in ("offset", "length"):
            if not re.fullmatch(r"[0-9]{1,19}", places.get(key, "0")):
                raise RingstepError(f"{here}: its data has the {key} {places[key]!r}, which is none; export it again")
        return
    if tensor.HasField("raw_data"):
        has, wanted = len(tensor.raw_data), -(-count * bits // 8)
    else:
        held = LISTS.get(tensor.data_type, "int32_data")
        has = len(getattr(tensor, held))
        wanted = count * 2 if "COMPLEX" in dtype.name else -(-count * bits // 8) if 0 < bits < 8 else count
    if has != wanted or (tensor.HasField("raw_data") and not bits):
        raise RingstepError(f"{here}: its shape {list(tensor.dims)[:8]} is not that of what it holds; export it again")

"""step.json of a quantised artifact: encodings, a table of integers and the sink prefix, or a refusal by field."""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_specs import CACHES, quantised
from step_specs import make_spec, specs
from test_contract import at, changed, named, others, paths, refusal

from ringstep.contract import PrefixSpec, StepSpec, TensorSpec, parse
from ringstep.errors import RingstepError

LAYERS: Any = [("ring", 4), ("append", None), ("roll", 3)]


def make(cache: str = "uint8") -> StepSpec:
    spec = quantised(make_spec(LAYERS, 16, (1, 5), ids=False), cache)
    return dataclasses.replace(spec, scheme="w8a16", prefix=PrefixSpec("sink.bin", (7, 0)))


def as_json(spec: StepSpec) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spec.save(Path(folder) / "step.json")
        assert StepSpec.load(Path(folder)) == spec
        found: dict[str, Any] = json.loads((Path(folder) / "step.json").read_text())
        return found


@pytest.fixture
def body() -> dict[str, Any]:
    return as_json(make())


@settings(max_examples=40, deadline=None)
@given(spec=specs(), cache=st.sampled_from(list(CACHES)), data=st.data())
def test_round_trip(spec: StepSpec, cache: str, data: st.DataObject) -> None:
    whole = tuple(dataclasses.replace(g, hidden=(), parts={}) for g in spec.graphs)
    spec = quantised(dataclasses.replace(spec, graphs=whole), cache)
    ids = data.draw(st.lists(st.integers(0, spec.vocab - 1), min_size=1, max_size=spec.context))
    as_json(dataclasses.replace(spec, prefix=PrefixSpec("a/sink.bin", tuple(ids))))


def test_what_it_says(body: dict[str, Any]) -> None:
    """The JSON a host in another language reads."""
    assert body["dtype"] == "uint16" and body["caches"][0]["dtype"] == "uint8"
    assert body["prefix"] == {"file": "sink.bin", "ids": [7, 0]} and body["scheme"] == "w8a16"
    past = next(t for t in body["graphs"][0]["inputs"] if t["name"] == "past_value_1")
    assert past["encoding"] == {"scale": 0.5, "zero": 100} and past["dtype"] == "uint8"
    assert body["embedding"]["dtype"] == "int8" and body["embedding"]["scales"] == 64 + 200 + 56
    assert parse(body) == make()


@pytest.mark.parametrize("key", ["scale", "zero"])
def test_half_an_encoding(body: dict[str, Any], key: str) -> None:
    for path in list(paths(body)):
        if path[-2:] == ("encoding", key):
            made = copy.deepcopy(body)
            del at(made, path[:-1])[key]
            assert f"encoding.{key}: missing" in refusal(made)


def test_encodings_of_another_type(body: dict[str, Any]) -> None:
    """One tensor of each role, and the parts of the contract that only quantised artifacts have."""
    places = [("graphs", 0, "inputs", 0), ("graphs", 1, "outputs", 0), ("graphs", 1, "outputs", 3)]
    every: list[tuple[Any, ...]] = [("prefix",), ("prefix", "ids"), ("prefix", "ids", 1), ("prefix", "file")]
    every += [(*place, "encoding", *rest) for place in places for rest in [(), ("scale",), ("zero",)]]
    for path in [*every, ("scheme",), ("embedding", "scales")]:
        for other in others(at(body, path)):
            if other is None and path in (("prefix",),):
                continue
            message = refusal(changed(body, path, other))
            assert named(path) in message, (path, other, message)


def every_tensor(body: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [path for path in paths(body) if len(path) == 4 and path[2] in ("inputs", "outputs")]


def test_every_encoding_is_needed(body: dict[str, Any]) -> None:
    for path in every_tensor(body):
        for made in (changed(body, (*path, "encoding"), None), copy.deepcopy(body)):
            at(made, path).pop("encoding") if at(made, path)["encoding"] else None
            assert f"{at(body, path)['name']}.encoding: {at(body, path)['dtype']} needs one" in refusal(made)


def test_no_float_has_one() -> None:
    body = as_json(make_spec(LAYERS, 16, (1, 5)))
    for path in every_tensor(body):
        tensor = at(body, path)
        made = changed(body, (*path, "encoding"), {"scale": 0.5, "zero": 0})
        assert f"{tensor['name']}.encoding: {tensor['dtype']} has none" in refusal(made)


@pytest.mark.parametrize("scale", [0.0, -0.5, -1e-300, 1e-300, 1e-40, 1e39])
def test_scales_are_positive(body: dict[str, Any], scale: float) -> None:
    for path in every_tensor(body):
        made = changed(body, (*path, "encoding", "scale"), scale)
        assert "encoding.scale: must be a positive float32" in refusal(made)


@pytest.mark.parametrize(("cache", "ends"), [("uint8", (0, 255)), ("int8", (-128, 127)), ("uint16", (0, 65535)),
                                             ("int16", (-32768, 32767))])  # fmt: skip
def test_zeros_lie_in_the_type(cache: str, ends: tuple[int, int]) -> None:
    body = as_json(make(cache))
    for zero, fits in ((ends[0], True), (ends[1], True), (ends[0] - 1, False), (ends[1] + 1, False)):
        made = copy.deepcopy(body)
        for path in every_tensor(body):
            if at(body, path)["layer"] is not None:
                at(made, path)["encoding"]["zero"] = zero
        if fits:
            parse(made)
        else:
            assert f"encoding.zero: outside {cache}" in refusal(made)


@pytest.mark.parametrize(("key", "change"), [("scale", 1.0), ("scale", 1e-9), ("zero", -1)])
def test_one_tensor_means_the_same_everywhere(body: dict[str, Any], key: str, change: float) -> None:
    """Change any one encoding: the other graph, or the cache's other end, no longer agrees."""
    for path in every_tensor(body):
        made = changed(body, (*path, "encoding", key), at(body, path)["encoding"][key] + change)
        cached = at(body, path)["layer"] is not None
        assert f"differs from the same {'cache' if cached else 'tensor'} elsewhere" in refusal(made)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("what", ["key", "value"])
def test_a_cache_goes_out_as_it_came_in(body: dict[str, Any], side: str, layer: int, what: str) -> None:
    """All graphs agree on another encoding, but only at one end."""
    for graph in body["graphs"]:
        for tensor in graph[side]:
            if tensor["layer"] == layer and tensor["role"].startswith(what):
                tensor["encoding"]["scale"] *= 2
    assert "differs from the same cache elsewhere" in refusal(body)


def test_hidden_tensors_between_parts(body: dict[str, Any]) -> None:
    between = dataclasses.asdict(TensorSpec("hidden_0", (1, 4), "uint16", "hidden"))
    for encoding, fits in (({"scale": 0.5, "zero": 1}, True), (None, False)):
        made = changed(body, ("graphs", 0, "hidden"), [between | {"encoding": encoding}])
        if fits:
            parse(made)
        else:
            assert "hidden_0.encoding: uint16 needs one" in refusal(made)


PLACES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("dtype",), "int32", "dtype"),
    (("dtype",), "float32", "caches[0].dtype"),
    (("dtype",), "uint8", "inputs.x"),
    (("caches", 0, "dtype"), "float32", "caches[0].dtype"),
    (("caches", 0, "dtype"), "int32", "caches[0].dtype"),
    (("caches", 0, "dtype"), "int8", "past_key_0"),
    (("embedding", "scales"), None, "embedding.scales"),
    (("embedding", "scales"), -1, "embedding.scales"),
    (("embedding", "scales"), 1 << 60, "embedding.scales"),
    (("embedding", "dtype"), "float16", "embedding.scales"),
    (("embedding", "dtype"), "uint8", "embedding.dtype"),
    (("embedding", "dtype"), "uint16", "embedding.dtype"),
    (("embedding", "dtype"), "int32", "embedding.dtype"),
    (("prefix", "ids"), [], "prefix.ids"),
    (("prefix", "ids"), [1] * 17, "prefix.ids"),
    (("prefix", "ids"), [50], "prefix.ids"),
    (("prefix", "ids"), [3, -1], "prefix.ids"),
    (("prefix", "file"), "../sink.bin", "prefix.file"),
    (("prefix", "file"), "/etc/passwd", "prefix.file"),
    (("prefix", "file"), "", "prefix.file"),
    (("prefix", "idz"), [1], "prefix.idz"),
    (("graphs", 0, "inputs", 0, "encoding", "zeros"), 1, "encoding.zeros"),
]


@pytest.mark.parametrize(("path", "value", "field"), PLACES)
def test_what_does_not_fit_together(body: dict[str, Any], path: tuple[Any, ...], value: Any, field: str) -> None:
    assert field in refusal(changed(body, path, value))


def test_a_float_table_beside_integers(body: dict[str, Any]) -> None:
    """Rows may stay float: the host quantises them to x's encoding."""
    for dtype in ("float32", "float16"):
        parse(changed(body, ("embedding",), {**body["embedding"], "dtype": dtype, "scales": None}))
    with pytest.raises(RingstepError, match=r"embedding\.scales"):
        parse(changed(body, ("embedding",), {**body["embedding"], "dtype": "float16"}))


def test_a_prefix_of_a_float_artifact() -> None:
    parse(as_json(dataclasses.replace(make_spec(LAYERS, 16), prefix=PrefixSpec("sink.bin", (1,) * 16))))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400], ids=["nan", "inf", "long"])
def test_numbers_no_host_can_hold(body: dict[str, Any], number: Any) -> None:
    for path in paths(body):
        if path[-2:-1] == ("encoding",) or path[:-1] == ("prefix", "ids"):
            assert named(path) in refusal(changed(body, path, number))

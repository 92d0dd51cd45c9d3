"""step.json: what is written is read back, and anything else is refused by the name of its field."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_specs import make_spec, specs, with_parts

from ringstep.contract import StepSpec, check_relative, parse
from ringstep.errors import RingstepError


@settings(max_examples=60, deadline=None)
@given(spec=specs())
def test_round_trip(spec: StepSpec) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec.save(Path(folder) / "step.json")
        assert StepSpec.load(Path(folder)) == spec
        assert StepSpec.load(Path(folder) / "step.json") == spec
        assert [p.name for p in Path(folder).iterdir()] == ["step.json"]


@pytest.fixture
def body(tmp_path: Path) -> dict[str, Any]:
    """A valid step.json with everything in it."""
    layers: Any = [("ring", 4), ("append", None), ("roll", 3)]
    spec = with_parts(make_spec(layers, 16, (1, 5), ids=False))
    spec.save(tmp_path / "step.json")
    decoded: dict[str, Any] = json.loads((tmp_path / "step.json").read_text())
    return decoded


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*at, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    at(made, path[:-1])[path[-1]] = value
    return made


def refusal(body: Any) -> str:
    with pytest.raises(RingstepError) as caught:
        parse(body)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def named(path: tuple[Any, ...]) -> str:
    """The last field name on a path."""
    return next((key for key in reversed(path) if isinstance(key, str)), "format")


def test_the_whole_is_valid(body: dict[str, Any]) -> None:
    assert parse(body).graph(5).n == 5
    with pytest.raises(RingstepError, match="n=7"):
        parse(body).graph(7)


DEFAULTED = ("of", "layer", "scale", "theta", "kind", "window", "key_layout", "hidden", "parts", "embedding",
             "activations", "target", "encoding", "scales", "scheme", "prefix")  # fmt: skip


def test_every_key_deleted(body: dict[str, Any]) -> None:
    count = 0
    for path in paths(body):
        if not path or not isinstance(path[-1], str):
            continue
        made, name = copy.deepcopy(body), path[-1]
        del at(made, path[:-1])[name]
        if name in DEFAULTED or path[-2:-1] in (("target",), ("parts",)):
            with contextlib.suppress(RingstepError):
                parse(made)  # a default that fits, or an inconsistency that is seen
        else:
            message = refusal(made)
            assert f"{name}: missing" in message or name in ("format", "version"), message
            assert name in message
        count += 1
    assert count > 300


def others(value: Any) -> list[Any]:
    """Values of every other JSON type."""
    every: list[Any] = [7, 1.5, "seven", True, None, [], [[]], {}, {"a": 1}]
    if isinstance(value, str):
        return [v for v in every if not isinstance(v, str)]
    if isinstance(value, bool) or value is None:
        return [v for v in every if v is not None]
    if isinstance(value, int):
        return [v for v in every if type(v) is not int]
    if isinstance(value, float):
        return [v for v in every if type(v) not in (int, float)]
    return [v for v in every if not isinstance(v, type(value))]


NULLABLE = ("of", "layer", "window", "embedding")


def test_every_value_of_another_type(body: dict[str, Any]) -> None:
    for path in paths(body):
        if not path:
            continue
        value = at(body, path)
        for other in others(value):
            if named(path) in NULLABLE and (other is None or value is None):
                continue
            message = refusal(changed(body, path, other))
            assert named(path) in message, (path, other, message)


def test_null_where_a_value_belongs(body: dict[str, Any]) -> None:
    for path in paths(body):
        if path and path != ("embedding",) and not (named(path) == "window" and path[0] == "masks"):
            if at(body, path) is None:
                continue
            assert named(path) in refusal(changed(body, path, None)) or path[-1] in NULLABLE
    assert "x" in refusal(changed(body, ("embedding",), None))  # the graph takes x but nothing says where rows lie


def test_an_unknown_key_in_every_object(body: dict[str, Any]) -> None:
    for path in paths(body):
        value = at(body, path)
        if isinstance(value, dict) and path[-1:] not in (("target",), ("parts",)):
            assert "kv_haeds: unknown field" in refusal(changed(body, (*path, "kv_haeds"), 1))
    assert "did you mean kv_heads?" in refusal(changed(body, ("caches", 0, "kv_haeds"), 1))


@pytest.mark.parametrize("version", [0, 1, 3, -1, "2", 2.0, True, None, [1], {}, 10**100])
def test_another_version(body: dict[str, Any], version: Any) -> None:
    assert refusal(body | {"version": version}).startswith("version: ")


@pytest.mark.parametrize("made", [None, 3, "step", [], [{}], {}, {"format": "ringstep.stop"}, {"format": [1]}])
def test_no_step_json_at_all(made: Any) -> None:
    assert refusal(made).startswith("format: ")


OUTSIDE = ["/etc/passwd", "../weights.bin", "onnx/../../x", "..", ".", "", "a\\..\\b", "C:\\x", "a\0b", "//host/x"]


@pytest.mark.parametrize("file", OUTSIDE)
def test_files_outside_the_folder(body: dict[str, Any], file: str) -> None:
    assert "embedding.file" in refusal(changed(body, ("embedding", "file"), file))
    assert "parts.qnn[1].file" in refusal(changed(body, ("graphs", 1, "parts", "qnn", 1, "file"), file))


@given(st.text())
def test_a_relative_file_stays_inside(file: str) -> None:
    try:
        check_relative(file, "file")
    except RingstepError:
        return
    root = Path("/a/b/c")
    assert (root / file).is_relative_to(root) and ".." not in (root / file).parts


def test_every_shape_and_size_changed(body: dict[str, Any]) -> None:
    for g, graph in enumerate(body["graphs"]):
        for side in ("inputs", "outputs"):
            for t, tensor in enumerate(graph[side]):
                where = ("graphs", g, side, t)
                for axis in range(len(tensor["shape"])):
                    made = changed(body, (*where, "shape", axis), tensor["shape"][axis] + 1)
                    assert f"{tensor['name']}: " in refusal(made)
                for shape in (tensor["shape"][:-1], [1, *tensor["shape"]], [], [-1] * len(tensor["shape"])):
                    assert f"{tensor['name']}: " in refusal(changed(body, (*where, "shape"), shape))
                assert f"{tensor['name']}: " in refusal(changed(body, (*where, "dtype"), "int32"))
                assert f"{tensor['name']}: " in refusal(changed(body, (*where, "role"), "hidden"))
                made = copy.deepcopy(body)
                del made["graphs"][g][side][t]
                assert f"{side}: missing {tensor['name']}" in refusal(made)
                made = copy.deepcopy(body)
                made["graphs"][g][side].append(tensor)
                assert f"{side}: two with one name" in refusal(made)


SIZES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("vocab",), 0, "vocab"),
    (("vocab",), 51, "embedding.shape"),
    (("hidden",), -1, "hidden"),
    (("hidden",), 8, "embedding.shape"),
    (("context",), 0, "context"),
    (("context",), 17, "masks.append_None.length"),  # entries would be dropped silently
    (("context",), 4, "graphs[n=5]: n"),
    (("dtype",), "int32", "dtype"),
    (("dtype",), "float64", "dtype"),
    (("dtype",), "float16", "inputs.x"),
    (("mask_value",), 0.0, "mask_value"),
    (("mask_value",), 1.0, "mask_value"),
    (("masks", 0, "length"), 0, "masks.ring_4.length"),
    (("masks", 0, "length"), 4, "masks.ring_4.length"),
    (("masks", 0, "window"), None, "masks.ring_4.length"),
    (("masks", 0, "window"), 0, "masks.ring_4.window"),
    (("masks", 0, "kind"), "append", "masks.ring_4.length"),
    (("masks", 0, "kind"), "state", "masks.ring_4.kind"),
    (("masks", 1, "length"), 14, "masks.append_None.length"),
    (("masks", 2, "length"), 1, "masks.roll_3.length"),
    (("masks", 1, "name"), "ring_4", "masks"),
    (("caches", 0, "kind"), "append", "caches[0]"),
    (("caches", 0, "length"), 4, "caches[0]"),
    (("caches", 0, "window"), 5, "caches[0]"),
    (("caches", 0, "mask"), "none", "caches[0].mask"),
    (("caches", 0, "rotary"), "none", "caches[0].rotary"),
    (("caches", 0, "kv_heads"), 0, "caches[0]"),
    (("caches", 0, "kv_heads"), 3, "past_key_0"),
    (("caches", 0, "head_dim"), 1, "caches[0]"),
    (("caches", 0, "dtype"), "int32", "caches[0].dtype"),
    (("caches", 0, "dtype"), "float16", "past_key_0"),
    (("caches", 0, "key_layout"), "transposed", "past_key_0"),
    (("caches", 0, "layer"), -1, "caches[0].layer"),
    (("caches", 0, "layer"), 1, "caches: layers"),
    (("rotary", 0, "name"), "other", "caches[0].rotary"),
    (("rotary", 0, "inv_freq"), [0.1, 0.2], "caches[0]"),
    (("graphs",), [], "graphs"),
    (("graphs", 0, "n"), 0, "graphs[n=0]"),
    (("graphs", 0, "n"), 17, "graphs[n=17]"),
    (("graphs", 0, "n"), 5, "graphs: two"),
    (("graphs", 0, "n"), 2, "graphs[n=2].inputs"),
    (("graphs", 0, "parts", "onnx"), [], "parts.onnx"),
    (("graphs", 0, "parts", "onnx", 0, "inputs"), ["y"], "parts.onnx[0].inputs"),
    (("graphs", 0, "parts", "onnx", 0, "outputs"), [], "parts.onnx"),
    (("graphs", 0, "parts", "onnx", 0, "outputs", 0), "y", "parts.onnx[0].outputs"),
    (("graphs", 0, "parts", "qnn", 1, "inputs", 0), "hidden_1", "parts.qnn[1].inputs"),
    (("graphs", 0, "hidden"), [], "parts.qnn[0].outputs"),
    (("embedding", "offset"), -1, "embedding.offset"),
    (("embedding", "shape"), [50], "embedding.shape"),
    (("embedding", "shape"), [4, 50], "embedding.shape"),
    (("embedding", "dtype"), "bfloat16", "embedding.dtype"),
    (("activations",), "fast", "activations"),
]


@pytest.mark.parametrize(("path", "value", "field"), SIZES)
def test_what_does_not_fit_together(body: dict[str, Any], path: tuple[Any, ...], value: Any, field: str) -> None:
    assert field in refusal(changed(body, path, value))


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "18446744073709551616", "NaN", "Infinity"])
def test_numbers_no_host_can_hold(body: dict[str, Any], number: str) -> None:
    number = json.loads(number)
    for path in paths(body):
        if path and type(at(body, path)) in (int, float) and path != ("version",):
            assert named(path) in refusal(changed(body, path, number))


def test_parts_in_another_order(body: dict[str, Any]) -> None:
    body["graphs"][0]["parts"]["qnn"].reverse()
    assert "parts.qnn[0].inputs" in refusal(body)


HOSTILE = {
    "empty": b"",
    "half": b'{"format": "ringstep.step", "ver',
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "deep inside": b'{"format":"ringstep.step","version":2,"dtype":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep version": b'{"format":"ringstep.step","version":' + b"[" * 900 + b"]" * 900 + b"}",
    "long number": b'{"format":"ringstep.step","version":2,"vocab":' + b"9" * 5000 + b"}",
    "nearly too long": b'{"format":"ringstep.step","version":2,"vocab":' + b"9" * 4300 + b"}",
    "long version": b'{"format":"ringstep.step","version":' + b"9" * 4300 + b"}",
    "nan": b'{"format":"ringstep.step","version":2,"mask_value":NaN}',
    "not text": b"\xff\xfe\x00{}",
    "null bytes": b"\0" * 100,
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "string": b'"ringstep.step"',
    "long key": b'{"format":"ringstep.step","version":2,"' + b"k" * 100_000 + b'":1}',
    "key with a newline": b'{"format":"ringstep.step","version":2,"a\\nb":1}',
    "key with an escape": b'{"format":"ringstep.step","version":2,"\\u001b[31m":1}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "step.json").write_bytes(HOSTILE[name])
    with pytest.raises(RingstepError) as caught:
        StepSpec.load(tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and message.isprintable()
    assert len(message) < len(str(tmp_path)) + 300


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "a" / "step.json"):
        with pytest.raises(RingstepError, match="no such file"):
            StepSpec.load(path)
    (tmp_path / "step.json").mkdir()
    with pytest.raises(RingstepError):
        StepSpec.load(tmp_path)


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=10,
    ),
    st.data(),
)
def test_any_json_in_any_place(value: Any, data: st.DataObject) -> None:
    spec = make_spec([("ring", 4), ("append", None)], 16, (1, 5))
    with tempfile.TemporaryDirectory() as folder:
        spec.save(Path(folder) / "step.json")
        whole = json.loads((Path(folder) / "step.json").read_text())
    path = data.draw(st.sampled_from(list(paths(whole))[1:]))
    try:
        parse(changed(whole, path, value))
    except RingstepError as error:
        derived = ("graphs", "caches", "masks", "rotary", "context", "vocab", "hidden")  # seen where they do not fit
        assert named(path) in str(error) or path[0] in derived

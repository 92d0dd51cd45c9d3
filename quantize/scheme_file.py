"""Scheme files: TOML in and out, every key and value checked."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from quantize.scheme import LPBQ_BITS, Activations, Auto, Override, Scheme, Weights, contradiction
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import read_text

FOLDER = Path(__file__).with_name("schemes")
WEIGHTS = ("weights", "head", "embedding")
TOP = tuple(f.name for f in dataclasses.fields(Scheme) if f.name != "name")
_T = TypeVar("_T")


def presets() -> list[str]:
    """The names that load_scheme knows."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_scheme(name_or_path: str | Path) -> Scheme:
    """Load a preset by its name, or a file: whatever has a folder in it or ends in .toml.

    Raises RingstepError naming file, table and key for an unknown key, a wrong type or value, and keys that
    contradict each other. Whether it fits a model or a chip: scheme.check, scheme.refuse.
    """
    path = find_scheme(name_or_path)
    return parse_scheme(read_text(path), path.stem, str(path) if path.parent != FOLDER else path.name)


def preset_text(name_or_path: str | Path) -> str:
    """The text of a scheme's file, comments included; RingstepError where load_scheme raises it."""
    load_scheme(name_or_path)
    return read_text(find_scheme(name_or_path))


def find_scheme(name_or_path: str | Path) -> Path:
    """The file of a preset, or the path itself; RingstepError for a name that is neither."""
    text, known = str(name_or_path), presets()
    if text in known:
        return FOLDER / f"{text}.toml"
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".toml"):
        return Path(text)
    raise RingstepError(
        f"unknown scheme {text!r}{did_you_mean(text, known)}; there are {', '.join(known)}, or give a .toml file"
    )


def parse_scheme(text: str, name: str, file: str) -> Scheme:
    """Check a scheme's TOML; `file` opens each error. Raises RingstepError as load_scheme does."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RingstepError(f"{file} is not valid TOML: {str(error) or 'nested too deep'}") from None
    scheme = _build(Scheme, data, file, name=name, override=_overrides(data, file))
    kept: dict[str, Any] = {name: _float16(data.get(name, {}), _place(file, name), getattr(scheme, name))
                            for name in WEIGHTS}  # fmt: skip
    scheme = dataclasses.replace(scheme, **kept)
    if scheme.embedding.rounding != "nearest":
        raise RingstepError(f"{file}: [embedding] rounding needs inputs to weigh errors by; leave it out")
    _check_activations(scheme, data, file)
    if scheme.auto:
        _check_auto(scheme.auto, scheme.weights, f"{file}: [auto]")
    return scheme


def to_toml(scheme: Scheme) -> str:
    """The scheme as a file that loads to the same scheme; what has its default value is left out."""
    tables: dict[str, list[str]] = {"": []}
    for f in dataclasses.fields(Scheme):
        value = getattr(scheme, f.name)
        if dataclasses.is_dataclass(value):
            _write(tables, f.name, value)
        elif f.name not in ("name", "override", "auto") and value != f.default:
            tables[""].append(f"{f.name} = {_value(value)}")
    blocks = ["\n".join(([f"[{name}]"] if name else []) + lines) for name, lines in tables.items() if lines]
    for override in scheme.override:
        keys = dict(override.keys)
        if keys.get("dtype") == "float16":
            keys = {"dtype": "float16"}
        lines = [f"{key} = {_value(0 if value is None else value)}" for key, value in keys.items()]
        blocks.append("\n".join(["[[override]]", f"pattern = {_value(override.pattern)}", *lines]))
    return "\n\n".join(blocks) + "\n"


def _write(tables: dict[str, list[str]], name: str, table: Any) -> None:
    lines = tables.setdefault(name, [])
    for f in dataclasses.fields(table):
        value = getattr(table, f.name)
        if dataclasses.is_dataclass(value):
            _write(tables, f"{name}.{f.name}", value)
        elif value != f.default and not (f.name == "bits" and getattr(table, "dtype", "") == "float16"):
            lines.append(f"{f.name} = {_value(value)}")


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    # JSON's strings are TOML's but for DEL; its escapes of what is beyond 16 bits are not, hence none.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _build(kind: type[_T], keys: dict[str, Any], file: str, table: str = "", **given: Any) -> _T:
    """A dataclass from a TOML table, "" being the file's top."""
    at, types = _place(file, table), get_type_hints(kind)
    _known(keys, [name for name in types if name != "name"], at)
    found = dict(given)
    for name, value in keys.items():
        if name in given:
            continue
        hint = next((arg for arg in get_args(types[name]) if dataclasses.is_dataclass(arg)), types[name])
        if not dataclasses.is_dataclass(hint):
            found[name] = _checked(hint, name, value, at)
            continue
        inner = f"{table}.{name}" if table else name
        if not isinstance(value, dict):
            raise RingstepError(f"{_place(file, inner)} must be a table, not {_shown(value)}")
        found[name] = _build(hint, value, file, inner)  # type: ignore[arg-type]
    return kind(**found)


def _place(file: str, table: str) -> str:
    return f"{file}: [{table}]" if table else f"{file}:"


def _known(keys: dict[str, Any], known: Iterable[str], at: str) -> None:
    names = list(known)
    for key in keys:
        if key in names:
            continue
        hint = did_you_mean(key, names)
        if key in TOP:
            hint = "; it belongs above the first table" if key not in names else ""
        raise RingstepError(f"{at} unknown key {key!r}{hint}")


def _checked(hint: Any, name: str, value: Any, at: str) -> Any:
    """A value of the type that a field asks for. TOML has no null, so block = 0 stands for none."""
    at = f"{at} {name}"
    if get_origin(hint) in (UnionType, Union):
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise RingstepError(f"{at} must be {_either(choices)}, not {_shown(value)}{_near(value, choices)}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise RingstepError(f"{at} must be a list of strings, not {_shown(value)}")
        return tuple(value)
    if hint is float and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise RingstepError(f"{at} must be {names[hint]}, not {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RingstepError(f"{at} must be finite, not {value}")
    return None if name == "block" and value == 0 else value


def _either(choices: tuple[Any, ...]) -> str:
    *most, last = (repr(choice) for choice in choices)
    return f"{', '.join(most)} or {last}"


def _near(value: Any, choices: tuple[Any, ...]) -> str:
    return did_you_mean(value, choices) if isinstance(value, str) and isinstance(choices[0], str) else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def _overrides(data: dict[str, Any], file: str) -> tuple[Override, ...]:
    tables = data.get("override", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RingstepError(f"{file}: override must be [[override]] tables, one for each pattern")
    types = get_type_hints(Weights)
    found = []
    for number, table in enumerate(tables, 1):
        at = f"{file}: [[override]] {number}:"
        _known(table, ["pattern", *types], at)
        keys = {key: value for key, value in table.items() if key != "pattern"}
        pattern = table.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            raise RingstepError(f'{at} pattern must be a string such as "layers.*.mlp.down_proj"')
        if not keys:
            raise RingstepError(f"{at} it changes nothing; give it keys of [weights], such as bits")
        checked = {key: _checked(types[key], key, value, at) for key, value in keys.items()}
        if checked.get("dtype") == "float16":
            _float16(keys, at, Weights())
            checked = dataclasses.asdict(Weights(dtype="float16", bits=16))
        elif "dtype" in checked and "bits" not in checked:
            raise RingstepError(f"{at} dtype = 'int' needs bits")
        alone = Weights(bits=LPBQ_BITS, block=checked.get("block"), damping=checked.get("damping", 0.01))
        if reason := contradiction(alone):  # of values; how they go with other tables only a model's paths can tell
            raise RingstepError(f"{at} {reason}")
        found.append(Override(pattern, tuple(sorted(checked.items()))))
    return tuple(found)


def _float16(keys: dict[str, Any], at: str, weights: Weights) -> Weights:
    """Refuse keys that float16 would ignore, or that contradict each other; the weights, bits 16 for float16."""
    if keys.get("dtype") == "float16":
        for key in keys:
            if key not in ("dtype", "pattern"):
                raise RingstepError(f"{at} {key} has no meaning with dtype = 'float16'; leave it out")
        return Weights(dtype="float16", bits=16)
    if reason := contradiction(weights):
        raise RingstepError(f"{at} {reason}")
    return weights


def _check_activations(scheme: Scheme, data: dict[str, Any], file: str) -> None:
    activations: Activations = scheme.activations
    if not 50 < activations.percentile <= 100:
        raise RingstepError(
            f"{file}: [activations] percentile must be above 50 and at most 100, not {activations.percentile}"
        )
    if activations.accuracy_level and activations.bits:
        raise RingstepError(f"{file}: [activations] accuracy_level is of float activations (bits = 0); leave it out")
    for table in ("cache", "exceptions") if activations.bits == 0 else ():
        if table in data:
            raise RingstepError(f"{file}: [{table}] has no meaning with float activations (bits = 0); leave it out")


def _check_auto(auto: Auto, weights: Weights, at: str) -> None:
    if weights.dtype != "int":
        raise RingstepError(f"{at} raises integer weights; set [weights] bits instead of dtype = 'float16'")
    if auto.target_db is None and auto.max_bytes is None:
        raise RingstepError(f"{at} needs a goal: target_db or max_bytes")
    if auto.max_bytes is not None and auto.max_bytes <= 0:
        raise RingstepError(f"{at} max_bytes must be above 0, not {auto.max_bytes}")
    try:
        steps = auto.promotions()
    except ValueError:
        raise RingstepError(f'{at} steps must read "4 -> 8", not {_shown(list(auto.steps))}') from None
    sizes = get_args(get_type_hints(Weights)["bits"])
    for low, high in steps:
        if low not in sizes or high not in sizes or low >= high:
            raise RingstepError(f"{at} steps: {low} -> {high} is no promotion between {_either(sizes)} bits")
    if weights.bits not in [low for low, _ in steps]:
        raise RingstepError(f"{at} steps: none starts at [weights] bits = {weights.bits}, so nothing can be raised")

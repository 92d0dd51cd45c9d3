"""What parity asks for, by recipe, format and precision: thresholds.toml, read strictly."""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringstep.contract import StepSpec
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import read_text

FILE = Path(__file__).with_name("thresholds.toml")
FLOATS = ("fp32", "fp16-accurate", "fp16-native")
ANY_SCHEME = "scheme"
PRECISIONS = {"onnx": FLOATS, "qnn": FLOATS[1:], "executorch": FLOATS}
# All other engines run ONNX, or what it stands for.
FORMS = {"qnn-sim": "qnn", "executorch": "executorch"}
FLOAT_KEYS, SCHEME_KEYS = ("position_db", "windows_db"), ("pooled_db", "top1", "windows_db")


@dataclass(frozen=True)
class Thresholds:
    """What one artifact on one engine is held to; see thresholds.toml. All but top1 in dB."""

    windows_db: float
    position_db: float | None = None
    pooled_db: float | None = None
    top1: float = 0.0

    @property
    def db(self) -> float:
        """The one that decides: of every position for floats, of all of them together for schemes."""
        found = self.position_db if self.pooled_db is None else self.pooled_db
        assert found is not None  # every table has one of the two
        return found


Tables = dict[str, dict[str, dict[str, float]]]
"""Format, precision, key."""


def thresholds_for(spec: StepSpec, engine: str, file: Path = FILE) -> Thresholds:
    """The thresholds of an artifact on an engine. Raises RingstepError for a file that says nothing sensible."""
    general, recipes = load(file)
    form, scheme = FORMS.get(engine, "onnx"), scheme_on(spec, engine)
    name = precision(spec, form, scheme, general[form])
    own = recipes.get(spec.recipe, {}).get(form, {})
    return Thresholds(**general[form][name] | own.get(precision(spec, form, scheme, own), {}))


def scheme_on(spec: StepSpec, engine: str) -> str:
    """The scheme an engine computes an artifact in, "" for floats; a .pte has a precision of its own."""
    if engine != "executorch":
        return spec.scheme
    own = spec.target.get("precision", "")
    return "" if own in ("fp32", "fp16") else own


def precision(spec: StepSpec, form: str, scheme: str, tables: dict[str, Any]) -> str:
    """Which of a format's tables holds for an artifact."""
    if scheme:
        fitting = [name for name in tables if name not in (*FLOATS, ANY_SCHEME) and scheme.startswith(name)]
        return max(fitting, key=len, default=ANY_SCHEME)
    if spec.dtype == "float32" and form != "qnn":
        return "fp32"
    return f"fp16-{spec.activations}"


@functools.cache
def load(file: Path = FILE) -> tuple[Tables, dict[str, Tables]]:
    """The general tables and those of recipes. Raises RingstepError naming file, table and key."""
    try:
        body = tomllib.loads(read_text(file))
    except ValueError as error:
        raise RingstepError(f"{file}: not valid TOML: {error}") from None
    recipes = body.pop("recipes", {})
    if not isinstance(recipes, dict):
        raise RingstepError(f"{file}: recipes: expected tables [recipes.RECIPE.FORMAT.PRECISION]")
    general = check_formats(body, str(file), whole=True)
    return general, {name: check_formats(own, f"{file}: recipes.{name}", whole=False) for name, own in recipes.items()}


def check_formats(body: Any, where: str, whole: bool) -> Tables:
    """Tables by format; `whole`: none may be missing, nor a key of them."""
    known(body, PRECISIONS, where)
    for form in PRECISIONS if whole else body:
        at = f"{where}: {form}"
        if form not in body or not isinstance(body[form], dict):
            raise RingstepError(f"{at}: expected tables [{form}.PRECISION]")
        for name in (*PRECISIONS[form], ANY_SCHEME) if whole else ():
            if name not in body[form]:
                raise RingstepError(f"{at}.{name}: missing")
        for name, keys in body[form].items():
            if form == "qnn" and name == "fp32":
                raise RingstepError(f"{at}.{name}: the NPU has no fp32; use fp16-accurate and fp16-native")
            check_keys(keys, FLOAT_KEYS if name in FLOATS else SCHEME_KEYS, f"{at}.{name}", whole)
    return {form: {name: {key: float(value) for key, value in keys.items()} for name, keys in tables.items()}
            for form, tables in body.items()}  # fmt: skip


def check_keys(keys: Any, wanted: tuple[str, ...], where: str, whole: bool) -> None:
    """One table: its keys known, its values numbers in range."""
    known(keys, wanted, where)
    if whole and (lacking := [key for key in wanted if key not in keys]):
        raise RingstepError(f"{where}.{lacking[0]}: missing")
    for key, value in keys.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise RingstepError(f"{where}.{key}: {value!r} is not a finite number")
        if key == "top1" and not 0 <= value <= 1:
            raise RingstepError(f"{where}.{key}: {value} is no share, which lies in 0..1")
        if key != "top1" and not -300 <= value <= 300:
            raise RingstepError(f"{where}.{key}: {value} dB is nothing that can be reached")


def known(body: Any, names: Any, where: str) -> None:
    """Refuse what is no table, or has a key that means nothing."""
    if not isinstance(body, dict):
        raise RingstepError(f"{where}: expected a table")
    for key in body:
        if key not in names:
            raise RingstepError(f"{where}.{key}: unknown{did_you_mean(key, list(names))}; {', '.join(names)}")

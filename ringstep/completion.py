"""What the shell's Tab key offers for names that ringstep knows; `--help` says nothing of it, README.md does.

Each function returns a `shell_complete` of click's, which reads its names only when Tab is pressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Complete = Callable[[Any, Any, str], list["CompletionItem"]]


def names(load: Callable[[], Iterable[str]], files: bool = False) -> Complete:
    """Offers the names that begin with what is typed, then with `files` the shell's own file names."""

    def complete(context: Any, parameter: Any, typed: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name) for name in load() if name.startswith(typed)]
        return found + [CompletionItem(typed, type="file")] * files

    return complete


def listed(load: Callable[[], Iterable[str]]) -> Complete:
    """The same for values between commas: names that are not there yet, behind what stands before the last comma."""

    def complete(context: Any, parameter: Any, typed: str) -> list[CompletionItem]:
        before, comma, _ = typed.rpartition(",")
        given = before.split(",")
        return names(lambda: [before + comma + name for name in load() if name not in given])(context, parameter, typed)

    return complete


def device_names() -> list[str]:
    """Ids of devices and names of their chips."""
    from ringstep.devices import load_devices

    devices = load_devices().values()
    return [*(device.id for device in devices), *sorted({device.chip.name for device in devices})]


def scheme_names() -> list[str]:
    """The presets."""
    from quantize.scheme_file import presets

    return presets()


def precision_names() -> list[str]:
    """What --precision of an export takes."""
    return list(dict.fromkeys(["fp32", "fp16", *scheme_names()]))


def format_names() -> tuple[str, ...]:
    """What --format of `ringstep quantize` takes."""
    from exporters.job import FORMATS

    return FORMATS


def gated_names() -> tuple[str, ...]:
    """The tiny models of the gate."""
    from exporters.tiny import GATED

    return GATED


def target_names() -> tuple[str, ...]:
    """What ONNX models are made fit for."""
    from sanitize.target import TARGETS

    return TARGETS


def pass_names() -> list[str]:
    """The passes that always run."""
    from sanitize.order import PASSES

    return [p.name for p in PASSES]


def layout_names() -> list[str]:
    """The layouts that are off by default."""
    from sanitize.order import LAYOUTS

    return [p.name for p in LAYOUTS]


device = names(device_names)
scheme = names(scheme_names)
scheme_or_file = names(scheme_names, files=True)
precision = names(precision_names)
format_ = listed(format_names)
gated = names(gated_names)
target = names(target_names)
pass_ = names(pass_names)
layout = names(layout_names)
model = names(lambda: ["smollm2-135m"], files=True)

"""What the shell's Tab key offers for names that ringstep knows; `--help` says nothing of it, README.md does.

`names` and `listed` return a `shell_complete` of click's, which reads its names only when Tab is pressed. What other
folders know the names of, they complete themselves.
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


device = names(device_names)
model = names(lambda: ["smollm2-135m"], files=True)

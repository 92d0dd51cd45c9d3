"""What the command line shows: progress on stderr, tables and JSON on stdout, every error as one line."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ringstep.errors import RingstepError, did_you_mean

# click and rich are imported where they are used: `ringstep --help` must not wait for them.
if TYPE_CHECKING:
    import click
    from rich.progress import Progress

FAILURE = 2
GATE_FAILED = 1
SAY_SECONDS = 30  # between lines of progress where stderr is no terminal
_OWN_FAULT = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG,
              errno.EMFILE, errno.ENFILE, errno.EIO, errno.ELOOP)  # fmt: skip
_NUMBER = re.compile(r"[-+]?[\d.,]+( [\w%/]+){0,3}|-?")  # with a unit, or nothing
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


@dataclass
class Settings:
    """What --quiet and --verbose set, for the whole process."""

    quiet: bool = False
    verbose: bool = False


settings = Settings()
_live: Progress | None = None


@contextmanager
def progress(description: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Show a bar (a spinner without `total`) on stderr; yields a function that advances it by an amount.

    Where stderr is no terminal, a line every half minute, and one once a block of over two seconds has ended. Nothing
    with --quiet.
    """
    global _live
    start = time.monotonic()
    if settings.quiet or not sys.stderr or not sys.stderr.isatty():
        yield _said_now_and_then(description, total, start)
        if time.monotonic() - start > 2:
            say(f"{description}: {human_seconds(time.monotonic() - start)}")
        return
    outermost = _live is None
    if _live is None:
        _live = _new_progress()
        _live.start()
    live = _live
    task = live.add_task(_one_line(description), total=total)
    try:
        yield lambda amount: live.advance(task, amount)
    finally:
        live.remove_task(task)
        if outermost:
            live.stop()
            _live = None


@contextmanager
def board(description: str) -> Iterator[Callable[[str, str], None]]:
    """Lines on stderr that change in place, under a first one; yields a function (name, text) that sets one.

    Where stderr is no terminal, every new text is a line. Nothing with --quiet.
    """
    shown: dict[str, str] = {}
    tasks: dict[str, Any] = {}
    with progress(description):
        live = _live

        def show(name: str, text: str) -> None:
            if shown.get(name) == text:
                return
            shown[name] = text
            if live is None:
                say(f"{name}: {text}")
            elif name in tasks:
                live.update(tasks[name], description=_one_line(f"{name}: {text}"))
            else:
                tasks[name] = live.add_task(_one_line(f"{name}: {text}"), total=None)

        yield show
        for task in tasks.values():
            assert live is not None
            live.remove_task(task)


def say(message: str) -> None:
    """Print one line on stderr, above a bar if there is one. Nothing with --quiet."""
    if not settings.quiet:
        _stderr(message)


def warn(message: str) -> None:
    """Print a warning on stderr, with --quiet too."""
    _stderr(f"ringstep: warning: {message}")


def fail(message: str) -> NoReturn:
    """Print an error on stderr and leave with exit code 2."""
    _stderr(f"ringstep: error: {message}")
    raise SystemExit(FAILURE)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stdout, 80 columns wide at most; columns of numbers align right.

    Raises ValueError for a row of another length than `columns`.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [["" if cell is None else _one_line(str(cell)) for cell in row] for row in rows]
    if any(len(row) != len(columns) for row in cells):
        raise ValueError("a table's rows must be as long as its columns")
    grid = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, column in enumerate(columns):
        numbers = bool(cells) and all(_NUMBER.fullmatch(row[index]) for row in cells)
        grid.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        grid.add_row(*(Text(cell) for cell in row))
    width = min(80, shutil.get_terminal_size().columns)
    Console(file=sys.stdout, width=width, highlight=False).print(grid)


def line(text: str) -> None:
    """Print one line on stdout; control characters, which a model's name or answer may hold, become spaces."""
    print(_one_line(text))


def print_json(value: object) -> None:
    """Print a value as JSON on stdout: dataclasses and numpy as plain values, NaN and infinities as null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def human_bytes(count: float) -> str:
    """Return a size in decimal units with three digits, such as "97.8 MB"."""
    return _scaled(float(count), ("B", "kB", "MB", "GB", "TB", "PB"))


def human_seconds(seconds: float) -> str:
    """Return a duration such as "12 ms", "3.4 s", "2 min 05 s" or "1 h 02 min"."""
    if seconds < 0.9995:
        return _scaled(seconds * 1e6, ("µs", "ms"))
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def run(command: click.Command, args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every failure is one line on stderr and exit code 2.

    With `settings.verbose` the traceback comes first.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not fail an export
    try:
        code = _invoke(command, args)
        if sys.stdout:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard(sys.stdout)
        return 1
    except KeyboardInterrupt:
        return FAILURE


def _invoke(command: click.Command, args: Sequence[str] | None) -> int:
    import click

    try:
        result = command.main(args, prog_name="ringstep", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            return _report(leaving.code)
        return leaving.code or 0
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, click.Abort):
        return _report("interrupted; nothing is half-written, the same command resumes")
    except click.ClickException as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
            return error.exit_code
        return _report(_usage(error))
    except RingstepError as error:
        return _report(str(error), error)
    except MemoryError as error:
        return _report(f"out of memory: {error}".removesuffix(": "), error)
    except OSError as error:
        if error.errno in _OWN_FAULT:
            return _report(f"{error.filename or 'operating system'}: {error.strerror}", error)
        return _report(_internal(error), error)
    except Exception as error:
        return _report(_internal(error), error)


def _report(message: str, error: BaseException | None = None) -> int:
    try:
        if error and settings.verbose:
            import traceback

            traceback.print_exception(error)
        _stderr(f"ringstep: error: {message}")
    except OSError:
        _discard(sys.stderr)
    return FAILURE


def _internal(error: Exception) -> str:
    hint = "" if settings.verbose else " (run with -v for the traceback)"
    return f"internal error: {type(error).__name__}: {error}{hint}"


def _usage(error: click.ClickException) -> str:
    import click

    message, hint, context = error.format_message(), "", getattr(error, "ctx", None)
    unknown = re.match(r"No such command '(.*?)'", message)
    if unknown and context and isinstance(context.command, click.Group):
        commands = context.command.list_commands(context)
        message, hint = f"no such command {unknown[1]!r}", did_you_mean(unknown[1], commands)
    elif isinstance(error, click.NoSuchOption) and context:
        options = [name for param in context.command.get_params(context) for name in param.opts]
        message = f"no such option {error.option_name!r}"
        hint = did_you_mean(error.option_name, [name for name in options if name.startswith("-")])
    elif isinstance(error, click.BadParameter):
        choice, given = getattr(error.param, "type", None), re.match(r"'(.*)' is not one of", error.message)
        if isinstance(choice, click.Choice) and given:
            hint = did_you_mean(given[1], map(str, choice.choices))
    help_at = f"; see `{context.command_path} --help`" if context else ""
    return message.rstrip(".") + hint + help_at


def _said_now_and_then(description: str, total: float | None, start: float) -> Callable[[float], None]:
    done, last = 0.0, start

    def advance(amount: float) -> None:
        nonlocal done, last
        done, now = done + amount, time.monotonic()
        if now - last >= SAY_SECONDS:
            last = now
            share = f"{min(100, 100 * done / total):.0f} % " if total else ""
            say(f"{description}: {share}after {human_seconds(now - start)}")

    return advance


def _new_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _stderr(message: str) -> None:
    if _live is not None:
        _live.console.print(_one_line(message), markup=False, highlight=False, soft_wrap=True)
    elif sys.stderr:
        print(_one_line(message), file=sys.stderr, flush=True)


def _one_line(message: str) -> str:
    # File and tensor names come from anywhere: no line breaks, no terminal escapes.
    return _CONTROL.sub(" ", message).strip()


def _discard(stream: TextIO | None) -> None:
    # The interpreter flushes at exit and would complain about the pipe that has gone.
    try:
        if stream:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value) if isinstance(value, Path) else value


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without what torch's and ExecuTorch's own imports and passes warn of and log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

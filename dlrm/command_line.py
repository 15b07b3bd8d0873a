"""The ends of commands, with errors on one line that begins with `error:`, and their tables."""

import gc
import importlib
import io
import math
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from typing import Any, NoReturn, TextIO

from dlrm.documents import cell, one_line, printable

_MAX_OPEN_FILES = 1 << 20  # programs that a command starts may close every number up to the limit
_REMOVAL_SECONDS = 10  # in which further SIGTERMs do not interrupt the removal of output
_COLUMNS = 100  # of lines that are shortened, where there is no terminal
_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33}
_COLORS = {"note": "yellow", "warning": "yellow", "error": "red"}


def fail(error: object, code: int = 1) -> NoReturn:
    """Prints an error on one line that begins with `error:`, and ends the process."""
    sys.exit(say_error(error, code))


def exit_code_of(
    act: Callable[[], int | None],
    errors: tuple[type[BaseException], ...] = (ValueError, OSError),
    code: int = 1,
    hint: str = "",
) -> int:
    """Runs a command and returns its exit code; all commands but trainings end here.

    Errors, Ctrl-C and SIGTERM end it in one line, after what it was writing has been removed.

    Args:
        act: the command; None is exit code 0.
        errors: errors that the user can fix.
        code: exit code after one of them; that of Ctrl-C is 130, and that of SIGTERM 143.
        hint: text for a stopped command: the files that it leaves, and how to resume it.
    """
    name_standard_output()
    with terminable() as stops:
        try:
            try:
                return act() or 0
            finally:
                flush_output()
        except (KeyboardInterrupt, Terminated) as stop:
            stops.append(stop)
        except Exception as error:
            if not stops and isinstance(error, errors):
                return say_error(error, code)
            if not stops:  # a library raises its own error in the place of a signal's
                raise
    word, number = ("terminated", 143) if isinstance(stops[0], Terminated) else ("interrupted", 130)
    return say_error(f"{word}; {hint}" if hint else word, number)


class _StandardOutput(io.FileIO):
    """Standard output, of which errors have a name."""

    def __init__(self, replaced: io.TextIOWrapper):
        super().__init__(replaced.fileno(), "w", closefd=False)
        self._replaced = replaced  # which would close the file at its end

    def write(self, content: Any) -> int:
        """Writes bytes; see `io.FileIO`."""
        try:
            return super().write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


def name_standard_output() -> None:
    """Gives errors of printing a name, unless the caller has replaced `sys.stdout`.

    Characters that its encoding lacks, such as a dash in ASCII, are escaped.
    """
    old = sys.stdout
    if type(old) is io.TextIOWrapper and old.fileno() == 1:
        old.flush()
        by_line = old.line_buffering or old.write_through
        raw = io.BufferedWriter(_StandardOutput(old))
        sys.stdout = io.TextIOWrapper(raw, old.encoding, "backslashreplace", line_buffering=by_line)


def flush_output() -> None:
    """Writes what was printed, and closes standard output if that fails."""
    try:
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            sys.stdout.close()  # from Python 3.13 on, a stream that is dropped reports the error
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # Python flushes it at its end
        raise


def show(text: str) -> None:
    """Prints a text that was asked for, such as a help.

    The process ends silently if the reader of a pipe, such as `head`, closes it.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)


def say_error(error: object, code: int) -> int:
    """Prints an error on one line that begins with `error:`; returns the exit code."""
    line = highlighted(f"error: {one_line(error)}", sys.stderr)
    print(line, file=sys.stderr, flush=True)
    return code


def missing_extra(error: Exception, extra: str) -> str:
    """Returns the message that a package is missing, with the command that installs it.

    The command names the packages: `dlrm` of the package index is another project.

    Args:
        extra: extra of `dlrm` that has it, as in `pyproject.toml`.
    """
    from importlib import metadata  # where a package is missing, since it takes 20 ms

    try:
        lines = [re.sub(r"[\s'\"]", "", line) for line in metadata.requires("dlrm") or ()]
    except metadata.PackageNotFoundError:
        lines = []
    end = f";extra=={extra}"
    packages = [line.removesuffix(end) for line in lines if line.endswith(end)]
    if not packages:  # neither installed nor built, or before the extra was added
        return f"{error}; pip install -e '.[{extra}]' in a checkout of dlrm installs it"
    return f"{error}; pip install {shlex.join(packages)} installs it"


def say(line: object, is_prose: bool = False) -> None:
    """Prints one line, with control characters, as in paths, escaped."""
    print(highlighted(printable(line)), flush=True)


def say_aside(line: str) -> None:
    """Prints a note or a warning on standard error, where it mixes with no output."""
    print(highlighted(line, sys.stderr), file=sys.stderr, flush=True)


def painted(text: str, style: str, stream: TextIO | None = None) -> str:
    """Returns a text in a style of `_STYLES`, if the stream is a terminal that may show it.

    `NO_COLOR` (https://no-color.org) and `TERM=dumb` forbid it.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if not text or plain or not _is_terminal(stream or sys.stdout):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def highlighted(line: str, stream: TextIO | None = None) -> str:
    """Returns a line whose first word is colored, if it is one of `_COLORS`."""
    word, colon, rest = line.partition(":")
    return painted(word + colon, _COLORS[word], stream) + rest if word in _COLORS else line


def wrapped(line: str, indent: int = 2, most: int | None = None, end: str = "") -> str:
    """Returns a line broken between words to fit the terminal; without one, as it is.

    Args:
        line: the line; if it has several already, it stays as it is.
        indent: columns that further lines begin with.
        most: lines to keep; the rest is left out, also where there is no terminal. None keeps all.
        end: a text at the end of all lines but the last, such as a backslash.
    """
    on_terminal = _is_terminal(sys.stdout)
    if "\n" in line or not (on_terminal or most):
        return line
    columns = shutil.get_terminal_size().columns
    if not on_terminal and most:
        columns, most = most * _COLUMNS, 1
    lines = textwrap.wrap(
        line,
        max(columns - len(end), indent + 1),
        subsequent_indent=" " * indent,
        max_lines=most,
        placeholder=" ...",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{end}\n".join(lines)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def shell_line(words: Sequence[str]) -> str:
    """Returns a command for a shell, on one line: control characters are escaped."""
    return printable(shlex.join(words))


def free_name(name: str) -> str:
    """Returns the name of a path that does not exist: the given one, or with a number behind it."""
    names = chain([name], (f"{name}{number}" for number in count(2)))
    return next(one for one in names if not os.path.lexists(one))


class Terminated(SystemExit):
    """SIGTERM has arrived; the exit code is that of a process that it ends."""


@contextmanager
def terminable(at_once: bool = False) -> Iterator[list[BaseException]]:
    """Makes SIGTERM raise `Terminated` within the block, so that unfinished output is removed.

    Others within the next seconds are ignored, so that they do not interrupt the removal. At the
    end the former handlers are restored, unless the block has left one of its own. In threads other
    than the main one, which cannot handle signals, the block runs as it is.

    Yields:
        What SIGTERM and Ctrl-C have raised so far.

    Args:
        at_once: whether SIGTERM ends the process as if it were not handled.
    """
    raised: list[BaseException] = []
    if threading.current_thread() is not threading.main_thread():
        yield raised
        return
    arrived = -math.inf

    def stop(*_: object) -> None:
        nonlocal arrived
        if time.monotonic() > arrived + _REMOVAL_SECONDS:  # Python may have dropped the first
            arrived = time.monotonic()
            raised.append(Terminated(128 + signal.SIGTERM))
            raise raised[-1]

    def interrupted(*_: object) -> None:
        raised.append(KeyboardInterrupt())
        raise raised[-1]

    handler = signal.SIG_DFL if at_once else stop
    interrupt, before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, handler)
    if interrupt != signal.SIG_IGN:  # as of a shell's background job
        signal.signal(signal.SIGINT, interrupted)
    try:
        yield raised
    finally:
        signal.signal(signal.SIGINT, interrupt)
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def importing() -> Iterator[None]:
    """Pauses garbage collection while a command imports torch and its own modules.

    They make hundreds of thousands of objects that stay, and the collector would look through them
    again and again: a tenth of the time of importing torch, and later. Signals that raise are
    handled at the end, since the native part of torch would drop what they raise.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _signals_later():
            yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _signals_later() -> Iterator[None]:
    arrived: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def later(module: str) -> Callable[..., Any]:
    """Returns the function `run` of a module that is imported, as torch is, when it is called."""

    def run(*arguments: Any) -> Any:
        with importing():
            command = importlib.import_module(module)
        return command.run(*arguments)

    return run


def raise_file_limit() -> None:
    """Lets this process open as many files as it may choose to, by default 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(ValueError, OSError):  # the kernel's own limit has become lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def text_of(value: Any) -> str:
    """Returns a value in the form of a command line."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as flags, without those that are None."""
    written = []
    for name, value in settings.items():
        if isinstance(value, bool):
            written.append(f"--{name}" if value else f"--no{name}")
        elif value is not None:
            written.append(f"--{name}={text_of(value)}")
    return written


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose columns are as wide as their longest cell.

    The first column is aligned to the left and the others to the right. Cells are those of
    `dlrm.documents.cell`, so that no value can print lines of its own.
    """
    columns = [[cell(value) for value in column] for column in zip(heads, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in zip(*columns, strict=True)
    ]

"""Commands of `dlrm` that another command runs, each in a process of its own."""

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import dlrm
from dlrm.command_line import flags_of
from dlrm.remote.uri import variables as local_paths

# Where `python -m` finds this package first, whatever the current folder has.
_HERE = Path(dlrm.__file__).resolve().parent.parent


class StepError(Exception):
    """A command has failed, and has printed why.

    Attributes:
        code: its exit code, as a shell has it.
    """

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"dlrm {name}: exit code {code}")
        self.code = code


def run_step(
    name: str,
    flags: Mapping[str, Any],
    log: TextIO,
    shown: str = "",
    words: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    held: Sequence[int] = (),
    unsaid: str = "",
) -> None:
    """Runs a command of `dlrm` and waits for its end.

    Args:
        flags: its flags, whose paths are absolute.
        log: file for the command and all lines that it prints.
        shown: regular expression of the lines to print here as well, by default all; errors are.
        words: further words of its command line, before the flags.
        variables: environment variables besides those of this process.
        held: descriptors, as of locks, that it inherits.
        unsaid: text that is not printed of errors, such as advice for the command alone.
    """
    words = [name, *words, *flags_of(flags)]
    log.write(f"$ dlrm {shlex.join(words)}\n")
    with subprocess.Popen(
        [sys.executable, "-m", "dlrm", *words],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **local_paths(), **(variables or {})},
        cwd=_HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=held,
    ) as process:
        assert process.stdout is not None
        errors = threading.Thread(target=_print_errors, args=(process.stderr, log, unsaid))
        errors.start()
        try:
            for line in process.stdout:
                log.write(line)
                if re.search(shown, line):
                    print(line.replace(f"{Path.cwd()}/", ""), end="", flush=True)
        except BaseException:
            process.terminate()
            raise
        finally:
            errors.join()
    if code := process.returncode:
        raise StepError(name, code if code > 0 else 128 - code)


def _print_errors(errors: TextIO, log: TextIO, unsaid: str) -> None:
    for line in errors:
        log.write(line)
        print(line.replace(unsaid, ""), end="", file=sys.stderr, flush=True)

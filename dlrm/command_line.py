"""How commands say what is wrong: one line that begins with `error:`, and an exit code."""

import argparse
import sys
from typing import NoReturn

from dlrm.documents import one_line


def fail(error: object, code: int = 1) -> NoReturn:
    """Prints an error on one line that begins with `error:`, and ends the process."""
    print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are such a line, with exit code 2; its help shows texts as they are.

    Args:
        description: what the help begins with.
        prog: name of the command, if it is not that of the file.
    """

    def __init__(self, description: str | None = None, prog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        fail(message, 2)

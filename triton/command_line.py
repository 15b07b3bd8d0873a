"""What the scripts' command lines share."""

import argparse
from typing import Any


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help shows the description as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_flag(parser: Any, name: str, *short: str, **facts: Any) -> None:
    """Adds `--name`, which may be written with underscores too, to a parser or a group of one."""
    spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
    parser.add_argument(*short, *spellings, **facts)

"""Shared parts of the scripts' command lines."""

from typing import Any

from dlrm.command_line import Parser


def new_parser(description: str | None) -> Parser:
    """Returns a parser whose help keeps the line breaks of the description."""
    return Parser(description)


def add_flag(parser: Any, name: str, *short: str, **facts: Any) -> None:
    """Adds `--name`, which may be written with underscores too, to a parser or a group of one."""
    spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
    parser.add_argument(*short, *spellings, **facts)

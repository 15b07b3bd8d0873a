"""Flags of commands that read tables, such as the format of CSV, or prepare them."""

import os
from typing import Any

from absl import flags

from dlrm.data.sources.text_format import COMPRESSIONS, TextFormat
from dlrm.data.tables.files import KINDS
from dlrm.preproc.stages.options import BAD_LINES

FLAGS = flags.FLAGS
TEXT_FLAGS = ("delimiter", "quote", "escape", "encoding", "decimal", "thousands", "compression")


def define_text_flags() -> None:
    """Defines the flags that `text_format` reads, and `--input_format`."""
    flags.DEFINE_enum(
        "input_format", None, KINDS, "kind of the files; default: by their names and content"
    )
    flags.DEFINE_list("columns", [], "names of a CSV's columns; default: those of its header")
    flags.DEFINE_boolean(
        "header",
        None,
        "a CSV begins with a line of column names; default: yes unless --columns is given",
    )
    define_format_flags()


def define_format_flags() -> None:
    """Defines the flags of CSV's format that have the same meaning in all commands."""
    otherwise = "default: that of the schema, otherwise"
    flags.DEFINE_string(
        "delimiter",
        None,
        f"separator of a CSV's cells; {otherwise} a tab for .tsv, and a comma for other files",
    )
    flags.DEFINE_string(
        "quote",
        None,
        f"character around a CSV's cells, or none, if quotes are part of the text; {otherwise} \"",
    )
    flags.DEFINE_string(
        "escape",
        None,
        f"character before quotes and delimiters in a CSV's cells, such as \\; {otherwise} none",
    )
    flags.DEFINE_string(
        "encoding", None, f"encoding of text, such as latin-1 or utf-16; {otherwise} UTF-8"
    )
    flags.DEFINE_string(
        "decimal", None, f"decimal mark of a CSV's numbers, a point or a comma; {otherwise} a point"
    )
    flags.DEFINE_string(
        "thousands", None, f"mark between groups of three digits in a CSV; {otherwise} none"
    )
    flags.DEFINE_enum(
        "compression",
        None,
        COMPRESSIONS,
        f"compression of text; {otherwise} that of each file's content",
    )


def text_format() -> TextFormat:
    """Returns the format of CSV that the flags describe."""
    given: dict[str, Any] = {name: FLAGS[name].value for name in TEXT_FLAGS}
    if given["delimiter"] == r"\t":  # which a shell does not turn into a tab
        given["delimiter"] = "\t"
    return TextFormat(tuple(FLAGS.columns), FLAGS.header, **given)


def define_preparation_flags() -> None:
    """Defines the flags, of which `table_options` reads some."""
    flags.DEFINE_integer(
        "cores", os.cpu_count(), "number of cores to use; default: all of this machine"
    )
    flags.DEFINE_enum(
        "bad_lines",
        "fail",
        BAD_LINES,
        "fail: an unreadable row ends the run; quarantine: it is left out and listed in "
        "quarantine/",
    )
    flags.DEFINE_float(
        "max_bad_lines", 0.001, "maximum share of rows that quarantine may leave out"
    )
    flags.DEFINE_boolean("report", True, "write report.html and report.json")
    flags.DEFINE_boolean("restart", False, "discard an unfinished run and start again")


def table_options() -> dict[str, Any]:
    """Returns the fields of `TableOptions` that the flags determine."""
    return {name: FLAGS[name].value for name in ("bad_lines", "max_bad_lines", "report")}

"""Flags of commands that read tables: how CSV is written."""

from absl import flags

from dlrm.data.tables.files import TextFormat

FLAGS = flags.FLAGS


def define_text_flags() -> None:
    """Defines the flags that `text_format` reads."""
    flags.DEFINE_list("columns", [], "names of a CSV's columns; without: those of its header")
    flags.DEFINE_boolean(
        "header", None, "whether a CSV begins with the names; default: unless --columns does"
    )
    flags.DEFINE_string(
        "delimiter", None, "what separates cells; default: a tab in .tsv, else a comma"
    )


def text_format() -> TextFormat:
    """Returns how the flags say that CSV is read."""
    return TextFormat(tuple(FLAGS.columns), FLAGS.header, FLAGS.delimiter)

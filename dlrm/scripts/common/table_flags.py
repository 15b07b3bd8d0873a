"""Flags of commands that read tables: the format of CSV."""

from absl import flags

from dlrm.data.tables.files import TextFormat

FLAGS = flags.FLAGS


def define_text_flags() -> None:
    """Defines the flags that `text_format` reads."""
    flags.DEFINE_list("columns", [], "names of a CSV's columns; default: those of its header")
    flags.DEFINE_boolean(
        "header",
        None,
        "a CSV begins with a line of column names; default: yes unless --columns is given",
    )
    flags.DEFINE_string(
        "delimiter", None, "separator of a CSV's cells; default: a tab for .tsv, otherwise a comma"
    )


def text_format() -> TextFormat:
    """Returns the format of CSV that the flags describe."""
    return TextFormat(tuple(FLAGS.columns), FLAGS.header, FLAGS.delimiter)

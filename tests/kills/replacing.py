"""Functions for `test_replace_kills`: the replacement of a directory."""

from dlrm import files
from dlrm.files import atomic_directory
from dlrm.manifest import write_manifest


def replace(final, text, exchange=True):
    """Replaces a directory by two files with a text, and a manifest.

    Args:
        final: the directory.
        text: the text of both files.
        exchange: whether to let the system exchange the two.
    """
    if not exchange:
        files.exchange = lambda one, other: False
    with atomic_directory(final, replace="dataset") as staging:
        for name in ("one", "two"):
            (staging / name).write_text(text)
        write_manifest(staging, "dataset")

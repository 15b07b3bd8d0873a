"""The transform of any dataset, checkpoint or served model: of a log, or of named columns."""

import os
from pathlib import Path

from dlrm.data.transform import table_transform
from dlrm.data.transform.table_transform import TableTransform
from dlrm.data.transform.transform import Transform

Fitted = Transform | TableTransform


def load_transform(directory: str | os.PathLike) -> Fitted:
    """Loads a transform, and maps its dictionaries without reading them.

    Args:
        directory: `transform/` of a dataset or a checkpoint.

    Raises:
        FileNotFoundError: the transform or one of its files is missing.
        ValueError: a file is damaged; the message names it.
    """
    if TableTransform.is_at(directory):
        return TableTransform.load(directory)
    return Transform.load(directory)


def facts_file(directory: str | os.PathLike) -> Path:
    """Returns the file that is written last; its presence shows that a transform is whole."""
    table = Path(directory, table_transform.FILE)
    return table if table.exists() else Path(directory, "transform.json")

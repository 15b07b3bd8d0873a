"""Kinds of rows that are learned day by day: tables of a schema, and logs in Criteo's format."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm.data.clicks.layout import TRANSFORM
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.flags import Values
from dlrm.preproc.logs.options import DATASET
from dlrm.preproc.logs.raw_log import SUFFIXES
from dlrm.preproc.stages.parent import schema_differences
from dlrm.scripts.common.table_flags import TEXT_FLAGS
from dlrm.scripts.prepare.flags import CRITEO, CriteoConfig
from dlrm.settings import settings_of

_FORMAT = ("input_format", *TEXT_FLAGS)


class Tables:
    """The kind of the rows: tables of a schema.

    Attributes:
        digest: SHA-256 of what says which kind they are.
        dataset: path of a dataset in the directory of a day.
        judging: flags that read them for `dlrm evaluate`.
    """

    dataset = "dataset"

    def __init__(self, values: Values) -> None:
        path = Path(values["schema"]).absolute()
        self._schema, groups = path, Schema.load(path).groups
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._format = {name: values[name] for name in _FORMAT if name in values.given}
        self.judging = self._format | ({"groups": groups[0]} if groups else {})

    def difference(self, dataset: Path) -> str | None:
        """Returns the first difference of the schema from that of a dataset, if there is one."""
        fitted = Transform.load(dataset / TRANSFORM).schema
        return next(schema_differences(fitted, Schema.load(self._schema)), None)

    def preparation(self, inputs: Sequence[Path], folder: Path) -> dict[str, Any]:
        """Returns the flags that prepare the rows of days in the directory of a day."""
        flags = {"schema": self._schema, "input": inputs, "test_fraction": 0, **self._format}
        return flags | {"output": folder / "dataset"}


class Logs:
    """Logs in Criteo's format; see `Tables`."""

    dataset = f"dataset/{DATASET}"
    judging: dict[str, Any] = {}  # noqa: RUF012  # not changed

    def __init__(self, values: Values) -> None:
        for name in _FORMAT:
            if name in values.given:
                raise ValueError(f"--{name}: is for schemas of tables; --schema {CRITEO} has none")
        names = [name for name in settings_of(CriteoConfig) if name in values]
        self._options = {name: values[name] for name in names if values[name] is not None}
        self.digest = hashlib.sha256(f"{CRITEO} {self._options}".encode()).hexdigest()

    def difference(self, dataset: Path) -> str:
        """Returns the flags of this command, which differ from those of the dataset."""
        shown = " ".join(f"--{name} {value}" for name, value in self._options.items())
        return f"--schema {CRITEO} {shown}"

    def preparation(self, inputs: Sequence[Path], folder: Path) -> dict[str, Any]:
        """Returns the flags that prepare the logs of days in the directory of a day."""
        days = folder / "input"
        days.mkdir(exist_ok=True)
        for number, path in enumerate(inputs):
            if path.is_dir():
                raise ValueError(f"{path}: expected a file for a day of logs, got a folder")
            suffix = path.suffix if path.suffix in SUFFIXES else ""
            link = days / f"day_{number}{suffix}"
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        flags = {"schema": CRITEO, "input": days, "hold_out": False, **self._options}
        return flags | {"output": folder / "dataset"}


def rows_of(values: Values) -> Tables | Logs:
    """Returns the kind of rows that the flags describe.

    Raises:
        ValueError: a flag is for the other kind.
        OSError: there is no such schema.
    """
    if values["schema"] == CRITEO:
        return Logs(values)
    for name in settings_of(CriteoConfig):
        if name in values.given:
            raise ValueError(f"--{name}: is for --schema {CRITEO}; got {values['schema']}")
    return Tables(values)

"""The dataset or checkpoint whose dictionaries further rows extend."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.transform import stored
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier
from dlrm.documents import brief, read_json
from dlrm.files import MANIFEST
from dlrm.preproc.execution.work_folder import WorkFolder
from dlrm.preproc.stages.options import IncrementConfig

_KINDS = (layout.KIND, "checkpoint")
_OF_FIELDS = ("numerical", "categorical", "crosses")
_OF_VALUES = ("frequency_limit", "max_ids")  # which an extension may change


@dataclass(frozen=True)
class Parent:
    """A dataset or checkpoint whose dictionaries are extended.

    Attributes:
        config: the options of the extension.
        fitted: its transform.
        digest: digest of the transform.
        transform: the folder of the transform, which tasks read.
    """

    config: IncrementConfig
    fitted: Transform
    digest: str
    transform: Path

    def lent(self, work: WorkFolder) -> "Parent":
        """Returns the same, whose tasks read the files in a run; see `WorkFolder.lend`."""
        return replace(self, transform=work.lend("parent.transform", self.transform))

    def facts(self) -> dict[str, str]:
        """Returns, by flag, what determines the bytes of the dataset."""
        return {"--extend": self.digest}

    def manifest_facts(self) -> dict[str, str]:
        """Returns the manifest's entries about the extension."""
        return {"parent": self.digest, "numerics": self.config.numerics}


def open_parent(config: IncrementConfig, schema: Schema) -> Parent | None:
    """Returns what the rows of a schema extend; None if they extend nothing.

    Raises:
        FileNotFoundError: the parent, or a file of it, is missing.
        ValueError: the parent is damaged, or of another schema.
    """
    directory = config.extend
    if directory is None:
        return None
    if not (directory / layout.TRANSFORM).is_dir():
        within = [path.parent for path in sorted(directory.glob(f"*/{layout.TRANSFORM}"))]
        raise FileNotFoundError(
            f"--extend {directory}: expected a dataset or checkpoint with a fitted transform, got "
            f"none{f'; {within[-1]} has one' if within else ''}"
        )
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"{directory / MANIFEST}: no such file, so nothing checks it")
    kind = read_json(directory / MANIFEST).get("kind")
    if kind not in _KINDS:
        raise ValueError(f"--extend {directory}: expected a dataset or checkpoint, got {kind!r}")
    facts = stored.facts_file(directory / layout.TRANSFORM)
    Verifier(directory, kind, "first", None).check_names(f"{layout.TRANSFORM}/{facts.name}")
    fitted = Transform.load(facts.parent)
    for difference in schema_differences(fitted.schema, schema):
        raise ValueError(
            f"--extend {directory}: expected the schema of its transform, got another one: "
            f"{difference}"
        )
    return Parent(config, fitted, stored.digest(facts.parent), facts.parent)


def schema_differences(parent: Schema, own: Schema) -> Iterator[str]:
    """Yields the entries in which two schemas differ, except limits and the format of CSV."""
    first, second = ({k: v for k, v in s.to_dict().items() if k != "format"} for s in (parent, own))
    for name in dict.fromkeys([*first, *second]):
        sides = [_entries(facts.get(name)) for facts in (first, second)]
        for entry in dict.fromkeys([*sides[0], *sides[1]]):
            values: list[Any] = [side.get(entry) for side in sides]
            where, absent = f"{name} {entry}".strip(), "nothing"
            if all(isinstance(value, dict) for value in values):
                keys = [*values[0], *values[1]]
                key = next((k for k in keys if values[0].get(k) != values[1].get(k)), "")
                where, values = f"{where}: {key}", [value.get(key) for value in values]
                absent = "the default"
            if values[0] != values[1]:
                shown = [absent if value is None else brief(value) for value in values]
                yield f"{where}: {shown[0]} in the transform and {shown[1]} in the schema"
        if name in _OF_FIELDS and [*sides[0]] != [*sides[1]]:  # columns are numbered by it
            yield f"{name}: another order"


def _entries(value: Any) -> dict[str, Any]:
    """Returns the fields of a list by column, and any other value under an empty name."""
    if not isinstance(value, list) or not value or isinstance(value[0], list):
        return {"": value}
    if all(isinstance(item, str) for item in value):
        return {item: {} for item in value}
    fields = [{"column": item} if isinstance(item, str) else dict(item) for item in value]
    return {
        str(field.pop("column", field.pop("name", place))): {
            k: v for k, v in field.items() if k not in _OF_VALUES
        }
        for place, field in enumerate(fields)
    }

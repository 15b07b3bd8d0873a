"""The place of a day in a chain: its parent, whose dictionaries it extends, and what it kept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.transform import stored
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.stored import Increment
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier
from dlrm.documents import brief, read_json
from dlrm.files import MANIFEST
from dlrm.preproc.execution.work_folder import WorkFolder
from dlrm.preproc.increments.extend import extend
from dlrm.preproc.increments.segments import DAY
from dlrm.preproc.stages.fitting import TransformFacts
from dlrm.preproc.stages.options import IncrementConfig, day_number, kind_of_day, next_day
from dlrm.preproc.stages.stage import PreparationRun

_KINDS = (layout.KIND, "checkpoint")
_OF_FIELDS = ("numerical", "categorical", "crosses")
_OF_VALUES = ("frequency_limit", "max_ids")  # which a day may change


@dataclass(frozen=True)
class Parent:
    """A dataset or checkpoint whose dictionaries are extended.

    Attributes:
        directory: the directory.
        kind: its kind in its manifest.
        fitted: its transform.
        digest: digest of the transform.
        transform: the folder of the transform, which tasks read.
        state: that of lookups and candidates; None if there are none.
    """

    directory: Path
    kind: str
    fitted: Transform
    digest: str
    transform: Path
    state: Path | None

    @property
    def days(self) -> tuple[dict[str, Any], ...]:
        """Returns the facts of its days, the last its own, with its digest."""
        if (increment := self.fitted.increment) is not None:
            return (*increment.days[:-1], increment.days[-1] | {"transform": self.digest})
        sizes = list(map(len, self.fitted.dictionaries))
        none = [0] * len(sizes)
        first = {"day": "0", "transform": self.digest, "rows": None, "content": None}
        return (first | {"new": sizes, "candidates": none, "forgotten": none},)


@dataclass(frozen=True)
class Growth:
    """A day of a chain.

    Attributes:
        config: its options.
        day: the day.
        parent: what it extends; None for the first day.
    """

    config: IncrementConfig
    day: str
    parent: Parent | None

    @property
    def keeps_numerics(self) -> bool:
        """Returns whether bins and means are those of the parent."""
        return self.parent is not None and self.config.numerics == "keep"

    def lent(self, work: WorkFolder) -> "Growth":
        """Returns the same, whose tasks read the parent's files in a run; see `WorkFolder.lend`."""
        if (parent := self.parent) is None:
            return self
        state = parent.state and work.lend("parent.state", parent.state)
        transform = work.lend("parent.transform", parent.transform)
        return replace(self, parent=replace(parent, transform=transform, state=state))

    def facts(self) -> dict[str, Any]:
        """Returns, by flag, what determines the bytes of the dataset."""
        return {"--extend": self.parent and self.parent.digest, "--day": self.day}

    def increment(self, own: dict[str, Any]) -> Increment:
        """Returns the increment of a transform, given the facts of its own day."""
        days = () if self.parent is None else self.parent.days
        own = {"day": self.day, "transform": None} | own
        return Increment(self.day, self.config.numerics, (*days, own))

    def fit(
        self,
        run: PreparationRun,
        counted: Sequence[dict[str, Any]],
        directory: Path,
        facts: TransformFacts,
    ) -> Transform:
        """Writes the transform of the day; see `extend`."""
        return extend(self, run, counted, directory, facts)

    def manifest_facts(self) -> dict[str, Any]:
        """Returns the manifest's entries about the day."""
        config = self.config
        return {
            "day": self.day,
            "parent": self.parent and self.parent.digest,
            "numerics": config.numerics,
            "candidates": config.candidates,
            "half_life": config.half_life,
            "admission_probability": config.admission_probability,
        }


def open_growth(
    config: IncrementConfig, schema: Schema, say: Callable[[str], object]
) -> Growth | None:
    """Returns the place of rows in a chain of days, and says what the parent lacks.

    None if the rows are in no chain.

    Raises:
        FileNotFoundError: the parent, or a file of it, is missing.
        ValueError: the parent is damaged, is of another schema or another run, or the day does not
            follow its day.
    """
    if not config.is_used:
        return None
    if config.extend is None:
        assert config.day is not None
        return Growth(config, config.day, None)
    parent = _open_parent(config.extend)
    for difference in schema_differences(parent.fitted.schema, schema):
        raise ValueError(
            f"--extend {config.extend}: expected the schema of its transform, got another one: "
            f"{difference}"
        )
    growth = Growth(config, _day(config, parent), parent)
    if parent.state is None:
        say(
            f"note: {parent.directory} has no counts of values below their frequency limit (--day "
            "keeps them), so those of this day begin at 0"
        )
    return growth


def _open_parent(directory: Path) -> Parent:
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
    verifier = Verifier(directory, kind, "first", None)
    facts = stored.facts_file(directory / layout.TRANSFORM)
    verifier.check_names(f"{layout.TRANSFORM}/{facts.name}", layout.CHAIN)
    fitted, digest = Transform.load(facts.parent), stored.digest(facts.parent)
    parent = Parent(directory, kind, fitted, digest, facts.parent, None)
    state = directory / layout.CHAIN
    if not state.is_dir():
        return parent
    if (of := read_json(state / DAY).get("transform")) != digest:
        raise ValueError(
            f"{state}: expected the counts of {facts}, with digest {digest[:12]}, got those of "
            f"{brief(of)[:14]}: they are left over from another run"
        )
    return replace(parent, state=state)


def _day(config: IncrementConfig, parent: Parent) -> str:
    """Returns the day, after checking that it follows those of the parent."""
    increment = parent.fitted.increment
    if increment is None:
        return config.day or "1"
    last = increment.day
    if config.day is None:
        return next_day(last)
    if (kind := kind_of_day(last)) != kind_of_day(config.day):
        raise ValueError(
            f"--day {config.day}: expected {'an' if kind == 'hour' else 'a'} {kind}, as {last} of "
            f"{config.extend}"
        )
    if day_number(config.day) > day_number(last):
        return config.day
    twice = any(day["day"] == config.day for day in increment.days)
    raise ValueError(
        f"--day {config.day}: expected a day after {last}, the last of {config.extend}, "
        + ("which has this day already" if twice else "got an earlier one")
    )


def schema_differences(parent: Schema, day: Schema) -> Iterator[str]:
    """Yields the entries in which two schemas differ, except limits and the format of CSV."""
    first, second = ({k: v for k, v in s.to_dict().items() if k != "format"} for s in (parent, day))
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

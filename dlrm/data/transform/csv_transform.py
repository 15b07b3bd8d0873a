"""From the text of CSV columns to a model's inputs, as it was fitted: serving applies the same."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Parsed
from dlrm.data.sources.csv_cells import BadCellError, number_parser
from dlrm.data.transform.transform import log_numerical
from dlrm.documents import brief, read_json
from dlrm.files import write_atomically

NUMERIC_TRANSFORMS = ("log", "standardise", "none")
_FILE = "csv.json"
_MAX_BYTES = 1 << 30  # dictionaries and all
_LONGEST_SHOWN = 64  # characters of a cell in a message


class BadRowError(ValueError):
    """A cell that cannot be transformed.

    Attributes:
        row, column: where it is.
        problem: what was expected and what came.
    """

    def __init__(self, row: int, column: str, problem: str) -> None:
        super().__init__(f"column {column}, row {row}: {problem}")
        self.row, self.column, self.problem = row, column, problem


@dataclass(frozen=True)
class CsvTransform:
    """A fitted transform from the text of columns to a model's inputs; serving applies the same.

    Attributes:
        numeric_transform: "log", "standardise" or "none".
        scales: numerical feature -> its mean and standard deviation (standardise only).
        dictionaries: categorical feature -> the values that have the ids 1, 2, ...
        missing_values: cells that mean "missing", besides empty ones.
        label: column of the label; None in transforms of versions that did not keep it.
        positive: value of the label that counts as 1; None where labels are 0 and 1.
        negatives: values of the label that were counted as 0; None where they are not known, or too
            many to keep.
    """

    numeric_transform: str
    scales: dict[str, tuple[float, float]]
    dictionaries: dict[str, list[str]]
    missing_values: tuple[str, ...]
    label: str | None = None
    positive: str | None = None
    negatives: tuple[str, ...] | None = None

    def __call__(
        self, columns: Mapping[str, Sequence[str]]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns numericals, float16 `[rows, num_numerical]`, and the ids `[rows]` of each table.

        Raises:
            KeyError: a column is missing.
            BadRowError: a numerical cell is no number, or too large for float16.
        """
        parse = number_parser(self.missing_values)
        numerical = []
        for name in self.scales:
            try:
                numbers, _ = self.numbers(name, parse([cell.strip() for cell in columns[name]]))
            except BadCellError as error:
                got = _shortened(columns[name][error.index])
                problem = f"expected {error.expected}, got {got!r}"
                raise BadRowError(error.index, name, problem) from None
            if (row := first_overflow(numbers)) is not None:
                problem = overflow_text(_shortened(columns[name][row]), self.numeric_transform)
                raise BadRowError(row, name, problem)
            numerical.append(numbers)
        ids = {}
        for name, lookup in self._lookups.items():
            encoded = [lookup.get(cell.strip(), 0) for cell in columns[name]]
            ids[name] = np.array(encoded, layout.id_dtype(len(lookup) + 1))
        rows = len(next(iter(columns.values())))
        return np.stack(numerical, 1) if numerical else np.empty((rows, 0), np.float16), ids

    @cached_property
    def _lookups(self) -> dict[str, dict[str, int]]:
        """Categorical feature -> value -> id."""
        return {
            name: {value: i for i, value in enumerate(values, 1)}
            for name, values in self.dictionaries.items()
        }

    def numbers(self, name: str, values: np.ndarray) -> tuple[np.ndarray, int]:
        """Transforms a numerical column, NaN being missing.

        Returns:
            The float16 values, infinite where they overflow, and how many arguments of the
            logarithm were raised to 1.
        """
        missing = np.isnan(values)
        if self.numeric_transform == "log":
            return log_numerical(Parsed(np.where(missing, 0.0, values), missing))
        mean, deviation = self.scales[name]
        scaled = np.where(missing, 0.0, (values - mean) / deviation)
        with np.errstate(over="ignore"):
            return scaled.astype(np.float32).astype(layout.NUMERICAL_DTYPE), 0

    def save(self, directory: Path) -> None:
        """Writes `transform/csv.json` into a dataset."""
        path = directory / layout.TRANSFORM / _FILE
        path.parent.mkdir()
        text = json.dumps({"version": 1, **asdict(self)}, indent=1, ensure_ascii=False)
        write_atomically(path, text + "\n")

    @classmethod
    def load(cls, directory: Path) -> "CsvTransform":
        """Reads what `save` wrote into a dataset.

        Raises:
            FileNotFoundError: the dataset has no such transform.
            ValueError: the file is not one; it is named.
        """
        path = directory / layout.TRANSFORM / _FILE
        try:
            facts = read_json(path, max_bytes=_MAX_BYTES)
            if facts["version"] != 1:
                raise ValueError(f"expected version 1, got {facts['version']}")
            label = {name: facts.get(name) for name in ("label", "positive")}
            if not all(text is None or isinstance(text, str) for text in label.values()):
                raise ValueError(f"expected texts as label and positive, got {brief(label)}")
            negatives = facts.get("negatives")
            return cls(
                facts["numeric_transform"],
                {name: (mean, deviation) for name, (mean, deviation) in facts["scales"].items()},
                facts["dictionaries"],
                tuple(facts["missing_values"]),
                **label,
                negatives=None if negatives is None else tuple(negatives),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _LONGEST_SHOWN else cell[:_LONGEST_SHOWN] + "..."


def first_overflow(numbers: np.ndarray) -> int | None:
    """Returns the first row that is not finite."""
    wrong = ~np.isfinite(numbers)
    return int(wrong.argmax()) if wrong.any() else None


def overflow_text(value: Any, numeric_transform: str) -> str:
    """Says that a value is too large for a dataset as it was transformed, and what to do."""
    transformed, advice = {
        "none": ("", "choose --numeric_transform log or standardise, or scale the column"),
        "standardise": (
            ", standardised,",
            "most training rows are much closer together; choose --numeric_transform log, or drop "
            "the column or the row",
        ),
        "log": (", as a logarithm,", "drop the row"),
    }[numeric_transform]
    greatest = np.finfo(layout.NUMERICAL_DTYPE).max
    return (
        f"{value}{transformed} is beyond float16 (up to {greatest:.0f}), in which "
        f"numerical features are stored; {advice}"
    )

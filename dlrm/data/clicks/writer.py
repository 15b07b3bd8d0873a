"""Writes split-binary datasets from chunks of samples, each feature to a file of its own."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from dlrm.data.clicks import bags, layout
from dlrm.data.clicks.bags import Jagged
from dlrm.data.clicks.feature_spec import FeatureSpec


class SplitWriter:
    """Writes the files of one split, as a context manager.

    A file is open only while it is written to, since a process may have too few for every field.

    Args:
        spec: names, dtypes and files; `spec.path` is in the directory to write to.
    """

    def __init__(self, spec: FeatureSpec, split: str) -> None:
        self.num_rows = 0
        self._spec, self._split = spec, split
        self._label = spec.file(split, spec.label)
        self._numerical = spec.file(split, spec.numerical[0]) if spec.numerical else None
        self._lists = {
            name: [path for path in spec.list_files(split, name) if path is not None]
            for name in spec.lists
        }
        self._ids = {
            name: spec.file(split, name) for name in spec.categorical if name not in spec.lists
        }
        self._totals = dict.fromkeys(self._lists, 0)  # ids of each list field

    def __enter__(self) -> "SplitWriter":
        dense = [self._label] if self._numerical is None else [self._label, self._numerical]
        for path in (*dense, *self._ids.values(), *sum(self._lists.values(), [])):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, (_, _, starts, *_) in self._lists.items():
            _append(starts, np.array([self._totals[name]], bags.STARTS_DTYPE))

    def write(
        self, labels: np.ndarray, numerical: np.ndarray, categorical: Sequence[np.ndarray | Jagged]
    ) -> None:
        """Appends samples.

        Args:
            labels: `[rows]`, 0 or 1.
            numerical: `[rows, num_numerical]`, finite as float16.
            categorical: for each table, in channel order, ids `[rows]`, or bags of ids for a
                feature of `spec.lists`.

        Raises:
            ValueError: an id is not in its table, a bag is too long, a weight is not finite or a
                numerical overflows float16; the feature, the row of the split and the value are
                named.
        """
        for name, ids in zip(self._spec.categorical, categorical, strict=True):
            assert isinstance(ids, Jagged) == (name in self._lists), name
            if isinstance(ids, Jagged):
                self._write_bags(name, ids)
                continue
            self._check_ids(name, ids)
            _append(self._ids[name], np.ascontiguousarray(ids, self._spec.dtype(name)))
        if self._numerical is not None:
            _append(self._numerical, self._to_half(numerical))
        _append(self._label, np.ascontiguousarray(labels, layout.LABEL_DTYPE))
        self.num_rows += len(labels)

    def _write_bags(self, name: str, rows: Jagged) -> None:
        field = self._spec.lists[name]
        try:
            problem = bags.first_problem(rows, field, self._spec.feature_spec[name]["cardinality"])
        except ValueError as error:
            raise ValueError(f"feature {name} of {self._split}: {error}") from None
        if problem is not None:
            row, why = problem
            raise ValueError(f"feature {name}, row {self.num_rows + row} of {self._split}: {why}")
        _, starts = bags.starts_within(rows.lengths, self.num_rows, self._totals[name])
        columns = [
            np.ascontiguousarray(rows.values, self._spec.dtype(name)),
            np.ascontiguousarray(rows.lengths, field.lengths_dtype),
            starts,
        ]
        if rows.weights is not None:
            columns.append(np.ascontiguousarray(rows.weights, bags.WEIGHTS_DTYPE))
        for path, column in zip(self._lists[name], columns, strict=True):
            _append(path, column)
        self._totals[name] += len(rows.values)

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        size = self._spec.feature_spec[name]["cardinality"]
        if len(ids) and (ids.min() < 0 or ids.max() >= size):
            row = int(np.argmax((ids < 0) | (ids >= size)))
            raise ValueError(
                f"feature {name}, row {self.num_rows + row} of {self._split}: expected an id in "
                f"[0, {size}), got {ids[row]}"
            )

    def _to_half(self, numerical: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(numerical, layout.NUMERICAL_DTYPE)
        if not np.isfinite(half).all():
            row, column = np.argwhere(~np.isfinite(half))[0]
            raise ValueError(
                f"feature {self._spec.numerical[column]}, row {self.num_rows + row} of "
                f"{self._split}: expected a number that fits {layout.NUMERICAL_DTYPE}, got "
                f"{numerical[row, column]}"
            )
        return half


def _append(path: Path, rows: np.ndarray) -> None:
    with open(path, "ab") as file:
        file.write(rows.data)

"""Files of a dataset as tasks write them: rows in place, and the values of their lists."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import bags, layout
from dlrm.data.clicks.bags import Jagged, ListField, starts_within


class ListColumns(NamedTuple):
    """A list field in a split of a dataset.

    Attributes:
        values, lengths, starts: files, relative to the dataset.
        weights: another file; None if the values have none.
        dtypes: file -> dtype.
    """

    values: str
    lengths: str
    starts: str
    weights: str | None
    dtypes: dict[str, np.dtype]

    @classmethod
    def from_field(
        cls, folder: str, index: int, field: ListField, cardinality: int
    ) -> "ListColumns":
        """Returns the files of table `index` in a folder of the dataset."""
        names = [folder + name for name in bags.file_names(index, field.weighted)]
        dtypes = [layout.id_dtype(cardinality), field.lengths_dtype, bags.STARTS_DTYPE]
        dtypes += [bags.WEIGHTS_DTYPE] * field.weighted
        values, lengths, starts, *weights = names
        of_file = dict(zip(names, dtypes, strict=True))
        return cls(values, lengths, starts, weights[0] if weights else None, of_file)

    @property
    def payload(self) -> list[str]:
        """Returns the files with an entry for each value."""
        return [self.values, *([self.weights] if self.weights else [])]

    def columns(self, rows: Jagged) -> dict[str, np.ndarray]:
        """Returns file -> entries of rows, for all files except the starts."""
        found = {self.values: rows.values, self.lengths: rows.lengths}
        if self.weights is not None:
            assert rows.weights is not None
            found[self.weights] = rows.weights
        return found

    def create(self, dataset: str, rows: int, num_ids: int) -> None:
        """Creates all files except the lengths, at full size, and writes the end of the starts.

        Args:
            dataset: the directory.
            rows: rows of the split.
            num_ids: values of all rows.
        """
        starts = bags.num_starts(rows)
        for name in [*self.payload, self.starts]:
            count = starts if name == self.starts else num_ids
            with open(Path(dataset, name), "ab") as file:
                file.truncate(count * self.dtypes[name].itemsize)
        last = np.array([num_ids], bags.STARTS_DTYPE)
        write_rows(dataset, starts - 1, {self.starts: [last]})

    def write(
        self,
        dataset: str,
        first_row: int,
        first_value: int,
        lengths: np.ndarray,
        payload: dict[str, list[np.ndarray]],
    ) -> int:
        """Writes consecutive rows to all files except the lengths.

        Args:
            dataset: the directory.
            first_row: the first row in the split.
            first_value: the index of its first value in the split.
            lengths: lengths of all these rows.
            payload: file -> values, in parts.

        Returns:
            The index after the last value.
        """
        entry, starts = starts_within(lengths, first_row, first_value)
        write_rows(dataset, first_value, {name: payload[name] for name in self.payload})
        write_rows(dataset, entry, {self.starts: [starts]})
        return first_value + int(lengths.sum(dtype=np.int64))


def write_rows(dataset: str, first_row: int, columns: dict[str, list[np.ndarray]]) -> None:
    """Writes rows, given by file in `columns`, into a dataset's files, from `first_row` on."""
    for name, parts in columns.items():
        width = parts[0].dtype.itemsize * int(np.prod(parts[0].shape[1:]))
        path = Path(dataset, name)
        try:
            with open(path, "r+b", buffering=0) as file:
                file.seek(first_row * width)
                for part in filter(np.size, parts):
                    _write_all(file, np.ascontiguousarray(part).data.cast("B"))
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]

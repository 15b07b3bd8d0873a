"""Columns of CSV files, read once, parsed, and each kept in a temporary file."""

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dlrm.data.sources.csv_cells import Parser
from dlrm.data.sources.csv_rows import check_names, read_csv
from dlrm.data.sources.row_error import RowError
from dlrm.data.sources.text_format import TextFormat
from dlrm.files import errors_named


class Columns:
    """Parsed columns of a split, each in a file of its own.

    Args:
        directory: directory for these files; it must not exist.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.num_rows = 0
        self._directory = directory
        self._parts: list[tuple[str, list[int], list[Path]]] = []  # lines, first rows, their files
        self._stored: dict[str, tuple[Path, np.dtype]] = {}
        self._part_of: dict[str, int] = {}

    def append_part(
        self, files: Sequence[Path], text: TextFormat, parsers: Mapping[str, Parser]
    ) -> None:
        """Parses the columns that `parsers` name; a later part must have as many rows.

        Raises:
            ValueError: a column or a cell is wrong; the message has file, line and column.
        """
        lines_name, first_rows, num_rows = f"lines of part {len(self._parts)}", [], 0
        for file in files:
            first_rows.append(num_rows)
            for names, lines, columns in read_csv(file, text, wanted=parsers):
                check_names(file, names, text, parsers)
                for name, parse in parsers.items():
                    column = columns[names.index(name)]
                    assert column is not None, "which is wanted"
                    cells = [cell.strip() for cell in column.to_pylist()]
                    try:
                        self._append(name, parse(cells))
                    except RowError as error:
                        error.column, error.where = name, f"{file}, line {lines[error.row]}"
                        raise
                self._append(lines_name, lines)
                num_rows += len(lines)
        if self._parts and num_rows != self.num_rows:
            raise ValueError(
                f"{files[0]}: expected {self.num_rows} rows, as the files of the features before "
                f"it have, got {num_rows}"
            )
        self.num_rows = num_rows
        self._part_of |= dict.fromkeys(parsers, len(self._parts))
        self._parts.append((lines_name, first_rows, list(files)))

    def _append(self, name: str, values: np.ndarray) -> None:
        path, _ = self._stored.setdefault(
            name, (self._directory / f"{len(self._stored)}.bin", values.dtype)
        )
        with errors_named(path), open(path, "ab") as file:
            file.write(values.tobytes())  # `tofile` loses the last bytes on a full disk in silence

    def load(self, name: str) -> np.ndarray:
        """Returns the values of a column in all rows."""
        return np.fromfile(*self._stored[name]) if name in self._stored else np.empty(0)

    def where(self, name: str, row: int) -> str:
        """Returns the file and line of a row of a column."""
        lines, first_rows, files = self._parts[self._part_of[name]]
        file = files[bisect.bisect_right(first_rows, row) - 1]
        return f"{file}, line {self.load(lines)[row]}, column {name}"

"""Files of Parquet."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.tables.kinds.columnar import Columnar, Group, Groups, rows_at_once
from dlrm.data.tables.kinds.types import is_list, is_text


class Parquet(Columnar):
    """Parquet, of which text is read as indices of values."""

    name, title, group, magic = "parquet", "Parquet", "row group", b"PAR1"
    suffixes = (".parquet", ".pq", ".parq")

    def groups_of(self, path: str | Path) -> Groups:
        """Opens a file; see `Columnar.groups_of`."""
        return _RowGroups(path)

    def problem(self, error: Exception) -> str:
        """Returns the problem of a row group."""
        if "lists to be of size" in str(error):
            return "null lists of a fixed size, which pyarrow reads in memory alone"
        return super().problem(error)


class _RowGroups(Groups):
    def __init__(self, path: str | Path) -> None:
        self._path, self._file = path, pq.ParquetFile(path, memory_map=True)
        self.schema, self.num_groups = self._file.schema_arrow, self._file.metadata.num_row_groups

    def group(self, number: int) -> Group:
        facts, places = self._file.metadata.row_group(number), []
        for i in range(facts.num_columns):
            chunk = facts.column(i)
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page:
                begin = min(begin, chunk.dictionary_page_offset)
            places += [begin, begin + chunk.total_compressed_size]
        return Group(facts.num_rows, min(places, default=0), max(places, default=0))

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        rows = self._file.metadata.row_group(number).num_rows
        size = rows_at_once(rows, self._values(number, columns))
        yield from self._with_indices.iter_batches(size, [number], columns, use_threads=False)

    @cached_property
    def _with_indices(self) -> pq.ParquetFile:
        """The file with columns of text as indices of values."""
        text = [path for field in self.schema for path in self._text_paths(field)]
        metadata = self._file.metadata  # of which nothing is read twice
        return pq.ParquetFile(self._path, metadata=metadata, read_dictionary=text, memory_map=True)

    def _text_paths(self, field: pa.Field) -> list[str]:
        """Returns Parquet's paths of a column's text, or of the text in its lists."""
        if is_text(field.type):
            return [field.name]
        if not is_list(field.type) or not is_text(field.type.value_type):
            return []
        columns = self._file.metadata.schema
        paths = (columns.column(i).path for i in range(self._file.metadata.num_columns))
        return [path for path in paths if path.startswith(f"{field.name}.")]

    def _values(self, number: int, columns: Sequence[str]) -> int:
        """Returns the number of values of columns in a row group, including those of lists."""
        facts, values = self._file.metadata.row_group(number), 0
        for i in range(facts.num_columns):
            path = facts.column(i).path_in_schema
            if path in columns or any(path.startswith(f"{name}.") for name in columns):
                values += facts.column(i).num_values
        return values

"""Files of NVIDIA's binary datasets: rows of words of four bytes, without a header."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data import layout
from dlrm.data.tables.formats.columnar import BATCH_VALUES, Columnar, Groups

_BLOCK_ROWS = 1 << 16


class _Blocks(Groups):
    """Blocks of consecutive rows."""

    def __init__(self, path: str | Path, num_numerical: int, num_tables: int) -> None:
        sizes = num_numerical, num_tables
        self._rows = layout.map_binary_rows(Path(path), *sizes, "--numerical_features")
        self._row_bytes = self._rows.strides[0]
        columns = {layout.LABEL: pa.int32()}
        columns |= {layout.numerical_name(i): pa.float32() for i in range(num_numerical)}
        columns |= {layout.categorical_name(i): pa.int32() for i in range(num_tables)}
        self.schema = pa.schema(list(columns.items()))
        self.num_groups = -(-len(self._rows) // _BLOCK_ROWS)

    def rows(self, number: int) -> int:
        return min(_BLOCK_ROWS, len(self._rows) - number * _BLOCK_ROWS)

    def where(self, number: int, row: int, done: int = 0) -> str:
        return f"{self.source}, row {number * _BLOCK_ROWS + done + row}"

    def byte_range(self, number: int) -> tuple[int, int]:
        begin = number * _BLOCK_ROWS
        return begin * self._row_bytes, (begin + self.rows(number)) * self._row_bytes

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        indices = list(map(self.schema.names.index, columns))
        first, size = number * _BLOCK_ROWS, max(BATCH_VALUES // len(columns), 1)
        end = first + self.rows(number)
        for begin in range(first, end, size):
            words = np.ascontiguousarray(self._rows[begin : min(begin + size, end)].T[indices])
            dtypes = (field.type.to_pandas_dtype() for field in schema)
            arrays = [pa.array(word.view(dtype)) for word, dtype in zip(words, dtypes, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class BinaryRows(Columnar):
    """A label, numbers, and ids, by the names that they have in NVIDIA's other datasets.

    Args:
        num_numerical, num_tables: features of a row, which the files do not state.
    """

    title, group, suffixes = "binary rows", "block", (".bin",)

    def __init__(self, num_numerical: int, num_tables: int) -> None:
        self.name = f"{self.title} {num_numerical} {num_tables}"
        self._features = num_numerical, num_tables

    def groups_of(self, path: str | Path) -> Groups:
        return _Blocks(path, *self._features)

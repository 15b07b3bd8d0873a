"""Turns raw rows in text into a model's inputs, by the transform fitted to the training data.

Offline scoring and the served model both use this file; the exporter copies it and the
modules that it imports into the model repository. Logs need only numpy, tables also pyarrow.
"""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from dlrm.data.sources.columns import TextColumn, cut_lines
from dlrm.data.sources.log_lines import LONGEST_LINE
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.transform import Transform
from dlrm.serving.rows.inputs import Inputs

_PADDING = 8  # bytes that a TextColumn has after its last field
_BLOCK_BYTES = 4 << 20


def labels_of_text(text: TextColumn) -> np.ndarray:
    """Returns the first field of rows, the label in a log, as float32.

    Raises:
        RowError: it is neither 0 nor 1.
    """
    starts, ends = text.starts[0], text.ends[0]
    labels = text.data[starts] - np.uint8(ord("0"))
    bad = (labels > 1) | (ends - starts != 1)
    if bad.any():
        row = int(bad.argmax())
        got = TextColumn(text.data, starts, ends).text(row)
        raise RowError(row, f"expected the label 0 or 1 first, got {got!r}")
    return labels.astype(np.float32)


def inputs_of_text(transform: Transform, text: TextColumn) -> Inputs:
    """Returns a model's inputs from the text of fields, of which the columns are `transform.names`.

    Args:
        text: the fields of rows; `starts` and `ends` are `[columns, rows]`.

    Raises:
        RowError: a field is unreadable; the message names row and column.
    """
    if transform.is_log:
        return Inputs(*transform.of_fields(text))
    from dlrm.serving.rows.tables import inputs_of_texts

    return inputs_of_texts(transform, text)


def text_of_tensors(tensors: Sequence[np.ndarray], num_columns: int) -> TextColumn:
    """Returns the fields of uint8 tensors `[rows, width]`: a line per row, padded with zeros.

    Rows are stored one after another at their own width, so only their own bytes cost time.

    Raises:
        RowError: a row, counted over all tensors, is too long or has too many fields.
    """
    padding = np.zeros(_PADDING, np.uint8)
    data = np.concatenate([*(tensor.reshape(-1) for tensor in tensors), padding])
    rows, widths = zip(*(tensor.shape for tensor in tensors), strict=True)
    width_of_row = np.repeat(widths, rows)
    starts = width_of_row.cumsum() - width_of_row
    lengths = np.concatenate([_lengths(tensor) for tensor in tensors])
    return _cut(data, starts, starts + lengths, num_columns)


def _lengths(rows: np.ndarray) -> np.ndarray:
    """Returns the length of each row without the zeros at its end."""
    if not rows.size:
        return np.zeros(len(rows), np.int64)
    strings = np.ascontiguousarray(rows).view(f"S{rows.shape[1]}")  # whose padding numpy ignores
    return np.char.str_len(strings)[:, 0]


def text_of_lines(lines: bytes, num_columns: int) -> TextColumn:
    """Returns the fields of whole lines; those absent at a line's end are missing.

    Raises:
        RowError: a line is empty, too long or has too many fields.
    """
    if not lines.endswith(b"\n"):
        lines += b"\n"
    data = np.frombuffer(lines + bytes(_PADDING), np.uint8)
    ends = np.flatnonzero(data[: len(lines)] == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    text = _cut(data, starts, ends, num_columns)
    empty = text.ends[-1] == text.starts[0]
    if empty.any():
        raise RowError(int(empty.argmax()), f"expected {num_columns} fields, got an empty line")
    return text


def _cut(data: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_columns: int) -> TextColumn:
    """Cuts lines `[start, end)` into fields at their tabs."""
    if (too_long := ends - starts > LONGEST_LINE).any():
        row = int(too_long.argmax())
        got = ends[row] - starts[row]
        raise RowError(row, f"expected up to {LONGEST_LINE} bytes, got {got}")
    text = cut_lines(data, starts, ends, num_columns)
    if (row := text.starts.shape[1]) < len(starts):
        fields = data[starts[row] : ends[row]].tobytes().count(b"\t") + 1
        raise RowError(row, f"expected up to {num_columns} fields, got {fields}")
    return text


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file, some megabytes at a time; a line that is too long is cut."""
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield whole + newline
        if len(rest) > LONGEST_LINE:
            break
    if rest:
        yield rest

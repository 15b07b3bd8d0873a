"""Text of rows, from lines, fields or tensors, and what is refused."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm.data.csv_transform import CsvTransform
from dlrm.data.transform import Transform
from dlrm.serving import rows
from dlrm.serving.rows import Inputs, RowError, RowTransform, check_inputs

COLUMNS = 4
FIELDS = st.lists(st.text("ab1-\xe9", max_size=5), min_size=1, max_size=COLUMNS)


def fields_of(text):
    return [
        [field.decode() for field in row]
        for row in zip(*(cells(text, column) for column in range(COLUMNS)), strict=True)
    ]


def cells(text, column):
    whole = text.data.tobytes()
    ends = zip(text.starts[column], text.ends[column], strict=True)
    return [whole[start:end] for start, end in ends]


def complete(row):
    return row + [""] * (COLUMNS - len(row))


@given(st.lists(FIELDS.filter(any), max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_lines_are_cut_at_tabs(lines, newline, ends_with_newline):
    text = newline.join("\t".join(row) for row in lines) + newline * ends_with_newline
    if lines:
        assert fields_of(rows.text_of_lines(text.encode(), COLUMNS)) == [*map(complete, lines)]


@given(st.lists(FIELDS, min_size=1, max_size=6))
def test_a_tensor_is_lines_padded_with_zeros(lines):
    padded = np.array(["\t".join(row).encode() for row in lines])
    tensor = padded.view(np.uint8).reshape(len(lines), -1)
    if padded.dtype.itemsize:
        assert fields_of(rows.text_of_tensors([tensor], COLUMNS)) == [*map(complete, lines)]


def test_a_tensor_may_have_no_rows():
    assert rows.text_of_tensors([np.empty((0, 3), np.uint8)], COLUMNS).rows == 0


def test_a_file_is_read_in_parts(monkeypatch):
    lines = [complete([f"{i}", "x" * (i % 7)]) for i in range(200)]
    file = io.BytesIO("\n".join("\t".join(row) for row in lines).encode())
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 50)
    parts = list(rows.read_lines(file, COLUMNS))
    assert len(parts) > 20
    assert [row for part in parts for row in fields_of(part)] == lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\n\nc\n", "row 1: expected 4 fields, got an empty line"),
        ("a\nb\n1\t2\t3\t4\t5\n", "row 2: expected up to 4 fields, got 5"),
    ],
)
def test_malformed_lines_are_named(text, message):
    with pytest.raises(RowError, match=message):
        rows.text_of_lines(text.encode(), COLUMNS)


def test_the_field_that_cannot_be_read_is_named():
    transform = RowTransform(Transform(2, [np.array([7], np.uint32)]))
    with pytest.raises(RowError, match="row 1, categorical 0: expected .* hexadecimal.* got 'xyz'"):
        transform(rows.text_of_lines(b"1\t2\t7\n1\t2\txyz\n", 3))


def test_csv_cells_are_named_by_column():
    transform = RowTransform(CsvTransform("standardise", {"age": (3.0, 2.0)}, {"job": ["x"]}, ()))
    numerical, ids = transform(rows.text_of_lines(b"5\tx\n3\ty\n", 2))
    assert (numerical.tolist(), ids.tolist()) == ([[1.0], [0.0]], [[1], [0]])
    with pytest.raises(RowError, match="row 1, age: expected a number, got 'old'"):
        transform(rows.text_of_lines(b"5\tx\nold\ty\n", 2))


GOOD = Inputs(np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int64))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (GOOD._replace(numerical=np.zeros((2, 4), np.float32)), r"expected \[rows, 3\].*\[2, 4\]"),
        (GOOD._replace(numerical=np.zeros((2, 3), np.int64)), "floating type, got .* of int64"),
        (GOOD._replace(numerical=np.full((2, 3), np.nan)), "row 0, numerical 0: .*finite.*nan"),
        (GOOD._replace(ids=np.zeros((3, 2), np.int64)), r"expected \[2, 2\].*got \[3, 2\]"),
        (GOOD._replace(ids=np.zeros((2, 2))), "integer type,.* got .* of float64"),
        (
            GOOD._replace(ids=np.array([[0, 0], [0, 9]])),
            r"row 1, table 1 \(city\): expected an id from 0 to 4, got 9",
        ),
        (GOOD._replace(ids=np.array([[-1, 0], [0, 0]])), "row 0, table 0 .* got -1"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs, message):
    check_inputs(GOOD, 3, [9, 5], ["user", "city"])
    with pytest.raises(ValueError, match=message):
        check_inputs(inputs, 3, [9, 5], ["user", "city"])

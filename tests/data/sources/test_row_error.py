"""The error of a row: its text as callers add what they know, and through processes."""

import pickle

import pytest

from dlrm.data.sources.csv_cells import label_parser, number_parser
from dlrm.data.sources.row_error import RowError


def test_the_text_names_what_is_known():
    error = RowError(3, "expected a number, got 'x'")
    assert str(error) == "row 3: expected a number, got 'x'"
    error.row += 40
    error.column = "age"
    assert str(error) == "row 43, column age: expected a number, got 'x'"
    assert error.reason == "column age: expected a number, got 'x'"
    error.where = "a.csv, line 45"
    assert str(error) == "a.csv, line 45, column age: expected a number, got 'x'"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_column_may_have_no_name():
    assert str(RowError(0, "expected a number, got 'x'", "")).startswith("row 0, column : expected")


@pytest.mark.parametrize(
    ("parse", "expected"),
    [
        (number_parser(()), "a number"),
        (label_parser(), r"a label of 0 or 1 \(label: .*\)"),
    ],
)
def test_parsers_of_cells_show_the_first_bad_one_shortened(parse, expected):
    with pytest.raises(RowError, match=rf"^row 1: expected {expected}, got 'x{{64}}\.\.\.'$"):
        parse(["1", "x" * 65, "y"])

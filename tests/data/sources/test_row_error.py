"""The error of a row: its text as callers add what they know, and through processes."""

import pickle

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

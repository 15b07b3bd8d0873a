"""The line about missing and unknown values."""

import numpy as np

from dlrm.serving.rows.shares import Shares

NAMES = (["age", "hours"], ["city", "job", "pet"])


def line_of(rows, ids):
    shares = Shares(*NAMES)
    for begin in range(0, len(rows), 3):  # over blocks
        part = slice(begin, begin + 3)
        missing = np.array([[not field for field in row] for row in rows[part]]).T
        shares.add(missing, np.array(ids)[part] == 0)
    return shares.line()


def test_the_fields_that_have_most_are_named_by_kind():
    rows = [["1", "2", "x", "y", "z"] for _ in range(8)]
    ids = np.ones((8, 3), np.int8)
    ids[:5, 0] = 0
    rows[0][2] = ""  # city: 1 missing, 4 unknown
    ids[2, 2] = 0  # pet: 1 unknown
    rows[3][0] = rows[4][0] = ""  # age: 2 missing
    assert line_of(rows, ids) == (
        "values: city is unknown in 50.0 % and missing in 12.5 % of the rows, age missing in "
        "25.0 %, pet unknown in 12.5 %; the other 2 fields have fewer"
    )


def test_nothing_is_said_where_nothing_is_missing():
    rows = [["1", "2", "x", "y", "z"]]
    assert line_of(rows, [[1, 2, 3]]) is None
    assert Shares(*NAMES).line() is None


def test_of_ids_alone_neither_is_known():
    shares = Shares(*NAMES)
    for _ in range(2):
        shares.add_ids(np.array([[0, 1, 1], [1, 0, 1], [0, 1, 1]]) == 0)
    assert shares.line() == (
        "values: city is without an id in 66.7 % of the rows, job without an id in 33.3 %; the "
        "other 1 field has fewer"
    )
    assert [of[1] for of in shares.by_field()] == [None] * len(shares.by_field())


def test_a_small_share_is_not_shown_as_none():
    shares = Shares(["age"], ["city"])
    ids = np.ones((10_000, 1), np.int32)
    ids[77] = 0
    shares.add_ids(ids == 0)
    assert shares.line() == "values: city is without an id in less than 0.1 % of the rows"


def test_fields_without_a_known_value_are_named():
    shares = Shares(["age"], ["city", "job", "rare"], [True, True, False])
    missing = np.array([[False, False], [True, False], [False, False], [False, False]])
    shares.add(missing, np.array([[True, False, True], [True, True, True]]))
    assert shares.unseen_values_warning().startswith(
        "no value of city occurred in the training data"
    )
    shares.add(np.zeros((4, 1), bool), np.array([[False, False, True]]))
    assert shares.unseen_values_warning() is None
    assert Shares(["age"], []).unseen_values_warning() is None

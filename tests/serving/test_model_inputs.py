"""Rows of single ids and of lists are sliced, joined and checked alike."""

import numpy as np
import pytest

from dlrm.data.bags import Jagged
from dlrm.serving.rows.inputs import Inputs, check_inputs

SIZES, LONGEST = (9, 40, 7), {1: 5, 2: 3}
NAMES = ("age", "price"), ("user", "tags", "items")


def drawn(rows, seed=0):
    """Draws random rows as Python lists and as inputs."""
    random = np.random.default_rng(seed)
    lengths = np.stack(
        [np.ones(rows, int), random.integers(0, 6, rows), random.integers(0, 4, rows)]
    )
    ids = [[random.integers(0, SIZES[t], n).tolist() for n in lengths[t]] for t in range(3)]
    factors = [random.normal(size=n).round(2).tolist() for n in lengths[2]]
    numerical = random.normal(size=(rows, 2)).astype(np.float32)
    of_items = np.array([f for row in factors for f in row], np.float32)
    columns = [
        np.array([own[0] for own in ids[0]], np.int8),
        bags(ids[1]),
        bags(ids[2])._replace(weights=of_items),
    ]
    plain = [
        (
            numerical[row].tolist(),
            [ids[t][row] for t in range(3)],
            [[1.0], [1.0] * len(ids[1][row]), np.float32(factors[row]).tolist()],
        )
        for row in range(rows)
    ]
    return plain, Inputs.from_columns(numerical, columns)


def bags(lists):
    flat = np.array([one for own in lists for one in own], np.int16)
    return Jagged(flat, np.array(list(map(len, lists)), np.int8))


def listed(inputs):
    """Returns inputs' rows as Python lists."""
    place, rows = 0, []
    for numbers, lengths in zip(inputs.numerical.tolist(), inputs.lengths.tolist(), strict=True):
        ids, factors = [], []
        for length in lengths:
            ids.append(inputs.ids[place : place + length].tolist())
            factors.append(inputs.weights[place : place + length].tolist())
            place += length
        rows.append((numbers, ids, factors))
    assert place == len(inputs.ids) == len(inputs.weights)
    return rows


@pytest.mark.parametrize("rows", [0, 1, 57])
def test_columns_become_rows(rows):
    plain, inputs = drawn(rows)
    assert listed(inputs) == plain
    assert inputs.num_tables == 3
    check_inputs(inputs, NAMES, SIZES, LONGEST)


def test_parts_and_chosen_rows_are_those_rows():
    plain, inputs = drawn(57)
    assert listed(inputs.part(10, 31)) == plain[10:31]
    assert listed(inputs.part(50, 99)) == plain[50:]
    places = np.array([3, 3, 56, 0])
    assert listed(inputs.take(places)) == [plain[place] for place in places]
    mask = np.arange(57) % 3 == 0
    assert listed(inputs.take(mask)) == plain[::3]
    assert (
        listed(Inputs.joined([inputs.part(0, 5), inputs.part(5, 5), inputs.part(5, 57)])) == plain
    )
    for row in (0, 20, 56):
        found = [inputs.ids_of(row, table).tolist() for table in range(3)]
        assert found == plain[row][1]


def test_rows_without_a_known_id_are_counted_alike():
    plain, inputs = drawn(57)
    expected = [[not any(ids) for ids in of_tables] for _, of_tables, _ in plain]
    assert inputs.without_id().tolist() == expected
    single = Inputs(np.zeros((2, 1), np.float32), np.array([[0, 3], [1, 0]]))
    assert single.without_id().tolist() == [[True, False], [False, True]]
    assert single.ids_of(1, 0).tolist() == [1]


NUMBERS = np.zeros((2, 2), np.float32)
LENGTHS = np.array([[1, 2, 0], [1, 0, 3]], np.int32)
GOOD = Inputs(NUMBERS, np.array([8, 39, 0, 1, 2, 3, 4]), LENGTHS, np.ones(7, np.float32))


def lengths(*rows):
    return GOOD._replace(lengths=np.array(rows, np.int32))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lengths([1, 2, 0], [1, 6, 3]), r"row 1, column tags \(table 1\): .* 0 to 5, got 6"),
        (lengths([0, 2, 1], [1, 0, 3]), r"row 0, column user \(table 0\): .* length of 1, got 0"),
        (lengths([1, 2, 0], [1, 0, 2]), "lengths: expected a sum of 7, the number of ids, got 6"),
        (lengths([1, 2, 0]), r"lengths: expected \[2, 3\] of an integer type, got \[1, 3\]"),
        (
            GOOD._replace(ids=np.array([8, 39, 0, 1, 2, 3, -4])),
            r"row 1, column items \(table 2\): place 2 of the list: .* id from 0 to 6, got -4",
        ),
        (GOOD._replace(ids=LENGTHS), r"ids: expected \[6\] of an integer type, got \[2, 3\]"),
        (
            GOOD._replace(weights=np.float32([1, 1, np.nan, 1, 1, 1, 1])),
            r"row 0, column tags \(table 1\): place 1 of the list: .* finite weight, got nan",
        ),
        (GOOD._replace(numerical=NUMBERS[:, :1]), r"expected \[2, 2\] .*, got \[2, 1\]"),
        (GOOD._replace(weights=np.ones(6, np.float32)), r"weights: expected \[7\] .* got \[6\]"),
        (GOOD._replace(weights=np.ones(7, int)), r"weights: .* floating type, .* of int64"),
    ],
)
def test_lists_that_do_not_fit_are_named(inputs, message):
    check_inputs(GOOD, NAMES, SIZES, LONGEST)
    with pytest.raises(ValueError, match=message):
        check_inputs(inputs, NAMES, SIZES, LONGEST)


def test_where_nothing_is_known_of_lists_any_length_is_taken():
    long = Inputs(NUMBERS[:1], np.zeros(7, int), np.array([[0, 7, 0]]))
    check_inputs(long, NAMES, SIZES)
    check_inputs(long._replace(ids=np.full(7, 10**9)), NAMES, ())
    for wrong in ([[-1, 8, 0]], [[8, -1, 0]]):
        with pytest.raises(ValueError, match=r"\(table [01]\): .* of 0 to 7, got "):
            check_inputs(long._replace(lengths=np.array(wrong)), NAMES, SIZES)
    none = Inputs(NUMBERS[:1], np.zeros(0, int), np.array([[0, 0, 0]]))
    check_inputs(none, NAMES, SIZES)
    with pytest.raises(ValueError, match="expected a length of 0 to 0, got 1"):
        check_inputs(none._replace(lengths=np.array([[1, 0, 0]])), NAMES, SIZES)

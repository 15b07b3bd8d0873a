"""Placements cover every table exactly once."""

import pytest
from hypothesis import given, strategies as st

from dlrm.distributed.placement import Piece, Placement


@given(st.integers(1, 5), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_tables_are_whole_or_equally_divided(ranks, rows, data):
    divided = data.draw(st.sets(st.sampled_from(range(len(rows)))))
    whole = [table for table in range(len(rows)) if table not in divided]
    placement = Placement.of_tables(rows, 4, [whole, *[[]] * (ranks - 1)], divided)
    for table, expected in enumerate(rows):
        pieces = [piece for piece in placement.pieces if piece.table == table]
        assert sum(piece.num_rows for piece in pieces) == expected
        if table in divided:
            counts = [piece.num_rows for piece in pieces]
            assert max(counts) - min(counts) <= 1 or expected < ranks
    with pytest.raises(ValueError, match="are in no piece|expected one piece or more"):
        Placement(tuple(rows), 4, ranks, placement.pieces[1:])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, (0, 10))], "expected a rank from 0 to 1"),
        ([(0, (0, 12))], "begin < end <= 10"),
        ([(0, (0, 4))], r"table 0: rows \[4, 10\] of columns \[0, 8\] are in no piece"),
        ([(0, (0, 10)), (1, (6, 9))], r"table 0: rows \[6, 9\] .* are in 2 pieces"),
        ([(0, (0, 4)), (0, (4, 10))], "table 0: rank 0 has 2 pieces: expected one"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(pieces, message):
    shift = 2 if "a rank from" in message else 0
    made = [Piece(0, rows, (0, 8), rank + shift, (10, 8)) for rank, rows in pieces]
    with pytest.raises(ValueError, match=message):
        Placement((10,), 8, 2, tuple(made))

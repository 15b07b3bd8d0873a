"""Placements cover every row of every table exactly once."""

from hypothesis import given, strategies as st

from dlrm.distributed.placement import Placement


@given(st.integers(2, 5), st.lists(st.integers(5, 30), min_size=1, max_size=4), st.data())
def test_tables_are_whole_or_equally_split(ranks, rows, data):
    split = data.draw(st.sets(st.sampled_from(range(len(rows)))))
    whole = [table for table in range(len(rows)) if table not in split]
    placement = Placement.of_tables(rows, 4, [whole, *[[]] * (ranks - 1)], split)
    assert placement.is_whole == (not split)
    assert placement.tables_by_rank() == [[*range(len(rows))], *[sorted(split)] * (ranks - 1)]
    for table, expected in enumerate(rows):
        pieces = [piece for piece in placement.pieces if piece.table == table]
        edges = [piece.rows for piece in pieces]
        assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == expected
        assert [piece.rank for piece in pieces] == ([*range(ranks)] if table in split else [0])
        counts = [piece.num_rows for piece in pieces]
        assert 0 < max(counts) - min(counts) + 1 <= 2
    fields = placement.fields_by_rank([0, *range(len(rows)), 0])
    assert fields[0] == [*range(len(rows) + 2)]
    assert [0 in own for own in fields] == [len(rows) + 1 in own for own in fields]

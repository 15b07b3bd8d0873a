"""Placements cover every table, and people can read and edit their YAML."""

from contextlib import suppress

import pytest
import yaml
from hypothesis import given, strategies as st

from dlrm.distributed.placement import Piece, Placement, placement_text, read_placement

ROWS, DIM, RANKS = (10, 3), 8, 2


def entry(*pieces, rows=10, **others):
    return {"name": "x", "rows": rows, "pieces": list(pieces)} | others


WHOLE = entry({"rank": 1}, rows=3)
GOOD = {"ranks": RANKS, "embedding_dim": DIM, "tables": [entry({"rank": 0}), WHOLE]}


def read(tmp_path, document, rows=ROWS, dim=DIM, ranks=RANKS):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(document))
    return read_placement(path, rows, dim, ranks)


def test_a_placement_is_read_as_it_was_written(tmp_path):
    def piece(rank, rows=(0, 10), columns=(0, 8)):
        return Piece(0, rows, columns, rank, (10, 8))

    pieces = (
        *(piece(None, (0, 2)), piece(0, (2, 10), (0, 4)), piece(1, (2, 10), (4, 8))),
        Piece(1, (0, 3), (0, 8), 1, (3, 8)),
    )
    placement = Placement(ROWS, DIM, RANKS, pieces)
    path = tmp_path / "plan.yaml"
    path.write_text(placement_text(placement, ["it's: a #name", "b"]))
    assert read_placement(path, ROWS, DIM, RANKS) == placement
    assert yaml.safe_load(path.read_text())["tables"][0] == {
        "name": "it's: a #name",
        "rows": 10,
        "pieces": [
            {"rank": "all", "rows": [0, 2]},
            {"rank": 0, "rows": [2, 10], "columns": [0, 4]},
            {"rank": 1, "rows": [2, 10], "columns": [4, 8]},
        ],
    }
    assert placement.tables_by_rank() == [[0], [0, 1]]


def test_a_damaged_or_edited_placement_is_named(tmp_path):
    pieces = (Piece(0, (0, 10), (0, 8), 0, (10, 8)), Piece(1, (0, 3), (0, 8), 1, (3, 8)))
    path = tmp_path / "plan.yaml"
    whole = placement_text(Placement(ROWS, DIM, RANKS, pieces), ["a", "b"])
    path.write_text(edited := whole.replace("rank: 1", "rank: 0"))
    with pytest.raises(ValueError, match=r"plan\.yaml: expected CRC-32 .* you have edited$"):
        read_placement(path, ROWS, DIM, RANKS)
    path.write_text("".join(edited.splitlines(keepends=True)[1:]))
    assert read_placement(path, ROWS, DIM, RANKS).tables_by_rank() == [[0, 1], []]
    for place in range(0, 8 * len(whole), 7):
        damaged = bytearray(whole.encode())
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with suppress(ValueError):
            found = read_placement(path, ROWS, DIM, RANKS)
            assert found.pieces == pieces  # the bit was in the comment


@given(st.integers(1, 5), st.data())
def test_any_division_in_rows_and_columns_is_whole(ranks, data):
    rows = data.draw(st.integers(ranks, 30))
    cuts = data.draw(
        st.sets(st.integers(1, rows - 1) if rows > 1 else st.nothing(), max_size=ranks - 1)
    )
    edges = [0, *sorted(cuts), rows]
    pieces = [
        Piece(0, pair, (0, 4), rank, (rows, 4))
        for rank, pair in enumerate(zip(edges, edges[1:], strict=False))
    ]
    placement = Placement((rows,), 4, ranks, tuple(pieces))
    assert sum(piece.num_rows for piece in placement.pieces) == rows
    if len(pieces) > 1:
        with pytest.raises(ValueError, match="are in no piece"):
            Placement((rows,), 4, ranks, tuple(pieces[1:]))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**GOOD, "ranks": 3}, "ranks: expected the number of processes, 2, got 3"),
        ({**GOOD, "embedding_dim": 16}, "embedding_dim: expected --embedding_dim, 8, got 16"),
        ({**GOOD, "tables": [WHOLE]}, "tables: expected a list of 2, got 1"),
        ({**GOOD, "tables": 5}, "tables: expected a list of 2, got 5"),
        ({**GOOD, "shards": 1}, "expected only embedding_dim, ranks, tables, got 'shards'"),
        ({"ranks": 2, "tables": []}, "expected embedding_dim, which are missing"),
        ({**GOOD, "tables": [entry({"rank": 0}, rows=11), WHOLE]}, "table 0: rows: expected 10"),
        (
            {**GOOD, "tables": [entry({"rank": 0}, size=1), WHOLE]},
            "table 0: expected only embedding_dim, name",
        ),
        ({**GOOD, "tables": [entry({"rank": 2}), WHOLE]}, "expected a rank from 0 to 1, or all"),
        (
            {**GOOD, "tables": [entry({"rank": "any"}), WHOLE]},
            "expected a number or all, got 'any'",
        ),
        ({**GOOD, "tables": [entry({"rank": 0, "row": [0, 1]}), WHOLE]}, "got 'row'"),
        ({**GOOD, "tables": [entry({"rank": 0, "rows": [0]}), WHOLE]}, r"expected \[begin, end\]"),
        ({**GOOD, "tables": [entry({"rank": 0, "rows": [0, 12]}), WHOLE]}, "begin < end <= 10"),
        ({**GOOD, "tables": [entry(), WHOLE]}, "table 0: expected one piece or more, got none"),
        (
            {**GOOD, "tables": [entry({"rank": 0, "rows": [0, 4]}), WHOLE]},
            r"table 0: rows \[4, 10\] of columns \[0, 8\] are in no piece",
        ),
        (
            {**GOOD, "tables": [entry({"rank": 0}, {"rank": 1, "rows": [6, 9]}), WHOLE]},
            r"table 0: rows \[6, 9\] of columns \[0, 8\] are in 2 pieces",
        ),
        (
            {
                **GOOD,
                "tables": [entry({"rank": 0, "rows": [0, 4]}, {"rank": 0, "rows": [4, 10]}), WHOLE],
            },
            "table 0: rank 0 has 2 pieces: expected one",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_what_would_be_valid(tmp_path, document, message):
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path, document)
    assert str(raised.value).startswith(f"{tmp_path / 'plan.yaml'}: ")


def test_a_copy_on_the_only_rank_is_a_whole_table(tmp_path):
    document = {"ranks": 1, "embedding_dim": 8, "tables": [entry({"rank": "all"})]}
    assert read(tmp_path, document, rows=(10,), ranks=1).is_whole

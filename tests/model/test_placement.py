"""Tables are assigned to processes."""

import pytest

from dlrm.model.placement import place_tables

CRITEO = [  # rows of the Criteo Terabyte tables with a frequency limit of 15
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11),
    *(2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
]


@pytest.mark.parametrize(
    "expected",
    [
        [
            [0, 21, 10, 22, 11, 1, 4, 2, 23, 14, 3, 6, 13],
            [19, 9, 20, 7, 17, 15, 24, 8, 25, 18, 12, 5, 16],
        ],
        [
            *([21, 10, 22, 1, 4, 2, 23], [19, 3, 13, 7, 15, 24, 8]),
            *([0, 11, 14, 6, 17, 25, 18], [9, 20, 12, 5, 16]),
        ],
        [
            *([], [22, 11, 1, 4], [10, 2, 23, 14], [20, 3, 6, 13], [9, 7, 17, 15]),
            *([21, 24, 8, 25], [0, 18, 12, 5], [19, 16]),
        ],
    ],
    ids=lambda expected: f"{len(expected)} ranks",
)
def test_nvidias_placement_of_criteo(expected):
    assert place_tables(CRITEO, len(expected), "nvidia") == [sorted(own) for own in expected]


@pytest.mark.parametrize("placement", ["balanced", "nvidia"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 26, 40])
def test_every_table_has_one_place(placement, num_ranks):
    places = place_tables(CRITEO, num_ranks, placement)
    assert len(places) == num_ranks
    assert sorted(table for own in places for table in own) == list(range(26))
    assert all(own == sorted(own) for own in places)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_no_rank_has_more_than_its_share_of_lookups_and_rows_follow(num_ranks):
    places = place_tables(CRITEO, num_ranks)
    assert max(map(len, places)) <= -(-26 // num_ranks)
    rows = [sum(CRITEO[table] for table in own) for own in places]
    # No placement gives the fullest rank less than an equal share, or than the largest table.
    assert max(rows) <= 1.2 * max(sum(CRITEO) / num_ranks, *CRITEO)

import numpy as np
import pytest
import torch
from text_testing import Numbered, assert_same

from dlrm.distributed import World
from dlrm.language.loader import NO_TOKEN, TextLoader

LENGTHS = np.random.default_rng(0).integers(3, 49, 103)
LENGTH = 50
ALL = [  # shuffle, window
    (False, 0),
    (True, 0),
    (False, 3),
    (True, 3),  # 21 batches of 5 in 7 windows; the last batch is short
    (True, 4),  # the last window has only the short batch
    (True, 1000),
]


def loader(shuffle=False, window=0, **options):
    return TextLoader(Numbered(LENGTHS, LENGTH), 5, shuffle=shuffle, window=window, **options)


def indices(batches):
    return [batch.indices.tolist() for batch in batches]


@pytest.mark.parametrize(("shuffle", "window"), ALL)
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(shuffle, window):
    text = loader(shuffle, window)
    first, second = indices(text.batches(0)), indices(text.batches(1))
    assert (len(text), text.num_samples) == (21, 103)
    assert [len(batch) for batch in first] == [5] * 20 + [3]
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == list(range(103))
    assert (first != second) == (shuffle or window > 0)
    other = indices(loader(shuffle, window, seed=1).batches())
    assert (first != other) == (shuffle or window > 0)


@pytest.mark.parametrize(("shuffle", "window"), ALL)
def test_a_batch_depends_on_epoch_and_index_alone(shuffle, window):
    whole = list(loader(shuffle, window).batches(2))
    epoch = loader(shuffle, window).epoch(2)
    for index in (20, 3, 0, 3):
        assert_same(epoch.batch(index), whole[index])
    resumed = list(loader(shuffle, window).batches(2, start=17))
    assert len(resumed) == 4
    for one, other in zip(resumed, whole[17:], strict=True):
        assert_same(one, other)
    with pytest.raises(IndexError, match="batch 21: expected one of 0 to 20"):
        epoch.batch(21)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize(("shuffle", "window"), [(True, 0), (True, 4)])
def test_ranks_read_slices_of_the_same_global_batches(ranks, shuffle, window):
    options = {"shuffle": shuffle, "window": window, "cut": False}
    whole = list(loader(**options).batches(1))
    sliced = [loader(**options, world=World(r, ranks)).batches(1) for r in range(ranks)]
    for batch, *parts in zip(whole, *sliced, strict=True):
        for field in ("ids", "segments", "lengths", "indices", "labels", "masked_ids"):
            together = torch.cat([getattr(part, field) for part in parts])
            assert torch.equal(together, getattr(batch, field))
        sizes = [len(part.ids) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        masked = int((batch.masked_ids != NO_TOKEN).sum())
        totals = {(part.global_size, part.global_masked) for part in (batch, *parts)}
        assert totals == {(len(batch.ids), masked)}


def test_a_rank_that_gets_no_row_has_an_empty_batch():
    text = TextLoader(Numbered([4, 5], 16), 2, world=World(0, 3))
    (batch,) = text.batches()
    assert (len(batch.ids), batch.global_size, batch.global_masked) == (0, 2, 3)
    assert not batch.padded
    assert [len(part.ids) for part in batch.split(2)] == [0]


def test_rows_of_a_window_are_sorted_by_length_into_batches():
    text = loader(True, 4)
    unsorted = TextLoader(Numbered(LENGTHS, LENGTH), 5, shuffle=True)
    batches, mixed = indices(text.batches()), indices(unsorted.batches())
    for begin in range(0, 21, 4):
        window, same = batches[begin : begin + 4], sum(mixed[begin : begin + 4], [])
        assert sorted(sum(window, [])) == sorted(same)  # of the same rows
        spans = sorted((LENGTHS[rows].min(), LENGTHS[rows].max()) for rows in window)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    longest = [[LENGTHS[rows].max() for rows in batches[b : b + 4]] for b in range(0, 20, 4)]
    assert any(window != sorted(window) for window in longest), "batches are not mixed"
    assert any(LENGTHS[rows].tolist() != sorted(LENGTHS[rows]) for rows in batches)


def test_ranks_get_like_shares_of_a_batch_of_sorted_rows():
    lengths = np.arange(10, 410)
    totals = np.zeros(2)
    for rank in (0, 1):
        for batch in TextLoader(
            Numbered(lengths, 512), 100, window=2, world=World(rank, 2)
        ).batches():
            totals[rank] += batch.lengths.sum()
    assert totals.sum() == lengths.sum()
    assert abs(totals[0] / totals[1] - 1) < 0.05  # 1.2 if one rank got the shorter halves


def test_batches_are_cut_after_their_longest_row():
    text = TextLoader(Numbered([3, 8, 9, 16, 12, 3, 8, 8], 20), 2)
    widths = [batch.ids.shape[1] for batch in text.batches()]
    assert widths == [8, 16, 16, 8]  # multiples of 8
    assert [batch.padded for batch in text.batches()] == [True, True, True, False]
    assert [batch.masked_ids.shape[1] for batch in text.batches()] == [2] * 4
    (single,) = TextLoader(Numbered([3], 20), 2).batches()
    assert single.masked_ids.shape == single.masked_positions.shape == (1, 1)
    (full,) = TextLoader(Numbered([19, 20], 20), 2).batches()
    assert (full.ids.shape, full.segments.shape, full.padded) == ((2, 20), (2, 20), True)
    whole = list(TextLoader(Numbered([3, 8, 20, 20], 20), 2, cut=False).batches())
    assert [batch.ids.shape for batch in whole] == [(2, 20)] * 2
    assert [batch.padded for batch in whole] == [True, False]
    assert whole[0].masked_ids.shape == (2, 5)


def test_a_source_without_masked_tokens_has_none():
    (batch,) = TextLoader(Numbered([3, 4], 8, masked=False), 2).batches()
    assert batch.masked_ids is None
    assert batch.masked_positions is None
    assert batch.global_masked == 0


def test_a_batch_is_split_into_parts_that_add_up():
    batch = loader(True).epoch(0).batch(0)
    parts = batch.split(3)
    assert [len(part.ids) for part in parts] == [2, 2, 1]
    for field in ("lengths", "indices", "labels", "masked_ids"):
        together = torch.cat([getattr(part, field) for part in parts])
        assert torch.equal(together, getattr(batch, field))
    for part in parts:
        assert part.spans is None
        assert part.ids.sum() == ((part.indices + 1) * part.lengths).sum()
    assert {(p.global_size, p.global_masked) for p in parts} == {(5, batch.global_masked)}
    assert len(batch.split(9)) == 5


@pytest.mark.parametrize("window", [0, 4])
def test_micro_batches_are_cut_after_their_own_longest_row(window):
    source = Numbered(LENGTHS, LENGTH)
    for rank in (0, 1):
        options = {"shuffle": True, "window": window, "world": World(rank, 2)}
        batches = TextLoader(source, 24, parts=3, **options).batches()
        for batch, whole in zip(batches, TextLoader(source, 24, **options).batches(), strict=True):
            assert sorted(batch.indices.tolist()) == sorted(whole.indices.tolist())
            assert batch.global_masked == whole.global_masked
            parts = batch.split(3)
            assert sum((part.indices.tolist() for part in parts), []) == batch.indices.tolist()
            for part in parts:
                assert part.ids.shape == part.segments.shape
                assert part.ids.shape[1] == min(LENGTH, -(-int(part.lengths.max()) // 8) * 8)
                assert part.padded == (int(part.lengths.min()) < part.ids.shape[1])
            assert sum(part.ids.sum() for part in parts) == whole.ids.sum()
            widths = [part.ids.shape[1] for part in parts]
            assert widths == sorted(widths)
            assert widths[-1] == whole.ids.shape[1]
    full = TextLoader(Numbered([8, 16, 3, 16], 16), 4, parts=2).epoch(0).batch(0)
    assert [(part.indices.tolist(), part.padded) for part in full.split(2)] == [
        ([2, 0], True),
        ([1, 3], False),
    ]
    uncut = TextLoader(source, 24, parts=3, cut=False).epoch(0).batch(0)
    assert {part.ids.shape[1] for part in uncut.split(3)} == {LENGTH}
    assert uncut.indices.tolist() == list(range(24))


def test_drop_last_leaves_out_the_short_batch():
    for shuffle, window in ALL:
        text = loader(shuffle, window, drop_last=True)
        batches = indices(text.batches())
        assert [len(rows) for rows in batches] == [5] * 20
        left_out = set(range(103)).difference(*batches)
        unsorted = indices(loader(shuffle, drop_last=True).batches())
        assert left_out == set(range(103)).difference(*unsorted)  # not the longest
        assert len(left_out) == 3
        assert (len(text), text.num_samples) == (20, 100)


def test_impossible_sizes_are_named():
    source = Numbered([3, 4], 8)
    with pytest.raises(
        ValueError, match="--batch_size 3: expected at least one whole batch, got 2"
    ):
        TextLoader(source, 3, drop_last=True)
    with pytest.raises(ValueError, match="--batch_size: expected 1 or more, got 0"):
        TextLoader(source, 0)

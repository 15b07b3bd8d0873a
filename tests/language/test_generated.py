import numpy as np
import pytest
import torch
from text_testing import assert_same

from dlrm.language.generated import KINDS, GeneratedText
from dlrm.language.loader import NO_TOKEN, TextLoader


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", ["full", "random"])
def test_rows_are_valid_and_those_asked_for(kind, lengths):
    source = GeneratedText(kind, 40, length=24, vocab_size=50, lengths=lengths)
    batch = source.read(np.array([39, 0, 7, 0]))
    assert batch.ids.shape == batch.segments.shape == (4, 24)
    assert (batch.ids.dtype, batch.segments.dtype) == (torch.int32, torch.int8)
    assert batch.indices.tolist() == [39, 0, 7, 0]
    assert torch.equal(batch.ids[1], batch.ids[3])
    assert not torch.equal(batch.ids[0], batch.ids[1])
    inside = torch.arange(24) < batch.lengths[:, None]
    assert torch.equal(batch.ids > 0, inside)
    assert batch.ids.max() < 50
    assert (batch.segments.diff(dim=1) * inside[:, 1:] >= 0).all()
    assert batch.segments.sum(dim=1).min() > 0
    assert batch.lengths.tolist() == source.lengths[[39, 0, 7, 0]].tolist()
    assert (source.lengths == 24).all() == (lengths == "full")
    assert source.lengths.min() >= 8
    (whole,) = TextLoader(source, 40).batches()
    assert whole.padded == (lengths == "random")
    if kind == "pretrain":
        assert whole.labels.unique().tolist() == [0, 1]
        assert whole.global_masked == source.num_masked.sum() == (whole.masked_ids > 0).sum()
    elif kind == "squad":
        assert whole.spans.shape == (40, 2)
        assert (whole.spans[:, 0] <= whole.spans[:, 1]).all()
        assert (whole.spans >= 0).all()
        assert (whole.spans[:, 1] < whole.lengths).all()
        assert (whole.labels, source.num_masked) == (None, None)
    else:
        assert whole.labels.unique().tolist() == [0, 1]


def test_masked_positions_are_distinct_and_inside_of_their_row():
    source = GeneratedText("pretrain", 300, length=64, max_predictions=20, lengths="random")
    batch = source.read(np.arange(300))
    used = batch.masked_ids != NO_TOKEN
    assert used.sum(dim=1).tolist() == np.minimum(20, source.lengths // 2).tolist()
    for row in range(300):
        positions = batch.masked_positions[row][used[row]].tolist()
        assert positions == sorted(set(positions))
        assert 0 < positions[0] <= positions[-1] < source.lengths[row] - 1
        assert not batch.masked_positions[row][~used[row]].any()


def test_many_rows_are_copies_of_a_thousand():
    source = GeneratedText("mrpc", 1 << 21, length=8)
    batch = source.read(np.array([5, 1024 + 5, (1 << 21) - 1]))
    assert torch.equal(batch.ids[0], batch.ids[1])
    assert batch.indices.tolist() == [5, 1029, (1 << 21) - 1]
    batch.ids.zero_()
    assert source.read(np.array([5])).ids.all()


def test_rows_depend_on_the_seed_alone():
    rows = np.arange(7)
    one, same, other = (GeneratedText("squad", 7, length=16, seed=s).read(rows) for s in (3, 3, 4))
    assert_same(one, same)
    assert not torch.equal(one.ids, other.ids)


def test_impossible_values_are_named():
    for options, message in [
        ({"length": 7}, "--max_seq_length 7: expected 8 or more"),
        ({"num_samples": 0}, "--synthetic_dataset_num_entries 0: expected 1 or more"),
        ({"vocab_size": 1}, "--vocab_size 1: expected 2 or more"),
        ({"max_predictions": 0}, "--max_predictions_per_seq 0: expected 1 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            GeneratedText(**{"kind": "mrpc", "num_samples": 5, **options})

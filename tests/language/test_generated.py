import numpy as np
import pytest
import torch
from text_testing import assert_same

from dlrm.language.flags import TASKS
from dlrm.language.loader import NO_TOKEN, TextLoader
from dlrm.language.sources import GeneratedText


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_valid_and_those_asked_for(task):
    source = GeneratedText(task, 40, length=24, vocab_size=50)
    batch = source.read(np.array([39, 0, 7, 0]))
    assert batch.ids.shape == batch.segments.shape == (4, 24)
    assert (batch.ids.dtype, batch.segments.dtype) == (torch.int32, torch.int8)
    assert batch.indices.tolist() == [39, 0, 7, 0]
    assert torch.equal(batch.ids[1], batch.ids[3])
    assert not torch.equal(batch.ids[0], batch.ids[1])
    assert 0 < batch.ids.min() <= batch.ids.max() < 50
    assert (batch.segments.diff(dim=1) >= 0).all()
    assert batch.segments.sum(dim=1).min() > 0
    assert batch.lengths.tolist() == [24] * 4 == source.lengths[[39, 0, 7, 0]].tolist()
    (whole,) = TextLoader(source, 40).batches()
    assert not whole.padded
    if task == "squad":
        assert (whole.labels, source.num_masked) == (None, None)
        assert (whole.spans[:, 0] <= whole.spans[:, 1]).all()
        assert 0 <= whole.spans.min() <= whole.spans.max() < 24
    else:
        assert whole.labels.unique().tolist() == [0, 1]
    if task == "pretrain":
        used = whole.masked_ids != NO_TOKEN
        assert used.sum(dim=1).tolist() == source.num_masked.tolist() == [12] * 40
        assert whole.global_masked == used.sum()
        for row in range(40):
            positions = whole.masked_positions[row][used[row]].tolist()
            assert positions == sorted(set(positions))
            assert 0 < positions[0] <= positions[-1] < 23


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
            GeneratedText(**{"task": "mrpc", "num_samples": 5, **options})

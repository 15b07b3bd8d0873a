"""Random samples follow the rule of Meta's DLRM, computed here one draw at a time."""

import numpy as np
import pytest
import torch

from dlrm.data.clicks.batch import Shard, Sharded
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.distributed import World

HOTNESS = 38


def opened(**changes):
    settings = {
        "dataset_type": "synthetic_random",
        "batch_size": 4000,
        "test_batch_size": 3000,
        "num_numerical_features": 5,
        "synthetic_dataset_num_entries": 10_000,
        "synthetic_dataset_table_sizes": (3_000_000,),
        "synthetic_dataset_hotness": (HOTNESS,),
    }
    return open_datasets(DataConfig(**settings | changes))


def bags_of(batch):
    """Returns the ids of each bag in order."""
    return [bag.numpy() for bag in batch.categorical.split(batch.lengths.flatten().tolist())]


def rule(num_bags, most, rows, seed=0):
    """Yields bags by the published rule, one by one."""
    random = np.random.default_rng(seed)
    for _ in range(num_bags):
        drawn = int(np.round(max(1.0, random.random() * most)))
        yield np.unique(np.round(random.random(drawn) * (rows - 1)).astype(np.int64))


@pytest.mark.parametrize(("most", "rows"), [(HOTNESS, 3_000_000), (HOTNESS, 40), (3, 2), (1, 9)])
def test_bags_are_distributed_as_by_the_rule(most, rows):
    sizes = {"synthetic_dataset_table_sizes": (rows,), "synthetic_dataset_hotness": (most,)}
    found = bags_of(opened(**sizes).train.batch(0))
    expected = list(rule(4000, most, rows))
    for values in (len, np.mean):
        ours, theirs = np.array([*map(values, found)]), np.array([*map(values, expected)])
        deviation = np.hypot(ours.std(), theirs.std()) / np.sqrt(4000)
        assert abs(ours.mean() - theirs.mean()) <= 5 * deviation
    lengths = np.bincount([*map(len, found)], minlength=most + 1)
    wanted = np.bincount([*map(len, expected)], minlength=most + 1)
    assert len(lengths) == most + 1
    assert (np.abs(lengths - wanted) <= 6 * np.sqrt(lengths + wanted + 1)).all()


def test_a_bag_has_no_id_twice_and_shrinks_instead():
    table = {"synthetic_dataset_table_sizes": (40,)}
    for bag in bags_of(opened(**table).train.batch(1)):
        assert len(bag) == len(set(bag.tolist()))
    # 38 draws from 40 rows have 24.6 distinct ones on average.
    lengths = opened(**table).train.batch(1).lengths.numpy()
    assert lengths.max() < HOTNESS
    assert lengths.mean() < 15


def test_the_ends_of_a_table_are_drawn_half_as_often():
    ids = opened(synthetic_dataset_table_sizes=(5,), synthetic_dataset_hotness=(1,)).train.batch(0)
    counts = torch.bincount(ids.categorical, minlength=5)
    # round(U * 4) over 4000 draws: 500 and 1000 expected; five deviations.
    assert (counts - torch.tensor([500, 1000, 1000, 1000, 500])).abs().max() < 150


def test_numericals_and_targets_are_uniform_fractions():
    batch = opened().train.batch(0)
    for values in (batch.numerical, batch.labels):
        counts, _ = np.histogram(values.numpy(), bins=10, range=(0, 1))
        expected = values.numel() / 10
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
        assert values.dtype == torch.float32
        assert 0 <= values.min() < values.max() < 1
        assert len(values.unique()) > 0.99 * values.numel()
    assert batch.numerical.shape == (4000, 5)
    columns = torch.cat([batch.numerical, batch.labels[:, None]], dim=1)
    correlations = torch.corrcoef(columns.T) - torch.eye(6)
    assert correlations.abs().max() < 0.08  # deviation 0.016 over 4000 samples


def test_a_batch_depends_on_seed_split_and_index_alone():
    datasets = opened()
    first = datasets.train.batch(0)
    datasets.train.batch(1)
    for again in (datasets.train.batch(0), opened(device="meta").train.batch(0)):
        assert all(map(torch.equal, again[:4], first[:4]))
    others = (datasets.train.batch(1), datasets.test.batch(0), opened(seed=7).train.batch(0))
    for other in others:
        assert not torch.equal(other.labels[:3000], first.labels[:3000])
        assert not torch.equal(other.categorical[:3000], first.categorical[:3000])
    assert [len(datasets.train.batch(i).labels) for i in range(3)] == [4000, 4000, 2000]


def test_processes_read_their_parts_of_the_same_batch():
    tables = {"synthetic_dataset_table_sizes": (90, 40), "synthetic_dataset_hotness": (7, 3)}
    whole, bags = opened(**tables).train.batch(0), {}
    for rank in range(2):
        world = World(rank, 2)
        part = Sharded(opened(**tables).train, Shard(world, (rank,))).batch(0)
        assert torch.equal(part.labels, whole.labels[world.part(4000)])
        assert torch.equal(part.numerical, whole.numerical[world.part(4000)])
        bags[rank] = bags_of(part)
    both = [bag for pair in zip(bags[0], bags[1], strict=True) for bag in pair]
    assert all(map(np.array_equal, both, bags_of(whole)))


def test_without_hotness_there_is_one_id_each():
    table = {"synthetic_dataset_table_sizes": (5, 9), "synthetic_dataset_hotness": None}
    dataset = opened(**table).train
    batch = dataset.batch(0)
    assert dataset.one_id_each
    assert batch.lengths is None
    assert batch.categorical.shape == (4000, 2)
    assert batch.categorical.amax(0).tolist() == [4, 8]


def test_other_ids_are_refused_and_clicks_are_known():
    with pytest.raises(ValueError, match="--synthetic_ids: expected .*got synthetic_random"):
        DataConfig(dataset_type="synthetic_random", synthetic_ids="power_law")
    kinds = {kind: DataConfig(dataset="x", dataset_type=kind) for kind in ("split", "binary")}
    assert all(config.has_clicks for config in kinds.values())
    assert not DataConfig(dataset_type="synthetic_random").has_clicks

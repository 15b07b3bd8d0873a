"""Synthetic samples are fresh, cover whole tables and are reproducible."""

import numpy as np
import pytest
import torch

from dlrm.data.clicks.batch import Shard, Sharded
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset, write_synthetic_dataset
from dlrm.data.layout import write_dataset_manifest
from dlrm.distributed import World


def make(
    sizes, device="cpu", *, split="train", seed=1, num_samples=10_000, batch_size=5000, **more
):
    spec = FeatureSpec.default("unused", 3, sizes)
    return SyntheticDataset(spec, split, num_samples, batch_size, seed=seed, device=device, **more)


def assert_equal(batch, other):
    for tensor, expected in zip(batch, other, strict=True):
        assert tensor is expected is None or torch.equal(tensor, expected)


def test_shapes_types_and_ranges(device):
    batch = make([5, 7], device, num_samples=999).batch(0)
    assert batch.numerical.shape == (999, 3)
    assert batch.categorical.shape == (999, 2)
    assert batch.labels.shape == (999,)
    assert (batch.numerical.dtype, batch.labels.dtype) == (torch.float32, torch.float32)
    assert batch.numerical.min() >= 0
    assert batch.numerical.max() < 1
    assert sorted(batch.labels.unique().tolist()) == [0, 1]
    assert {tensor.device.type for tensor in batch[:3]} == {device}
    assert batch.lengths is None


@pytest.mark.parametrize("ids", ["uniform", "power_law"])
@pytest.mark.parametrize("num_tables", [1, 2, 3, 26])  # random words are drawn in pairs
def test_every_id_is_in_its_table(device, ids, num_tables):
    sizes = [1, 2, 100, 2**31 - 2][:num_tables] + [17] * max(0, num_tables - 4)
    ids = make(sizes, device, ids=ids, batch_size=4999).batch(1).categorical
    assert ids.min() >= 0
    assert (ids < torch.tensor(sizes, device=device)).all()


def test_uniform_ids_cover_every_row_evenly(device):
    # 50,000 draws from 100 rows: 500 expected, deviation 22; six deviations.
    ids = make([100], device, num_samples=50_000, batch_size=50_000).batch(0).categorical
    counts = torch.bincount(ids[:, 0].long(), minlength=100)
    assert (counts - 500).abs().max() < 133


def test_uniform_ids_reach_both_ends_of_a_large_table(device):
    # float32 could not distinguish the rows. The chance of a miss is below 1e-17.
    size = 2**31 - 2
    ids = make([size], device, num_samples=50_000, batch_size=50_000).batch(0).categorical.long()
    assert ids.min() < size // 1000
    assert ids.max() > size - size // 1000
    assert len(ids.unique()) > 49_900
    assert len((ids & 1).unique()) == 2


def test_tables_are_drawn_independently(device):
    ids = make([100, 100], device).batch(0).categorical
    assert abs(torch.corrcoef(ids.double().T)[0, 1]) < 0.05  # deviation 0.014 over 5000 samples


def test_power_law_ids_follow_their_law(device):
    # The share of id k is the integral of x^-1.45 from k + 1 to k + 2 over that from 1 to size + 1.
    size, rows = 1000, 200_000
    ids = make([size], device, ids="power_law", num_samples=rows, batch_size=rows).batch(0)
    counts = np.bincount(ids.categorical[:, 0].cpu(), minlength=size)
    edges = np.arange(1, size + 2) ** -0.45
    expected = -np.diff(edges) / (edges[0] - edges[-1]) * rows
    deviations = (counts - expected) / np.sqrt(expected)
    assert len(counts) == size
    assert np.abs(deviations[:100]).max() < 5
    assert counts[0] > 50 * counts[100:110].mean()


@pytest.mark.parametrize("hotness", [None, [5]])
@pytest.mark.parametrize("ids", ["uniform", "power_law"])
def test_a_batch_depends_on_seed_split_and_index_alone(device, ids, hotness):
    more = {"ids": ids, "hotness": hotness, "num_samples": 2000, "batch_size": 1000}
    dataset = make([1000] * 4, device, **more)
    first, second = dataset.batch(0), dataset.batch(1)
    assert_equal(dataset.batch(0), first)
    assert_equal(make([1000] * 4, device, **more).batch(1), second)
    for other in (
        second,
        make([1000] * 4, device, seed=2, **more).batch(0),
        make([1000] * 4, device, split="test", **more).batch(0),
    ):
        count = min(len(other.categorical), len(first.categorical))
        pairs = [(other.categorical[:count], first.categorical[:count])]
        pairs += [(other.numerical, first.numerical), (other.labels, first.labels)]
        assert all((one != two).float().mean() > 0.4 for one, two in pairs)
        if hotness:
            assert (other.lengths != first.lengths).float().mean() > 0.6  # 4 of 5 by chance


@pytest.mark.parametrize("ids", ["uniform", "power_law"])
def test_bags_have_one_to_hotness_ids_each_in_its_table(device, ids):
    sizes, hotness = [1000, 3, 17], [1, 4, 6]
    batch = make(sizes, device, ids=ids, hotness=hotness, num_samples=9000).batch(1)
    lengths = batch.lengths.long().cpu()
    assert lengths.shape == (4000, 3)
    assert batch.lengths.device.type == device
    assert lengths.amin(0).tolist() == [1, 1, 1]
    assert lengths.amax(0).tolist() == hotness
    # 4000 draws from 6 lengths: 667 expected, deviation 24; six deviations.
    assert (torch.bincount(lengths[:, 2])[1:] - 667).abs().max() < 142
    assert batch.categorical.shape == (lengths.sum(),)
    table = torch.arange(3).repeat(4000).repeat_interleave(lengths.flatten())
    for t, size in enumerate(sizes):
        own = batch.categorical.cpu()[table == t]
        assert own.min() >= 0
        assert size > own.max() >= size - (1 if ids == "uniform" and size < 100 else size)
        assert ids != "uniform" or len(own.unique()) > 0.9 * size


@pytest.mark.parametrize("shard", [None, Shard(World(0, 2), (1,))])
@pytest.mark.parametrize("hotness", [None, [1], [3, 1]])
def test_a_dataset_tells_whether_its_batches_have_one_id_each(device, hotness, shard):
    dataset = make([9, 8], device, hotness=hotness)
    if shard is not None:
        dataset = Sharded(dataset, shard)
    assert dataset.one_id_each == (dataset.batch(0).lengths is None) == (hotness is None)
    assert dataset.batch(0).num_samples == 5000


def test_hotness_reaches_the_dataset_and_is_checked():
    config = {"dataset_type": "synthetic_gpu", "synthetic_dataset_table_sizes": [9] * 26}
    datasets = open_datasets(DataConfig(**config, synthetic_dataset_hotness=[3]))
    train, test = datasets.train, datasets.test
    assert train.batch(0).lengths.max() == test.batch(0).lengths.max() == 3
    with pytest.raises(
        ValueError, match="--synthetic_dataset_hotness: .*one for each of 26.*got 2"
    ):
        open_datasets(DataConfig(**config, synthetic_dataset_hotness=[3, 4]))
    with pytest.raises(ValueError, match="--synthetic_dataset_hotness 3,0: expected 1"):
        DataConfig(**config, synthetic_dataset_hotness=[3, 0])
    with pytest.raises(
        ValueError, match="--synthetic_dataset_hotness: .*synthetic_disk, got split"
    ):
        DataConfig(dataset="x", synthetic_dataset_hotness=[3])


def test_the_last_batch_is_short():
    dataset = make([5], num_samples=10_001)
    assert len(dataset) == 3
    assert len(dataset.batch(2).labels) == 1


def test_a_table_beyond_32_bits_is_refused():
    spec = FeatureSpec.default("unused", 1, [5])
    spec.feature_spec["cat_0.bin"] = {"dtype": "int64", "cardinality": 2**31 + 1}
    with pytest.raises(ValueError, match=r"feature cat_0\.bin: expected at most"):
        SyntheticDataset(spec, "train", 1, 1, seed=0)


def test_a_configuration_opens_both_splits_in_memory():
    config = DataConfig(
        dataset_type="synthetic_gpu",
        batch_size=40,
        test_batch_size=30,
        synthetic_dataset_num_entries=100,
        synthetic_dataset_table_sizes=[3, 4],
        num_numerical_features=2,
        dataset_subset=0.5,
    )
    datasets = open_datasets(config)
    train, test, validation = datasets.train, datasets.test, datasets.validation
    assert (len(train), train.num_samples, len(test), test.num_samples) == (2, 80, 4, 100)
    assert validation is None
    assert (train.table_sizes, train.num_numerical) == ([3, 4], 2)
    fewer = DataConfig(dataset_type="synthetic_gpu", synthetic_dataset_numerical_features=5)
    assert open_datasets(fewer).train.num_numerical == 5


def test_shapes_can_be_those_of_a_feature_specification(tmp_path):
    FeatureSpec.default(tmp_path, 7, [11, 12, 13]).save()
    config = DataConfig(
        dataset=str(tmp_path),
        dataset_type="synthetic_gpu",
        synthetic_dataset_use_feature_spec=True,
        synthetic_dataset_num_entries=10,
    )
    train = open_datasets(config).train
    assert (train.num_numerical, train.table_sizes) == (7, [11, 12, 13])


def disk_config(directory, **changes):
    arguments = {
        "batch_size": 1000,
        "test_batch_size": 1000,
        "synthetic_dataset_num_entries": 70_000,  # more than one written chunk
        "synthetic_dataset_table_sizes": [10, 1000, 100_000],
        "num_numerical_features": 2,
    } | changes
    return DataConfig(
        dataset_type="synthetic_disk", synthetic_dataset_dir=str(directory), **arguments
    )


def test_the_rows_on_disk_are_all_fresh(tmp_path):
    datasets = open_datasets(disk_config(tmp_path / "d"))
    train, test = datasets.train, datasets.test
    assert (train.num_samples, test.num_samples) == (70_000, 70_000)
    ids = torch.cat([d.batch(i).categorical for d in (train, test) for i in range(len(train))])
    # 140,000 draws of 10 * 1000 * 100,000 triples repeat 10 by chance, deviation 3.
    assert len(ids.unique(dim=0)) > 139_970
    assert len(ids[:, 1].unique()) == 1000
    numerical = torch.cat([train.batch(i).numerical for i in range(len(train))])
    assert 0.49 < numerical.float().mean() < 0.51


def test_the_same_dataset_is_written_once_and_another_replaces_it(tmp_path):
    directory = tmp_path / "d"

    def written():
        return (directory / "train" / "cat_1.bin").stat().st_mtime_ns

    open_datasets(disk_config(directory))
    first = written()
    open_datasets(disk_config(directory, batch_size=10))
    assert written() == first
    train = open_datasets(disk_config(directory, seed=1, synthetic_dataset_num_entries=50)).train
    assert written() != first
    assert train.num_samples == 50


def test_a_directory_with_something_else_is_kept(tmp_path):
    (tmp_path / "thesis").write_text("text")
    with pytest.raises(FileExistsError, match="was not written by this program"):
        open_datasets(disk_config(tmp_path))
    assert (tmp_path / "thesis").read_text() == "text"


def test_a_dataset_of_logs_is_not_replaced(tmp_path):
    write_dataset_manifest(tmp_path, {"train": 0, "test": 0}, [], {"frequency_limit": 15})
    with pytest.raises(FileExistsError, match="dataset of other origin"):
        open_datasets(disk_config(tmp_path))


def test_names_files_and_dtypes_of_a_specification_are_kept(tmp_path):
    spec = FeatureSpec.default(tmp_path / "shape", 2, [10, 20])
    spec.feature_spec["cat_0.bin"]["dtype"] = "int64"
    spec.source_spec["train"][0]["files"] = ["elsewhere/numbers"]
    written = write_synthetic_dataset(tmp_path / "data", spec, 100, seed=0)
    assert (tmp_path / "data" / "elsewhere" / "numbers").stat().st_size == 100 * 2 * 2
    assert (tmp_path / "data" / "train" / "cat_0.bin").stat().st_size == 100 * 8
    assert written == FeatureSpec.load(tmp_path / "data")
    assert written.source_spec == spec.source_spec


MULTI_HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@pytest.mark.parametrize("kind", ["synthetic_gpu", "synthetic_disk"])
def test_samples_of_mlperf_have_its_ids(tmp_path, kind):
    config = DataConfig(
        dataset_type=kind,
        synthetic_dataset="mlperf",
        synthetic_dataset_max_table_size=1000,
        synthetic_dataset_dir=str(tmp_path / "data"),
        synthetic_dataset_num_entries=50,
        batch_size=20,
    )
    train = open_datasets(config).train
    assert sum(MULTI_HOT) == 214
    assert train.table_sizes[:8] == [1000] * 5 + [3] + [1000] * 2
    assert (len(train.table_sizes), train.table_sizes[12], train.num_numerical) == (26, 10, 13)
    for index, count in enumerate([20, 20, 10]):
        batch = train.batch(index)
        assert batch.lengths.tolist() == [MULTI_HOT] * count
        bags = batch.categorical.split(batch.lengths.flatten().tolist())
        for bag, size in zip(bags, train.table_sizes * count, strict=True):
            assert 0 <= bag.min() <= bag.max() < size
    assert batch.categorical.unique().numel() > 500


def test_tables_of_mlperf_have_its_rows():
    config = DataConfig(dataset_type="synthetic_gpu", synthetic_dataset="mlperf")
    assert len(config.synthetic_sizes) == 26
    assert sum(config.synthetic_sizes) == 204_184_588
    assert [i for i, size in enumerate(config.synthetic_sizes) if size == 40_000_000] == [
        *(0, 9, 19, 20, 21)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synthetic_dataset": "movielens"}, "--synthetic_dataset movielens: expected one of mlpe"),
        (
            {"synthetic_dataset": "mlperf", "synthetic_dataset_hotness": [3]},
            "--synthetic_dataset mlperf contradicts --synthetic_dataset_hotness",
        ),
    ],
)
def test_impossible_published_shapes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"dataset_type": "synthetic_gpu", **options})


def test_lists_on_disk_are_those_made_in_memory(tmp_path):
    shape = {
        "synthetic_dataset_table_sizes": [9, 300, 40],
        "synthetic_dataset_hotness": [4, 1, 200],
        "synthetic_dataset_num_entries": 5000,
        "batch_size": 5000,
    }
    memory = open_datasets(DataConfig(dataset_type="synthetic_gpu", **shape)).train.batch(0)
    on_disk = disk_config(tmp_path / "data", **shape)
    disk = open_datasets(on_disk).train.batch(0)
    assert disk.lengths.tolist() == memory.lengths.tolist()
    assert disk.categorical.tolist() == memory.categorical.tolist()
    written = (tmp_path / "data" / "train" / "cat_2.values.bin").stat().st_mtime_ns
    open_datasets(on_disk)
    assert (tmp_path / "data" / "train" / "cat_2.values.bin").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="--synthetic_dataset_hotness: .*each of 3 tables, got 2"):
        open_datasets(disk_config(tmp_path / "x", **shape | {"synthetic_dataset_hotness": [3, 4]}))

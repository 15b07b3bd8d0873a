"""Batches of a dataset with lists hold the written rows, or damage is named."""

import shutil

import list_testing
import numpy as np
import pytest
import torch

from dlrm.data.clicks.batch import Batch, Shard
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.prefetch import prefetch
from dlrm.distributed import World

ROWS = 9001  # two full parts of 4,096 rows and a rest


@pytest.fixture(scope="module")
def rows():
    return {"train": list_testing.drawn(ROWS, 0), "test": list_testing.drawn(4096, 1)}


@pytest.fixture(scope="module")
def directory(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("lists") / "dataset"
    list_testing.write(path, rows, weights=True)
    return path


def taken(batch: Batch) -> list[list[list[tuple[int, float]]]]:
    """Returns the ids of each table and row with their weights."""
    ids = batch.categorical.tolist()
    factors = [1.0] * len(ids) if batch.id_weights is None else batch.id_weights.tolist()
    pairs = iter(zip(ids, factors, strict=True))
    bags = [[[next(pairs) for _ in range(n)] for n in row] for row in batch.lengths.tolist()]
    assert next(pairs, None) is None
    return [list(table) for table in zip(*bags, strict=True)] or []


def expected(rows, begin: int, end: int, tables=(0, 1, 2)):
    return [
        [
            list(zip(rows.ids[t][row], rows.factors[t][row], strict=True))
            for row in range(begin, end)
        ]
        for t in tables
    ]


@pytest.mark.parametrize("batch_size", [1000, 4096, 8192, 20_000])
def test_batches_in_any_order_are_the_rows_that_were_written(directory, rows, batch_size):
    config = DataConfig(str(directory), batch_size=batch_size, test_batch_size=batch_size)
    datasets = open_datasets(config)
    for split in ("train", "test"):
        data, own = getattr(datasets, split), rows[split]
        assert not data.one_id_each
        assert data.poolings == ("sum", None, "mean")
        for index in reversed(range(len(data))):
            begin = index * batch_size
            end = min(begin + batch_size, len(own.labels))
            batch = data.batch(index)
            assert taken(batch) == expected(own, begin, end)
            assert batch.categorical.dtype == batch.lengths.dtype == torch.int16
            assert batch.labels.tolist() == own.labels[begin:end].tolist()
            assert batch.weights.tolist() == own.weights[begin:end].tolist()
            assert batch.total_weight == own.weights[begin:end].sum(dtype=np.float64)


def test_weights_of_samples_are_left_out_where_they_are_not_wanted(directory):
    batch = open_datasets(DataConfig(str(directory), sample_weights=False)).train.batch(0)
    assert batch.weights is batch.total_weight is None


@pytest.mark.parametrize("tables", [(0, 1, 2), (2,), (0, 2), (1,), ()])
def test_a_rank_reads_its_tables_and_samples_as_they_are_cut_from_the_whole(directory, tables):
    spec, world = FeatureSpec.load(directory), World(1, 3)
    shard = Shard(world, tables)
    whole = SplitDataset(spec, "train", 100).batch(7)
    own = SplitDataset(spec, "train", 100, shard=shard).batch(7)
    cut = shard.take(whole)
    for name in ("numerical", "categorical", "labels", "lengths", "weights", "total_weight"):
        assert torch.equal(getattr(own, name), getattr(cut, name)), name
    assert taken(own) == taken(cut)
    assert own.num_samples == 100
    assert own.weights.tolist() == whole.weights[world.part(100)].tolist()
    assert own.total_weight == whole.total_weight


def test_micro_batches_hold_each_id_with_its_weight_once(directory, rows):
    data = SplitDataset(FeatureSpec.load(directory), "train", 100)
    parts = data.batch(3).split(7)
    together = [taken(part) for part in parts]
    joined = [sum((part[table] for part in together), []) for table in range(3)]
    assert joined == expected(rows["train"], 300, 400)
    assert torch.equal(torch.cat([p.weights for p in parts]), data.batch(3).weights)
    assert {p.total_weight.item() for p in parts} == {data.batch(3).total_weight.item()}


def test_batches_are_read_ahead(directory, rows):
    data = SplitDataset(FeatureSpec.load(directory), "train", 2000)
    for index, batch in zip([4, 0, 2], prefetch(data, [4, 0, 2]), strict=True):
        begin = index * 2000
        assert taken(batch) == expected(rows["train"], begin, min(begin + 2000, ROWS))


@pytest.mark.parametrize(
    ("said", "poolings"),
    [
        ({}, None),
        ({"tags": "mean", "history": "mean"}, ("mean",) * 3),
        ({"history": "mean"}, (None, None, "mean")),
    ],
)
def test_a_field_has_its_own_pooling(tmp_path, said, poolings):
    few = list_testing.drawn(3, 0)
    spec = list_testing.write(tmp_path, {"train": few, "test": few}, poolings=said)
    assert SplitDataset(spec, "train", 2).poolings == poolings


def put(path, dtype, place, value):
    values = np.fromfile(path, dtype)
    values[place] = value
    values.tofile(path)


DAMAGE = [  # file, dtype, index, value, message
    ("cat_0.lengths.bin", "<i2", 8500, -1, "row 8500: expected a length of 0 to 200, got -1"),
    ("cat_2.lengths.bin", "i1", 4097, 8, "row 4097: expected a length of 0 to 7, got 8"),
    ("cat_0.lengths.bin", "<i2", 5000, 150, r"expected the lengths before row 8192 to add up to"),
    ("cat_2.lengths.bin", "i1", 9000, 7, r"expected the lengths before row 9001 to add up to \d+"),
    ("cat_0.starts.bin", "<i8", 0, -5, r"expected the lengths before row 0 to add up to 0 to \d+"),
    ("cat_0.starts.bin", "<i8", 1, 7, "expected the lengths before row 4096 to add up to 7, as"),
    ("cat_2.weights.bin", "<f4", 6, np.nan, "row 0, place 6 of the list: expected a finite weight"),
    ("weight.bin", "<f4", 8999, -0.5, "row 8999: expected a weight of 0 or more, got -0.5"),
    ("weight.bin", "<f4", 5, np.nan, "row 5: expected a weight of 0 or more, got nan"),
]


@pytest.mark.parametrize(("file", "dtype", "place", "value", "message"), DAMAGE)
def test_damage_is_named(directory, tmp_path, file, dtype, place, value, message):
    copy = tmp_path / "dataset"
    shutil.copytree(directory, copy)
    put(copy / "train" / file, dtype, place, value)
    data = open_datasets(DataConfig(str(copy), batch_size=700, verify_data="never")).train

    def read():
        for index in range(len(data)):
            data.batch(index)

    with pytest.raises(ValueError, match=f"({file}|cat_0.lengths.bin): {message}"):
        read()


@pytest.mark.parametrize("file", ["values", "lengths", "starts", "weights", "weight"])
def test_bytes_are_compared_with_their_checksums_before_they_are_used(directory, tmp_path, file):
    copy = tmp_path / "dataset"
    shutil.copytree(directory, copy)
    path = copy / "train" / ("weight.bin" if file == "weight" else f"cat_2.{file}.bin")
    content = bytearray(path.read_bytes())
    content[3] ^= 0x40
    path.write_bytes(content)

    def read():
        datasets = open_datasets(DataConfig(str(copy), batch_size=700))
        datasets.train.batch(0)

    with pytest.raises(ValueError, match=f"{path.name}: .*(damaged|expected|CRC)"):
        read()


def test_a_split_whose_weights_are_all_0_is_refused(directory, tmp_path):
    copy = tmp_path / "dataset"
    shutil.copytree(directory, copy)
    (copy / "train" / "weight.bin").write_bytes(bytes(4 * 9000) + np.float32(1).tobytes())
    SplitDataset(FeatureSpec.load(copy), "train", 10)
    (copy / "train" / "weight.bin").write_bytes(bytes(4 * 9001))
    with pytest.raises(ValueError, match="train/weight.bin: expected a weight above 0, got 9,001"):
        SplitDataset(FeatureSpec.load(copy), "train", 10)


@pytest.mark.parametrize("file", ["values", "lengths", "starts", "weights"])
def test_a_file_of_a_list_of_another_size_is_refused(directory, tmp_path, file):
    copy = tmp_path / "dataset"
    shutil.copytree(directory, copy)
    with open(copy / "train" / f"cat_2.{file}.bin", "ab") as opened:
        opened.write(b"12345678")
    with pytest.raises(ValueError, match=rf"cat_2\.{file}\.bin: expected \d+ bytes .*, got \d+"):
        SplitDataset(FeatureSpec.load(copy), "train", 10)


def test_a_file_of_weights_of_another_size_is_refused(directory, tmp_path):
    copy = tmp_path / "dataset"
    shutil.copytree(directory, copy)
    with open(copy / "train" / "weight.bin", "ab") as file:
        file.write(b"1234")
    with pytest.raises(ValueError, match=r"weight.bin: expected 36004 bytes \(9001 rows, as the"):
        SplitDataset(FeatureSpec.load(copy), "train", 10)

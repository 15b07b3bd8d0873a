"""Datasets on disk are read back as written, in any order, and prefetched."""

import json
import threading
import time

import numpy as np
import pytest
import torch

from dlrm.data import layout
from dlrm.data.clicks.batch import Batch
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.prefetch import batch_order, prefetch

SIZES = [5, 300, 40_000]  # an int8, an int16 and an int32 table


def samples(rows, seed, num_numerical=4, sizes=SIZES):
    random = np.random.default_rng(seed)
    return {
        "numerical": random.normal(size=(rows, num_numerical)).astype(np.float16),
        "ids": [random.integers(0, size, rows) for size in sizes],
        "labels": random.integers(0, 2, rows).astype(bool),
    }


def write_split_binary(directory, spec, split, data):
    """Writes the files with no code of the package except their names."""
    (directory / split).mkdir(parents=True, exist_ok=True)
    data["labels"].tofile(directory / split / "label.bin")
    if data["numerical"].shape[1]:
        data["numerical"].tofile(directory / split / "numerical.bin")
    for i, ids in enumerate(data["ids"]):
        dtype = spec.feature_spec[f"cat_{i}.bin"]["dtype"]
        ids.astype(dtype).tofile(directory / split / f"cat_{i}.bin")


def write_dataset(directory, splits, num_numerical=4, sizes=SIZES):
    """Writes splits with the given numbers of rows; returns their content."""
    spec = FeatureSpec.default(directory, num_numerical, sizes, list(splits))
    written = {}
    for seed, (split, rows) in enumerate(splits.items()):
        written[split] = samples(rows, seed, num_numerical, sizes)
        write_split_binary(directory, spec, split, written[split])
    spec.save()
    return written


def assert_batches_are(dataset, data, batch_size, indices):
    for index in indices:
        rows = slice(index * batch_size, (index + 1) * batch_size)
        batch = dataset.batch(index)
        np.testing.assert_array_equal(batch.numerical.numpy(), data["numerical"][rows])
        np.testing.assert_array_equal(batch.categorical.numpy(), np.stack(data["ids"], 1)[rows])
        np.testing.assert_array_equal(batch.labels.numpy(), data["labels"][rows])


@pytest.mark.parametrize("dataset_type", ["split", "memmap", "parametric"])
def test_batches_in_any_order_are_the_rows_that_were_written(tmp_path, dataset_type):
    written = write_dataset(tmp_path, {"train": 107, "test": 31, "validation": 8})
    datasets = open_datasets(
        DataConfig(
            dataset=str(tmp_path), dataset_type=dataset_type, batch_size=10, test_batch_size=7
        )
    )
    assert_batches_are(datasets.train, written["train"], 10, [10, 0, 3, 3, 9, 1])
    assert_batches_are(datasets.test, written["test"], 7, [4, 0])
    assert_batches_are(datasets.validation, written["validation"], 7, [1, 0])
    assert [len(split) for split in datasets.named().values()] == [11, 5, 2]
    assert datasets.train.table_sizes == SIZES
    assert datasets.train.num_numerical == 4
    assert datasets.train.num_samples == 107
    assert datasets.train.batch_size == 10
    assert datasets.train.one_id_each
    assert datasets.train.categorical_names == ["cat_0.bin", "cat_1.bin", "cat_2.bin"]


def test_the_last_batch_is_short_and_not_padded(tmp_path):
    write_dataset(tmp_path, {"train": 21, "test": 3})
    datasets = open_datasets(DataConfig(dataset=str(tmp_path), batch_size=10, test_batch_size=10))
    assert [len(datasets.train.batch(i).labels) for i in range(3)] == [10, 10, 1]
    assert [tensor.shape[0] for tensor in datasets.test.batch(0)[:3]] == [3, 3, 3]
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"batch {index}: expected one of 0 to 2"):
            datasets.train.batch(index)


def test_tensors_are_as_narrow_as_their_widest_file(tmp_path):
    for sizes, expected in (([5, 6], torch.int8), ([5, 300], torch.int16), (SIZES, torch.int32)):
        directory = tmp_path / str(expected)
        write_dataset(directory, {"train": 3, "test": 3}, sizes=sizes)
        batch = open_datasets(DataConfig(dataset=str(directory))).train.batch(0)
        assert batch.categorical.dtype == expected
        assert batch.numerical.dtype == torch.float16
        assert batch.labels.dtype == torch.float32
        assert batch.categorical.is_contiguous()


def test_a_batch_may_be_written_to_without_changing_the_dataset(tmp_path):
    written = write_dataset(tmp_path, {"train": 4, "test": 1})
    dataset = open_datasets(DataConfig(dataset=str(tmp_path))).train
    for tensor in dataset.batch(0)[:3]:
        tensor.zero_()
    assert_batches_are(dataset, written["train"], 4, [0])


@pytest.mark.parametrize(("num_numerical", "sizes"), [(0, SIZES), (4, [])])
def test_a_dataset_may_lack_numericals_or_tables(tmp_path, num_numerical, sizes):
    write_dataset(tmp_path, {"train": 3, "test": 3}, num_numerical, sizes)
    batch = open_datasets(DataConfig(dataset=str(tmp_path))).train.batch(0)
    assert batch.numerical.shape == (3, num_numerical)
    assert batch.categorical.shape == (3, len(sizes))


def test_a_dataset_of_2020_is_read_with_the_widths_of_its_files(tmp_path):
    spec = FeatureSpec.default(tmp_path, 4, SIZES)
    spec.feature_spec["cat_0.bin"]["dtype"] = "int16"  # wider than its cardinality requires
    written = samples(20, 0)
    for split in ("train", "test"):
        write_split_binary(tmp_path, spec, split, written)
    (tmp_path / "model_size.json").write_text(json.dumps({"_c14": 4, "_c15": 299, "_c16": 39_999}))
    datasets = open_datasets(DataConfig(dataset=str(tmp_path), batch_size=6))
    assert_batches_are(datasets.train, written, 6, [3, 1])
    assert datasets.train.table_sizes == SIZES
    assert datasets.validation is None


@pytest.mark.parametrize(
    ("subset", "batches", "rows"), [(1.0, 11, 107), (0.5, 6, 60), (0.05, 1, 10), (0.95, 11, 107)]
)
def test_a_subset_is_the_first_batches_of_the_training_split_only(tmp_path, subset, batches, rows):
    written = write_dataset(tmp_path, {"train": 107, "test": 31})
    datasets = open_datasets(
        DataConfig(dataset=str(tmp_path), batch_size=10, test_batch_size=10, dataset_subset=subset)
    )
    assert (len(datasets.train), datasets.train.num_samples) == (batches, rows)
    assert len(datasets.test) == 4
    assert_batches_are(datasets.train, written["train"], 10, range(batches))


def rows_of(data, rows):
    ids = [column[rows] for column in data["ids"]]
    return {"numerical": data["numerical"][rows], "labels": data["labels"][rows], "ids": ids}


def assert_set_aside(config, written, kept):
    """Asserts that `train` has the first `kept` rows and `set_aside` all others."""
    datasets = open_datasets(config)
    train, aside = (rows_of(written["train"], rows) for rows in (slice(kept), slice(kept, None)))
    assert_batches_are(datasets.train, train, 10, range(len(datasets.train)))
    assert_batches_are(datasets.set_aside, aside, 4, range(len(datasets.set_aside)))
    others = len(written["train"]["labels"]) - kept
    expected = {"train": kept, "test": len(written["test"]["labels"]), "set_aside": others}
    assert datasets.rows() == expected


@pytest.mark.parametrize(("share", "kept"), [(0.1, 96), (0.25, 80), (0.995, 1)])
def test_the_last_training_rows_are_set_aside(tmp_path, share, kept):
    written = write_dataset(tmp_path, {"train": 107, "test": 31})
    config = DataConfig(str(tmp_path), batch_size=10, test_batch_size=4, set_aside=share)
    assert_set_aside(config, written, kept)


def test_the_last_rows_of_a_binary_dataset_are_set_aside(binary):
    directory, written = binary
    assert_set_aside(binary_config(directory, set_aside=0.3), written, 18)


# Binary datasets: 160 bytes per row in NVIDIA's, 4 * (1 + numericals + tables) in general.


def write_binary(path, data):
    with open(path, "wb") as file:
        for i in range(len(data["labels"])):
            file.write(np.int32(data["labels"][i]).tobytes())
            file.write(data["numerical"][i].astype(np.float32).tobytes())
            file.write(np.array([ids[i] for ids in data["ids"]], np.int32).tobytes())


@pytest.fixture
def binary(tmp_path):
    written = {name: samples(rows, rows) for name, rows in (("train", 25), ("test", 9))}
    for name, data in written.items():
        write_binary(tmp_path / f"{name}_data.bin", data)
    (tmp_path / "model_size.json").write_text(json.dumps({"_c14": 4, "_c15": 299, "_c16": 39_999}))
    return tmp_path, written


def binary_config(directory, **changes):
    arguments = {"batch_size": 10, "test_batch_size": 4, "num_numerical_features": 4} | changes
    return DataConfig(dataset=str(directory), dataset_type="binary", **arguments)


def test_a_binary_dataset_is_read_in_any_order(binary):
    directory, written = binary
    datasets = open_datasets(binary_config(directory))
    assert_batches_are(datasets.train, written["train"], 10, [2, 0, 1, 2])
    assert_batches_are(datasets.test, written["test"], 4, [2, 0])
    assert datasets.validation is None
    assert datasets.train.table_sizes == SIZES
    assert datasets.train.batch(0).numerical.dtype == torch.float32
    assert datasets.train.one_id_each
    assert datasets.train.batch(0).categorical.dtype == torch.int32


@pytest.mark.parametrize("name", ["val_data.bin", "validation_data.bin"])
def test_a_binary_dataset_may_have_a_validation_file(binary, name):
    directory, _ = binary
    written = samples(6, 1)
    write_binary(directory / name, written)
    assert_batches_are(open_datasets(binary_config(directory)).validation, written, 4, [1, 0])


def test_a_truncated_binary_file_is_named(binary):
    directory, _ = binary
    path = directory / "train_data.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"train_data\.bin: .*multiple of 32 bytes.* got 799"):
        open_datasets(binary_config(directory))


def test_a_wrong_number_of_numericals_is_suspected(binary):
    with pytest.raises(ValueError, match="--num_numerical_features is wrong"):
        open_datasets(binary_config(binary[0], num_numerical_features=3))


def test_a_missing_binary_file_is_named(binary):
    directory, _ = binary
    (directory / "test_data.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_data\.bin: missing"):
        open_datasets(binary_config(directory))
    (directory / "model_size.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"model_size\.json: missing"):
        open_datasets(binary_config(directory))


def test_a_label_other_than_0_and_1_is_named(binary):
    directory, _ = binary
    path = directory / "train_data.bin"
    content = bytearray(path.read_bytes())
    content[13 * 32] = 7
    path.write_bytes(content)
    dataset = open_datasets(binary_config(directory)).train
    dataset.batch(0)
    with pytest.raises(ValueError, match=r"train_data\.bin: row 13: .* 0 or 1, got 7"):
        dataset.batch(1)


# Errors on opening a directory.


def test_a_label_byte_other_than_0_and_1_is_named(tmp_path):
    write_dataset(tmp_path, {"train": 9, "test": 1})
    path = tmp_path / "train" / "label.bin"
    path.write_bytes(path.read_bytes()[:6] + b"\x02" + path.read_bytes()[7:])
    with pytest.raises(ValueError, match=r"train/label\.bin: row 6: .* got 2"):
        open_datasets(DataConfig(dataset=str(tmp_path), batch_size=4)).train.batch(1)


def test_a_truncated_or_missing_file_is_named(tmp_path):
    write_dataset(tmp_path, {"train": 9, "test": 5})
    path = tmp_path / "test" / "cat_2.bin"
    path.write_bytes(path.read_bytes()[:-3])
    config = DataConfig(dataset=str(tmp_path))
    with pytest.raises(ValueError, match=r"test/cat_2\.bin: expected 20 bytes .*got 17"):
        open_datasets(config)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"test/cat_2\.bin: missing"):
        open_datasets(config)


def test_a_dataset_with_a_manifest_must_agree_with_it(tmp_path):
    write_dataset(tmp_path, {"train": 9, "test": 5})
    layout.write_dataset_manifest(tmp_path, {"train": 9, "test": 4}, SIZES, {})
    with pytest.raises(ValueError, match=r"rows of the manifest, .*'test': 4.*'test': 5"):
        open_datasets(DataConfig(dataset=str(tmp_path)))
    layout.write_dataset_manifest(tmp_path, {"train": 9, "test": 5}, [5, 300, 7], {})
    with pytest.raises(ValueError, match="cardinalities of the manifest"):
        open_datasets(DataConfig(dataset=str(tmp_path)))
    layout.write_dataset_manifest(tmp_path, {"train": 9, "test": 5}, SIZES, {})
    open_datasets(DataConfig(dataset=str(tmp_path)))
    (tmp_path / "train" / "numerical.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"numerical\.bin: missing"):
        open_datasets(DataConfig(dataset=str(tmp_path)))


def test_a_directory_that_is_no_dataset_is_told_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such dataset directory"):
        open_datasets(DataConfig(dataset=str(tmp_path / "nowhere")))
    with pytest.raises(FileNotFoundError, match=r"expected feature_spec\.yaml .*model_size\.json"):
        open_datasets(DataConfig(dataset=str(tmp_path)))
    (tmp_path / "train_data.bin").touch()
    with pytest.raises(FileNotFoundError, match="--dataset_type binary reads that"):
        open_datasets(DataConfig(dataset=str(tmp_path)))
    with pytest.raises(NotADirectoryError, match=r"train_data\.bin: expected a dataset directory"):
        open_datasets(DataConfig(dataset=str(tmp_path / "train_data.bin")))


def test_a_dataset_without_training_rows_is_refused(tmp_path):
    write_dataset(tmp_path, {"train": 0, "test": 5})
    with pytest.raises(ValueError, match="the training split has no rows"):
        open_datasets(DataConfig(dataset=str(tmp_path)))


def test_the_feature_specification_may_have_another_name(tmp_path):
    written = write_dataset(tmp_path, {"train": 9, "test": 5})
    (tmp_path / "feature_spec.yaml").rename(tmp_path / "other.yaml")
    config = DataConfig(dataset=str(tmp_path), feature_spec="other.yaml", batch_size=9)
    assert_batches_are(open_datasets(config).train, written["train"], 9, [0])
    with pytest.raises(FileNotFoundError, match=r"expected feature_spec\.yaml"):
        open_datasets(DataConfig(dataset=str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_type": "parquet"}, "--dataset_type parquet: expected one of split, "),
        ({"dataset": None}, "--dataset: .* for --dataset_type split"),
        ({"batch_size": 0}, "--batch_size 0: expected 1 or more"),
        ({"test_batch_size": -1}, "--test_batch_size -1: expected 1"),
        ({"dataset_subset": 0.0}, "--dataset_subset 0.0: expected a number above 0, 1 at most"),
        ({"set_aside": -0.1}, "--set_aside -0.1: expected 0 or more, less than 1"),
        (
            {"set_aside": 0.1, "dataset": None, "dataset_type": "synthetic_gpu"},
            "--set_aside: expected --dataset_type split, .*or binary, got synthetic_gpu",
        ),
        ({"seed": -1}, "--seed -1: expected 0"),
        ({"num_numerical_features": -1}, "--num_numerical_features -1: expected 0"),
        ({"synthetic_ids": "zipf"}, "--synthetic_ids zipf: expected one of uniform, power_law"),
        ({"synthetic_dataset_table_sizes": [3, 2147483647]}, "--synthetic_dataset_table_sizes 3,2"),
        (
            {
                "dataset": None,
                "dataset_type": "synthetic_gpu",
                "synthetic_dataset_use_feature_spec": True,
            },
            "--dataset: .*--synthetic_dataset_use_feature_spec",
        ),
    ],
)
def test_an_impossible_configuration_is_refused_by_its_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"dataset": "somewhere", **arguments})


# The order of batches.


def test_without_shuffling_batches_keep_their_order():
    assert batch_order(5, epoch=3, seed=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_a_shuffled_epoch_has_every_batch_once_and_an_order_of_its_own():
    orders = [batch_order(1000, epoch, 7, shuffle=True).tolist() for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(1000))
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != list(range(1000))
    assert batch_order(1000, 0, 8, shuffle=True).tolist() != orders[0]
    assert batch_order(1000, 1, 7, shuffle=True).tolist() == orders[1]


def test_the_shuffled_order_never_changes_between_versions():
    # A run resumed under a newer numpy keeps its order.
    assert batch_order(8, epoch=1, seed=12345, shuffle=True).tolist() == [2, 6, 7, 0, 4, 1, 5, 3]


def test_shuffling_is_even():
    # First batches of 4000 epochs: 1000 expected of each, deviation 27; five deviations.
    first = [batch_order(4, epoch, 0, shuffle=True)[0] for epoch in range(4000)]
    assert np.abs(np.bincount(first, minlength=4) - 1000).max() < 137


# Prefetching.


class Slow:
    """Batches that hold their index; lower indices take longer, and some fail."""

    table_sizes, categorical_names, num_numerical = [1], ["a"], 0
    num_samples = batch_size = 1

    def __init__(self, seconds=0.0, fails=()):
        self.started = []
        self._seconds, self._fails = seconds, fails

    def __len__(self):
        return 100

    def batch(self, index):
        self.started.append(index)
        time.sleep(self._seconds / (1 + index))
        if index in self._fails:
            raise OSError(f"disk error at {index}")
        return Batch(torch.empty(1, 0), torch.tensor([[index]]), torch.zeros(1))


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dlrm-reader")]


@pytest.mark.parametrize(("depth", "at_once"), [(1, 1), (4, 1), (2, 3), (4, 50)])
def test_prefetched_batches_come_in_the_order_that_was_asked_for(depth, at_once, device):
    order = [3, 0, 1, 1, 9, 2, 0]
    batches = prefetch(Slow(0.01), iter(order), device, depth, at_once)
    assert [int(batch.categorical) for batch in batches] == order
    assert not reader_threads()


def test_prefetched_batches_are_those_of_the_dataset(tmp_path, device):
    written = write_dataset(tmp_path, {"train": 107, "test": 31})
    dataset = open_datasets(DataConfig(dataset=str(tmp_path), batch_size=10)).train
    order = [10, 2, 5, 0, 1, 3]
    for index, batch in zip(order, prefetch(dataset, order, device), strict=True):
        rows = slice(10 * index, 10 * index + 10)
        assert {tensor.device.type for tensor in batch[:3]} == {device}
        assert batch.lengths is None
        numerical = batch.numerical.cpu().numpy()
        np.testing.assert_array_equal(numerical, written["train"]["numerical"][rows])
        ids = np.stack(written["train"]["ids"], 1)[rows]
        np.testing.assert_array_equal(batch.categorical.cpu().numpy(), ids)


@pytest.mark.parametrize("at_once", [1, 2, 3, 50])
def test_a_reader_error_is_raised_at_its_batch_and_leaves_no_thread(at_once, device):
    batches = prefetch(Slow(fails={2}), range(100), device, at_once=at_once)
    assert [int(next(batches).categorical) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="disk error at 2"):
        next(batches)
    assert not reader_threads()


def test_closing_early_leaves_no_thread(device):
    batches = prefetch(Slow(0.01), range(100), device)
    next(batches)
    assert reader_threads()
    batches.close()
    assert not reader_threads()


def test_reading_goes_depth_batches_ahead_and_no_further():
    dataset = Slow()
    batches = prefetch(dataset, range(100), depth=3)
    next(batches)
    deadline = time.monotonic() + 60
    while len(dataset.started) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert sorted(dataset.started) == [0, 1, 2, 3]  # the batch in use and three ahead
    batches.close()


def test_a_depth_of_0_is_refused():
    with pytest.raises(ValueError, match="depth: expected 1 or more, got 0"):
        prefetch(Slow(), [0], depth=0)
    with pytest.raises(ValueError, match="at_once: expected 1 or more, got 0"):
        prefetch(Slow(), [0], at_once=0)


def test_lengths_arrive_where_they_are_wanted(device):
    given = Batch(torch.empty(1, 0), torch.zeros(2), torch.zeros(1), torch.tensor([[2]]))

    class One(Slow):
        def batch(self, index):
            return given

    (batch,) = prefetch(One(), [0], device)
    assert {tensor.device.type for tensor in batch[:4]} == {device}
    assert batch.lengths.tolist() == [[2]]


@pytest.mark.parametrize("dataset_type", ["split", "synthetic_gpu"])
def test_what_is_read_ahead_is_not_changed_by_what_is_computed(tmp_path, dataset_type, device):
    """The memory of a batch is reused only when nothing uses it any more."""
    if dataset_type == "split":
        write_dataset(tmp_path, {"train": 200, "test": 1})
    config = DataConfig(
        dataset=str(tmp_path), dataset_type=dataset_type, batch_size=10, device=device
    )
    dataset = open_datasets(config).train
    order = list(range(20)) * 2
    sums = torch.zeros(len(order), dtype=torch.float64, device=device)
    busy = torch.full((2048, 2048), 1 / 2048, device=device)
    for place, batch in enumerate(prefetch(dataset, order, device)):
        for _ in range(20 if device == "cuda" else 0):
            busy = busy @ busy  # so that the host drops the batch long before it is used
        sums[place] = batch.categorical.sum()
    expected = [dataset.batch(index).categorical.sum().item() for index in order]
    assert sums.tolist() == expected


@pytest.mark.parametrize("linked", ["train/label.bin", "test/cat_1.bin", "train"])
@pytest.mark.parametrize("has_manifest", [False, True])
def test_files_that_are_links_out_of_the_dataset_need_a_flag(tmp_path, linked, has_manifest):
    directory = tmp_path / "dataset"
    written = write_dataset(directory, {"train": 10, "test": 5})
    if has_manifest:
        layout.write_dataset_manifest(directory, {"train": 10, "test": 5}, SIZES, {})
    (directory / linked).rename(tmp_path / "elsewhere")
    (directory / linked).symlink_to(tmp_path / "elsewhere")
    config = {"dataset": str(directory), "batch_size": 10}
    with pytest.raises(ValueError, match=r"symbolic link to .*elsewhere.*; --allow_links"):
        open_datasets(DataConfig(**config))
    datasets = open_datasets(DataConfig(**config, allow_links=True))
    assert_batches_are(datasets.train, written["train"], 10, [0])

import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dlrm.language.loader import NO_TOKEN, TextLoader
from dlrm.language.pretraining import PretrainingDataset
from dlrm.language.rows import KIND
from dlrm.manifest import write_manifest

h5py = pytest.importorskip("h5py", reason="no h5py, which reads HDF5")

LENGTH, PREDICTIONS, VOCAB = 16, 4, 200
CLS, SEP, MASK = 1, 2, 3


class TextRows(NamedTuple):
    """Rows as arrays; `facts` are length, start of B, number of masked tokens, and the label."""

    ids: np.ndarray
    facts: np.ndarray
    masked_positions: np.ndarray
    masked_ids: np.ndarray


def made_up(count, length=LENGTH, predictions=PREDICTIONS, seed=0, vocab=VOCAB) -> TextRows:
    """Makes rows one by one, with lists."""
    random = np.random.default_rng(seed)
    ids, facts, positions, masked = [], [], [], []
    for _ in range(count):
        first, second = random.integers(1, (length - 3) // 2 + 1, 2)
        row = [CLS, *random.integers(10, vocab, first), SEP]
        begin = len(row)
        row += [*random.integers(10, vocab, second), SEP]
        tokens = [i for i, token in enumerate(row) if token >= 10]
        number = int(random.integers(1, min(predictions, len(tokens)) + 1))
        chosen = sorted(random.choice(tokens, number, replace=False))
        masked.append([row[i] for i in chosen] + [0] * (predictions - number))
        positions.append(chosen + [0] * (predictions - number))
        for i in chosen:
            row[i] = MASK
        facts.append([len(row), begin, number, int(random.integers(2))])
        ids.append(row + [0] * (length - len(row)))
    return TextRows(*map(np.array, (ids, facts, positions, masked)))


def write(directory, *files: TextRows, **facts):
    """Writes a file each, and a manifest with `facts`."""
    directory.mkdir()
    for number, rows in enumerate(files):
        write_nvidia(directory / f"part_{number:05}.hdf5", rows)
    write_manifest(directory, KIND, vocab_size=VOCAB, **facts)
    return directory


def write_nvidia(path, rows: TextRows, **changed) -> None:
    """Writes a file with NVIDIA's fields; `changed` replaces fields, and None omits one."""
    column = np.arange(rows.ids.shape[1])
    length, begin, _, label = rows.facts.T
    fields = {
        "input_ids": rows.ids.astype("i4"),
        "input_mask": (column < length[:, None]).astype("i1"),
        "segment_ids": ((column >= begin[:, None]) & (column < length[:, None])).astype("i1"),
        "masked_lm_positions": rows.masked_positions.astype("i4"),
        "masked_lm_ids": rows.masked_ids.astype("i4"),
        "next_sentence_labels": label.astype("i1"),
        **changed,
    }
    with h5py.File(path, "w") as file:
        for name, values in fields.items():
            if values is not None:
                kind = {"compression": "gzip"} if len(values) else {}
                file.create_dataset(name, data=values, **kind)


def assert_holds(batch, rows: TextRows, indices) -> None:
    """Compares a batch with rows one by one."""
    assert batch.indices.tolist() == list(indices)
    for place, index in enumerate(indices):
        length, begin, number, label = rows.facts[index]
        assert batch.ids[place].tolist() == rows.ids[index].tolist()
        assert batch.segments[place].tolist() == [
            int(begin <= i < length) for i in range(batch.ids.shape[1])
        ]
        assert (batch.lengths[place], batch.labels[place]) == (length, label)
        unused = [NO_TOKEN] * (batch.masked_ids.shape[1] - number)
        assert batch.masked_ids[place].tolist() == [*rows.masked_ids[index, :number], *unused]
        assert batch.masked_positions[place].tolist() == rows.masked_positions[index].tolist()


@pytest.fixture
def rows():
    return made_up(11)


@pytest.fixture
def shards(tmp_path, rows):
    parts = [TextRows(*(array[a:b] for array in rows)) for a, b in [(0, 4), (4, 4), (4, 11)]]
    return write(tmp_path / "shards", *parts)


def test_a_link_out_of_the_directory_needs_a_flag(shards, tmp_path):
    file = next(shards.glob("part_*"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="symbolic link to .*elsewhere; --allow_links"):
        PretrainingDataset(shards)
    assert PretrainingDataset(shards, allow_links=True).num_samples == 11


def test_rows_are_read_in_any_order_from_any_shard(shards, rows):
    dataset = PretrainingDataset(shards)
    assert (dataset.num_samples, dataset.length, dataset.max_predictions) == (11, 16, 4)
    assert dataset.lengths.tolist() == rows.facts[:, 0].tolist()
    assert dataset.num_masked.tolist() == rows.facts[:, 2].tolist()
    order = [10, 0, 4, 3, 10]
    batch = dataset.read(np.array(order))
    assert_holds(batch, rows, order)
    dtypes = {
        name: value.dtype for name, value in batch._asdict().items() if torch.is_tensor(value)
    }
    for field in ("ids", "lengths", "masked_positions", "masked_ids"):
        assert dtypes.pop(field) == torch.int32
    assert dtypes == {"segments": torch.int8, "indices": torch.int64, "labels": torch.int64}
    assert dataset.read(np.empty(0, np.int64)).ids.shape == (0, LENGTH)


def test_other_sizes_are_refused(shards):
    message = r"part_00000.hdf5: expected rows of --max_seq_length 24, got 16"
    with pytest.raises(ValueError, match=message):
        PretrainingDataset(shards, max_seq_length=24)
    with pytest.raises(ValueError, match="expected rows of --max_predictions_per_seq 6, got 4"):
        PretrainingDataset(shards, max_predictions_per_seq=6)
    write_nvidia(shards / "part_00003.hdf5", made_up(3, 32))
    with pytest.raises(
        ValueError, match="part_00003.hdf5: expected rows of --max_seq_length 16, got 32"
    ):
        PretrainingDataset(shards, verify_data="never")


def test_what_is_wrong_with_a_dataset_is_named(shards):
    with pytest.raises(FileNotFoundError, match="nothing: no such file or directory"):
        PretrainingDataset(shards / "nothing")
    file = shards / "part_00002.hdf5"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="part_00002.hdf5: expected CRC-32 .*: damaged"):
        PretrainingDataset(shards)
    file.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=f"part_00002.hdf5: expected {len(whole)} bytes, got"):
        PretrainingDataset(shards)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="part_00002.hdf5: missing"):
        PretrainingDataset(shards)


@pytest.mark.parametrize(("column", "value"), [(0, 0), (3, 2)])
def test_a_row_that_cannot_be_is_named(tmp_path, rows, column, value):
    rows.facts[7, column] = value
    with pytest.raises(ValueError, match=rf"part_00000.hdf5: row 7: expected .*\b{value}\b"):
        PretrainingDataset(write(tmp_path / "wrong", rows))


def test_a_token_outside_of_the_vocabulary_is_named(tmp_path, rows):
    parts = [
        TextRows(*(np.minimum(array[a:b], 198) for array in rows)) for a, b in [(0, 4), (4, 11)]
    ]
    message = r"part_00001.hdf5: row 2: expected .*_ids in \[0, 199\), got \[199, "
    for name in ("ids", "masked_ids"):
        wrong = parts[1]._replace(**{name: getattr(parts[1], name).copy()})
        getattr(wrong, name)[2, 0] = 199
        with pytest.raises(ValueError, match=message):
            PretrainingDataset(write(tmp_path / name, parts[0], wrong), vocab_size=199)


def test_a_smaller_vocabulary_makes_tokens_unknown(shards, rows):
    dataset = PretrainingDataset(shards, vocab_size=100, unknown_id=9)
    batch = dataset.read(np.arange(11))
    assert torch.equal(batch.ids, torch.tensor(np.where(rows.ids < 100, rows.ids, 9)).int())
    lost = 0
    for row in range(11):
        number = rows.facts[row, 2]
        pairs = zip(rows.masked_positions[row, :number], rows.masked_ids[row, :number], strict=True)
        known = [pair for pair in pairs if pair[1] < 100]
        lost += number - len(known)
        assert dataset.num_masked[row] == len(known)
        used = batch.masked_ids[row] != NO_TOKEN
        found = (batch.masked_positions[row][used], batch.masked_ids[row][used])
        assert list(zip(*(values.tolist() for values in found), strict=True)) == known
    (whole,) = TextLoader(dataset, 11).batches()
    assert (whole.masked_ids != NO_TOKEN).sum() == whole.global_masked == dataset.num_masked.sum()
    assert lost
    with pytest.raises(ValueError, match=r"unknown_id: expected a token in \[0, 100\), got 100"):
        PretrainingDataset(shards, vocab_size=100, unknown_id=100)


def test_hdf5_files_are_read(tmp_path, rows):
    write_nvidia(tmp_path / "part_0.hdf5", rows)
    dataset = PretrainingDataset(tmp_path / "part_0.hdf5")
    order = [3, 10, 0]
    assert_holds(dataset.read(np.array(order)), rows, order)
    large = made_up(5, vocab=100_000)
    write_nvidia(tmp_path / "part_1.h5", large)
    (tmp_path / "readme.txt").write_text("not one of them")
    both = PretrainingDataset(tmp_path)
    assert both.num_samples == 16
    assert both.read(np.array([12])).ids.tolist() == [large.ids[1].tolist()]


def test_what_is_wrong_with_an_hdf5_file_is_named(tmp_path, rows):
    path = tmp_path / "part.hdf5"
    write_nvidia(path, rows, input_mask=None)
    with pytest.raises(ValueError, match="part.hdf5: expected the fields .*, got no input_mask"):
        PretrainingDataset(path)
    write_nvidia(path, rows, masked_lm_ids=rows.masked_ids[:, 1:])
    with pytest.raises(
        ValueError, match=r"expected masked_lm_ids of shape \(11, 4\), got \(11, 3\)"
    ):
        PretrainingDataset(path)
    mask = np.ones(rows.ids.shape, "i1")
    mask[4, 2] = 0
    write_nvidia(path, rows, input_mask=mask)
    with pytest.raises(
        ValueError, match="part.hdf5: row 4: expected input_mask of ones and then zeros"
    ):
        PretrainingDataset(path)
    write_nvidia(path, rows, next_sentence_labels=np.full(11, -1))
    with pytest.raises(ValueError, match="part.hdf5: row 0: expected .* label"):
        PretrainingDataset(path)
    write_nvidia(path, rows)
    with pytest.raises(ValueError, match="part.hdf5: expected rows of --max_seq_length 128"):
        PretrainingDataset(path, max_seq_length=128)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="part.hdf5: not a whole HDF5 file"):
        PretrainingDataset(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"expected \*.hdf5 or \*.h5, found none"):
        PretrainingDataset(tmp_path)


def edited(values, row, places, changed):
    values = values.copy()
    values[row, places] = changed
    return values


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("masked_lm_positions", [-1, 0, 0, 0], r"positions in its row, got \[-1, 0, 0, 0\]"),
        ("masked_lm_positions", [16, 0, 0, 0], r"positions in its row, got \[16, 0, 0, 0\]"),
        (
            "masked_lm_positions",
            [1 << 32, 0, 0, 0],
            r"positions in its row, got \[4294967296, 0, 0, 0\]",
        ),
        ("masked_lm_ids", [-1] * 4, r"masked_lm_ids in .*got \[-1, 0, 0, 0\]"),
        ("masked_lm_ids", [1 << 32] * 4, r"masked_lm_ids in .*got \[4294967296, "),
        ("input_ids", [1 << 32], r"input_ids in .*got \[4294967296, "),
        ("segment_ids", [0, 2], r"segment_ids .*got \[0, 2"),
        ("segment_ids", [-1], r"segment_ids .*got \[-1"),
    ],
)
def test_what_would_be_lost_of_an_hdf5_row_is_named(tmp_path, rows, name, changed, message):
    length, begin, _, _ = rows.facts.T
    column = np.arange(LENGTH)
    rows.masked_positions[7, 0], rows.facts[7, 2] = 3, 1
    rows.masked_positions[7, 1:] = rows.masked_ids[7, 1:] = 0
    fields = {
        "input_ids": rows.ids,
        "segment_ids": ((column >= begin[:, None]) & (column < length[:, None])).astype(int),
        "masked_lm_positions": rows.masked_positions,
        "masked_lm_ids": rows.masked_ids,
    }
    path = tmp_path / "part.hdf5"
    write_nvidia(path, rows, **fields)
    PretrainingDataset(path)
    write_nvidia(path, rows, **{name: edited(fields[name], 7, slice(len(changed)), changed)})
    with pytest.raises(ValueError, match=f"part.hdf5: row 7: .*{message}"):
        PretrainingDataset(path)


@pytest.mark.parametrize("values", [b"text", 1.5])
def test_an_hdf5_field_of_no_integers_is_named(tmp_path, rows, values):
    path = tmp_path / "part.hdf5"
    write_nvidia(path, rows, input_ids=np.full(rows.ids.shape, values))
    with pytest.raises(
        ValueError, match="part.hdf5: input_ids: expected integers .*, got (.S4|float64)"
    ):
        PretrainingDataset(path)


def test_hdf5_without_h5py_says_what_to_install(tmp_path, rows, monkeypatch):
    write_nvidia(tmp_path / "part.hdf5", rows)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"h5py.*; pip install .*'h5py>=3.10' installs it"):
        PretrainingDataset(tmp_path)

import json
import struct
import sys

import numpy as np
import pytest
import torch
from text_testing import assert_same

from dlrm.language.data import layout as text_layout
from dlrm.language.data.layout import TextRows, write_shard, write_text_manifest
from dlrm.language.data.loader import NO_TOKEN, TextLoader
from dlrm.language.pretraining.dataset import open_pretraining
from dlrm.manifest import sealed_json

LENGTH, PREDICTIONS, VOCAB = 16, 4, 200
CLS, SEP, MASK = 1, 2, 3


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


def write(directory, *shards, vocab_size=VOCAB, length=LENGTH, predictions=PREDICTIONS):
    directory.mkdir()
    checksums = {}
    for number, rows in enumerate(shards):
        checksums |= write_shard(directory, number, [rows], vocab_size)
    sizes = {"max_seq_length": length, "max_predictions": predictions, "vocab_size": vocab_size}
    counts = [len(rows.ids) for rows in shards]
    write_text_manifest(directory, counts, checksums=checksums, **sizes)
    return directory


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
    tokens = next(shards.glob("tokens_*"))
    tokens.rename(tmp_path / "elsewhere")
    tokens.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part.hdf5").symlink_to(tmp_path / "elsewhere")
    for path in (shards, tmp_path / "folder"):
        with pytest.raises(ValueError, match="symbolic link to .*elsewhere; --allow_links"):
            open_pretraining(path)
    assert open_pretraining(shards, allow_links=True).num_samples == 11


def test_rows_are_read_in_any_order_from_any_shard(shards, rows):
    dataset = open_pretraining(shards)
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
    assert_same(
        open_pretraining([shards, shards]).read(np.array([11 + 4])), batch_at(dataset, 4, 15)
    )


def batch_at(dataset, row, index):
    return dataset.read(np.array([row]))._replace(indices=torch.tensor([index]))


def test_a_loader_reads_a_dataset(shards, rows):
    batches = list(TextLoader(open_pretraining(shards), 4, shuffle=True).batches())
    assert sorted(torch.cat([batch.indices for batch in batches]).tolist()) == list(range(11))
    assert sum(batch.global_masked for batch in batches) == rows.facts[:, 2].sum()


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    rows = made_up(5, vocab=100_000)
    assert rows.ids.max() >= 1 << 16
    dataset = open_pretraining(write(tmp_path / "large", rows, vocab_size=100_000))
    assert_holds(dataset.read(np.arange(5)), rows, range(5))
    assert (tmp_path / "large" / "tokens_00000.bin").stat().st_size == 5 * 24 * 4


def test_shorter_rows_are_padded_on_request(shards, rows):
    with pytest.raises(
        ValueError,
        match=r"tokens_00000.bin: expected sequence length 24 \(--max_seq_length\), got 16; "
        "--pad_to_seq_length pads it",
    ):
        open_pretraining(shards, max_seq_length=24)
    with pytest.raises(ValueError, match="expected sequence length 8 .*, got 16$"):
        open_pretraining(shards, max_seq_length=8, pad_to_seq_length=True)
    with pytest.raises(ValueError, match="expected masked tokens 6 .*, got 4"):
        open_pretraining(shards, max_predictions=6)
    padded = open_pretraining(shards, "auto", 24, 6, pad_to_seq_length=True)
    wide = TextRows(
        np.pad(rows.ids, ((0, 0), (0, 8))),
        rows.facts,
        np.pad(rows.masked_positions, ((0, 0), (0, 2))),
        np.pad(rows.masked_ids, ((0, 0), (0, 2))),
    )
    assert_holds(padded.read(np.arange(11)), wide, range(11))


def test_datasets_of_different_lengths_are_not_mixed(shards, tmp_path):
    longer = write(tmp_path / "longer", made_up(3, 32), length=32)
    with pytest.raises(ValueError, match="shards/tokens_00000.bin: expected sequence length 32"):
        open_pretraining([longer, shards])
    assert open_pretraining([longer, shards], pad_to_seq_length=True).num_samples == 14


def test_what_is_wrong_with_a_dataset_is_named(shards):
    with pytest.raises(FileNotFoundError, match="nothing: no such file or directory"):
        open_pretraining(shards / "nothing")
    with pytest.raises(ValueError, match="--data_format: expected one of auto, .*, got 'csv'"):
        open_pretraining(shards, "csv")
    with pytest.raises(ValueError, match="--data_dir: expected at least one path, got none"):
        open_pretraining([])
    tokens, facts = text_layout.shard_files(shards, 2)
    whole = tokens.read_bytes()
    tokens.write_bytes(b"\7" + whole[1:])
    open_pretraining(shards, verify_data="never")
    data = open_pretraining(shards)
    with pytest.raises(ValueError, match="tokens_00002.bin: expected CRC-32 .*: damaged"):
        data.read(np.arange(data.num_samples))
    tokens.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match="tokens_00002.bin: expected 336 bytes, got 334"):
        open_pretraining(shards)
    tokens.unlink()
    with pytest.raises(FileNotFoundError, match="tokens_00002.bin: missing"):
        open_pretraining(shards)
    (shards / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="not a complete pre-training dataset"):
        open_pretraining(shards)


def test_a_manifest_that_disagrees_with_the_files_is_refused(shards):
    path = shards / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["rows"] = [4, 1, 6]
    path.write_text(sealed_json(manifest))
    with pytest.raises(
        ValueError,
        match="rows_00001.bin: truncated or too long: expected 8 bytes for 1 rows, got 0",
    ):
        open_pretraining(shards)


MISSING = object()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", MISSING, "rows: expected the rows of each shard, got None"),
        ("rows", 4591, "rows: expected the rows of each shard, got 4591"),
        ("rows", [4591.0], r"rows: .*, got \[4591.0\]"),
        ("rows", ["4591"], r"rows: .*, got \['4591'\]"),
        ("rows", [4, -1, 7], r"rows: .*, got \[4, -1, 7\]"),
        ("rows", [], r"rows: .*, got \[\]"),
        (
            "rows",
            [4, 0, 7, 0],
            "rows: expected the shards .* files, differing: rows_00003.bin, tok",
        ),
        ("rows", [4, 0], "rows: expected the shards .* files, differing: rows_00002.bin, tok"),
        ("max_seq_length", MISSING, r"max_seq_length: expected a number in \[1, 65535\], got None"),
        ("max_seq_length", "64", "max_seq_length: .*, got '64'"),
        ("max_seq_length", 0, "max_seq_length: .*, got 0"),
        ("max_seq_length", 65536, "max_seq_length: .*, got 65536"),
        ("max_predictions", 4.0, "max_predictions: .*, got 4.0"),
        ("vocab_size", None, r"vocab_size: expected a number in \[1, 2147483647\], got None"),
        ("vocab_size", "30522", "vocab_size: .*, got '30522'"),
        ("vocab_size", True, "vocab_size: .*, got True"),
    ],
)
def test_a_wrong_entry_of_a_manifest_is_named(shards, name, value, message):
    path = shards / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop(name)
    if value is not MISSING:
        manifest[name] = value
    path.write_text(sealed_json(manifest))
    with pytest.raises(ValueError, match=f"manifest.json: {message}"):
        open_pretraining(shards)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (text_layout.LENGTH, 0),
        (text_layout.LENGTH, 17),
        (text_layout.SECOND, 17),
        (text_layout.NUM_MASKED, 5),
        (text_layout.LABEL, 2),
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path, rows, column, value):
    rows.facts[7, column] = value
    with pytest.raises(ValueError, match=rf"tokens_00000.bin: row 7: expected .*\b{value}\b"):
        open_pretraining(write(tmp_path / "wrong", rows))


def test_a_token_outside_of_the_vocabulary_is_named_when_it_is_read(tmp_path, rows):
    parts = [TextRows(*(array[a:b] for array in rows)) for a, b in [(0, 4), (4, 11)]]
    parts[1].ids[2, 1] = 199
    dataset = open_pretraining(write(tmp_path / "a", *parts), vocab_size=199)
    rest = [row for row in range(11) if 199 not in [*rows.ids[row], *rows.masked_ids[row]]]
    dataset.read(np.array(rest))
    message = r"tokens_00001.bin: row 2: expected tokens in \[0, 199\), got 199"
    with pytest.raises(ValueError, match=message):
        dataset.read(np.array([rest[0], 6]))
    parts[1].ids[2, 1], parts[1].masked_ids[2, 0] = 10, 199
    with pytest.raises(ValueError, match=message):
        open_pretraining(write(tmp_path / "b", *parts), vocab_size=199).read(np.array([6]))
    parts[0].masked_positions[3, 0] = 15
    parts[0].facts[3, :2] = 15, 4
    with pytest.raises(
        ValueError, match=r"tokens_00000.bin: row 3: .* positions in \[0, 15\), got 15"
    ):
        open_pretraining(write(tmp_path / "c", *parts)).read(np.array([3]))


def test_a_smaller_vocabulary_makes_tokens_unknown(shards, rows):
    dataset = open_pretraining(shards, vocab_size=100, unknown_id=9)
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
        assert not used[len(known) :].any()
    assert lost
    with pytest.raises(ValueError, match=r"unknown_id: expected a token in \[0, 100\), got 100"):
        open_pretraining(shards, vocab_size=100, unknown_id=100)


def write_popart(path, rows: TextRows) -> None:
    """Writes records word by word, by the description of the format."""
    length, predictions = rows.ids.shape[1], rows.masked_ids.shape[1]
    with open(path, "wb") as file:
        for ids, facts, positions, masked in zip(*rows, strict=True):
            end, begin, number, label = facts
            slots = [(0, length, 0)] * length  # padding: no token or position
            rest = [i for i in range(end) if i not in positions[:number]]
            for slot, place in [*enumerate(positions[:number]), *enumerate(rest, predictions)]:
                slots[slot] = (ids[place], place, int(place >= begin))
            columns = [value for column in zip(*slots, strict=True) for value in column]
            words = [*columns, number, predictions + len(rest), *masked, label]
            assert len(words) == 3 * length + predictions + 3
            file.write(struct.pack(f"<{len(words)}i", *words))


def popart_rows(count, seed=0):
    """Makes rows with room for PopART's masked slots in front."""
    rows = made_up(count, 20, seed=seed)
    fits = rows.facts[:, 0] - rows.facts[:, 2] + PREDICTIONS <= LENGTH
    assert fits.sum() > count / 2
    return TextRows(*(a[fits] for a in rows._replace(ids=rows.ids[:, :LENGTH])))


def test_popart_records_are_put_back_in_order(tmp_path):
    rows = popart_rows(40)
    write_popart(tmp_path / "wiki_00", rows)
    dataset = open_pretraining(
        tmp_path / "wiki_00", "popart", LENGTH, PREDICTIONS, vocab_size=VOCAB
    )
    count = len(rows.ids)
    assert (dataset.num_samples, dataset.length) == (count, LENGTH)
    order = np.random.default_rng(0).permutation(count)
    assert_holds(dataset.read(order), rows, order)
    other = popart_rows(30, seed=1)
    write_popart(tmp_path / "wiki_01", other)
    both = open_pretraining(tmp_path, "popart", LENGTH, PREDICTIONS)
    assert both.num_samples == count + len(other.ids)
    assert_same(
        both.read(np.array([count + 3]))._replace(indices=torch.tensor([3])),
        open_pretraining(tmp_path / "wiki_01", "popart", LENGTH, PREDICTIONS).read(np.array([3])),
    )


def test_popart_files_of_other_sizes_are_named(tmp_path):
    path = tmp_path / "wiki_00"
    write_popart(path, popart_rows(20))
    with pytest.raises(ValueError, match="do not say their sizes: expected --max_seq_length and"):
        open_pretraining(path, "popart")
    with pytest.raises(ValueError, match="wiki_00: expected an HDF5 file .* --data_format popart"):
        open_pretraining(path)
    with pytest.raises(ValueError, match="wiki_00: truncated, or not of sequence length 24 and 4"):
        open_pretraining(path, "popart", 24, PREDICTIONS)
    # 55 words can also be a record of 15 tokens and 7 masked ones.
    with pytest.raises(
        ValueError, match="wiki_00: row 0: not a record of sequence length 15 and 7"
    ):
        open_pretraining(path, "popart", 15, 7)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="wiki_00: truncated, .* multiple of 220 bytes, got"):
        open_pretraining(path, "popart", LENGTH, PREDICTIONS)


# A record of 8 slots, up to 2 masked: [CLS] 10 [SEP] [MASK] [SEP], where 12 was masked.
RECORD = {
    "ids": [MASK, 0, CLS, 10, SEP, SEP, 0, 0],
    "positions": [3, 8, 0, 1, 2, 4, 8, 8],
    "segments": [1, 0, 0, 0, 0, 1, 0, 0],
    "num_masked": [1],
    "end": [6],
    "masked": [12, 0],
    "label": [1],
}


def read_record(path, **changed):
    words = [word for values in (RECORD | changed).values() for word in values]
    good = [word for values in RECORD.values() for word in values]
    path.write_bytes(struct.pack("<58i", *good, *words))
    return open_pretraining(path, "popart", 8, 2, vocab_size=20).read(np.arange(2))


def test_a_known_popart_record(tmp_path):
    batch = read_record(tmp_path / "wiki")
    assert batch.ids.tolist() == [[CLS, 10, SEP, MASK, SEP, 0, 0, 0]] * 2
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]] * 2
    assert batch.masked_positions.tolist() == [[3, 0]] * 2
    assert batch.masked_ids.tolist() == [[12, NO_TOKEN]] * 2
    nothing_masked = {"num_masked": [0], "positions": [8, 8, 0, 1, 2, 3, 8, 8]}
    assert read_record(tmp_path / "wiki", **nothing_masked).lengths.tolist() == [5, 4]


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"masked": [-5, 0]}, r"masked tokens \[-5\]"),
        ({"masked": [-1, 0]}, r"masked tokens \[-1\]"),
        ({"positions": [2, 8, 0, 1, 2, 4, 8, 8]}, r"positions \[2, 0, 1, 2, 4\]"),
        ({"positions": [4, 8, 0, 0, 4, 4, 8, 8]}, r"positions \[4, 0, 0, 4, 4\]"),
        ({"positions": [3, 8, 0, 1, 2, 5, 8, 8]}, r"positions \[3, 0, 1, 2, 5\]"),
        ({"segments": [1, 0, 0, 0, 0, 7, 0, 0]}, r"segments \[1, 0, 0, 0, 7\]"),
        ({"segments": [1, 0, 0, 1, 0, 1, 0, 0]}, r"segments \[1, 0, 1, 0, 1\]"),
        ({"label": [2]}, "label 2"),
        ({"num_masked": [-1]}, "-1 are masked"),
        ({"num_masked": [3]}, "3 are masked"),
        ({"end": [9]}, "slots end at 9"),
    ],
)
def test_what_is_no_popart_record_is_named(tmp_path, changed, got):
    with pytest.raises(ValueError, match=f"wiki: row 1: not a record of .*{got}"):
        read_record(tmp_path / "wiki", **changed)


def write_nvidia(path, rows: TextRows, **changed) -> None:
    """Writes a file with NVIDIA's fields; `changed` replaces fields, and None omits one."""
    h5py = pytest.importorskip("h5py", reason="no h5py, which reads HDF5")
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
                file.create_dataset(name, data=values, compression="gzip")


def test_hdf5_files_are_read(tmp_path, rows):
    write_nvidia(tmp_path / "part_0.hdf5", rows)
    dataset = open_pretraining(tmp_path / "part_0.hdf5")
    order = [3, 10, 0]
    assert_holds(dataset.read(np.array(order)), rows, order)
    large = made_up(5, vocab=100_000)
    write_nvidia(tmp_path / "part_1.h5", large)
    (tmp_path / "readme.txt").write_text("not one of them")
    both = open_pretraining(tmp_path)
    assert both.num_samples == 16
    assert both.read(np.array([12])).ids.tolist() == [large.ids[1].tolist()]


def test_what_is_wrong_with_an_hdf5_file_is_named(tmp_path, rows):
    path = tmp_path / "part.hdf5"
    write_nvidia(path, rows, input_mask=None)
    with pytest.raises(ValueError, match="part.hdf5: expected the fields .*, got no input_mask"):
        open_pretraining(path)
    write_nvidia(path, rows, masked_lm_ids=rows.masked_ids[:, 1:])
    with pytest.raises(
        ValueError, match=r"expected masked_lm_ids of shape \(11, 4\), got \(11, 3\)"
    ):
        open_pretraining(path)
    mask = np.ones(rows.ids.shape, "i1")
    mask[4, 2] = 0
    write_nvidia(path, rows, input_mask=mask)
    with pytest.raises(ValueError, match="part.hdf5: row 4: expected tokens .* and then padding"):
        open_pretraining(path)
    write_nvidia(path, rows, next_sentence_labels=np.full(11, -1))
    with pytest.raises(ValueError, match="part.hdf5: row 0: expected .* label"):
        open_pretraining(path)
    write_nvidia(path, rows)
    with pytest.raises(ValueError, match="part.hdf5: expected sequence length 128"):
        open_pretraining(path, max_seq_length=128)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="part.hdf5: not a whole HDF5 file"):
        open_pretraining(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"expected \*.hdf5 or \*.h5, found none"):
        open_pretraining(tmp_path, "hdf5")


def edited(values, row, places, changed):
    values = values.copy()
    values[row, places] = changed
    return values


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("masked_lm_positions", [3, 0, 5, 0], r"positions .* zeros, .*got \[3, 0, 5, 0\]"),
        ("masked_lm_positions", [5, 3, 5, 0], r"positions .* once, .*got \[5, 3, 5, 0\]"),
        ("masked_lm_positions", [-1, 0, 0, 0], r"positions .*got \[-1, 0, 0, 0\]"),
        ("masked_lm_positions", [16, 0, 0, 0], r"positions .*got \[16, 0, 0, 0\]"),
        ("masked_lm_positions", [1 << 32, 0, 0, 0], r"positions .*got \[4294967296, 0, 0, 0\]"),
        ("masked_lm_ids", [-1] * 4, r"masked_lm_ids .*got .* of \[-1, 0, 0, 0\]"),
        ("masked_lm_ids", [1 << 32] * 4, r"masked_lm_ids .*got .* of \[4294967296, "),
        ("input_ids", [1 << 32], r"expected tokens .*got .* \[4294967296, "),
        ("segment_ids", [0, 1, 0, 1], r"segment_ids .*got \[0, 1, 0, 1"),
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
    open_pretraining(path)
    write_nvidia(path, rows, **{name: edited(fields[name], 7, slice(len(changed)), changed)})
    with pytest.raises(ValueError, match=f"part.hdf5: row 7: .*{message}"):
        open_pretraining(path)


@pytest.mark.parametrize("values", [b"text", 1.5])
def test_an_hdf5_field_of_no_integers_is_named(tmp_path, rows, values):
    path = tmp_path / "part.hdf5"
    write_nvidia(path, rows, input_ids=np.full(rows.ids.shape, values))
    with pytest.raises(
        ValueError, match="part.hdf5: input_ids: expected integers, got (.S4|float64)"
    ):
        open_pretraining(path)


def test_an_hdf5_group_is_no_field(tmp_path, rows):
    path = tmp_path / "part.hdf5"
    write_nvidia(path, rows, segment_ids=None)
    with sys.modules["h5py"].File(path, "a") as file:
        file.create_group("segment_ids")
    with pytest.raises(ValueError, match="part.hdf5: segment_ids: expected integers, got a group"):
        open_pretraining(path)


def test_hdf5_without_h5py_says_what_to_install(tmp_path, rows, monkeypatch):
    write_nvidia(tmp_path / "part.hdf5", rows)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"h5py.*; pip install .*'h5py>=3.10' installs it"):
        open_pretraining(tmp_path)

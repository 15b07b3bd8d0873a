"""NVIDIA's binary rows become a dataset with one file per feature, and errors name their place."""

import json
import re

import forked
import numpy as np
import pytest

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.transform.transform import Transform

SIZES = [5, 127, 40_000]
ROWS = {"train": 70_001, "test": 9, "val": 40}


def binary(folder, changes=()):
    """Writes rows of two numbers and three ids; `changes` are (file, row, word, value)."""
    folder.mkdir()
    draw, made = np.random.default_rng(0), {}
    for split, rows in ROWS.items():
        words = np.empty((rows, 6), "<i4")
        words[:, 0] = draw.integers(0, 2, rows)
        words[:, 1:3] = draw.normal(0, 9, (rows, 2)).astype("<f4").view("<i4")
        words[:, 3:] = draw.integers(0, SIZES, (rows, 3))
        for file, row, word, value in changes:
            if file == split:
                words[row, word] = np.array(value).view("<i4")
        words.tofile(folder / f"{split}_data.bin")
        made[split] = words
    layout.write_model_size(folder, SIZES)
    return made


def split(folder, *flags):
    paths = [f"--dataset={folder / 'binary'}", f"--output={folder / 'split'}"]
    return forked.run("dlrm.scripts.split_dataset", *paths, "--numerical_features=2", *flags)


def test_every_word_goes_to_the_file_of_its_feature(tmp_path):
    made = binary(tmp_path / "binary")
    done = split(tmp_path, "--noreport")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train: +70,001 rows, ", done.stdout, re.MULTILINE)
    spec = FeatureSpec.load(tmp_path / "split")
    assert (spec.numerical, spec.label) == (["num_0", "num_1"], "label")
    assert spec.cardinalities == SIZES
    for name, words in zip(spec.splits, made.values(), strict=True):
        label, numbers = (
            np.fromfile(spec.file(name, one), dtype)
            for one, dtype in (("label", bool), ("num_0", np.float16))
        )
        np.testing.assert_array_equal(label, words[:, 0] == 1)
        expected = words[:, 1:3].copy().view("<f4").astype(np.float16)
        np.testing.assert_array_equal(numbers.reshape(-1, 2), expected)
        for place, table in enumerate(spec.categorical):
            ids = np.fromfile(spec.file(name, table), spec.dtype(table))
            np.testing.assert_array_equal(ids, words[:, 3 + place])
    assert Transform.load(tmp_path / "split" / "transform").cardinalities == SIZES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("train", 70_000, 0, np.int32(2)), "train_data.bin, row 70000, column label: expected a"),
        (("test", 3, 3, np.int32(5)), "test_data.bin, row 3, column cat_0.bin: expected an intege"),
        (("train", 8, 1, np.float32(7e4)), "row 8, column num_0: 70000.0 is beyond float16"),
    ],
)
def test_bad_rows_are_named_or_left_out(tmp_path, change, message):
    binary(tmp_path / "binary", [change])
    done = split(tmp_path, "--noreport")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["binary"]
    done = split(tmp_path, "--noreport", "--bad_lines=quarantine")
    assert done.returncode == 0, done.stderr
    rows = {"val" if k == "validation" else k: n for k, n in manifest(tmp_path)["rows"].items()}
    assert rows == ROWS | {change[0]: ROWS[change[0]] - 1}


def manifest(folder):
    return json.loads((folder / "split" / "manifest.json").read_text())


def test_a_file_with_another_number_of_features_is_named(tmp_path):
    binary(tmp_path / "binary")
    done = split(tmp_path, "--numerical_features=1")
    assert done.returncode == 1
    assert "expected a multiple of 20 bytes (a label, 1 numerical and 3 categ" in done.stderr
    (tmp_path / "binary" / "test_data.bin").unlink()
    assert "test_data.bin: missing" in split(tmp_path).stderr

"""Fields with several ids per row, from memory to a dataset's files."""

import numpy as np
import pytest
from list_testing import bags_of

from dlrm.data.bags import ListField
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter

LISTS = {"tags": ListField(300), "history": ListField(3, weighted=True, pooling="mean")}


def spec_in(directory) -> FeatureSpec:
    sizes = {"tags": 200, "user": 5, "history": 40_000}
    splits = ["train", "test"]
    return FeatureSpec.named(
        directory / "feature_spec.yaml", "label", ["age"], sizes, splits, lists=LISTS
    )


def drawn(rows: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    random = np.random.default_rng(seed)
    tags = [random.integers(0, 200, n).tolist() for n in random.integers(0, 12, rows)]
    history = [random.integers(0, 40_000, n).tolist() for n in random.integers(0, 4, rows)]
    return tags, history, [random.standard_normal(len(row)).tolist() for row in history]


def write(spec: FeatureSpec, rows: int, chunk: int) -> None:
    tags, history, weights = drawn(rows)
    with SplitWriter(spec, "train") as writer:
        for begin in range(0, rows, chunk):
            part = slice(begin, begin + chunk)
            columns = [
                bags_of(tags[part]),
                np.arange(rows)[part] % 5,
                bags_of(history[part], weights[part]),
            ]
            count = len(tags[part])
            writer.write(np.zeros(count, bool), np.zeros((count, 1)), columns)


@pytest.mark.parametrize("rows", [1, 4095, 4096, 4097, 9000])
def test_files_hold_what_was_written_whatever_the_chunks(tmp_path, rows):
    tags, history, weights = drawn(rows)
    for chunk in {rows, 1000, 4096}:
        spec = spec_in(tmp_path / str(chunk))
        write(spec, rows, chunk)
        assert spec.num_rows("train") == rows
        for name, lists, value, length in (
            ("tags", tags, "<i2", "<i2"),
            ("history", history, "<i4", "i1"),
        ):
            files = spec.list_files("train", name)
            assert np.fromfile(files.values, value).tolist() == [v for row in lists for v in row]
            assert np.fromfile(files.lengths, length).tolist() == [len(row) for row in lists]
            ends = np.cumsum([0, *map(len, lists)])
            starts = np.fromfile(files.starts, "<i8").tolist()
            assert starts == [*ends[:-1][::4096], ends[-1]]
        written = np.fromfile(spec.list_files("train", "history").weights, "<f4")
        expected = np.array([w for row in weights for w in row], np.float32)
        np.testing.assert_array_equal(written, expected)


def test_rows_of_bags_are_taken_by_mask_and_by_place():
    tags, _, _ = drawn(50)
    bags = bags_of(tags, [[float(v) for v in row] for row in tags])
    places = np.array([49, 0, 7, 7, 3])
    odd = np.arange(50) % 2 == 1
    for rows, expected in ((places, [tags[i] for i in places]), (odd, tags[1::2])):
        taken = bags.take(rows)
        parts = np.split(taken.values, np.cumsum(taken.lengths))[:-1]
        assert [part.tolist() for part in parts] == expected
        np.testing.assert_array_equal(taken.weights, taken.values.astype(np.float32))

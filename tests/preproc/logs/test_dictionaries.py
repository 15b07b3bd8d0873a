"""Dictionaries that are sorted in parts, and processes with limited memory."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from dlrm.preproc.stages.dictionary_merge import CountedColumn, FitJob, fit_columns, merge_bucket
from dlrm.preproc.stages.shuffle_files import write_buckets

from dlrm.data.sources.columns import Parsed, TextColumn, hash_texts
from dlrm.data.transform.dictionaries import Counts, Dictionary, count_values
from dlrm.data.transform.lookup import IdLookup
from dlrm.preproc.stages import dictionary_merge as dictionaries

COMMAND = Path(__file__).resolve().parents[3] / "preproc" / "spark_data_utils.py"


def fitted(folder, columns, limit, buckets):
    """Counts columns of numbers in two splits, merges and fits them; returns the dictionaries."""
    for name in ("counts", "merged", "transform", "lookups"):
        (folder / name).mkdir(parents=True)
    for part in (0, 1):
        parts = [numbers[part::2] for numbers in columns]
        counts = [count_values(Parsed(n, np.zeros(len(n), bool))) for n in parts]
        dictionaries.write_counts(folder / "counts" / str(part), counts, buckets)
    sources = [str(folder / "counts" / str(part)) for part in (0, 1)]
    merged = [
        merge_bucket(bucket, sources, [limit] * len(columns), str(folder / "merged"))
        for bucket in range(buckets)
    ]
    job = FitJob(
        str(folder / "merged"),
        [result["kept"] for result in merged],
        str(folder / "transform"),
        str(folder / "lookups"),
        [CountedColumn()] * len(columns),
    )
    sizes = fit_columns(range(len(columns)), job)
    return [np.load(folder / "transform" / f"dictionary_{i}.npy") for i in range(len(sizes))]


@pytest.mark.parametrize("at_once", [40, 300, 1 << 22])
@pytest.mark.parametrize(("limit", "buckets"), [(1, 1), (2, 5)])
def test_dictionaries_are_those_of_a_plain_sort(tmp_path, monkeypatch, at_once, limit, buckets):
    monkeypatch.setattr(dictionaries, "_SORTED_AT_ONCE", at_once)
    random = np.random.default_rng(0)
    columns = [
        random.zipf(1.3, 3000).astype(np.uint64),  # many counts
        random.permutation(1000).repeat(3).astype(np.uint64),  # one count
        random.integers(0, 2**63, 900, np.uint64) * np.uint64(2),  # once each, 64 bits
        np.full(50, 2**64 - 1, np.uint64),
        np.empty(0, np.uint64),
    ]
    found = fitted(tmp_path, columns, limit, buckets)
    for i, (dictionary, numbers) in enumerate(zip(found, columns, strict=True)):
        keys, counts = np.unique(numbers, return_counts=True)
        expected = sorted((-n, key) for key, n in zip(keys.tolist(), counts.tolist(), strict=True))
        expected = [key for n, key in expected if -n >= limit]
        assert dictionary.tolist() == expected
        wide = any(key >= 2**32 for key in expected)
        assert dictionary.dtype == (np.uint64 if wide else np.uint32)
        lookup = IdLookup.load(
            tmp_path / "lookups", i, np.dtype(IdLookup.from_dictionary(dictionary).ids.dtype)
        )
        ids = lookup(Parsed(np.array(expected, np.uint64), np.zeros(len(expected), bool)))
        assert ids.tolist() == list(range(1, len(expected) + 1))


@pytest.mark.parametrize("at_once", [7, 40, 1 << 22])
@pytest.mark.parametrize("most", [None, 0, 150])
def test_dictionaries_of_texts_are_those_of_a_plain_sort(tmp_path, monkeypatch, at_once, most):
    monkeypatch.setattr(dictionaries, "_SORTED_AT_ONCE", at_once)
    random = np.random.default_rng(0)
    words = [f"{word:x}" * (1 + word % 40) for word in range(300)]
    counts = dict(zip(words, random.zipf(2.0, len(words)).tolist(), strict=True))
    for name in ("counts", "merged", "transform", "lookups"):
        (tmp_path / name).mkdir()
    keys = hash_texts(TextColumn.from_bytes([word.encode() for word in words]))
    order = np.argsort(keys)
    texts = pa.array([words[place].encode() for place in order], pa.large_binary())
    own = np.array([counts[words[place]] for place in order])
    dictionaries.write_counts(tmp_path / "counts/0", [Counts(keys[order], own, texts)], 3)
    merged = [
        merge_bucket(bucket, [str(tmp_path / "counts/0")], [2], str(tmp_path / "merged"))
        for bucket in range(3)
    ]
    kept = [result["kept"] for result in merged]
    folders = [str(tmp_path / name) for name in ("transform", "lookups")]
    job = FitJob(str(tmp_path / "merged"), kept, *folders, [CountedColumn("texts", 2, most)])
    size = fit_columns([0], job)["0"]
    expected = sorted((-n, word.encode()) for word, n in counts.items() if n > 1)[:most]
    made = Dictionary.load(tmp_path / "transform", 0, size, "string")
    assert made.values() == [word.decode() for _, word in expected]
    lookup = IdLookup.load(tmp_path / "lookups", 0, IdLookup.from_dictionary(made.keys).ids.dtype)
    ids = lookup(Parsed.present(np.asarray(made.keys)))
    assert ids.tolist() == list(range(1, size + 1))
    assert not list(tmp_path.rglob(".*")), "temporary files are removed"


def test_only_what_was_counted_is_read(tmp_path):
    """Only the index determines a bucket's bytes, whatever is stored beside them."""
    from dlrm.preproc.stages.shuffle_files import read_bucket, total_counts

    counts = np.array([[1, 2], [0, 0], [5, 7]])
    for name in "ab":
        write_buckets(tmp_path / name, [b"one", b"", b"three"], counts)
    paths = [tmp_path / "a", tmp_path / "b"]
    assert [content for content, _ in read_bucket(paths, 2)] == [b"three", b"three"]
    assert [list(c) for _, c in read_bucket(paths, 0)] == [[1, 2], [1, 2]]
    assert total_counts(paths).tolist() == (2 * counts).tolist()

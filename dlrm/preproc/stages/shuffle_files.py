"""Files between two stages: the rows of each bucket, for the buckets' tasks to read.

A task writes one file with the concatenated bytes of bucket 0, 1, ..., and beside it an index of
the buckets. It is like a shuffle in Spark, but on the storage of the dataset, so that it outlives
the processes and killed runs can resume, and it works with every engine.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dlrm.files import staged_file, write_array
from dlrm.remote.task_files import map_arrays, read_ranges

INDEX = ".index.npy"


def remove_unfinished(directory: Path) -> None:
    """Removes unfinished files of `staged_file` by killed processes, anywhere in a directory."""
    for partial in directory.rglob(".*.partial-*"):
        partial.unlink(missing_ok=True)


def write_buckets(
    path: Path,
    contents: Iterable[bytes | memoryview],
    counts: np.ndarray,
    sizes: np.ndarray | None = None,
) -> None:
    """Writes buckets, and their counts, `[buckets, ...]`; the caller waits for their names.

    Args:
        contents: the bytes of the buckets, in order.
        counts: counts that `read_bucket` returns with the buckets.
        sizes: bytes of each bucket; None if each is one of `contents`.
    """
    lengths = []
    with staged_file(path, one_of_many=True) as partial, open(partial, "wb") as file:
        for content in contents:
            lengths.append(len(content))
            file.write(content)
    ends = np.cumsum(lengths if sizes is None else sizes, dtype=np.int64)
    index = np.empty(
        len(ends),
        [("begin", np.int64), ("end", np.int64), ("counts", np.int64, counts.shape[1:])],
    )
    index["begin"], index["end"], index["counts"] = ends - np.diff(ends, prepend=0), ends, counts
    with staged_file(_index(path), one_of_many=True) as partial:
        write_array(partial, index)


def read_bucket(paths: Sequence[Path], bucket: int) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yields the bytes and the counts of a bucket from every file."""
    entries = [index[bucket] for index in map_arrays([_index(path) for path in paths])]
    ranges = (
        (str(path), int(entry["begin"]), int(entry["end"]))
        for path, entry in zip(paths, entries, strict=True)
    )
    for content, entry in zip(read_ranges(ranges), entries, strict=True):
        yield content, entry["counts"]


def bucket_files(directory: Path) -> list[Path]:
    """Returns the files of `write_buckets` in a directory."""
    found = directory.glob(f"[0-9]*{INDEX}")
    return sorted(path.with_name(path.name.removesuffix(INDEX)) for path in found)


def total_counts(paths: Sequence[Path]) -> np.ndarray:
    """Adds up the counts of all files, `[buckets, ...]`."""
    total = np.zeros(1, np.int64)
    for path in paths:
        total = total + np.load(_index(path), allow_pickle=False)["counts"]
    return total


def _index(path: Path) -> Path:
    return path.with_name(path.name + INDEX)

"""Files between two stages: the rows of each bucket, for the buckets' tasks to read.

A task writes one file with the concatenated bytes of bucket 0, 1, ..., and beside it an index of
the buckets. It is like a shuffle in Spark, but on the storage of the dataset, so that it outlives
the processes and killed runs can resume, and it works with every engine.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dlrm.files import staged_file, write_array
from dlrm.mapped_files import map_npy


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
        path: path of the file.
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
    for path in paths:
        entry = map_npy(_index(path))[bucket]
        with open(path, "rb") as file:
            file.seek(int(entry["begin"]))
            yield file.read(int(entry["end"] - entry["begin"])), entry["counts"]


def bucket_files(directory: Path) -> list[Path]:
    """Returns the files of `write_buckets` in a directory."""
    ends = len(".index.npy")
    return sorted(path.with_name(path.name[:-ends]) for path in directory.glob("[0-9]*.index.npy"))


def total_counts(paths: Sequence[Path]) -> np.ndarray:
    """Adds up the counts of all files, `[buckets, ...]`."""
    total = np.zeros(1, np.int64)
    for path in paths:
        total = total + np.load(_index(path), allow_pickle=False)["counts"]
    return total


def _index(path: Path) -> Path:
    return path.with_name(path.name + ".index.npy")

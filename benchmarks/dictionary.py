"""Measures the memory of the task that numbers the values of the largest field.

    python benchmarks/dictionary.py [--values 200000000] [--kind numbers|texts] [--at_once 4194304]
        [--directory DIR]

The merged counts of a column with so many values are simulated, in 64 buckets: a count of 1 for
half of the values, of 2 for a quarter, and so on. Texts are of 4 to 12 letters. `fit_columns` then
runs in a process of its own, which reports its time and the greatest number of bytes of anonymous
memory, sampled each 20 ms: mapped files are not counted, as the kernel may write them back and drop
them. Values are sorted `--at_once` at a time.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from dlrm.data.sources.columns import TextColumn, hash_texts
from dlrm.preproc.stages import dictionary_merge
from dlrm.preproc.stages.dictionary_merge import CountedColumn, FitJob, fit_columns

_BUCKETS = 64
_UNSPREAD = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))  # undoes `lookup.spread`
_LETTERS = 12


def write_bucket(path: Path, bucket: int, values: int, texts: bool) -> list[int]:
    """Writes a bucket as `merge_bucket` does; returns its values and bytes of texts."""
    random = np.random.default_rng(bucket)
    counts = random.geometric(0.5, values).astype(np.int64)
    if not texts:
        step = (1 << 64) // _BUCKETS // values
        hashes = np.uint64(bucket * ((1 << 64) // _BUCKETS))
        hashes = hashes + np.arange(values, dtype=np.uint64) * np.uint64(step)
        path.write_bytes((hashes * _UNSPREAD).tobytes() + counts.tobytes())
        return [values, 0]
    letters = random.integers(ord("a"), ord("z") + 1, (values, _LETTERS), np.uint8)
    number = np.arange(values) + bucket * values
    letters[:, :4] = ord("A") + (number[:, None] >> np.array([0, 5, 10, 15])) % 32  # distinct
    letters[:, 4:6] = ord("A") + (number[:, None] >> np.array([20, 25])) % 32
    lengths = random.integers(6, _LETTERS + 1, values).astype(np.int32)
    content = letters[np.arange(_LETTERS) < lengths[:, None]]
    ends = np.cumsum(lengths, dtype=np.int64)
    keys = hash_texts(TextColumn(np.r_[content, np.zeros(8, np.uint8)], ends - lengths, ends))
    path.write_bytes(b"".join(a.tobytes() for a in (keys, counts, lengths, content)))
    return [values, 4 * values + len(content)]


def fit(folder: Path, kind: str, kept: list[list[int]], at_once: int) -> None:
    """Numbers the values, and prints time and memory."""
    dictionary_merge._SORTED_AT_ONCE = at_once
    for name in ("transform", "lookups"):
        (folder / name).mkdir()
    job = FitJob(
        str(folder / "merged"),
        [[(values, size)] for values, size in kept],
        str(folder / "transform"),
        str(folder / "lookups"),
        [CountedColumn(kind)],
    )
    most, is_over, before = 0, threading.Event(), anonymous_bytes()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.02):
            most = max(most, anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    (size,) = fit_columns([0], job).values()
    is_over.set()
    watcher.join()
    print(
        f"{size:,} {kind}: {time.perf_counter() - began:.0f} s, {most / 1e6:,.0f} MB of anonymous "
        f"memory, of {at_once:,} values at a time; all values and counts are "
        f"{(16 * size + sum(b for _, b in kept)) / 1e6:,.0f} MB"
    )


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--values", type=int, default=200_000_000)
    parser.add_argument("--kind", choices=("numbers", "texts"), default="numbers")
    parser.add_argument("--at_once", type=int, default=1 << 22)
    parser.add_argument("--directory")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fit:
        kept = np.load(Path(args.fit, "kept.npy")).tolist()
        fit(Path(args.fit), args.kind, kept, args.at_once)
        return
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="dictionary-") as name:
        folder = Path(name)
        (folder / "merged").mkdir()
        kept = [
            write_bucket(
                folder / f"merged/{bucket}", bucket, args.values // _BUCKETS, args.kind == "texts"
            )
            for bucket in range(_BUCKETS)
        ]
        np.save(folder / "kept.npy", np.array(kept))
        command = [sys.executable, __file__, "--fit", name, "--kind", args.kind]
        subprocess.run([*command, "--at_once", str(args.at_once)], check=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

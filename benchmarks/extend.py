"""Times the extension of dictionaries by a day of rows, as the dictionaries grow.

    python benchmarks/extend.py [--values 1000000,10000000,100000000] [--rows 1000000] [--rounds 3]
        [--directory DIR]

The first day of a chain is simulated: a dataset whose only categorical field has so many integers,
and 1 million candidates. The next day has rows of which four fifths have one of these, and the rest
one of 100,000 new values. `dlrm prepare --extend` runs in a process with one core; its processor
time and that of its workers is the kernel's. Bytes written are those of the output's files that are
not links to files of the first day. The values are in the page cache; `opened` is the processor
time to read the lookups once and compare them with their checksums, which the command does where no
earlier command has. Rounds take turns, and medians are compared.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.clicks import layout
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.lookup import IdLookup, lookup_directory, unspread
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.stored import Increment, digest
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import NUMBER
from dlrm.data.verification import Verifier
from dlrm.files import write_array
from dlrm.manifest import sealed_json
from dlrm.preproc.increments.candidates import Candidates
from dlrm.preproc.increments.segments import DAY

_SCHEMA = {
    "label": "y",
    "numerical": [{"column": "n", "transform": "log"}],
    "categorical": [{"column": "user", "type": "integer", "frequency_limit": 5}],
}
_NEW = 100_000
_CANDIDATES = 1_000_000


def write_first_day(directory: Path, values: int) -> None:
    """Writes a dataset without rows, whose dictionary has a number of random integers."""
    transform, chain = directory / layout.TRANSFORM, directory / layout.CHAIN
    transform.mkdir(parents=True)
    chain.mkdir()
    random = np.random.default_rng(values)
    step = (1 << 64) // values
    hashes = np.arange(values, dtype=np.uint64) * np.uint64(step)
    hashes += random.integers(0, step, values, np.uint64)
    ids = random.permutation(values).astype(layout.id_dtype(values + 1)) + 1
    keys = np.empty(values, np.uint64)
    keys[ids - 1] = unspread(hashes)
    arrays = hashes, ids, lookup_directory(hashes)
    for array, path in zip(arrays, IdLookup.paths(chain, 0), strict=True):
        array.tofile(path)
    write_array(transform / "dictionary_0.npy", keys)
    rare = np.sort(random.integers(0, 1 << 64, _CANDIDATES, np.uint64))
    days = np.ones(_CANDIDATES, np.int32)
    Candidates(rare, np.full(_CANDIDATES, 256), days).save(chain, 0)
    facts = {"transform": None, "rows": values, "content": "", "forgotten": [0]}
    facts |= {"day": "1", "new": [values], "candidates": [_CANDIDATES]}
    dictionary = Dictionary(keys, kind="integer")
    increment = Increment("1", "keep", (facts,))
    Transform(
        Schema.from_dict(_SCHEMA), [Fitted()], [dictionary], [NUMBER], increment=increment
    ).save_facts(transform)
    (chain / DAY).write_text(sealed_json({"version": 1, "transform": digest(transform)}))
    layout.write_dataset_manifest(directory, {"train": 0}, [values + 1], {})


def write_rows(path: Path, first_day: Path, rows: int) -> None:
    """Writes the rows of the next day."""
    random = np.random.default_rng(rows)
    known = np.load(first_day / layout.TRANSFORM / "dictionary_0.npy", mmap_mode="r")
    users = known[np.sort(random.integers(0, len(known), rows))].view(np.int64)
    random.shuffle(users)
    is_new = random.random(rows) < 0.2
    users[is_new] = random.integers(0, _NEW, int(is_new.sum()))
    labels = random.random(rows) < 0.1
    numbers = random.exponential(1, rows)
    pq.write_table(pa.table({"y": labels, "n": numbers, "user": users}), path)


def written_bytes(directory: Path, before: Path) -> int:
    """Returns the bytes of the files of a directory that are not links to those of another."""
    known = {path.stat().st_ino for path in before.rglob("*")}
    files = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum(status.st_size for status in files if status.st_ino not in known)


def extend(folder: Path, schema: Path, rows: Path, first: Path) -> tuple[float, float, int]:
    """Runs the command; returns its processor time, its time, and the bytes that it wrote."""
    output = folder / "day2"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "dlrm", "prepare", "--schema", str(schema), "--cores", "1"]
    command += ["--input", str(rows), "--output", str(output), "--extend", str(first)]
    command += ["--test_fraction", "0"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return processor, seconds, written_bytes(output, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--values", default="1000000,10000000,100000000")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory")
    args = parser.parse_args()
    sizes = [int(text) for text in args.values.split(",")]
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="extend-") as name:
        folder = Path(name)
        schema = folder / "schema.yaml"
        Schema.from_dict(_SCHEMA).save(schema)
        opened = {}
        for size in sizes:
            first = folder / f"first{size}"
            write_first_day(first, size)
            write_rows(folder / f"rows{size}.parquet", first, args.rows)
            began = time.process_time()
            Verifier(first, layout.KIND, "first", None).check_names(layout.CHAIN)
            opened[size] = time.process_time() - began
        found: dict[int, list[tuple[float, float, int]]] = {size: [] for size in sizes}
        for _ in range(args.rounds):
            for size in sizes:
                rows = folder / f"rows{size}.parquet"
                found[size].append(extend(folder, schema, rows, folder / f"first{size}"))
        print(f"{'values':>12} {'processor':>10} {'time':>8} {'written':>10} {'opened':>8}")
        for size in sizes:
            processor, seconds, written = (
                statistics.median(column) for column in zip(*found[size], strict=True)
            )
            print(
                f"{size:>12,} {processor:8.2f} s {seconds:6.2f} s {written / 1e6:7.1f} MB "
                f"{opened[size]:6.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

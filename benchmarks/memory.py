"""Measures the peak memory of prepare, train and predict beside the bytes of their data.

    python benchmarks/memory.py [--rows 500000 2000000]

Each command is a process of its own, on Parquet files of two sizes with the same values; the peak
is that of the largest of its processes, which the kernel counts. Tables have the same rows at both
sizes, so memory that grows with the data would show.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 100_000  # rows written
SCHEMA = """label: click
numerical: [number 0, number 1, number 2, number 3]
categorical: [word 0, word 1, word 2, word 3, word 4, word 5]
"""
COMMANDS = {
    "prepare": "prepare --input rows.parquet --schema schema.yaml --output dataset --engine local",
    "train": "train --dataset dataset --save_checkpoint_path run --epochs 1 --base_device cpu "
    "--batch_size 8192 --test_batch_size 8192 "
    "--max_steps 200",
    "predict": "predict --checkpoint run --input rows.parquet --output scores.npy",
}
# Runs a command and prints the kilobytes of the largest process that it started.
PEAK = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "dlrm", *sys.argv[1:]], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""


def write_rows(path: Path, count: int) -> int:
    """Writes rows; returns the bytes of the columns in memory."""
    random, total, writer = np.random.default_rng(0), 0, None
    for begin in range(0, count, AT_ONCE):
        rows = min(AT_ONCE, count - begin)
        columns = {"click": (random.random(rows) < 0.2).astype(np.int8)}
        columns |= {f"number {i}": random.normal(size=rows).astype(np.float32) for i in range(4)}
        columns |= {f"word {i}": random.integers(0, 5000, rows).astype(str) for i in range(6)}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
        total += table.nbytes
    if writer is not None:
        writer.close()
    return total


def measure(count: int) -> dict[str, float]:
    """Returns MB: of the data, and the peak of each command."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found = {"data": write_rows(directory / "rows.parquet", count) / 1e6}
        (directory / "schema.yaml").write_text(SCHEMA)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for command, words in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, "-c", PEAK, *words.split()],
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(done.stderr)
            found[command] = int(done.stdout.split()[-1]) * 1024 / 1e6
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 2_000_000])
    print("| rows | data, MB | prepare | train | predict |\n|---|---|---|---|---|")
    for count in parser.parse_args().rows:
        cells = [f"{megabytes:,.0f}" for megabytes in measure(count).values()]
        print(f"| {count:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Measures how long commands take to start, beside the import of what they are built on.

    python benchmarks/startup.py [--rounds 5]

A model of ten fields is trained on 20,000 rows and exported; `predict` then scores one row of
Parquet, by the checkpoint and, without torch, by the exported model. All sides take turns in every
round, a process each; medians of wall time and of the processor time of the process are shown.
Python's compiled files are kept, as for an installed package.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
ROWS = 20_000


def write_rows(directory: Path) -> None:
    random = np.random.default_rng(0)
    columns = {"click": (random.random(ROWS) < 0.2).astype(np.int8)}
    columns |= {f"number {i}": random.normal(size=ROWS).astype(np.float32) for i in range(4)}
    columns |= {f"word {i}": random.integers(0, 200, ROWS).astype(str) for i in range(6)}
    table = pa.table(columns)
    pq.write_table(table, directory / "rows.parquet")
    pq.write_table(table.slice(0, 1), directory / "one.parquet")


def make_models(directory: Path, environment: dict[str, str]) -> None:
    fit = (
        "import dlrm, pyarrow.parquet as pq; "
        "dlrm.fit(pq.read_table('rows.parquet'), label='click', epochs=1).save('model')"
    )
    timed(["-c", fit], directory, environment)
    export = "dlrm export --checkpoint model --save-dir repository --triton-model-name served"
    timed(["-m", *export.split()], directory, environment)


def timed(words: list[str], directory: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Runs Python; returns seconds of wall time and of processor time."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def predict(model: str) -> list[str]:
    flags = f"--checkpoint {model} --input one.parquet --output scores.npy"
    return ["-m", "dlrm", "predict", *flags.split()]


SIDES = {
    "`import torch`": ["-c", "import torch"],
    "`import numpy, pyarrow, onnxruntime`": ["-c", "import numpy, pyarrow.parquet, onnxruntime"],
    "`dlrm --help`": ["-m", "dlrm", "--help"],
    "`dlrm predict --help`": ["-m", "dlrm", "predict", "--help"],
    "`import dlrm.serving`": ["-c", "import dlrm.serving"],
    "`dlrm predict`, 1 row, by a checkpoint": predict("model"),
    "`dlrm predict`, 1 row, by an exported model": predict("repository/served"),
}


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPYCACHEPREFIX": str(directory / "compiled")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        write_rows(directory)
        make_models(directory, environment)
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for turn in range(rounds + 1):
            for side, words in SIDES.items():
                seconds = timed(words, directory, environment)
                if turn:  # the first compiles and reads files
                    found[side].append(seconds)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    found = measure(parser.parse_args().rounds)
    print("| process | seconds | processor seconds | of `import torch`'s |")
    print("|---|---|---|---|")
    middle = {
        side: [statistics.median(column) for column in zip(*seconds, strict=True)]
        for side, seconds in found.items()
    }
    torch = middle["`import torch`"][1]
    for side, (wall, processor) in middle.items():
        print(f"| {side} | {wall:.2f} | {processor:.2f} | {processor / torch:.2f} |")


if __name__ == "__main__":
    main()

"""Times `dlrm.fit` beside a draft, a preparation and a training by the command, in one process.

    python benchmarks/fit.py [--rows 100000] [--rounds 5]

Rows have 13 integers and 26 texts, drawn from a model. Both sides read the same table in memory and
train with the same settings, those that `fit` chooses. They are processes that take turns; medians
of their wall times, from the call to the last checkpoint, and of the trainers' throughput are
printed. Imports are not counted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUMERICALS, CATEGORICALS = 13, 26


def write_table(path: Path, rows: int) -> None:
    """Writes a Parquet file of which labels follow from the columns."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    columns: dict[str, Any] = {}
    logit = np.full(rows, -1.5)
    for column in range(NUMERICALS):
        values = random.geometric(0.05, rows)
        logit += 0.1 * random.normal() * np.log(values)
        columns[f"n{column}"] = values
    for column in range(CATEGORICALS):
        size = 4 * 2 ** (column % 14)
        values = (size * random.random(rows) ** 2).astype(np.int64)
        logit += 0.4 * random.normal(size=size)[values]
        columns[f"c{column}"] = pa.array([f"{value:x}" for value in values])
    columns["label"] = (random.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8)
    pq.write_table(pa.table(columns), path)


def run_side(side: str, table: Path, folder: Path) -> None:
    """Prints seconds and throughput of a side as JSON."""
    import pyarrow.parquet as pq

    import dlrm
    from dlrm.data.tables.draft import draft
    from dlrm.scripts.common import click_command, dlrm_flags
    from dlrm.tasks.recipe import set_aside_default, training_defaults

    frame = pq.read_table(table)
    began = time.perf_counter()
    if side == "fit":
        model = dlrm.fit(frame, label="label", progress=False)
        rate = model.results["average_train_throughput"]
    else:
        schema = draft(frame.to_batches(), "label").schema
        dataset = dlrm.Dataset.from_arrow(frame, schema, folder / "dataset")
        aside = set_aside_default(dataset.rows)
        rows = round((1 - aside["set_aside"]) * dataset.rows["train"])
        settings = training_defaults(rows, aside)
        settings |= {"dataset": dataset.path, "save_checkpoint_path": folder / "run"}
        words = [f"--{name}={_text(value)}" for name, value in settings.items()]
        words += ["--log_format=short", "--base_device=cpu", f"--log_path={folder / 'log.json'}"]
        values = dlrm_flags.parse(words, flags=dlrm_flags.make_flags())
        rate = click_command.run(values)["average_train_throughput"]
    print(json.dumps({"seconds": time.perf_counter() - began, "rate": rate}))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=["fit", "pieces"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.folder.parent / "table.parquet", options.folder)
        return
    results: dict[str, list[dict[str, float]]] = {"fit": [], "pieces": []}
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder, "table.parquet"), options.rows)
        for turn in range(options.rounds):
            for side in results:
                own = Path(folder, f"{side}{turn}")
                own.mkdir()
                command = [sys.executable, __file__, "--side", side, "--folder", str(own)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                results[side].append(json.loads(output.splitlines()[-1]))
    medians = {
        side: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for side, runs in results.items()
    }
    for side, median in medians.items():
        low, high = (f(run["seconds"] for run in results[side]) for f in (min, max))
        print(
            f"{side:7s}{median['seconds']:8.2f} s ({low:.2f} to {high:.2f}){median['rate']:12,.0f} "
            "samples/s"
        )
    fit, pieces = medians["fit"], medians["pieces"]
    print(
        f"fit / pieces: {fit['seconds'] / pieces['seconds']:.3f} of the time, "
        f"{fit['rate'] / pieces['rate']:.3f} of the throughput"
    )


if __name__ == "__main__":
    main()

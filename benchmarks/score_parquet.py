"""Times scores of rows of Parquet, beside LightGBM and ONNX Runtime on the same file.

    pip install lightgbm && python benchmarks/score_parquet.py [--rows 1000000] [--rounds 3]

A click model and a LightGBM of 100 trees of 31 leaves are fitted to the same 100,000 rows of 8
numbers and 12 columns of words; the exported model is scored by ONNX Runtime behind our transform.
Each side reads the Parquet file, a million rows at a time or fewer, encodes the words and scores,
as `dlrm predict` does without its start. LightGBM's words are encoded by a dictionary of Arrow for
each column. All run in turn on one thread, and medians of rows a second of processor time and of
the clock are shown. The models differ in what they compute: the comparison is one of roads.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

import dlrm
from dlrm.deployment import export
from dlrm.serving.exported import open_exported
from dlrm.serving.rows.config import BATCH_SIZE, SourceConfig
from dlrm.serving.rows.shares import shares_of
from dlrm.serving.scoring import Scorer, probability
from dlrm.serving.sources import iter_scored_blocks

NUMBERS, WORDS = [f"number {i}" for i in range(8)], [f"word {i}" for i in range(12)]
FITTED = 100_000
Side = Callable[[], np.ndarray]


def rows(count: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    columns = {name: random.normal(size=count).astype(np.float32) for name in NUMBERS}
    ids = [(1000 * random.random(count) ** 2).astype(int) for _ in WORDS]
    logits = columns["number 0"] + sum(np.sin(7.0 * (one + 1)) for one in ids[:3]) - 2
    columns |= {
        name: np.char.add("value ", one.astype(str)) for name, one in zip(WORDS, ids, strict=True)
    }
    return pa.table(
        {"click": (random.random(count) < probability(logits)).astype(np.int8)} | columns
    )


def ours(model: Scorer, path: Path) -> np.ndarray:
    """Returns scores as `dlrm predict` computes them."""
    shares, config = shares_of(model.transform), SourceConfig(label=False)
    parts = iter_scored_blocks(
        model, str(path), config, shares, lambda block: model.logits_of(block.inputs)
    )
    return np.concatenate([probability(part) for part in parts])


class Encoder:
    """The numbers of words for LightGBM, from dictionaries of the rows that it is fitted to."""

    def __init__(self, table: pa.Table) -> None:
        self._values = {name: pc.unique(table[name]) for name in WORDS}

    def __call__(self, table: pa.Table | pa.RecordBatch) -> np.ndarray:
        columns = [table[name].to_numpy(zero_copy_only=False) for name in NUMBERS]
        codes = (pc.fill_null(pc.index_in(table[n], self._values[n]), -1) for n in WORDS)
        columns += [one.to_numpy(zero_copy_only=False) for one in codes]
        return np.stack(columns, 1, dtype=np.float32)


def boosted(booster: lightgbm.Booster, encode: Encoder, path: Path) -> np.ndarray:
    batches = pq.ParquetFile(path).iter_batches(131_072, columns=[*NUMBERS, *WORDS])
    return np.concatenate([booster.predict(encode(batch), num_threads=1) for batch in batches])


def make_sides(directory: Path, path: Path) -> dict[str, Side]:
    table = rows(FITTED, 0)
    model = dlrm.fit(table, label="click", epochs=1, base_device="cpu")
    model.save(directory / "model")
    words = ["--checkpoint", directory / "model", "--save-dir", directory / "repository"]
    export.run(export.parse([str(word) for word in words]))
    exported = open_exported(directory / "repository" / "model" / "1", BATCH_SIZE)
    encode = Encoder(table)
    data = lightgbm.Dataset(
        encode(table), table["click"].to_numpy(), categorical_feature=range(len(NUMBERS), 20)
    )
    fitting = {"objective": "binary", "verbosity": -1, "num_threads": 1}
    booster = lightgbm.train(fitting, data, 100)
    return {
        "LightGBM": lambda: boosted(booster, encode, path),
        "ONNX Runtime": lambda: ours(exported, path),
        "ours": lambda: ours(model, path),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "rows.parquet")
        pq.write_table(rows(options.rows, 1), path)
        sides = make_sides(Path(name), path)
        speeds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, run in sides.items():
                began, processor = time.perf_counter(), time.process_time()
                assert len(run()) == options.rows
                both = time.perf_counter() - began, time.process_time() - processor
                speeds[side].append(tuple(options.rows / seconds for seconds in both))
    middle = {n: [statistics.median(of) for of in zip(*s, strict=True)] for n, s in speeds.items()}
    print("| side | rows a second | rows a processor second | x LightGBM |")
    print("|---|---|---|---|")
    for side, (wall, processor) in middle.items():
        times = processor / middle["LightGBM"][1]
        print(f"| {side} | {wall:,.0f} | {processor:,.0f} | {times:.2f} |")


if __name__ == "__main__":
    main()

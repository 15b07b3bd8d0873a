"""A table with lists, its dataset and a model trained on it, for the serving tests."""

from pathlib import Path
from typing import NamedTuple

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = """
label: click
numerical: [age]
categorical:
  - user
  - {column: tags, max_length: 4, pooling: sum}
  - {column: history, type: integer, max_length: 20, weights: history_weights, pooling: mean}
"""
MODEL = ["--embedding_dim=8", "--bottom_mlp_sizes=16,8", "--top_mlp_sizes=32,1"]
TRAINING = [
    *("--base_device=cpu", "--batch_size=64", "--lr=0.05", "--warmup_steps=4", "--decay_steps=0"),
    *("--embedding_optimizer=adam", "--mlp_optimizer=adam", "--max_steps=50"),
]


class Listed(NamedTuple):
    """Holds the paths and the rows of the table, with labels."""

    dataset: Path
    checkpoint: Path
    table: Path
    rows: list[dict]


def draw(rows: int = 2500, seed: int = 0) -> pa.Table:
    """Draws rows whose clicks depend on the lists; some lists are empty or null."""
    random = np.random.default_rng(seed)
    of_tag, of_item = np.random.default_rng(1).normal(0, 1, (2, 100))
    tags = [(20 * random.random(k) ** 2).astype(int) for k in random.integers(0, 7, rows)]
    items = [(90 * random.random(k) ** 2).astype(int) for k in random.integers(0, 30, rows)]
    factors = [random.random(len(own)).round(3) for own in items]
    pairs = zip(items, factors, strict=True)
    logits = np.array([3 * (of_item[i] * f).sum() / max(len(i), 1) for i, f in pairs])
    logits += [of_tag[own].sum() for own in tags]
    texts = [None if row % 97 == 0 else [f"t{i}" for i in own] for row, own in enumerate(tags)]
    return pa.table(
        {
            "click": (random.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int8),
            "age": random.integers(18, 90, rows),
            "user": [f"u{i}" for i in (40 * random.random(rows) ** 2).astype(int)],
            "tags": pa.array(texts, pa.list_(pa.string())),
            "history": [own.tolist() for own in items],
            "history_weights": [own.tolist() for own in factors],
        }
    )


def text_of(row: dict) -> str:
    """Returns a row as a log line without its label."""
    return "\t".join(cell(row[name]) for name in row if name != "click")


def cell(value: object) -> str:
    """Returns a value or list as CSV text."""
    if isinstance(value, list):
        return "|".join(map(str, value))
    return "" if value is None else str(value)


def make(directory: Path) -> Listed:
    """Makes the table, dataset and checkpoint in a directory."""
    table, source = draw(), directory / "rows.parquet"
    pq.write_table(table, source)
    schema, dataset, run = (directory / name for name in ("schema.yaml", "dataset", "run"))
    schema.write_text(SCHEMA)
    prepare = [f"--schema={schema}", f"--input={source}", f"--output={dataset}", "--cores=1"]
    train = [f"--dataset={dataset}", f"--save_checkpoint_path={run}", *MODEL, *TRAINING]
    log = f"--log_path={directory / 'log.json'}"
    for script, words in (("prepare", [*prepare, "--noreport"]), ("main", [*train, log])):
        forked.succeed(f"dlrm.scripts.{script}", *words)
    return Listed(dataset, run, source, table.to_pylist())

"""Datasets of tables have the same bytes however the work is split, run, stopped and resumed."""

import json
import random
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preproc_testing import killed_at
from table_oracle import Oracle
from tables_testing import Inline, contents, prepare

from dlrm.preproc.duckdb_engine import local_engine

pytestmark = pytest.mark.long
SCHEMA = {
    "label": {"column": "y", "positive": "ja", "any_negative": True},
    "numerical": [
        "x",
        {"column": "n", "transform": "log"},
        {"column": "q", "transform": "quantile", "bins": 16},
    ],
    "categorical": [
        {"column": "c", "frequency_limit": 2, "hash_buckets": 9},
        {"column": "i", "type": "integer", "max_ids": 40},
        {"column": "j", "type": "integer"},
        {"column": "tags", "max_length": 4, "ordered": False, "frequency_limit": 2},
        {"column": "seen", "type": "integer", "max_length": 3, "weights": "seen for"},
    ],
    "crosses": [
        {"fields": ["i", "c"], "buckets": 50},
        {"fields": ["c", "i"], "frequency_limit": 2},
    ],
    "weight": "w",
    "groups": ["c"],
    "time": {"column": "t", "unit": "ms"},
}
OPTIONS = {
    "report": True,
    "test_fraction": 0.2,
    "validation_fraction": 0.1,
    "keep_negatives": 0.7,
    "seed": 3,
}


def table(rows=600):
    draw = np.random.default_rng(0)
    tags = [[f"tag {n}" for n in draw.geometric(0.1, k)] for k in draw.integers(0, 7, rows)]
    seen = [draw.integers(-20, 20, k).tolist() for k in draw.integers(0, 6, rows)]
    return pa.table(
        {
            "y": draw.choice(["ja", "nein", "kaum"], rows),
            "x": draw.normal(3, 1e6, rows),
            "n": draw.integers(-5, 1000, rows),
            "q": draw.choice([0.0, 0.1, -7.5, 3e5], rows),
            "c": pa.array([f"wört {n}" for n in draw.geometric(0.02, rows)]).dictionary_encode(),
            "i": pa.array(draw.integers(-50, 50, rows), mask=draw.random(rows) < 0.1),
            "j": draw.integers(-(1 << 62), 1 << 62, rows),
            "w": draw.random(rows).astype(np.float32),
            "t": draw.integers(0, 1 << 40, rows),
            "tags": pa.array(tags, mask=draw.random(rows) < 0.1),
            "seen": pa.array(seen, pa.large_list(pa.int32())),
            "seen for": [draw.normal(0, 9, len(row)).tolist() for row in seen],
        }
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The dataset of one file of one row group, in one task."""
    folder = tmp_path_factory.mktemp("whole")
    pq.write_table(table(), folder / "a.parquet")
    prepare(SCHEMA, [folder / "a.parquet"], folder / "d", **OPTIONS)
    return contents(folder / "d")


@pytest.mark.parametrize(
    ("rows_of_group", "split_bytes", "cores", "memory"),
    [(9, 4000, None, None), (50, 300, 1, 128_000_000), (100, None, 3, None)],
)
def test_files_parts_cores_and_memory_change_nothing(
    whole, tmp_path, rows_of_group, split_bytes, cores, memory
):
    rows, cuts, folder = table(), [0, 1, 1, 250, 600], tmp_path / "rows"
    folder.mkdir()
    for i, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        part = rows.slice(begin, end - begin)
        pq.write_table(part, folder / f"{i}.parquet", row_group_size=rows_of_group)
    start = nullcontext() if cores is None else local_engine(cores, tmp_path, memory)
    with start as engine:
        prepare(SCHEMA, [folder], tmp_path / "d", engine, split_bytes=split_bytes, **OPTIONS)
    assert contents(tmp_path / "d") == whole


WIDE = "-" * 3200  # of a column that no field reads, so that 3,200 rows have 10 MB
RESUMED = [  # cores, --split_bytes and memory of the killed run, and of the one that resumes
    ((2, None, 1 << 28), (8, None, 1 << 27)),
    ((4, None, 1 << 27), (3, None, 1 << 28)),
    ((2, 3_000_000, 1 << 28), (2, 400_000, 1 << 27)),
]


def write_csv(draw, folder):
    rows = (f"{i % 2},{i},{draw.randrange(40)},{WIDE}\n" for i in range(3200))
    (folder / "a.csv").write_text("y,x,c,wide\n" + "".join(rows))


def write_json(draw, folder):
    rows = ({"y": i % 2, "x": i, "c": draw.randrange(40), "wide": WIDE} for i in range(3200))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_small_files(draw, folder):
    for file in range(64):
        rows = {"y": [0, 1] * 25, "x": range(50), "c": [draw.randrange(40) for _ in range(50)]}
        rows["wide"] = [draw.randbytes(len(WIDE)) for _ in range(50)]  # which do not compress
        pq.write_table(pa.table(rows), folder / f"{file:02}.parquet")


@pytest.mark.parametrize("write", [write_csv, write_json, write_small_files])
def test_resumed_with_other_cores_memory_or_split_bytes_it_loses_and_doubles_no_row(
    write, tmp_path
):
    """The parts of the input depend on both."""
    schema = {"label": "y", "numerical": ["x"], "categorical": [{"column": "c", "type": "integer"}]}
    source = tmp_path / "source"
    source.mkdir()
    write(random.Random(0), source)
    prepare(schema, [source], tmp_path / "whole", test_fraction=0.2)
    whole = contents(tmp_path / "whole")
    assert len(whole["train/label.bin"]) + len(whole["test/label.bin"]) == 3200
    for number, ways in enumerate(RESUMED):
        stages = (killed_at(("count.done", "written.done")[number % 2]), nullcontext())
        for killed, (cores, split_bytes, memory) in zip(stages, ways, strict=True):
            engine, options = Inline(cores, memory), {"split_bytes": split_bytes}
            with killed:
                prepare(
                    schema, [source], tmp_path / f"{number}", engine, test_fraction=0.2, **options
                )
        assert contents(tmp_path / f"{number}") == whole, ways


def test_another_schema_or_input_is_named_and_not_mixed(whole, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path)
    with killed_at("lookups.done"):
        prepare(SCHEMA, [path], tmp_path / "d", **OPTIONS)
    other = SCHEMA | {"numerical": ["x"]}
    with pytest.raises(
        ValueError, match=r"other settings: --schema numerical was .* is \['x'\]\. "
    ):
        prepare(other, [path], tmp_path / "d", **OPTIONS)
    pq.write_table(table().slice(1), path)
    with pytest.raises(ValueError, match=r"other settings: .*a\.parquet was of \d+ bytes"):
        prepare(SCHEMA, [path], tmp_path / "d", **OPTIONS)
    pq.write_table(table(), path)
    prepare(SCHEMA, [path], tmp_path / "d", restart=True, **OPTIONS)
    assert contents(tmp_path / "d") == whole


@pytest.mark.parametrize(("share", "rows"), [(0.29, 29), (0.57, 57), (0.585, 58)])
def test_a_share_of_the_rows_is_rounded(tmp_path, share, rows):
    pq.write_table(pa.table({"y": [0, 1] * 50, "x": range(100)}), tmp_path / "a.parquet")
    schema = {"label": "y", "numerical": ["x"]}
    prepare(schema, [tmp_path / "a.parquet"], tmp_path / "d", test_fraction=share)
    assert (tmp_path / "d" / "test" / "label.bin").stat().st_size == rows


def test_combinations_of_one_text_are_two_values(tmp_path):
    """Of equal counts and texts, the order is that of hashes."""
    pairs = [("a", "b & c"), ("a & b", "c"), ("a", "b & c"), ("a & b", "c"), ("z", "z")]
    rows = [{"y": i % 2, "a": a, "b": b} for i, (a, b) in enumerate(pairs)]
    schema = {"label": "y", "categorical": ["a", "b"]}
    schema["crosses"] = [{"fields": ["a", "b"], "frequency_limit": 1}]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=1)
    prepare(schema, [tmp_path / "a.parquet"], tmp_path / "d", split_bytes=1)
    expected = Oracle(schema, rows, {}).files
    assert contents(tmp_path / "d" / "train", ".bin") == {
        name.removeprefix("train/"): data for name, data in expected.items() if "train/" in name
    }

"""A table in memory becomes the same dataset as its rows in a Parquet file."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_engine import InlineEngine
from tables_testing import contents, prepare

import dlrm
from dlrm.data.schema.schema import Schema
from dlrm.data.tables.frames import GROUP_ROWS, open_frame
from dlrm.preproc.duckdb_engine import thread_engine

ROWS = GROUP_ROWS + 5000  # two row groups
SCHEMA = {
    "label": {"column": "bought", "positive": "yes"},
    "numerical": ["price", {"column": "visits", "transform": "log"}],
    "categorical": ["shop", {"column": "user", "type": "integer", "frequency_limit": 2}],
}


def table(rows: int = ROWS) -> pa.Table:
    draw = np.random.default_rng(1)
    shops = np.array([f"s{i}" for i in range(300)])
    columns = {
        "bought": np.where(draw.random(rows) < 0.3, "yes", "no"),
        "unused": [[1]] * rows,
        "price": pa.array(draw.normal(5, 2, rows), mask=draw.random(rows) < 0.1),
        "visits": draw.integers(0, 50, rows),
        "shop": pa.array(shops[draw.integers(0, 300, rows)], mask=draw.random(rows) < 0.1),
        "user": draw.integers(-50, 5000, rows),
    }
    return pa.table(columns)


def of_pandas(rows: pa.Table):
    pandas = pytest.importorskip("pandas")
    columns = {name: rows[name].to_pandas() for name in rows.column_names}
    columns["shop"] = pandas.Categorical(columns["shop"])
    return pandas.DataFrame(columns)


def polars_categorical(rows: pa.Table):
    polars = pytest.importorskip("polars")
    return polars.from_arrow(rows).with_columns(polars.col("shop").cast(polars.Categorical))


KINDS = {
    "pyarrow": lambda rows: rows,
    "stream": lambda rows: rows.to_reader(1000),
    "polars": lambda rows: pytest.importorskip("polars").from_arrow(rows),
    "polars_categorical": polars_categorical,
    "pandas": of_pandas,
    "duckdb": lambda rows: pytest.importorskip("duckdb").arrow(rows),
}


@pytest.fixture(scope="module")
def of_parquet(tmp_path_factory):
    """Returns the files of the dataset that another engine writes from Parquet."""
    folder = tmp_path_factory.mktemp("parquet")
    pq.write_table(table(), folder / "rows.parquet", row_group_size=7777)
    options = {"test_fraction": 0.2}
    prepare(SCHEMA, [folder / "rows.parquet"], folder / "dataset", InlineEngine(), **options)
    return fitted_files(folder / "dataset")


def fitted_files(dataset):
    suffixes = (".bin", ".npy", "transform.json")
    return {k: v for suffix in suffixes for k, v in contents(dataset, suffix).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_in_memory_becomes_the_bytes_of_its_parquet_file(kind, of_parquet, tmp_path):
    frame = KINDS[kind](table())
    dataset = dlrm.Dataset.from_arrow(frame, SCHEMA, tmp_path / "dataset")
    found = fitted_files(dataset.path)
    assert found.keys() == of_parquet.keys()
    assert [name for name in found if found[name] != of_parquet[name]] == []
    test = ROWS // 5
    assert dataset.rows == {"train": ROWS - test, "test": test}
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]


def test_nan_is_missing_in_pandas_and_refused_elsewhere():
    values = [1.0, float("nan"), 3.0]
    assert open_frame(pa.table({"x": values}), ["x"]).read_all()["x"].null_count == 0
    frame = pa.table({"bought": ["yes", "no", "yes"], "price": values})
    schema = {"label": SCHEMA["label"], "numerical": ["price"]}
    with pytest.raises(ValueError, match=r"^frame, row 1, column price: expected a finite number"):
        dlrm.Dataset.from_arrow(frame, schema)
    taken = {**schema, "missing_values": ["nan"]}
    assert dlrm.Dataset.from_arrow(frame, taken, test_fraction=0.4).rows == {"train": 2, "test": 1}
    pandas = pytest.importorskip("pandas")
    columns = {
        "x": values,
        "t": [None, "a", float("nan")],
        "d": pandas.to_datetime(["2026", None, None]),
    }
    read = open_frame(pandas.DataFrame(columns), ["x", "t", "d"]).read_all()
    assert [read[name].null_count for name in ("x", "t", "d")] == [1, 2, 2]


def test_a_bad_value_is_named_by_its_row_of_the_table_and_leaves_nothing(tmp_path):
    rows = table()
    texts = rows["price"].cast(pa.string()).to_pylist()
    texts[GROUP_ROWS + 3] = "dear"
    rows = rows.set_column(2, "price", pa.array(texts))
    wrong = rf"^frame, row {GROUP_ROWS + 3}, column price: expected a number, got 'dear'; bad_"
    with pytest.raises(ValueError, match=wrong):
        dlrm.Dataset.from_arrow(rows, SCHEMA, tmp_path / "dataset")
    assert not list(tmp_path.iterdir())
    dataset = dlrm.Dataset.from_arrow(
        rows, SCHEMA, tmp_path / "dataset", bad_lines="quarantine", max_bad_lines=0.5
    )
    assert sum(dataset.rows.values()) == ROWS - 1
    (listed,) = (dataset.path / "quarantine").iterdir()
    assert listed.read_text().startswith(f"frame, row {GROUP_ROWS + 3}\tcolumn price: ")


REFUSED = {
    "missing": (lambda t: t.drop_columns("shop"), "frame: no column 'shop'; the columns are b"),
    "twice": (lambda t: t.append_column("shop", t["user"]), "frame: two columns are called 'shop'"),
    "list": (
        lambda t: t.set_column(2, "price", t["unused"]),
        "frame: column 'price': expected numbers, got the type large_list",
    ),
    "empty": (lambda t: t.slice(0, 0), "frame: expected rows, got none"),
    "label": (
        lambda t: t.set_column(0, "bought", pa.array(["maybe"] * t.num_rows)),
        "frame: column bought: no row has the label 'yes'; found 'maybe'",
    ),
    "no table": (lambda t: [1, 2], "frame: expected a table of Arrow, .* got list"),
    "a column": (lambda t: t["user"], "frame: expected a table of columns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tables_that_do_not_fit_the_schema_are_named(case, tmp_path):
    change, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        dlrm.Dataset.from_arrow(change(table(50)), SCHEMA, tmp_path / "dataset")
    assert not list(tmp_path.iterdir())


def test_splits_may_be_tables_of_their_own(tmp_path):
    rows = table(300)
    dataset = dlrm.Dataset.from_arrow(
        rows.slice(0, 200), SCHEMA, test=rows.slice(200, 70), validation=rows.slice(270)
    )
    assert dataset.rows == {"train": 200, "test": 70, "validation": 30}
    with pytest.raises(ValueError, match="^test frame: no column 'shop'"):
        dlrm.Dataset.from_arrow(rows, SCHEMA, test=rows.drop_columns("shop"))
    with pytest.raises(ValueError, match="^test_fraction: expected no test and validation beside"):
        dlrm.Dataset.from_arrow(rows, SCHEMA, test=rows, test_fraction=0.2)


KILLED = """
import os, signal
from dlrm.api.temporary import temporary_directory
made = temporary_directory()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path, monkeypatch):
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", KILLED], env=variables, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = list(tmp_path.glob("*/process-*"))
    assert len(left) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dataset = dlrm.Dataset.from_arrow(table(50), SCHEMA)
    assert dataset.path.is_dir()
    assert not left[0].exists()
    assert (dataset.path.parents[2].stat().st_mode & 0o777) == 0o700


def test_a_temporary_dataset_goes_with_its_object():
    dataset = dlrm.Dataset.from_arrow(table(50), SCHEMA)
    path = dataset.path
    assert repr(dlrm.Dataset(path)) == f"Dataset({str(path)!r}; rows: train 40, test 10)"
    del dataset
    gc.collect()
    assert not path.parent.exists()
    with pytest.raises(FileNotFoundError, match="no dataset here"):
        dlrm.Dataset(path)


def test_arguments_that_do_not_exist_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"from_arrow\(\): got 'fraction'; did .* 'test_fraction'"):
        dlrm.Dataset.from_arrow(table(50), SCHEMA, fraction=0.3)
    with pytest.raises(TypeError, match=r"got 'z'; .*help\(Dataset.from_arrow\) has"):
        dlrm.Dataset.from_arrow(table(50), SCHEMA, z=0.3)
    with pytest.raises(ValueError, match="schema: expected a Schema, the path of one or a dict"):
        dlrm.Dataset.from_arrow(table(50), 3)
    path = tmp_path / "schema.yaml"
    Schema.from_dict(SCHEMA).save(path)
    assert dlrm.Dataset.from_arrow(table(50), path, test_fraction=0.5).rows["test"] == 25


def test_threads_stop_at_the_first_error():
    def task(item):
        if item == 1:
            raise OSError("no space left")
        time.sleep(0.005)
        done.append(item)

    done: list[int] = []
    with pytest.raises(RuntimeError, match="no space left"), thread_engine(1) as engine:
        list(engine.map(task, [0, 1, *range(2, 200)]))
    assert 0 in done
    assert len(done) < 199


def test_a_task_that_python_fails_to_parse_in_threads_is_called_again():
    def task(item):
        called.append(item)
        if called.count(item) < 3:
            raise SystemError("AST constructor recursion depth mismatch")

    called: list[int] = []
    with thread_engine(2) as engine:
        list(engine.map(task, [0, 1]))
    assert sorted(called) == [0, 0, 0, 1, 1, 1]


def test_neither_torch_nor_packages_of_tables_are_imported(root):
    code = (
        "import pyarrow as pa, sys, dlrm\n"
        "rows = pa.table({'y': [0, 1] * 20, 'x': [1.0, 2.0] * 20})\n"
        "dlrm.Dataset.from_arrow(rows, {'label': 'y', 'numerical': ['x']}, cores=2)\n"
        "assert not {'torch', 'polars'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)

"""Spark tables and queries give the same dataset as files, and are in its manifest."""

from contextlib import nullcontext
from pathlib import Path

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables_testing import contents

from dlrm.data.schema.schema import Schema
from dlrm.data.tables.files import find_tables
from dlrm.documents import read_json
from dlrm.preproc.errors import EngineError
from dlrm.preproc.spark.query import SparkQuery, _version
from dlrm.preproc.splits import SplitConfig
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables

ROWS = 3000
SCHEMA = {
    "label": {"column": "y", "positive": "yes"},
    "numerical": ["x", {"column": "price", "transform": "log"}],
    "categorical": ["kind", {"column": "user id", "type": "integer"}],
    "time": {"column": "at"},
}
OPTIONS = TableOptions(Schema.from_dict(SCHEMA), SplitConfig(test_fraction=0.2), report=False)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    random = np.random.default_rng(0)
    moments = pa.array(np.arange(ROWS) * 1_234_567_891).cast(pa.timestamp("us", "UTC"))
    prices = pa.array((random.random(ROWS) * 100).round(2)).cast(pa.decimal128(9, 2), safe=False)
    columns = {
        "n": pa.array(np.arange(ROWS)),
        "y": pa.array(np.where(random.random(ROWS) < 0.3, "yes", "no")),
        "x": pa.array(random.normal(size=ROWS), mask=random.random(ROWS) < 0.1),
        "price": prices,
        "kind": pa.array(np.array([" a", "b", "ünï"])[random.integers(0, 3, ROWS)]),
        "user id": pa.array(random.integers(0, 50, ROWS)),
        "at": moments,
    }
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def prepare(engine, output, tables, query=None):
    return prepare_tables(
        OPTIONS,
        tables,
        output,
        lambda spill: nullcontext(engine),
        say=lambda line: None,
        query=query,
    )


@pytest.mark.parametrize("partitions", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_table_gives_the_bytes_of_its_files(spark, parquet, tmp_path, partitions):
    session = spark.session
    frame = session.read.parquet(str(parquet))
    if partitions > 1:
        frame = frame.repartitionByRange(partitions, "n").sortWithinPartitions("n")
    frame.createOrReplaceTempView("sales")
    prepare(spark, tmp_path / "files", {"train": find_tables([parquet])})
    prepare(spark, tmp_path / "table", {}, SparkQuery("sales"))
    expected, found = (contents(tmp_path / name) for name in ("files", "table"))
    del expected["manifest.json"], found["manifest.json"]
    assert len(expected) > 10
    assert found == expected
    facts = read_json(tmp_path / "table" / "manifest.json")["transform"]["spark"]
    assert facts == {"--spark_table": "sales", "partitions": partitions, "spark": session.version}


@pytest.mark.slow
def test_rows_of_spark_get_the_scores_of_their_file(java, local, parquet, tmp_path):
    pytest.importorskip("pyspark")
    prepare(local, tmp_path / "dataset", {"train": find_tables([parquet])})
    model = ["--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=8,1"]
    run = ["--max_steps=20", "--batch_size=64", "--warmup_steps=0", "--decay_steps=0", "--lr=0.1"]
    run += ["--dataset=dataset", "--base_device=cpu", "--save_checkpoint_path=run"]
    forked.succeed("dlrm.scripts.main", *model, *run, cwd=tmp_path)

    def predict(source, name):
        flags = ["--checkpoint=run", f"--output={name}.npy", "--memory_gib=1", source]
        return forked.run("dlrm.scripts.predict", *flags, cwd=tmp_path)

    here = f"parquet.`{parquet}`"
    for name, source in (("file", f"--input={parquet}"), ("query", f"--spark_sql=FROM {here}")):
        done = predict(source, name)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "auc 0." in done.stdout
    scores = [np.load(tmp_path / f"{name}.npy").tolist() for name in ("file", "query")]
    assert len(scores[0]) == ROWS
    assert scores[0] == scores[1]
    query = f"SELECT * EXCEPT (x, y), IF(n = 7, 'old', STRING(x)) x FROM {here} ORDER BY n"
    done = predict(f"--spark_sql={query}", "none")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --spark_sql {query}: rows.parquet, row group")
    assert done.stderr.endswith(", row group 0, row 7, column x: expected a number, got 'old'\n")
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("spark-")}
    assert left - {"log.json"} == {"dataset", "run", "spark.log", "file.npy", "query.npy"}


def test_what_spark_cannot_read_is_said_in_a_line(spark, parquet, tmp_path):
    spark.session.read.parquet(str(parquet)).createOrReplaceTempView("sales")
    cases = {
        SparkQuery("nothing"): (ValueError, r"--spark_table nothing: .*`nothing` cannot be found"),
        SparkQuery(sql="selec 1"): (ValueError, r"--spark_sql selec 1: .*Syntax error at or near"),
        SparkQuery(sql="SELECT x FROM sales"): (ValueError, "no column 'y'; the columns are x$"),
        SparkQuery(sql="SELECT *, 1 x FROM sales"): (ValueError, "two columns are called 'x'"),
        SparkQuery(sql="SELECT * FROM sales WHERE n < 0"): (ValueError, "expected rows, got none"),
        SparkQuery(sql="SELECT *, raise_error('no') y FROM (SELECT * EXCEPT (y) FROM sales)"): (
            EngineError,
            r"Spark failed: \[USER_RAISED_EXCEPTION\] no",
        ),
    }
    for number, (query, (kind, message)) in enumerate(cases.items()):
        with pytest.raises(kind, match=message) as raised:
            prepare(spark, tmp_path / str(number), {}, query)
        assert "\n" not in str(raised.value)
        assert query.flag in str(raised.value)


class Lake:
    """A session that answers the documented queries for one table of a lake."""

    version = "4.0.0"

    def __init__(self, provider, newest, rows):
        self.answers = {
            "DESCRIBE TABLE EXTENDED lake.sales": [{"col_name": "Provider", "data_type": provider}],
            newest: rows,
        }

    def sql(self, query):
        return type("Frame", (), {"collect": lambda _: self.answers[query]})()


@pytest.mark.parametrize(
    ("provider", "newest"),
    [
        (
            "iceberg",
            "SELECT snapshot_id FROM lake.sales.snapshots ORDER BY committed_at DESC LIMIT 1",
        ),
        ("delta", "SELECT version FROM (DESCRIBE HISTORY lake.sales LIMIT 1)"),
    ],
)
def test_the_snapshot_of_a_lake_is_asked_for(provider, newest):
    assert _version(Lake(provider, newest, [(17,)]), "lake.sales") == 17
    assert _version(Lake(provider, newest, []), "lake.sales") is None
    assert _version(Lake("parquet", newest, [(17,)]), "lake.sales") is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--spark_table=a", "--engine=local"], "--spark_table a: expected --engine spark, got lo"),
        (["--spark_table=a", "--spark_sql=b"], "--spark_sql: expected one of the two"),
        (
            ["--spark_sql=b", "--engine=spark", "--input=c"],
            "--input: expected no --spark_sql b bes",
        ),
        ([], "--input: expected a file or a folder, got none"),
    ],
)
def test_one_source_of_rows_is_asked_for(tmp_path, flags, expected):
    Path(tmp_path, "s.yaml").write_text(OPTIONS.schema.text())
    arguments = ["--schema=s.yaml", "--output=out", *flags]
    done = forked.run("dlrm.scripts.prepare", *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert expected in done.stderr

"""Spark's settings, sums, errors and signals."""

import os
import signal
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from tables_testing import contents, prepare, write_table

from dlrm.command_line import Terminated, terminable
from dlrm.preproc.engine import COUNTS
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.options import IncrementConfig
from dlrm.preproc.spark.engine import SparkEngine
from dlrm.preproc.spark.session import configuration, open_engine

pytestmark = pytest.mark.long


@pytest.mark.parametrize("master", [None, "yarn", "k8s://https://host:6443"])
def test_clusters_of_others_keep_their_java_options(master):
    ours = configuration(master, 4, "/code")
    assert not any("defaultJavaOptions" in name for name in ours)
    assert ours["spark.executor.memory"] == "2g"


def test_a_running_spark_is_used_and_left(spark, tmp_path):
    said = []
    (tmp_path / "out.unfinished").mkdir()
    how = tmp_path, None, None, tmp_path / "out", said.append
    with open_engine("spark", 7, *how) as engine:
        assert engine.cores == spark.cores == 2
        assert engine.session.sparkContext is spark.session.sparkContext
    assert said[0].startswith(
        "note: uses the Spark session of this process (local[2]), so --master"
    )
    assert said[1] == f"Spark UI: {spark.session.sparkContext.uiWebUrl}"
    assert [path.name for path in tmp_path.rglob("*")] == ["out.unfinished"]
    assert list(spark.map(str, range(3))) == ["0", "1", "2"]


def test_tasks_have_the_umask_of_the_command(spark, tmp_path):
    before = os.umask(0o007)
    try:
        engine = SparkEngine(spark.session)
    finally:
        os.umask(before)
    list(engine.map(lambda item: (tmp_path / str(item)).touch(), range(4)))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o660}


def test_two_texts_with_one_hash_are_refused(spark):
    def counted(part):
        yield pa.record_batch([[0, 0], [7, 8], [part, b"same"], [1, 1]], schema=COUNTS)

    with pytest.raises(TaskError, match="texts b'a' and b'b' have the same 64-bit hash"):
        list(spark.counts([b"a", b"b"], counted, [2], True, print))
    assert len(list(spark.counts([b"a", b"a"], counted, [2], True, print))) > 0


def test_an_error_is_said_in_a_line(spark):
    def broken(item):
        raise RuntimeError(f"no item {item}")

    with pytest.raises(EngineError) as raised:
        list(spark.map(broken, [7]))
    assert str(raised.value) == "Spark failed: RuntimeError: no item 7"


def test_a_signal_ends_a_stage_and_the_next_one_runs(spark, tmp_path):
    begun, end = tmp_path / "begun", tmp_path / "end"
    task = f"touch {begun}; until [ -e {end} ]; do sleep 0.1; done"

    def stop():
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with terminable(), pytest.raises(Terminated):
        list(spark.map(os.system, [task]))
    end.touch()  # the stage has ended before its task may
    assert list(spark.map(str, [7])) == ["7"]


SCHEMA = {
    "label": "y",
    "numerical": ["x"],
    "categorical": [
        {"column": "tags", "max_length": 3, "weights": "w"},
        {"column": "c", "dictionary": "names"},
        {"column": "d", "dictionary": "names"},
        {"column": "items", "type": "integer", "max_length": 4, "pooling": "mean"},
    ],
    "crosses": [{"fields": ["c", "d"], "frequency_limit": 1}],
}


def rows(day):
    """Returns 900 rows, of which many lists are empty."""
    random = np.random.default_rng(day)
    lengths = random.integers(0, 4, 900).tolist()
    return {
        "y": (random.random(900) < 0.3).tolist(),
        "x": random.normal(size=900).tolist(),
        "tags": [[f"t{i}" for i in random.integers(day, day + 40, n)] for n in lengths],
        "w": [random.normal(size=n).tolist() for n in lengths],
        "c": [f"v{i}" for i in random.integers(day, day + 30, 900)],
        "d": [f"v{i}" for i in random.integers(day, day + 50, 900)],
        "items": [random.integers(0, 9, n).tolist() for n in reversed(lengths)],
    }


def test_lists_crosses_and_later_days_have_the_bytes_of_the_local_engine(spark, local, tmp_path):
    for day in (1, 2):
        write_table(rows(day), tmp_path / f"{day}.parquet", 70)
    how = {"test_fraction": 0.2, "split_bytes": 4096, "report": True}
    for name, engine in (("local", local), ("spark", spark)):
        prepare(SCHEMA, [tmp_path / "1.parquet"], tmp_path / name / "1", engine, **how)
        later = how | {"increment": IncrementConfig(extend=tmp_path / name / "1")}
        prepare(SCHEMA, [tmp_path / "2.parquet"], tmp_path / name / "2", engine, **later)
    made = [contents(tmp_path / name) for name in ("local", "spark")]
    for files in made:
        assert files.pop("1/.verified.json")  # which has times
    assert len(made[0]) > 60
    assert made[1] == made[0]

"""A program's session of Spark, also of Spark Connect, gives the bytes of `dlrm prepare`."""

import os
import re
import socket
import subprocess
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_engine import InlineEngine
from preproc_testing import node_environment, package_archive
from tables_testing import contents

import dlrm.preproc
from dlrm.api import spark_session
from dlrm.data.tables.files import find_tables
from dlrm.preproc.spark import session as spark_sessions
from dlrm.preproc.splits import SplitConfig
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables
from dlrm.remote.objects import open_store
from dlrm.remote.publish import RUN

pytestmark = pytest.mark.slow
ROWS = 3000
SCHEMA = {
    "label": {"column": "y", "positive": "yes"},
    "numerical": ["x"],
    "categorical": ["kind", {"column": "user id", "type": "integer"}],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    random = np.random.default_rng(0)
    columns = {
        "n": np.arange(ROWS),
        "y": np.where(random.random(ROWS) < 0.3, "yes", "no"),
        "x": random.normal(size=ROWS),
        "kind": np.array(["a", "b", "ünï"])[random.integers(0, 3, ROWS)],
        "user id": random.integers(0, 50, ROWS),
    }
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=1000)
    return path


@pytest.fixture(scope="module")
def expected(rows, tmp_path_factory):
    """Returns the files of a dataset that `dlrm prepare` makes of the table."""
    path = tmp_path_factory.mktemp("expected") / "dataset"
    options = TableOptions(dlrm.Schema.from_dict(SCHEMA), SplitConfig(test_fraction=0.2))
    tables = {"train": find_tables([rows])}
    engine = nullcontext(InlineEngine())
    prepare_tables(options, tables, path, lambda spill: engine, say=lambda line: None)
    return files_of(path)


def files_of(dataset):
    """Returns the contents of a dataset except for facts about its source, such as its name."""
    left_out = ("manifest.json", "report.json", "report.html")
    return {name: data for name, data in contents(dataset).items() if name not in left_out}


def sorted_frame(session, rows):
    frame = session.read.parquet(str(rows))
    return frame.repartitionByRange(3, "n").sortWithinPartitions("n")


def test_a_data_frame_of_a_notebook_gives_the_bytes_of_its_file(
    spark, rows, expected, tmp_path, capfd
):
    session = spark.session.newSession()
    session.conf.set("spark.sql.adaptive.enabled", "true")
    frame = sorted_frame(session, rows)
    dataset = dlrm.preproc.run(session, SCHEMA, frame, tmp_path / "dataset")
    assert capfd.readouterr().out == ""
    assert dataset.rows == {"train": 2400, "test": 600}
    assert files_of(dataset.path) == expected
    assert session.range(3).count() == 3, "the session is left"
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_session_writes_to_a_uri(spark, rows, expected, store_uri, monkeypatch, is_shared):
    if not is_shared:  # as if executors were elsewhere
        for module in (spark_sessions, spark_session):
            monkeypatch.setattr(module, "shares_folders", lambda session: False)
    session = spark.session.newSession()
    where = store_uri.below("rows.parquet")
    open_store(where).write(where.key, rows)
    for name, source in (("file", str(where)), ("frame", sorted_frame(session, rows))):
        uri = str(store_uri.below(name))
        dataset = dlrm.preproc.run(session, SCHEMA, source, uri)
        assert dataset.rows == {"train": 2400, "test": 600}
        assert files_of(dataset.path) == expected
        keys = [entry.key for entry in open_store(where).entries(f"{name}/")]
        assert not any(RUN in key for key in keys)


def test_what_a_session_cannot_read_is_said_in_words_of_python(spark, rows, tmp_path):
    session = spark.session.newSession()
    session.read.parquet(str(rows)).createOrReplaceTempView("sales")
    frame = session.table("sales")
    cases = [
        ("nothing", ValueError, r"source=nothing: .*`nothing` cannot be found"),
        ("no/at.csv", FileNotFoundError, r"no/at.csv: no such file or directory \(source\)"),
        ([3], ValueError, "source: expected a data frame of Spark, the name of a table, or paths"),
        (frame.select("x"), ValueError, "source: no column 'y'; the columns are x$"),
        (frame.where("n < 0"), ValueError, "source: expected rows, got none"),
        (frame.selectExpr("y", "x", "kind", "'q' `user id`"), ValueError, "column user id: .*'q'"),
    ]
    for source, kind, message in cases:
        with pytest.raises(kind, match=message):
            dlrm.preproc.run(session, SCHEMA, source, tmp_path / "dataset")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match=r"got 'test_fracton'; did you mean 'test_fraction'"):
        dlrm.preproc.run(session, SCHEMA, frame, tmp_path / "dataset", test_fracton=1)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="; overwrite=True replaces it"):
        dlrm.preproc.run(session, SCHEMA, frame, tmp_path)


class Server:
    """A server of Spark Connect, whose executors have a Python without this package."""

    def __init__(self, folder, endpoint):
        import pyspark

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": self.port,
            "spark.driver.host": "127.0.0.1",
            "spark.sql.adaptive.enabled": "true",
            "spark.ui.enabled": "false",
        }
        submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        words = [submit, "--master=local[2]", f"--class={server}"]
        words += [f"--conf={name}={value}" for name, value in settings.items()]
        python = node_environment(folder / "environment")
        self.log = folder / "server.log"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= endpoint.environment
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*words, "spark-internal"],
                cwd=folder,
                env=environment | {"PYSPARK_PYTHON": str(python)},
                stdout=log,
                stderr=log,
            )
        for _ in range(900):
            if "Spark Connect server started" in self.log.read_text():
                return
            time.sleep(0.2)
        pytest.fail(self.log.read_text()[-2000:])

    @contextmanager
    def session(self):
        """Yields a new session, in this process beside one with a JVM."""
        from pyspark.sql.connect.session import SparkSession

        session = SparkSession.builder.remote(f"sc://127.0.0.1:{self.port}").create()
        try:
            yield session
        finally:
            session.stop()  # which would wait long for a server that has ended


@pytest.fixture(scope="module")
def server(java, storage, tmp_path_factory):
    for name in ("pyspark", "grpc_status", "google.rpc", "zstandard"):
        pytest.importorskip(name)
    server = Server(tmp_path_factory.mktemp("server"), storage)
    yield server
    server.process.terminate()
    server.process.wait(60)


@pytest.fixture(scope="module")
def remote(server, tmp_path_factory):
    """A session that has sent the package to its executors."""
    with server.session() as session:
        archive = package_archive(tmp_path_factory.mktemp("package"))
        session.addArtifacts(str(archive), pyfile=True)
        yield session


@pytest.mark.slow
def test_a_remote_session_gives_the_same_bytes(remote, rows, expected, tmp_path):
    sorted_frame(remote, rows).createOrReplaceTempView("sales")
    for name, source in (("frame", remote.table("sales")), ("table", "sales"), ("file", rows)):
        dataset = dlrm.preproc.run(remote, SCHEMA, source, tmp_path / name)
        assert files_of(dataset.path) == expected, name


@pytest.mark.slow
def test_a_remote_session_goes_through_a_store(remote, rows, expected, store_uri, tmp_path):
    frame, uri = sorted_frame(remote, rows), str(store_uri.below("out"))
    dataset = dlrm.preproc.run(remote, SCHEMA, frame, uri)
    assert not (tmp_path / "cache/dlrm/remote/views").exists(), "a copy is made when needed"
    assert files_of(dataset.path) == expected
    where = store_uri.below("rows.parquet")
    open_store(where).write(where.key, rows)
    uri = str(store_uri.below("file"))
    assert files_of(dlrm.preproc.run(remote, SCHEMA, str(where), uri).path) == expected
    uri = str(store_uri.below("bad"))
    with pytest.raises(ValueError, match=f"source={rows}: expected a URI, as executors have no"):
        dlrm.preproc.run(remote, SCHEMA, rows, uri)
    bad = frame.selectExpr("y", "x", "kind", "IF(n=7, 'q', '1') `user id`")
    with pytest.raises(ValueError, match=r"row group 0, row 7, column user id: .*got 'q'"):
        dlrm.preproc.run(remote, SCHEMA, bad, uri)


@pytest.mark.slow
def test_a_row_that_fails_in_a_remote_session_is_said(remote, rows, tmp_path, capfd):
    frame = sorted_frame(remote, rows).selectExpr("y", "x", "kind", "IF(n=7, 'q', '1') `user id`")
    with pytest.raises(ValueError, match=r"row group 0, row 7, column user id: .*got 'q'"):
        dlrm.preproc.run(remote, SCHEMA, frame, tmp_path / "dataset")
    with pytest.raises(ValueError, match=r"source=nothing: .*`nothing` cannot be found"):
        dlrm.preproc.run(remote, SCHEMA, "nothing", tmp_path / "dataset")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_remote_session_without_the_package_is_told_how_to_send_it(server, rows, tmp_path):
    with server.session() as session, pytest.raises(RuntimeError) as raised:
        dlrm.preproc.run(session, SCHEMA, rows, tmp_path / "dataset")
    said = r"the executor on host \S+ \(\S+/environment/bin/python\) has no module 'dlrm'; "
    assert re.match(said + r".*spark\.addArtifacts", str(raised.value))

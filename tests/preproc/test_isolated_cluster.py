"""A cluster of Spark whose nodes share no folder writes the bytes of a local run, also after kills.

`benchmarks/cluster.py` starts it, and repeats the kills at random times.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.documents import read_json
from dlrm.files import MANIFEST
from dlrm.remote.publish import RUN, find_published
from dlrm.remote.store import open_store
from dlrm.remote.uri import Uri

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cluster as nodes  # noqa: E402
from s3_server import Endpoint  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROWS = 100_000
SPLITS = ["--schema=criteo", "--split_bytes=400000", "--overwrite"]
SQL = """SELECT cast(id % 3 = 0 as int) y, id / 2 x, concat('k', id * id % {}) kind
    FROM range(0, 100000, 1, 16)"""
SESSION = """
import dlrm.preproc, sys
from pyspark.sql import SparkSession
master, output, sql, *settings = sys.argv[1:]
builder = SparkSession.builder.master(master)
for setting in settings:
    builder = builder.config(*setting.split("=", 1))
spark = builder.getOrCreate()
schema = {"label": "y", "numerical": ["x"], "categorical": ["kind"]}
dlrm.preproc.run(spark, schema, spark.sql(sql), output, report=False)
spark.stop()
"""


@pytest.fixture(scope="module")
def folder(java, tmp_path_factory):
    pytest.importorskip("pyspark")
    if reason := nodes.why_not():
        pytest.skip(reason)
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def raw(folder):
    return nodes.make_logs(ROWS, folder / "raw")


@pytest.fixture(scope="module")
def expected(folder, raw):
    where = [f"--input={raw}", f"--output={folder / 'out'}"]
    nodes.timed(nodes.prepare(*SPLITS, "--engine=local", *where, folder=folder / "local"))
    return (folder / "out/binary_dataset" / MANIFEST).read_bytes()


@pytest.fixture(scope="module")
def endpoint(folder, raw):
    with Endpoint(folder / "objects", keep=True) as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in endpoint.environment.items():
            patch.setenv(name, value)
        endpoint.make("bucket")
        nodes.put(raw, "s3://bucket/raw")
        yield endpoint


@pytest.fixture(scope="module")
def cluster(folder, endpoint):
    (folder / "cluster").mkdir()
    with nodes.Cluster(folder / "cluster") as cluster:
        yield cluster


@pytest.fixture
def start(cluster, folder, request):
    """Starts a run, and waits until a stage has ended if that is named."""

    def start(stage, *flags):
        where = ["--input=s3://bucket/raw", f"--output=s3://bucket/{request.node.name}", *flags]
        run = nodes.prepare(*SPLITS, *cluster.flags, *where, folder=folder / "driver")
        said = []
        for line in run.stdout:
            said.append(line)
            if line.startswith(stage):
                return run
        raise AssertionError("".join(said))

    return start


def ended(run, request):
    """Waits for a run; returns the manifest of its dataset."""
    said = run.communicate(timeout=300)[0]
    assert run.returncode == 0, said
    output = Uri.parse(f"s3://bucket/{request.node.name}/binary_dataset")
    keys = (entry.key for entry in open_store(output).entries(output.folder))
    assert not any(RUN in key for key in keys)
    return nodes.digest_at(str(output))


def test_nodes_see_no_folder_of_each_other_or_the_driver(cluster, start, expected, request):
    run = start("count:", "--conf=spark.speculation=true")
    assert len(cluster.is_at_work()) == 2
    for number in (0, 1):
        assert cluster.user_of(number) == nodes.USERS[number]
        assert cluster.files_of(number, nodes.ROOT / "dlrm") == []
        others = {f"node-{1 - number}", *os.listdir("/tmp")}
        assert f"node-{number}" in (seen := cluster.files_of(number, "/tmp"))
        both = others & {*seen}
        assert not {name for name in both if not name.startswith("hsperfdata_")}  # of any Java
    assert ended(run, request) == expected


def test_a_worker_that_is_killed_takes_nothing_with_it(cluster, start, expected, request):
    run = start("count:")
    cluster.kill(0)
    cluster.start(0)
    assert ended(run, request) == expected


def test_an_endpoint_that_is_restarted_is_waited_for(endpoint, start, expected, request):
    run = start("dictionary:")
    endpoint.restart(3)
    assert ended(run, request) == expected


def test_a_driver_that_is_killed_is_resumed(start, expected, request):
    run = start("dictionary:")
    time.sleep(0.5)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    resumed = start("continuing with what s3://bucket/")
    assert ended(resumed, request) == expected


@pytest.fixture(scope="module")
def days(folder):
    """Returns the checksums of two days of rows, the second of which extends the first."""
    (folder / "schema.yaml").write_text("{label: y, numerical: [x], categorical: [kind]}")
    found, extend = [], []
    for day, kinds in (("1", 97), ("2", 997)):
        ids = range(100_000)
        columns = {"y": [int(i % 3 == 0) for i in ids], "x": [i / 2 for i in ids]}
        columns["kind"] = [f"k{i * i % kinds}" for i in ids]
        pq.write_table(pa.table(columns), folder / f"{day}.parquet")
        flags = [f"--schema={folder}/schema.yaml", "--noreport", *extend]
        where = [f"--input={folder}/{day}.parquet", f"--output={folder}/day-{day}"]
        nodes.timed(nodes.prepare(*flags, *where, folder=folder / "local"))
        found.append(read_json(folder / f"day-{day}" / MANIFEST)["files"])
        extend = [f"--extend={folder}/day-1"]
    return found


def test_a_session_prepares_a_data_frame(cluster, days, folder):
    output = "s3://bucket/session"
    settings = [one.removeprefix("--conf=") for one in cluster.flags if one.startswith("--conf=")]
    path = os.pathsep.join(filter(None, [str(nodes.ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run(
        [sys.executable, "-c", SESSION, cluster.master, output, SQL.format(97), *settings],
        cwd=folder,
        env=os.environ | own | {"PYSPARK_PYTHON": sys.executable},
        timeout=300,
        check=True,
    )
    assert find_published(Uri.parse(output)).manifest["files"] == days[0]


def wait_for_rows(uri):
    """Waits until tasks have uploaded some of the rows that Spark reads."""
    until, place = time.monotonic() + 300, uri.below(RUN)
    while sum("/spark/" in e.key for e in open_store(place).entries(place.folder)) < 2:
        assert time.monotonic() < until, "no rows"
        time.sleep(0.05)


def test_rows_of_spark_extend_a_day_also_after_kills(cluster, days, folder):
    flags = [f"--schema={folder}/schema.yaml", "--noreport"]
    first = [f"--input={folder}/1.parquet", "--output=s3://bucket/parent"]
    nodes.timed(nodes.prepare(*flags, *first, folder=folder / "local"))
    output = Uri.parse("s3://bucket/child")
    flags += ["--extend=s3://bucket/parent", f"--output={output}"]
    flags += [f"--spark_sql={SQL.format(997)}", "--conf=spark.speculation=true"]
    for victim in ("driver", "worker"):
        run = nodes.prepare(*flags, *cluster.flags, folder=folder / "driver")
        wait_for_rows(output)
        if victim == "driver":
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            run.stdout.close()
    cluster.kill(0)
    cluster.start(0)
    said = run.communicate(timeout=400)[0]
    assert run.returncode == 0, said
    assert find_published(output).manifest["files"] == days[1]
    assert not any(RUN in entry.key for entry in open_store(output).entries(output.folder))


def test_executors_without_permission_are_named(endpoint, cluster, folder, request):
    endpoint.set(denied=f"{request.node.name}/binary_dataset/{RUN}/.probe")
    where = ["--input=s3://bucket/raw", f"--output=s3://bucket/{request.node.name}"]
    run = nodes.prepare(*SPLITS, *cluster.flags, *where, folder=folder / "driver")
    said = run.communicate(timeout=200)[0]
    endpoint.set(denied="")
    assert run.returncode == 2 or run.returncode == 1
    assert f"error: s3://bucket/{request.node.name}/binary_dataset/{RUN}/.probe" in said
    assert "no permission" in said
    assert "(on host " in said
    assert any(f" as user {user})" in said for user in nodes.USERS)

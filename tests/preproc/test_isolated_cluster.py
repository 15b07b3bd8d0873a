"""A cluster of Spark whose nodes share no folder writes the bytes of a local run, also after kills.

`benchmarks/cluster.py` starts it, and repeats the kills at random times.
"""

import os
import pwd
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from dlrm.files import MANIFEST
from dlrm.remote.objects import open_store
from dlrm.remote.publish import RUN
from dlrm.remote.uri import Uri

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cluster as nodes  # noqa: E402
from s3_server import Endpoint  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROWS = 100_000
SPLITS = ["--schema=criteo", "--split_bytes=400000", "--overwrite"]


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
    run = start("count:")
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


def test_executors_without_permission_are_named(endpoint, start):
    run = start("dictionary:")
    endpoint.set(denied="raw/")  # which the driver has seen
    said = run.communicate(timeout=200)[0]
    endpoint.set(denied="")
    assert run.returncode
    users = "|".join(map(str, (pwd.getpwnam(name).pw_uid for name in nodes.USERS)))
    place = rf"error: s3://bucket/raw/day_\d: no permission.* \(on host \S+ as user ({users})\)"
    assert re.search(place, said), said

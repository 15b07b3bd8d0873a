"""Local Spark clusters produce the same bytes, also when an executor is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from preproc_testing import binary_files

from dlrm.preproc.simulate_logs import Simulation, simulate

COMMAND = Path(__file__).resolve().parents[2] / "preproc" / "spark_data_utils.py"


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs") / "raw logs"
    simulate(Simulation(rows=60_000, days=3), folder)
    return folder


@pytest.fixture(scope="module")
def expected(raw, tmp_path_factory):
    output = tmp_path_factory.mktemp("expected")
    run = start(raw, output, "--engine=local")
    assert run.wait(60) == 0
    run.stdout.close()
    return binary_files(output / "binary_dataset")


def start(raw, output, *arguments):
    output.mkdir(exist_ok=True)
    command = [sys.executable, "-u", COMMAND, f"--input_folder={raw}", f"--output_folder={output}"]
    folders = {"SPARK_LOCAL_DIRS": str(output / "tmp"), "SPARK_WORKER_DIR": str(output / "worker")}
    return subprocess.Popen(
        [*command, "--split_bytes=300000", *arguments],
        env=os.environ | folders,
        stdout=subprocess.PIPE,
        text=True,
    )


def descendants(pid):
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return found


def executors(pid):
    named = []
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_text()
        except OSError:
            continue
        if "CoarseGrainedExecutorBackend" in command:
            named.append(child)
    return named


@pytest.mark.slow
def test_an_executor_that_is_killed_changes_nothing(java, raw, expected, tmp_path):
    output = tmp_path / "out"
    master = ["--master=local-cluster[2,1,1024]", "--conf=spark.executor.memory=512m"]
    run = start(raw, output, *master)
    killed = []
    for line in run.stdout:
        if line.startswith("start:"):
            killed = executors(run.pid)[:1]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
    assert run.wait(200) == 0
    run.stdout.close()
    assert len(killed) == 1
    assert binary_files(output / "binary_dataset") == expected


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def spark_class(folder, name, *arguments):
    """Runs a process of a standalone cluster, as in the README, and logs to a file."""
    import pyspark

    command = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = os.environ | {"SPARK_WORKER_DIR": str(folder / "worker")}
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [command, f"org.apache.spark.deploy.{name}", *arguments],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield folder / f"{name}.log"
    finally:
        process.terminate()
        process.wait(30)


def wait_for(log, text, count):
    for _ in range(900):  # 3 minutes: JVMs start slowly on a busy machine
        if len(re.findall(text, log.read_text())) >= count:
            return
        time.sleep(0.2)
    pytest.fail(f"no {text!r} in {log}: {log.read_text()[-2000:]}")


@pytest.mark.slow
def test_a_standalone_cluster_of_two_workers(java, raw, expected, tmp_path):
    pytest.importorskip("pyspark")
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    master = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0", address]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with (
        spark_class(tmp_path, "master.Master", *master) as log,
        spark_class(tmp_path / "first", "worker.Worker", *worker),
        spark_class(tmp_path / "second", "worker.Worker", *worker),
    ):
        wait_for(log, "Registering worker", 2)
        driver = ["--conf=spark.driver.host=127.0.0.1", f"--master={address}", "--memory_gib=1"]
        run = start(raw, tmp_path / "out", *driver)
        said = run.stdout.read()
        assert run.wait(200) == 0, said
        run.stdout.close()
        assert len(re.findall("Launching executor .* on worker", log.read_text())) >= 2
    assert "Spark UI: http://127.0.0.1:" in said
    assert binary_files(tmp_path / "out" / "binary_dataset") == expected

"""Local Spark clusters produce the same bytes, also when executors are killed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from preproc_testing import binary_files, node_environment, package_archive

from dlrm.scripts.simulate_logs.command import Simulation, simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cluster import command_of, descendants, free_port  # noqa: E402

pytestmark = pytest.mark.long
ROWS = [f"{int(i % 3 == 0)},{i},{'abc'[i % 3]}\n" for i in range(1000)]
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
    assert run.wait(200) == 0
    run.stdout.close()
    return binary_files(output / "binary_dataset")


def start(raw, output, *arguments, runner=(sys.executable, "-u"), **how):
    output.mkdir(exist_ok=True)
    command = [*runner, COMMAND, f"--input_folder={raw}", f"--output_folder={output}"]
    folders = {"SPARK_LOCAL_DIRS": str(output / "tmp"), "SPARK_WORKER_DIR": str(output / "worker")}
    return subprocess.Popen(
        [*command, "--split_bytes=300000", *arguments],
        env=os.environ | folders | how.pop("env", {}),
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )


def executors(pid):
    """Returns the executors among the descendants of a process."""
    return [one for one in descendants(pid) if b"CoarseGrainedExecutorBackend" in command_of(one)]


@pytest.mark.slow
def test_executors_that_are_killed_change_nothing(java, raw, expected, tmp_path):
    pytest.importorskip("pyspark")
    master = ["--master=local-cluster[2,1,1024]", "--conf=spark.executor.memory=512m"]
    run = start(raw, tmp_path / "out", *master)
    killed = []
    for line in run.stdout:
        if line.startswith(("start:", "count:")):
            killed += executors(run.pid)[:1]
            os.kill(killed[-1], signal.SIGKILL)
    assert run.wait(200) == 0
    run.stdout.close()
    assert len(killed) == 2
    assert binary_files(tmp_path / "out" / "binary_dataset") == expected


@contextmanager
def spark_class(folder, name, *arguments, **how):
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
            **how,
        )
    try:
        yield folder / f"{name}.log"
    finally:
        process.terminate()
        process.wait(120)


def wait_for(log, text, count):
    for _ in range(900):  # 3 minutes: JVMs start slowly on a busy machine
        if len(re.findall(text, log.read_text())) >= count:
            return
        time.sleep(0.2)
    pytest.fail(f"no {text!r} in {log}: {log.read_text()[-2000:]}")


def master_of(port):
    return ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]


def worker_of(port, host="127.0.0.1"):
    address = f"spark://127.0.0.1:{port}"
    return ["--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0", address]


def driver_of(port):
    address = f"spark://127.0.0.1:{port}"
    return ["--conf=spark.driver.host=127.0.0.1", f"--master={address}", "--memory_gib=1"]


@pytest.mark.slow
def test_a_cluster_of_two_workers_and_tasks_that_run_twice(java, raw, expected, tmp_path):
    pytest.importorskip("pyspark")
    port = free_port()
    for name in ("first", "second", "events"):
        (tmp_path / name).mkdir()
    settings = {
        "speculation": "true",
        "speculation.interval": "10ms",
        "speculation.minTaskRuntime": "1ms",
        "speculation.multiplier": "1",
        "speculation.quantile": "0.1",
        "eventLog.enabled": "true",
        "eventLog.dir": str(tmp_path / "events"),
        "eventLog.compress": "false",
        "eventLog.rolling.enabled": "false",
    }
    words = [f"--conf=spark.{name}={value}" for name, value in settings.items()]
    with (
        spark_class(tmp_path, "master.Master", *master_of(port)) as log,
        spark_class(tmp_path / "first", "worker.Worker", *worker_of(port)),
        # Spark runs a task again on another host only.
        spark_class(tmp_path / "second", "worker.Worker", *worker_of(port, "127.0.0.2")),
    ):
        wait_for(log, "Registering worker", 2)
        run = start(raw, tmp_path / "out", *driver_of(port), *words)
        said = run.stdout.read()
        assert run.wait(200) == 0, said
        run.stdout.close()
        assert len(re.findall("Launching executor .* on worker", log.read_text())) >= 2
    assert "Spark UI: http://127.0.0.1:" in said
    (log,) = (tmp_path / "events").iterdir()
    assert '"Speculative":true' in log.read_text()
    assert binary_files(tmp_path / "out" / "binary_dataset") == expected


@pytest.mark.slow
def test_a_master_that_does_not_answer_is_said(java, raw, tmp_path):
    pytest.importorskip("pyspark")
    run = start(raw, tmp_path / "out", *driver_of(free_port()), stderr=subprocess.PIPE)
    error = run.communicate(timeout=180)[1]
    assert run.returncode == 1
    assert re.match(r"error: Spark .*; see \S+/spark\.log", error), error


@pytest.fixture
def submitted(java, tmp_path):
    """Submits `dlrm prepare` to a cluster whose nodes have no package; returns the process."""
    pyspark = pytest.importorskip("pyspark")
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    shutil.copy(COMMAND.parents[1] / "dlrm" / "__main__.py", tmp_path / "dlrm_main.py")
    (tmp_path / "sales.csv").write_text("y,x,kind\n" + "".join(ROWS))
    (tmp_path / "schema.yaml").write_text("{label: y, numerical: [x], categorical: [kind]}")
    flags = ["--schema=schema.yaml", "--input=sales.csv", "--engine=spark"]
    port = free_port()

    def run(output, *arguments, **pythons):
        settings = {"spark.driver.host": "127.0.0.1", "spark.executorEnv.PYTHONPATH": "/nowhere"}
        words = [submit, f"--master=spark://127.0.0.1:{port}", *arguments]
        words += [f"--conf={name}={value}" for name, value in settings.items()]
        names = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [*words, "dlrm_main.py", "prepare", *flags, f"--output={output}", "--memory_gib=1"],
            cwd=tmp_path,
            env=names | {name: str(python) for name, python in pythons.items()},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    with (
        spark_class(tmp_path, "master.Master", *master_of(port)) as log,
        spark_class(tmp_path, "worker.Worker", *worker_of(port)),
    ):
        wait_for(log, "Registering worker", 1)
        yield run


@pytest.mark.slow
def test_nodes_need_no_repository_if_spark_submit_sends_the_package(submitted, tmp_path):
    nodes = node_environment(tmp_path / "nodes")
    package = node_environment(tmp_path / "environment")
    site = package.parents[1] / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    shutil.copytree(COMMAND.parents[1] / "dlrm", site / "dlrm")
    pythons = {"PYSPARK_PYTHON": nodes, "PYSPARK_DRIVER_PYTHON": package}
    done = submitted("none", **pythons)
    assert done.returncode != 0
    lacks = r"error: the executor on host \S+ \(\S+/nodes/bin/python\) has no module 'dlrm'; "
    assert re.search(lacks, done.stdout), done.stderr  # spark-submit prints both there
    archive = package_archive(tmp_path)
    done = submitted("zip", f"--py-files={archive}", **dict.fromkeys(pythons, nodes))
    assert done.returncode == 0, done.stderr
    packed = shutil.make_archive(tmp_path / "environment", "gztar", tmp_path / "environment")
    pythons["PYSPARK_PYTHON"] = "./unpacked/bin/python"
    done = submitted("archive", f"--archives={packed}#unpacked", **pythons)
    assert done.returncode == 0, done.stderr
    words = [package, "-m", "dlrm", "prepare", "--schema=schema.yaml", "--input=sales.csv"]
    subprocess.run([*words, "--output=local"], cwd=tmp_path, check=True, capture_output=True)
    made = [binary_files(tmp_path / name) for name in ("local", "zip", "archive")]
    assert made[0]
    assert made == made[:1] * 3

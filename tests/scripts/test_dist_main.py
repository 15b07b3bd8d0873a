"""The command in many real processes: started by launchers, stopped, killed, hung, misused."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch.distributed as dist
from small_dataset import MODEL, RUN, write_dataset
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dlrm.train.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.long
SECONDS = 180  # limit of a test
GRACE = 60  # seconds that ranks may take to end once one has failed
TRAIN = ["--mode=train", "--base_device=cpu", *MODEL, *RUN]


class Job:
    """Processes that run a command together; their output is gathered while they run."""

    def __init__(self, folder):
        self.log = folder / "output.txt"

    def output(self):
        return self.log.read_text()

    def wait_for(self, found, what):
        """Waits until `found()` is true."""
        end = time.monotonic() + SECONDS
        while not (result := found()):
            if self.ended() or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"no {what}:\n{self.output()}")
            time.sleep(0.05)
        return result


class Ranks(Job):
    """Forked ranks that find each other like the processes of a launcher."""

    def __init__(self, folder, module, *arguments, size=2):
        super().__init__(folder)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(size)}
        self._processes = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            options = {"stdout": self.log, "cwd": folder, "env": os.environ | where | own}
            words = [f"--local-rank={rank}", *arguments]  # as torch.distributed.launch does
            self._processes.append(forked.start(module, *words, **options))

    def ranks(self):
        """Returns the ranks' process ids in order."""
        return [process.pid for process in self._processes]

    def ended(self):
        """Returns True if one of them has."""
        return not all(process.is_alive() for process in self._processes)

    def wait(self):
        """Returns the exit code, nonzero if a rank failed; leaves no rank in any case.

        Once a rank fails, the others must end by themselves.
        """
        end = time.monotonic() + SECONDS
        while any(process.is_alive() for process in self._processes) and time.monotonic() < end:
            if any(process.exitcode for process in self._processes):
                end = min(end, time.monotonic() + GRACE)
            time.sleep(0.05)
        hung = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        self.kill()
        assert not hung, f"ranks {hung} have not ended:\n{self.output()}"
        return max((process.exitcode for process in self._processes), key=abs)

    def exit_codes(self):
        """Returns the ranks' codes, once all have ended."""
        return [process.exitcode for process in self._processes]

    def kill(self):
        for process in self._processes:
            process.kill()
            process.join()


class Launched(Job):
    """A launcher and its processes."""

    def __init__(self, folder, module, *arguments, launcher):
        super().__init__(folder)
        folder.mkdir(exist_ok=True)
        with open(self.log, "a") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *launcher, "-m", module, *arguments],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def ended(self):
        """Returns True if the launcher has."""
        return self.process.poll() is not None

    def wait(self):
        """Returns the exit code; leaves no process of the job in any case."""
        try:
            return self.process.wait(SECONDS)
        finally:
            self.kill()

    def kill(self):
        for pid in [*self.ranks(), self.process.pid]:  # each rank is in a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self):
        """Returns the ranks' process ids in order."""
        found = {}
        for entry in os.listdir("/proc"):
            try:
                pid, folder = int(entry), Path("/proc", entry)
                parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                variables = folder.joinpath("environ").read_bytes().split(b"\0")
                rank = [int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK=")]
                if parent == self.process.pid and rank:
                    found[rank[0]] = pid
            except (OSError, ValueError):
                continue
        return [found[rank] for rank in sorted(found)]


@pytest.fixture
def start(tmp_path, dataset):
    """Starts a job in the test's folder, with a launcher if named; it ends with the test."""
    jobs = []

    def run(*arguments, module="dlrm.scripts.main", data=dataset, **options):
        kind = Launched if "launcher" in options else Ranks
        folder = options.pop("folder", tmp_path)
        jobs.append(kind(folder, module, f"--dataset={data}", *TRAIN, *arguments, **options))
        return jobs[-1]

    yield run
    for job in jobs:
        job.kill()


def last_metrics(output):
    return {
        name: float(value)
        for name, value in re.findall(r"DLL .* - \(\) (\w+) : ([-\d.e]+)", output)
        if "throughput" not in name
    }


def weights(folder):
    """Returns the last checkpoint's name and weights."""
    checkpoint = sorted(folder.glob("step-*"))[-1]
    names = [p for p in checkpoint.rglob("*") if p.suffix in (".bin", ".safetensors")]
    return checkpoint.name, {
        str(p.relative_to(checkpoint)): p.read_bytes() for p in names if "rng" not in p.name
    }


def test_nvidias_launcher_trains_as_one_process_does(start, command):
    alone = command("--epochs=1", "--embedding_type=joint_sparse")
    options = {"launcher": ["torch.distributed.launch", "--use_env", "--nproc_per_node=2"]}
    options["module"] = "dlrm.scripts.dist_main"
    job = start("--epochs=1", "--embedding_type=joint_sparse", **options)
    assert job.wait() == 0, job.output()
    found = last_metrics(job.output())
    for name, value in alone.items():
        if "throughput" not in name:
            assert found[name] == pytest.approx(value, rel=1e-4), name
    assert job.output().count("Finished") + job.output().count("Final weights (last") == 2


def test_torchrun_is_told_the_error(tmp_path):
    file = tmp_path / "error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    done = forked.run("dlrm.scripts.main", "--dataset=nowhere", env=env)
    told = ProcessFailure(0, 1, done.returncode, str(file)).message["message"]
    assert told == done.stderr.strip() == "error: nowhere: no such dataset directory (--dataset)"


@pytest.mark.slow
def test_agents_restart_a_killed_rank(start, tmp_path, four_ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ["--nnodes=2", "--nproc_per_node=2", "--rdzv_backend=c10d", "--max_restarts=3"]
    rendezvous += [f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1"]
    launcher = ["torch.distributed.run", *rendezvous, "--monitor_interval=0.1"]
    words = [*LONG, f"--save_checkpoint_path={tmp_path}/run", "--resume"]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    jobs = [start(*words, launcher=launcher, folder=folder) for folder in folders]
    jobs[0].wait_for(lambda: list(tmp_path.glob("run/step-*/manifest.json")), "checkpoint")
    os.kill(jobs[0].ranks()[1], signal.SIGKILL)
    output = [job.wait() and job.output() for job in jobs]
    assert output == [0, 0], "".join(map(str, output))
    assert "resumed from" in "".join(job.output() for job in jobs)
    assert weights(tmp_path / "run") == four_ranks


LONG = ("--epochs=6", "--save_checkpoint_path=run", "--checkpoint_freq=5", "--keep_checkpoints=2")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, dataset):
    """The final weights of the long run of two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = Ranks(folder, "dlrm.scripts.main", f"--dataset={dataset}", *TRAIN, *LONG)
    assert job.wait() == 0, job.output()
    return weights(folder / "run")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory, dataset):
    """The final weights of the long run of four ranks."""
    folder = tmp_path_factory.mktemp("four")
    job = Ranks(folder, "dlrm.scripts.main", f"--dataset={dataset}", *TRAIN, *LONG, size=4)
    assert job.wait() == 0, job.output()
    return weights(folder / "run")


@pytest.mark.slow
def test_a_killed_rank_costs_no_more_where_saves_go_on_in_the_background(
    start, tmp_path, uninterrupted
):
    arguments = [*LONG, "--resume", "--async_checkpoint"]
    job = start(*arguments)
    job.wait_for(lambda: list(tmp_path.glob("run/step-*/manifest.json")), "checkpoint")
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.wait() != 0
    job = start(*arguments)
    assert job.wait() == 0, job.output()
    assert "resumed from" in job.output()
    assert weights(tmp_path / "run") == uninterrupted


def test_sigterm_saves_and_the_run_goes_on_as_if_it_had_not_come(start, tmp_path, uninterrupted):
    job = start(*LONG)
    job.wait_for(lambda: list(tmp_path.glob("run/step-*/manifest.json")), "checkpoint")
    for rank in job.ranks()[:1]:  # one gets it, all end
        os.kill(rank, signal.SIGTERM)
    assert job.wait() == 75
    assert job.exit_codes() == [75, 75]
    assert re.search(r"stopped after step (\d+); --resume continues", job.output()), job.output()
    job = start(*LONG, "--resume")
    assert job.wait() == 0, job.output()
    assert weights(tmp_path / "run") == uninterrupted


RECORD = """
import os, runpy, sys
from pathlib import Path

try:
    runpy.run_module("dlrm.scripts.main", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else 1  # a message
    Path(f"ended-{os.environ['RANK']}").write_text(str(code))
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "to", "code"),
    [
        (signal.SIGTERM, "launcher", 75),
        (signal.SIGTERM, "rank", 75),
        (signal.SIGTERM, "ranks", 75),
        (signal.SIGKILL, "launcher", 75),
        (signal.SIGINT, "launcher", 130),
        (signal.SIGKILL, "rank", 1),
    ],
)
def test_a_signal_ends_every_rank_as_the_table_says(start, tmp_path, sent, to, code):
    (tmp_path / "record.py").write_text(RECORD)
    endless = ("--epochs=2000", "--test_freq=100000", "--save_checkpoint_path=run")
    launcher = ["torch.distributed.run", "--nproc_per_node=4", "--monitor_interval=0.1"]
    job = start(*endless, "--checkpoint_freq=5", launcher=launcher, module="record")
    job.wait_for(lambda: list(tmp_path.glob("run/step-*/manifest.json")), "checkpoint")
    ranks = job.ranks()
    assert len(ranks) == 4
    for pid in {"launcher": [job.process.pid], "rank": ranks[2:3], "ranks": ranks}[to]:
        os.kill(pid, sent)
    end = time.monotonic() + GRACE
    while any(map(forked.is_running, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [rank for rank, pid in enumerate(ranks) if forked.is_running(pid)]
    for rank in left:
        os.kill(ranks[rank], signal.SIGKILL)
    assert not left, job.output()
    job.wait()
    killed = {2} if (sent, to) == (signal.SIGKILL, "rank") else set()
    codes = {int(file.name[6:]): int(file.read_text()) for file in tmp_path.glob("ended-*")}
    assert codes == dict.fromkeys(set(range(4)) - killed, code), job.output()
    assert ("stopped after step" in job.output()) == (code == 75)


def test_more_or_fewer_processes_go_on_from_the_same_checkpoint(start, tmp_path, command):
    """One process resumes from the checkpoint of three, and three from that of one."""
    whole = command("--epochs=3", "--save_checkpoint_path=whole")
    arguments = ("--save_checkpoint_path=run", "--resume")
    assert start("--epochs=1", *arguments, size=3).wait() == 0
    command("--epochs=2", *arguments)
    last = start("--epochs=3", *arguments, size=3)
    assert last.wait() == 0, last.output()
    assert last_metrics(last.output())["test_auc"] == pytest.approx(whole["test_auc"], rel=1e-4)
    assert Checkpoint.open(tmp_path / "run").path.exists()


@pytest.mark.slow
def test_a_hung_rank_ends_all_ranks_with_the_timeout(start, tmp_path):
    (tmp_path / "hanging.py").write_text(
        "import datetime, os, time\n"
        "from dlrm.distributed import world\n"
        "from dlrm.tasks import recommendation as r\n"
        "from dlrm.scripts import main\n"
        "world._TIMEOUT = datetime.timedelta(seconds=5)\n"
        "loss = r.Recommendation.loss\n"
        "def hang(self, batch):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        time.sleep(20)\n"
        "    return loss(self, batch)\n"
        "r.Recommendation.loss = hang\n"
        "main.start()\n"
    )
    job = start(module=tmp_path / "hanging.py")
    assert job.wait() != 0
    assert re.search("rank 0 ends, since another rank has gone: .*imed out", job.output())
    assert 0 not in job.exit_codes()


WITH_WRITES = """
import os, time
from dlrm.train.checkpoints import writer as checkpoint_writer
from dlrm.scripts import main
write, saves = checkpoint_writer.write_blocks, set()
def watched_write(path, *of):
    saves.add(path.parent.parent)
    if len(saves) == 2 and os.environ["RANK"] == "1":
        {act}
    return write(path, *of)
checkpoint_writer.write_blocks = watched_write
main.start()
"""


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_ends_all_ranks_and_the_earlier_checkpoint_loads(
    start, tmp_path, command, background
):
    full = 'raise OSError(28, "No space left on device", str(path))'
    (tmp_path / "filling.py").write_text(WITH_WRITES.format(act=full))
    arguments = [*LONG, *["--async_checkpoint"] * background]
    job = start(*arguments, module=tmp_path / "filling.py")
    assert job.wait() != 0
    errors = re.findall(r"^error: .*", job.output(), re.MULTILINE)
    assert len(errors) == 1, job.output()
    assert "rank 1: [Errno 28] No space left on device" in errors[0]
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "log.json", "step-000000005"]
    assert command("--mode=test", "--load_checkpoint_path=run", training=[])["auc"] > 0.5


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    start, tmp_path, uninterrupted
):
    slow = 'open("saving", "w").close(); time.sleep(1000)'
    (tmp_path / "slow.py").write_text(WITH_WRITES.format(act=slow))
    job = start(*LONG, module=tmp_path / "slow.py")
    job.wait_for((tmp_path / "saving").exists, "second save")
    assert list((tmp_path / "run").glob(".step-000000010.partial-*"))
    job.kill()
    job = start(*LONG, "--resume")
    assert job.wait() == 0, job.output()
    assert re.search("resumed from .*step-000000005: 5 steps", job.output())
    assert weights(tmp_path / "run") == uninterrupted
    assert [path.name for path in (tmp_path / "run").glob(".*")] == [".lock"]


@pytest.mark.slow
def test_restarts_do_not_meet_the_dead(start, tmp_path, uninterrupted):
    (tmp_path / "dying.py").write_text(
        "import os\n"
        "from dlrm.tasks import recommendation as r\n"
        "from dlrm.scripts import main\n"
        "loss = r.Recommendation.loss\n"
        "def deadly_loss(self, batch):\n"
        "    attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    if attempt < 4 and os.environ['RANK'] == str(attempt % 2):\n"
        "        os._exit(3)\n"
        "    return loss(self, batch)\n"
        "r.Recommendation.loss = deadly_loss\n"
        "main.start()\n"
    )
    launcher = ["torch.distributed.run", "--nproc_per_node=2", "--max_restarts=4"]
    launcher.append("--monitor_interval=0.1")
    job = start(*LONG, "--resume", module="dying", launcher=launcher)
    assert job.wait() == 0, job.output()
    assert "no checkpoint in" in job.output(), "they died before the first one"
    assert weights(tmp_path / "run") == uninterrupted


def start_one(folder, module, dataset, **variables):
    """Runs one rank alone with a launcher's variables."""
    return forked.run(
        module, f"--dataset={dataset}", *TRAIN, cwd=folder, env=os.environ | variables
    )


def test_a_rank_that_does_not_come_is_named(tmp_path, dataset):
    script = tmp_path / "impatient.py"
    script.write_text(
        "from dlrm.distributed import world\n"
        "from dlrm.scripts import main\n"
        "world._JOIN_SECONDS = 3\n"
        "main.start()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    process = start_one(tmp_path, script, dataset, **where, **ranks)
    assert process.returncode == 1
    assert "waited 3 s for rank 1, 2" in process.stderr, process.stderr


def test_a_port_in_use_is_an_error(tmp_path, dataset):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        process = start_one(tmp_path, "dlrm.scripts.main", dataset, **where, **ranks)
    assert process.returncode == 1
    assert f"cannot join the others at 127.0.0.1:{port}" in process.stderr, process.stderr
    assert "in use" in process.stderr


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        (["--seed=1", "--seed=2"], "must agree:\n  --seed: 1 on rank 0, 2 on 1"),
        (["--seed=1", "--seed=1"], "must agree:\n  version of dlrm: '0.2.0' on rank 0, '0.1.9' on"),
        (["", "--dataset={other}"], "must agree:\n  SHA-256 of the dataset's manifest.json: "),
        (
            ["--dataset={bare}", "--dataset={other_bare}"],
            "must agree:\n  the dataset's first and last batch: ",
        ),
    ],
)
def test_ranks_that_differ_are_told(start, tmp_path, dataset, by_rank, expected):
    places = {"other": write_dataset(tmp_path / "other", seed=1)}
    for name, source in (("bare", dataset), ("other_bare", places["other"])):
        places[name] = shutil.copytree(source, tmp_path / name)
        (places[name] / "manifest.json").unlink()
    texts = [text.format(**places) or f"--dataset={dataset}" for text in by_rank]
    script = tmp_path / "differing.py"
    script.write_text(
        "import os, sys\n"
        "from dlrm.scripts import main\n"
        "from dlrm.tasks import start\n"
        f"if {'version' in expected}:\n"
        "    start.__version__ = ['0.2.0', '0.1.9'][int(os.environ['RANK'])]\n"
        f"sys.argv.append({texts!r}[int(os.environ['RANK'])])\n"
        "main.start()\n"
    )
    job = start(module=tmp_path / "differing.py")
    assert job.wait() != 0
    output = job.output()
    assert f"error: the ranks of a run {expected.format(**places)}" in output, output
    assert "Traceback" not in output, output

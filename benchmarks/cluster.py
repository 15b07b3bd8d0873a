"""Prepares logs on a Spark cluster of this machine whose nodes share no folder, and measures it.

    sudo python benchmarks/cluster.py --rows 4000000       # beside a cluster with a common folder
    sudo python benchmarks/cluster.py --kills 10           # of workers, drivers and the endpoint

Each worker runs as another user in a mount namespace of its own, in which it sees neither this
repository nor the temporary folders and the home of others. The logs and the dataset are in
buckets of an endpoint of S3 on 127.0.0.1, and Spark sends the package (`spark.archives`). It needs
root, `unshare` and `setpriv` of util-linux, and Java.
"""

import argparse
import json
import os
import pwd
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from s3_server import Endpoint

ROOT = Path(__file__).resolve().parents[1]
USERS = ("nobody", "daemon", "bin", "games")  # of workers; Hadoop needs their names
_ISOLATED = r"""
set -e
hold=$1; user=$2; group=$3; place=$4; shift 4
mount -t tmpfs tmpfs "$hold"
number=0
for kept in $KEPT; do
  mkdir "$hold/$number"; mount --rbind "$kept" "$hold/$number"; number=$((number + 1))
done
for hidden in $HIDDEN; do mount -t tmpfs -o mode=1777 tmpfs "$hidden"; done
number=0
for kept in $KEPT; do
  mkdir -p "$kept"; mount --rbind "$hold/$number" "$kept"; number=$((number + 1))
done
mkdir -p "$place"; chown "$user:$group" "$place"; cd "$place"
exec setpriv --reuid="$user" --regid="$group" --clear-groups "$@"
"""


class Cluster:
    """A standalone cluster of Spark without a common folder. Use it in a `with` block.

    Args:
        folder: a directory of the caller, which workers do not see.
        workers: number of workers, each with one core.
        isolated: whether workers are in namespaces of their own; otherwise they are processes of
            this user, which see all folders.

    Attributes:
        master: the address of the master.
        flags: flags of `dlrm prepare` with which it runs there.
    """

    def __init__(self, folder: Path, workers: int = 2, isolated: bool = True) -> None:
        import pyspark

        self._folder, self._num, self._isolated = folder, workers, isolated
        self._spark = Path(pyspark.__file__).parent
        self._stack = ExitStack()
        self._workers: dict[int, subprocess.Popen] = {}
        port = free_port()
        self.master = f"spark://127.0.0.1:{port}"
        self.flags = [
            "--engine=spark",
            f"--master={self.master}",
            "--memory_gib=2",
            "--conf=spark.driver.host=127.0.0.1",
        ]
        if isolated:
            archive = shutil.make_archive(str(folder / "dlrm"), "zip", ROOT, "dlrm")
            self.flags += [
                f"--conf=spark.archives={archive}#package",
                "--conf=spark.executorEnv.PYTHONPATH=package",
                "--conf=spark.shuffle.readHostLocalDisk=false",  # as if each were another host
            ]
        self._port = port

    def __enter__(self) -> "Cluster":
        address = ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0"]
        self._master = self._start("master", [*self._class("master.Master"), *address])
        self._wait("master", "New state: ALIVE")
        for number in range(self._num):
            self.start(number)
        self._wait("master", "Registering worker", self._num)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in [*self._workers]:
            self.kill(number)
        self._master.kill()
        self._master.wait()
        self._stack.close()

    def _class(self, name: str) -> list[str]:
        return [str(self._spark / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]

    def _start(self, name: str, command: list[str], **how: object) -> subprocess.Popen:
        with open(self._folder / f"{name}.log", "a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **how)

    def _wait(self, name: str, text: str, count: int = 1) -> None:
        log = self._folder / f"{name}.log"
        for _ in range(900):
            if log.exists() and len(re.findall(text, log.read_text(errors="replace"))) >= count:
                return
            time.sleep(0.1)
        raise TimeoutError(f"{log}: expected {text!r}: {log.read_text(errors='replace')[-2000:]}")

    def start(self, number: int) -> None:
        """Starts a worker."""
        command = [
            *self._class("worker.Worker"),
            *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0"),
            self.master,
        ]
        place = f"/tmp/node-{number}" if self._isolated else str(self._folder / f"node-{number}")
        own = {
            "PATH": os.environ["PATH"],
            "HOME": place,
            "SPARK_WORKER_DIR": f"{place}/work",
            "SPARK_LOCAL_DIRS": f"{place}/local",
            **{name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        }
        if "JAVA_HOME" in os.environ:
            own["JAVA_HOME"] = os.environ["JAVA_HOME"]
        if self._isolated:
            user = pwd.getpwnam(USERS[number % len(USERS)])
            hold = tempfile.mkdtemp(prefix="dlrm-node-", dir="/run")
            self._stack.callback(os.rmdir, hold)
            kept, hidden = folders_of_nodes()
            own |= {"KEPT": " ".join(kept), "HIDDEN": " ".join(hidden)}
            words = [hold, str(user.pw_uid), str(user.pw_gid), place]
            unshare = ["unshare", "--mount", "--propagation=private", "--"]
            command = [*unshare, "sh", "-c", _ISOLATED, "sh", *words, *command]
        else:
            Path(place).mkdir(exist_ok=True)
        self._workers[number] = self._start(f"worker-{number}", command, env=own)

    def kill(self, number: int) -> None:
        """Kills a worker with its executors, and all that they have on their disks."""
        process = self._workers.pop(number)
        for pid in (*descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def user_of(self, number: int) -> str:
        """Returns the user of a worker."""
        uid = Path(f"/proc/{self._java_of(number)}").stat().st_uid
        return pwd.getpwuid(uid).pw_name

    def files_of(self, number: int, folder: Path | str) -> list[str]:
        """Returns the names in a folder as a worker sees it; none if it sees no such folder."""
        seen = Path(f"/proc/{self._java_of(number)}/root{folder}")
        return sorted(path.name for path in seen.iterdir()) if seen.exists() else []

    def _java_of(self, number: int) -> int:
        process = self._workers[number]
        pids = (process.pid, *descendants(process.pid))
        return next(pid for pid in pids if b"worker.Worker" in command_of(pid))

    def is_at_work(self) -> list[int]:
        """Returns the workers with an executor."""
        return [
            number
            for number, process in self._workers.items()
            if any(b"CoarseGrained" in command_of(pid) for pid in descendants(process.pid))
        ]


def folders_of_nodes() -> tuple[list[str], list[str]]:
    """Returns the folders of Python that nodes have, and those that they do not see."""
    found = subprocess.run(
        [sys.executable, "-c", "import dlrm; print(*dlrm.__path__, sep='\\n')"],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    packages = {str(Path(line).parent) for line in found.stdout.split("\n") if line} - {"/"}
    kept = sorted({sys.prefix, sys.base_prefix})
    hidden = {"/tmp", "/var/tmp", "/dev/shm", str(Path.home()), str(ROOT), *packages}
    hidden = {one for one in hidden if "site-packages" not in one and Path(one).is_dir()}
    below = {one for one in hidden if any(str(p) in hidden for p in Path(one).parents)}
    inside = [one for one in kept if any(one == h or f"{h}/" in f"{one}/" for h in hidden)]
    return inside, sorted(hidden - below)


def why_not() -> str:
    """Returns why no isolated cluster can be started here, or nothing."""
    if os.geteuid():
        return "only root makes mount namespaces and starts processes of other users"
    missing = [name for name in ("unshare", "setpriv", "java") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    words = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"no mount namespace: {done.stderr.strip()}" if done.returncode else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return found


def prepare(*flags: str, folder: Path, **how: object) -> subprocess.Popen:
    """Starts `dlrm prepare`, with a cache and a working directory of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": path, "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "dlrm", "prepare", *flags],
        env=os.environ | own,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **how,
    )


def digest_at(uri: str) -> bytes:
    """Returns the manifest of a published dataset, which has the checksum of each file."""
    from dlrm.remote.objects import open_store
    from dlrm.remote.publish import find_published
    from dlrm.remote.uri import Uri

    place = Uri.parse(uri)
    found = find_published(place)
    assert found is not None, uri
    return open_store(place).content(found.files[place.below("manifest.json").key].key)


class Peaks:
    """The greatest memory of processes in a block, by kind, and the processor time of tasks."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._over = pids, threading.Event()
        self.memory: dict[str, int] = {}
        self._seconds: dict[int, float] = {}

    def __enter__(self) -> "Peaks":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def processor_seconds(self) -> float:
        """Seconds of the processes of Python that run tasks."""
        return sum(self._seconds.values())

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            for parent in self._pids:
                for pid in (parent, *descendants(parent)):
                    self._look_at(pid)

    def _look_at(self, pid: int) -> None:
        command = command_of(pid)
        kind = "java" if b"java" in command.split(b"\0")[0] else "python"
        if kind == "python" and pid not in self._pids and b"pyspark" not in command:
            return
        if pid in self._pids:
            kind = "driver"
        with suppress(OSError, ValueError, TypeError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            own = sum(int(size) for size in re.findall(r"Private_\w+: +(\d+) kB", text)) << 10
            self.memory[kind] = max(self.memory.get(kind, 0), own)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if kind == "python":
                ticks = int(fields[11]) + int(fields[12])
                self._seconds[pid] = ticks / os.sysconf("SC_CLK_TCK")


def timed(process: subprocess.Popen, cluster: Cluster | None = None) -> dict[str, object]:
    """Waits for a run; returns its seconds after start-up, those of its stages, and its peaks."""
    lines, began = [], time.monotonic()
    pids = [process.pid, *(p.pid for p in (cluster._workers.values() if cluster else ()))]
    with Peaks(pids) as peaks:
        started = began
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("start:"):
                started = time.monotonic()
    if process.wait():
        raise ChildProcessError("".join(lines[-20:]))
    return {
        "start": started - began,
        "seconds": time.monotonic() - started,
        "memory": peaks.memory,
        "processor_seconds": peaks.processor_seconds,
        "lines": [line.rstrip() for line in lines],
    }


def make_logs(rows: int, folder: Path) -> Path:
    """Writes logs of three days."""
    flags = [f"--rows={rows}", "--days=3", f"--output={folder}"]
    subprocess.run([sys.executable, "-m", "dlrm", "simulate", *flags], check=True, cwd=ROOT)
    return folder


def put(folder: Path, uri: str) -> None:
    """Copies the files of a folder to a URI."""
    from dlrm.remote.objects import open_store, upload
    from dlrm.remote.uri import Uri

    place = Uri.parse(uri)
    files = (path for path in folder.iterdir() if path.name.startswith("day_"))
    upload(open_store(place), {place.below(path.name).key: path for path in files})


def compare(rows: int, times: int, folder: Path) -> None:
    """Times runs through the endpoint beside runs with a common folder, and with one executor."""
    raw = make_logs(rows, folder / "raw")
    put(raw, "s3://bench/raw")
    logs = ["--schema=criteo", "--overwrite"]
    seconds: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    digests = set()

    def run(name: str, cluster: Cluster, *flags: str) -> None:
        made = timed(prepare(*logs, *cluster.flags, *flags, folder=folder / "driver"), cluster)
        seconds.setdefault(name, []).append(made["seconds"])
        used.setdefault(name, []).append(made["processor_seconds"])
        print(
            f"{name}: {made['start']:.1f} s to start, {made['seconds']:.1f} s, "
            f"{made['processor_seconds']:.1f} s of tasks; MiB of a process: "
            + ", ".join(f"{kind} {size >> 20}" for kind, size in made["memory"].items()),
            flush=True,
        )
        for line in made["lines"]:
            if re.match(r"(count|dictionary|transform|shuffle|describe):", line):
                print(f"  {line}", flush=True)

    there = ["--input=s3://bench/raw", "--output=s3://bench/out"]
    here = [f"--input={raw}", f"--output={folder / 'out'}"]
    for number in range(times):
        for name, workers, isolated, flags in (
            ("endpoint, 2 executors", 2, True, there),
            ("common folder, 2 executors", 2, False, here),
            ("endpoint, 1 executor", 1, True, there),
        ):
            own = folder / f"cluster-{number}-{workers}-{isolated}"
            own.mkdir()
            with Cluster(own, workers, isolated) as cluster:
                run(name, cluster, *flags)
            if isolated:
                digests.add(digest_at("s3://bench/out/binary_dataset"))
            else:
                digests.add((folder / "out/binary_dataset/manifest.json").read_bytes())
    both, disk, one = (statistics.median(own) for own in seconds.values())
    print(
        f"endpoint / common folder: {both / disk:.2f}; 1 executor / 2 executors: {one / both:.2f}"
    )
    times_used = {name: statistics.median(own) for name, own in used.items()}
    print(f"processor seconds: {json.dumps(times_used)}; datasets that differ: {len(digests) - 1}")


def kill(kills: int, rows: int, folder: Path, seed: int = 0) -> None:
    """Kills a worker, the driver or the endpoint at a random time, and compares the datasets."""
    raw = make_logs(rows, folder / "raw")
    chance, same = random.Random(seed), 0
    local = ["--schema=criteo", "--engine=local", f"--input={raw}", f"--output={folder / 'out'}"]
    timed(prepare(*local, folder=folder / "local"))
    expected = (folder / "out/binary_dataset/manifest.json").read_bytes()
    with Endpoint(folder / "objects", keep=True) as endpoint, ExitStack() as stack:
        os.environ.update(endpoint.environment)
        endpoint.make("bench")
        put(raw, "s3://bench/raw")
        own = folder / "cluster"
        own.mkdir()
        cluster = stack.enter_context(Cluster(own))
        flags = ["--schema=criteo", "--input=s3://bench/raw", "--split_bytes=1000000"]
        flags += [*cluster.flags, "--conf=spark.speculation=true"]
        took = 0.0
        for number in range(kills + 1):
            output = f"--output=s3://bench/out-{number}"
            victim = ("none", "worker", "driver", "endpoint")[number and 1 + number % 3]
            process = prepare(*flags, output, folder=folder / "driver")
            started = next(line for line in process.stdout if line.startswith("start:"))
            assert started
            began, at = time.monotonic(), chance.uniform(0.05, 0.95) * took
            if victim != "none":
                time.sleep(at)
            if victim == "worker":
                cluster.kill(0)
                cluster.start(0)
            elif victim == "endpoint":
                endpoint.restart()
            elif victim == "driver":
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process = prepare(*flags, output, folder=folder / "driver")
            said, _ = process.communicate()
            if process.returncode:
                print(said)
            else:
                made = digest_at(f"s3://bench/out-{number}/binary_dataset")
                same += number > 0 and made == expected
                took = took or time.monotonic() - began
            print(
                f"{victim} after {at:.1f} s: exit code {process.returncode}, same bytes: "
                f"{process.returncode == 0 and made == expected}",
                flush=True,
            )
    print(f"same bytes: {same} of {kills}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=1, help="runs of each kind")
    parser.add_argument("--kills", type=int, default=0, help="kills instead of times")
    parser.add_argument("--seed", type=int, default=0, help="of the times of kills")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(prefix="dlrm-cluster-") as name:
        folder = Path(name)
        if options.kills:
            kill(options.kills, options.rows, folder, options.seed)
            return
        with Endpoint(folder / "objects") as endpoint:
            os.environ.update(endpoint.environment)
            endpoint.make("bench")
            compare(options.rows, options.times, folder)


if __name__ == "__main__":
    main()

"""Runs a job: fresh processes for each repeat, one result a run, failures kept."""

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.published.jobs import Job
from dlrm.published.results import Record, append, finished, matching, percentiles, read
from dlrm.version import __version__

# Which number of a run's summary is its metric: the first of these that it has.
_METRICS = ("validation_auc", "auc", "test_exact_match", "test_accuracy", "test_top1", "best_top1")
_LAST_LINES = 5
_PATIENCE = 60.0  # seconds for a command to end by itself once it is asked to
# A launcher's variables: they would make the command wait for the ranks of another run.
_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|SLURM_PROCID"
    r"|OMPI_COMM_WORLD_.*|PMI_RANK"
)


class Records(NamedTuple):
    """The places of what runs leave.

    Attributes:
        path: file of results; runs of the same setting in it are not repeated.
        keep: folder in which to keep the files of the runs; None: they are removed.
    """

    path: Path
    keep: Path | None


def run_job(job: Job, to: Records) -> list[Record]:
    """Runs the missing repeats of a job and returns all its results, failures included."""
    found = matching(read(to.path), job.setting | {"processor": processor()})
    done = len(finished(found))
    if done:
        print(f"{job.name}: {min(done, job.repeats)} of {job.repeats} runs are done")
    for number in range(done + 1, job.repeats + 1):
        with _folder(job, number, to.keep) as folder:
            record = _run_once(job, number, folder)
        append(to.path, record)
        found.append(record)
        print(_line(job, number, record))
    return found


def _line(job: Job, number: int, record: Record) -> str:
    head = f"{job.name}: run {number}/{job.repeats}"
    if record["exit_code"]:
        return f"{head} failed with exit code {record['exit_code']}: {record['error']}"
    values = record["values"]
    mean = sum(values) / len(values)
    return f"{head}: {mean:.6g} {record['unit']} in {record['seconds']:.0f} s"


@contextmanager
def _folder(job: Job, number: int, keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dlrm-systems-") as name:
            yield Path(name)
        return
    folder = (
        keep.absolute()
        / job.row.id
        / job.setting["label"]
        / f"run-{number}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    folder.mkdir(parents=True)
    yield folder


def _run_once(job: Job, number: int, folder: Path) -> Record:
    log, output = folder / "log.json", folder / "output.txt"
    began, clock = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    code, peak = _start(job, folder, output, log)
    seconds = time.monotonic() - clock
    record: Record = {
        **job.setting,
        "run": number,
        "exit_code": code,
        "started": began,
        "seconds": round(seconds, 3),
        "peak_rss_bytes": peak,
        **environment(),
    }
    if code == 0:
        try:
            return record | _measurements(job, log)
        except (OSError, ValueError) as error:
            return record | {"exit_code": 1, "error": f"no figures: {error}"}
    return record | {"error": _error(output)}


def _start(job: Job, folder: Path, output: Path, log: Path) -> tuple[int, int]:
    """Runs the command; returns its exit code and the peak memory of a process of it, in bytes."""
    from dlrm.tasks.start import end_with_launcher  # torch takes seconds to import

    module = f"dlrm.scripts.{job.row.command}"
    command = [sys.executable, "-m", module]
    if job.setting["processes"] > 1:
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node"]
        command = [sys.executable, "-m", *launcher, str(job.setting["processes"]), "-m", module]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, *job.setting["arguments"], f"--log_path={log}"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_variables(job.setting["threads"]),
            start_new_session=True,
            preexec_fn=end_with_launcher,  # noqa: PLW1509  # one system call, no lock
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            _end(process)
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * 1024


def _variables(threads: int) -> dict[str, str]:
    """Returns the command's environment: this package, without the variables of a launcher."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}


def _end(process: subprocess.Popen) -> None:
    """Ends a command and all processes that it has started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _error(output: Path) -> str:
    """The command's own error, or the last lines that it printed."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    named = [line for line in lines if line.startswith("error: ")]
    return named[-1].removeprefix("error: ") if named else " | ".join(lines[-_LAST_LINES:])


def _measurements(job: Job, log: Path) -> Record:
    """Reads the values of a run from its log, by the rule of its row."""
    lines = [json.loads(line.removeprefix("DLLL ")) for line in log.read_text().splitlines()]
    entries = [line for line in lines if line["type"] == "LOG"]
    if len(entries) < 2:
        raise ValueError(f"{log} has no summary")
    steps = [e["data"] for e in entries if isinstance(e["step"], list) and e["step"]]
    summary = entries[-1]["data"]
    times = [data["step_time"] for data in steps if "step_time" in data]
    losses = [data["loss"] for data in steps if "loss" in data]
    parameters = next(e["data"] for e in entries if e["step"] == "PARAMETER")
    record: Record = {}
    if job.setting["global_batch"] is None:  # --batch_size max is known once it has run
        record["global_batch_found"] = int(parameters["batch_size"]) * job.setting["devices"]
    quantity, unit, values = _values(job, summary, times, record)
    if len(values) <= (0 if job.setting["smoke"] else job.rule.drop):
        raise ValueError(
            f"the run logged {len(values)} steps, of which the first {job.rule.drop} do not count"
        )
    return record | {
        "quantity": quantity,
        "values": values,
        "unit": unit,
        "summary": summary,
        "losses": losses,
        "step_time": percentiles(times) if times else {},
        "seed": parameters.get("seed"),
    }


def _values(
    job: Job, summary: dict[str, Any], times: list[float], record: Record
) -> tuple[str, str, list[float]]:
    """Returns the quantity, the unit and the values of a run."""
    rule = job.rule
    names = [name for name in summary if "_throughput" in name]
    rates = sorted(names, key=lambda name: int(re.findall(r"\d+", f"0 {name}")[-1]))  # by batch
    if rule.quantity == "metric" and not (job.setting["smoke"] and rates):
        name = next((name for name in _METRICS if name in summary), None)
        if name is None:
            raise ValueError("the run tested nothing, so it has no metric")
        scale = 100 if name.endswith("top1") else 1  # documents print it in percent
        unit = f"{name}, %" if scale > 1 else name
        return "auc" if "auc" in name else "accuracy", unit, [scale * summary[name]]
    if not rates:
        raise ValueError("the run has no throughput: it ended within --benchmark_warmup_steps")
    unit = f"{job.row.samples}/s"
    if rule.values == "series" and not job.setting["smoke"]:
        batch = record.get("global_batch_found") or job.setting["global_batch"]
        return "throughput", unit, [batch / seconds for seconds in times]
    trained = [name for name in rates if name == "average_train_throughput"]
    return "throughput", unit, [summary[(trained or rates)[-1]]]


def environment() -> dict[str, Any]:
    """Returns the facts of machine and programs that a result depends on."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "dlrm": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "host": socket.gethostname(),
    }


def processor() -> str:
    """Returns the name of what computes: the GPU's where there is one, else the CPU's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _revision() -> str | None:
    """The commit of a clone, with "+" where files differ from it; None for an installed package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    words = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

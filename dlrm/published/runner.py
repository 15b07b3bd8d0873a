"""Runs a job: fresh processes for each repeat, one result a run, failures kept."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.published.jobs import Job
from dlrm.published.results import Record, append, finished, read
from dlrm.version import __version__

# Which number of a run's summary is its metric: the first of these that it has.
_METRICS = ("validation_auc", "auc", "test_exact_match", "test_accuracy", "test_top1", "best_top1")
_LAST_LINES = 5
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
    found = [r for r in read(to.path) if all(r.get(k) == v for k, v in job.setting.items())]
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
    name = f"run-{number}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = keep.absolute() / job.row.id / job.setting["label"] / name
    folder.mkdir(parents=True)
    yield folder


def _run_once(job: Job, number: int, folder: Path) -> Record:
    log, output = folder / "log.json", folder / "output.txt"
    began, clock = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    code, peak = _start(job, folder, output, log)
    record: Record = {
        **job.setting,
        "run": number,
        "exit_code": code,
        "started": began,
        "seconds": round(time.monotonic() - clock, 3),
        "peak_rss_bytes": peak,
        **_environment(),
    }
    if code:
        return record | {"error": _error(output)}
    try:
        return record | _measurements(job, log)
    except (OSError, ValueError) as error:
        return record | {"exit_code": 1, "error": f"no figures: {error}"}


def _start(job: Job, folder: Path, output: Path, log: Path) -> tuple[int, int]:
    """Runs the command; returns its exit code and the peak memory of a process of it, in bytes."""
    from dlrm.tasks.start import end_with_launcher  # torch takes seconds to import

    module, processes = f"dlrm.scripts.{job.row.command}", job.setting["processes"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    with output.open("w") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", *(launcher if processes > 1 else ()), module),
                *(*job.setting["arguments"], f"--log_path={log}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_variables(job.setting["threads"]),
            preexec_fn=end_with_launcher,  # noqa: PLW1509  # one system call, no lock
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * 1024


def _variables(threads: int) -> dict[str, str]:
    """Returns the command's environment: this package, without the variables of a launcher."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}


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
    parameters = next(e["data"] for e in entries if e["step"] == "PARAMETER")
    summary = entries[-1]["data"]
    times = [data["step_time"] for data in steps if "step_time" in data]
    record: Record = {
        "summary": summary,
        "losses": [data["loss"] for data in steps if "loss" in data],
        "step_time": _percentiles(times) if times else {},
        "seed": parameters.get("seed"),
    }
    batch = job.setting["global_batch"]
    if batch is None:  # --batch_size max is known once it has run
        batch = int(parameters["batch_size"]) * job.setting["devices"]
        record["global_batch_found"] = batch
    return record | _values(job, summary, times, batch)


def _percentiles(times: list[float]) -> dict[str, float]:
    import numpy as np

    found = np.percentile(times, [50, 90, 99], method="inverted_cdf").tolist()
    return dict(zip(("p50", "p90", "p99"), found, strict=True))


def _values(job: Job, summary: dict[str, Any], times: list[float], batch: int) -> Record:
    """Returns the quantity, the unit and the values of a run, whose steps took `times`."""
    rule, smoke = job.row.rule, job.setting["smoke"]
    names = [name for name in summary if "_throughput" in name]
    rates = sorted(names, key=lambda name: int(re.findall(r"\d+", f"0 {name}")[-1]))  # by batch
    if rule.quantity == "metric" and not (smoke and rates):
        name = next((name for name in _METRICS if name in summary), None)
        if name is None:
            raise ValueError("the run tested nothing, so it has no metric")
        scale = 100 if name.endswith("top1") else 1  # documents print it in percent
        return {
            "quantity": "auc" if "auc" in name else "accuracy",
            "unit": f"{name}, %" if scale > 1 else name,
            "values": [scale * summary[name]],
        }
    if not rates:
        raise ValueError("the run has no throughput: it ended within --benchmark_warmup_steps")
    values = [summary.get("average_train_throughput", summary[rates[-1]])]
    if rule.values == "series" and not smoke:
        values = [batch / seconds for seconds in times]
        if len(values) <= rule.drop:
            raise ValueError(
                f"the run logged {len(values)} steps, of which the first {rule.drop} do not count"
            )
    return {"quantity": "throughput", "unit": f"{job.row.samples}/s", "values": values}


def _environment() -> dict[str, Any]:
    """Returns the facts of machine and programs, besides those of the setting."""
    import torch

    return {
        "dlrm": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "host": socket.gethostname(),
    }


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

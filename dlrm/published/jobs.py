"""Plans what to start for a row: processes, threads and the command line."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.flags import HelpAsked, Values
from dlrm.language import flags as bert_flags
from dlrm.machine import processor
from dlrm.published.rows import BenchmarkRow
from dlrm.scripts.commands import program_of
from dlrm.scripts.common import dlrm_flags
from dlrm.settings import setting
from dlrm.tasks.networks.flags import divide_batch
from dlrm.vision import flags as cnn_flags

MOST = 10**6  # of a number in a flag


@dataclass(frozen=True)
class RunOptions:
    """Holds what a user asks for besides the row; field names are those of the flags.

    Attributes:
        flags: more flags of the row's command, which take precedence.
    """

    dataset: str | None = setting(None, "directory of the row's data; default: generated data")
    smoke: bool = setting(False, "run two steps at reduced sizes, as a test")
    emulate: bool = setting(False, "let fewer processes compute the same global batch")
    pipeline: bool = setting(False, "use one process for each part of the row's network")
    grid: tuple[str, ...] = setting(
        (), "numbers of nodes and of devices in all, such as 1n1d,1n2d; default: the row's own"
    )
    repeats: int | None = setting(
        None, "number of runs; default: that of the document's rule", least=1, most=MOST
    )
    threads: int | None = setting(
        None, "threads of each process; default: cores / processes", least=1, most=MOST
    )
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """Describes one setting of a row, to be run `repeats` times.

    Attributes:
        setting: what comparable results of the row share: its place in the grid ("nodes",
            "devices"), "processes", fewer than the devices if these are emulated, "threads" of
            each, "arguments", the command line without `--log_path`, and what computes: the
            "processor", which is the "gpu" if it is one.
    """

    row: BenchmarkRow
    repeats: int
    setting: dict[str, Any]

    @property
    def name(self) -> str:
        """The row and the place, for messages."""
        return f"{self.row.id} {self.setting['label']}"


def plan_jobs(row: BenchmarkRow, options: RunOptions) -> list[Job]:
    """Returns a job for each place of the grid.

    Raises:
        ValueError: a place is larger than the machine, data that the row needs are not named, or
            a row without parts is to run as a pipeline.
        FileNotFoundError: the dataset is not there.
    """
    import torch  # takes seconds, and the help needs none

    from dlrm.distributed import choose_device

    _check(row, options)
    own = row.arguments(options.dataset and str(Path(options.dataset).absolute()))
    own += row.smoke if options.smoke else row.rule.flags
    values = _parsed(row.command, [*own, *options.flags])
    device = choose_device(values["base_device"])
    gpu = None if device == "cpu" else torch.cuda.get_device_name(device)
    capacity = torch.cuda.device_count() if gpu else os.cpu_count() or 1
    kind = "GPUs" if gpu else "CPU cores"
    parts = len(values.get("pipeline_splits", ())) + 1 if options.pipeline else 1
    if options.pipeline and parts == 1:
        raise ValueError(f"--pipeline: the network of {row.id} is not divided into parts")
    places = [_place(label) for label in options.grid or (row.grid,)]
    shares = [_replicas(nodes, devices, capacity // parts) for nodes, devices in places]
    threads = options.threads or max(1, (os.cpu_count() or 1) // (max(shares) * parts))
    jobs = []
    for (nodes, devices), replicas in zip(places, shares, strict=True):
        emulated = replicas < devices or replicas * parts > capacity
        if emulated and not options.emulate:
            asked = f"{devices} devices" + (f" of {parts} processes each" if parts > 1 else "")
            raise ValueError(
                f"{row.id}: {nodes}n{devices}d are {asked} on {nodes} machine(s), and this one has "
                f"{capacity} ({kind}); --emulate computes the same global batch in "
                f"{replicas * parts} process(es)"
            )
        if options.smoke and replicas < devices:
            replicas = 1
        whole = _batch_flags(values, devices, replicas, parts, options.smoke)
        arguments = [*own, *whole, *options.flags]
        setting = {
            "row": row.id,
            "label": f"{nodes}n{devices}d",
            "nodes": nodes,
            "devices": devices,
            "arguments": arguments,
            "processes": replicas * parts,
            "threads": threads,
            "smoke": options.smoke,
            "emulated": emulated,
            "pipeline": parts,
            "data": row.data if options.dataset else "generated",
            "changed": list(options.flags),
            "torch": torch.__version__,
            "gpu": gpu,
            "processor": gpu or processor(),
            **_batch(_parsed(row.command, arguments), replicas),
        }
        repeats = 1 if options.smoke else row.rule.repeats
        jobs.append(Job(row, options.repeats or repeats, setting))
    return jobs


def _check(row: BenchmarkRow, options: RunOptions) -> None:
    """Refuses data that are missing, and flags that the catalog sets itself."""
    if options.dataset is not None and row.data is None:
        raise ValueError(f"--dataset: {row.id} makes its own data")
    if options.dataset is not None and not (options.dataset and Path(options.dataset).exists()):
        raise FileNotFoundError(f"--dataset {options.dataset}: there is no such directory")
    needs_data = row.data and row.rule.quantity == "metric" and not options.smoke
    if needs_data and options.dataset is None:
        raise ValueError(
            f"{row.id}: what it publishes is a result of training on {row.data}: pass "
            "--dataset DIR. --smoke only tries the row"
        )
    names = [flag.lstrip("-").partition("=")[0] for flag in options.flags]
    for name, instead in (("log_path", "--keep DIR keeps the logs"), ("mode", "rows have a mode")):
        if name in names:
            raise ValueError(f"--{name} after --: {instead}")
    mode = row.given["mode"]
    needed = {"validate": "restore_path", "test": "load_checkpoint_path"}.get(mode)
    if needed and needed not in names and not (options.smoke and mode == "test"):
        raise ValueError(
            f"{row.id} tests what was trained before: name it, as -- --{needed}=/path/of/a/run"
        )
    most = 64 * (os.cpu_count() or 1)
    if options.threads and options.threads > most:
        raise ValueError(f"--threads {options.threads}: expected at most {most} here")


def _parsed(command: str, arguments: list[str]) -> Values:
    """Returns the flags of a row's command, with those of its recipe that divide the network."""
    try:
        if command == "cnn":
            return cnn_flags.parse(arguments)
        if command == "bert":
            return bert_flags.resolved(bert_flags.parse(arguments))[0]
        defaults = dlrm_flags.DIST_MAIN if command == "dist_main" else None
        return dlrm_flags.parse(arguments, dlrm_flags.make_flags(defaults))
    except HelpAsked:
        raise ValueError(f"--help: see {program_of(f'dlrm.scripts.{command}')} --help") from None


def _place(label: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)n(\d+)d", label)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise ValueError(
            f"--grid {label}: expected nodes and all their devices, such as 1n2d or 2n16d"
        )
    return int(found[1]), int(found[2])


def _replicas(nodes: int, devices: int, capacity: int) -> int:
    """The most replicas here that share the devices' batches evenly."""
    most = max(1, min(devices // nodes, capacity))
    return max(count for count in range(1, most + 1) if devices % count == 0)


def _batch_flags(
    values: Values, devices: int, replicas: int, parts: int, smoke: bool
) -> tuple[str, ...]:
    """Returns flags that keep the global batch where fewer replicas run than there are devices."""
    if "replicas" not in values:
        return ()  # --batch_size is the batch of all processes
    if parts == 1:
        return (f"--replicas={2 if smoke and replicas < devices else devices}",)
    whole = values["gradient_accumulation_steps"] * devices // replicas
    more = () if smoke else (f"--gradient_accumulation_steps={whole}",)
    return (f"--replicas={replicas}", *more)


def _batch(values: Values, replicas: int) -> dict[str, Any]:
    """Returns micro-batch, micro-batches a step and global batch of a command line.

    Each of `replicas` processes, or pipelines of processes, computes a share.
    """
    size, micro = values["batch_size"], values["gradient_accumulation_steps"]
    if size == "max":
        return {"batch_per_device": size, "accumulation": 1, "global_batch": None}
    if "replicas" not in values:
        return {"batch_per_device": size // replicas, "accumulation": micro, "global_batch": size}
    batches = divide_batch(values.replaced({"batch_size": int(size)}), replicas)
    return {
        "batch_per_device": int(size),
        "accumulation": batches.accumulation,
        "global_batch": batches.global_batch,
    }

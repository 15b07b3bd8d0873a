"""Plans what to start for a row: processes, threads and the command line."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.flags import HelpAsked
from dlrm.language import flags as bert_flags
from dlrm.published.rows import RULES, BenchmarkRow, Rule
from dlrm.published.smoke import smoke_flags
from dlrm.scripts.commands import program_of
from dlrm.scripts.common import dlrm_flags
from dlrm.settings import setting
from dlrm.tasks.networks.flags import divide_batch
from dlrm.vision import flags as cnn_flags

_PREPARED_BY = {  # data of a row -> the command that makes the dataset
    "imagenet": "dlrm prepare-images",
    "criteo": "preproc/prepare_dataset.sh",
    "squad": "dlrm prepare-text",
    "mrpc": "dlrm prepare-text",
    "wiki": "dlrm prepare-text",
}
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
            each, and "arguments", the command line without `--log_path`.
    """

    row: BenchmarkRow
    repeats: int
    setting: dict[str, Any]

    @property
    def name(self) -> str:
        """The row and the place, for messages."""
        return f"{self.row.id} {self.setting['label']}"

    @property
    def rule(self) -> Rule:
        return RULES[self.row.rule]


def plan_jobs(row: BenchmarkRow, options: RunOptions) -> list[Job]:
    """Returns a job for each place of the grid.

    Raises:
        ValueError: a place is larger than the machine, data that the row needs are not named, or
            a row without parts is to run as a pipeline.
        FileNotFoundError: the dataset is not there.
    """
    _check_data(row, options)
    _check_flags(row, options)
    if options.pipeline and row.parts == 1:
        raise ValueError(f"--pipeline: the network of {row.id} is not divided into parts")
    parts = row.parts if options.pipeline else 1
    capacity, kind = _capacity()
    places = [_place(label) for label in options.grid or (row.grid,)]
    shares = [_replicas(nodes, devices, capacity // parts) for nodes, devices in places]
    for (nodes, devices), replicas in zip(places, shares, strict=True):
        short = replicas < devices or replicas * parts > capacity
        if short and not options.emulate:
            asked = f"{devices} devices" + (f" of {parts} processes each" if parts > 1 else "")
            raise ValueError(
                f"{row.id}: {nodes}n{devices}d are {asked} on {nodes} machine(s), and this one has "
                f"{capacity} ({kind}); --emulate computes the same global batch in "
                f"{replicas * parts} process(es)"
            )
    threads = options.threads or max(1, (os.cpu_count() or 1) // (max(shares) * parts))
    return [
        _job(row, nodes, devices, replicas, threads, options)
        for (nodes, devices), replicas in zip(places, shares, strict=True)
    ]


def _job(
    row: BenchmarkRow, nodes: int, devices: int, replicas: int, threads: int, options: RunOptions
) -> Job:
    import torch  # takes seconds, and the help needs none

    rule = RULES[row.rule]
    parts = row.parts if options.pipeline else 1
    emulated = replicas < devices or nodes > 1 or replicas * parts > _capacity()[0]
    if options.smoke and replicas < devices:
        replicas = 1
    arguments = row.arguments(options.dataset and str(Path(options.dataset).absolute()))
    arguments += smoke_flags(row) if options.smoke else rule.flags
    arguments += _batch_flags(row, devices, replicas, parts, options.smoke)
    arguments += options.flags
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
        **_batch(row.command, arguments, replicas),
    }
    return Job(row, options.repeats or (1 if options.smoke else rule.repeats), setting)


def _batch_flags(
    row: BenchmarkRow, devices: int, replicas: int, parts: int, smoke: bool
) -> tuple[str, ...]:
    """Returns flags that keep the global batch where fewer replicas run than there are devices."""
    if row.command not in ("cnn", "bert"):
        return ()  # --batch_size is the batch of all processes
    if parts == 1:
        return (f"--replicas={2 if smoke and replicas < devices else devices}",)
    whole = int(row.given.get("gradient_accumulation_steps", "1")) * devices // replicas
    more = () if smoke else (f"--gradient_accumulation_steps={whole}",)
    return (f"--replicas={replicas}", *more)


def _batch(command: str, arguments: Sequence[str], replicas: int) -> dict[str, Any]:
    """Returns micro-batch, micro-batches a step and global batch of a command line.

    Each of `replicas` processes, or pipelines of processes, computes a share.
    """
    try:
        return _parsed_batch(command, list(arguments), replicas)
    except HelpAsked:
        raise ValueError(f"--help: see {program_of(f'dlrm.scripts.{command}')} --help") from None


def _parsed_batch(command: str, arguments: list[str], replicas: int) -> dict[str, Any]:
    if command == "cnn":
        values = cnn_flags.parse(arguments)
    elif command == "bert":
        values, _ = bert_flags.resolved(bert_flags.parse(arguments))
        if values["batch_size"] == "max":
            return {"batch_per_device": "max", "accumulation": 1, "global_batch": None}
        values = type(values)({**values, "batch_size": int(values["batch_size"])}, values.given)
    else:
        defaults = dlrm_flags.DIST_MAIN if command == "dist_main" else None
        values = dlrm_flags.parse(arguments, dlrm_flags.make_flags(defaults))
        whole = values["batch_size"]
        each, micro = whole // replicas, values["gradient_accumulation_steps"]
        return {"batch_per_device": each, "accumulation": micro, "global_batch": whole}
    batches = divide_batch(values, replicas)
    return {
        "batch_per_device": values["batch_size"],
        "accumulation": batches.accumulation,
        "global_batch": batches.global_batch,
    }


def _place(label: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)n(\d+)d", label)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise ValueError(
            f"--grid {label}: expected nodes and all their devices, such as 1n2d or 2n16d"
        )
    return int(found[1]), int(found[2])


def _capacity() -> tuple[int, str]:
    """Returns the number and the kind of this machine's devices."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count(), "GPUs"
    return os.cpu_count() or 1, "CPU cores"


def _replicas(nodes: int, devices: int, capacity: int) -> int:
    """The most replicas here that share the devices' batches evenly."""
    most = max(1, min(devices // nodes, capacity))
    return max(count for count in range(1, most + 1) if devices % count == 0)


def _check_data(row: BenchmarkRow, options: RunOptions) -> None:
    if options.dataset is not None:
        if row.data is None:
            raise ValueError(f"--dataset: {row.id} makes its own data")
        if not options.dataset or not Path(options.dataset).exists():
            raise FileNotFoundError(f"--dataset {options.dataset}: there is no such directory")
        return
    if row.data is None or options.smoke or RULES[row.rule].quantity == "throughput":
        return
    made_by = next((c for name, c in _PREPARED_BY.items() if row.data.startswith(name)), None)
    hint = f"; {made_by} makes it" if made_by else ""
    raise ValueError(
        f"{row.id}: what it publishes is a result of training on {row.data}: pass --dataset DIR"
        f"{hint}. --smoke only tries the row"
    )


def _check_flags(row: BenchmarkRow, options: RunOptions) -> None:
    """Refuses flags that the catalog sets itself, and rows whose checkpoint is not named."""
    names = [flag.lstrip("-").partition("=")[0] for flag in options.flags]
    for name, instead in (("log_path", "--keep DIR keeps the logs"), ("mode", "rows have a mode")):
        if name in names:
            raise ValueError(f"--{name} after --: {instead}")
    needed = {"validate": "restore_path", "test": "load_checkpoint_path"}.get(row.given["mode"])
    if needed and needed not in names and not (options.smoke and row.given["mode"] == "test"):
        raise ValueError(
            f"{row.id} tests what was trained before: name it, as -- --{needed}=/path/of/a/run"
        )
    most = 64 * (os.cpu_count() or 1)
    if options.threads and options.threads > most:
        raise ValueError(f"--threads {options.threads}: expected at most {most} here")

"""The processes that train together, their launch, and how they join."""

import gc
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The number of processes that mpirun or srun has started, in the order in which the names count.
_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_JOIN_SECONDS = 600.0  # to wait for missing processes
# Longest wait in a collective: one rank may write or read files while the others wait.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class World:
    """The processes of a run; the default is a run of one process.

    With several processes, a process group of torch joins them.

    Attributes:
        rank: this process, in [0, size).
        size: number of processes.
        device: the device of this process, "cpu" or "cuda" or "cuda:<index>".
        group: the process group; None is torch's default one.
        gradients: the group in which gradients of dense weights are summed, so that they do not
            queue behind other transfers; None is `group`.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    group: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None

    def part(self, count: int) -> slice:
        """Returns this rank's share of `count` consecutive items; sizes differ by at most one."""
        return part(count, self.rank, self.size)


def part(count: int, rank: int, size: int) -> slice:
    """Returns a rank's share of `count` consecutive items; sizes differ by at most one."""
    return slice(count * rank // size, count * (rank + 1) // size)


@dataclass(frozen=True)
class Pipelines:
    """Division of a network's parts among the processes of a run.

    Attributes:
        world: all processes.
        replicas: the processes that hold the same part as this one, one of each pipeline; each
            computes its own share of a batch.
        parts: the processes of this one's pipeline, with one part each, in the order of the parts.
    """

    world: World
    replicas: World
    parts: World


def pipelines(world: World, parts: int = 1) -> Pipelines:
    """Divides the processes into pipelines of `parts` adjacent ranks; all ranks call it.

    Args:
        world: all processes, a multiple of `parts`.
        parts: processes of a pipeline.
    """
    assert world.size % parts == 0, f"{world.size} processes in pipelines of {parts}"
    if parts == 1:
        return Pipelines(world, world, World(device=world.device))
    ranks = torch.arange(world.size).view(-1, parts)
    found = []
    for groups, place in ((ranks.T, world.rank // parts), (ranks, world.rank % parts)):
        own, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=_TIMEOUT)
        found.append(World(place, groups.shape[1], world.device, own))
    return Pipelines(world, *found)


@dataclass(frozen=True)
class Launch:
    """A launcher's description of this process.

    Attributes:
        rank: in [0, size).
        size: processes of the run.
        local_rank: in [0, local_size).
        local_size: processes on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Reads the variables of torchrun or torch.distributed.launch.

    Raises:
        ValueError: they contradict each other, or some are missing; the message has names and
            values. Or mpirun or srun has started several processes without them.
    """
    found = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in environment:
            text = environment[name]
            if not text.isascii() or not text.isdigit():
                raise ValueError(f"{name}={text}: expected a number, 0 or more")
            found[name] = int(text)
    if "RANK" not in found and "WORLD_SIZE" not in found:
        _check_alone(environment)
        return Launch()
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in found]
    size = found.get("WORLD_SIZE", 1)
    if size > 1:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not set, though "
            f"{' and '.join(f'{k}={v}' for k, v in found.items())}; start all processes by "
            "torchrun or python -m torch.distributed.launch --use_env"
        )
    local_size = found.get("LOCAL_WORLD_SIZE", size)
    result = Launch(found["RANK"], size, found["LOCAL_RANK"], local_size)
    for small, large, what in (
        ("RANK", "WORLD_SIZE", (result.rank, size)),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", (result.local_rank, local_size)),
    ):
        if not what[0] < what[1]:
            raise ValueError(f"{small}={what[0]} contradicts {large}={what[1]}: expected less")
    if local_size > size:
        raise ValueError(f"LOCAL_WORLD_SIZE={local_size} contradicts WORLD_SIZE={size}")
    return result


def _check_alone(environment: Mapping[str, str]) -> None:
    """Refuses processes of mpirun or srun that would each train the same model."""
    name = next((name for name in _STARTED if environment.get(name)), None)
    if name is None or environment[name] == "1":
        return
    if name.startswith("SLURM_"):  # set in shells of salloc and in the script of sbatch, too
        is_script = environment.get("ENVIRONMENT") == "BATCH"
        is_step = "SLURM_STEP_ID" in environment
        if "SLURM_PROCID" not in environment or (is_script and not is_step):
            return
    raise ValueError(
        f"{name}={environment[name]}: processes that do not know each other; start one torchrun on "
        "each machine instead: srun --ntasks-per-node 1 torchrun --nnodes N --nproc_per_node GPUS "
        "--rdzv_backend c10d --rdzv_endpoint HOST:29400 -m dlrm.scripts.main ..."
    )


def join_world(device: str, backend: str = "nccl") -> World:
    """Joins the processes that a launcher has started; without one, this process is alone.

    Args:
        device: "cpu", or "cuda", where each process of a machine takes a device of its own.
        backend: backend for tensors on CUDA; those on the CPU use gloo.

    Raises:
        ValueError: the launcher's variables contradict each other, two processes share a device,
            or there are too few devices.
        OSError: the other processes cannot be reached.
    """
    found = launch()
    if found.size == 1:
        if device.startswith("cuda:"):  # also for code that uses the current device
            torch.cuda.set_device(device)
        return World(device=device)
    if device.startswith("cuda"):
        device = _own_cuda_device(device, found)
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    serves = found.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=_JOIN_SECONDS)
    try:
        store = dist.TCPStore(
            host, int(port), is_master=serves, timeout=wait, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo" if device == "cpu" else f"cpu:gloo,cuda:{backend}",
            store=dist.PrefixStore("group", _meet(store, found, wait)),
            rank=found.rank,
            world_size=found.size,
            timeout=_TIMEOUT,
        )
        gradients = dist.new_group(timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        reason = str(error).splitlines()[0]
        raise OSError(
            f"rank {found.rank} cannot join the others at {host}:{port}: {reason}"
        ) from error
    world = World(found.rank, found.size, device, gradients=gradients)
    own = device != "cpu" and backend == "nccl"  # NCCL hangs unless each process has its device
    name = f"GPU {torch.cuda.get_device_properties(device).uuid}" if own else None
    start_transfers(world, name)
    return world


def start_transfers(world: World, place: str | None = None) -> None:
    """Runs a first sum in each group of a world: NCCL's first transfer must include all ranks.

    Args:
        world: the processes, all of which call it.
        place: unique name of the device, if this process must have it for itself; None may be
            shared.

    Raises:
        ValueError: two processes have one device; every process raises it, and names them.
    """
    places: list[Any] = [None] * world.size
    dist.all_gather_object(places, place, group=world.group)
    for rank, name in enumerate(places):
        if name is not None and (first := places.index(name)) < rank:
            raise ValueError(
                f"ranks {first} and {rank} compute on one device, {name}: expected one for each; "
                "the launcher or CUDA_VISIBLE_DEVICES gives it to both"
            )
    for group in (world.group, world.gradients):
        dist.all_reduce(torch.zeros(1, device=world.device), group=group)


def _meet(store: dist.Store, found: Launch, wait: timedelta) -> dist.Store:
    """Waits for all ranks and returns the part of the store that is theirs alone.

    A launcher's store outlives the processes that it restarts, and entries of dead processes must
    not be taken for those of living ones. Each rank therefore publishes a newly drawn number, and
    rank 0 answers each.
    """
    mine = uuid.uuid4().hex
    if found.rank:
        store.set(f"hello/{found.rank}", mine)
        prefix = store.get(f"reply/{mine}").decode()
        store.set(f"met/{mine}/{prefix}", "")
        return dist.PrefixStore(prefix, store)
    end, missing = time.monotonic() + wait.total_seconds(), set(range(1, found.size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]):
                shown = store.get(f"hello/{rank}").decode()
                store.set(f"reply/{shown}", mine)
                if store.check([f"met/{shown}/{mine}"]):
                    missing.remove(rank)
        if time.monotonic() > end:
            named = ", ".join(map(str, sorted(missing)))
            raise RuntimeError(f"waited {wait.total_seconds():g} s for rank {named}")
        time.sleep(0.01)
    return dist.PrefixStore(mine, store)


def _own_cuda_device(device: str, found: Launch) -> str:
    if device != "cuda":
        raise ValueError(f"--base_device {device}: expected cuda, of which each process takes one")
    count = torch.cuda.device_count()
    if found.local_size > count:
        raise ValueError(
            f"{found.local_size} processes on this machine and {count} CUDA devices: expected one "
            "for each (--nproc_per_node)"
        )
    torch.cuda.set_device(found.local_rank)
    return f"cuda:{found.local_rank}"


def shutdown(world: World, seconds: float | None = None) -> None:
    """Leaves the process group, if there is one.

    Args:
        seconds: maximum time to wait for collectives that have begun, which never end where another
            rank waits for this one; None waits for them.
    """
    if world.size == 1 or not dist.is_initialized():
        return
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    if seconds is None:
        dist.destroy_process_group()
    else:
        leaving.start()
        leaving.join(seconds)
    if not leaving.is_alive():
        gc.collect()  # otherwise gloo's threads may outlive what they use, and abort at exit


def choose_device(asked: str | None) -> str:
    """Returns the device to run on: the requested one, otherwise CUDA if available.

    Raises:
        ValueError: the device is unknown or not available.
    """
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", asked):
        raise ValueError(f"--base_device {asked}: expected cpu, cuda or cuda:<index>")
    if asked == "cpu":
        return asked
    if torch.version.cuda is None:
        raise ValueError(f"--base_device {asked}: torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise ValueError(
            f"--base_device {asked}: torch finds no CUDA device here; use cpu. dlrm doctor says why"
        )
    index, count = int(asked.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"--base_device {asked}: expected an index below {count}, the devices here"
        )
    return asked

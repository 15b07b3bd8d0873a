"""The processes that train together: joining them, and what they send each other."""

import gc
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_JOIN_SECONDS = 600.0  # to wait for processes that do not come
_store: dist.Store | None = None  # through which the ranks found each other

_OMPI = {  # what mpirun sets, by the names of torch's launchers
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


@dataclass(frozen=True)
class World:
    """The processes of a run; the default is the only process of a run on one machine.

    Where there are several, torch's default process group joins them.

    Attributes:
        rank: this process, in [0, size).
        size: number of processes.
        device: where this process computes, "cpu" or "cuda" or "cuda:<index>".
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def part(self, count: int) -> slice:
        """Returns this rank's share of `count` things in a row; sizes differ by at most one."""
        return part(count, self.rank, self.size)


def part(count: int, rank: int, size: int) -> slice:
    """Returns a rank's share of `count` things in a row; sizes differ by at most one."""
    return slice(count * rank // size, count * (rank + 1) // size)


class OtherRankError(RuntimeError):
    """Another rank has met an error and says it; this one has nothing to add."""


@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process.

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
    """Reads the variables of torchrun, torch.distributed.launch or mpirun.

    Raises:
        ValueError: they contradict each other, or some are missing; names and values are given.
    """
    found = {}
    for name, other in _OMPI.items():
        key = name if name in environment else other
        if key in environment:
            text = environment[key]
            if not text.isascii() or not text.isdigit():
                raise ValueError(f"{key}={text}: expected a number, 0 or more")
            found[name] = int(text)
    if "RANK" not in found and "WORLD_SIZE" not in found:
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


def join_world(device: str, backend: str = "nccl", timeout: float = 1800.0) -> World:
    """Joins the processes that a launcher has started; without one, this process is the world.

    Args:
        device: "cpu", or "cuda", of which each process of a machine takes its own.
        backend: for tensors on CUDA; those on the CPU travel by gloo.
        timeout: seconds after which a rank counts as hung (`dlrm.train.watchdog`), a tenth of those
            that a transfer may take: one rank may write while the others wait.

    Raises:
        ValueError: the launcher's variables contradict each other, or there are too few devices.
        OSError: the other processes cannot be reached.
    """
    found = launch()
    if found.size == 1:
        if device.startswith("cuda:"):  # also for whatever takes the current one
            torch.cuda.set_device(device)
        return World(device=device)
    if device.startswith("cuda"):
        device = _own_cuda_device(device, found)
    wait = timedelta(seconds=min(timeout, _JOIN_SECONDS))
    try:
        global _store
        _store = _meet(_connect(found, wait), found, wait)
        dist.init_process_group(
            "gloo" if device == "cpu" else f"cpu:gloo,cuda:{backend}",
            store=dist.PrefixStore("group", _store),
            rank=found.rank,
            world_size=found.size,
            timeout=timedelta(seconds=10 * timeout),  # who hangs is named before, by the watchdog
        )
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise OSError(f"rank {found.rank} cannot join the others at {where}: {reason}") from error
    return World(found.rank, found.size, device)


def _connect(found: Launch, wait: timedelta) -> dist.Store:
    """Connects to the launcher's store or, where it has none, to that of rank 0."""
    port = int(os.environ["MASTER_PORT"])
    serves = found.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        is_master=serves,
        timeout=wait,
        wait_for_workers=False,
    )


def _meet(store: dist.Store, found: Launch, wait: timedelta) -> dist.Store:
    """Waits for all ranks and returns what of the store is theirs alone.

    A launcher's store outlives the processes that it restarts: what the dead have left in it must
    not be taken for the living. So each rank shows a number that it has just drawn, and rank 0
    answers those.
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


def clone_store() -> dist.Store:
    """Returns a connection of its own, for a thread, to what the ranks of a run tell each other."""
    assert _store is not None, "of a world that was joined"
    return dist.PrefixStore("watch", _store.clone())  # type: ignore[attr-defined]


def shutdown(world: World) -> None:
    """Leaves the process group, if there is one."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # else gloo's threads may outlive what they use, and abort at exit


def all_sum(tensor: Tensor, world: World) -> Tensor:
    """Sums a tensor over the ranks, in place, and returns it."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(value: T, world: World) -> list[T]:
    """Returns every rank's value, in the order of the ranks, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def from_first(value: T, world: World) -> T:
    """Returns rank 0's value on every rank."""
    values = [value]
    if world.size > 1:
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


@contextmanager
def agreed(world: World, *errors: type[Exception]) -> Iterator[None]:
    """Ends with an error on every rank where it does on any: none is left waiting for the others.

    What is raised within is raised by one rank that met it, the lowest, and says which met it where
    that is not rank 0 or all; the others raise `OtherRankError`.

    Args:
        world: the ranks, all of which come here.
        errors: those that are agreed upon; others pass as they are.
    """
    mine: Exception | None = None
    try:
        yield
    except errors as error:
        mine = error
    if world.size == 1:
        if mine:
            raise mine
        return
    failed = [
        rank for rank, text in enumerate(gather(mine and str(mine), world)) if text is not None
    ]
    if not failed:
        return
    if mine is None or world.rank != failed[0]:
        raise OtherRankError(f"rank {failed[0]} met an error") from mine
    if len(failed) == world.size or failed == [0]:
        raise mine
    ranks = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    kind = next(kind for kind in errors if isinstance(mine, kind))
    raise kind(f"{ranks}: {mine}") from mine


def check_same(values: Mapping[str, Any], world: World) -> None:
    """Checks that all ranks have the same values.

    Raises:
        ValueError: on rank 0, naming what differs, and who has what.
        OtherRankError: on the others.
    """
    everyone = gather({name: repr(value) for name, value in values.items()}, world)
    first = everyone[0]
    different = []
    for rank, theirs in enumerate(everyone):
        different += [
            f"{name}: {first.get(name, 'none')} on rank 0, {theirs.get(name, 'none')} on {rank}"
            for name in sorted(first.keys() | theirs.keys())
            if first.get(name) != theirs.get(name)
        ]
    if not different:
        return
    if world.rank:
        raise OtherRankError("rank 0 names what differs")
    raise ValueError("the ranks of a run must agree:\n  " + "\n  ".join(different))


def exchange(
    vectors: Tensor,
    tables_by_rank: Sequence[Sequence[int]],
    world: World,
    samples_by_rank: Sequence[int] | None = None,
) -> Callable[[], Tensor]:
    """Starts to send every rank the vectors of its samples; the transfer goes on in the background.

    Every rank looks up its own tables for the whole batch and needs all tables for its own samples.
    Gradients travel back in the same way, and as early.

    Args:
        vectors: of this rank's tables, `[batch, own tables, dim]`, for the batch of all ranks.
        tables_by_rank: table numbers of each rank, in the order of its vectors.
        world: the ranks.
        samples_by_rank: how many samples each has of the batch; None is `World.part`.

    Returns:
        A function that waits and returns the vectors of all tables, in the order of their numbers,
        `[own samples, tables, dim]`.
    """
    if world.size == 1:
        assert list(tables_by_rank[0]) == list(range(vectors.shape[1]))
        return lambda: vectors
    transfer = _Transfer(vectors, tables_by_rank, world, samples_by_rank)
    started = _Start.apply(vectors, transfer)
    return lambda: _Finish.apply(started, transfer)


class _Transfer:
    """One exchange: what goes where, what is on its way, and in which order rows arrive.

    Both ways a rank has one tensor of rows `[n, dim]`. What comes of or goes to other ranks lies in
    it by rank, then sample, then table of that rank.
    """

    def __init__(
        self,
        vectors: Tensor,
        tables_by_rank: Sequence[Sequence[int]],
        world: World,
        samples_by_rank: Sequence[int] | None,
    ):
        self.batch, self.own_tables, self.dim = vectors.shape
        self.world, self.tables_by_rank = world, tables_by_rank
        self.num_tables = sum(map(len, tables_by_rank))
        if samples_by_rank is None:
            parts = (part(self.batch, rank, world.size) for rank in range(world.size))
            samples_by_rank = [p.stop - p.start for p in parts]
        self.samples_by_rank = samples_by_rank
        self.num_samples = samples_by_rank[world.rank]
        self.landing = vectors  # where what is on its way will be
        self._on_its_way: Any = None

    def order(self, device: torch.device) -> Tensor:
        """For each of the own samples and each table: the row that has its vector as it arrived."""
        first = torch.empty(self.num_tables, dtype=torch.int64)
        step = torch.empty(self.num_tables, dtype=torch.int64)
        begin = 0
        for tables in self.tables_by_rank:
            first[list(tables)] = begin + torch.arange(len(tables))
            step[list(tables)] = len(tables)
            begin += self.num_samples * len(tables)
        return (first + torch.arange(self.num_samples)[:, None] * step).flatten().to(device)

    def whole_batch(self, rows: Tensor) -> list[Tensor]:
        """Cuts the rows of this rank's tables in those of each rank's samples."""
        return list(rows.split([count * self.own_tables for count in self.samples_by_rank]))

    def own_samples(self, rows: Tensor) -> list[Tensor]:
        """Cuts the rows of this rank's samples in those of each rank's tables."""
        return list(rows.split([self.num_samples * len(t) for t in self.tables_by_rank]))

    def send(self, to_rank: list[Tensor], from_rank: list[Tensor]) -> None:
        """Starts to send `to_rank[r]` to each rank r and to fill `from_rank[r]` by it."""
        me, transfers = self.world.rank, []
        for rank in range(self.world.size):
            if rank != me:
                for way, rows in ((dist.isend, to_rank[rank]), (dist.irecv, from_rank[rank])):
                    if rows.numel():
                        transfers.append(dist.P2POp(way, rows.view(torch.uint8), rank))
        pending = dist.batch_isend_irecv(transfers) if transfers else []
        self._on_its_way = pending, to_rank  # which must live until it is sent
        from_rank[me].copy_(to_rank[me])

    def wait(self) -> None:
        pending, _ = self._on_its_way
        for work in pending:
            work.wait()
        self._on_its_way = None


class _Start(torch.autograd.Function):
    """Sends the vectors; backward it waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        rows = vectors.reshape(-1, transfer.dim)
        transfer.landing = rows.new_empty(transfer.num_samples * transfer.num_tables, transfer.dim)
        transfer.send(transfer.whole_batch(rows), transfer.own_samples(transfer.landing))
        return vectors.new_empty(0)  # carries nothing: it ties `_Finish` to this in the graph

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        transfer: _Transfer = ctx.transfer
        transfer.wait()
        return transfer.landing.view(transfer.batch, transfer.own_tables, transfer.dim), None


class _Finish(torch.autograd.Function):
    """Waits for the vectors and puts them in order; backward it sends their gradients."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        rows, transfer.landing = transfer.landing, started
        ctx.order = transfer.order(rows.device)
        rows = rows.index_select(0, ctx.order)
        return rows.view(transfer.num_samples, transfer.num_tables, transfer.dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        transfer: _Transfer = ctx.transfer
        where = torch.empty_like(ctx.order)
        where[ctx.order] = torch.arange(len(where), device=where.device)
        rows = grads[0].reshape(-1, transfer.dim).index_select(0, where)
        transfer.landing = rows.new_empty(transfer.batch * transfer.own_tables, transfer.dim)
        transfer.send(transfer.own_samples(rows), transfer.whole_batch(transfer.landing))
        return grads[0].new_empty(0), None

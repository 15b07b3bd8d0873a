"""The exchange of looked-up vectors, from the ranks that hold tables to those that hold samples."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm import step_clock
from dlrm.distributed.world import World, part


def exchange(
    vectors: Tensor,
    tables_by_rank: Sequence[Sequence[int]],
    world: World,
    samples_by_rank: Sequence[int] | None = None,
) -> Callable[[], Tensor]:
    """Starts to send every rank the vectors of its samples; the transfer runs in the background.

    Every rank looks up its own tables for the whole batch and needs all tables for its own samples.
    Gradients travel back in the same way, also in the background.

    Args:
        vectors: vectors of this rank's tables, `[batch, own tables, dim]`, for the batch of all
            ranks.
        tables_by_rank: table numbers of each rank, in the order of its vectors.
        samples_by_rank: number of samples of each rank in the batch; None is `World.part`.

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
    """One exchange: destinations, pending transfers, and the order in which rows arrive.

    In both directions a rank has one tensor of rows `[n, dim]`. Rows from or to other ranks are
    stored by rank, then sample, then table of that rank.
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
        self.landing = vectors  # receives the pending transfer
        self._on_its_way: Any = None

    def order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the arrival row of each vector, by own sample and table, and the inverse."""
        return _order(self.num_samples, tuple(map(tuple, self.tables_by_rank)), device)

    def whole_batch(self, rows: Tensor) -> list[Tensor]:
        """Splits the rows of this rank's tables into those of each rank's samples."""
        return list(rows.split([count * self.own_tables for count in self.samples_by_rank]))

    def own_samples(self, rows: Tensor) -> list[Tensor]:
        """Splits the rows of this rank's samples into those of each rank's tables."""
        return list(rows.split([self.num_samples * len(t) for t in self.tables_by_rank]))

    def send(self, to_rank: list[Tensor], from_rank: list[Tensor]) -> None:
        """Starts to send `to_rank[r]` to each rank r and to receive `from_rank[r]` from it."""
        me, transfers = self.world.rank, []
        for rank in range(self.world.size):
            if rank != me:
                for way, rows in ((dist.isend, to_rank[rank]), (dist.irecv, from_rank[rank])):
                    if rows.numel():
                        data, group = rows.view(torch.uint8), self.world.group
                        transfers.append(dist.P2POp(way, data, group=group, group_peer=rank))
        pending = dist.batch_isend_irecv(transfers) if transfers else []
        self._on_its_way = pending, to_rank  # `to_rank` must live until it is sent
        from_rank[me].copy_(to_rank[me])

    def wait(self) -> None:
        pending, _ = self._on_its_way
        with step_clock.part(step_clock.EXCHANGE):
            for work in pending:
                work.wait()
        self._on_its_way = None


@cache  # never evicted: a recorded step reads these at their addresses
@torch.inference_mode(False)  # otherwise they could only be used in inference
def _order(
    num_samples: int, tables_by_rank: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    num_tables = sum(map(len, tables_by_rank))
    first = torch.empty(num_tables, dtype=torch.int64)
    step = torch.empty(num_tables, dtype=torch.int64)
    begin = 0
    for tables in tables_by_rank:
        first[list(tables)] = begin + torch.arange(len(tables))
        step[list(tables)] = len(tables)
        begin += num_samples * len(tables)
    order = (first + torch.arange(num_samples)[:, None] * step).flatten()
    return order.to(device), order.argsort().to(device)


class _Start(torch.autograd.Function):
    """Sends the vectors; its backward pass waits for their gradients."""

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
    """Waits for the vectors and puts them in order; its backward pass sends their gradients."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        rows, transfer.landing = transfer.landing, started
        order, ctx.inverse = transfer.order(rows.device)
        rows = rows.index_select(0, order)
        return rows.view(transfer.num_samples, transfer.num_tables, transfer.dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        transfer: _Transfer = ctx.transfer
        rows = grads[0].reshape(-1, transfer.dim).index_select(0, ctx.inverse)
        transfer.landing = rows.new_empty(transfer.batch * transfer.own_tables, transfer.dim)
        transfer.send(transfer.own_samples(rows), transfer.whole_batch(transfer.landing))
        return grads[0].new_empty(0), None

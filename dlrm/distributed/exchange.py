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
    """Starts to send every rank the vectors of its samples.

    Every rank looks up its own tables for the whole batch and needs all tables for its own samples.
    Gradients travel back in the same way. Transfers run in the background.

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
    """One exchange: who holds which tables and samples, and the pending transfer.

    In both directions a rank has one tensor of rows `[n, dim]`. Rows from or to other ranks are
    stored by rank, then sample, then table of that rank.
    """

    _landing: Tensor  # receives the pending transfer
    _pending: tuple[list[Any], list[Tensor]]

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

    def send_vectors(self, vectors: Tensor) -> None:
        rows = vectors.reshape(-1, self.dim)
        self._landing = rows.new_empty(self.num_samples * self.num_tables, self.dim)
        self._send(self._whole_batch(rows), self._own_samples(self._landing))

    def receive_vectors(self) -> Tensor:
        self._wait()
        order, self._inverse = self._order()
        rows = self._landing.index_select(0, order)
        del self._landing
        return rows.view(self.num_samples, self.num_tables, self.dim)

    def send_gradients(self, grad: Tensor) -> None:
        rows = grad.reshape(-1, self.dim).index_select(0, self._inverse)
        self._landing = rows.new_empty(self.batch * self.own_tables, self.dim)
        self._send(self._own_samples(rows), self._whole_batch(self._landing))

    def receive_gradients(self) -> Tensor:
        self._wait()
        return self._landing.view(self.batch, self.own_tables, self.dim)

    def _order(self) -> tuple[Tensor, Tensor]:
        """Returns the arrival row of each vector, by own sample and table, and the inverse."""
        tables = tuple(map(tuple, self.tables_by_rank))
        return _order(self.num_samples, tables, self._landing.device)

    def _whole_batch(self, rows: Tensor) -> list[Tensor]:
        """Splits the rows of this rank's tables into those of each rank's samples."""
        return list(rows.split([count * self.own_tables for count in self.samples_by_rank]))

    def _own_samples(self, rows: Tensor) -> list[Tensor]:
        """Splits the rows of this rank's samples into those of each rank's tables."""
        return list(rows.split([self.num_samples * len(t) for t in self.tables_by_rank]))

    def _send(self, to_rank: list[Tensor], from_rank: list[Tensor]) -> None:
        """Starts to send `to_rank[r]` to each rank r and to receive `from_rank[r]` from it."""
        me, transfers = self.world.rank, []
        for rank in range(self.world.size):
            if rank != me:
                for way, rows in ((dist.isend, to_rank[rank]), (dist.irecv, from_rank[rank])):
                    if rows.numel():
                        data, group = rows.view(torch.uint8), self.world.group
                        transfers.append(dist.P2POp(way, data, group=group, group_peer=rank))
        pending = dist.batch_isend_irecv(transfers) if transfers else []
        self._pending = pending, to_rank  # `to_rank` must live until it is sent
        from_rank[me].copy_(to_rank[me])

    def _wait(self) -> None:
        pending, _ = self._pending
        with step_clock.part(step_clock.EXCHANGE):
            for work in pending:
                work.wait()
        del self._pending


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
        transfer.send_vectors(vectors)
        return vectors.new_empty(0)  # carries nothing: it ties `_Finish` to this in the graph

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.receive_gradients(), None


class _Finish(torch.autograd.Function):
    """Waits for the vectors and puts them in order; its backward pass sends their gradients."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.receive_vectors()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.send_gradients(grads[0])
        return grads[0].new_empty(0), None

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
    _pending: tuple[Any, Tensor]

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
        self.num_samples = samples_by_rank[world.rank]
        # Rows of this rank's tables, by the rank of their samples; and the other way round.
        self._whole_batch = [count * self.own_tables for count in samples_by_rank]
        self._own_samples = [self.num_samples * len(tables) for tables in tables_by_rank]

    def send_vectors(self, vectors: Tensor) -> None:
        self._send(vectors.reshape(-1, self.dim), self._whole_batch, self._own_samples)

    def receive_vectors(self) -> Tensor:
        rows = self._received()
        tables = tuple(map(tuple, self.tables_by_rank))
        order, self._inverse = _order(self.num_samples, tables, rows.device)
        return rows.index_select(0, order).view(self.num_samples, self.num_tables, self.dim)

    def send_gradients(self, grad: Tensor) -> None:
        rows = grad.reshape(-1, self.dim).index_select(0, self._inverse)
        self._send(rows, self._own_samples, self._whole_batch)

    def receive_gradients(self) -> Tensor:
        return self._received().view(self.batch, self.own_tables, self.dim)

    def _send(self, rows: Tensor, to_rank: list[int], from_rank: list[int]) -> None:
        """Starts to send each rank its number of rows, and to receive as many as it sends."""
        self._landing = rows.new_empty(sum(from_rank), self.dim)
        landing, sent = self._landing.view(torch.uint8), rows.view(torch.uint8)
        group = self.world.group
        work = dist.all_to_all_single(landing, sent, from_rank, to_rank, group, async_op=True)
        self._pending = work, rows  # which must live until they are sent

    def _received(self) -> Tensor:
        with step_clock.part(step_clock.EXCHANGE):
            self._pending[0].wait()
        landing = self._landing
        del self._pending, self._landing
        return landing


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

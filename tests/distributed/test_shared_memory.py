"""Sums and posts through memory that the ranks of one machine share."""

import os
import sys
from dataclasses import replace

import pytest
import torch
from forked import CONTEXT

from dlrm import ops
from dlrm.distributed import World, start_sum
from dlrm.distributed.shared_memory import Channel, SharedMemory, share_memory
from dlrm.train.gradient_sum import GradientSum

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not ops.native_available(), reason="the operators are not built"
)


def sums(world, sizes, dtype):
    """Returns the sums of tensors that are all pending before the last one is awaited first."""
    tensors = [torch.arange(size).to(dtype) * (world.rank + 1) for size in sizes]
    pending = [start_sum(tensor, world) for tensor in tensors]
    for one in reversed(pending):
        one.wait()
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_sums_of_growing_sizes_may_be_pending_and_end_in_any_order(ranks, dtype):
    sizes = [1, 3, 1000, 0, 20_000, 5]
    expected = [[6 * i for i in range(size)] for size in sizes]
    for _ in range(4):  # files are used again
        assert ranks(3).call(sums, [(sizes, dtype)] * 3) == [expected] * 3


def sums_of_both(world, size):
    """Returns sums through shared memory and through sockets."""
    mine = torch.rand(size, generator=torch.Generator().manual_seed(world.rank))
    found = []
    for one in (world, replace(world, memory=None)):
        found.append(mine.clone())
        start_sum(found[-1], one).wait()
    return torch.equal(*found)


def test_two_ranks_have_the_bits_of_a_sum_through_sockets(ranks):
    assert all(ranks(2).call(sums_of_both, [(10_001,)] * 2))


def shared(world):
    return world.memory is not None


def elsewhere(world, rank):
    """Returns whether ranks share memory of which one says that it is on another machine."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            real = SharedMemory.address
            patch.setattr(SharedMemory, "address", lambda self: ("other", *real(self)[1:]))
        return share_memory(world.rank, world.size) is not None


def closed(world, rank):
    """Returns whether ranks share memory of which one cannot open that of another."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError("closed")))
        return share_memory(world.rank, world.size) is not None


def another_process(world, rank):
    """Returns whether ranks share memory of which one's descriptors are another process's here."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            real = SharedMemory.address
            patch.setattr(
                SharedMemory,
                "address",
                lambda self: (*real(self)[:3], [(file, "other") for file, _ in real(self)[3]]),
            )
        return share_memory(world.rank, world.size) is not None


def limited(world, rank):
    """Returns whether ranks share memory of which one cannot make any."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError("limit")))
        return share_memory(world.rank, world.size) is not None


@pytest.mark.parametrize("apart", [elsewhere, closed, another_process, limited])
def test_all_ranks_do_without_where_one_cannot_share(ranks, apart):
    assert all(ranks(3).call(shared))
    assert ranks(3).call(apart, [(1,)] * 3) == [False] * 3


def end(pipe):
    channel = Channel(1, 2, 60)
    pipe.send((os.getpid(), channel.file))
    pipe.recv()


def test_a_rank_that_ends_is_named():
    here, there = CONTEXT.Pipe()
    other = CONTEXT.Process(target=end, args=(there,), daemon=True)
    other.start()
    channel = Channel(0, 2, 60)
    pid, file = here.recv()
    channel.open([(os.getpid(), started(os.getpid()), channel.file), (pid, started(pid), file)])
    pending = channel.sum(torch.zeros(3))
    here.send("end")
    with pytest.raises(ConnectionError, match=rf"rank 1 \(process {pid}\) has ended"):
        pending.wait()
    other.join()


def started(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19]


def many_buckets(world):
    """Returns the gradient of each of many parameters, whose dtypes alternate."""
    kinds = [torch.float32, torch.float64] * 40
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=kind)) for kind in kinds]
    sums = GradientSum(parameters, world)
    sums.expect()
    sum(p.sum().double() for p in parameters).backward()
    beside = sums.wait(torch.tensor([1.0 + world.rank]))
    return [p.grad.tolist() for p in parameters], beside.tolist()


def test_there_may_be_more_buckets_of_gradients_than_pending_posts(ranks):
    assert ranks(2).call(many_buckets) == [([[2.0] * 3] * 80, [3.0])] * 2


def test_a_wait_has_a_limit():
    channel = Channel(0, 2, 0.3)
    own = os.getpid(), started(os.getpid())
    silent = Channel(1, 2, 0.3)
    channel.open([(*own, channel.file), (*own, silent.file)])
    with pytest.raises(TimeoutError, match=r"rank 1 .*no data in 0\.3 s"):
        channel.sum(torch.zeros(3)).wait()
    assert World().memory is None

"""Sums and averages of a dense network over ranks."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlrm import ops
from dlrm.distributed import start_transfers
from dlrm.train.gradient_sum import GradientSum, average_statistics
from dlrm.train.optim.row_optimizers import RowSGD
from dlrm.train.precision import LossScaler

REDUCE = dist.all_reduce


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(7, 600), nn.Linear(600, 2100), nn.Linear(2100, 5).double(), nn.Linear(3, 1)]
    return nn.ModuleList(layers)  # several buckets, two dtypes; the last gets no gradient


def summed(world, micro_batches):
    model = network()
    random = torch.Generator().manual_seed(world.rank)
    sums = GradientSum(model.parameters(), world)
    for index in range(micro_batches):
        x = torch.randn(4, 7, generator=random)
        if index == micro_batches - 1:
            sums.expect()
        model[2](model[1](model[0](x)).double()).square().mean().backward()
    sums.wait()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_the_sum_of_all_ranks(ranks, size, micro_batches):
    expected = None
    for rank in range(size):
        model, random = network(), torch.Generator().manual_seed(rank)
        for _ in range(micro_batches):
            x = torch.randn(4, 7, generator=random)
            model[2](model[1](model[0](x)).double()).square().mean().backward()
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        expected = own if expected is None else [a + b for a, b in zip(expected, own, strict=True)]
    for found in ranks(size).call(summed, [(micro_batches,)] * size):
        torch.testing.assert_close(found, expected)


def sent(world, scaled, own_group):
    """Returns the all-reduces of a step (size, own group), weights and skips."""
    if own_group:
        world = replace(world, gradients=dist.new_group())
    tables, dense = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.SGD([dense], lr=1.0, fused=True)]
    if world.rank == 0:  # the others hold no table
        optimizers.append(RowSGD([tables], torch.tensor(1.0)))
    sums, found = GradientSum([dense], world), []
    scaler = LossScaler(torch.tensor(8.0) if scaled else None, max_grad_norm=100.0)
    sums.expect()
    (dense * 2).sum().backward()
    if world.rank == 0:
        ops.joint_embedding(tables, torch.tensor([[1]]), torch.tensor([0, 5])).sum().mul(
            torch.inf if scaled else 1.0
        ).backward()

    def all_reduce(tensor, *args, group=None, **kwargs):
        found.append((tensor.numel(), group is world.gradients))
        return REDUCE(tensor, *args, group=group, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        tables_of_rank = scaler.of_tables(optimizers, "cpu")
        scaler.step(optimizers, sums.wait(tables_of_rank))
    return found, dense.tolist(), scaler.num_skipped()


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_update_waits_for_one_sum_that_has_the_overflow_of_all_ranks(ranks, scaled, own_group):
    """Only the gradient of rank 0's table overflows."""
    for found, dense, skipped in ranks(3).call(sent, [(scaled, own_group)] * 3):
        assert found == [(3 + 2, True)]
        assert dense == ([1.0] * 3 if scaled else [1.0 - 3 * 2.0] * 3)
        assert skipped == scaled


def clipped(world):
    """Takes a step whose gradients, over all ranks, exceed the maximum norm."""
    tables, dense = nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(3))
    optimizers = [RowSGD([tables], torch.tensor(1.0))]
    optimizers.append(torch.optim.SGD([dense], lr=1.0, fused=True))
    sums, scaler = GradientSum([dense], world), LossScaler(max_grad_norm=0.5)
    sums.expect()
    (dense * 2).sum().backward()
    ids = torch.tensor([[1], [1]])  # one row twice: gradients add up
    (ops.joint_embedding(tables, ids, torch.tensor([0, 5])).sum() * (world.rank + 1)).backward()
    scaler.step(optimizers, sums.wait(scaler.of_tables(optimizers, "cpu")))
    return tables.detach(), dense.detach()


def test_gradients_are_clipped_by_the_norm_of_all_ranks(ranks):
    size = 3
    of_tables = [2.0 * (rank + 1) for rank in range(size)]  # for each of a row's 2 columns
    norm = math.sqrt(3 * (2.0 * size) ** 2 + sum(2 * value**2 for value in of_tables))
    for value, (tables, dense) in zip(of_tables, ranks(size).call(clipped), strict=True):
        expected = torch.zeros(5, 2)
        expected[1] = -value * 0.5 / norm
        torch.testing.assert_close(tables, expected, check_dtype=False)
        torch.testing.assert_close(dense, torch.full((3,), -2.0 * size * 0.5 / norm))


def test_two_processes_on_one_device_are_named_by_all(ranks):
    same = ranks(3).call(start_transfers, [("GPU a",), ("GPU b",), ("GPU a",)])
    assert {str(error).partition(";")[0] for error in same} == {
        "ranks 0 and 2 compute on one device, GPU a: expected one for each"
    }
    assert ranks(3).call(start_transfers, [(None,)] * 3) == [None] * 3
    assert ranks(3).call(start_transfers, [(name,) for name in "abc"]) == [None] * 3


def averaged(world):
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(world.rank)
    norm.num_batches_tracked.fill_(5 + world.rank)
    average = {"running_var": torch.full((3,), 2.0 * world.rank)}
    average_statistics(norm, average, world)
    assert average["running_var"].tolist() == [2.0] * 3
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def test_statistics_are_the_mean_of_all_ranks(ranks):
    for rank, (mean, variance, count) in enumerate(ranks(3).call(averaged)):
        assert mean.tolist() == [1.0] * 3
        assert variance.tolist() == [1.0] * 3
        assert count == 5 + rank  # each its own

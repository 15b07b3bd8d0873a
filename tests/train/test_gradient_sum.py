"""What the ranks sum and average of a dense network."""

import pytest
import torch
from torch import nn

from dlrm.train.gradient_sum import GradientSum, average_statistics


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


def averaged(world):
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(world.rank)
    norm.num_batches_tracked.fill_(5 + world.rank)
    average = {"running_var": torch.full((3,), 2.0 * world.rank)}
    average_statistics(norm, average, world)
    assert average["running_var"].tolist() == [2.0] * 3
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def test_statistics_are_the_mean_of_all_ranks(ranks):
    for mean, variance, count in ranks(3).call(averaged):
        assert mean.tolist() == [1.0] * 3
        assert variance.tolist() == [1.0] * 3
        assert count in (5, 6, 7)

"""Bytes of state that planners count against those that every optimizer holds after a step."""

import pytest
import torch
from torch import nn

from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.dense import (
    CLICK_OPTIMIZERS,
    DENSE_OPTIMIZERS,
    NETWORK_OPTIMIZERS,
    dense_optimizer,
)
from dlrm.train.optim.network_optimizers import NetworkOptimizerConfig, network_optimizer
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS, table_optimizer


def held(optimizer):
    """Returns the bytes of the state after a step, scalars aside."""
    set_learning_rate([optimizer], 0.1)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.ndim)


@pytest.mark.parametrize("kind", TABLE_OPTIMIZERS)
def test_of_tables(kind):
    weight = nn.Parameter(torch.ones(50, 7))
    optimizer = table_optimizer(kind, [weight])
    indices, values = torch.tensor([[3, 9, 3]]), torch.ones(3, 7)
    weight.grad = torch.sparse_coo_tensor(indices, values, (50, 7), check_invariants=False)
    assert held(optimizer) == TABLE_OPTIMIZERS[kind].state_bytes(50, 7)


def network():
    layers = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    layers(torch.ones(2, 7)).sum().backward()
    return layers, sum(weight.numel() for weight in layers.parameters())


@pytest.mark.parametrize("kind", CLICK_OPTIMIZERS)
def test_of_mlps(kind):
    layers, weights = network()
    optimizer = dense_optimizer(kind, layers.parameters())
    assert held(optimizer) == DENSE_OPTIMIZERS[kind].state_bytes(weights)


@pytest.mark.parametrize("kind", NETWORK_OPTIMIZERS)
def test_of_networks(kind):
    layers, weights = network()
    optimizer = network_optimizer(NetworkOptimizerConfig(kind), layers)
    assert held(optimizer) == DENSE_OPTIMIZERS[kind].state_bytes(weights)


def test_every_dense_optimizer_is_offered():
    assert {*CLICK_OPTIMIZERS, *NETWORK_OPTIMIZERS} == set(DENSE_OPTIMIZERS)

"""Steps of our optimizers run torch's hooks and report themselves to its profiler."""

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.profiler import ProfilerActivity, profile

from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.optim.row_optimizers import table_optimizer


@pytest.fixture(params=["sgd", "adagrad", "adam", "rows"])
def made(request):
    """Returns an optimizer and its weight."""
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    if request.param == "rows":
        optimizer = table_optimizer("adam", [weight])
        weight.grad = torch.sparse_coo_tensor(
            torch.tensor([[2, 2]]), torch.ones(2, 3), (4, 3), check_invariants=False
        )
    else:
        optimizer = dense_optimizer(request.param, [weight])
    set_learning_rate([optimizer], 0.5)
    return optimizer, weight


def test_hooks_of_an_optimizer_are_called_around_its_step(made):
    optimizer, weight = made
    seen = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append(weight.detach().clone()))
    after = optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    optimizer.step()
    first, last = seen
    assert not torch.equal(first, last)
    assert torch.equal(last, weight)
    before.remove()
    after.remove()
    optimizer.step()
    assert len(seen) == 2
    assert not torch.equal(last, weight)


def test_hooks_of_all_optimizers_are_called(made):
    called = []
    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        made[0].step()
    finally:
        handle.remove()
    assert called == [1]


def test_a_profiler_sees_the_step(made):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        made[0].step()
    name = f"Optimizer.step#{type(made[0]).__name__}.step"
    assert name in {event.name for event in profiler.events()}

"""Steps of our optimizers run torch's hooks and report themselves to its profiler."""

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.profiler import ProfilerActivity, profile

from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.optim.row_optimizers import table_optimizer


def dense(kind):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return dense_optimizer(kind, [weight]), weight


def rows(kind):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = table_optimizer(kind, [weight])
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), torch.ones(2, 3), (4, 3))
    return optimizer, weight


@pytest.fixture(params=["sgd", "adagrad", "adam", "rows sgd", "rows adagrad", "rows adam"])
def made(request):
    """Returns an optimizer and its weight."""
    *of_rows, kind = request.param.split()
    optimizer, weight = rows(kind) if of_rows else dense(kind)
    set_learning_rate([optimizer], 0.5)
    return optimizer, weight


def stepped(made):
    optimizer, weight = made
    before = weight.detach().clone()
    optimizer.step()
    return not torch.equal(before, weight)


def test_a_step_without_hooks_updates(made):
    assert stepped(made)
    assert made[1].requires_grad


def test_hooks_of_an_optimizer_are_called_around_its_step(made):
    optimizer, weight = made
    seen = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append(weight.detach().clone()))
    after = optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    assert stepped(made)
    first, last = seen
    assert not torch.equal(first, last)
    assert torch.equal(last, weight)
    before.remove()
    after.remove()
    optimizer.step()
    assert len(seen) == 2


def test_hooks_of_all_optimizers_are_called(made):
    called = []
    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        assert stepped(made)
    finally:
        handle.remove()
    assert called == [1]


def test_a_profiler_sees_the_step(made):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert stepped(made)
    name = f"Optimizer.step#{type(made[0]).__name__}.step"
    assert name in {event.name for event in profiler.events()}


def test_a_closure_is_refused(made):
    with pytest.raises(AssertionError, match="no closure"):
        made[0].step(lambda: 1.0)

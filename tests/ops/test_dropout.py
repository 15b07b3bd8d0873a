import warnings

import pytest
import torch

from dlrm import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.85])
def test_as_many_are_dropped_as_asked_for(share, dtype, device):
    torch.manual_seed(0)
    values = torch.full((1000, 400), 3.0, dtype=dtype, device=device)
    kept = ops.dropout(values, share)
    dropped = (kept == 0).double().mean().item()
    assert dropped == pytest.approx(share, abs=5 * (share * (1 - share) / values.numel()) ** 0.5)
    scaled = torch.tensor(3 / (1 - share), dtype=dtype).item()
    assert kept.unique().tolist() == pytest.approx([0, scaled], rel=0.01)
    assert kept.double().mean().item() == pytest.approx(3, rel=0.02)


def test_neighbors_are_dropped_independently():
    torch.manual_seed(0)
    dropped = (ops.dropout(torch.ones(1 << 18), 0.25) == 0).double()
    for distance in (1, 2, 3, 4, 5, 8, 64):
        both = (dropped[distance:] * dropped[:-distance]).mean().item()
        assert both == pytest.approx(0.25**2, abs=0.0025)  # five deviations


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5, 7)])
def test_gradients_are_of_what_was_kept(shape, device):
    values = torch.randn(shape, device=device).requires_grad_()
    kept = ops.dropout(values, 0.4)
    grad = torch.randn(shape, device=device)
    (gradient,) = torch.autograd.grad(kept, values, grad)
    torch.testing.assert_close(gradient, torch.where(kept == 0, 0, grad / 0.6), rtol=1e-4, atol=0)


@pytest.mark.parametrize("share", [0.4, 1e-6])  # the latter is torch's also on a CPU
def test_a_generator_is_drawn_from_instead_of_torchs(share, device):
    values, random = torch.ones(1 << 22, device=device), torch.Generator(device)
    state = torch.get_rng_state()
    first, again = (ops.dropout(values, share, random.manual_seed(5)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, ops.dropout(values, share, random))
    assert (first == 0).double().mean().item() == pytest.approx(share, rel=1)


def test_numbers_are_those_of_torchs_generator():
    values = torch.ones(100)
    torch.manual_seed(3)
    first, second = ops.dropout(values, 0.5), ops.dropout(values, 0.5)
    torch.manual_seed(3)
    assert torch.equal(ops.dropout(values, 0.5), first)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_of_a_share_of_0():
    values = torch.randn(50)
    assert torch.equal(ops.dropout(values, 0.0), values)


def test_graphs_drop_as_many():
    values = torch.ones(64)
    compiled = torch.compile(lambda x: ops.dropout(x, 0.5), backend="eager", fullgraph=True)
    assert set(compiled(values).unique().tolist()) == {0.0, 2.0}
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: ops.dropout(x, 0.5), values, check_trace=False)
    for _ in range(4):  # the first runs differ in kind from the rest
        torch.manual_seed(1)
        expected = ops.dropout(values, 0.5)
        torch.manual_seed(1)
        assert torch.equal(traced(values), expected)

import pytest
import torch

from dlrm import ops
from dlrm.train.optim.dense import Adam

SHAPES = [(1,), (17,), (300, 37), (8193,), (0,), ()]


def weights_and_gradients(seed=0):
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=random) for shape in SHAPES]
    return weights, [torch.randn(shape, generator=random) for shape in SHAPES]


def trained(optimizer, weights, steps=4, **options):
    """Returns the weights after some steps, each with gradients of its own."""
    for step in range(steps):
        _, grads = weights_and_gradients(step)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.to(weight.dtype)
        optimizer.step()
    return weights


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_weights_and_states_are_those_of_torch(weight_decay, instruction_set):
    ours = [torch.nn.Parameter(weight) for weight in weights_and_gradients()[0]]
    exact = [torch.nn.Parameter(weight.detach().double()) for weight in ours]
    options = {"betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": weight_decay}
    own = Adam(ours, lr=torch.tensor(0.05), fused=True, **options)
    torchs = torch.optim.Adam(exact, lr=0.05, **options)
    trained(own, ours)
    trained(torchs, exact)
    for weight, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(weight.double(), other, atol=1e-5, rtol=1e-5)
        assert own.state[weight].keys() == torchs.state[other].keys()
        for name, value in own.state[weight].items():
            expected = torchs.state[other][name].double()
            torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-5)


def test_a_scaled_and_a_skipped_step(native):
    plain, scaled, skipped = (
        [torch.nn.Parameter(weight) for weight in weights_and_gradients()[0]] for _ in range(3)
    )
    for weights, factor in ((plain, 1), (scaled, 1024), (skipped, 1)):
        optimizer = Adam(weights, lr=torch.tensor(0.05), fused=True)
        for weight, grad in zip(weights, weights_and_gradients()[1], strict=True):
            weight.grad = factor * grad
        if factor > 1:
            optimizer.grad_scale = torch.tensor(1024.0)
        optimizer.found_inf = torch.tensor(float(weights is skipped))
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {
            float(weights is not skipped)
        }
    for one, other in zip(plain, scaled, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(skipped, weights_and_gradients()[0], strict=True):
        assert torch.equal(one, other)


def test_weights_without_a_gradient_keep_their_values(native):
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = Adam([first, second], lr=torch.tensor(0.1), fused=True)
    first.grad = torch.ones(3)
    optimizer.step()
    assert first.tolist() == pytest.approx([0.9] * 3)
    assert second.tolist() == [1.0] * 3
    assert second not in optimizer.state


def test_what_does_not_fit_is_named_and_changes_nothing(native):
    weight, grad = torch.ones(3), torch.ones(3)
    states = [torch.zeros(3)], [torch.zeros(3)], [torch.zeros(())]
    lr = torch.tensor(0.1)
    with pytest.raises(RuntimeError, match=r"gradient 0: .* \[3\] as the weight, got \[4\] Float"):
        ops.dense_adam_([weight], [torch.ones(4)], *states, lr)
    with pytest.raises(RuntimeError, match=r"exp_avg_sq 0: .* got \[2\]"):
        ops.dense_adam_([weight], [grad], states[0], [torch.zeros(2)], states[2], lr)
    with pytest.raises(RuntimeError, match="step 0: expected one Float on the CPU, got .* Long"):
        ops.dense_adam_([weight], [grad], *states[:2], [torch.tensor(0)], lr)
    with pytest.raises(RuntimeError, match="as many gradients and states as weights, 1, got 0"):
        ops.dense_adam_([weight], [], *states, lr)
    assert weight.tolist() == [1.0] * 3
    assert states[2][0] == 0


def test_threads_do_not_change_a_bit(threads, native):
    found = []
    for count in (1, 2):
        threads(count)
        weights = [torch.nn.Parameter(weight) for weight in weights_and_gradients()[0]]
        found.append(trained(Adam(weights, lr=torch.tensor(0.05), fused=True), weights))
    assert all(map(torch.equal, *found))

import pytest
import torch

from dlrm import ops


def loss_and_gradient(function, logits, labels, divisor):
    logits = logits.detach().requires_grad_()
    loss = function(logits, labels, divisor)
    return loss, *torch.autograd.grad(loss * 3, logits)


def test_large_logits_neither_overflow_nor_lose_their_gradient():
    logits = torch.tensor([200.0, -200.0, 90.0, -90.0, 0.0])
    loss, grad = loss_and_gradient(ops.logistic_loss, logits, torch.tensor([1.0, 0, 0, 1, 1]), 1)
    assert float(loss) == pytest.approx(180 + 0.6931472)
    assert grad.tolist() == pytest.approx([0, 0, 3, -3, -1.5])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_not_hidden(value):
    logits = torch.tensor([1.0, value, 2.0])
    assert not ops.logistic_loss(logits, torch.zeros(3)).isfinite()


def test_what_does_not_fit_is_named(native):
    with pytest.raises(RuntimeError, match=r"\[3\] Float and \[2\] Float"):
        ops.logistic_loss(torch.zeros(3), torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"\[3\] Float and \[3\] Long"):
        ops.logistic_loss(torch.zeros(3), torch.zeros(3, dtype=torch.int64))

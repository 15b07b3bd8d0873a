"""Piecewise-linear vectors by hand; test_operators.py compares them with their definition."""

import pytest
import torch
from op_cases import piecewise, piecewise_inputs

from dlrm import ops


def test_known_answer():
    edges = torch.tensor([[0.0, 1.0, 3.0, 3.0]])  # the third bin has no width
    numerical = torch.tensor([[-1.0], [0.5], [2.0], [9.0], [float("nan")]])
    weight = torch.tensor([[[10.0], [100.0], [1000.0]]])
    vectors = ops.piecewise_linear(numerical, edges, weight, torch.ones(1, 1))
    expected = torch.tensor([1.0, 6.0, 61.0, 111.0, float("nan")])
    torch.testing.assert_close(vectors.flatten(), expected, equal_nan=True)


def test_values_have_a_gradient_where_they_ask_for_one():
    numerical, *others = (one.detach() for one in piecewise_inputs((6, 4, 8, 3), torch.float32))
    inputs = numerical.double().requires_grad_(), *(tensor.double() for tensor in others)
    expected = torch.autograd.grad(piecewise(*inputs).sum(), inputs[0])[0].float()
    numerical.requires_grad_()
    (actual,) = torch.autograd.grad(ops.piecewise_linear(numerical, *others).sum(), numerical)
    inside = torch.arange(6) % 4 > 0  # an edge has two slopes
    torch.testing.assert_close(actual[inside], expected[inside], atol=1e-3, rtol=1e-4)


def test_what_does_not_fit_is_named(native):
    numerical, edges, weight, bias = piecewise_inputs((7, 3, 5, 19), torch.float32)
    with pytest.raises(RuntimeError, match=r"expected weight \[3, 5, dim > 0\].* got \[3, 4, 19\]"):
        ops.piecewise_linear(numerical, edges, weight[:, :4], bias)
    with pytest.raises(RuntimeError, match=r"expected numerical \[batch, 3\]"):
        ops.piecewise_linear(numerical[:, :2], edges, weight, bias)

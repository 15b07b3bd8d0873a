"""Piecewise-linear vectors: native kernels and reference match a definition in float64."""

import pytest
import torch

from dlrm import ops

SHAPES = [  # batch, fields, bins, dim
    (1, 1, 1, 1),
    (33, 13, 256, 16),
    (7, 3, 5, 19),  # nothing divides anything
    (0, 2, 3, 8),
    (5, 0, 3, 8),
]


def make_inputs(batch, fields, bins, dim):
    random = torch.Generator().manual_seed(batch + dim)
    edges = torch.rand(fields, bins + 1, generator=random).sort(1).values
    edges[::3, bins // 2 :] = edges[::3, bins // 2, None]  # a field with fewer bins
    numerical = torch.rand(batch, fields, generator=random) * 1.4 - 0.2  # also beyond the edges
    numerical[::4] = edges[:, bins // 2]  # on an edge
    weight = torch.randn(fields, bins, dim, generator=random)
    return numerical, edges, weight, torch.randn(fields, dim, generator=random)


def defined(numerical, edges, weight, bias):
    """Computes the encoding bin by bin and its product with the layer."""
    x, low, high = numerical.unsqueeze(-1), edges[:, :-1], edges[:, 1:]
    width = high - low
    encoding = torch.where(width > 0, ((x - low) / width.clamp(min=1e-30)).clamp(0, 1), 0)
    return torch.einsum("sfb,fbd->sfd", encoding, weight) + bias


def with_gradients(function, numerical, edges, *weights):
    weights = [weight.clone().requires_grad_() for weight in weights]
    output = function(numerical, edges, *weights)
    random = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=random).to(output.dtype)
    return output.detach(), *torch.autograd.grad(output, weights, grad)


@pytest.mark.parametrize("function", [ops.piecewise_linear, ops.piecewise_linear_reference])
@pytest.mark.parametrize("shape", SHAPES)
def test_vectors_and_gradients_are_the_definitions(shape, function, instruction_set):
    inputs = make_inputs(*shape)
    actual = with_gradients(function, *inputs)
    expected = with_gradients(defined, *(tensor.double() for tensor in inputs))
    for one, other in zip(actual, expected, strict=True):
        # Sums of up to 256 weights of about 1.
        torch.testing.assert_close(one, other.float(), atol=2e-4, rtol=1e-5)


def test_known_answer():
    edges = torch.tensor([[0.0, 1.0, 3.0, 3.0]])  # the third bin has no width
    numerical = torch.tensor([[-1.0], [0.5], [2.0], [9.0], [float("nan")]])
    weight = torch.tensor([[[10.0], [100.0], [1000.0]]])
    vectors = ops.piecewise_linear(numerical, edges, weight, torch.ones(1, 1))
    expected = torch.tensor([1.0, 6.0, 61.0, 111.0, float("nan")])
    torch.testing.assert_close(vectors.flatten(), expected, equal_nan=True)


def test_gradients_are_the_same_at_any_number_of_threads(threads):
    inputs = make_inputs(500, 13, 64, 16)
    found = []
    for count in (1, 2):
        threads(count)
        found.append(with_gradients(ops.piecewise_linear, *inputs))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_values_have_a_gradient_where_they_ask_for_one():
    numerical, *others = make_inputs(6, 4, 8, 3)
    inputs = numerical.double().requires_grad_(), *(tensor.double() for tensor in others)
    expected = torch.autograd.grad(defined(*inputs).sum(), inputs[0])[0].float()
    numerical.requires_grad_()
    (actual,) = torch.autograd.grad(ops.piecewise_linear(numerical, *others).sum(), numerical)
    inside = torch.arange(6) % 4 > 0  # an edge has two slopes
    torch.testing.assert_close(actual[inside], expected[inside], atol=1e-3, rtol=1e-4)


def test_the_operator_keeps_what_torch_expects_of_it(native):
    numerical, edges, *weights = make_inputs(7, 3, 5, 19)
    weights = [weight.requires_grad_() for weight in weights]
    torch.library.opcheck(torch.ops.dlrm.piecewise_linear, (numerical, edges, *weights))
    arguments = (torch.randn(7, 3, 19), numerical, edges)
    torch.library.opcheck(torch.ops.dlrm.piecewise_linear_backward, arguments)


def test_what_does_not_fit_is_named(native):
    numerical, edges, weight, bias = make_inputs(7, 3, 5, 19)
    with pytest.raises(RuntimeError, match=r"expected weight \[3, 5, dim > 0\].* got \[3, 4, 19\]"):
        ops.piecewise_linear(numerical, edges, weight[:, :4], bias)
    with pytest.raises(RuntimeError, match=r"expected numerical \[batch, 3\]"):
        ops.piecewise_linear(numerical[:, :2], edges, weight, bias)

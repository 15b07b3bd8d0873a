import functools

import pytest
import torch
from op_cases import linear_relu_inputs

from dlrm import ops


@pytest.fixture(params=["native", "torch"])
def linear_relu(request):
    return functools.partial(ops.linear_relu, native=request.param == "native")


def leaves(batch=6, inputs=5, outputs=4):
    return linear_relu_inputs(((batch,), inputs, outputs), torch.float32)


def test_known_answer(device, linear_relu):
    weight = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], device=device)
    bias = torch.tensor([0.5, 1.0], device=device, requires_grad=True)
    inputs = torch.tensor([[3.0, 4.0], [-1.0, 0.0]], device=device)
    output = linear_relu(inputs, weight, bias)
    assert output.tolist() == [[11.5, 0.0], [0.0, 2.0]]
    output.sum().backward()
    assert bias.grad.tolist() == [1.0, 1.0]


def test_gradients_have_the_dtypes_of_their_parameters(linear_relu):
    inputs, weight, bias = leaves()
    half = inputs.detach().bfloat16().requires_grad_()
    output = linear_relu(half, weight, bias.detach().double().requires_grad_())
    output.sum().backward()
    assert [output.dtype, half.grad.dtype, weight.grad.dtype] == [
        *(torch.bfloat16, torch.bfloat16, torch.float32)
    ]


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen, linear_relu):
    tensors = leaves()
    tensors[frozen].requires_grad_(False)
    linear_relu(*tensors).sum().backward()
    assert [tensor.grad is None for tensor in tensors] == [i == frozen for i in range(3)]


@pytest.mark.parametrize(("frozen", "changed"), [(0, 1), (1, 0)])
def test_what_no_gradient_reads_may_change_before_the_backward_pass(frozen, changed, linear_relu):
    tensors = leaves()
    tensors[frozen].requires_grad_(False)
    others = [tensor for tensor in tensors if tensor.requires_grad]
    expected = torch.autograd.grad(ops.linear_relu_reference(*tensors).sum(), others)
    output = linear_relu(*tensors)
    tensors[changed].detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(output.sum(), others), expected)


def test_strided_tensors_are_read_by_their_strides(device, linear_relu):
    inputs, weight, bias = (tensor.detach().to(device) for tensor in leaves(8, 6, 4))
    expected = ops.linear_relu_reference(inputs, weight, bias)
    column = torch.stack([bias, bias], -1)[:, 0]
    found = linear_relu(inputs.T.contiguous().T, weight.T.contiguous().T, column)
    torch.testing.assert_close(found, expected)
    few = torch.ones(1, device=device).expand(6)
    assert linear_relu(inputs, torch.zeros(6, 6, device=device), few).tolist() == [[1] * 6] * 8


def test_second_derivatives_are_refused_and_not_wrong(linear_relu):
    inputs, weight, bias = leaves()
    output = linear_relu(inputs, weight, bias).square().sum()
    (grad,) = torch.autograd.grad(output, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_shapes_that_do_not_fit_are_named(linear_relu):
    inputs, weight, bias = leaves()
    with pytest.raises(RuntimeError, match="6x4 and 5x4"):
        linear_relu(inputs[:, :4], weight, bias)
    with pytest.raises(RuntimeError, match=r"\[6, 4\].*\[3\]|size of tensor|expand"):
        linear_relu(inputs, weight, bias[:3])


def test_pairs_that_do_not_fit_are_named(device):
    grad = torch.randn(3, 4, device=device)
    with pytest.raises(RuntimeError, match=r"got grad \[3, 4\] and output \[3, 5\]"):
        ops.relu_bias_backward(grad, torch.randn(3, 5, device=device))
    with pytest.raises(RuntimeError, match=r"of one dtype .*[Ff]loat.* and .*[Bb][Ff]loat16"):
        ops.relu_bias_backward(grad, grad.bfloat16())
    compiled = torch.compile(ops.relu_bias_backward, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"got grad \[3, 4\] and output \[3, 5\]"):
        compiled(grad, torch.randn(3, 5, device=device))

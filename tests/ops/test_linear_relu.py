import pytest
import torch
from op_cases import linear_relu_inputs

from dlrm import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def leaves(batch=6, inputs=5, outputs=4):
    return linear_relu_inputs(((batch,), inputs, outputs), torch.float32)


def test_known_answer(device):
    weight = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], device=device)
    bias = torch.tensor([0.5, 1.0], device=device, requires_grad=True)
    inputs = torch.tensor([[3.0, 4.0], [-1.0, 0.0]], device=device)
    output = ops.linear_relu(inputs, weight, bias)
    assert output.tolist() == [[11.5, 0.0], [0.0, 2.0]]
    output.sum().backward()
    assert bias.grad.tolist() == [1.0, 1.0]


def test_gradients_have_the_dtypes_of_their_parameters():
    inputs, weight, bias = leaves()
    half = inputs.detach().bfloat16().requires_grad_()
    output = ops.linear_relu(half, weight, bias.detach().double().requires_grad_())
    output.sum().backward()
    assert [output.dtype, half.grad.dtype, weight.grad.dtype] == [
        *(torch.bfloat16, torch.bfloat16, torch.float32)
    ]


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen):
    tensors = leaves()
    tensors[frozen].requires_grad_(False)
    ops.linear_relu(*tensors).sum().backward()
    assert [tensor.grad is None for tensor in tensors] == [i == frozen for i in range(3)]


@pytest.mark.parametrize(("frozen", "changed"), [(0, 1), (1, 0)])
def test_what_no_gradient_reads_may_change_before_the_backward_pass(frozen, changed):
    tensors = leaves()
    tensors[frozen].requires_grad_(False)
    others = [tensor for tensor in tensors if tensor.requires_grad]
    expected = torch.autograd.grad(ops.linear_relu_reference(*tensors).sum(), others)
    output = ops.linear_relu(*tensors)
    tensors[changed].detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(output.sum(), others), expected)


def test_strided_tensors_are_read_by_their_strides(device):
    inputs, weight, bias = (tensor.detach().to(device) for tensor in leaves(8, 6, 4))
    expected = ops.linear_relu_reference(inputs, weight, bias)
    column = torch.stack([bias, bias], -1)[:, 0]
    found = ops.linear_relu(inputs.T.contiguous().T, weight.T.contiguous().T, column)
    torch.testing.assert_close(found, expected)
    few = torch.ones(1, device=device).expand(6)
    assert ops.linear_relu(inputs, torch.zeros(6, 6, device=device), few).tolist() == [[1] * 6] * 8


def test_second_derivatives_are_refused_and_not_wrong():
    inputs, weight, bias = leaves()
    output = ops.linear_relu(inputs, weight, bias).square().sum()
    (grad,) = torch.autograd.grad(output, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_shapes_that_do_not_fit_are_named():
    inputs, weight, bias = leaves()
    with pytest.raises(RuntimeError, match="6x4 and 5x4"):
        ops.linear_relu(inputs[:, :4], weight, bias)
    with pytest.raises(RuntimeError, match=r"\[6, 4\].*\[3\]|size of tensor|expand"):
        ops.linear_relu(inputs, weight, bias[:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (300, 37), (513, 256), (0, 8), (6, 0)])
def test_every_instruction_set_masks_and_sums(shape, dtype, instruction_set):
    random = torch.Generator().manual_seed(2)
    grad = torch.randn(shape, generator=random).to(dtype)
    output = torch.randn(shape, generator=random).to(dtype).relu()
    output[:1] *= -1  # a ReLU never gives -0; here it masks the gradient
    masked, bias = ops.relu_bias_backward(grad, output)
    assert torch.equal(masked, torch.where(output > 0, grad, 0))
    assert (masked.dtype, bias.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(bias.double(), masked.double().sum(0), atol=1e-4, rtol=1e-5)


def test_a_nan_lets_the_gradient_pass_as_torch_does(instruction_set):
    for dtype in DTYPES:
        output = torch.tensor([[float("nan"), -float("nan"), 0.0, 1.0]] * 9).T.repeat(1, 5)
        grad = torch.ones_like(output).to(dtype)
        masked, bias = ops.relu_bias_backward(grad, output.to(dtype))
        expected, _ = ops.relu_bias_backward_reference(grad, output.to(dtype))
        assert torch.equal(masked, expected)
        assert bias.tolist() == [3.0] * 45


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit_of_the_bias_gradient(dtype, threads):
    grad, output = torch.randn(1030, 70).to(dtype), torch.randn(1030, 70).to(dtype)
    threads(1)
    alone = ops.relu_bias_backward(grad, output)
    threads(2)
    for one, two in zip(alone, ops.relu_bias_backward(grad, output), strict=True):
        assert torch.equal(one, two)


def test_pairs_that_do_not_fit_are_named(device):
    grad = torch.randn(3, 4, device=device)
    with pytest.raises(RuntimeError, match=r"got grad \[3, 4\] and output \[3, 5\]"):
        ops.relu_bias_backward(grad, torch.randn(3, 5, device=device))
    with pytest.raises(RuntimeError, match=r"of one dtype .*[Ff]loat.* and .*[Bb][Ff]loat16"):
        ops.relu_bias_backward(grad, grad.bfloat16())
    compiled = torch.compile(ops.relu_bias_backward, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"got grad \[3, 4\] and output \[3, 5\]"):
        compiled(grad, torch.randn(3, 5, device=device))

import pytest
import torch
import torch.nn.functional as F

from dlrm import ops

SHAPES = [  # leading sizes, inputs, outputs
    ((1,), 1, 1),
    ((8, 128), 96, 200),
    ((3, 5, 2), 7, 19),  # nothing divides anything
    ((300,), 64, 3),
    ((0, 4), 6, 5),
    ((3,), 0, 5),  # no inputs: the bias alone
]


def leaves(shape, bias=True, dtype=torch.float32, device="cpu"):
    rows, inputs, outputs = shape
    random = torch.Generator().manual_seed(0)
    sizes = [(*rows, inputs), (outputs, inputs), *([(outputs,)] if bias else [])]
    made = [torch.randn(size, generator=random).to(device, dtype) for size in sizes]
    return [tensor.requires_grad_() for tensor in made]


def output_and_gradients(function, tensors):
    output = function(*tensors)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output, *torch.autograd.grad(output, tensors, grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_torchs(shape, bias, dtype, device):
    tensors = leaves(shape, bias, dtype, device)
    sums = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}  # two orders of adding
    actual = output_and_gradients(ops.linear, tensors)
    torch.testing.assert_close(actual, output_and_gradients(F.linear, tensors), **sums)
    assert all(tensor.is_contiguous() for tensor in actual)


def test_known_answer():
    weight, bias = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([10.0, 20.0])
    assert ops.linear(torch.tensor([[3.0, 4.0]]), weight, bias).tolist() == [[21.0, 16.0]]


def test_strided_inputs_and_gradients():
    inputs, weight, bias = leaves(((6, 5), 8, 8))
    turned = [inputs.transpose(0, 1), weight.T, torch.stack([bias, bias], 1)[:, 0]]

    def through(function):
        output = function(*turned).transpose(0, 2)
        grads = torch.autograd.grad(output.square().sum(), (inputs, weight, bias))
        return [output, *grads]

    torch.testing.assert_close(through(ops.linear), through(F.linear), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen):
    tensors = leaves(((4, 3), 5, 6))
    tensors[frozen].requires_grad_(False)
    ops.linear(*tensors).sum().backward()
    assert [tensor.grad is None for tensor in tensors] == [i == frozen for i in range(3)]


@pytest.mark.parametrize(("frozen", "changed"), [(0, 1), (1, 0)])
def test_what_no_gradient_reads_may_change_before_the_backward_pass(frozen, changed):
    tensors = leaves(((4, 3), 5, 6))
    tensors[frozen].requires_grad_(False)
    others = [tensor for tensor in tensors if tensor.requires_grad]
    expected = torch.autograd.grad(F.linear(*tensors).sum(), others)
    output = ops.linear(*tensors)
    tensors[changed].detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(output.sum(), others), expected)


def test_autocast_and_graphs_take_torchs():
    inputs, weight, bias = leaves(((4, 3), 5, 6))
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(inputs, weight, bias).dtype == torch.bfloat16
    traced = torch.jit.trace(ops.linear, (inputs, weight, bias), check_trace=False)
    assert "mkldnn" not in str(traced.graph)
    compiled = torch.compile(ops.linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs, weight, bias), F.linear(inputs, weight, bias))
    torch._dynamo.reset()


def test_a_nan_stays_one():
    inputs, weight, bias = leaves(((4,), 5, 6))
    with torch.no_grad():
        inputs[2, 3] = float("nan")
    assert ops.linear(inputs, weight, bias)[2].isnan().all()


def test_shapes_that_do_not_fit_are_named():
    inputs, weight, bias = leaves(((4,), 5, 6))
    with pytest.raises(RuntimeError, match="4x4 and 5x6"):
        ops.linear(inputs[:, :4], weight, bias)

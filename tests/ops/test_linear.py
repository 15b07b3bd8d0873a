import pytest
import torch
import torch.nn.functional as F
from op_cases import linear_inputs

from dlrm import ops


def leaves(shape):
    return linear_inputs(shape, torch.float32)


def test_a_bias_may_be_missing():
    inputs, weight, _ = leaves(((4, 3), 5, 6))
    torch.testing.assert_close(ops.linear(inputs, weight), F.linear(inputs, weight))


def test_known_answer():
    weight, bias = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([10.0, 20.0])
    assert ops.linear(torch.tensor([[3.0, 4.0]]), weight, bias).tolist() == [[21.0, 16.0]]


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

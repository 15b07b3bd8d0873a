import pytest
import torch
from op_cases import dot_inputs, results

from dlrm import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(shape, device, dtype=torch.float32):
    return [one.detach().to(device) for one in dot_inputs(shape, dtype)]


def test_large_outputs_that_bypass_the_caches_match_reference(instruction_set):
    args = dot_inputs((2600, 26, 128), torch.float32)
    functions = ops.dot_interaction, ops.dot_interaction_reference
    torch.testing.assert_close(*(results(f, args) for f in functions), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_has_the_same_bits_alone_and_beside_nan(dtype, dim, instruction_set):
    args = inputs((5, 26, dim), "cpu", dtype)
    grad = torch.randn(1, ops.interaction_width(26, dim)).to(dtype)

    def run(tensors):
        leaves = [one.clone().requires_grad_() for one in tensors]
        output = ops.dot_interaction(*leaves)
        return [output, *torch.autograd.grad(output, leaves, grad.expand_as(output))]

    alone = run([one[2:3] for one in args])
    for one in args:
        one[[1, 3]] = torch.nan
    for one, all_ in zip(alone, run(args), strict=True):
        assert torch.equal(one[0], all_[2])


def test_known_answer(device):
    dense = torch.tensor([[1.0, 2.0]], device=device)
    embeddings = torch.tensor([[[3.0, 4.0], [5.0, 6.0]]], device=device)
    output = ops.dot_interaction(dense, embeddings)
    assert output.tolist() == [[1.0, 2.0, 11.0, 17.0, 39.0, 0.0, 0.0, 0.0]]


def test_width_is_a_multiple_of_8():
    assert ops.interaction_width(26, 128) == 480  # 128 + 27 * 26 / 2 = 479
    assert ops.interaction_width(0, 8) == 8
    assert ops.interaction_width(1, 1) == 8


def test_mismatched_sizes_are_named(device):
    dense, embeddings = inputs((4, 3, 16), device)
    with pytest.raises(RuntimeError, match=r"dense \[4, 8\] and embeddings \[4, 3, 16\]"):
        ops.dot_interaction(dense[:, :8], embeddings)
    with pytest.raises(RuntimeError, match=r"dense \[3, 16\] and embeddings \[4, 3, 16\]"):
        ops.dot_interaction(dense[:3], embeddings)
    with pytest.raises(RuntimeError, match=r"dense \[4, 16\] and embeddings \[4, 48\]"):
        ops.dot_interaction(dense, embeddings.flatten(1))


def test_width_0_is_refused(device):
    with pytest.raises(RuntimeError, match=r"expected dim > 0, got dense \[4, 0\]"):
        ops.dot_interaction(*inputs((4, 3, 0), device))


def test_other_dtypes_are_named(device):
    dense, embeddings = inputs((4, 3, 16), device)
    with pytest.raises(RuntimeError, match=r"of one dtype .*[Ff]loat.* and .*[Bb][Ff]loat16"):
        ops.dot_interaction(dense, embeddings.bfloat16())
    with pytest.raises(RuntimeError, match=r"of one dtype .*([Dd]ouble|float64)"):
        ops.dot_interaction(dense.double(), embeddings.double())


def test_a_wrong_shape_is_refused_under_compile(device):
    dense, embeddings = inputs((4, 3, 16), device)
    compiled = torch.compile(ops.dot_interaction, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="dot_interaction: expected dense"):
        compiled(dense[:, :8], embeddings)


def test_second_derivatives_are_refused_and_not_wrong():
    dense = torch.randn(3, 4, requires_grad=True)
    embeddings = torch.randn(3, 2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(
        ops.dot_interaction(dense, embeddings).square().sum(), dense, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.sum().backward()


def test_a_gradient_of_another_shape_is_named(native):
    dense, embeddings = inputs((4, 3, 16), "cpu")
    with pytest.raises(RuntimeError, match=r"expected grad \[4, 24\] Float, got \[4, 22\] Float"):
        torch.ops.dlrm.dot_interaction_backward(torch.zeros(4, 22), dense, embeddings)

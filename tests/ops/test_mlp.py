import sys

import pytest
import torch
from ops_testing import assert_as_close_as_reference

from dlrm import ops
from dlrm.ops.layers import matrix_product

SHAPES = [  # batch, inputs, sizes of the layers
    (1, 1, (1,)),
    (300, 13, (512, 256, 128)),  # the Criteo model's bottom, and sums of more than one part
    (5, 7, (19, 3, 33)),  # nothing divides anything
    (0, 4, (8, 2)),
    (3, 0, (5,)),  # no inputs: biases alone
    (4, 6, ()),  # no layers
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUMS = {"atol": 1e-4, "rtol": 1e-4}  # two orders of adding up hundreds of products


@pytest.fixture(params=["native", "by torch"])
def products(request, monkeypatch):
    """Runs a test with the native operator and with torch's products."""
    if request.param == "by torch":
        monkeypatch.setattr(sys.modules["dlrm.ops.mlp"], "_NATIVE_DTYPES", ())
    elif not ops.native_available():
        pytest.skip("the compiled operators are not loaded")


def network(shape, device="cpu", seed=0):
    """Returns float32 inputs, weights and biases that need gradients."""
    batch, width, sizes = shape
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(batch, width, generator=random)
    weights, biases = [], []
    for size in sizes:
        weights.append(torch.randn(size, width, generator=random) / max(width, 1) ** 0.5)
        biases.append(torch.randn(size, generator=random))
        width = size
    leaves = [t.to(device).requires_grad_() for t in (inputs, *weights, *biases)]
    return leaves[0], leaves[1 : 1 + len(sizes)], leaves[1 + len(sizes) :]


def output_and_gradients(function, inputs, weights, biases):
    leaves = (inputs, *weights, *biases)
    output = function(inputs, weights, biases)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output, *torch.autograd.grad(output, leaves, grad, allow_unused=True)]


def in_dtype(dtype):
    """Returns `ops.mlp` for float32 parameters, computing in `dtype`."""

    def run(inputs, weights, biases):
        rounded = [t.detach().to(dtype) for t in (*weights, *biases)]
        return ops.mlp(inputs.to(dtype), weights, biases, rounded)

    return run


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_match_reference(shape, device, products):
    leaves = network(shape, device)
    torch.testing.assert_close(
        output_and_gradients(ops.mlp, *leaves),
        output_and_gradients(ops.mlp_reference, *leaves),
        **SUMS,
    )


def test_known_answer(device, products):
    weights = [torch.tensor([[1.0, 2.0], [-1.0, 0.0]], device=device)]
    biases = [torch.tensor([0.5, 1.0], device=device, requires_grad=True)]
    inputs = torch.tensor([[3.0, 4.0], [-1.0, 0.0]], device=device)
    output = ops.mlp(inputs, weights, biases)
    assert output.tolist() == [[11.5, 0.0], [0.0, 2.0]]
    output.sum().backward()
    assert biases[0].grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_as_exact_as_the_reference(dtype, products):
    """Uses positive values, so no ReLU is active for one and inactive for the other."""
    leaves = network((300, 13, (512, 256, 128)))
    inputs, weights, biases = (
        [t.detach().abs() for t in some] for some in ([leaves[0]], *leaves[1:])
    )
    with torch.no_grad():
        rounded = [[t.to(dtype).float() for t in some] for some in (inputs, weights, biases)]

    def run(function, dtype):
        split = [[t.to(dtype).requires_grad_() for t in some] for some in rounded]
        return output_and_gradients(function, *split[0], *split[1:])

    actual = run(in_dtype(dtype), torch.float32)
    half = run(lambda x, w, b: ops.mlp_reference(x.to(dtype), w, b), torch.float32)
    for one, other, exact in zip(actual, half, run(ops.mlp_reference, torch.float64), strict=True):
        assert_as_close_as_reference(one, other, exact)
    assert {grad.dtype for grad in actual[1:]} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(dtype, instruction_set):
    """Ranks and ties do not depend on how rows are batched, with or without gradients."""
    inputs, weights, biases = network((31, 20, (40, 9)))
    logit = torch.randn(1, 9), torch.randn(1)
    values = ops.mlp(inputs.to(dtype), weights, biases)
    logits = ops.mlp_logits(inputs.to(dtype), weights, biases, *logit)
    for sizes in ([1, 13, 17], [4, 24, 3], [2, 5, 24]):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                parts = [part.to(dtype) for part in inputs.split(sizes)]
                found = [ops.mlp(part, weights, biases) for part in parts]
                scores = [ops.mlp_logits(part, weights, biases, *logit) for part in parts]
            assert torch.equal(values, torch.cat(found))
            assert torch.equal(logits, torch.cat(scores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_reach_the_outputs_of_their_rows_alone(dtype, instruction_set):
    inputs, weights, biases = network((9, 20, (40, 9)))
    finite = ops.mlp(inputs.to(dtype), weights, biases)
    with torch.no_grad():
        inputs[3, 7], inputs[5, 0] = float("nan"), float("inf")
    output = ops.mlp(inputs.to(dtype), weights, biases)
    assert output[3].isnan().all()
    assert not output[5].isfinite().all()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(output[others], finite[others])
    grads = torch.autograd.grad(output.sum(), weights)
    assert all(grad.isnan().any() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_multiplies_rows_of_whole_16_bytes(dtype, monkeypatch):
    """Pads 13 half-precision fields to 16; values and gradients stay those of 13."""
    module = sys.modules["dlrm.ops.mlp"]
    monkeypatch.setattr(module, "_NATIVE_DTYPES", ())
    inputs, weights, biases = network((5, 13, (8, 4)))
    expected = output_and_gradients(in_dtype(dtype), inputs, weights, biases)
    widths = []

    def noted(product):
        def call(inputs, weight, *bias):
            widths.append((inputs.shape[1], weight.shape[1]))
            return product(inputs, weight, *bias)

        return call

    def with_relu(bias, inputs, weight):
        return matrix_product(inputs, weight.T, bias).relu_()

    monkeypatch.setattr(module, "matrix_product", noted(matrix_product))
    monkeypatch.setattr(module, "_layer", noted(module._layer))
    monkeypatch.setattr(torch, "_addmm_activation", with_relu)  # the CPU's supports fewer dtypes
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # stands in for a GPU: nothing else reads it
    actual = output_and_gradients(in_dtype(dtype), inputs, weights, biases)
    padded = 13 if dtype == torch.float32 else 16
    assert widths == [(padded, padded), (8, 8), (4, 4), (8, 8)]
    assert [t.shape for t in actual] == [t.shape for t in expected]
    assert all(t.is_contiguous() for t in actual[2:])
    torch.testing.assert_close(actual, expected)


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


def test_gradients_that_nobody_wants_are_not_computed(products):
    inputs, weights, biases = network((6, 5, (4, 3)))
    for tensor in (inputs, weights[0], *biases):
        tensor.requires_grad_(False)
    ops.mlp(inputs, weights, biases).sum().backward()
    expected = torch.autograd.grad(ops.mlp_reference(inputs, weights, biases).sum(), weights[1])
    torch.testing.assert_close(weights[1].grad, *expected)
    assert [inputs.grad, weights[0].grad] == [None, None]


@pytest.mark.parametrize("frozen", ["inputs", "first weight"])
def test_what_no_gradient_reads_may_change_before_the_backward_pass(frozen, products):
    inputs, weights, biases = network((6, 5, (4, 3)))
    still, changed = (inputs, weights[0]) if frozen == "inputs" else (weights[0], inputs)
    still.requires_grad_(False)
    others = [tensor for tensor in (inputs, *weights, *biases) if tensor is not still]
    expected = torch.autograd.grad(ops.mlp_reference(inputs, weights, biases).sum(), others)
    output = ops.mlp(inputs, weights, biases)
    changed.detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(output.sum(), others), expected)


def test_logits_and_their_bias_may_change_before_the_backward_pass(products):
    inputs, weights, biases = network((6, 5, (4, 3)))
    logit = torch.ones(1, 3, requires_grad=True), torch.ones(1, requires_grad=True)
    leaves = (inputs, *weights, *biases, *logit)
    hidden = ops.mlp_reference(inputs, weights, biases)
    by_layer = torch.nn.functional.linear(hidden, *logit)
    expected = torch.autograd.grad(3 * by_layer.sum(), leaves)
    logits = ops.mlp_logits(inputs, weights, biases, *logit)
    logit[1].detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(logits.mul_(3).sum(), leaves), expected)


def test_strided_inputs_and_gradients_are_read_by_their_strides(device, products):
    inputs, weights, biases = network((8, 6, (4,)), device)
    strided = inputs.detach().T.contiguous().T.requires_grad_()
    output = ops.mlp(strided, weights, biases)
    (actual,) = torch.autograd.grad(output.sum(), strided)  # an expanded gradient
    expected = ops.mlp_reference(inputs, weights, biases)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(actual, *torch.autograd.grad(expected.sum(), inputs))


def test_strided_biases_are_read_by_their_strides(device, products):
    inputs, weights = torch.ones(1, 3, device=device), [torch.zeros(6, 3, device=device)]
    column = torch.arange(12.0, device=device).view(6, 2)[:, 1]
    assert ops.mlp(inputs, weights, [column]).tolist() == [[1, 3, 5, 7, 9, 11]]
    assert ops.mlp(inputs, weights, [torch.ones(1, device=device).expand(6)]).tolist() == [[1] * 6]


def test_second_derivatives_are_refused_and_not_wrong(products):
    inputs, weights, biases = network((3, 4, (5,)))
    output = ops.mlp(inputs, weights, biases).square().sum()
    (grad,) = torch.autograd.grad(output, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_layers_that_do_not_fit_are_named(device, products):
    inputs, weights, biases = network((3, 4, (5, 6)), device)
    with pytest.raises(RuntimeError, match=r"layer 1: expected weight \[outputs, 5\].*\[6, 4\]"):
        ops.mlp(inputs, [weights[0], weights[1][:, :4]], biases)
    with pytest.raises(RuntimeError, match=r"layer 0: .* bias \[outputs\], .* bias \[6\]"):
        ops.mlp(inputs, weights, biases[::-1])
    with pytest.raises(RuntimeError, match=r"expected a bias for every weight.*2 weights, 1 bias"):
        ops.mlp(inputs, weights, biases[:1])
    with pytest.raises(RuntimeError, match=r"expected inputs \[batch, inputs\].*\[4\]"):
        ops.mlp(inputs[0], weights, biases)


def test_pairs_that_do_not_fit_are_named(device):
    grad = torch.randn(3, 4, device=device)
    with pytest.raises(RuntimeError, match=r"got grad \[3, 4\] and output \[3, 5\]"):
        ops.relu_bias_backward(grad, torch.randn(3, 5, device=device))
    with pytest.raises(RuntimeError, match=r"of one dtype .*[Ff]loat.* and .*[Bb][Ff]loat16"):
        ops.relu_bias_backward(grad, grad.bfloat16())
    compiled = torch.compile(ops.relu_bias_backward, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"got grad \[3, 4\] and output \[3, 5\]"):
        compiled(grad, torch.randn(3, 5, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [0, 1, 25, 300])
def test_logits_match_a_layer_behind_the_network(batch, dtype, products):
    """Uses positive values, so no ReLU is active for one and inactive for the other."""
    inputs, weights, biases = network((batch, 20, (40, 37)))
    inputs, *parameters = (
        t.detach().abs().requires_grad_()
        for t in (inputs, *weights, *biases, torch.randn(1, 37) / 6, torch.randn(1))
    )
    split = (parameters[:2], parameters[2:4], *parameters[4:])
    logits = ops.mlp_logits(inputs.to(dtype), *split)
    hidden = ops.mlp(inputs.to(dtype), *split[:2]).double()
    expected = torch.nn.functional.linear(hidden, *(t.double() for t in split[2:])).squeeze(1)
    assert (logits.dtype, logits.shape) == (torch.float32, (batch,))
    torch.testing.assert_close(logits.double(), expected, **SUMS)
    factors = torch.rand(batch)
    actual = torch.autograd.grad((logits * factors).sum(), (inputs, *parameters))
    exact = torch.autograd.grad((expected * factors).sum(), (inputs, *parameters))
    for one, other in zip(actual, exact, strict=True):
        scale = float(other.abs().max()) if other.numel() else 0
        roundings = 1e-5 if dtype == torch.float32 else 4 * 2**-8
        torch.testing.assert_close(one, other, atol=roundings * scale, rtol=1e-5)

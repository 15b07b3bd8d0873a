import pytest
import torch
from hypothesis import given, settings, strategies as st
from ops_testing import assert_as_close_as_reference

from dlrm import ops

SHAPES = [  # batch, tables, dim
    (1, 1, 1),
    (33, 26, 128),  # the Criteo model, and a batch that is no multiple of a task
    (2, 5, 19),  # nothing divides anything
    (7, 12, 16),
    (3, 33, 16),  # narrow vectors, three registers of columns
    (2, 16, 31),  # narrow in bfloat16 alone, with half a unit at the end
    (3, 0, 5),  # no tables: nothing to multiply
    (0, 26, 128),
    (2, 40, 300),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Two orders of adding a few hundred products of up to about 16: each addition may lose half of
# 2**-23 of the sum so far, about 1e-6 in float32.
SUMS = {"atol": 1e-4, "rtol": 1e-5}


def inputs(shape, device, dtype=torch.float32, requires_grad=False):
    batch, tables, dim = shape
    generator = torch.Generator().manual_seed(batch + tables + dim)
    dense = torch.randn(batch, dim, generator=generator)
    embeddings = torch.randn(batch, tables, dim, generator=generator)
    return [x.to(device, dtype).requires_grad_(requires_grad) for x in (dense, embeddings)]


def outputs_and_gradients(function, args, weights=None):
    output = function(*args)
    if weights is None:
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    weights = weights.to(output)  # padding included: its gradient must reach nothing
    return [output, *torch.autograd.grad(output, args, weights)]


def assert_as_exact_as_reference(args):
    """Compares outputs and gradients with the reference's, of the arguments and in float64."""
    batch, tables, dim = args[1].shape
    exact_args = [x.detach().double().requires_grad_() for x in args]
    weights = torch.randn(batch, ops.interaction_width(tables, dim)).to(args[0])
    for actual, reference, exact in zip(
        outputs_and_gradients(ops.dot_interaction, args, weights),
        outputs_and_gradients(ops.dot_interaction_reference, args, weights),
        outputs_and_gradients(ops.dot_interaction_reference, exact_args, weights),
        strict=True,
    ):
        if actual.dtype == torch.float32:
            torch.testing.assert_close(actual, exact.float(), **SUMS)
        else:
            assert_as_close_as_reference(actual, reference, exact)


def assert_matches_reference(args):
    found = outputs_and_gradients(ops.dot_interaction, args)
    torch.testing.assert_close(
        found, outputs_and_gradients(ops.dot_interaction_reference, args), **SUMS
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_match_reference(shape, device):
    assert_matches_reference(inputs(shape, device, requires_grad=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_is_as_exact_as_the_reference(shape, dtype, instruction_set):
    args = inputs(shape, "cpu", dtype, requires_grad=True)
    assert_as_exact_as_reference(args)


def test_large_outputs_that_bypass_the_caches_match_reference(instruction_set):
    assert_matches_reference(inputs((2600, 26, 128), "cpu", requires_grad=True))


def test_known_answer(device):
    dense = torch.tensor([[1.0, 2.0]], device=device)
    embeddings = torch.tensor([[[3.0, 4.0], [5.0, 6.0]]], device=device)
    output = ops.dot_interaction(dense, embeddings)
    assert output.tolist() == [[1.0, 2.0, 11.0, 17.0, 39.0, 0.0, 0.0, 0.0]]


def test_transposed_inputs_are_read_by_their_strides(device):
    dense, embeddings = inputs((6, 4, 8), device)
    transposed = embeddings.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(
        ops.dot_interaction(dense.T.contiguous().T, transposed),
        ops.dot_interaction_reference(dense, embeddings),
    )


@settings(max_examples=30)
@given(
    batch=st.integers(0, 70),
    tables=st.integers(0, 35),
    dim=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_matches_reference(batch, tables, dim, dtype):
    args = inputs((batch, tables, dim), "cpu", dtype, requires_grad=True)
    assert_as_exact_as_reference(args)


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype, dim, threads):
    args = inputs((301, 26, dim), "cpu", dtype, requires_grad=True)
    threads(1)
    alone = outputs_and_gradients(ops.dot_interaction, args)
    threads(2)
    for one, two in zip(alone, outputs_and_gradients(ops.dot_interaction, args), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_has_the_same_bits_alone_and_beside_nan(dtype, dim, instruction_set):
    args = inputs((5, 26, dim), "cpu", dtype)
    alone = outputs_and_gradients(ops.dot_interaction, [x[2:3].requires_grad_() for x in args])
    for x in args:
        x[[1, 3]] = torch.nan
    weights = torch.randn(alone[0].shape, generator=torch.Generator().manual_seed(0)).expand(5, -1)
    beside = outputs_and_gradients(ops.dot_interaction, [x.requires_grad_() for x in args], weights)
    for one, all_ in zip(alone, beside, strict=True):
        assert torch.equal(one[0], all_[2])


@pytest.mark.unwatched
def test_opcheck(device, native):
    args = inputs((3, 4, 8), device, requires_grad=True)
    torch.library.opcheck(torch.ops.dlrm.dot_interaction, args)
    grad = torch.randn(3, ops.interaction_width(4, 8), device=device)
    args = [x.detach() for x in args]
    torch.library.opcheck(torch.ops.dlrm.dot_interaction_backward, (grad, *args))


@pytest.mark.unwatched
def test_compiles_as_one_graph_with_any_batch(device):
    compiled = torch.compile(
        lambda dense, embeddings: ops.dot_interaction(2 * dense, embeddings).relu(),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for batch in (5, 9):
        args = inputs((batch, 3, 8), device, requires_grad=True)
        torch.testing.assert_close(
            outputs_and_gradients(compiled, args),
            outputs_and_gradients(
                lambda d, e: ops.dot_interaction_reference(2 * d, e).relu(), args
            ),
        )


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


def test_a_gradient_of_another_shape_is_named(native):
    dense, embeddings = inputs((4, 3, 16), "cpu")
    with pytest.raises(RuntimeError, match=r"expected grad \[4, 24\] Float, got \[4, 22\] Float"):
        torch.ops.dlrm.dot_interaction_backward(torch.zeros(4, 22), dense, embeddings)


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

"""Attended bags against plain torch, in every dtype and instruction set."""

import pytest
import torch

from dlrm import ops

ISAS = ("generic", "avx2", "avx512", "avx512_bf16")
SHAPES = [  # batch, dim, hidden, longest list
    (1, 1, 1, 3),
    (37, 16, 36, 50),  # the benchmark's unit, and a batch that is no multiple of a task
    (70, 19, 7, 5),  # nothing divides anything; more samples than tasks
    (5, 128, 40, 9),
    (0, 16, 36, 5),
    (4, 8, 36, 0),  # no list has an item
]
LISTS = ((1, 0), (3, 0))  # two lists with one candidate; field 2 is another bag


@pytest.fixture(params=ISAS)
def isa(request):
    best = ops.instruction_set()
    if ISAS.index(request.param) > ISAS.index(best):
        pytest.skip(f"this processor has {best} at most")
    ops.instruction_set(request.param)
    yield request.param
    ops.instruction_set(ISAS[-1])


def inputs(shape, dtype=torch.float32, seed=0, requires_grad=True):
    batch, dim, hidden, longest = shape
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(30, dim, generator=random).to(dtype).requires_grad_(requires_grad)
    weight.grad_dtype = None
    lengths = torch.randint(0, longest + 1, (batch, 4), generator=random)
    lengths[:, 0] = 1
    ids = torch.randint(0, 10, (int(lengths.sum()),), generator=random)
    offsets = torch.tensor([[0, 0, 20, 0], [20, 20, 30, 20]])  # lists and candidates share rows
    shapes = [(2, hidden, dim)] * 3 + [(2, hidden)] * 2 + [(2,)]
    scale = dim**-0.5
    units = ops.ActivationUnits(
        *(
            (scale * torch.randn(size, generator=random)).requires_grad_(requires_grad)
            for size in shapes
        )
    )
    factors = torch.rand(len(ids), generator=random)
    return weight, ids, lengths, offsets, units, factors


def results(attend, given, dtype=None, factors=True):
    weight, ids, lengths, offsets, units, weights = given
    sample_weights = weights if factors else None
    arguments = weight, ids, lengths, offsets, LISTS, units
    found = attend(*arguments, sample_weights=sample_weights, dtype=dtype)
    random = torch.Generator().manual_seed(1)
    wanted = torch.randn(found.shape, generator=random).bfloat16().to(found.dtype)
    grads = torch.autograd.grad(found, [weight, *units], wanted)
    return found, grads[0].to_dense().float(), grads[1:]


@pytest.mark.parametrize("factors", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_match_the_reference(shape, factors, isa):
    given = inputs(shape)
    expected = results(ops.attended_bag_reference, given, factors=factors)
    found = results(ops.attended_bag, given, factors=factors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output", [torch.float32, None])
def test_so_do_those_of_half_precision(dtype, output, isa):
    given = inputs(SHAPES[1], dtype)
    exact = inputs(SHAPES[1], dtype)
    exact = (exact[0].detach().float().requires_grad_(), *exact[1:])
    expected, plain, found = (
        results(attend, own, kind)
        for attend, own, kind in (
            (ops.attended_bag_reference, exact, None),
            (ops.attended_bag_reference, given, output),
            (ops.attended_bag, given, output),
        )
    )
    assert found[0].dtype == (output or dtype)
    for own, theirs, right in zip(*map(flat, (found, plain, expected)), strict=True):
        error, known = ((one.double() - right.double()).abs().max() for one in (own, theirs))
        # The reference keeps gradients of rows in float32 until they are summed.
        assert error <= 2 * known + 8 * torch.finfo(dtype).eps * right.abs().max()


def flat(found):
    return found[0], found[1], *found[2]


def test_a_known_answer():
    """The neuron is x * c - 1 of items 1 and 3 and candidate 2: 1 and 5; their weights 3 and 11."""
    weight = torch.tensor([[1.0], [3.0], [2.0]])
    ids, lengths = torch.tensor([2, 0, 1]), torch.tensor([[1, 2]])
    offsets = torch.tensor([[0, 0], [3, 3]])
    one, none = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    flat = torch.tensor([[-1.0]]), torch.tensor([[2.0]]), torch.tensor([1.0])
    units = ops.ActivationUnits(none, one, none, *flat)
    found = ops.attended_bag(weight, ids, lengths, offsets, [(1, 0)], units)
    assert found.tolist() == [[[2.0], [1 * 3.0 + 3 * 11.0]]]


def test_results_do_not_depend_on_the_number_of_threads():
    given, before = inputs(SHAPES[2]), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(results(ops.attended_bag, given))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_opcheck():
    weight, ids, lengths, offsets, units, _ = inputs(SHAPES[2], requires_grad=False)
    pairs = [field for pair in LISTS for field in pair]
    op = torch.ops.dlrm.attention_weights.default
    torch.library.opcheck(op, (weight, ids, lengths, offsets, pairs, *units))
    begins = offsets[0].repeat(len(lengths)).repeat_interleave(lengths.flatten())
    grad, values = torch.rand(len(ids)), torch.rand(len(ids), 19)
    back = torch.ops.dlrm.attention_weights_backward.default
    torch.library.opcheck(back, (grad, values, weight, ids + begins, lengths, pairs, *units))


def test_bad_ids_and_shapes_are_named():
    weight, ids, lengths, offsets, units, _ = inputs(SHAPES[1])
    bad = ids.clone()
    bad[0] = 20
    with pytest.raises(
        RuntimeError, match="id 20 of table 0 in batch row 0: expected 0 <= id < 20"
    ):
        ops.attended_bag(weight, bad, lengths, offsets, LISTS, units)
    with pytest.raises(RuntimeError, match="expected lists of fields below 4, got 4"):
        ops.attended_bag(weight, ids, lengths, offsets, [(4, 0), (1, 0)], units)
    with pytest.raises(RuntimeError, match="expected each list once"):
        ops.attended_bag(weight, ids, lengths, offsets, [(1, 0), (1, 0)], units)
    wrong = units._replace(bias=units.bias[:, 1:])
    with pytest.raises(RuntimeError, match=r"expected bias of 2 lists, 36 neurons and dim 16"):
        ops.attended_bag(weight, ids, lengths, offsets, LISTS, wrong)

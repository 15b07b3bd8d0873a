import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from op_cases import DIMS, UPDATES, row_inputs, table_inputs

from dlrm import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SGD, ADAGRAD = ops.ROW_RULES["sgd"], ops.ROW_RULES["adagrad"]
SHAPES = [(50, 301, 19), (2000, 9001, 64)]  # rows of the weight, gradients, dim


def make_inputs(total_rows, count, dim, device="cpu", dtype=torch.float32):
    made = row_inputs((total_rows, count, dim), dtype)
    return [one.to(device) for one in made]


@pytest.fixture(params=UPDATES, ids=lambda update: update.name)
def update(request):
    return request.param


# On a GPU, tables of 1 or 17 to 32 columns are small up to 64 rows, of 16 or 128 up to 16.
TABLES = [  # sizes, batch, dim
    ((3, 200, 1, 16, 17, 64, 65, 5000, 10), 33, 128),
    ((3, 200, 1, 16, 17, 64, 65, 5000, 10), 1000, 16),
    ((64, 65, 2, 30, 1), 1000, 19),
    ((64, 65, 2, 30, 1), 9000, 1),
    ((5, 4, 30, 1), 2500, 260),
    ((2, 9), 1, 128),
    ((1, 3), 300, 2052),  # none is small
    ((400,), 100, 8),
    ((0, 3, 0, 200), 0, 16),
    ((), 0, 16),
]
ROUNDED = {"rtol": 6e-5, "atol": 1e-5}  # float32 rounding of beta2 in 1 - beta2 = 0.001


OF_ANY_DTYPE = [TABLES[0], TABLES[3], TABLES[5]]  # of many sizes, of one column, of one sample


@pytest.mark.first_half
@pytest.mark.parametrize(
    ("tables", "dtype"),
    [
        pytest.param(tables, dtype, id=f"{tables}-{dtype}")
        for tables, dtype in itertools.product(TABLES, DTYPES)
        if dtype == torch.float32 or tables in OF_ANY_DTYPE
    ],
)
def test_tables_of_any_size_match_reference(update, tables, dtype, device):
    weight, rows, grad = table_inputs(*tables, device, dtype)
    scale = {"grad_scale": torch.tensor(4.0, device=device)}
    actual = update.tensors(weight)
    update.run(update.function, actual, rows, grad, table_sizes=tables[0], **scale)
    expected = update.tensors(weight.double())
    update.run(update.reference, expected, rows, grad.double(), **scale)
    torch.testing.assert_close(actual, [tensor.float() for tensor in expected], **ROUNDED)
    untouched = torch.ones(len(weight), dtype=torch.bool, device=device).index_fill(0, rows, False)
    for tensor, before in zip(actual, update.tensors(weight), strict=True):
        assert torch.equal(tensor[untouched], before[untouched])
    if grad.numel():
        assert not torch.equal(actual[0], weight)


@pytest.mark.first_half
@pytest.mark.parametrize("tables", TABLES, ids=str)
def test_tables_of_a_split_weight_match_reference(update, tables, device):
    weight, rows, grad = table_inputs(*tables, device, torch.bfloat16)
    args = update.tensors(weight), rows, grad
    actual = run_split(update, update.function, *args, table_sizes=tables[0])
    expected = update.tensors(weight.double())
    update.run(update.reference, expected, rows, grad.double())
    torch.testing.assert_close(actual, [tensor.float() for tensor in expected], **ROUNDED)


def test_rows_of_small_tables_that_do_not_occur_are_left_alone(device):
    weight, rows, grad = table_inputs((3, 9, 200), 40, 8, device)
    before, state = weight.clone(), torch.zeros_like(weight)
    lr = torch.tensor(0.1, device=device)
    sizes = {"table_sizes": [3, 9, 200]}
    ops.row_update_(ADAGRAD, weight, [state], rows, grad.abs() + 1, lr, eps=0, **sizes)
    touched = torch.zeros(212, dtype=torch.bool, device=device).index_fill(0, rows, True)
    assert 0 < touched[:12].sum() < 12
    assert torch.equal(weight.ne(before).all(1), touched)
    assert torch.equal(weight[~touched], before[~touched])  # otherwise 0 / 0
    assert torch.equal(state.ne(0).all(1), touched)


@pytest.mark.parametrize("table_sizes", [None, [3, 9, 200]])
def test_found_inf_changes_nothing(update, table_sizes, device):
    weight, rows, grad = table_inputs((3, 9, 200), 40, 8, device)
    if table_sizes is None:
        grad[3, 2] = float("inf")
    for value, changed in ((1.0, False), (0.0, True)):
        options = {"table_sizes": table_sizes, "found_inf": torch.tensor(value, device=device)}
        after = update.run(update.function, update.tensors(weight), rows, grad, **options)
        assert all(map(torch.equal, after, update.tensors(weight))) is not changed


def test_table_sizes_that_do_not_fit_are_named(update, device, native):
    weight, rows, grad = table_inputs((3, 9, 200), 40, 8, device)

    def refused(sizes, message, rows=rows, grad=grad):
        tensors = update.tensors(weight)
        with pytest.raises(RuntimeError, match=message):
            update.run(update.function, tensors, rows, grad, table_sizes=sizes)
        assert all(map(torch.equal, tensors, update.tensors(weight)))

    sums = r"_: expected table_sizes >= 0 that add up to the weight's 212 rows, got "
    refused([3, 9, 201], sums + r"\[3, 9, 201\]")
    refused([3, 9], sums + r"\[3, 9\]")
    refused([-1, 213], sums + r"\[-1, 213\]")
    refused([2**62, 2**62, 2**62, 2**62, 212], sums)  # the sum exceeds 64 bits
    refused([], sums + r"\[\]")
    counts = r"_: expected as many rows of each of the 3 tables of table_sizes, got 119 rows"
    refused([3, 9, 200], counts, rows[:119], grad[:119])


def test_a_row_of_another_table_is_no_error_on_the_cpu(update):
    weight, rows, grad = table_inputs((3, 9, 200), 40, 8)
    rows[7] = 200
    torch.testing.assert_close(
        update.run(update.function, update.tensors(weight), rows, grad, table_sizes=[3, 9, 200]),
        update.run(update.function, update.tensors(weight), rows, grad),
        rtol=0,
        atol=0,
    )


def test_known_answer(device):
    weight = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    rows = torch.tensor([2, 0, 2], device=device)
    grad = torch.tensor([[1.0], [4.0], [2.0]], device=device)
    lr = torch.tensor(0.5, device=device)
    ops.row_update_(SGD, weight, [], rows, grad, lr)
    assert weight.tolist() == [[-1.0], [2.0], [1.5]]


def test_repeated_rows_are_summed_before_they_are_squared(device):
    weight, state = torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device)
    rows = torch.tensor([0, 0], device=device)
    grad = torch.tensor([[3.0], [1.0]], device=device)
    ops.row_update_(ADAGRAD, weight, [state], rows, grad, torch.tensor(1.0, device=device))
    assert (weight.item(), state.item()) == (-1.0, 16.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_scale_divides_the_gradient(update, dtype, device):
    weight, rows, grad = make_inputs(50, 40, 8, device, dtype)
    scale = torch.tensor(1024.0, device=device)
    torch.testing.assert_close(
        update.run(update.function, update.tensors(weight), rows, grad, grad_scale=scale),
        update.run(update.function, update.tensors(weight), rows, grad.float() / 1024),
    )


def test_repeats_are_summed_in_batch_order(native):
    weight, rows, grad = make_inputs(3, 5000, 16)
    total = torch.zeros_like(weight)
    for row, gradient in zip(rows.tolist(), grad, strict=True):
        total[row] += gradient
    updated = torch.zeros_like(weight)
    ops.row_update_(SGD, updated, [], rows, grad, torch.tensor(1.0))
    assert torch.equal(updated, -total)


def run_split(update, function, tensors, *args, **more):
    """Runs with a split weight; returns the tensors with the weight joined."""
    high, low = ops.split_float32(tensors[0])
    after = update.run(function, [high, *tensors[1:]], *args, low=low, **more)
    return [ops.join_float32(high, low), *after[1:]]


def same_bits(actual, expected):
    return all(
        map(
            torch.equal,
            (t.view(torch.int32) for t in actual),
            (t.view(torch.int32) for t in expected),
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 19, 32, 128])
def test_fifty_steps_of_a_split_weight_equal_those_of_float32(update, dim, dtype, instruction_set):
    weight, *_ = make_inputs(60, 0, dim)
    weight[:4] *= torch.tensor([1e36, 1e-38, 1e-44, 0]).unsqueeze(1)
    expected = update.tensors(weight)
    high, low = ops.split_float32(weight)
    states = update.tensors(weight)[1:]
    for step in range(1, 51):
        rows = torch.randint(60, (70,))
        grad = torch.randn(70, dim).to(dtype)
        scale = {"grad_scale": torch.tensor(3.0)} if step % 2 else {}
        update.run(update.function, expected, rows, grad, step, **scale)
        update.run(update.function, [high, *states], rows, grad, step, low=low, **scale)
    assert same_bits([ops.join_float32(high, low), *states], expected)
    assert torch.equal(high, ops.split_float32(expected[0])[0])
    assert not torch.equal(expected[0], weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_split_weight_matches_reference(update, shape, device):
    weight, rows, grad = make_inputs(*shape, device)
    actual = run_split(update, update.function, update.tensors(weight), rows, grad)
    expected = run_split(update, update.reference, update.tensors(weight), rows, grad)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.unwatched
def test_the_reference_gives_a_split_weight_the_bits_of_float32(update, device, deterministic):
    weight, rows, grad = make_inputs(*SHAPES[0], device)
    same = run_split(update, update.reference, update.tensors(weight), rows, grad)
    assert same_bits(same, update.run(update.reference, update.tensors(weight), rows, grad))


def test_small_steps_are_not_lost_in_a_split_weight(device):
    high, low = ops.split_float32(torch.ones(1, 1, device=device))
    rows, grad = torch.tensor([0], device=device), torch.full((1, 1), -(2.0**-16), device=device)
    for _ in range(2**8):  # each is 1/512 of bfloat16's spacing at 1
        ops.row_update_(SGD, high, [], rows, grad, torch.tensor(1.0, device=device), low=low)
    assert high.item() == 1 + 2.0**-8 + 2.0**-8  # 1 + 2**-8 is halfway between two bfloat16
    assert ops.join_float32(high, low).item() == 1 + 2.0**-8


def test_threads_do_not_change_a_bit_of_a_split_weight(update, threads):
    weight, rows, grad = make_inputs(5_000, 20_000, 24)
    results = []
    for count in (1, 2, 3, 2):
        threads(count)
        results.append(run_split(update, update.function, update.tensors(weight), rows, grad))
    for result in results[1:]:
        assert same_bits(result, results[0])


def test_found_inf_changes_nothing_of_a_split_weight(update, device):
    weight, rows, grad = make_inputs(50, 40, 8, device)
    grad[3, 2] = float("nan")
    skip = {"found_inf": torch.tensor(1.0, device=device)}
    after = run_split(update, update.function, update.tensors(weight), rows, grad, **skip)
    assert same_bits(after, update.tensors(weight))


def test_a_bad_row_changes_nothing_of_a_split_weight(update):
    weight, rows, grad = make_inputs(50, 40, 8)
    rows[21] = 50
    high, low = ops.split_float32(weight)
    tensors = [high, *update.tensors(weight)[1:]]
    with pytest.raises(RuntimeError, match="row 50 at position 21"):
        update.run(update.function, tensors, rows, grad, low=low)
    assert torch.equal(ops.join_float32(high, low), weight)


def test_a_weight_and_low_that_do_not_fit_are_named(update, device, native):
    weight, rows, grad = make_inputs(50, 40, 8, device)
    high, low = ops.split_float32(weight)
    states = update.tensors(weight)[1:]

    def refused(weight, low, message):
        with pytest.raises(RuntimeError, match=message):
            update.run(update.function, [weight, *states], rows, grad, low=low)

    refused(high, None, "a BFloat16 one with low, got .* without low")
    refused(weight, low, "a BFloat16 one with low, got .* with low")
    refused(high.half(), low, "expected a contiguous Float weight.*got .*(Half|float16)")
    refused(high, low[:49], r"expected contiguous Short low \[50, 8\].*got \[49, 8\]")
    refused(high, low.int(), r"expected contiguous Short low \[50, 8\].*got .*(Int|int32)")
    refused(high, low.T.contiguous().T, "expected contiguous Short low")


@settings(max_examples=40)
@given(
    update=st.sampled_from(UPDATES),
    shape=st.tuples(st.integers(1, 3000), st.integers(0, 300), DIMS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_of_a_split_weight_equals_float32(update, shape, dtype):
    weight, rows, grad = make_inputs(*shape, dtype=dtype)
    actual = run_split(update, update.function, update.tensors(weight), rows, grad)
    assert same_bits(actual, update.run(update.function, update.tensors(weight), rows, grad))


@pytest.mark.parametrize("bad", [-1, 50, 2**40, -(2**63)])
def test_a_bad_row_is_named_and_changes_nothing(update, bad):
    weight, rows, grad = make_inputs(50, 40, 8)
    rows[30:] = 77
    rows[21] = bad
    tensors = update.tensors(weight)
    message = rf"row_update_: row {bad} at position 21: expected 0 <= row < 50"
    with pytest.raises(RuntimeError, match=message):
        update.run(update.function, tensors, rows, grad)
    assert all(map(torch.equal, tensors, update.tensors(weight)))


def test_a_rule_without_kernels_runs_in_plain_torch_with_checks(update, monkeypatch):
    monkeypatch.setattr(update, "rule", dataclasses.replace(update.rule, number=None))
    weight, rows, grad = make_inputs(50, 40, 8)
    for wrong, bad, message in (
        (weight.bfloat16(), rows, "or a BFloat16 one with low, got .* without low"),
        (weight, rows - 50, "row -.* at position 0: expected 0 <= row < 50"),
    ):
        tensors = update.tensors(wrong)
        with pytest.raises(RuntimeError, match=f"row_update_: .*{message}"):
            update.run(update.function, tensors, bad, grad)
        assert all(map(torch.equal, tensors, update.tensors(wrong)))
    for place, state in enumerate(update.tensors(weight)[1:], 1):
        for wrong in (state.half(), state[:49], state[..., None].expand(*state.shape, 8)):
            tensors = update.tensors(weight)
            tensors[place] = wrong
            with pytest.raises(RuntimeError, match="expected contiguous Float .* got "):
                update.run(update.function, tensors, rows, grad)
            assert torch.equal(tensors[0], weight)
    high, low = ops.split_float32(weight)
    with pytest.raises(RuntimeError, match=r"expected contiguous Short low .*got \[49, 8\]"):
        update.run(update.function, [high, *update.tensors(weight)[1:]], rows, grad, low=low[:49])


def test_a_constant_that_the_rule_lacks_is_named(update):
    tensors = update.tensors(torch.zeros(5, 3))
    for function in (update.function, update.reference):
        with pytest.raises(TypeError, match=f"{update.name} has no constant momentum"):
            update.run(function, tensors, torch.tensor([1]), torch.ones(1, 3), momentum=0.9)


@pytest.mark.parametrize(
    ("number", "states", "message"),
    [
        (9, [], "expected the number of a rule, 0 to 3, got 9"),
        (3, [], "expected 3 constants, got 1"),
        (1, [], "expected 1 states, got 0"),
    ],
)
def test_what_no_rule_of_python_passes_is_refused(number, states, message, native):
    weight, rows, grad = make_inputs(50, 40, 8)
    args = (number, weight, states, rows, grad, torch.tensor(0.1), None, [0.5], 0.0)
    with pytest.raises(RuntimeError, match=f"row_update_: {message}"):
        torch.ops.dlrm.row_update_(*args, None, None, None, None)


def test_wrong_shapes_and_dtypes_are_named(update, device, native):
    weight, rows, grad = make_inputs(50, 40, 8, device)
    tensors = update.tensors(weight)
    with pytest.raises(RuntimeError, match=r"expected grad \[40, 8\].*got \[39, 8\]"):
        update.run(update.function, tensors, rows, grad[:39])
    with pytest.raises(RuntimeError, match=r"expected grad \[40, 8\].*got \[40, 8\] .*(D|float64)"):
        update.run(update.function, tensors, rows, grad.double())
    with pytest.raises(
        RuntimeError, match=r"expected rows \[count\] Long on .*got \[40\] .*[Ii]nt"
    ):
        update.run(update.function, tensors, rows.int(), grad)
    with pytest.raises(RuntimeError, match=r"expected a contiguous Float weight .*got \[50, 0\]"):
        update.run(update.function, [weight[:, :0], *tensors[1:]], rows, grad[:, :0])
    with pytest.raises(RuntimeError, match="expected a contiguous Float weight"):
        update.run(update.function, [weight.bfloat16(), *tensors[1:]], rows, grad)
    for index in range(1, len(tensors)):
        wrong = [*tensors]
        wrong[index] = tensors[index][:49]
        with pytest.raises(RuntimeError, match="expected contiguous Float (state_sum|exp_avg|z|n)"):
            update.run(update.function, wrong, rows, grad)


def test_autograd_notices_that_a_weight_was_changed():
    weight, x = torch.randn(10, 3), torch.randn(10, 3, requires_grad=True)
    y = (weight * x).sum()
    ops.row_update_(SGD, weight, [], torch.tensor([1]), torch.ones(1, 3), torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()

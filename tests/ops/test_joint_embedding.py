import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from op_cases import BAG_SHAPES, LOOK_UPS, bag_inputs, bags, look_up_inputs, results

from dlrm import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ID_DTYPES = [torch.int8, torch.int16, torch.int32, torch.int64]


def make_inputs(batch, sizes, dim, device="cpu", dtype=torch.float32, id_dtype=torch.int64):
    made = look_up_inputs((batch, sizes, dim), dtype, id_dtype)
    return [one.detach().to(device) for one in made]


def bags_of(*shape, device="cpu", ids=torch.int64):
    made = bag_inputs(shape, torch.float32, weighted=False, id_dtype=ids)
    return [one.detach().to(device) for one in made]


def test_known_answer(device):
    weight = torch.tensor([[1.0], [2.0], [3.0], [5.0]], device=device)
    offsets = torch.tensor([0, 1, 4], device=device)
    ids = torch.tensor([[0, 2], [0, 0]], device=device)
    assert ops.joint_embedding(weight, ids, offsets).tolist() == [[[1], [5]], [[1], [2]]]
    lengths = torch.tensor([[1, 2], [0, 3]], device=device)
    ids = torch.tensor([0, 0, 2, 1, 1, 2], device=device)  # 1 | 2 5 || nothing | 3 3 5
    factors = torch.tensor([1.0, 10.0, 1.0, 0.0, 2.0, 1.0], device=device)

    def pool(**more):
        return ops.joint_embedding(weight, ids, offsets, lengths, **more).flatten().tolist()

    assert pool() == [1, 7, 0, 11]
    assert pool(sample_weights=factors) == [1, 25, 0, 11]
    torch.testing.assert_close(pool(pooling="mean"), [1.0, 3.5, 0.0, 11 / 3])
    weighted = pool(sample_weights=factors, pooling="mean")
    torch.testing.assert_close(weighted, [1.0, 12.5, 0.0, 11 / 3])


def test_tables_may_have_the_same_rows(device):
    weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]], device=device, requires_grad=True)
    offsets = torch.tensor([[0, 1, 0], [2, 4, 2]], device=device)  # begins and ends
    ids = torch.tensor([[0, 2, 0], [1, 0, 1]], device=device)
    listed = torch.tensor([0, 1, 2, 0, 1, 1], device=device)
    lengths = torch.tensor([[1, 2, 1], [0, 0, 2]], device=device)

    def checked(*args):
        ops.joint_embedding(weight, *args)
        ops.raise_device_errors(device)  # a GPU keeps them

    def refused(message, *args):
        with pytest.raises(RuntimeError, match=message):
            checked(*args)

    for args, vectors, gradients in (
        ((ids, offsets), [1, 4, 1, 2, 2, 2], [2, 3, 0, 1]),
        ((listed, offsets, lengths), [1, 7, 1, 0, 0, 4], [2, 2, 1, 1]),
    ):
        found = ops.joint_embedding(weight, *args)
        assert found.flatten().tolist() == vectors
        (grad,) = torch.autograd.grad(found.sum(), weight)
        assert grad.to_dense().flatten().tolist() == gradients
    ids[0, 2] = listed[3] = 2
    refused("id 2 of table 2 in batch row 0: expected 0 <= id < 2", ids, offsets)
    refused("id 2 of table 2 in batch row 0: expected 0 <= id < 2", listed, offsets, lengths)
    beyond = offsets + torch.tensor([[0], [1]], device=device)
    refused(r"table_offsets\[4\] = 5: expected offsets that do not", ids % 2, beyond)


def test_offsets_beyond_the_weight_are_refused(native):
    weight, ids, offsets = make_inputs(5, [4, 9], 8)
    lengths = torch.ones_like(ids)
    for bad in ([0, 4, 14], [0, 5, 4], [-1, 4, 13]):
        for args in ((ids, torch.tensor(bad)), (ids.flatten(), torch.tensor(bad), lengths)):
            with pytest.raises(RuntimeError, match=r"table_offsets\[\d\] = .*the weight's 13"):
                ops.joint_embedding(weight, *args)


@pytest.mark.parametrize("form", ["one each", "lists"])
def test_wrong_shapes_and_dtypes_are_named(form, device):
    weight, ids, offsets = make_inputs(5, [4, 9], 8, device)
    shape, lengths = r"\[batch, tables\]", ()
    if form == "lists":
        ids, shape, lengths = ids.flatten(), r"\[total\]", (torch.ones_like(ids),)

    def refused(message, *args, lengths=lengths, **more):
        with pytest.raises(RuntimeError, match=f"joint_embedding: expected {message}"):
            ops.joint_embedding(*args, *lengths, **more)

    refused(r"table_offsets \[3\].*got \[2\]", weight, ids, offsets[:-1])
    refused(rf"ids {shape}.*got \[(10|5, 2), 1\]", weight, ids[..., None], offsets)
    refused(r"ids .*[Ff]loat", weight, ids.float(), offsets)
    refused(r"weight .*got \[13, 0\]", weight[:, :0], ids, offsets)
    refused(r"weight .*([Dd]ouble|float64)", weight.double(), ids, offsets)
    refused(r"dtype Float, BFloat16 or Half, got", weight, ids, offsets, dtype=torch.int32)
    for own in lengths:
        message = r"lengths \[batch, tables\].*got \[10\]"
        refused(message, weight, ids, offsets, lengths=[own.flatten()])
        refused(r"lengths .*[Ff]loat", weight, ids, offsets, lengths=[own.float()])
        for bad in (torch.ones(11, device=device), torch.ones(10, device=device).double()):
            message = r"sample_weights \[10\] Float.*, got"
            refused(message, weight, ids, offsets, sample_weights=bad)


def test_the_first_bad_value_is_named_whatever_the_threads(threads):
    weight, ids, offsets = make_inputs(100_000, [10, 7, 100], 8)
    ids = ids.fill_(0).flatten()
    ids[150_001::3] = 8
    lengths = torch.ones(100_000, 3, dtype=torch.int64)
    negative = lengths.clone()
    negative[50_000:, 1] = -1
    for count in (1, 2):
        threads(count)
        with pytest.raises(RuntimeError, match="id 8 of table 1 in batch row 50000:"):
            ops.joint_embedding(weight, ids.view(-1, 3), offsets)
        with pytest.raises(RuntimeError, match="id 8 of table 1 in batch row 50000:"):
            ops.joint_embedding(weight, ids, offsets, lengths)
        with pytest.raises(RuntimeError, match="length -1 of table 1 in batch row 50000:"):
            ops.joint_embedding(weight, ids, offsets, negative)


@pytest.mark.parametrize("output_dtype", [None, *DTYPES])
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_every_instruction_set_casts_as_torch_does(weight_dtype, output_dtype, instruction_set):
    for shape in LOOK_UPS:
        weight, ids, offsets = make_inputs(*shape, dtype=weight_dtype)
        special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-40, 65520.0])
        halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11])
        special = torch.cat([special, halfway, -halfway]).to(weight_dtype)
        weight.view(-1)[: len(special)] = special[: weight.numel()]
        torch.testing.assert_close(
            ops.joint_embedding(weight, ids, offsets, dtype=output_dtype),
            ops.joint_embedding_reference(weight, ids, offsets, dtype=output_dtype),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_outputs_that_bypass_the_caches_match_reference(dtype, instruction_set):
    args = make_inputs(34_000, [50, 3000, 7, 90], 128)
    assert torch.equal(
        ops.joint_embedding(*args, dtype=dtype), ops.joint_embedding_reference(*args, dtype=dtype)
    )


def test_transposed_ids_are_read_by_their_strides(device):
    weight, ids, offsets = make_inputs(37, [10, 3, 100], 8, device)
    assert torch.equal(
        ops.joint_embedding(weight, ids.T.contiguous().T, offsets),
        ops.joint_embedding(weight, ids, offsets),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_the_rows_and_the_outputs_own_gradient(dtype, device, native):
    weight, ids, offsets = make_inputs(5, [4, 9], 16, device, id_dtype=torch.int8)
    weight.requires_grad_()
    weight.grad_dtype = None  # otherwise autograd casts to the weight's dtype
    output = ops.joint_embedding(weight, ids, offsets, dtype=dtype)
    grad = torch.randn_like(output)
    output.backward(grad)
    assert not weight.grad.is_coalesced()
    assert weight.grad._indices().tolist() == [(ids + offsets[:-1]).flatten().tolist()]
    assert weight.grad._values().data_ptr() == grad.data_ptr()
    assert weight.grad.dtype == dtype


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad]
)
def test_torch_optimizers_take_the_gradient(optimizer, device):
    weight, ids, offsets = make_inputs(37, [10, 3, 100], 8, device)
    updated = []
    for function in (ops.joint_embedding, ops.joint_embedding_reference):
        parameter = torch.nn.Parameter(weight.clone())
        opt = optimizer([parameter], lr=0.1)
        for _ in range(2):
            opt.zero_grad()
            function(parameter, ids, offsets).square().sum().backward()
            opt.step()
        updated.append(parameter.detach())
    torch.testing.assert_close(*updated)
    assert not torch.equal(updated[0], weight)


def test_an_id_of_the_next_table_is_refused():
    weight, ids, offsets = make_inputs(50, [10, 7, 100], 8)
    ids[3, 0] = 10  # a row of the weight, but of table 1
    with pytest.raises(RuntimeError, match="id 10 of table 0 in batch row 3"):
        ops.joint_embedding(weight, ids, offsets)


@pytest.mark.parametrize("id_dtype", ID_DTYPES)
@pytest.mark.parametrize("bad", [-1, 7, "least", "most"])
def test_a_bad_id_is_named(bad, id_dtype):
    weight, ids, offsets = make_inputs(50, [10, 7, 100], 8, id_dtype=id_dtype)
    limits = torch.iinfo(id_dtype)
    bad = {"least": limits.min, "most": limits.max}.get(bad, bad)
    ids[45, 2] = -1  # only the first is reported
    ids[42, 1] = bad
    lengths = torch.ones(50, 3, dtype=id_dtype)
    lengths[3, 1], lengths[7, 0] = 0, 2  # another table's and row's place in the batch
    lists = ids.clone()
    lists[3:8] = 0
    message = rf"^joint_embedding: id {bad} of table 1 in batch row 42: expected 0 <= id < 7$"
    for args in ((ids, offsets), (lists.flatten(), offsets, lengths)):
        with pytest.raises(RuntimeError, match=message):
            ops.joint_embedding(weight, *args)


def make_sample_weights(args):
    count = len(args[1])
    return torch.randn(count, generator=torch.Generator().manual_seed(7)).to(args[1].device)


def pooled_one_by_one(weight, ids, offsets, lengths, sample_weights=None, mean=False):
    """Pools one by one in float64, sharing no index arithmetic with the op."""
    output, position = [], 0
    for sample in lengths.tolist():
        for table, length in enumerate(sample):
            total = torch.zeros(weight.shape[1], dtype=torch.float64)
            for i in range(position, position + length):
                row = weight[offsets[table] + ids[i].item()].double()
                total += row * (1 if sample_weights is None else sample_weights[i].double())
            position += length
            output.append(total / max(length, 1) if mean else total)
    shape = (*lengths.shape, weight.shape[1])
    return torch.stack(output).view(shape) if output else torch.zeros(shape).double()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("shape", BAG_SHAPES[:-1])
def test_bags_are_what_the_definition_says(shape, pooling, weighted):
    args = bags_of(*shape)
    sample_weights = make_sample_weights(args) if weighted else None
    expected = pooled_one_by_one(*args, sample_weights, pooling == "mean").float()
    for function in (ops.joint_embedding, ops.joint_embedding_reference):
        actual = function(*args, sample_weights=sample_weights, pooling=pooling)
        torch.testing.assert_close(actual, expected)


def test_bags_of_one_are_the_look_up(device):
    weight = torch.randn(113, 16, device=device)
    ids = torch.randint(10, (33, 3), device=device)
    offsets = torch.tensor([0, 10, 13, 113], device=device)
    ids[:, 1] %= 3
    lengths = torch.ones(33, 3, dtype=torch.int8, device=device)
    expected = ops.joint_embedding(weight, ids, offsets)
    for pooling in ("sum", "mean"):
        actual = ops.joint_embedding(weight, ids.flatten(), offsets, lengths, pooling=pooling)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("id_dtype", ID_DTYPES)
@pytest.mark.parametrize("length_dtype", ID_DTYPES)
def test_ids_and_lengths_may_be_of_any_integer_dtype(id_dtype, length_dtype):
    weight, ids, offsets, lengths = bags_of(9, [10, 3, 100], 4, 8, ids=id_dtype)
    weight.requires_grad_()
    found = results(ops.joint_embedding, (weight, ids, offsets, lengths.to(length_dtype)))
    expected = results(ops.joint_embedding, (weight, ids.long(), offsets, lengths))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    one_each = torch.tensor([[0, 2, 99], [9, 1, 0]])
    assert torch.equal(
        ops.joint_embedding(weight, one_each.to(id_dtype), offsets),
        ops.joint_embedding(weight, one_each, offsets),
    )


def test_large_gradients_that_bypass_the_caches_match_reference(instruction_set):
    args = bag_inputs((6000, [50, 3000, 7], 7, 128), torch.float32, weighted=False)
    for pooling in ("sum", "mean"):
        functions = ops.joint_embedding, ops.joint_embedding_reference
        found, expected = (results(bags(function, pooling), args) for function in functions)
        # A row of the small table sums thousands.
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)


@settings(max_examples=100)
@given(data=st.data(), length_dtype=st.sampled_from(ID_DTYPES), id_dtype=st.sampled_from(ID_DTYPES))
def test_any_values_are_taken_or_refused_alike(data, length_dtype, id_dtype):
    def integers(dtype, count):
        limits = torch.iinfo(dtype)
        near = st.integers(0, 4)
        value = near | near | near | st.integers(limits.min, limits.max)
        return torch.tensor(data.draw(st.lists(value, min_size=count, max_size=count)), dtype=dtype)

    batch, tables = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    lengths = integers(length_dtype, batch * tables).view(batch, tables)
    wanted = int(lengths.double().clamp(0, 9).sum()) + data.draw(st.sampled_from([0, 0, 0, 1]))
    ids, offsets = integers(id_dtype, wanted), 4 * torch.arange(tables + 1)
    weight = torch.randn(4 * tables, 5)
    try:
        ops.check_ids(ids, offsets, lengths)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(error))}$"):
            ops.joint_embedding(weight, ids, offsets, lengths)
    else:
        torch.testing.assert_close(
            ops.joint_embedding(weight, ids, offsets, lengths),
            ops.joint_embedding_reference(weight, ids, offsets, lengths),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_rows_and_scaled_values_that_row_optimizers_take(dtype, device, native):
    weight, ids, offsets, lengths = bags_of(5, [4, 9], 3, 16, device=device, ids=torch.int8)
    parameter = weight.clone().requires_grad_()
    parameter.grad_dtype = None
    output = ops.joint_embedding(parameter, ids, offsets, lengths, pooling="mean", dtype=dtype)
    grad = torch.randn_like(output)
    output.backward(grad)
    sparse, bags = parameter.grad, ops.bags_of_ids(ids, lengths)
    assert not sparse.is_coalesced()
    assert sparse.dtype == dtype
    assert sparse._indices().tolist() == [(ids + offsets[:-1].repeat(5)[bags]).tolist()]
    scaled = grad.flatten(0, 1)[bags].float() / lengths.flatten()[bags].unsqueeze(1)
    torch.testing.assert_close(sparse._values(), scaled.to(dtype))
    lr = torch.tensor(0.5, device=device)
    rows, values = sparse._indices()[0], sparse._values()
    ops.row_update_(ops.ROW_RULES["sgd"], parameter.detach(), [], rows, values, lr)
    expected = weight.index_add(0, sparse._indices()[0], sparse._values().float(), alpha=-0.5)
    torch.testing.assert_close(parameter.detach(), expected)


def test_the_weight_may_change_before_a_backward_pass_that_does_not_read_it(device):
    weight, ids, offsets, lengths = bags_of(5, [4, 9], 3, 19, device=device)
    factors = make_sample_weights((weight, ids))
    weight.requires_grad_()
    pooled = ops.joint_embedding(weight, ids, offsets, lengths, sample_weights=factors)
    weight.detach().zero_()
    (actual,) = torch.autograd.grad(pooled.sum(), weight)
    rows = ids + offsets[ops.bags_of_ids(ids, lengths) % 2]
    expected = torch.zeros_like(weight).index_add(0, rows, factors[:, None].expand(-1, 19))
    torch.testing.assert_close(actual.to_dense(), expected)


def test_an_id_after_empty_bags_is_placed_in_its_own():
    lengths = torch.tensor([[0, 0, 0], [0, 2, 0], [0, 0, 1]])
    args = torch.zeros(9, 4), torch.tensor([0, 0, 3]), torch.tensor([0, 3, 6, 9]), lengths
    with pytest.raises(RuntimeError, match="id 3 of table 2 in batch row 2: expected 0 <= id < 3"):
        ops.joint_embedding(*args)


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_bad_lengths_are_named(dtype):
    weight, ids, offsets, lengths = bags_of(8, [10, 7], 3, 8)
    lengths = lengths.to(dtype)
    bad = lengths.clone()
    bad[3, 1] = torch.iinfo(dtype).max
    message = rf"length {bad[3, 1]} of table 1 in batch row 3: expected 0 <= length <= {len(ids)}"
    with pytest.raises(RuntimeError, match=message):
        ops.joint_embedding(weight, ids, offsets, bad)
    bad[3, 1] = torch.iinfo(dtype).min
    with pytest.raises(RuntimeError, match=f"length {bad[3, 1]} of table 1 in batch row 3"):
        ops.joint_embedding(weight, ids, offsets, bad)
    message = f"lengths add up to {len(ids)}: expected the number of ids, {len(ids) - 1}"
    with pytest.raises(RuntimeError, match=message):
        ops.joint_embedding(weight, ids[1:], offsets, lengths)
    message = f"lengths add up to {len(ids)}: expected the number of ids, {len(ids) + 1}"
    with pytest.raises(RuntimeError, match=message):
        ops.joint_embedding(weight, torch.cat([ids, ids[:1]]), offsets, lengths)


def test_gradients_of_other_shapes_are_named(native):
    weight, ids, offsets, lengths = bags_of(5, [4, 9], 3, 8)
    backward = torch.ops.dlrm.joint_embedding_bag_backward
    with pytest.raises(RuntimeError, match=r"expected grad \[5, 2, dim > 0\] .* got \[5, 3, 8\]"):
        backward(torch.zeros(5, 3, 8), ids, lengths, offsets, None, False)
    with pytest.raises(RuntimeError, match="lengths add up to"):
        backward(torch.zeros(5, 2, 8), ids[1:], lengths, offsets, None, False)
    backward = torch.ops.dlrm.joint_embedding_bag_sample_weights_backward
    grad, rows = torch.zeros(5, 2, 8), torch.zeros(len(ids), dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"expected grad \[5, 2, 9\] for weight \[13, 9\]"):
        backward(grad, torch.zeros(13, 9), rows, lengths, False)
    rows[2] = 13
    with pytest.raises(RuntimeError, match="row 13 at position 2: expected 0 <= row < 13"):
        backward(grad, weight, rows, lengths, False)


def test_a_wrong_shape_is_refused_under_compile(device):
    weight, ids, offsets, lengths = bags_of(5, [4, 9], 3, 8, device=device)
    compiled = torch.compile(ops.joint_embedding, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="joint_embedding: expected table_offsets"):
        compiled(weight, ids, offsets[:-1], lengths)


def test_another_pooling_is_refused(device):
    args = bags_of(5, [4, 9], 3, 8, device=device)
    with pytest.raises(ValueError, match="joint_embedding: expected pooling .*'max'"):
        ops.joint_embedding(*args, pooling="max")

import sys

import pytest
import torch
from op_cases import LOOK_UPS, look_up_inputs

from dlrm import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ID_DTYPES = [torch.int8, torch.int16, torch.int32, torch.int64]


def make_inputs(batch, sizes, dim, device="cpu", dtype=torch.float32, id_dtype=torch.int64):
    made = look_up_inputs((batch, sizes, dim), dtype, id_dtype)
    return [one.detach().to(device) for one in made]


@pytest.mark.parametrize("id_dtype", ID_DTYPES)
def test_ids_may_be_of_any_integer_dtype(id_dtype, device):
    args = make_inputs(*LOOK_UPS[1], device, id_dtype=id_dtype)
    assert torch.equal(ops.joint_embedding(*args), ops.joint_embedding_reference(*args))


def test_the_gradient_of_plain_torch_adds_at_the_rows_of_its_tables(monkeypatch):
    monkeypatch.setattr(sys.modules["dlrm.ops.joint_embedding"], "native_available", lambda: False)
    ids, offsets = torch.tensor([[0, 1], [2, 0]]), torch.tensor([0, 3, 5])
    gradient = ops.joint_embedding_gradient(
        (5, 1), ids, offsets, torch.tensor([[[1.0], [2]], [[3], [4]]])
    )
    assert gradient.to_dense().flatten().tolist() == [1, 0, 3, 4, 2]


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


def test_known_answer(device):
    weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]], device=device)
    ids = torch.tensor([[0, 2], [0, 0]], device=device)
    offsets = torch.tensor([0, 1, 4], device=device)
    assert ops.joint_embedding(weight, ids, offsets).tolist() == [[[1.0], [4.0]], [[1.0], [2.0]]]


def checked(device, *arguments):
    """Looks up, and asks a GPU for its errors."""
    ops.joint_embedding(*arguments)
    ops.raise_device_errors(device)


def test_tables_may_have_the_same_rows(device):
    weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]], device=device, requires_grad=True)
    ids = torch.tensor([[0, 2, 0], [1, 0, 1]], device=device)
    offsets = torch.tensor([[0, 1, 0], [2, 4, 2]], device=device)  # begins and ends
    found = ops.joint_embedding(weight, ids, offsets)
    assert found.tolist() == [[[1.0], [4.0], [1.0]], [[2.0], [2.0], [2.0]]]
    found.sum().backward()
    assert weight.grad.to_dense().tolist() == [[2.0], [3.0], [0.0], [1.0]]
    bad = torch.tensor([[0, 2, 2]], device=device)
    with pytest.raises(RuntimeError, match="id 2 of table 2 in batch row 0: expected 0 <= id < 2"):
        checked(device, weight, bad, offsets)
    with pytest.raises(RuntimeError, match=r"table_offsets\[4\] = 5: expected offsets that do not"):
        checked(device, weight, ids, offsets + torch.tensor([[0], [1]], device=device))


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


@pytest.mark.parametrize("id_dtype", ID_DTYPES)
@pytest.mark.parametrize(("bad", "shown"), [(-1, "-1"), (7, "7"), ("least", None), ("most", None)])
def test_a_bad_id_is_named(bad, shown, id_dtype):
    weight, ids, offsets = make_inputs(50, [10, 7, 100], 8, id_dtype=id_dtype)
    limits = torch.iinfo(id_dtype)
    bad = {"least": limits.min, "most": limits.max}.get(bad, bad)
    ids[45, 2] = -1  # only the first is reported
    ids[42, 1] = bad
    message = rf"^joint_embedding: id {bad} of table 1 in batch row 42: expected 0 <= id < 7$"
    with pytest.raises(RuntimeError, match=message):
        ops.joint_embedding(weight, ids, offsets)


def test_an_id_of_the_next_table_is_refused():
    weight, ids, offsets = make_inputs(50, [10, 7, 100], 8)
    ids[3, 0] = 10  # a row of the weight, but of table 1
    with pytest.raises(RuntimeError, match="id 10 of table 0 in batch row 3"):
        ops.joint_embedding(weight, ids, offsets)


def test_the_first_bad_id_is_named_whatever_the_threads(threads):
    weight, ids, offsets = make_inputs(20_000, [10, 7, 100], 8)
    ids[9_000:, 1] = 8
    for count in (1, 2):
        threads(count)
        with pytest.raises(RuntimeError, match="table 1 in batch row 9000:"):
            ops.joint_embedding(weight, ids, offsets)


def test_offsets_beyond_the_weight_are_refused(native):
    weight, ids, offsets = make_inputs(5, [4, 9], 8)
    for bad in ([0, 4, 14], [0, 5, 4], [-1, 4, 13]):
        with pytest.raises(RuntimeError, match=r"table_offsets\[\d\] = .*within the weight's 13"):
            ops.joint_embedding(weight, ids, torch.tensor(bad))


def test_wrong_shapes_and_dtypes_are_named(device):
    weight, ids, offsets = make_inputs(5, [4, 9], 8, device)
    with pytest.raises(RuntimeError, match=r"expected table_offsets \[3\].*got \[2\]"):
        ops.joint_embedding(weight, ids, offsets[:-1])
    with pytest.raises(RuntimeError, match=r"expected ids \[batch, tables\].*got \[10\]"):
        ops.joint_embedding(weight, ids.flatten(), offsets)
    with pytest.raises(RuntimeError, match=r"expected ids .*got \[5, 2\] .*[Ff]loat"):
        ops.joint_embedding(weight, ids.float(), offsets)
    with pytest.raises(RuntimeError, match=r"expected weight .*got \[13, 0\]"):
        ops.joint_embedding(weight[:, :0], ids, offsets)
    with pytest.raises(RuntimeError, match=r"expected weight .*got \[13, 8\] .*[Dd]ouble|float64"):
        ops.joint_embedding(weight.double(), ids, offsets)
    with pytest.raises(RuntimeError, match=r"expected dtype Float, BFloat16 or Half, got"):
        ops.joint_embedding(weight, ids, offsets, dtype=torch.int32)

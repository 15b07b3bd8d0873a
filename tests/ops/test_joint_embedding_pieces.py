"""Lookups in pieces: native kernels and reference match a row-by-row definition."""

import pytest
import torch

from dlrm import ops

# Weights of 19, 16 and 3 columns. Tables 0 and 1 have 10 and 40 rows; the pieces of tables 2 and 3
# hold rows 2 to 4 of 7 and the last 60 of 90.
DIMS = (19, 16, 3)
PIECES = [
    (0, 0, 0, 10, 10, 0),
    (0, 2, 2, 5, 7, 10),
    (1, 1, 0, 40, 40, 0),
    (2, 3, 30, 90, 90, 1),
    (2, 0, 0, 10, 10, 61),
]
TABLE_ROWS = torch.tensor([10, 40, 7, 90])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ID_DTYPES = [torch.int8, torch.int16, torch.int32, torch.int64]


def make_inputs(batch, dtype=torch.float32, ids=torch.int64):
    random = torch.Generator().manual_seed(batch)
    weights = [
        torch.randn(rows, dim, generator=random).to(dtype)
        for rows, dim in zip((13, 40, 71), DIMS, strict=True)
    ]
    drawn = (torch.rand(batch, 4, generator=random) * TABLE_ROWS).to(ids)
    return weights, drawn, torch.tensor(PIECES)


def defined(weights, ids):
    """Looks up vectors one by one."""
    samples = []
    for sample in ids.tolist():
        vectors = []
        for number, column, first, end, _, offset in PIECES:
            here = first <= sample[column] < end
            row = weights[number][offset + sample[column] - first] if here else None
            vectors.append(torch.zeros(DIMS[number]) if row is None else row.float())
        samples.append(torch.cat(vectors))
    return torch.stack(samples) if samples else torch.zeros(0, 60)


def with_gradients(function, weights, *others, **more):
    weights = [weight.clone().requires_grad_() for weight in weights]
    output = function(weights, *others, **more)
    random = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=random).to(output.dtype)
    gradients = torch.autograd.grad(output, weights, grad)
    return output.detach(), gradients


@pytest.mark.parametrize("ids", ID_DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 7, 1003])
def test_vectors_are_the_definitions(batch, ids, instruction_set):
    weights, drawn, pieces = make_inputs(batch, ids=ids)
    for function in (ops.joint_embedding_pieces, ops.joint_embedding_pieces_reference):
        assert torch.equal(function(weights, drawn, pieces), defined(weights, drawn))


@pytest.mark.parametrize("output_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_those_of_the_reference(dtype, output_dtype):
    inputs = make_inputs(33, dtype)
    found = ops.joint_embedding_pieces(*inputs, dtype=output_dtype)
    expected = ops.joint_embedding_pieces_reference(*inputs, dtype=output_dtype)
    assert found.dtype == output_dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("batch", [0, 7, 1003])
def test_gradients_are_the_references(batch, instruction_set, threads):
    threads(2)
    inputs = make_inputs(batch)
    _, found = with_gradients(ops.joint_embedding_pieces, *inputs)
    _, expected = with_gradients(ops.joint_embedding_pieces_reference, *inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to_dense(), other, atol=1e-4, rtol=1e-5)


def test_rows_of_other_pieces_have_no_gradient(native):
    weights, ids, pieces = make_inputs(500)
    _, (first, _, third) = with_gradients(ops.joint_embedding_pieces, weights, ids, pieces)
    here = (ids[:, 2] >= 2) & (ids[:, 2] < 5)
    assert first._nnz() == 500 + here.sum()
    assert third._nnz() == 500 + (ids[:, 3] >= 30).sum()
    # By sample, then piece: row optimizers add in this order.
    expected = [row for i, r in zip(ids[:, 0], ids[:, 2], strict=True)
                for row in ([i] if not 2 <= r < 5 else [i, 10 + r - 2])]  # fmt: skip
    assert first._indices()[0].tolist() == [int(row) for row in expected]


def test_the_operator_keeps_what_torch_expects_of_it(native):
    weights, ids, pieces = make_inputs(7)
    weights = [weight.requires_grad_() for weight in weights]
    # The gradients are sparse, and their number of rows depends on the ids.
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.dlrm.joint_embedding_pieces, (weights, ids, pieces), test_utils=checks
    )
    arguments = (torch.randn(7, 60), ids, pieces, list(DIMS))
    torch.library.opcheck(
        torch.ops.dlrm.joint_embedding_pieces_backward, arguments, test_utils=checks
    )


@pytest.mark.parametrize(("column", "value"), [(0, 10), (2, 7), (2, -1), (3, 2**40)])
def test_an_id_outside_its_table_is_named(column, value, native):
    weights, ids, pieces = make_inputs(300)
    ids[200, column] = value
    expected = f"id {value} of table {column} in batch row 200: expected 0 <= id < "
    with pytest.raises(RuntimeError, match=expected + str(int(TABLE_ROWS[column]))):
        ops.joint_embedding_pieces(weights, ids, pieces)


def test_a_piece_outside_its_weight_is_named(native):
    weights, ids, pieces = make_inputs(3)
    with pytest.raises(RuntimeError, match=r"rows \[0, 40\) at 0 ends outside its weight \[39, 16"):
        ops.joint_embedding_pieces([weights[0], weights[1][:39], weights[2]], ids, pieces)
    pieces[0, 1] = 4
    with pytest.raises(RuntimeError, match="piece 0: expected .* a column of the ids"):
        ops.joint_embedding_pieces(weights, ids, pieces)

"""A network in one call, and its gradients; op_cases.py compares them with autograd's."""

import pytest
import torch
from op_cases import NETWORKS, network_inputs
from ops_testing import assert_as_close_as_reference

from dlrm import ops
from dlrm.ops.network import NetworkParameters

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("native")


def arguments(shape=NETWORKS[1], dtype=torch.float32):
    """Returns the arguments of `ops.network`, and labels and logits to add."""
    numerical, embeddings, labels, added, *tensors = network_inputs(shape, dtype)
    bottom, top = len(shape[3]), len(shape[4])
    below, above = tensors[: 2 * bottom], tensors[2 * bottom : 2 * (bottom + top)]
    parts = below[:bottom], below[bottom:], above[:top], above[top:]
    return (numerical, embeddings, NetworkParameters(*parts, *tensors[-2:])), labels, added


def rows_of(shape, weight_dtype=torch.float32, dtype=torch.float32, id_dtype=torch.int64):
    """Returns rows of tables for a shape's embeddings, and the embeddings."""
    batch, _, tables, (*_, dim), _ = shape
    random = torch.Generator().manual_seed(1)
    sizes = [3 + table for table in range(tables)]
    weight = torch.randn(sum(sizes), dim, generator=random).to(weight_dtype)
    ids = [torch.randint(size, (batch,), generator=random) for size in sizes]
    rows = torch.stack(ids, 1).to(id_dtype)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    found = torch.nn.functional.embedding(rows.long() + offsets[:-1], weight)
    return ops.Rows(weight, rows, offsets, dtype), found.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", NETWORKS)
def test_logits_are_those_of_plain_torch(shape, dtype):
    (numerical, embeddings, parameters), _, _ = arguments(shape, dtype)
    found = ops.network(numerical, embeddings, parameters)
    assert (found.dtype, found.shape) == (torch.float32, (shape[0],))
    reference = ops.network_reference(numerical, embeddings, parameters)
    doubles = [[one.double() for one in some] for some in parameters[:4]]
    exact = ops.network_reference(
        numerical.double(),
        embeddings.double(),
        NetworkParameters(*doubles, *(one.double() for one in parameters[4:])),
    )
    if dtype == torch.float32:
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)
    else:
        assert_as_close_as_reference(found, reference, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype, instruction_set):
    """Ranks and ties do not depend on how rows are batched."""
    (numerical, embeddings, parameters), labels, _ = arguments((31, 20, 3, (40, 9), (7,)), dtype)
    logits = ops.network(numerical, embeddings, parameters)
    grads = ops.network_gradients(numerical, embeddings, parameters, labels).embeddings
    for sizes in ([1, 13, 17], [4, 24, 3], [2, 5, 24]):
        parts = [*zip(*(one.split(sizes) for one in (numerical, embeddings, labels)), strict=True)]
        found = [ops.network(one, other, parameters) for one, other, _ in parts]
        assert torch.equal(logits, torch.cat(found))
        of_parts = [ops.network_gradients(one, a, parameters, b) for one, a, b in parts]
        assert torch.equal(grads, torch.cat([part.embeddings for part in of_parts]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_reach_the_logits_of_their_rows_alone(dtype, instruction_set):
    (numerical, embeddings, parameters), labels, _ = arguments((9, 20, 3, (40, 9), (7,)), dtype)
    finite = ops.network(numerical, embeddings, parameters)
    numerical[3, 7], numerical[5, 0] = float("nan"), float("inf")
    logits = ops.network(numerical, embeddings, parameters)
    assert logits[3].isnan()
    assert not logits[5].isfinite()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(logits[others], finite[others])
    found = ops.network_gradients(numerical, embeddings, parameters, labels)
    assert found.loss.isnan()
    assert all(grad.isnan().any() for grad in found.parameters)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", NETWORKS[:4])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_rows_are_looked_up_in_the_same_call(shape, weight_dtype, dtype, id_dtype):
    (numerical, _, parameters), _, _ = arguments(shape, dtype)
    rows, embeddings = rows_of(shape, weight_dtype, dtype, id_dtype)
    found = ops.network(numerical, rows, parameters)
    assert torch.equal(found, ops.network(numerical, embeddings, parameters))


def test_a_bad_id_of_rows_is_named():
    (numerical, _, parameters), _, _ = arguments()
    rows, _ = rows_of(NETWORKS[1])
    rows.ids[2, 1] = 4
    with pytest.raises(RuntimeError, match="id 4 of table 1 in batch row 2"):
        ops.network(numerical, rows, parameters)


@pytest.mark.parametrize("name", ["ids", "table_offsets"])
def test_rows_of_another_device_are_named(name):
    (numerical, _, parameters), _, _ = arguments()
    rows, _ = rows_of(NETWORKS[1])
    rows = rows._replace(**{name: getattr(rows, name).to("meta")})
    with pytest.raises(RuntimeError, match=f"one device.*{name} on meta"):
        ops.network(numerical, rows, parameters)


def test_missing_memory_is_reported_with_its_size():
    batch = 1 << 42  # without fields, the inputs take no memory
    bottom = [torch.zeros(8, 0)], [torch.zeros(8)]
    parameters = NetworkParameters(*bottom, *bottom, torch.zeros(1, 8), torch.zeros(1))
    numerical, embeddings = torch.zeros(batch, 0), torch.zeros(batch, 0, 8)
    with pytest.raises(RuntimeError, match=f"no memory for {batch * 8} values"):
        ops.network(numerical, embeddings, parameters)


def test_strided_parameters_are_read_by_their_strides():
    (numerical, embeddings, parameters), _, _ = arguments()
    strided = [[one.T.contiguous().T for one in some] for some in parameters[:4]]
    apart = [torch.stack([one, one], -1)[..., 0] for one in strided[1]]
    others = NetworkParameters(strided[0], apart, *strided[2:], *parameters[4:])
    found = ops.network(numerical.T.contiguous().T, embeddings, others)
    assert torch.equal(found, ops.network(numerical, embeddings, parameters))


def test_known_answer():
    one = torch.ones(1, 1)
    numerical, embeddings = torch.tensor([[2.0]]), torch.tensor([[[3.0]]])
    width = ops.interaction_width(1, 1)
    top = [torch.ones(1, width)], [torch.tensor([-7.5])]  # 2 + 2 * 3 - 7.5
    parameters = NetworkParameters([one], [torch.zeros(1)], *top, one, torch.zeros(1))
    assert ops.network(numerical, embeddings, parameters).item() == 0.5
    found = ops.network_gradients(
        numerical, embeddings, parameters, torch.ones(1), added_logits=torch.tensor([-0.5])
    )
    assert found.loss.item() == pytest.approx(0.6931472)
    assert found.added_logits.tolist() == [-0.5]
    assert found.embeddings.tolist() == [[[-1.0]]]  # -0.5 times the dense 2
    assert found.parameters[0].tolist() == [[-4.0]]  # -0.5 * (1 + 3) * the field 2


@pytest.mark.parametrize("function", [ops.network, ops.network_gradients])
def test_wrong_shapes_and_dtypes_are_named(function):
    (numerical, embeddings, parameters), labels, added = arguments()
    rest = (labels,) if function is ops.network_gradients else ()

    def run(numerical=numerical, embeddings=embeddings, rest=rest, added=None, **changes):
        more = {} if added is None else {"added_logits": added}
        function(numerical, embeddings, parameters._replace(**changes), *rest, **more)

    first = parameters.top_weights[0]
    with pytest.raises(RuntimeError, match=r"mlp: layer 0: expected weight \[outputs, 4\]"):
        run(numerical[:, :4])
    with pytest.raises(RuntimeError, match=r"mlp: expected inputs \[batch, inputs\].*\[5\]"):
        run(numerical[0])
    with pytest.raises(RuntimeError, match=r"dot_interaction: .*dense \[3, 8\]"):
        run(numerical[:3])
    with pytest.raises(RuntimeError, match="dot_interaction: .*BFloat16"):
        run(embeddings=embeddings.bfloat16())
    with pytest.raises(RuntimeError, match="mlp: layer 0: expected weight"):
        run(top_weights=[first[:, 1:]])
    with pytest.raises(RuntimeError, match=r"expected a bias for every weight.*1 weights, 0 bias"):
        run(top_biases=[])
    with pytest.raises(RuntimeError, match="layer 0: expected .* Float .*Float and BFloat16"):
        run(top_biases=[parameters.top_biases[0].bfloat16()])
    with pytest.raises(RuntimeError, match=r"expected the logit's weight \[1, 7\]"):
        run(logit_weight=torch.ones(1, 6))
    if rest:
        with pytest.raises(RuntimeError, match=r"logistic_loss: .*\[4\] Float and \[3\] Float"):
            run(rest=(labels[:3],))
        with pytest.raises(RuntimeError, match=r"expected added logits \[4\] Float.*\[3\] Float"):
            run(added=added[:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    (numerical, embeddings, parameters), labels, added = arguments(dtype=dtype)
    tests = ("test_schema", "test_faketensor")
    given = numerical, embeddings, *parameters
    torch.library.opcheck(torch.ops.dlrm.network.default, given, test_utils=tests)
    rows, _ = rows_of(NETWORKS[1], dtype, dtype)
    with_rows = numerical, rows.weight, *parameters, rows.ids, rows.table_offsets, dtype
    torch.library.opcheck(torch.ops.dlrm.network.default, with_rows, test_utils=tests)
    more = *given, added, labels, 2.0
    torch.library.opcheck(torch.ops.dlrm.network_gradients.default, more, test_utils=tests)

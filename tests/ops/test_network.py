"""A network in one call, and its gradients: the parts one after the other are the oracle."""

import pytest
import torch
from ops_testing import assert_as_close_as_reference

from dlrm import ops

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # batch, fields, tables, layers of the bottom MLP (the last is dim), of the top MLP
    (1, 13, 26, (32, 16), (24, 8)),
    (4, 5, 3, (8,), (7,)),
    (5, 0, 2, (4,), (9, 3)),  # no fields: biases alone
    (300, 13, 26, (128, 64, 16), (256, 128)),
    (0, 4, 3, (8,), (5,)),
]


@pytest.fixture(autouse=True)
def native():
    if not ops.native_available():
        pytest.skip("the compiled operators are not loaded")


def layers(width, sizes, random):
    weights, biases = [], []
    for size in sizes:
        weights.append(torch.randn(size, width, generator=random) / max(width, 1) ** 0.5)
        biases.append(torch.randn(size, generator=random))
        width = size
    return weights, biases


def arguments(shape, dtype=torch.float32, seed=0):
    """Returns the arguments of `ops.network`, and labels and logits to add."""
    batch, fields, tables, bottom, top = shape
    random = torch.Generator().manual_seed(seed)
    numerical = torch.randn(batch, fields, generator=random)
    embeddings = torch.randn(batch, tables, bottom[-1], generator=random).to(dtype)
    width = ops.interaction_width(tables, bottom[-1])
    last = layers(top[-1], (1,), random)
    parameters = (
        layers(fields, bottom, random),
        layers(width, top, random),
        (last[0][0], last[1][0]),
    )
    labels = torch.randint(2, (batch,), generator=random).float()
    return (numerical, embeddings, *parameters), labels, torch.randn(batch, generator=random)


def parts(numerical, embeddings, bottom, top, logit):
    dense = ops.mlp(numerical.to(embeddings.dtype), *bottom)
    return ops.mlp_logits(ops.dot_interaction(dense, embeddings), *top, *logit)


def plain(numerical, embeddings, bottom, top, logit):
    """Does the same in plain torch, in the dtype of the embeddings."""
    dtype = embeddings.dtype
    dense = ops.mlp_reference(numerical.to(dtype), *bottom)
    hidden = ops.mlp_reference(ops.dot_interaction_reference(dense, embeddings), *top)
    weight, bias = (one.to(torch.promote_types(dtype, torch.float32)) for one in logit)
    return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).squeeze(1)


def flat(gradients):
    return [gradients.loss, gradients.added_logits, gradients.embeddings, *gradients.parameters]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("of_fields", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_have_the_bits_of_the_parts(shape, dtype, of_fields):
    (numerical, *others), _, _ = arguments(shape, dtype)
    numerical = numerical.to(of_fields)
    with torch.no_grad():
        found, expected = ops.network(numerical, *others), parts(numerical, *others)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


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


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_rows_are_looked_up_in_the_same_call(shape, weight_dtype, dtype, id_dtype):
    (numerical, _, *parameters), _, _ = arguments(shape, dtype)
    rows, embeddings = rows_of(shape, weight_dtype, dtype, id_dtype)
    with torch.no_grad():
        found = ops.network(numerical, rows, *parameters)
        assert torch.equal(found, ops.network(numerical, embeddings, *parameters))
    assert torch.equal(ops.network(numerical, rows, *parameters), found)  # by the parts


def test_a_bad_id_of_rows_is_named():
    (numerical, _, *parameters), _, _ = arguments(SHAPES[1])
    rows, _ = rows_of(SHAPES[1])
    rows.ids[2, 1] = 4
    with torch.no_grad(), pytest.raises(RuntimeError, match="id 4 of table 1 in batch row 2"):
        ops.network(numerical, rows, *parameters)


@pytest.mark.parametrize("name", ["ids", "table_offsets"])
def test_rows_of_another_device_are_named(name):
    (numerical, _, *parameters), _, _ = arguments(SHAPES[1])
    rows, _ = rows_of(SHAPES[1])
    rows = rows._replace(**{name: getattr(rows, name).to("meta")})
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"one device.*{name} on meta"):
        ops.network(numerical, rows, *parameters)


def test_missing_memory_is_reported_with_its_size():
    batch = 1 << 42  # without fields, the inputs take no memory
    inputs = torch.zeros(batch, 0)
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"no memory for {batch * 8} values"):
        ops.mlp(inputs, [torch.zeros(8, 0)], [torch.zeros(8)])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_have_the_bits_of_a_backward_pass(shape, dtype, adds, threads, restored_threads):
    given, labels, added = arguments(shape, dtype)
    added = added if adds else None
    expected = flat(ops.network_gradients_reference(*given, labels, 7.0, added))
    torch.set_num_threads(threads)
    found = flat(ops.network_gradients(*given, labels, 7.0, added))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_plain_torch(dtype):
    given, labels, added = arguments(SHAPES[3], dtype)
    numerical, embeddings, bottom, top, logit = given

    def by_autograd(dtype, of_parameters):
        leaves = [added.to(of_parameters), embeddings.to(dtype)]
        leaves += [one.to(of_parameters) for one in (*bottom[0], *bottom[1], *top[0], *top[1])]
        leaves += [one.to(of_parameters) for one in logit]
        leaves = [one.clone().requires_grad_() for one in leaves]
        ours = leaves[2:]
        logits = plain(
            numerical.to(dtype),
            leaves[1],
            (ours[:3], ours[3:6]),
            (ours[6:8], ours[8:10]),
            (ours[10], ours[11]),
        )
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits + leaves[0], labels.to(of_parameters), reduction="sum"
        )
        return [loss, *torch.autograd.grad(loss, leaves)]

    found = flat(ops.network_gradients(*given, labels, 1.0, added))
    exact = by_autograd(torch.float64, torch.float64)
    reference = by_autograd(dtype, torch.float32)
    for one, other, wanted in zip(found, reference, exact, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(one.double(), wanted, atol=1e-4, rtol=1e-4)
        else:
            assert_as_close_as_reference(one, other, wanted)


def test_known_answer():
    one = torch.ones(1, 1)
    numerical, embeddings = torch.tensor([[2.0]]), torch.tensor([[[3.0]]])
    bottom, logit = ([one], [torch.zeros(1)]), (one, torch.zeros(1))
    width = ops.interaction_width(1, 1)
    top = ([torch.ones(1, width)], [torch.tensor([-7.5])])  # 2 + 2 * 3 - 7.5
    with torch.no_grad():
        assert ops.network(numerical, embeddings, bottom, top, logit).item() == 0.5
    found = ops.network_gradients(
        numerical, embeddings, bottom, top, logit, torch.ones(1), added_logits=torch.tensor([-0.5])
    )
    assert found.loss.item() == pytest.approx(0.6931472)
    assert found.added_logits.tolist() == [-0.5]
    assert found.embeddings.tolist() == [[[-1.0]]]  # -0.5 times the dense 2
    assert found.parameters[0].tolist() == [[-4.0]]  # -0.5 * (1 + 3) * the field 2


@pytest.mark.parametrize("function", [ops.network, ops.network_gradients])
def test_wrong_shapes_and_dtypes_are_named(function):
    (numerical, embeddings, bottom, top, logit), labels, added = arguments(SHAPES[1])
    rest = (labels,) if function is ops.network_gradients else ()

    def run(numerical=numerical, embeddings=embeddings, top=top, rest=rest, **others):
        with torch.no_grad():
            function(numerical, embeddings, bottom, top, logit, *rest, **others)

    with pytest.raises(RuntimeError, match=r"network: expected numerical .*\[4, 5\] Int"):
        run(numerical.int())
    with pytest.raises(RuntimeError, match=r"mlp: layer 0: expected weight \[outputs, 4\]"):
        run(numerical[:, :4])
    with pytest.raises(RuntimeError, match=r"dot_interaction: .*dense \[3, 8\]"):
        run(numerical[:3])
    with pytest.raises(RuntimeError, match="mlp: layer 0: expected weight"):
        run(top=([top[0][0][:, 1:]], top[1]))
    if rest:
        with pytest.raises(RuntimeError, match=r"logistic_loss: .*\[4\] Float and \[3\] Float"):
            run(rest=(labels[:3],))
        with pytest.raises(RuntimeError, match=r"expected added logits \[4\] Float.*\[3\] Float"):
            run(added_logits=added[:3])


def test_a_gradient_through_the_logits_is_that_of_the_parts():
    given, _, _ = arguments(SHAPES[1])
    weight = given[2][0][0].requires_grad_()
    (found,) = torch.autograd.grad(ops.network(*given).sum(), weight)
    (expected,) = torch.autograd.grad(parts(*given).sum(), weight)
    assert torch.equal(found, expected)
    assert found.abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    (numerical, embeddings, bottom, top, logit), labels, added = arguments(SHAPES[1], dtype)
    given = numerical, embeddings, *bottom, *top, *logit
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.dlrm.network.default, given, test_utils=tests)
    rows, _ = rows_of(SHAPES[1], dtype, dtype)
    with_rows = numerical, rows.weight, *given[2:], rows.ids, rows.table_offsets, dtype
    torch.library.opcheck(torch.ops.dlrm.network.default, with_rows, test_utils=tests)
    more = (*given, added, labels, 2.0)
    torch.library.opcheck(torch.ops.dlrm.network_gradients.default, more, test_utils=tests)

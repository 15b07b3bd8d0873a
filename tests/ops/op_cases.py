"""One record for each operator: how it is called, on which inputs, and how exact it must be."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from dlrm import ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {"atol": 1e-4, "rtol": 1e-5}  # two orders of adding some hundred products of about 1
OPS = torch.ops.dlrm


class OpCase(NamedTuple):
    """An operator and its reference.

    Attributes:
        function, reference: take the tensors of `make`, and return one or several tensors.
        make: returns the tensors of a shape and a dtype; those that have gradients require them.
        shapes: sizes for `make`; the last one is large enough for several threads.
        close: tolerance of float32 results.
        roundings: tolerance of half-precision results, in roundings of the largest value, where
            twice the error of the reference is less.
        drawn: other shapes.
        calls: operators, arguments and options for `opcheck`.
    """

    name: str
    function: Callable
    reference: Callable
    make: Callable
    shapes: list
    calls: Callable[[], list]
    dtypes: tuple = FLOATS
    close: dict = CLOSE
    roundings: float = 0.5
    drawn: st.SearchStrategy | None = None


def seeded(*sizes):
    return torch.Generator().manual_seed(sum(sizes))


def results(function, tensors):
    """Returns outputs, and the gradients of the tensors that require one."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for leaf in wanted:
        leaf.grad_dtype = None  # otherwise autograd casts to the dtype of the leaf
    found = function(*leaves)
    outputs = [found] if isinstance(found, torch.Tensor) else [*found]
    if not wanted:
        return outputs
    random = torch.Generator().manual_seed(0)
    grads = [torch.randn(one.shape, generator=random).bfloat16().to(one) for one in outputs]
    found = torch.autograd.grad(outputs, wanted, grads)
    return [*(one.detach() for one in outputs), *(one.to_dense() for one in found)]


def doubles(tensors):
    """Returns the tensors with float64 in place of other floating types."""
    return [
        tensor.detach().double().requires_grad_(tensor.requires_grad)
        if tensor.is_floating_point()
        else tensor
        for tensor in tensors
    ]


def check(case, shape, dtype, device="cpu"):
    """Compares outputs and gradients with the reference's, in this dtype and in float64."""
    tensors = [
        tensor.detach().to(device).requires_grad_(tensor.requires_grad)
        for tensor in case.make(shape, dtype)
    ]
    actual = results(case.function, tensors)
    exact = [one.double() for one in results(case.reference, doubles(tensors))]
    plain = results(case.reference, tensors)
    eps = max(torch.finfo(one.dtype).eps for one in (actual[0], torch.empty(0, dtype=dtype)))
    for one, reference, right in zip(actual, plain, exact, strict=True):
        if eps == torch.finfo(torch.float32).eps or not right.numel():
            torch.testing.assert_close(one, right.to(one.dtype), **case.close)
            continue
        rounding = case.roundings * eps * right.abs().max()
        allowed = max(2 * (reference.double() - right).abs().max(), rounding)
        torch.testing.assert_close(one.double(), right, atol=float(allowed), rtol=0)


def dot_inputs(shape, dtype):
    batch, tables, dim = shape
    random = seeded(*shape)
    tensors = [torch.randn(size, generator=random) for size in ((batch, dim), shape)]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def dot_calls():
    args = dot_inputs((3, 4, 8), torch.float32)
    grad = torch.randn(3, ops.interaction_width(4, 8))
    backward = (grad, *(arg.detach() for arg in args))
    return [(OPS.dot_interaction, args, {}), (OPS.dot_interaction_backward, backward, {})]


LOOK_UPS = [  # batch, table sizes, dim
    (1, [1], 1),
    (37, [10, 3, 100, 7], 128),
    (5, [4, 9], 19),
    (3, [2, 6, 5], 16),
    (0, [4, 0, 9], 8),  # no samples, and a table without rows
    (6, [], 8),
]


def look_up_inputs(shape, dtype, id_dtype=torch.int64):
    batch, sizes, dim = shape
    random = seeded(batch, dim)
    weight = torch.randn(sum(sizes), dim, generator=random).to(dtype).requires_grad_()
    ids = torch.zeros(batch, len(sizes), dtype=id_dtype)
    for table, size in enumerate(sizes):
        ids[:, table] = torch.randint(max(size, 1), (batch,), generator=random)
    return weight, ids, torch.tensor([0, *sizes]).cumsum(0)


def look_up_calls():
    weight, *rest = look_up_inputs((5, [4, 9], 8), torch.float32)
    op = OPS.joint_embedding
    return [
        (op, (one, *rest), {"dtype": dtype})
        for one in (weight, weight.detach())
        for dtype in (None, torch.bfloat16)
    ]


def bag_inputs(shape, dtype, weighted=True, id_dtype=torch.int64):
    batch, sizes, most, dim = shape
    random = seeded(batch, dim)
    weight = torch.randn(sum(sizes), dim, generator=random).to(dtype).requires_grad_()
    lengths = torch.randint(most + 1, (batch, len(sizes)), generator=random)
    limits = torch.tensor(sizes).repeat(batch).repeat_interleave(lengths.flatten())
    ids = (torch.rand(len(limits), generator=random) * limits).to(id_dtype)
    factors = [torch.randn(len(ids), generator=random).requires_grad_()] if weighted else []
    return [weight, ids, torch.tensor([0, *sizes]).cumsum(0), lengths, *factors]


def bags(function, pooling="sum", dtype=None):
    def run(*tensors):
        *tensors, factors = (*tensors, None)[:5]
        return function(*tensors, sample_weights=factors, pooling=pooling, dtype=dtype)

    return run


def bag_calls():
    weight, ids, offsets, lengths, factors = bag_inputs((5, [4, 9], 3, 8), torch.float32)
    op, grad = OPS.joint_embedding_bag, torch.randn(5, 2, 8)
    own, rest = weight.detach(), (ids, lengths, offsets)
    calls = [
        (op, (own, *rest, factors.detach(), True, torch.bfloat16)),
        (op, (weight, *rest, None, False, None)),
        (op, (weight, *rest, factors, True, None)),
        (OPS.joint_embedding_bag_backward, (grad, *rest, None, True)),
        (OPS.joint_embedding_bag_backward, (grad, *rest, factors.detach(), True)),
        (OPS.joint_embedding_bag_sample_weights_backward, (grad, own, ids, lengths, True)),
    ]
    return [(*call, {}) for call in calls]


LISTS = ((1, 0), (3, 0))  # two lists with one candidate; field 2 is another bag


def attended_inputs(shape, dtype):
    batch, dim, hidden, longest = shape
    random = seeded(0)
    weight = torch.randn(30, dim, generator=random).to(dtype).requires_grad_()
    lengths = torch.randint(0, longest + 1, (batch, 4), generator=random)
    lengths[:, 0] = 1
    ids = torch.randint(0, 10, (int(lengths.sum()),), generator=random)
    offsets = torch.tensor([[0, 0, 20, 0], [20, 20, 30, 20]])  # lists and candidates share rows
    shapes = [(2, hidden, dim)] * 3 + [(2, hidden)] * 2 + [(2,)]
    units = [dim**-0.5 * torch.randn(size, generator=random) for size in shapes]
    factors = torch.rand(len(ids), generator=random)
    return [weight, ids, offsets, lengths, *(unit.requires_grad_() for unit in units), factors]


def attended(function, weighted, dtype=None):
    def run(weight, ids, offsets, lengths, *rest):
        more = {"dtype": dtype, "sample_weights": rest[6] if weighted else None}
        units = ops.ActivationUnits(*rest[:6])
        return function(weight, ids, offsets, lengths, LISTS, units, **more)

    return run


def attended_calls():
    made = [tensor.detach() for tensor in attended_inputs((70, 19, 7, 5), torch.float32)]
    weight, ids, offsets, lengths, *units, _ = made
    pairs = [field for pair in LISTS for field in pair]
    begins = offsets[0].repeat(len(lengths)).repeat_interleave(lengths.flatten())
    back = (torch.rand(len(ids)), torch.rand(len(ids), 19), weight, ids + begins, lengths, pairs)
    return [
        (OPS.attention_weights.default, (weight, ids, lengths, offsets, pairs, *units), {}),
        (OPS.attention_weights_backward.default, (*back, *units), {}),
    ]


def linear_inputs(shape, dtype):
    rows, inputs, outputs = shape
    random = seeded(inputs, outputs)
    sizes = (*rows, inputs), (outputs, inputs), (outputs,)
    tensors = [torch.randn(size, generator=random) for size in sizes]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def linear_relu_inputs(shape, dtype):
    """Half-precision values are positive, so no ReLU is active for one and not for the other."""
    inputs, *parameters = (tensor.detach() for tensor in linear_inputs(shape, torch.float32))
    if dtype != torch.float32:
        inputs, *parameters = (t.abs().to(dtype).float() for t in (inputs, *parameters))
    return [tensor.requires_grad_() for tensor in (inputs.to(dtype), *parameters)]


NETWORKS = [  # batch, fields, tables, layers of the bottom MLP (the last is dim), of the top MLP
    (1, 13, 26, (32, 16), (24, 8)),
    (4, 5, 3, (8,), (7,)),
    (5, 0, 2, (4,), (9, 3)),  # no fields: biases alone
    (0, 4, 3, (8,), (5,)),
    # Batches around whole tiles and runs, and more rows than one sum of a gradient has.
    *((2, 13, 2, (128, 64, 16), (1, 63)), (6, 65, 1, (1,), (63,)), (23, 16, 3, (33, 17), (80,))),
    *((25, 13, 2, (64, 16), (33, 17)), (97, 65, 1, (3,), (63, 65)), (1025, 16, 4, (33,), (17,))),
    (300, 13, 26, (128, 64, 16), (256, 128)),
    (1031, 70, 5, (65, 40), (3, 4)),
]


def network_inputs(shape, dtype):
    """Returns numbers, embeddings, labels, added logits, and `NetworkParameters.tensors`.

    Half-precision values are positive, so no ReLU is active for one and not for the other.
    """
    batch, fields, tables, bottom, top = shape
    random = seeded(batch, fields, tables)

    def drawn(*size):
        values = torch.randn(size, generator=random)
        return values if dtype == torch.float32 else values.abs()

    def layers(width, sizes):
        pairs = [*itertools.pairwise((width, *sizes))]
        weights = [
            drawn(b, a) / max(a, 1) ** (0.5 if dtype == torch.float32 else 1) for a, b in pairs
        ]
        return [*weights, *(drawn(b) for _, b in pairs)]

    width = ops.interaction_width(tables, bottom[-1])
    numbers = drawn(batch, fields), drawn(batch, tables, bottom[-1])
    labels = torch.randint(2, (batch,), generator=random).float()
    parameters = *layers(fields, bottom), *layers(width, top), *layers(top[-1], (1,))
    rounded = [one.to(dtype).float() for one in parameters]
    return [*(one.to(dtype) for one in numbers), labels, drawn(batch), *rounded]


def network(gradients):
    def run(numerical, embeddings, labels, added, *tensors):
        lists = [[*some] for _, some in itertools.groupby(tensors, lambda one: one.dim())]
        *mlps, (weight,), (bias,) = lists
        parameters = ops.NetworkParameters(*mlps, weight, bias)
        found = gradients(numerical, embeddings, parameters, labels, 7.0, added)
        return found.loss, found.added_logits, found.embeddings, *found.parameters

    return run


LINEAR_RELU = [((1,), 1, 1), ((5,), 7, 19), ((0,), 4, 8), ((3,), 0, 5), ((300,), 13, 512)]


def piecewise_inputs(shape, dtype):
    batch, fields, bins, dim = shape
    random = seeded(batch, dim)
    edges = torch.rand(fields, bins + 1, generator=random).sort(1).values
    edges[::3, bins // 2 :] = edges[::3, bins // 2, None]  # a field with fewer bins
    numerical = torch.rand(batch, fields, generator=random) * 1.4 - 0.2  # also beyond the edges
    numerical[::4] = edges[:, bins // 2]  # on an edge
    weights = (
        torch.randn(fields, bins, dim, generator=random),
        torch.randn(fields, dim, generator=random),
    )
    return [numerical, edges, *(weight.requires_grad_() for weight in weights)]


def piecewise(numerical, edges, weight, bias):
    """Computes the encoding bin by bin and its product with the layer."""
    x, low, high = numerical.unsqueeze(-1), edges[:, :-1], edges[:, 1:]
    width = high - low
    encoding = torch.where(width > 0, ((x - low) / width.clamp(min=1e-30)).clamp(0, 1), 0)
    return torch.einsum("sfb,fbd->sfd", encoding, weight) + bias


def piecewise_calls():
    args = piecewise_inputs((7, 3, 5, 19), torch.float32)
    backward = torch.randn(7, 3, 19), args[0], args[1]
    return [(OPS.piecewise_linear, args, {}), (OPS.piecewise_linear_backward, backward, {})]


def loss_inputs(shape, dtype):
    (batch,) = shape
    random = seeded(batch)
    logits = 6 * torch.randn(batch, generator=random)
    return logits.requires_grad_(), torch.rand(batch, generator=random)  # also shares of clicks


class Update:
    """Updates of rows by a rule, and their reference, called the same way with any state."""

    function, reference = staticmethod(ops.row_update_), staticmethod(ops.row_update_reference)

    def __init__(self, name, **constants):
        self.name, self.rule, self.constants = name, ops.ROW_RULES[name], constants

    def tensors(self, weight):
        """Returns a copy of the weight and fresh state."""
        shapes = (state.shape(*weight.shape) for state in self.rule.states)
        return [weight.clone(), *(torch.full(shape, 0.1).to(weight) for shape in shapes)]

    def run(self, function, tensors, rows, grad, step=3, **more):
        lr = torch.tensor(0.1, device=grad.device)
        if self.rule.counts_steps:
            more["step"] = torch.tensor(step, device=grad.device)
        weight, *states = tensors
        function(self.rule, weight, states, rows, grad, lr, **self.constants, **more)
        return tensors

    def on_rows(self, function):
        """Returns a function of weight, rows and gradients that leaves the weight as it is."""
        return lambda weight, *rest: self.run(function, self.tensors(weight.contiguous()), *rest)

    def calls(self):
        found = []
        constants = [*(self.rule.constants | self.constants).values()]
        for sizes, split in ((None, False), ([3, 47], False), (None, True), ([3, 47], True)):
            weight, rows, grad = table_inputs((3, 47), 20, 8)
            (weight, *states), low = self.tensors(weight), None
            if split:
                weight, low = ops.split_float32(weight)
            args = (self.rule.number, weight, states, rows, grad, torch.tensor(0.1))
            scaled = (torch.tensor(2.0), torch.tensor(0.0))
            args = (*args, torch.tensor(3), constants, 0.0, low, sizes, *scaled)
            found.append((OPS.row_update_, args, {}))
        return found


def row_inputs(shape, dtype):
    total_rows, count, dim = shape
    random = seeded(total_rows, count)
    weight = torch.randn(total_rows, dim, generator=random)
    rows = torch.randint(total_rows, (count,), generator=random)
    rows[: count // 4] %= 5  # a few rows occur often
    return weight, rows, torch.randn(count, dim, generator=random).to(dtype)


def table_inputs(sizes, batch, dim, device="cpu", dtype=torch.float32):
    """Makes integer gradients, whose sums are exact in any order; some rows do not occur."""
    random = seeded(batch, dim)
    weight = torch.randn(sum(sizes), dim, generator=random)
    begins = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    used = torch.tensor(sizes, dtype=torch.int64).sub(1).clamp(min=1)
    ids = (torch.rand(batch, len(sizes), generator=random) * used).long()
    grad = torch.randint(-4, 5, (batch * len(sizes), dim), generator=random)
    return weight.to(device), (ids + begins).flatten().to(device), grad.to(device, dtype)


UPDATES = [
    Update(name, **({"eps": 1e-6} if "eps" in rule.constants else {}))
    for name, rule in ops.ROW_RULES.items()
]
DIMS = st.integers(1, 90)
TABLES = st.lists(st.integers(1, 120), max_size=8)
BAG_SHAPES = [  # batch, table sizes, most ids of a bag, dim
    (1, [1], 1, 1),
    (37, [10, 3, 100, 7], 5, 128),
    (5, [4, 9], 3, 19),  # nothing divides anything
    (3, [2, 6, 5], 40, 16),  # long bags
    (4, [2, 6], 4, 300),
    (0, [4, 9], 3, 8),
    (6, [], 3, 8),
    (6, [5, 0, 2], 0, 8),  # all bags empty, and a table without rows
    (20_001, [1000, 700, 1000, 300], 3, 17),
]
CASES = [
    OpCase(
        "dot_interaction",
        ops.dot_interaction,
        ops.dot_interaction_reference,
        dot_inputs,
        [  # batch, tables, dim
            (1, 1, 1),
            (33, 26, 128),  # the Criteo model, and a batch that is no multiple of a task
            (2, 5, 19),  # nothing divides anything
            (7, 12, 16),
            (3, 33, 16),  # narrow vectors, three registers of columns
            (2, 16, 31),  # narrow in bfloat16 alone, with half a unit at the end
            (3, 0, 5),  # no tables: nothing to multiply
            (0, 26, 128),
            (2, 40, 300),
            (301, 26, 16),
        ],
        dot_calls,
        drawn=st.tuples(st.integers(0, 70), st.integers(0, 35), DIMS),
    ),
    OpCase(
        "joint_embedding",
        ops.joint_embedding,
        ops.joint_embedding_reference,
        look_up_inputs,
        [*LOOK_UPS, (9000, [50, 300, 7], 16)],
        look_up_calls,
        close={"atol": 1e-4, "rtol": 1e-5},
        roundings=8,  # gradients of repeated rows are summed in their dtype
        drawn=st.tuples(st.integers(0, 50), TABLES, DIMS),
    ),
    *(
        OpCase(
            f"joint_embedding_bag: {pooling} in {kind}",
            bags(ops.joint_embedding, pooling, kind),
            bags(ops.joint_embedding_reference, pooling, kind),
            lambda shape, dtype, weighted=weighted: bag_inputs(shape, dtype, weighted),
            BAG_SHAPES,
            bag_calls,
            roundings=8,
            drawn=st.tuples(st.integers(0, 40), TABLES, st.integers(0, 9), DIMS),
        )
        for pooling, weighted, kind in (
            ("sum", True, None),
            ("sum", False, torch.float32),
            ("mean", True, torch.bfloat16),
        )
    ),
    *(
        OpCase(
            f"attended_bag in {kind}",
            attended(ops.attended_bag, weighted, kind),
            attended(ops.attended_bag_reference, weighted, kind),
            attended_inputs,
            [  # batch, dim, hidden, longest list
                (1, 1, 1, 3),
                (37, 16, 36, 50),  # the benchmark's unit, and a batch that is no multiple of a task
                (5, 128, 40, 9),
                (0, 16, 36, 5),
                (4, 8, 36, 0),  # no list has an item
                (70, 19, 7, 5),  # nothing divides anything; more samples than tasks
            ],
            attended_calls,
            close={"atol": 1e-4, "rtol": 1e-4},
            roundings=8,
        )
        for weighted, kind in ((True, None), (False, torch.float32))
    ),
    OpCase(
        "network",
        network(ops.network_gradients),
        network(ops.network_gradients_reference),
        network_inputs,
        NETWORKS,
        lambda: [],  # see test_network.py
        FLOATS[:2],
        close={"atol": 1e-4, "rtol": 1e-4},
        roundings=4,
    ),
    OpCase(
        "linear_relu",
        ops.linear_relu,
        ops.linear_relu_reference,
        linear_relu_inputs,
        LINEAR_RELU,
        lambda: [],
        close={"atol": 1e-4, "rtol": 1e-4},
    ),
    OpCase(
        "native_linear_relu",
        functools.partial(ops.linear_relu, native=True),
        ops.linear_relu_reference,
        linear_relu_inputs,
        LINEAR_RELU,
        lambda: [],  # graphs record the reference
        close={"atol": 1e-4, "rtol": 1e-4},
    ),
    OpCase(
        "linear",
        ops.linear,
        torch.nn.functional.linear,
        linear_inputs,
        [  # leading sizes, inputs, outputs
            ((1,), 1, 1),
            ((3, 5, 2), 7, 19),  # nothing divides anything
            ((0, 4), 6, 5),
            ((3,), 0, 5),  # no inputs: the bias alone
            ((300,), 64, 3),
            ((8, 128), 96, 200),
        ],
        list,
        close={"atol": 1e-4, "rtol": 1e-4},
    ),
    OpCase(
        "piecewise_linear",
        ops.piecewise_linear,
        piecewise,
        piecewise_inputs,
        [  # batch, fields, bins, dim
            (1, 1, 1, 1),
            (33, 13, 256, 16),
            (7, 3, 5, 19),  # nothing divides anything
            (0, 2, 3, 8),
            (5, 0, 3, 8),
            (500, 13, 64, 16),
        ],
        piecewise_calls,
        dtypes=FLOATS[:1],
        close={"atol": 2e-4, "rtol": 1e-5},
    ),
    OpCase(
        "logistic_loss",
        lambda logits, labels: ops.logistic_loss(logits, labels, 7),
        lambda logits, labels: ops.logistic_loss_reference(logits, labels, 7),
        loss_inputs,
        [(0,), (1,), (5,), (1024,), (20_001,)],
        lambda: [(OPS.logistic_loss, (torch.randn(5), torch.ones(5), 5.0), {})],
        dtypes=FLOATS[:1],
        close={"atol": 1e-7, "rtol": 1e-6},
    ),
    *(
        OpCase(
            f"row_update: {update.name}",
            update.on_rows(update.function),
            update.on_rows(update.reference),
            row_inputs,
            [  # rows of the weight, gradients, dim
                (1, 10, 3),
                (50, 301, 19),
                (2000, 5001, 64),
                (20_000, 10_000, 16),
                (7, 0, 4),
                (300, 200, 1),
                (300, 200, 128),
                (5000, 20_000, 24),
            ],
            update.calls,
            close={"atol": 1e-5, "rtol": 1e-4},
            drawn=st.tuples(st.integers(1, 3000), st.integers(0, 300), DIMS),
        )
        for update in UPDATES
    ),
]

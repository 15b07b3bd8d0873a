"""Missed steps of rows: the native kernels match the references and step-by-step decay."""

import pytest
import torch

from dlrm import ops

L2 = 0.03
SHAPES = [  # rows, rows asked for, dim
    (1, 5, 3),
    (40, 30, 16),
    (301, 200, 19),  # nothing divides anything
    (3000, 5000, 64),
    (0, 0, 4),
    (9, 0, 130),
]


class Decay:
    """Decays by a rule and their reference, called the same way with any state."""

    function, reference = staticmethod(ops.row_decay_), staticmethod(ops.row_decay_reference)

    def __init__(self, name):
        self.name, self.rule = name, ops.ROW_RULES[name]

    def tensors(self, rows, dim):
        """Returns a weight and its state."""
        random = torch.Generator().manual_seed(rows + dim)
        shapes = (state.shape(rows, dim) for state in self.rule.states)
        states = [torch.rand(shape, generator=random) * 0.1 for shape in shapes]
        tensors = [torch.randn(rows, dim, generator=random), *states]
        for tensor in tensors:  # rows of zeros, like initial wide weights, and of tiny values
            tensor[::7] = 0
            tensor[1::7] *= 1e-30
        return tensors

    def steps(self, count):
        """Returns the `steps` argument for learning rates that change and start at 0."""
        rates = torch.linspace(0, 0.5, count, dtype=torch.float64)
        if self.name == "sgd":
            return torch.log1p(-rates * L2).cumsum(0)[:, None]
        if self.name == "adam":
            step = torch.arange(1, count + 1)
            root = (1 - 0.999**step).sqrt()
            return torch.stack([rates * root / (1 - 0.9**step), 1e-8 * root], dim=1).float()
        return rates[:, None].float()

    def run(self, function, tensors, done, steps, rows=None, **more):
        tensors, done = [tensor.clone() for tensor in tensors], done.clone()
        weight, *states = tensors
        function(self.rule, weight, states, done, steps, rows, l2=L2, **more)
        return [*tensors, done]


DECAYS = [Decay(name) for name in ops.ROW_RULES]
BY_ELEMENT = [DECAYS[1], DECAYS[3]]


@pytest.fixture(params=DECAYS, ids=lambda decay: decay.name)
def decay(request):
    return request.param


def late(rows, steps):
    """Returns the number of steps done by each row: some none, some all."""
    random = torch.Generator().manual_seed(steps)
    return torch.randint(-3, steps + 1, (rows,), generator=random, dtype=torch.int32).clamp(min=0)


def asked(rows, count):
    """Returns the rows of a batch; some occur often."""
    random = torch.Generator().manual_seed(count)
    found = torch.randint(max(rows, 1), (count if rows else 0,), generator=random)
    found[: count // 4] %= 5
    return found.clamp(max=max(rows - 1, 0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("of_all", [True, False])
def test_matches_the_reference_in_float64(decay, shape, of_all, instruction_set):
    rows, count, dim = shape
    tensors, steps, done = decay.tensors(rows, dim), decay.steps(9), late(rows, 9)
    chosen = None if of_all else asked(rows, count)
    *actual, counted = decay.run(decay.function, tensors, done, steps, chosen)
    wide = [tensor.double() for tensor in tensors]
    *expected, same = decay.run(decay.reference, wide, done, steps, chosen)
    torch.testing.assert_close(actual, [t.float() for t in expected], rtol=2e-5, atol=1e-6)
    assert torch.equal(counted, same)
    left = torch.ones(rows, dtype=torch.bool)
    left[slice(None) if chosen is None else chosen] = False
    for tensor, before in zip(actual, tensors, strict=True):
        assert torch.equal(tensor[left], before[left])


@pytest.mark.parametrize("dim", [1, 16, 19, 64, 130])
@pytest.mark.parametrize("decay", BY_ELEMENT, ids=lambda decay: decay.name)
def test_parts_of_the_steps_give_the_same_bits(decay, dim, instruction_set):
    tensors, steps, done = decay.tensors(50, dim), decay.steps(12), late(50, 12)
    expected = decay.run(decay.function, tensors, done, steps)
    for last in (1, 5, 6, 12):
        late_rows = asked(50, 20) if last == 5 else None
        some = done <= last  # other rows have had more already
        run = decay.run(decay.function, tensors, done, steps[:last].contiguous(), late_rows)
        for tensor, after in zip([*tensors, done], run, strict=True):
            tensor[some] = after[some]
    assert all(map(torch.equal, [*tensors, done], expected))


def test_a_split_weight_gets_the_bits_of_a_float32_one(decay, instruction_set):
    tensors, steps, done = decay.tensors(50, 19), decay.steps(7), late(50, 7)
    for chosen in (None, asked(50, 30)):
        expected = decay.run(decay.function, tensors, done, steps, chosen)
        high, low = ops.split_float32(tensors[0])
        states = [tensor.clone() for tensor in tensors[1:]]
        ops.row_decay_(decay.rule, high, states, done.clone(), steps, chosen, l2=L2, low=low)
        assert torch.equal(ops.join_float32(high, low), expected[0])
        assert all(map(torch.equal, states, expected[1:]))


def test_known_answer():
    weight, done = torch.tensor([[8.0], [8.0], [8.0]]), torch.tensor([0, 1, 2], dtype=torch.int32)
    steps = torch.tensor([[0.5], [0.25]]).double().log()  # both steps halve the weight
    chosen = torch.tensor([1, 0, 1, 7, -1])  # 7 and -1: no rows
    ops.row_decay_(DECAYS[0].rule, weight, [], done, steps, chosen)
    assert weight.tolist() == [[2.0], [4.0], [8.0]]
    assert done.tolist() == [2, 2, 2]


def test_decayed_values_end_at_zero_and_others_stay_as_small_as_they_are():
    weight, done = torch.tensor([[1e-38, 1.0]]), torch.zeros(1, dtype=torch.int32)
    state, steps = torch.full((1, 2), 0.25), torch.full((3, 1), 0.1)
    ops.row_decay_(
        DECAYS[1].rule, weight, [state], done, steps, l2=1.0
    )  # each step leaves 0.8 or less
    torch.testing.assert_close(weight[0, 0].item(), 0.0, atol=1e-38, rtol=0)
    assert torch.tensor([2e-40]).mul(0.5).item() == pytest.approx(1e-40, rel=1e-3)


def test_what_does_not_fit_is_named():
    if not ops.native_available():
        pytest.skip("the reference leaves it to torch")
    weight, done, steps = torch.ones(4, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(3, 1)

    def refused(message, weight, state, *arguments):
        with pytest.raises(RuntimeError, match=message):
            ops.row_decay_(DECAYS[1].rule, weight, [state], *arguments, l2=0.1)

    refused(
        r"Int done \[4\] on the weight's device, got \[3\] Int", weight, weight, done[:3], steps
    )
    refused(r"Int done \[4\] .* got \[4\] Long", weight, weight, done.long(), steps)
    refused(
        r"steps \[steps, 1\] of Float.* got \[3, 1\] Double", weight, weight, done, steps.double()
    )
    refused(r"Float state_sum \[4, 2\] .* got \[4, 1\]", weight, weight[:, :1], done, steps)
    refused(r"rows \[count\] Long .* got \[4\] Int", weight, weight, done, steps, done)


def test_threads_do_not_change_a_bit(decay, threads):
    tensors, steps, done = decay.tensors(5000, 24), decay.steps(6), late(5000, 6)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results += [decay.run(decay.function, tensors, done, steps, asked(5000, 9000))]
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_opcheck(decay):
    if not ops.native_available():
        pytest.skip("no native ops")
    weight, *states = decay.tensors(6, 3)
    constants = [*decay.rule.constants.values()]
    args = (weight, states, late(6, 4), decay.steps(4), asked(6, 5), constants, L2, None)
    torch.library.opcheck(torch.ops.dlrm.row_decay_, (decay.rule.number, *args))

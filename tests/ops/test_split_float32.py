import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dlrm import ops

KNOWN = {  # bits -> (high, low), in hexadecimal digits
    0x00000000: (0x0000, 0),
    0x80000000: (0x8000, 0),
    0x3F800000: (0x3F80, 0),
    0x3F807FFF: (0x3F80, 0x7FFF),  # just below halfway
    0x3F808000: (0x3F81, -0x8000),  # halfway: away from 0, to an odd neighbor
    0x3F818000: (0x3F82, -0x8000),  # or an even one
    0xBF808000: (0xBF81, -0x8000),
    0xBF80FFFF: (0xBF81, -1),
    0x3FFF8000: (0x4000, -0x8000),  # the carry reaches the exponent
    0x00008000: (0x0001, -0x8000),  # also for the smallest denormals
    0x00007FFF: (0x0000, 0x7FFF),
    0x7F7F7FFF: (0x7F7F, 0x7FFF),
    0x7F7FFFFF: (0x7F80, -1),  # the greatest float32 rounds past the last bfloat16
    0xFF7FFFFF: (0xFF80, -1),
    0x7F800000: (0x7F80, 0),
    0xFF800000: (0xFF80, 0),
}


def from_bits(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def known():
    """Returns the values, the bits of their high halves as int16, and their low halves."""
    high, low = zip(*KNOWN.values(), strict=True)
    return from_bits(list(KNOWN)), torch.tensor(high).to(torch.int16), torch.tensor(low)


def update(weight, grad, lr, low):
    rows, rate = torch.tensor([0]), torch.tensor(lr)
    ops.row_update_(ops.ROW_RULES["sgd"], weight, [], rows, grad, rate, low=low)


def test_known_answers(device):
    values, high, low = (tensor.to(device) for tensor in known())
    actual = ops.split_float32(values)
    assert torch.equal(actual[0].view(torch.int16), high)
    assert torch.equal(actual[1], low.to(torch.int16))
    joined = ops.join_float32(*actual)
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))


def test_the_kernels_split_and_join_alike(instruction_set):
    values, high, low = known()
    for size in (1, 3, 16, 37, 128):  # whole vectors and remainders
        rows = values.repeat(8)[:size].unsqueeze(0)
        weight, rest = ops.split_float32(rows)
        update(weight, torch.ones(1, size), 0.0, rest)
        assert torch.equal(weight.view(torch.int16)[0], high.repeat(8)[:size])
        assert torch.equal(rest[0], low.repeat(8)[:size].to(torch.int16))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000])
def test_nan_stays_nan_in_both_parts(bits, instruction_set):
    nan = from_bits([bits]).repeat(37).unsqueeze(0)
    high, low = ops.split_float32(nan)
    assert high.isnan().all()
    assert ops.join_float32(high, low).isnan().all()
    high, low = ops.split_float32(torch.ones(1, 37))
    update(high, nan, 1.0, low)
    assert high.isnan().all()
    assert ops.join_float32(high, low).isnan().all()


@settings(max_examples=300)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_any_float_is_joined_exactly_and_rounded_to_nearest(values):
    values = torch.tensor(values)
    high, low = ops.split_float32(values)
    joined = ops.join_float32(high, low)
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
    to_even = values.bfloat16()  # also rounds to nearest; only halfway cases may differ
    error = (high.double() - values.double()).abs()
    expected = (to_even.double() - values.double()).abs()
    same = (error == expected) | (high == to_even)  # infinities have no comparable error
    assert same.all(), (values, high)


def test_every_low_half_of_one_value_is_joined():
    bits = torch.arange(1 << 16) + 0x40490000
    values = bits.to(torch.int32).view(torch.float32)
    high, low = ops.split_float32(values)
    assert torch.equal(ops.join_float32(high, low), values)
    assert len(high.unique()) == 2
    assert math.isclose(low.double().mean(), -0.5)  # no bias


def test_views_and_empty_tensors_are_split():
    values = torch.randn(6, 4).T
    high, low = ops.split_float32(values)
    assert torch.equal(ops.join_float32(high, low), values)
    assert [half.shape for half in ops.split_float32(torch.empty(0, 4))] == [(0, 4), (0, 4)]


def test_other_dtypes_and_shapes_are_refused():
    with pytest.raises(ValueError, match=r"expected float32 values, got torch.float64"):
        ops.split_float32(torch.ones(2, dtype=torch.float64))
    high, low = ops.split_float32(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"int16 low of one shape, got \[2, 3\] .*\[3\]"):
        ops.join_float32(high, low[0])
    with pytest.raises(ValueError, match=r"expected bfloat16 high"):
        ops.join_float32(high.float(), low)

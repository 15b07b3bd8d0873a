"""Sums, keys, bins and hashes are exact, as in plain Python, in any order."""

import math
from dataclasses import astuple
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from table_oracle import bins_of, hash_text, scale, splitmix64

from dlrm.data.schema.numbers import Sums, bin_edges, ordered, unordered
from dlrm.data.sources import columns as sources
from dlrm.data.sources.columns import TextColumn, hash_texts, stripped
from dlrm.preproc.splits import smallest_hashes

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SQUARED = st.floats(-1e150, 1e150) | st.sampled_from([0.0, -0.0, 1.0, 1e-60, -3e77, 0.1, 1e149])


@given(st.lists(SQUARED.filter(lambda v: v == 0 or abs(v) > 1e-100), max_size=30), st.data())
def test_sums_are_those_of_fractions_in_any_order(values, data):
    shuffled = data.draw(st.permutations(values))
    cut = data.draw(st.integers(0, len(values)))
    array = np.array(shuffled, np.float64)
    total = Sums.from_values(array[cut:]) + Sums(*astuple(Sums.from_values(array[:cut])))
    assert total == Sums.from_values(np.array(values, np.float64))
    unit = Fraction(2) ** -1130
    assert total.count == len(values)
    assert total.values * unit == sum(map(Fraction, values))
    assert total.squares * unit == sum(Fraction(value) ** 2 for value in values)
    mean, deviation = scale(values)
    assert total.scale() == (mean, pytest.approx(deviation, rel=1e-15))


def test_sums_of_tiny_numbers_do_not_depend_on_their_part():
    parts = [Sums.from_values(np.array(part)) for part in ([2e-230, 0.0], [1.0, 3.0])]
    assert (parts[0] + parts[1]).scale() == Sums.from_values(np.array([2e-230, 0, 1, 3])).scale()


@given(st.lists(FINITE, min_size=1, max_size=9))
@example([0.0, 2e-230])
def test_sums_of_any_numbers_have_a_scale_or_say_why_not(values):
    total = Sums.from_values(np.array(values))
    if max(map(abs, values)) > 1e150 and len(set(values)) > 1 and total.scale is not None:
        spread = Fraction(max(values)) - Fraction(min(values))
        if spread > Fraction(max(map(abs, values))) / 2**40:
            with pytest.raises(OverflowError, match="beyond float64"):
                total.scale()
        return
    try:
        mean, deviation = total.scale()
    except OverflowError:
        assert max(map(abs, values)) < 1e-150
        return
    assert min(values) <= mean <= max(values)
    assert deviation > 0
    assert math.isfinite(deviation)


def test_sums_of_many_numbers_carry():
    values = np.full(1 << 12, 1e16)
    values[::2] = 1.0
    total = Sums.from_values(values)
    assert total.values * Fraction(2) ** -1130 == (10**16 + 1) * (1 << 11)


@given(st.lists(FINITE, max_size=20))
def test_keys_have_the_order_of_numbers(values):
    array = np.array(values, np.float64)
    keys = ordered(array)
    assert unordered(keys).tolist() == values
    for a, b in zip(values, values[1:], strict=False):
        first, second = int(ordered(np.array([a]))[0]), int(ordered(np.array([b]))[0])
        assert (first < second, first == second) == (a < b, a == b)


@given(
    st.lists(st.sampled_from([0.0, 1.0, -2.5, 1e300]) | FINITE, max_size=40), st.integers(2, 256)
)
def test_bins_are_at_quantiles(values, bins):
    keys, counts = np.unique(ordered(np.array(values, np.float64)), return_counts=True)
    edges, shares = bin_edges(keys, counts, bins)
    assert (edges.tolist(), shares.tolist()) == bins_of([v + 0.0 for v in values], bins)
    assert len(edges) <= bins + 1


def test_bins_of_ten_numbers():
    keys, counts = np.unique(ordered(np.arange(10.0)), return_counts=True)
    edges, shares = bin_edges(keys, counts, 4)
    assert edges.tolist() == [0, 3, 5, 6, 9]
    assert shares.tolist() == [0.05, 0.35, 0.55, 0.65, 0.95]


TEXTS = st.lists(st.binary(max_size=40) | st.text(max_size=12).map(str.encode), max_size=12)


@given(TEXTS)
def test_texts_have_the_hash_of_plain_python(texts):
    column = TextColumn.from_bytes(texts)
    expected = [hash_text(text) for text in texts]
    assert hash_texts(column).tolist() == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.native, "host", None)
        assert hash_texts(column).tolist() == expected


def test_the_hash_of_a_text_is_what_it_was():
    """Dictionaries of earlier datasets have these keys."""
    texts = [b"", b"a", b"12345678", b"123456789", "日本".encode()]
    expected = [
        0x0000000000000000,
        0x1D083E1E900A1252,
        0x27A28FA0652B3543,
        0xC8DB5BDF27EA11D8,
        0xBE7E68F5E9990D3C,
    ]
    assert hash_texts(TextColumn.from_bytes(texts)).tolist() == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=9))
def test_texts_are_stripped_as_python_does(texts):
    padded = [f"{' ' * (i % 3)}{text}\t\u2003\x1f"[: 12 + i] for i, text in enumerate(texts)]
    column = stripped(TextColumn.from_bytes([text.encode() for text in padded]))
    found = [column.data[a:b].tobytes() for a, b in zip(column.starts, column.ends, strict=True)]
    assert found == [text.strip().encode() for text in padded]


@pytest.mark.parametrize("seed", [0, 7, -1, 1 << 63])
@pytest.mark.parametrize("rows", [1, 2, 100, 70_000])
def test_as_many_rows_as_wanted_have_the_smallest_hashes(seed, rows):
    hashes = sorted(splitmix64(seed & ((1 << 64) - 1), i) for i in range(rows))
    for count in {0, 1, rows // 3, rows - 1, rows, rows + 1} & {*range(rows + 2)}:
        limit = smallest_hashes(seed, rows, count)
        assert sum(value < limit for value in hashes) == min(count, rows)

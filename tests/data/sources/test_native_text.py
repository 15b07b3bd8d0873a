"""Native readers of CSV and JSON find the rows of Python's, or leave them undecided."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dlrm.data.sources import native

pytestmark = pytest.mark.skipif(native.host is None, reason="the native library is not built")
JSON_CELLS = st.sampled_from(
    ['"a"', '"\\u00e9\\n"', '"\\ud83d\\ude00"', "1", "-0", "1.50", "1e3", "01", "true", "null"]
    + ["NaN", "[1]", "{}", '"\\ud800"', '"', "12345678901234567890"]
)
JSON_ROWS = st.dictionaries(st.sampled_from(["a", "b", "c d"]), JSON_CELLS, max_size=3)


def known(value, text):
    """Returns a value as its text and whether it is a number."""
    if value is None:
        return None
    number = isinstance(value, int | float | Written) and not isinstance(value, bool)
    return (text if number else {True: "true", False: "false"}.get(value, value), number)


@given(st.lists(JSON_ROWS, max_size=4), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_native_json_is_that_of_python_or_undecided(rows, end):
    lines = [", ".join(f'"{name}": {cell}' for name, cell in row.items()) for row in rows]
    text = "".join(f" {{{line} }}{end}" for line in lines)
    read = native.read_json(text.encode(), ["a", "b"], [native.DISTINCT] * 2)
    cells = {cell for row in rows for cell in row.values()}
    decided = cells.isdisjoint(("01", "NaN", "[1]", "{}", '"\\ud800"', '"'))
    assert read.decided == decided
    if not decided:
        return
    expected = [{n: known(json.loads(c), c) for n, c in row.items()} for row in rows]
    for name, column in zip(("a", "b"), read.columns, strict=True):
        ends = zip(column.offsets, column.offsets[1:], strict=False)
        texts = [column.data[a:b].tobytes().decode() for a, b in ends]
        found = [None if c < 0 else (texts[c], bool(column.tags[c])) for c in column.codes]
        assert found == [row.get(name) for row in expected]
    assert len(read.lines) == len(rows)


class Written(str):
    """A number of JSON, as it is written."""


def cells_of(line):
    """Returns the cells of a line as Python's json module reads them; None needs a decision."""
    as_written = {"parse_int": Written, "parse_float": Written, "parse_constant": list}
    try:
        pairs = json.loads(line, object_pairs_hook=tuple, **as_written)
        row = {name: known(value, value) for name, value in pairs}
        "".join([*row, *(cell[0] for cell in row.values() if cell)]).encode()
    except (ValueError, TypeError):  # no JSON, no map of cells, or half of a pair of UTF-16
        return None
    known_cells = all(cell is None or isinstance(cell[0], str) for cell in row.values())
    whole = isinstance(pairs, tuple) and len(row) == len(pairs) and known_cells
    return row if whole else None


LINE = r'{"a": "\"\u00e9\uFffD\ud83d\uDE00\/", "b": -10.25E+3, "\u0063": true, "d":null,"e":0.5 }'


def test_native_json_finds_the_errors_of_python_at_each_place():
    lines = [LINE[:end] for end in range(1, len(LINE))]
    for place, new in itertools.product(range(len(LINE)), ["", *'x"\\,:}{0. \t\1u', "\\n"]):
        lines.append(LINE[:place] + new + LINE[place + 1 :])
    units = (0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0xE000, 0xFFFF)
    lines += [f'{{"a": "\\u{a:04x}\\u{b:04X}"}}' for a, b in itertools.product(units, units)]
    assert sum(cells_of(line) is not None for line in lines) > 150
    for line in lines:
        row = cells_of(line)
        names = [*(row or "a")]
        read = native.read_json(line.encode(), names, [native.DISTINCT] * len(names))
        assert read.decided == (row is not None), line
        for cell, column in zip(row.values() if row else (), read.columns, strict=True):
            found = column.data.tobytes().decode(), *map(bool, column.tags)
            assert found == (cell or ("",)), line


def columns_of(block):
    """Returns two columns of numbers, as far as they are."""
    how = native.Marks(",", '"'), True, False, True, [native.NUMBERS] * 2
    return native.read_csv(block.encode(), *how).columns


def test_native_numbers_are_those_of_python():
    random = np.random.default_rng(0)
    texts = [repr(float(value)) for value in random.lognormal(0, 3, 20_000)]
    digits = random.integers(1, 1 << random.integers(1, 63, 20_000))
    powers = random.integers(-27, 28, 20_000)
    texts += [f"{a}e{b}" for a, b in zip(digits.tolist(), powers.tolist(), strict=True)]
    for odd in range(1, 10_000, 2):  # halfway between two doubles, and beside it
        halfway = ((1 << 53) + odd) * 125
        texts += [f"-{halfway}E-3", f"{halfway - 1}e-3", f"{halfway + 1}e-3", f"{(1 << 53) + odd}"]
    # Quotients of 65 bits that are halfway between two doubles but for their remainders.
    texts += ["7498340508754701484e-27", "3482006258135674425e-27", "7836102110467355340e-27"]
    texts += ["0", "-0", "-0.0e+5", "1.50", f"{'0' * 30}1.5"]
    block = "".join(f"{text},{text}\n" for text in ["", *texts])
    numbers, other = columns_of(block)
    assert np.isnan(numbers[0])
    assert numbers[1:].tobytes() == np.array(texts).astype(float).tobytes()
    assert numbers.tobytes() == other.tobytes()


@pytest.mark.parametrize("text", ["nan", "inf", "+1", " 1", "1.", ".5", "1e", "-", "1_0", "0x1"])
def test_other_texts_are_no_native_numbers(text):
    column, other = columns_of(f"{text},1\n")
    assert column.data.tobytes() == text.encode()
    assert other.tolist() == [1]


def test_names_of_json_are_compared_without_their_escapes():
    text = r'{"a\\b": 1, "c": 2}' + "\n" + r'{"a\b": 3, "\u0063": 4}' + "\n"
    read = native.read_json(text.encode(), ["a\\b", "c"], [native.NUMBERS] * 2)
    assert read.names == ["a\\b", "c", "a\b"]
    assert read.columns[1].tolist() == [2, 4]
    np.testing.assert_equal(read.columns[0], [1, np.nan])

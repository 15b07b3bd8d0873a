"""The log parser reads what a plain Python parser reads and stops where it stops."""

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlrm.data.sources import native
from dlrm.data.sources.columns import Parsed
from dlrm.data.sources.log_lines import LogFormat, explain, parse_lines
from dlrm.data.transform.lookup import IdLookup

needs_native = pytest.mark.skipif(native.host is None, reason="the parser is not built")


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "numpy"])
def lookup_by(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(native, "host", None)


def reference(text, log_format):
    """Returns rows (label, integers, hashes), None if missing, and the bad line's offset."""
    rows, place = [], 0
    for line in re.findall(rb"[^\n]*\n|[^\n]+$", text):
        fields = re.sub(rb"\r?\n$|\r$", b"", line).split(b"\t")
        if fields == [b""] or len(fields) > log_format.num_columns:
            return rows, place
        fields += [b""] * (log_format.num_columns - len(fields))
        label = fields.pop(0) if log_format.labeled else b"0"
        integers, hashes = fields[: log_format.num_numerical], fields[log_format.num_numerical :]
        good = label in (b"0", b"1")
        good &= all(re.fullmatch(rb"(-?\d{1,18})?", field) for field in integers)
        good &= all(re.fullmatch(rb"[0-9a-fA-F]{0,16}", field) for field in hashes)
        if not good:
            return rows, place
        rows.append(
            (
                label == b"1",
                [int(field) if field else None for field in integers],
                [int(field, 16) if field else None for field in hashes],
            )
        )
        place += len(line)
    return rows, None


def check(text, log_format):
    lines, bad_at = parse_lines(text, log_format)
    rows, expected_bad = reference(text, log_format)
    assert bad_at == expected_bad
    assert lines.labels.tolist() == [row[0] for row in rows]
    for i, columns in ((1, lines.numerical), (2, lines.categorical)):
        for c, column in enumerate(columns):
            expected = [row[i][c] for row in rows]
            assert column.missing.tolist() == [value is None for value in expected]
            assert column.values.tolist() == [value or 0 for value in expected]
    if bad_at is not None:
        assert explain(text[bad_at:].partition(b"\n")[0], log_format, 0).problem


formats = st.builds(LogFormat, st.integers(0, 3), st.integers(1, 3), st.booleans())
integers = st.integers(-(10**19), 10**19).map(str)
hashes = st.integers(0, 2**66).map(lambda n: f"{n:x}") | st.integers(0, 2**32 - 1).map(
    "{:08X}".format
)


@st.composite
def plausible(draw, log_format):
    fields = draw(st.lists(st.sampled_from("01"), min_size=1, max_size=1)) * log_format.labeled
    fields += draw(st.lists(integers | st.just(""), max_size=log_format.num_numerical))
    if len(fields) == log_format.labeled + log_format.num_numerical:
        fields += draw(st.lists(hashes | st.just(""), max_size=log_format.num_categorical + 1))
    return "\t".join(fields) + draw(st.sampled_from(["\n", "\r\n", "\n", "\t\n"]))


@needs_native
@settings(max_examples=300)
@given(data=st.data())
def test_any_text_is_read_as_by_the_reference(data):
    log_format = data.draw(formats)
    text = data.draw(
        st.lists(plausible(log_format), max_size=4).map("".join)
        | st.text("01\t\n\r-af x", max_size=40)
    )
    check(text.encode(), log_format)


@needs_native
def test_every_byte_in_every_place_of_a_field():
    for place in range(10):
        for byte in range(256):
            field = b"12345678a"[:place] + bytes([byte]) + b"12345678"[place:]
            check(b"1\t5\t" + field + b"\n0\t6\t7\n", LogFormat(1, 1))
            check(b"1\t" + field + b"\tab\n0\t6\t7\n", LogFormat(1, 1))


@needs_native
def test_texts_without_lines():
    assert parse_lines(b"", LogFormat())[1] is None
    assert parse_lines(b"\n", LogFormat())[1] == 0
    assert len(parse_lines(b"", LogFormat(0, 1))[0].labels) == 0


@pytest.mark.parametrize(
    ("line", "column", "got"),
    [
        (b"\r\n", None, "an empty line"),
        (b"1\t2\t3\t4\n", None, "4"),
        (b"3\t2\t3\n", 0, "'3'"),
        (b"1\tx\t3\n", 1, "'x'"),
        (b"1\t2\t\xff", 2, r"'\\xff'"),
    ],
)
def test_a_bad_line_is_explained(line, column, got):
    log_format = LogFormat(1, 1)
    error = explain(line, log_format, 5)
    assert (error.row, error.problem.partition(", got ")[2]) == (5, got)
    assert error.column == (None if column is None else log_format.describe(column))


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 50_000])
def test_lookups_know_exactly_the_numbers_of_their_dictionary(lookup_by, size, tmp_path):
    random = np.random.default_rng(size)
    numbers = np.unique(random.integers(0, 2**63, size, np.uint64) >> np.uint64(size % 3 * 31))
    random.shuffle(numbers)
    values = np.concatenate([numbers, numbers + np.uint64(1), [np.uint64(0)]]).astype(np.uint64)
    missing = random.random(len(values)) < 0.1
    ids = {int(number): i for i, number in enumerate(numbers, 1)}
    expected = [0 if m else ids.get(int(v), 0) for v, m in zip(values, missing, strict=True)]
    lookup = IdLookup.from_dictionary(numbers)
    assert lookup(Parsed(values, missing)).tolist() == expected
    for array, path in zip(lookup, IdLookup.paths(tmp_path, 3), strict=True):
        array.tofile(path)
    stored = IdLookup.load(tmp_path, 3, lookup.ids.dtype)
    assert stored(Parsed(values, missing)).tolist() == expected


def test_a_lookup_of_wrong_sizes_is_refused():
    lookup = IdLookup.from_dictionary(np.arange(9, dtype=np.uint64))
    for arrays in ({"ids": lookup.ids[:-1]}, {"hashes": lookup.hashes[1:]}):
        with pytest.raises(ValueError, match="sizes do not fit: expected [89] ids"):
            IdLookup(*lookup._replace(**arrays))
    for directory in ([], [0], [0, 3, 6, 9], [0, 8]):
        with pytest.raises(ValueError, match=r"expected 9 ids and a directory of 2\*\*k"):
            IdLookup(lookup.hashes, lookup.ids, np.array(directory, np.int64))


@needs_native
def test_the_native_code_takes_arrays_of_its_sizes_and_types_alone():
    lookup = IdLookup.from_dictionary(np.arange(9, dtype=np.uint64))
    numbers, missing = np.arange(2, dtype=np.uint64), np.zeros(2, bool)
    assert native.host.look_up(numbers, missing, *lookup).dtype == lookup.ids.dtype
    with pytest.raises(ValueError, match="expected 2 values of missing, got 3"):
        native.host.look_up(numbers, np.zeros(3, bool), *lookup)
    for wrong in (numbers.astype(np.int64), numbers.astype(np.uint32), np.zeros(4, "u8")[::2]):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            native.host.look_up(wrong, missing, *lookup)
    data, places = np.zeros(8, np.uint8), np.array([0, 3])
    for ends in ([1, 9], [1, 2], [-1, 3], [1], [1, 2**62]):
        with pytest.raises(ValueError, match="sizes do not fit"):
            native.host.hash_texts(data, places, np.array(ends))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.host.numbers_of(data, places.astype(np.int32), places)

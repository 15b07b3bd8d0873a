"""Text of rows, from lines, fields or tensors, and what is refused."""

import io
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from column_testing import transform_texts
from hypothesis import given, settings, strategies as st
from table_testing import table_transform

from dlrm.data.sources import native
from dlrm.data.sources.columns import TextColumn
from dlrm.data.sources.log_lines import LONGEST_LINE
from dlrm.data.sources.row_error import RowError
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.lookup import IdLookup
from dlrm.data.transform.transform import Transform
from dlrm.serving.rows import raw
from dlrm.serving.rows.python_rows import frame_of
from dlrm.serving.rows.tables import read_inputs, scoring_reader

COLUMNS = 4
FIELDS = st.lists(st.text("ab1-\xe9", max_size=5), min_size=1, max_size=COLUMNS)


def fields_of(text):
    return [
        [field.decode() for field in row]
        for row in zip(*(cells(text, column) for column in range(COLUMNS)), strict=True)
    ]


def cells(text, column):
    whole = text.data.tobytes()
    ends = zip(text.starts[column], text.ends[column], strict=True)
    return [whole[start:end] for start, end in ends]


def complete(row):
    return row + [""] * (COLUMNS - len(row))


@given(st.lists(FIELDS.filter(any), max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_lines_are_cut_at_tabs(lines, newline, ends_with_newline):
    text = newline.join("\t".join(row) for row in lines) + newline * ends_with_newline
    if lines:
        assert fields_of(raw.text_of_lines(text.encode(), COLUMNS)) == [*map(complete, lines)]


@given(st.lists(FIELDS, min_size=1, max_size=6))
def test_a_tensor_is_lines_padded_with_zeros(lines):
    padded = np.array(["\t".join(row).encode() for row in lines])
    tensor = padded.view(np.uint8).reshape(len(lines), -1)
    if padded.dtype.itemsize:
        assert fields_of(raw.text_of_tensors([tensor], COLUMNS)) == [*map(complete, lines)]


def test_a_tensor_may_have_no_rows():
    text = raw.text_of_tensors([np.empty((0, 3), np.uint8)], COLUMNS)
    assert text.starts.shape == (COLUMNS, 0)


def test_a_file_is_read_in_parts(monkeypatch):
    lines = [complete([f"{i}", "x" * (i % 7)]) for i in range(200)]
    file = io.BytesIO("\n".join("\t".join(row) for row in lines).encode())
    monkeypatch.setattr(raw, "_BLOCK_BYTES", 50)
    parts = [raw.text_of_lines(lines, COLUMNS) for lines in raw.read_lines(file)]
    assert len(parts) > 20
    assert [row for part in parts for row in fields_of(part)] == lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\n\nc\n", "row 1: expected 4 fields, got an empty line"),
        ("a\nb\n1\t2\t3\t4\t5\n", "row 2: expected up to 4 fields, got 5"),
    ],
)
def test_malformed_lines_are_named(text, message):
    with pytest.raises(RowError, match=message):
        raw.text_of_lines(text.encode(), COLUMNS)


def test_the_field_that_cannot_be_read_is_named():
    transform = Transform.from_logs(2, [np.array([7], np.uint32)])
    with pytest.raises(RowError, match="row 1, column categorical 0: .* hexadecimal.* got 'xyz'"):
        raw.inputs_of_text(transform, raw.text_of_lines(b"1\t2\t7\n1\t2\txyz\n", 3))


def test_csv_cells_are_named_by_column():
    transform = table_transform({"age": (3.0, 2.0)}, {"job": ["x"]})
    numerical, ids, *_ = raw.inputs_of_text(transform, raw.text_of_lines(b"5\tx\n3\ty\n", 2))
    assert (numerical.tolist(), ids.tolist()) == ([[1.0], [0.0]], [[1], [0]])
    with pytest.raises(RowError, match="row 1, column age: expected a number, got 'old'"):
        raw.inputs_of_text(transform, raw.text_of_lines(b"5\tx\nold\ty\n", 2))


def tensor_of(lines):
    padded = np.array(lines, bytes)
    return padded.view(np.uint8).reshape(len(lines), padded.dtype.itemsize)


@pytest.mark.parametrize(
    "read",
    [
        lambda line: raw.text_of_tensors([tensor_of([b"a", line])], COLUMNS),
        lambda line: raw.text_of_tensors([tensor_of([b"a"]), tensor_of([line])], COLUMNS),
        lambda line: raw.text_of_lines(b"a\n" + line + b"\nb\n", COLUMNS),
        lambda line: raw.text_of_lines(
            *raw.read_lines(io.BytesIO(b"a\n" + line + b"\nb\n")), COLUMNS
        ),
    ],
    ids=["a tensor", "tensors", "lines", "a file"],
)
def test_a_line_may_be_as_long_as_one_of_an_offline_log(read):
    read(b"x" * LONGEST_LINE)
    with pytest.raises(RowError, match="row 1: expected up to 1048576 bytes, got 1048577"):
        read(b"x" * (LONGEST_LINE + 1))


def test_a_file_without_line_ends_is_refused_early(monkeypatch):
    monkeypatch.setattr(raw, "_BLOCK_BYTES", 1 << 16)

    class Endless(io.RawIOBase):
        given = 0

        def read(self, size=-1):
            self.given += size
            return b"x" * size

    file = Endless()
    with pytest.raises(RowError, match="row 0: expected up to 1048576 bytes"):
        [raw.text_of_lines(lines, COLUMNS) for lines in raw.read_lines(file)]
    assert file.given <= LONGEST_LINE + (2 << 16)


@pytest.mark.parametrize("wide", [b"x" * 20_000, b"\t" * 3 + b"1" * 1_000_000, b"\t" * 1_000_000])
def test_memory_is_proportional_to_the_bytes_sent(wide):
    """Padding the batch to its widest row would take 1,000 times the bytes."""
    transform = Transform.from_logs(1, [np.array([7], np.uint32)] * 3)
    tensors = [tensor_of([b"12\t7\t8\t9"]) for _ in range(1000)] + [tensor_of([wide])]
    sent = sum(tensor.nbytes for tensor in tensors)
    tracemalloc.start()
    try:
        with pytest.raises(RowError, match="row 1000"):
            raw.inputs_of_text(transform, raw.text_of_tensors(tensors, COLUMNS))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * sent + (1 << 20)


FIELD = st.sampled_from([b"", b"0", b"-7", b"98", b"7", b"0000000A", b"aB", b"f" * 16]) | (
    st.binary(max_size=20)
)
DICTIONARIES = [
    np.array([0xA, 7, 2**64 - 1], np.uint64),
    np.arange(100, 400, dtype=np.uint32)[::-1],
    np.array([], np.uint32),
]


def expected_row(line):
    """Returns a row's numerical and ids, or None if it cannot be read."""
    fields = line.rstrip(b"\0").removesuffix(b"\r").split(b"\t")
    if len(fields) > COLUMNS:
        return None
    integer, *hashes = fields + [b""] * (COLUMNS - len(fields))
    if not re.fullmatch(rb"(-?[0-9]{1,18})?", integer):
        return None
    if not all(re.fullmatch(rb"[0-9a-fA-F]{0,16}", text) for text in hashes):
        return None
    logarithm = np.log(max(float(int(integer or 0) + 2), 1.0))
    ids = [
        ([*map(int, numbers)].index(int(text, 16)) + 1)
        if text and int(text, 16) in numbers.tolist()
        else 0
        for text, numbers in zip(hashes, DICTIONARIES, strict=True)
    ]
    return [np.float16(np.float32(logarithm))], ids


@pytest.mark.parametrize(
    "parser",
    [
        pytest.param(
            "native", marks=pytest.mark.skipif(native.served is None, reason="it is not built")
        ),
        "numpy",
    ],
)
@settings(max_examples=300)
@given(
    st.lists(
        st.lists(
            st.lists(FIELD, min_size=1, max_size=COLUMNS + 1).map(b"\t".join)
            | st.binary(max_size=9),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_both_parsers_read_what_a_plain_one_reads(parser, requests):
    tensors = [tensor_of(lines) for lines in requests]
    expected = [expected_row(line.rstrip(b"\0")) for lines in requests for line in lines]
    with pytest.MonkeyPatch.context() as patch:
        if parser == "numpy":
            patch.setattr(native, "host", None)
            patch.setattr(native, "served", None)
        transform = Transform.from_logs(1, DICTIONARIES)
        try:
            inputs = raw.inputs_of_text(transform, raw.text_of_tensors(tensors, COLUMNS))
        except RowError as error:
            assert expected[error.row] is None  # noqa: PT017
            return
        assert None not in expected
        assert inputs.numerical.tolist() == [row[0] for row in expected]
        assert inputs.ids.tolist() == [row[1] for row in expected]
        text = raw.text_of_tensors(tensors, COLUMNS)
        columns = [TextColumn(text.data, *c) for c in zip(text.starts, text.ends, strict=True)]
        numerical, ids, _ = transform_texts(transform, columns)
    assert (inputs.numerical.dtype, inputs.ids.dtype) == (np.float16, np.int16)
    np.testing.assert_array_equal(inputs.numerical.view(np.int16), numerical.view(np.int16))
    np.testing.assert_array_equal(inputs.ids, np.stack(ids, 1))


def test_both_parsers_name_the_same_field(monkeypatch):
    def problem():
        with pytest.raises(RowError) as error:
            raw.inputs_of_text(transform, raw.text_of_lines(b"1\t2\t7\n1\t-\tx\n1\tz\t7\n", 3))
        return str(error.value)

    transform = Transform.from_logs(2, [np.array([7], np.uint32)])
    natively = problem()
    monkeypatch.setattr(native, "served", None)
    assert problem() == natively
    assert natively.startswith(
        "row 1, column numerical 1: expected an integer of up to 18 digits, got '-'"
    )


@pytest.mark.skipif(native.served is None, reason="the parser is not built")
@pytest.mark.parametrize(
    ("starts", "ends"), [([[0]], [[9]]), ([[-1]], [[1]]), ([[3]], [[2]]), ([[2**62]], [[2**62]])]
)
def test_the_native_parser_reads_nothing_outside_the_data(starts, ends):
    data, places = np.full(8, ord("1"), np.uint8), (np.array(starts), np.array(ends))
    none, some = native.Lookups([]), native.Lookups(3 * [IdLookup.from_dictionary(np.arange(9))])
    assert native.encode_fields(data, *places, 1, none)[3] == 0
    for number, lookups in ((1, some), (0, none), (2, none), (-2, some)):
        with pytest.raises(ValueError, match="sizes do not fit"):
            native.encode_fields(data, *places, number, lookups)
    with pytest.raises(ValueError, match="sizes do not fit"):
        native.encode_fields(data, places[0], np.zeros((1, 2), np.int64), 1, none)
    with pytest.raises(ValueError, match="expected an array of int64 in one piece, got int32"):
        native.encode_fields(data, places[0], places[1].astype(np.int32), 1, none)
    with pytest.raises(ValueError, match="in one piece"):
        native.encode_fields(data[::2], *places, 1, none)


def test_a_long_cell_is_shortened_in_the_message():
    transform = table_transform({"age": (0.0, 1.0)}, {}, "none")
    for cell in (b"x" * 1_000_000, b"9" * 100_000):
        with pytest.raises(RowError, match=r"row 0, column age: .*\.\.\.") as error:
            raw.inputs_of_text(transform, raw.text_of_tensors([tensor_of([cell])], 1))
        shorter = len(str(error.value)) < 500
        assert shorter


MARKED = {"1.065": 1065.0, "1,065": 1.065, "-12,5": -12.5, " 7 ": 7.0, "": None}


@pytest.mark.parametrize("form", ["mapping", "fields", "line", "text"])
def test_numbers_in_rows_have_the_marks_of_the_schema(form):
    plain = table_transform({"x": (0.0, 1000.0)}, {"u": ["a"]})
    schema = replace(plain.schema, format=TextFormat(decimal=",", thousands="."))
    marked = Transform(schema, plain.numerical, plain.dictionaries, plain.types)
    columns = pa.table({"x": [*MARKED.values()], "u": ["a"] * len(MARKED)})
    reader = scoring_reader(plain, labeled=False)
    expected, _ = read_inputs(plain, reader, columns.combine_chunks().to_batches()[0])
    lines = [f"{text}\ta" for text in MARKED]
    if form == "text":
        found = raw.inputs_of_text(marked, raw.text_of_lines("\n".join(lines).encode(), 2))
    else:
        of = {"line": lines, "fields": [line.split("\t") for line in lines]}
        of["mapping"] = [dict(zip(("x", "u"), fields, strict=True)) for fields in of["fields"]]
        reader = scoring_reader(marked, labeled=False)
        found, _ = read_inputs(marked, reader, frame_of(of[form], marked))
    np.testing.assert_array_equal(found.numerical, expected.numerical)
    np.testing.assert_array_equal(found.ids, expected.ids)
    batch = frame_of([{"x": "12.5", "u": "a"}], marked)
    with pytest.raises(RowError, match="decimal mark ,"):
        read_inputs(marked, scoring_reader(marked, labeled=False), batch)

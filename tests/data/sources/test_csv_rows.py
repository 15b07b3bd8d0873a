"""Rows of CSV, with Python's csv module as the oracle, in blocks of any size."""

import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from dlrm.data.sources import csv_rows
from dlrm.data.sources.csv_rows import Reading, read_csv
from dlrm.data.sources.text_format import TextFormat

PIECES = ["a", "b", '"', '""', ",", ";", "\n", "\r\n", "\r", " ", "\t", "\0", "é", "\ufeff", "\\"]
# Cells that mostly make whole rows, so that blocks of plain ones stand beside others.
CELLS = [
    "a",
    "bc",
    "\ufeffa",
    "",
    " d",
    '"e"',
    '"f,g"',
    '"h""i"',
    '"j\nk"',
    '"l\r\nm"',
    "é",
    '"',
    'n"o',
    "\0",
]
ENDS = ["\n", "\n", "\n", "\r\n", "\r", "\n\n"]


@st.composite
def lines_of_cells(draw):
    width = draw(st.integers(1, 3))
    row = st.lists(st.sampled_from(CELLS), min_size=width, max_size=width).map(",".join)
    rows = draw(st.lists(st.tuples(row, st.sampled_from(ENDS)), max_size=8))
    return "".join(itertools.chain(*rows))


TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | lines_of_cells()


def expected_of(content, quote):
    """Returns rows with the lines on which they end, problems by line, and an error's line."""
    text = content.decode("utf-8-sig", "surrogateescape")
    lines = list(io.StringIO(text, newline=""))
    rows, problems, width = [], {}, None
    for number, line in enumerate(lines, 1):
        if any("\udc80" <= c <= "\udcff" for c in line):
            problems[number] = "not UTF-8"
            lines[number - 1] = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    quoting = csv.QUOTE_NONE if quote == "none" else csv.QUOTE_MINIMAL
    reader = csv.reader(iter(lines), strict=True, skipinitialspace=True, quoting=quoting)
    while True:
        first = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return rows, problems, None
        except csv.Error:
            return rows, problems, first
        if not record:
            continue
        width = width or len(record)
        if len(record) != width:
            problems[reader.line_num] = f"expected {width} columns"
            record = [""] * width
        rows.append((reader.line_num, without_blanks(record)))


def without_blanks(record):
    """Returns cells without the blanks before them, which parsers of cells ignore."""
    return [cell.lstrip(" ") for cell in record]


def found_in(path, block, problems, **options):
    """Returns rows with their lines, and the error of a file, read in blocks of some bytes."""
    rows = []
    with patch.object(csv_rows, "_BLOCK_BYTES", block):
        try:
            reading = Reading(TextFormat(header=False, **options), problems=problems)
            for chunk in read_csv(path, reading):
                cells = zip(*(column.to_pylist() for column in chunk.columns), strict=True)
                rows += zip(chunk.lines.tolist(), map(without_blanks, cells), strict=True)
        except ValueError as error:
            return rows, str(error)
    return rows, None


@pytest.mark.parametrize("quote", [None, "none"])
@settings(max_examples=250)
@given(text=TEXTS, broken=st.none() | st.integers(0, 40), block=st.integers(3, 30))
def test_rows_are_those_of_pythons_csv_module(quote, text, broken, block, tmp_path_factory):
    content = text.encode()
    if broken is not None and not text.startswith("\ufeff"):
        content = content[:broken] + b"\xff" + content[broken:]
    path = tmp_path_factory.getbasetemp() / "drawn.csv"
    path.write_bytes(content)
    rows, problems, failed = expected_of(content, quote)

    refused = {}
    found, error = found_in(path, block, refused, quote=quote)
    if error is not None and "a file of one column" in error:
        assert {len(cells) for _, cells in rows} == {1}
        assert found == rows[: len(found)]
    elif failed is None:
        assert (error, found) == (None, rows)
        assert refused.keys() == problems.keys()
        assert all(refused[line].find(problems[line]) >= 0 for line in problems)
    else:
        assert f"line {failed}: not CSV" in str(error)
        assert found == rows[: len(found)]

    _, error = found_in(path, block, None, quote=quote)  # any of the problems of a block
    if error is not None and "a file of one column" in error:
        return
    if problems or failed:
        assert int(re.search(r", line (\d+)", error)[1]) in {*problems, failed}
    else:
        assert error is None


# What Spark 4.3 wrote with its defaults; it removes blanks around cells.
SPARK = (
    'i,t,n\n0,plain,""\n1,"a,b",\n2,"say \\"hi\\"",\n3,"\\"",""\n4,"\\"\\"",\n5,back\\slash,\n'
    '6,end\\,""\n7,\\,\n8,"\\\\\\"",\n9,"a,b\\\\",""\n10,"a \\"b\\\\\\" c",\n11,"line\nbreak",\n'
    '12,"a,\\"b\\"\nc",""\n13,\\\\,\n14,"a,\\\\\\\\",\n15,#hash,""\n16,it\'s,\n17,tab\there,\n'
    '18,"",""\n19,"a\r\nb",\n20,"a,\\\\,b",\n21,"\\\\,",""\n22,"\\\\\\\\\\"",\n23,",",\n'
    '24,"é,\\"ü\\"",""\n25,"x\\\\y,z",\n26,"lead, trail",\n'
)
TEXTS_OF_SPARK = [
    *("plain", "a,b", 'say "hi"', '"', '""', "back\\slash", "end\\", "\\", '\\"', "a,b\\"),
    *('a "b\\" c', "line\nbreak", 'a,"b"\nc', "\\\\", "a,\\\\", "#hash", "it's", "tab\there"),
    *("", "a\r\nb", "a,\\,b", "\\,", '\\\\"', ",", 'é,"ü"', "x\\y,z", "lead, trail"),
]


@pytest.mark.parametrize("block", [5, 64, 1 << 20])
def test_files_of_spark_have_the_texts_that_it_wrote(block, tmp_path):
    path = tmp_path / "part-0.csv"
    path.write_bytes(SPARK.encode())
    rows, error = found_in(path, block, None, escape="\\")
    assert error is None
    numbers = map(str, range(len(TEXTS_OF_SPARK)))
    assert [row[:2] for _, row in rows[1:]] == list(
        map(list, zip(numbers, TEXTS_OF_SPARK, strict=True))
    )


@pytest.mark.slow
def test_spark_writes_so(java, tmp_path):
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    try:
        rows = [(i, one, None if i % 3 else "") for i, one in enumerate(TEXTS_OF_SPARK)]
        frame = spark.createDataFrame(rows, "i int, t string, n string").coalesce(1)
        frame.write.csv(str(tmp_path / "written"), header=True)
    finally:
        spark.stop()
    (part,) = (tmp_path / "written").glob("part-*")
    assert part.read_bytes().decode() == SPARK


def in_members(pack):
    """Returns a function that packs content in members, of which one is empty."""
    return lambda content: pack(content[:7]) + pack(b"") + pack(content[7:])


PACKS = {
    ".gz": in_members(gzip.compress),
    ".bz2": in_members(bz2.compress),
    ".xz": in_members(lzma.compress),
    ".zst": in_members(lambda content: pa.compress(content, "zstd", asbytes=True)),
    "": bytes,
}
SAMPLE = 'näme,"a\nb"\r\nß,"c, ""d"""\né,x\n'
ROWS_OF_SAMPLE = [(2, ["näme", "a\nb"]), (3, ["ß", 'c, "d"']), (4, ["é", "x"])]


@pytest.mark.parametrize("end", PACKS)
@pytest.mark.parametrize("encoding", [None, "utf-8", "latin-1", "cp1252", "utf-16", "utf-16-be"])
def test_files_of_any_encoding_and_compression_have_one_content(end, encoding, tmp_path):
    path = tmp_path / f"a.csv{end}"
    path.write_bytes(PACKS[end](SAMPLE.encode(encoding or "utf-8-sig")))
    for block in (3, 1 << 20):
        assert found_in(path, block, None, encoding=encoding) == (ROWS_OF_SAMPLE, None)


@pytest.mark.parametrize(
    ("content", "encoding", "message"),
    [
        (SAMPLE.encode("latin-1"), None, r"line 1, character 2: not .*UTF-8 .*--encoding"),
        (SAMPLE.encode("utf-16"), None, "the mark of UTF-16; try --encoding utf-16"),
        (SAMPLE.encode("utf-16")[:-1], "utf-16", "expected the encoding utf-16"),
        (SAMPLE.encode("latin-1"), "ascii", "after line 0: expected the encoding ascii"),
        (gzip.compress(SAMPLE.encode())[:-9], None, "not a whole gzip file"),
        (lzma.compress(SAMPLE.encode())[:-9], None, "not a whole xz file"),
        (bz2.compress(SAMPLE.encode())[:-9], None, "not a whole bz2 file"),
        (pa.compress(SAMPLE.encode(), "zstd", asbytes=True)[:-5], None, "after line 0: "),
        (bz2.compress(b"a\n") + bz2.compress(b"b\n")[3:], None, "not a whole bz2 file"),
        (lzma.compress(b"a\n") + lzma.compress(b"b\n")[3:], None, "not a whole xz file"),
        (lzma.compress(b"a\n") + lzma.compress(b"b\n")[:-9], None, "not a whole xz file"),
    ],
    ids=[
        "latin-1",
        "utf-16",
        "half of utf-16",
        "ascii",
        "gzip",
        "xz",
        "bz2",
        "zst",
        "2nd bz2",
        "2nd xz",
        "half",
    ],
)
def test_files_of_another_encoding_and_damaged_archives_are_named(
    content, encoding, message, tmp_path
):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    _, error = found_in(path, 1 << 20, None, encoding=encoding)
    assert error.startswith(str(path))
    assert re.search(message, error)


def test_blank_lines_of_one_column_are_refused_between_rows(tmp_path):
    path = tmp_path / "a.csv"
    for text, line in (("c\na\n\nb\n", 3), ("c\r\na\r\n\r\nb\r\n", 3), ("c\n\nb\n", 2)):
        path.write_bytes(text.encode())
        for block in (2, 4, 1 << 20):
            _, error = found_in(path, block, None)
            assert error is not None, (text, block)
            assert error.startswith(
                f"{path}, line {line}: expected a value in a file of one column"
            )
    path.write_text('c\na\n\n"b ""quoted"""\n')
    assert found_in(path, 1 << 20, None)[1].startswith(f"{path}, line 3: expected a value in a")
    path.write_text("c\na\n\n\n")
    assert found_in(path, 3, None)[1] is None


def test_a_mark_of_utf_16_is_no_part_of_the_first_cell(tmp_path):
    path = tmp_path / "a.csv"
    for encoding in ("utf-16-le", "utf-16-be", "utf-16", "utf-8-sig", "utf-8"):
        path.write_bytes("\ufeffa,b\n1,2\n".encode(encoding.removesuffix("-sig")))
        expected = [(1, ("a", "b")), (2, ("1", "2"))]
        rows, error = found_in(path, 1 << 20, None, encoding=encoding)
        assert error is None
        assert [(line, tuple(cells)) for line, cells in rows] == expected

"""Text in ranges of lines, and small files together, give the dataset and errors of one file."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from tables_testing import contents, prepare

from dlrm.data.sources import native
from dlrm.preproc.errors import TaskError

SCHEMA = {"label": "y", "numerical": [{"column": "x", "transform": "none"}], "categorical": ["c"]}
RANGES = {"split_bytes": 1 << 12, "test_fraction": 0.2}
ROWS = 2000
NATIVE = pytest.mark.skipif(native.host is None, reason="the native library is not built")


def rows_of(count=ROWS):
    return [{"y": i % 2, "x": i / 8, "c": f'v{i % 7} "é", {i % 3}'} for i in range(count)]


def csv_of(rows, end="\n"):
    quoted = [f'{r["y"]},{r["x"]},"{r["c"].replace(chr(34), chr(34) * 2)}"' for r in rows]
    return end.join(["y,x,c", *quoted, ""])


def json_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, text):
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_ranges_of_lines_give_the_dataset_of_one(suffix, tmp_path):
    text = csv_of(rows_of(), "\r\n") if suffix == ".csv" else json_of(rows_of())
    path = write(tmp_path / f"a{suffix}", text)
    prepare(SCHEMA, [path], tmp_path / "ranges", **RANGES)
    prepare(SCHEMA, [path], tmp_path / "one", test_fraction=0.2)
    assert contents(tmp_path / "ranges") == contents(tmp_path / "one")


def test_rows_of_several_lines_are_read_from_the_beginning_of_the_file(tmp_path):
    rows = rows_of()
    rows[1500]["c"] = "two\nlines"
    path = write(tmp_path / "a.csv", csv_of(rows))
    lines = prepare(SCHEMA, [path], tmp_path / "ranges", **RANGES)
    assert any("extend 1 row over 2 lines, the first at line 1502" in line for line in lines)
    prepare(SCHEMA, [path], tmp_path / "one", test_fraction=0.2)
    assert contents(tmp_path / "ranges") == contents(tmp_path / "one")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_bad_rows_of_a_range_have_the_lines_of_the_file(suffix, tmp_path):
    rows = rows_of()
    rows[1699 if suffix == ".csv" else 1700]["x"] = "one"
    lines = (csv_of if suffix == ".csv" else json_of)(rows).splitlines()
    lines[1800] = "1,2" if suffix == ".csv" else "{"
    path = write(tmp_path / f"a{suffix}", "\n".join(lines))
    with pytest.raises(TaskError, match=f"a{suffix}, line 1801"):
        prepare(SCHEMA, [path], tmp_path / "refused", **RANGES)
    options = {"bad_lines": "quarantine", "max_bad_lines": 0.1, **RANGES}
    prepare(SCHEMA, [path], tmp_path / "d", **options)
    (kept,) = (tmp_path / "d" / "quarantine").iterdir()
    places = [line.split("\t")[0] for line in kept.read_text().splitlines()]
    assert places == [f"{path}, line 1701", f"{path}, line 1801"]


def small_files(folder, suffix, rows, size=20):
    folder.mkdir()
    for number, begin in enumerate(range(0, len(rows), size)):
        some, path = rows[begin : begin + size], folder / f"{number:03}{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(some), path, row_group_size=8)
        else:
            write(path, (csv_of if suffix == ".csv" else json_of)(some))
    return folder


@pytest.mark.parametrize("split", [{}, {"split_bytes": 1 << 9}], ids=["together", "alone"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_small_files_give_the_dataset_of_one(suffix, split, tmp_path):
    many = small_files(tmp_path / "many", suffix, rows_of())
    one = small_files(tmp_path / "whole", suffix, rows_of(), ROWS)
    prepare(SCHEMA, [many], tmp_path / "d", test_fraction=0.2, **split)
    prepare(SCHEMA, [one], tmp_path / "e", test_fraction=0.2)
    assert contents(tmp_path / "d") == contents(tmp_path / "e")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_bad_value_of_a_small_file_has_its_place(suffix, tmp_path):
    rows = rows_of()
    rows[1234]["x"] = float("inf")
    if suffix == ".jsonl":
        rows[1234]["x"] = "inf"
    many = small_files(tmp_path / "many", suffix, rows)
    place = {".csv": "line 16", ".jsonl": "line 15", ".parquet": "row group 1, row 6"}[suffix]
    where = f"{many}/061{suffix}, {place}"
    with pytest.raises(TaskError, match=f"{where}, column x: expected a finite number"):
        prepare(SCHEMA, [many], tmp_path / "refused")
    prepare(SCHEMA, [many], tmp_path / "d", bad_lines="quarantine", report=True)
    (kept,) = (tmp_path / "d" / "quarantine").iterdir()
    assert kept.name == f"061{suffix}.tsv"
    assert kept.read_text().startswith(f"{where}\t")
    report = json.loads((tmp_path / "d" / "report.json").read_text())
    assert report["rows_quarantined"] == [{"file": f"061{suffix}", "rows": 1}]


def test_small_files_of_several_types_are_read_together(tmp_path):
    for name, kinds in (("several", [pa.int64(), pa.float32()]), ("one", [pa.float64()])):
        (tmp_path / name).mkdir()
        for number in range(80):
            kind = kinds[number % len(kinds)]
            table = {"y": [0, 1], "x": pa.array([1, number], kind), "c": ["a", "b"]}
            pq.write_table(pa.table(table), tmp_path / name / f"{number:02}.parquet")
        prepare(SCHEMA, [tmp_path / name], tmp_path / f"d_{name}", test_fraction=0.2)
    assert contents(tmp_path / "d_several", ".bin") == contents(tmp_path / "d_one", ".bin")


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


@NATIVE
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


@NATIVE
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


def test_small_files_whose_headers_have_two_lines_are_read_one_by_one(tmp_path):
    schema, header = {**SCHEMA, "categorical": ["c\nd"]}, 'y,x,"c\nd"\n'
    rows = csv_of(rows_of(200)).splitlines(keepends=True)[1:]
    (tmp_path / "in").mkdir()
    for place in range(0, 200, 20):
        write(tmp_path / "in" / f"{place:03}.csv", header + "".join(rows[place : place + 20]))
    prepare(schema, [tmp_path / "in"], tmp_path / "many", test_fraction=0.2)
    prepare(
        schema,
        [write(tmp_path / "a.csv", header + "".join(rows))],
        tmp_path / "one",
        test_fraction=0.2,
    )
    assert contents(tmp_path / "many", ".bin") == contents(tmp_path / "one", ".bin")


def columns_of(block):
    """Returns two columns of numbers, as far as they are."""
    how = native.Marks(",", '"'), True, False, True, [native.NUMBERS] * 2
    return native.read_csv(block.encode(), *how).columns


@NATIVE
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


@NATIVE
@pytest.mark.parametrize("text", ["nan", "inf", "+1", " 1", "1.", ".5", "1e", "-", "1_0", "0x1"])
def test_other_texts_are_no_native_numbers(text):
    column, other = columns_of(f"{text},1\n")
    assert column.data.tobytes() == text.encode()
    assert other.tolist() == [1]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_numbers_in_text_are_those_of_texts_in_parquet(suffix, tmp_path):
    rows = rows_of()
    texts = ["1e3", "-0", "1.50", "", "0.1", "0001234567890123456789.5e-19"]
    for i, row in enumerate(rows):
        row["x"] = texts[i % len(texts)]
    for row in rows[1200:1300]:
        row["x"] = "NA"
    schema = {**SCHEMA, "missing_values": ["NA"]}
    for form in (suffix, ".parquet"):
        path = small_files(tmp_path / form, form, rows, ROWS)
        prepare(schema, [path], tmp_path / f"d{form}", **RANGES)
    names = ("numerical.bin", "label.bin", "cat_0.bin")
    for name in (f"{split}/{name}" for split in ("train", "test") for name in names):
        assert (tmp_path / f"d{suffix}" / name).read_bytes() == (
            tmp_path / "d.parquet" / name
        ).read_bytes()


@pytest.mark.parametrize("row", [120, 1700])
def test_bad_rows_after_other_texts_have_their_lines(row, tmp_path):
    rows = rows_of()
    rows[100]["x"], rows[row]["x"] = "NA", "one"
    text = csv_of(rows).partition("\n")[2]  # whose first row is read on its own, as numbers
    path = write(tmp_path / "a.csv", text)
    form = {"columns": ["y", "x", "c"], "header": False}
    schema = {**SCHEMA, "missing_values": ["NA"], "format": form}
    with pytest.raises(TaskError, match=f"a.csv, line {row + 1}, column x"):
        prepare(schema, [path], tmp_path / "d", **RANGES)


@NATIVE
def test_names_of_json_are_compared_without_their_escapes():
    text = r'{"a\\b": 1, "c": 2}' + "\n" + r'{"a\b": 3, "\u0063": 4}' + "\n"
    read = native.read_json(text.encode(), ["a\\b", "c"], [native.NUMBERS] * 2)
    assert read.names == ["a\\b", "c", "a\b"]
    assert read.columns[1].tolist() == [2, 4]
    np.testing.assert_equal(read.columns[0], [1, np.nan])

"""Text in ranges of lines, and small files together, give the dataset and errors of one file."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables_testing import contents, prepare

from dlrm.preproc.errors import TaskError

SCHEMA = {"label": "y", "numerical": [{"column": "x", "transform": "none"}], "categorical": ["c"]}
RANGES = {"split_bytes": 1 << 12, "test_fraction": 0.2}
ROWS = 2000


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


def compare(folder, one, other, **how):
    """Prepares files in some way, and others as usual; returns the lines of the first run."""
    lines = prepare(SCHEMA, [one], folder / "d", test_fraction=0.2, **how)
    prepare(SCHEMA, [other], folder / "e", test_fraction=0.2)
    assert contents(folder / "d") == contents(folder / "e")
    return lines


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_ranges_of_lines_give_the_dataset_of_one(suffix, tmp_path):
    text = csv_of(rows_of(), "\r\n") if suffix == ".csv" else json_of(rows_of())
    path = write(tmp_path / f"a{suffix}", text)
    compare(tmp_path, path, path, split_bytes=1 << 12)


def test_rows_of_several_lines_are_read_from_the_beginning_of_the_file(tmp_path):
    rows = rows_of()
    rows[1500]["c"] = "two\nlines"
    path = write(tmp_path / "a.csv", csv_of(rows))
    lines = compare(tmp_path, path, path, split_bytes=1 << 12)
    assert any("extend 1 row over 2 lines, the first at line 1502" in line for line in lines)


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
    compare(tmp_path, many, one, **split)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_bad_value_of_a_small_file_has_its_place(suffix, tmp_path):
    rows = rows_of()
    rows[1234]["x"] = "inf" if suffix == ".jsonl" else float("inf")
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
    assert contents(tmp_path / f"d{suffix}", ".bin") == contents(tmp_path / "d.parquet", ".bin")


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

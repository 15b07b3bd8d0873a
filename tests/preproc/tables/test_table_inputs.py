"""Errors name the file, place and column of bad input, what was expected and what came."""

import gc
import json
import os
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc
from tables_testing import COLUMNAR, check_bad_row, contents, prepare, write_table

from dlrm.data.tables.files import find_tables
from dlrm.data.tables.parts import Part, parts_of_file
from dlrm.preproc.errors import TaskError

SCHEMA = {
    "label": "y",
    "numerical": [{"column": "x", "transform": "none"}],
    "categorical": ["c", {"column": "i", "type": "integer"}],
    "weight": "w",
    "groups": ["g"],
    "time": "t",
}
GOOD = {
    "y": [0, 1, 0, 1],
    "x": [0.5, 1.5, 2.5, 3.5],
    "c": ["a", "b", "a", "c"],
    "i": [1, 2, 3, 4],
    "w": [1.0, 2.0, 0.0, 1.0],
    "g": ["u", "u", "v", "v"],
    "t": pa.array([0, 1, 2, 3], pa.timestamp("us", "UTC")),
}
REFUSED = (ValueError, TaskError, FileNotFoundError)


KINDS = pytest.mark.parametrize("suffix", COLUMNAR)


def write(path, rows=2, **columns):
    return write_table({**GOOD, **columns}, path, rows)


def refusal(path, tmp_path, schema=SCHEMA, **options):
    """Returns the message that refuses a file, after checking that there is no output."""
    inputs = path if isinstance(path, list) else [path]
    with pytest.raises(REFUSED) as failed:
        prepare(schema, inputs, tmp_path / "dataset", **options)
    assert not (tmp_path / "dataset").exists()
    message = str(failed.value)
    assert "\n" not in message
    return message


def text_of_bytes(*texts):
    """Returns texts that are not UTF-8, which Arrow does not check."""
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(texts))]
    return pa.StringArray.from_buffers(len(texts), *buffers[1:])


BAD_VALUES = {  # column, values, what is said of the last one
    "nan": ("x", [0.0, 1.0, 2.0, np.nan], "expected a finite number, got nan"),
    "text": ("x", ["1", "2", "3", "many"], "expected a number, got 'many'"),
    "large": ("x", [0.0, 1.0, 2.0, 1e5], "100000.0 is beyond float16 (up to 65504)"),
    "integer": ("i", pa.array([1, 2, 3, 1 << 63], pa.uint64()), "expected an integer of 64 b"),
    "fraction": ("i", [1.0, 2.0, 3.0, 4.5], "expected an integer of 64 bits, got '4.5'"),
    "utf-8": ("c", text_of_bytes(b"a", b"b", b"c", b"x\xff"), "expected UTF-8, got b'x\\xff'"),
    "half": ("g", text_of_bytes(b"a", b"b", b"\xc3\xa9", b"\xc3"), "expected UTF-8, got b'\\xc3'"),
    "label": ("y", [0, 1, 1, 2], "expected a label of 0 or 1"),
    "weight": ("w", [1.0, 1.0, 1.0, -0.5], "expected a weight of 0 or more, got -0.5"),
    "group": ("g", ["u", "u", "v", " "], "expected a group, got no value"),
    "time": ("t", pa.array([1, 2, 3, None], pa.timestamp("us", "UTC")), "expected a time, got no"),
}


CASES = [(case, ".parquet") for case in BAD_VALUES]
CASES += [(case, suffix) for suffix in [*COLUMNAR][1:] for case in ("nan", "utf-8")]


@pytest.mark.parametrize(("case", "suffix"), CASES)
def test_a_bad_value_is_named_and_can_be_put_aside(tmp_path, case, suffix):
    column, values, problem = BAD_VALUES[case]
    path = write(tmp_path / f"a{suffix}", **{column: values})
    place = f"{path}, {COLUMNAR[suffix][0]} 1, row 1"
    check_bad_row(SCHEMA, path, place, f"column {column}: {problem}", tmp_path / "dataset")


def test_far_too_many_bad_rows_end_the_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm.preproc.source.Read.text", lambda read, row: 1 / 0)
    lines = [f"{i % 2},{'oops' if i > 2 else i}\n" for i in range(3000)]
    (tmp_path / "a.csv").write_text("".join(["y,x\n", *lines]))
    schema, flags = {"label": "y", "numerical": ["x"]}, {"bad_lines": "quarantine"}
    message = refusal(tmp_path / "a.csv", tmp_path, schema, **flags)
    assert message.startswith("more than 1000 rows cannot be read, a share above --max_bad_lines")
    assert message.endswith("a.csv, line 5, column x: expected a number, got 'oops'")


@pytest.mark.parametrize("batch_rows", [1, 7, 60])
def test_batches_with_the_same_values_are_counted_and_refused_alike(
    tmp_path, monkeypatch, batch_rows
):
    texts = [b"a", b"b", b"x\xff", b"a", b"c", b"a"] * 20
    table = pa.table({"y": [i % 2 for i in range(120)], "c": text_of_bytes(*texts)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=60)
    monkeypatch.setattr("dlrm.data.tables.formats.columnar.BATCH_VALUES", 2 * batch_rows)
    options = {"bad_lines": "quarantine", "max_bad_lines": 0.2, "output_ordering": "input"}
    schema = {"label": "y", "categorical": ["c"]}
    prepare(schema, [tmp_path / "a.parquet"], tmp_path / "dataset", **options)
    (found,) = contents(tmp_path / "dataset" / "quarantine").values()
    assert found.count(b"expected UTF-8, got b'x\\xff'") == 20
    ids = np.fromfile(tmp_path / "dataset" / "train" / "cat_0.bin", np.int8)
    assert ids.tolist() == [1, 2, 1, 3, 1] * 20  # by count, then text


ZONELESS = pa.array([1, 2, 3, 4], pa.timestamp("us"))
BAD_COLUMNS = {  # values, what was expected, the type
    "c": ([["a"], [], [], []], "a value a row", "list"),
    "x": ([b"1"] * 4, "numbers", "binary"),
    "t": (ZONELESS, "timestamps with a time zone", "timestamp[us]"),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_a_column_of_another_type_is_named(tmp_path, name):
    values, expected, got = BAD_COLUMNS[name]
    message = refusal(path := write(tmp_path / "a.parquet", **{name: values}), tmp_path)
    assert message.startswith(f"{path}: column '{name}': expected {expected}, got the type {got}")


TYPES = {
    "float16": pa.array([1.0, 2.0, None, 1.0], pa.float16()),
    "binary": pa.array([b"ab", b"cd", None, b"ab"], pa.binary(2)),
    "time": pa.array([1, 2, None, 1], pa.time32("s")),
    "date": pa.array([1, 2, None, 1], pa.date32()),
    "decimal": pa.array([Decimal(1), None, Decimal("2.5"), Decimal(1)], pa.decimal256(60, 3)),
    "null": pa.nulls(4),
    "bool": pa.array([True, None, False, True]),
}
ARROW_ONLY = {
    "views": pa.array(["a", None, "b", "a"], pa.string_view()),
    "dictionary": pa.array(["a", None, "b", "a"]).dictionary_encode(),
    "numbers": pa.array([7, None, 8, 7]).dictionary_encode(),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 2, 4], ["a", None, "b"]),
}
LISTS = {
    "of views": pa.array([["a"], None, ["b", None], []], pa.list_(pa.string_view())),
    "of a fixed size": pa.array([["a"], None, ["b"], ["a"]], pa.list_(pa.string(), 1)),
    "list views": pa.array([["a"], None, ["b"], []], pa.list_view(pa.string())),
}


@pytest.mark.parametrize("suffix", [".parquet", ".arrows"])
def test_any_type_of_values_is_categorical(tmp_path, suffix):
    singles = TYPES if suffix == ".parquet" else TYPES | ARROW_ONLY
    lists = {} if suffix == ".parquet" else LISTS
    fields = [*singles, *({"column": name, "max_length": 2} for name in lists)]
    schema = {"label": "y", "categorical": fields}
    columns = singles | lists
    for name in ("d", "plain"):
        path = write(tmp_path / f"{name}{suffix}", **columns)
        prepare(schema, [path], tmp_path / name, output_ordering="input")
        columns |= {
            name: pa.array(values.to_pylist()) for name, values in (ARROW_ONLY | lists).items()
        }
    for place, values in enumerate(singles.values()):
        ids = np.fromfile(tmp_path / "d" / "train" / f"cat_{place}.bin", np.int8)
        values = pa.array(values.to_pylist())
        assert ((ids > 0) == values.is_valid().to_numpy(zero_copy_only=False)).all()
        assert len(set(ids[ids > 0])) == len({*values.drop_null().to_pylist()})
    assert contents(tmp_path / "d", ".bin") == contents(tmp_path / "plain", ".bin")


@pytest.mark.parametrize(
    "values",
    [
        pa.array([(1, 2, 3)] * 4, pa.month_day_nano_interval()),
        pa.UnionArray.from_sparse(pa.array([0] * 4, pa.int8()), [pa.array(["a"] * 4)]),
    ],
    ids=["interval", "union"],
)
def test_types_without_texts_are_refused_by_name(tmp_path, values):
    path, schema = write(tmp_path / "a.arrows", c=values), {"label": "y", "categorical": ["c"]}
    assert refusal(path, tmp_path, schema).startswith(f"{path}: column 'c': expected")


@KINDS
def test_duplicate_names(tmp_path, suffix):
    table = pa.table({**GOOD, "c2": GOOD["c"]}).rename_columns([*GOOD, "c"])
    COLUMNAR[suffix][1](table, path := tmp_path / f"a{suffix}", 2)
    assert refusal(path, tmp_path) == f"{path}: two columns are called 'c'"


@KINDS
def test_names_with_points_and_spaces_are_names(tmp_path, suffix):
    schema = {"label": "y", "numerical": ["a", "a.b", "a.b.c"], "categorical": ["x y", "ä/ö"]}
    names = ("y", *schema["numerical"], *schema["categorical"])
    table = pa.table({name: [0, 1] for name in names} | {"z": [{"a": 1}, {"a": 2}]})
    COLUMNAR[suffix][1](table, path := tmp_path / f"a{suffix}", 2)
    prepare(schema, [path], tmp_path / "d")
    assert (tmp_path / "d" / "train" / "numerical.bin").stat().st_size == 12


@KINDS
def test_a_file_of_another_schema_is_named(tmp_path, suffix):
    first, second = write(tmp_path / f"a{suffix}"), tmp_path / f"b{suffix}"
    COLUMNAR[suffix][1](pa.table(GOOD).drop_columns(["g"]), second, 2)
    message = refusal([first, second], tmp_path)
    assert message.startswith(f"{second}: no column 'g'; the columns are y, x, c, i")


def test_empty_row_groups_and_files_are_passed_over(tmp_path):
    table = pa.table(GOOD)
    with pq.ParquetWriter(tmp_path / "b.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
        writer.write_table(table.slice(0, 0))
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    inputs = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    prepare(SCHEMA, inputs, tmp_path / "d", split_bytes=1)
    prepare(SCHEMA, [write(tmp_path / "c.parquet")], tmp_path / "e")
    assert contents(tmp_path / "d", ".bin") == contents(tmp_path / "e", ".bin")


@KINDS
def test_damaged_files_are_named(tmp_path, suffix):
    path, group = write(tmp_path / f"a{suffix}"), COLUMNAR[suffix][0]
    whole = path.read_bytes()
    title = find_tables([path])[0].format.title
    for size in (0, 3, 4, 100, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = refusal(path, tmp_path, restart=True)
        assert message.startswith(f"{path}: no {title} file, or damaged (")
    if suffix != ".arrows":  # which has neither checksums nor compression
        begin = len(whole) // 2 if suffix == ".arrow" else 8
        end = max(len(whole) // 3 if suffix == ".orc" else 0, begin + 52)
        path.write_bytes(whole[:begin] + bytes(b ^ 0x5A for b in whole[begin:end]) + whole[end:])
        message = refusal(path, tmp_path, restart=True)
        assert message.startswith((f"{path}: {group} ", f"{path}, {group} ", f"{path}: no {title}"))


@pytest.mark.parametrize("compression", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_stripes_of_any_compression_are_found(tmp_path, compression):
    values = np.random.default_rng(0).integers(0, 1 << 60, 60_000)
    path, options = tmp_path / "a.orc", {"compression": compression, "batch_size": 1000}
    orc.write_table(pa.table({"c": values}), path, stripe_size=1, **options)
    parts = list(parts_of_file(0, *find_tables([path]), 1))
    assert len(parts) > 3
    read = [[batch["c"].to_numpy() for batch in part.read(["c"])] for part in parts]
    assert [sum(map(len, part)) for part in read] == [part.rows for part in parts]
    np.testing.assert_array_equal(np.concatenate(sum(read, [])), values)
    counted = [Part([part], crc=Part([part]).checksum()) for part in parts]
    whole, place = bytearray(path.read_bytes()), parts[0].size + parts[1].size // 2
    whole[place] ^= 1
    path.write_bytes(whole)
    counted[0].check()
    counted[2].check()
    with pytest.raises(ValueError, match=r"CRC-32 .* of stripes 1 to 1, .*the file has changed"):
        counted[1].check()


LABELS = [
    ({"label": {"column": "y", "positive": "1"}}, "column y: expected two values, '1' and another"),
    ({"label": {"column": "y", "positive": "7"}}, "column y: no row has the label '7'; found '0'"),
    ({"time": {"column": "t", "zone": "Mars"}}, "time t: zone: expected the name of a time zone"),
]


@pytest.mark.parametrize(("entry", "message"), LABELS)
def test_what_no_row_fits_is_named(tmp_path, entry, message):
    found = refusal(write(tmp_path / "a.parquet", y=[0, 1, 1, 2]), tmp_path, SCHEMA | entry)
    assert message in found


def test_a_label_that_is_not_among_the_negative_ones_is_a_bad_row(tmp_path):
    schema = SCHEMA | {"label": {"column": "y", "positive": "1", "negative": ["0"]}}
    path = write(tmp_path / "a.parquet", y=[0, 1, 1, 2])
    problem = "column y: expected '1' or '0', got '2'; --bad_lines quarantine leaves such rows out"
    assert refusal(path, tmp_path, schema) == f"{path}, row group 1, row 1, {problem}"
    options = {"bad_lines": "quarantine", "max_bad_lines": 1.0, "restart": True}
    prepare(schema, [path], tmp_path / "d", **options)
    assert b"expected '1' or '0', got '2'" in b"".join(
        contents(tmp_path / "d" / "quarantine").values()
    )


def test_a_number_too_large_once_standardized_is_named(tmp_path):
    """This is known only after the training rows are read."""
    schema = SCHEMA | {"numerical": ["x"]}
    train = write(tmp_path / "a.parquet", x=[0.0, 1e-6, 0.0, 1e-6])
    test = write(tmp_path / "b.parquet", x=[0.0, 0.0, 0.0, 1.0])
    message = refusal(train, tmp_path, schema, others={"test": [test]})
    assert message.startswith(f"{test}, row group 1, row 1, column x: 1.0, standardized, is beyond")


def row(**values):
    texts = {k: v for k, v in GOOD.items() if k != "t"} | {"t": ["1970-01-01T00:00:00Z"] * 4}
    return {name: cells[0] for name, cells in texts.items()} | values


def write_json(path, *rows):
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


BAD_LINES = {
    "no JSON": ("{", "no JSON"),
    "deep": ("[" * 10**5, "lists and maps nested too deeply"),
    "utf-8": ('{"y": "\udcff"}', "not UTF-8"),
    "surrogate": (row(c="\ud800"), "column c: expected text, got half of a UTF-16 pair"),
    "nan": (row(x=float("nan")), "column x: expected a finite number, got 'nan'"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_of_json_is_named(tmp_path, case):
    gc.collect()  # finalizers of others would meet the depth of a line
    line, problem = BAD_LINES[case]
    path = write_json(tmp_path / "a.jsonl", row(), row(y=1), line, row())
    check_bad_row(SCHEMA, path, f"{path}, line 3", problem, tmp_path / "d")


def test_a_bad_row_of_csv_is_put_aside_as_it_is(tmp_path):
    good = "1,0,a,1,1,u,1970-01-01T00:00:00Z"
    lines = [",".join(GOOD), good, "1,2", "1,0,\udcff,1,1,u,1970-01-01T00:00:00Z", good, good]
    lines += ['1,0,"a', 'b",x,1,u,1970-01-01T00:00:00Z', ""]
    path = tmp_path / "a.csv"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    prepare(SCHEMA, [path], tmp_path / "d", bad_lines="quarantine", max_bad_lines=0.5)
    (found,) = contents(tmp_path / "d" / "quarantine").values()
    first, second, third, end = found.decode().split("\n")
    assert first == f"{path}, line 3\texpected 7 columns (y, x, c, i, w, g, t), got 2\t1,2"
    assert second.startswith(f"{path}, line 4\tcharacter 5: not UTF-8 (byte 0xff)\t1,0,\ufffd,1,1")
    assert third.startswith(f"{path}, line 8\tcolumn i: expected an integer of 64 bits, got 'x'\t")
    assert end == ""
    assert (tmp_path / "d" / "train" / "label.bin").stat().st_size == 3


def test_names_of_folders_that_are_no_utf_8_are_named(tmp_path):
    folder = os.fsencode(tmp_path / "t") + b"/day=\xff"
    os.makedirs(folder)
    write(tmp_path / "a.parquet").rename(os.fsdecode(folder + b"/a.parquet"))
    message = refusal(tmp_path / "t", tmp_path, SCHEMA | {"categorical": ["day"]})
    assert "day=\\xff" in message
    assert "expected UTF-8" in message


def test_a_file_is_not_read_twice(tmp_path):
    path = write(tmp_path / "a.parquet")
    for inputs, others in (([path, path], {}), ([path], {"test": [tmp_path / "." / "a.parquet"]})):
        assert f"{path}: given twice" in refusal(inputs, tmp_path, others=others)


@pytest.mark.parametrize("name", ["a/b", "../../x", "x" * 300])
def test_groups_that_can_name_no_file_are_refused(tmp_path, name):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({**GOOD, name: ["u"] * 4}), path)
    message = refusal(path, tmp_path, SCHEMA | {"groups": [name]})
    assert message.startswith("groups: expected ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]

"""Every row of docs/guide/files.md does what the page says: comments are the beginnings of rows."""

import bz2
import gzip
import itertools
import lzma
import re
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tables_testing import prepare, write_table

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.draft import draft
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.samples import Seen, batches_of as drafted_batches
from dlrm.data.transform.arrays import column_of
from dlrm.data.transform.transform import Transform
from dlrm.flags import ConfigFlags, UsageError
from dlrm.preproc.errors import TaskError
from dlrm.remote.uri import SCHEMES
from dlrm.scripts.prepare import PrepareConfig
from dlrm.serving.rows.python_rows import frame_of
from dlrm.serving.rows.shares import Shares
from dlrm.serving.rows.tables import read_inputs, scoring_reader

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "files.md"
AB = "y,c\n0,a\n1,b\n"
BOTH = ["a", "b"]
COLUMNS = {"y": [0, 1], "c": BOTH}
MARKS = {"decimal": ",", "thousands": ".", "delimiter": ";"}


def test_every_row_of_the_page_is_here():
    text = re.sub(r"\| entry of .*?\n\n", "", PAGE.read_text(), flags=re.DOTALL)
    lines = re.findall(r"^\| (.+?) +\| .* \|$", text, re.MULTILINE)
    lines = [line for line in lines if not re.match("file or|CSV or|value$", line)]
    comments = re.findall("^    # (.+)", Path(__file__).read_text(), re.MULTILINE)
    for line, comment in zip(lines, comments, strict=True):
        assert line.replace("\\|", "|").startswith(comment)


def csv(*values):
    """Returns rows with the labels 0 and 1 in turn."""
    return "".join(["y,c\n", *(f"{i % 2},{value}\n" for i, value in enumerate(values))])


def put(path, content):
    """Writes a text, bytes, or columns as the kind of file of a suffix; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        return write_table(content, path)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def values_of(dataset):
    """Returns the values of the field `c` in training rows."""
    transform = Transform.load(dataset / "transform")
    ids = np.fromfile(dataset / "train" / "cat_0.bin", np.int8)
    return [transform.value(0, int(id)) if id else None for id in ids]


def numbers_of(dataset):
    return np.fromfile(dataset / "train" / "numerical.bin", np.float16).tolist()


def times_of(dataset):
    return np.fromfile(dataset / "train" / "time.bin", "<M8[us]").astype(str).tolist()


def scored(dataset, rows):
    """Returns the ids of rows in memory."""
    transform = Transform.load(dataset / "transform")
    frame = frame_of(rows, transform)
    reader = scoring_reader(transform, labeled=False)
    return read_inputs(transform, reader, pa.table(frame).to_batches()[0])[0].ids[:, 0].tolist()


@pytest.fixture
def read(tmp_path):
    """Prepares a file, and compares the values of `c` or the refusal; returns the dataset."""
    folders = (tmp_path / str(number) for number in itertools.count())

    def read(name, content, expected, found=values_of, options=(), **schema):
        path, output = put((folder := next(folders)) / name, content), folder / "dataset"
        path = path.parent if name.count("/") else path
        made = {"label": "y", "categorical": ["c"], **schema}, [path], output
        options = {"output_ordering": "input"} | dict(options)
        if isinstance(expected, str):
            with pytest.raises((ValueError, TaskError), match=expected):
                prepare(*made, **options)
            assert not output.exists()
        else:
            prepare(*made, **options)
            assert found(output) == list(expected)
        return output

    return read


def numbers(**entries):
    """Returns a schema of a number, and how to compare it."""
    number = {"column": "x", "transform": "none", **entries}
    return {"categorical": [], "numerical": [number], "found": numbers_of}


def names_of(*found, **options):
    return [file.path.name for file in find_tables(*found, **options)]


def test_names_and_folders(read, tmp_path):
    # `.parquet`, `.pq`, `.orc`, `.arrow`
    for suffix in ("parquet", "orc", "arrow"):
        again = {"orc": "ORC", "arrow": "feather", "parquet": "pq"}[suffix]
        content = put(tmp_path / f"a.{suffix}", COLUMNS).read_bytes()
        for name in (suffix, again):
            read(f"a.{name}", content, BOTH)
    for name, content in (
        ("csv", AB),
        ("CSV", AB),
        ("txt", AB),
        ("data", AB),
        ("tsv", "y\tc\n0\ta"),
    ):
        read(f"a.{name}", content, ["a"] if name == "tsv" else BOTH)
    for name in ("jsonl", "ndjson", "json"):
        read(f"a.{name}", '{"y": 0, "c": "a"}\n{"y": 1, "c": "b"}\n', BOTH)
    # `.arrows`, and a stream of Arrow by any of its names
    parts = [pa.array(list(texts)).dictionary_encode() for texts in ("ab", "cd", "cda")]
    batches = [pa.record_batch([[0, 1, 1][: len(one)], one], ["y", "c"]) for one in parts]
    with pa.ipc.new_stream(path := tmp_path / "stream", batches[0].schema) as writer:
        for batch in batches:
            writer.write(batch)
    whole = path.read_bytes()
    read("a.arrows", whole, [*"abcdcda"])
    read("b.arrow", whole, [*"abcdcda"])
    for content in (whole[:-8], whole + whole):
        read("c.arrow", content, r"c\.arrow: no Arrow file, or damaged")
    # text packed as
    packs = {"csv.GZ": gzip.compress, "csv.bz2": bz2.compress, "csv.xz": lzma.compress}
    packs |= {"csv.zst": lambda one: bytes(pa.compress(one, "zstd"))}
    packs |= {"csv": lambda one: gzip.compress(one) + gzip.compress(b"1,c\n")}
    for day, (suffix, pack) in enumerate(packs.items()):
        put(tmp_path / "in" / f"day{day}.{suffix}", pack(AB.encode()))
    prepare(
        {"label": "y", "categorical": ["c"]}, [tmp_path / "in"], tmp_path / "d", test_fraction=0
    )
    assert sorted(values_of(tmp_path / "d")) == [*"aaaaabbbbbc"]
    # a folder
    for name in ("2.csv", "sub/3.csv", "1.csv", "_4.csv"):
        put(tmp_path / "some" / name, AB)
    put(tmp_path / "other" / "x.csv", AB)
    (tmp_path / "some" / "linked").symlink_to(tmp_path / "other")
    assert names_of([tmp_path / "some"]) == ["1.csv", "2.csv", "x.csv", "3.csv"]
    (tmp_path / "some" / "broken.csv").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="broken.csv: expected a regular file or a folder"):
        find_tables([tmp_path / "some"])
    # `README.md`, `schema.yaml`
    for name in ("README.md", "schema.yaml", "a.png", "a.csv.md5", "a.csv"):
        put(tmp_path / "mixed" / name, AB)
    said = []
    assert names_of([tmp_path / "mixed"], say=said.append) == ["a.csv"]
    kinds = "1 .md, 1 .md5, 1 .png, 1 .yaml: README.md, a.csv.md5"
    assert said[0].startswith(f"left out: 4 files ({kinds}")
    # `part-00000` and other names without a suffix
    read("in/part-00000", AB, BOTH)
    for suffix in ("parquet", "jsonl", "orc", "arrow", "arrows"):
        put(tmp_path / f"b.{suffix}", {"y": [0, 1]}).rename(tmp_path / suffix)
        assert find_tables([tmp_path / suffix])[0].format.name == suffix.removesuffix("s")
    assert find_tables([put(tmp_path / "text", "ORCID,c\n1,a\n")])[0].format.name == "csv"
    # a file with another suffix
    path = put(tmp_path / "logs" / "a.log", AB)
    for given in (path, path.parent):
        with pytest.raises(ValueError, match=r"a\.log: expected the name of .*--input_format"):
            find_tables([given])
    assert names_of([path.parent], "csv") == ["a.log"]
    # files of several kinds
    put(tmp_path / "two" / "b.jsonl", "{}")
    put(tmp_path / "two" / "a.csv", AB)
    with pytest.raises(ValueError, match=r"files of one kind, got a.csv .csv., b.jsonl .jsonl."):
        find_tables([tmp_path / "two"])
    # a part of 0 bytes, or with a header alone
    put(tmp_path / "parts" / "1.csv", "")
    put(tmp_path / "parts" / "2.csv", csv())
    files = find_tables([put(tmp_path / "parts" / "3.csv", AB).parent])
    prepare({"label": "y", "categorical": ["c"]}, [tmp_path / "parts"], tmp_path / "of parts")
    assert sorted(values_of(tmp_path / "of parts")) == ["a", "b"]
    batches = [one for file in files for one, _ in file.format.batches(file, TextFormat(), ["c"])]
    assert sum(batch.num_rows for batch in batches) == 2
    # Parquet, ORC or Arrow that is cut off, or of 0 bytes
    for name in ("a.parquet", "a.orc", "a.arrow"):  # test_table_inputs cuts them
        read(name, b"", rf"{name}: no (Parquet|ORC|Arrow) file, or damaged")


LINES = '{"y": 0, "c": "a"}\n{"y": 1}\n'


@pytest.mark.parametrize(("kind", "content"), [("csv", AB), ("jsonl", LINES), ("parquet", COLUMNS)])
def test_names_of_folders(kind, content, tmp_path):
    # `day=2026-11-20/country=CH/`
    for land in ("a%2Fb", "__HIVE_DEFAULT_PARTITION__"):
        path = put(tmp_path / "in" / "c=1.10" / f"land={land}" / f"a.{kind}", content)
    schema = {"label": "y", "categorical": ["land", "c"]}
    prepare(schema, [tmp_path / "in"], tmp_path / "d", output_ordering="input")
    fitted = Transform.load(tmp_path / "d" / "transform")
    assert values_of(tmp_path / "d") == [None, None, "a/b", "a/b"]
    assert fitted.value(1, 1) == "1.10"
    assert fitted.types == ("string", "string of numbers")  # even beside JSON
    file = find_tables([path.parent.parent])[0]
    assert (file.root, file.path) == (tmp_path / "in", path)
    batch, _ = next(b for b in file.format.batches(file, TextFormat(), ["c"]) if b[0].num_rows)
    assert column_of(batch, "c").to_pylist() == ["1.10", "1.10"]
    names = {n for b in drafted_batches([file], TextFormat()) for n in b.schema.names}
    assert {"land", "c"} <= names


def test_uris():
    # `s3://`, `gs://`, `az://`, `https://`
    assert {"s3", "gs", "az", "https"} <= SCHEMES.keys()  # tests/remote reads them
    # `file://`, and schemes that are not known
    for path in ("ftp://host/x", "file:///x"):
        with pytest.raises(UsageError, match=f"--input {path}: expected"):
            ConfigFlags([("Flags", PrepareConfig)]).parse([f"--input={path}"])


def test_text(read, tmp_path):
    # quoted cells with delimiters
    content = 'y,c\n0,"a,b"\n1,"say ""hi"""\n0,"two\nlines"\n1, "x"\n'
    read("a.csv", content, ["a,b", 'say "hi"', "two\nlines", "x"])  # test_pieces reads the note
    # tab-separated text with quotes in it
    content, values = (
        'y\tc\n0\tc0\n1\t"how to\n0\tc2\n1\ttv 55"\n',
        ["c0", '"how to', "c2", 'tv 55"'],
    )
    read("a.tsv", content, values, format={"quote": "none"})
    output = read("a.tsv", content, values, options={"quote": "none"})
    assert Transform.load(output / "transform").schema.format == TextFormat(quote="none")
    # Spark's CSV
    content = 'y,c\n0,"say \\"hi\\", you"\n1,C:\\dir\n0,"a\\\\"\n'
    read("a.csv", content, ['say "hi", you', "C:\\dir", "a\\"], format={"escape": "\\"})
    # `;`, tab or `|` between cells
    content = AB.replace(",", ";")
    read("a.csv", content, "no column 'y'.*try --delimiter ';'")
    read("a.csv", content, BOTH, format={"delimiter": ";"})
    read("a.csv", content, "the delimiter '.' is not in its first", options={"delimiter": "|"})
    # no header
    read("a.csv", AB[4:], BOTH, options={"header": False}, label="0", categorical=["1"])
    read("a.csv", AB[4:], BOTH, options={"columns": ("y", "c")})
    # Latin-1, UTF-16 and other encodings
    for name, refusal in (
        ("latin-1", "line 2.*not CSV in U"),
        ("utf-16", "UTF-16; try --encoding"),
    ):
        content = csv("é", "ü").encode(name)  # test_csv_rows reads others
        read("a.csv", content, ["é", "ü"], format={"encoding": name})
        read("a.csv", content, refusal)
    # `1.234,50` and `1,234.50`
    for text, marks in (
        ("1.234,50", MARKS),
        ("1,234.50", MARKS | {"decimal": ".", "thousands": ","}),
    ):
        read("a.csv", f"y;x\n0;{text}\n1;7\n", [np.float16(1234.5), 7], **numbers(), format=marks)
        refusal = r"line 2, column x: expected a number, got '1\.5,5'"
        read("a.csv", "y;x\n0;1.5,5\n1;7\n", refusal, **numbers(), format=marks)
    lists = {"column": "c", "type": "integer", "max_length": 3, "missing_values": ["1.000"]}
    path, made = put(tmp_path / "a.csv", "y;c\n0;1.234|7\n1;\n1;7|1.000\n"), tmp_path / "lists"
    schema = {"label": "y", "categorical": [lists], "format": MARKS}
    prepare(schema, [path], made, output_ordering="input")
    ids = np.fromfile(made / "train" / "cat_0.values.bin", np.int8).tolist()
    transform = Transform.load(made / "transform")
    assert [id and transform.value(0, id) for id in ids] == ["1234", "7", "7", 0]
    marks = {"decimal": ",", "thousands": "."}  # of CSV alone
    read("a.jsonl", '{"y": 0, "x": 1.25}\n{"y": 1, "x": 7}\n', [1.25, 7], **numbers(), format=marks)
    # a byte order mark, CR LF, blank lines
    read("a.csv", "\ufeff" + AB.replace("\n", "\r\n\r\n"), BOTH)
    # a row with more or fewer cells
    content = "y,c\n0,a\n1\n1,b\n"
    read("a.csv", content, r"a\.csv, line 3: expected 2 columns \(y, c\), got 1")
    read("a.csv", content, BOTH, options={"bad_lines": "quarantine", "max_bad_lines": 0.5})
    # a quote that is not closed
    read("a.csv", 'y,c\n0,a\n1,"b\n', r"a\.csv, line 3: not CSV .*is a quote not closed")
    # a cell of a megabyte
    long = ["a" * 10**6, "b" * 10**6 + '"']
    read("a.csv", csv(long[0], f'"{long[1]}""'), long)
    # a JSON array instead of lines
    read("a.json", '[{"y": 0, "c": "a"}]', r"on each line, got an array; `jq -c .\[\]`")
    # maps in JSON
    maps, seen = {"y": [0, 1] * 2, "c": [*"abab"], "style": [{"color": "red"}] * 4}, Seen()
    output = read("a.jsonl", maps, [*"abab"])
    files = find_tables([output.parent / "a.jsonl"])
    found = draft(drafted_batches(files, TextFormat(), seen=seen), "y")
    assert (found.schema.categorical_names, "style" in seen.nested) == (["c"], True)
    read("a.jsonl", maps, "line 1, column style: expected one value", categorical=["style"])
    # a key that some rows of JSON lines do not have
    output = read("a.jsonl", '{"y": 0}\n{"y": 1, "c": "b"}\n', [None, "b"])
    (file,) = find_tables([output.parent / "a.jsonl"])
    batches = file.format.batches(file, TextFormat(), ["c"])
    assert [batch.column(0).to_pylist() for batch, _ in batches] == [[None, "b"], []]


def test_missing_values(read):
    pandas = pytest.importorskip("pandas")
    # nothing, null, NaN of pandas
    content = '{"y": 0, "c": null}\n{"y": 1, "c": "b"}\n{"y": 1, "c": ""}\n'
    output, nan = read("a.jsonl", content, [None, "b", None]), float("nan")
    assert scored(output, [[nan], [None], [pandas.NaT], ["b"]]) == [0, 0, 0, 1]
    # NaN of other tables
    content = {"y": [0, 1, 1], "c": [1.5, nan, 2.0]}
    output = read("a.parquet", content, ["1.5", None, "2"])
    assert scored(output, [["nan"], [nan], ["1.5"]]) == [0, 0, 1]
    label = {"column": "c", "positive": "2", "any_negative": True}
    refusal = "row 1, column c: expected a label that is not missing"
    read("a.parquet", content, refusal, label=label, categorical=["y"])
    read("a.parquet", content, "row 1, column c: expected a finite number", numerical=["c"])
    # `NA` in one column of prices
    content = "y,c,x\n0,NA,1.5\n1,US,NA\n1,NA,2.5\n"
    price = numbers(missing_values=["NA"])
    read("a.csv", content, ["NA", "US", "NA"], numerical=price["numerical"])
    read("a.csv", content, [1.5, 0, 2.5], **price)
    price = numbers(missing_values=["-999,00"])
    read("a.csv", "y;x\n0;-999,00\n1;1,5\n", [0, 1.5], **price, format=MARKS)
    fields = [{"column": "c", "dictionary": "s", "missing_values": ["NA"]}]
    fields.append({"column": "d", "dictionary": "s"})
    output = read("a.csv", "y,c,d\n0,US,NA\n1,NA,US\n", ["US", None], categorical=fields)
    assert scored(output, [["NA", "NA"], ["US", "US"]])[0] == 0


def test_values(read):
    # `True`, `TRUE`, `true`, a bool
    output = read("a.csv", csv("True", "FALSE", "true", "TRUE"), ["true", "false", "true", "true"])
    assert scored(output, [[True], [False], ["True"], [1], [0], [1.0]]) == [1, 2, 1, 1, 2, 1]
    assert scored(output, pa.table({"c": [True, False]})) == [1, 2]
    # `yes` and `Y`
    field = {"column": "c", "true_values": ["yes", "Y"], "false_values": ["no", "N"]}
    content = csv("yes", "N", "Y", "no")
    output = read("a.csv", content, ["true", "false", "true", "false"], categorical=[field])
    assert scored(output, [["yes"], ["Y"], [True]]) == scored(output, [[True]] * 3)
    refusal = "line 3, column c: expected true, false or 'yes'"
    read("a.csv", csv("yes", "Yes"), refusal, categorical=[field])
    field = {"column": "c", "true_values": ["2"], "false_values": ["1"]}
    content, values = csv("1", "2.0", "2", "1.0"), ["false", "true", "true", "false"]
    number = {"numerical": [{**field, "transform": "none"}]}
    output = read("a.csv", content, values, categorical=[field], **number)
    assert numbers_of(output) == [0, 1, 1, 0]
    assert scored(output, pa.table({"c": [1, 2]})) == scored(output, [[1.0], ["2"]])
    # `12.0`, `12`, 12
    output = read("a.csv", csv("12.0", "12", "1.10", "1.1"), ["12", "12", "1.10", "1.1"])
    for rows in (pa.table({"c": [12.0]}), [[12]], [["12.0"]]):
        assert scored(output, rows) == [1]
    # `00507`
    output = read("a.csv", csv("00507", "10001"), ["00507", "10001"])
    with pytest.raises(ValueError, match="column 'c': expected values such as '00507'.*the num"):
        scored(output, pa.table({"c": [507]}))
    # `2026-11-20T08:00:00Z`, a timestamp
    texts = ["2026-11-20T08:00:00", "2026-11-20 08:00:00.000", "2026-11-21", "2026-11-21 00:00:00"]
    texts += ["2026-11-20T08:00:00Z", "2026-11-20 09:00:00+01:00"]
    known = ["2026-11-20 08:00:00", "2026-11-21", "2026-11-20 08:00:00Z"]
    output = read("a.csv", csv(*texts), [one for one in known for _ in range(2)])
    moment = pa.array([known[0]]).cast(pa.timestamp("ns"))  # test_matrix has other units
    zoned = moment.cast(pa.int64()).cast(pa.timestamp("ns", "Europe/Zurich"))
    assert scored(output, pa.table({"c": moment})) == scored(output, [[known[0]]]) != [0]
    assert scored(output, pa.table({"c": zoned})) == scored(output, [[known[2]]]) != [0]


def test_times(read):
    # a time in a numerical field, a duration in any
    table = {"y": [0, 1], "c": ["a", "b"], "x": pa.array([datetime(2026, 7, 1)] * 2)}
    read("a.parquet", table, "column 'x': expected numbers, got the type", **numbers())
    table["x"] = pa.array([1, 2], pa.duration("s"))
    read("a.parquet", table, "column 'x': expected numbers, got the type", **numbers())
    read("a.parquet", table, "number of seconds", categorical=["x"])
    # epochs in s, ms, us, ns
    for unit, text in (("s", "1700000000.25"), ("ms", "1700000000250"), ("us", "1700000000250000")):
        time, expected = {"column": "t", "unit": unit}, ["2023-11-14T22:13:20.250000"]
        read("a.csv", f"y,c,t\n0,a,{text}\n", expected, times_of, time=time)
    # `20/11/2026 08:00`
    time = {"column": "t", "format": "%d/%m/%Y %H:%M", "zone": "UTC"}
    read(
        "a.csv",
        "y,c,t\n0,a,20/11/2026 08:00\n",
        ["2026-11-20T08:00:00.000000"],
        times_of,
        time=time,
    )
    refusal = "line 2, column t: expected a time of the form %d/%m"
    read("a.csv", "y,c,t\n0,a,2026-11-20\n", refusal, time=time)
    # a timestamp of ORC without a zone
    local = pa.array([datetime(2026, 7, 1, 8), datetime(2026, 1, 1, 8)])
    columns = {"y": [0, 1], "c": local, "t": local}
    read("a.orc", columns, "expected timestamps with a time zone", time="t")
    expected, time = ["2026-07-01T06", "2026-01-01T07"], {"column": "t", "zone": "Europe/Zurich"}
    read("a.orc", columns, expected, lambda d: [t[:13] for t in times_of(d)], time=time)
    read("a.orc", columns, ["2026-07-01 08:00:00", "2026-01-01 08:00:00"])
    # times of ORC before 1678 or after 2262
    columns = {"y": [0, 1], "c": pa.array([datetime(1500, 1, 1), datetime(2300, 1, 1)])}
    read("a.orc", columns, r"a\.orc: stripe 0: .*out of range for nanosecond")
    for name in ("b.parquet", "c.arrow"):
        read(name, columns, ["1500-01-01", "2300-01-01"])


def test_other_values(read):
    # ids beyond 2^53
    ids = [1_700_000_000_000_000_000 + k for k in range(3)]
    for kind in ("csv", "jsonl", "parquet", "orc", "arrow"):
        output = read(f"a.{kind}", {"y": [0, 1, 0], "c": ids}, map(str, ids))
        assert scored(output, [[id] for id in ids]) == [1, 2, 3]
    columns = {"y": [0, 1, 0], "c": [*map(float, ids)]}
    read("a.parquet", columns, "row 0, column c: expected integers, got the float 1.7e")
    # `Action|Comedy`
    columns = {"y": [0, 1], "c": ["Action|Comedy", "Action"]}
    read("a.csv", columns, columns["c"])  # test_matrix has lists
    # ratings of which 4 and 5 count
    label = {"column": "y", "positive": [4, 5], "any_negative": True}
    content = "y,c\n5,a\n3.5,b\n4.0,c\n"
    output = read("a.csv", content, [*"abc"], options={"report": True}, label=label)
    assert "y is 4 or 5" in (output / "report.html").read_text()
    assert np.fromfile(output / "train" / "label.bin", np.int8).tolist() == [1, 0, 1]
    reader = scoring_reader(Transform.load(output / "transform"), labeled=True)
    rows, bad = reader.read(pa.record_batch({"y": ["4", "4.5"], "c": ["a", "b"]}))
    assert (rows.labels.tolist(), bad) == ([True, False], [])
    refusal = "line 4, column y: expected a number such as '4' or '5', got 'bad'"
    read("a.csv", "y,c\n5,a\n3.5,b\nbad,c\n", refusal, label=label)
    # `$1,234.50`, `12.3 %`
    for text in ('"$1,234.50"', "12.3 %"):
        refusal = "line 2, column x: expected a number, got"
        read("a.csv", f"y,x\n0,{text}\n1,2\n", refusal, **numbers())
    # a number, bool or time for a field that never had one
    output = read("a.csv", csv("red", "blue"), ["red", "blue"])
    with pytest.raises(ValueError, match="column 'c': expected .*'blue'.*got the number"):
        scored(output, [[7], [None]])  # test_matrix has other kinds
    # values that training never saw
    assert scored(output, [["green"], ["red"]]) == [0, 2]
    shares = Shares((), ["c", "d"], [True, True])
    shares.add(np.zeros((2, 2), bool), np.array([[True, False], [True, True]]))
    assert shares.unseen_values_warning().startswith("no value of c occurred in the training data")

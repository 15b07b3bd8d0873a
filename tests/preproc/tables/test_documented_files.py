"""Every row of docs/guide/files.md does what the page says."""

import bz2
import gzip
import lzma
import re
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tables_testing import prepare, write_table

from dlrm.data.clicks import layout
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.columns import column_of
from dlrm.data.tables.draft import draft
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.samples import Seen, batches_of as drafted_batches
from dlrm.data.transform.transform import Transform
from dlrm.flags import ConfigFlags, UsageError
from dlrm.preproc.errors import TaskError
from dlrm.remote.uri import SCHEMES
from dlrm.scripts.prepare.flags import PrepareConfig
from dlrm.serving.rows.python_rows import frame_of
from dlrm.serving.rows.shares import Shares
from dlrm.serving.rows.tables import read_inputs, scoring_reader

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "files.md"
SCHEMA = {"label": "y", "categorical": ["c"]}
ROWS = {}


def row(*titles):
    def keep(check):
        ROWS.update(dict.fromkeys(titles, check))
        return check

    return keep


def titles():
    text = re.sub(r"\| entry of .*?\n\n", "", PAGE.read_text(), flags=re.DOTALL)
    lines = re.findall(r"^\| (.+?) +\| .* \|$", text, re.MULTILINE)
    return [one.replace("\\|", "|") for one in lines if not re.match("file or|CSV or|value$", one)]


def csv(values, header="y,c"):
    """Returns rows with the labels 0 and 1 in turn."""
    return "".join([f"{header}\n", *(f"{i % 2},{value}\n" for i, value in enumerate(values))])


def put(path, content):
    """Writes a text, bytes, or columns as the kind of file of a suffix; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        return write_table(content, path)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def numbers_of(tmp, path, schema):
    """Prepares a file, and returns the values of its numbers in the order of the rows."""
    prepare(schema, [path], tmp / "numbers", output_ordering="input", replace=True)
    return np.fromfile(tmp / "numbers" / "train" / "numerical.bin", np.float16).tolist()


def times_of(tmp, path, time):
    """Prepares a file, and returns the times of its rows."""
    values_of(tmp, path, {**SCHEMA, "time": time}, restart=True)
    return np.fromfile(tmp / "dataset" / "train" / "time.bin", "<M8[us]").astype(str).tolist()


def values_of(tmp, inputs, schema=SCHEMA, **options):
    """Prepares files, and returns the values of the field `c` in the order of the rows."""
    output = tmp / "dataset"
    options = {"output_ordering": "input"} | options
    prepare(schema, inputs if isinstance(inputs, list) else [inputs], output, **options)
    ids = np.fromfile(output / "train" / "cat_0.bin", np.int8)
    transform = Transform.load(output / layout.TRANSFORM)
    return [transform.value(0, int(id)) if id else None for id in ids]


def scored(tmp, rows):
    """Returns the ids of rows in memory by the transform of `dataset`."""
    transform = Transform.load(tmp / "dataset" / layout.TRANSFORM)
    frame = frame_of(rows, transform)
    reader = scoring_reader(transform, labeled=False)
    return read_inputs(transform, reader, frame.to_batches()[0])[0].ids[:, 0].tolist()


def refusal(tmp, path, message, schema=SCHEMA, **options):
    with pytest.raises((ValueError, TaskError), match=message):
        values_of(tmp, path, schema, **options)
    assert not (tmp / "dataset").exists()


@row(
    "`.parquet`, `.pq`, `.orc`, `.arrow`, `.feather`, `.csv`, `.tsv`, `.txt`, `.data`, `.jsonl`, "
    "`.ndjson`, `.json`"
)
def _(tmp):
    columns = {"y": [0, 1], "c": ["a", "b"]}
    lines = '{"y": 0, "c": "a"}\n{"y": 1, "c": "b"}\n'
    contents = {"orc": columns, "arrow": columns, "parquet": columns, "tsv": "y\tc\n0\ta\n1\tb\n"}
    contents |= dict.fromkeys(("csv", "txt", "data"), csv("ab"))
    contents |= dict.fromkeys(("ndjson", "json"), lines)
    for suffix, content in contents.items():
        path = put(tmp / suffix / f"a.{suffix}", content)
        again = {"orc": "ORC", "arrow": "feather", "parquet": "pq", "csv": "CSV"}
        path = path.rename(path.with_suffix(f".{again.get(suffix, suffix)}"))
        assert values_of(tmp / suffix, path) == ["a", "b"], path


def stream(path, *batches):
    with pa.ipc.new_stream(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write(batch)


@row("`.arrows`, and a stream of Arrow by any of its names")
def _(tmp):
    parts = [pa.array(list(texts)).dictionary_encode() for texts in ("ab", "cd", "cda")]
    batches = [pa.record_batch([[0, 1, 1][: len(one)], one], ["y", "c"]) for one in parts]
    for name in ("a.arrows", "b.arrow"):
        (tmp / name).mkdir()
        stream(tmp / name / name, *batches)
        assert values_of(tmp / name, tmp / name / name) == [*"abcdcda"]
    whole = (tmp / name / name).read_bytes()
    for content in (whole[:-8], whole + whole):
        (tmp / "c.arrow").write_bytes(content)
        refusal(tmp, tmp / "c.arrow", r"c\.arrow: no Arrow file, or damaged", restart=True)


@row("text packed as `.gz`, `.bz2`, `.xz`, `.zst`")
def _(tmp):
    raw = csv("ab").encode()
    packs = {"csv.GZ": gzip.compress, "csv.bz2": bz2.compress, "csv.xz": lzma.compress}
    packs |= {"csv.zst": lambda one: bytes(pa.compress(one, "zstd"))}
    packs |= {"csv": lambda one: gzip.compress(one) + gzip.compress(b"1,c\n")}
    for day, (suffix, pack) in enumerate(packs.items()):
        put(tmp / "in" / f"day{day}.{suffix}", pack(raw))
    assert values_of(tmp, tmp / "in") == [*"ab" * 5, "c"]


@row("a folder")
def _(tmp):
    for name, value in (("2.csv", "b"), ("sub/3.csv", "c"), ("1.csv", "a"), ("_4.csv", "d")):
        put(tmp / "in" / name, csv([value, value]))
    put(tmp / "other" / "x.csv", csv(["e", "e"]))
    (tmp / "in" / "linked").symlink_to(tmp / "other")
    assert values_of(tmp, tmp / "in") == [*"aabbeecc"]
    (tmp / "in" / "broken.csv").symlink_to(tmp / "nowhere")
    with pytest.raises(ValueError, match="broken.csv: expected a regular file or a folder"):
        find_tables([tmp / "in"])


@row("`README.md`, `schema.yaml`, pictures, checksums in a folder")
def _(tmp):
    for name in ("README.md", "schema.yaml", "a.png", "a.csv.md5", "a.csv"):
        put(tmp / name, csv("ab"))
    said = []
    assert [file.path.name for file in find_tables([tmp], say=said.append)] == ["a.csv"]
    (line,) = said
    assert line.startswith(
        "left out: 4 files (1 .md, 1 .md5, 1 .png, 1 .yaml: README.md, a.csv.md5"
    )


@row("`part-00000` and other names without a suffix")
def _(tmp):
    put(tmp / "in" / "part-00000", csv("ab"))
    put(tmp / "in" / "part-00001.csv", csv("bc"))
    assert values_of(tmp, tmp / "in") == [*"abbc"]
    for suffix, kind in (("parquet", "parquet"), ("jsonl", "jsonl"), ("orc", "orc")):
        put(tmp / f"a.{suffix}", {"y": [0, 1]}).rename(tmp / suffix)
        assert find_tables([tmp / suffix])[0].kind.name == kind
    for suffix in ("arrow", "arrows"):
        put(tmp / f"a.{suffix}", {"y": [0, 1]}).rename(tmp / suffix)
        assert find_tables([tmp / suffix])[0].kind.name == "arrow"
    assert find_tables([put(tmp / "text", "ORCID,c\n1,a\n")])[0].kind.name == "csv"


@row("a file with another suffix")
def _(tmp):
    path = put(tmp / "a.log", csv("ab"))
    for given in (path, tmp):
        with pytest.raises(ValueError, match=r"a\.log: expected the name of .*--input_format"):
            find_tables([given])
    assert find_tables([tmp], "csv")[0].path == path


@row("files of several kinds")
def _(tmp):
    put(tmp / "a.csv", csv("ab"))
    put(tmp / "b.jsonl", "{}")
    with pytest.raises(ValueError, match=r"files of one kind, got a.csv .csv., b.jsonl .jsonl."):
        find_tables([tmp])


@row("a part of 0 bytes, or with a header alone")
def _(tmp):
    for name, content in (("1.csv", ""), ("2.csv", csv("")), ("3.csv", csv("ab"))):
        put(tmp / "in" / name, content)
    assert values_of(tmp, tmp / "in") == ["a", "b"]
    files = find_tables([tmp / "in"])
    read = [one for file in files for one, _ in file.kind.batches(file, TextFormat(), ["c"])]
    assert sum(batch.num_rows for batch in read) == 2


@row("Parquet, ORC or Arrow that is cut off, or of 0 bytes")
def _(tmp):
    for name in ("a.parquet", "a.orc", "a.arrow"):  # test_table_inputs cuts them at other places
        path = put(tmp / name, {"y": [0, 1], "c": ["a", "b"]})
        for content in (b"", path.read_bytes()[:-1]):
            path.write_bytes(content)
            refusal(tmp, path, rf"{name}: no (Parquet|ORC|Arrow) file, or damaged", restart=True)


@row("`day=2026-11-20/country=CH/`")
def _(tmp):
    for kind, content in (("csv", csv("ab")), ("jsonl", '{"y": 0, "c": "a"}\n{"y": 1}\n')):
        path = put(tmp / kind / "c=x" / "country=CH" / f"a.{kind}", content)
        schema = {"label": "y", "categorical": ["country", "c"]}
        assert values_of(tmp / kind, tmp / kind, schema) == ["CH", "CH"]
        (file,) = find_tables([path.parent.parent])
        assert (file.root, file.path) == (tmp / kind, path)
        batch, _ = next(b for b in file.kind.batches(file, TextFormat(), ["c"]) if b[0].num_rows)
        assert column_of(batch, "c").to_pylist() == ["x", "x"]
        names = {n for b in drafted_batches([file], TextFormat()) for n in b.schema.names}
        assert {"country", "c"} <= names


@row("`s3://`, `gs://`, `az://`, `https://`")
def _(tmp):
    assert {"s3", "gs", "az", "https"} <= SCHEMES.keys()  # tests/remote reads them


@row("`file://`, and schemes that are not known")
def _(tmp):
    for path in ("ftp://host/x", "file:///x"):
        with pytest.raises(UsageError, match=f"--input {path}: expected"):
            ConfigFlags([("Flags", PrepareConfig)]).parse([f"--input={path}"])


@row('quoted cells with delimiters, `""` and line ends')
def _(tmp):
    path = put(tmp / "a.csv", 'y,c\n0,"a,b"\n1,"say ""hi"""\n0,"two\nlines"\n1, "x"\n')
    said = prepare(SCHEMA, [path], tmp / "said")
    assert any("quoted cells extend 1 row over 2 lines, the first at line 4" in one for one in said)
    assert values_of(tmp, path) == ["a,b", 'say "hi"', "two\nlines", "x"]


@row("tab-separated text with quotes in it")
def _(tmp):
    path = put(tmp / "a.tsv", 'y\tc\n0\tc0\n1\t"how to\n0\tc2\n1\ttv 55"\n')
    values = values_of(tmp, path, {**SCHEMA, "format": {"quote": "none"}})
    assert values == ["c0", '"how to', "c2", 'tv 55"']
    assert values_of(tmp / "again", path, SCHEMA, quote="none") == values
    remembered = Transform.load(tmp / "again" / "dataset" / layout.TRANSFORM).schema.format
    assert remembered == TextFormat(quote="none")


@row("Spark's CSV, with `\\\"` in quoted cells")
def _(tmp):
    path = put(tmp / "a.csv", 'y,c\n0,"say \\"hi\\", you"\n1,C:\\dir\n0,"a\\\\"\n')
    values = values_of(tmp, path, {**SCHEMA, "format": {"escape": "\\"}})
    assert values == ['say "hi", you', "C:\\dir", "a\\"]


@row("`;`, tab or `|` between cells")
def _(tmp):
    path = put(tmp / "a.csv", csv("ab").replace(",", ";"))
    refusal(tmp, path, "no column 'y'.*try --delimiter ';'")
    assert values_of(tmp, path, {**SCHEMA, "format": {"delimiter": ";"}}) == ["a", "b"]
    refusal(tmp / "other", path, "the delimiter '.' is not in its first", delimiter="|")


@row("no header")
def _(tmp):
    path = put(tmp / "a.csv", "0,a\n1,b\n")
    numbered = {"label": "0", "categorical": ["1"]}
    assert values_of(tmp, path, numbered, header=False) == ["a", "b"]
    assert values_of(tmp / "n", path, SCHEMA, columns=("y", "c")) == ["a", "b"]


@row("Latin-1, UTF-16 and other encodings")
def _(tmp):
    for encoding in ("latin-1", "utf-16"):  # test_csv_rows reads others
        path = put(tmp / encoding / "a.csv", csv(["é", "ü"]).encode(encoding))
        schema = {**SCHEMA, "format": {"encoding": encoding}}
        assert values_of(tmp / encoding, path, schema) == ["é", "ü"]
        expected = "UTF-16; try --encoding" if encoding == "utf-16" else "line 2.*not CSV in UTF-8"
        refusal(tmp / encoding / "n", path, expected)


@row("`1.234,50` and `1,234.50`")
def _(tmp):
    schema = {"label": "y", "numerical": [{"column": "x", "transform": "none"}]}
    marks = {"decimal": ",", "thousands": ".", "delimiter": ";"}
    for text, own in (("1.234,50", marks), ("1,234.50", {"thousands": ",", "delimiter": ";"})):
        path, made = put(tmp / text / "a.csv", f"y;x\n0;{text}\n1;7\n"), {**schema, "format": own}
        assert numbers_of(tmp / text, path, made) == [np.float16(1234.5), 7]
        put(path, "y;x\n0;1.5,5\n1;7\n")
        refusal(tmp / text, path, r"line 2, column x: expected a number, got '1\.5", made)
    lists = {"column": "c", "type": "integer", "max_length": 3, "missing_values": ["1.000"]}
    path = put(tmp / "a.csv", "y;c\n0;1.234|7\n1;\n1;7|1.000\n")
    made = {"label": "y", "categorical": [lists], "format": marks}
    prepare(made, [path], tmp / "lists", output_ordering="input")
    ids = np.fromfile(tmp / "lists" / "train" / "cat_0.values.bin", np.int8).tolist()
    transform = Transform.load(tmp / "lists" / layout.TRANSFORM)
    assert [id and transform.value(0, id) for id in ids] == ["1234", "7", "7", 0]
    path = put(tmp / "a.jsonl", '{"y": 0, "x": 1.234}\n{"y": 1, "x": 7}\n')
    marks.pop("delimiter")  # marks are of CSV alone, not of JSON
    assert numbers_of(tmp, path, {**schema, "format": marks}) == [np.float16(1.234), 7]


@row("a byte order mark, CR LF, blank lines")
def _(tmp):
    path = put(tmp / "a.csv", "\ufeff" + csv("ab").replace("\n", "\r\n\r\n"))
    assert values_of(tmp, path) == ["a", "b"]


@row("a row with more or fewer cells")
def _(tmp):
    path = put(tmp / "a.csv", "y,c\n0,a\n1\n1,b\n")
    refusal(tmp, path, r"a\.csv, line 3: expected 2 columns \(y, c\), got 1")
    options = {"bad_lines": "quarantine", "max_bad_lines": 0.5}
    assert values_of(tmp / "q", path, SCHEMA, **options) == ["a", "b"]
    assert "line 3" in (tmp / "q" / "dataset" / "quarantine" / "a.csv.tsv").read_text()


@row("a quote that is not closed")
def _(tmp):
    path = put(tmp / "a.csv", 'y,c\n0,a\n1,"b\n')
    refusal(tmp, path, r"a\.csv, line 3: not CSV .*is a quote not closed")


@row("a cell of a megabyte")
def _(tmp):
    path = put(tmp / "a.csv", csv(["a" * 1_000_000, '"' + "b" * 1_000_000 + '"""']))
    assert [len(value) for value in values_of(tmp, path)] == [1_000_000, 1_000_001]


@row("a JSON array instead of lines")
def _(tmp):
    path = put(tmp / "a.json", '[{"y": 0, "c": "a"}]')
    refusal(tmp, path, "on each line, got an array; `jq -c .\\[\\]`")


@row("maps in JSON")
def _(tmp):
    path = put(tmp / "a.jsonl", {"y": [0, 1] * 2, "c": [*"abab"], "style": [{"color": "red"}] * 4})
    seen = Seen()
    found = draft(drafted_batches(find_tables([path]), TextFormat(), seen=seen), "y")
    assert (found.schema.categorical_names, "style" in seen.nested) == (["c"], True)
    assert values_of(tmp, path) == [*"abab"]
    used = {"label": "y", "categorical": ["style"]}
    refusal(tmp / "n", path, "line 1, column style: expected one value", used)


@row("a key that some rows of JSON lines do not have")
def _(tmp):
    path = put(tmp / "a.jsonl", '{"y": 0}\n{"y": 1, "c": "b"}\n')
    assert values_of(tmp, path) == [None, "b"]
    file = find_tables([path])[0]
    batches = file.kind.batches(file, TextFormat(chunk_rows=1), ["c"])
    assert [batch.column(0).to_pylist() for batch, _ in batches] == [[None], ["b"], []]


@row("nothing, null, NaN of pandas")
def _(tmp):
    pandas = pytest.importorskip("pandas")
    path = put(tmp / "a.jsonl", '{"y": 0, "c": null}\n{"y": 1, "c": "b"}\n{"y": 1, "c": ""}\n')
    assert values_of(tmp, path) == [None, "b", None]
    assert scored(tmp, [[float("nan")], [None], [pandas.NaT], ["b"]]) == [0, 0, 0, 1]


@row("NaN of other tables, `nan` where all other values are numbers")
def _(tmp):
    nan = float("nan")
    path = put(tmp / "a.parquet", {"y": [0, 1, 1], "c": [1.5, nan, 2.0]})
    assert values_of(tmp, path) == ["1.5", None, "2"]
    assert scored(tmp, [["nan"], [nan], ["1.5"]]) == [0, 0, 1]
    label = {"label": {"column": "c", "positive": "2", "any_negative": True}, "categorical": ["y"]}
    message = "row (group 0, row )?1, column c: expected a "
    for schema, what in ((label, "label that is not missing"), (SCHEMA, "finite number")):
        schema = schema if schema is label else {**SCHEMA, "numerical": ["c"]}
        refusal(tmp / "other", path, message + what, schema)


@row("`NA` in one column of prices")
def _(tmp):
    path = put(tmp / "a.csv", "y,c,price\n0,NA,1.5\n1,US,NA\n1,NA,2.5\n")
    price = {"column": "price", "transform": "none", "missing_values": ["NA"]}
    schema = {**SCHEMA, "numerical": [price]}
    assert values_of(tmp, path, schema) == ["NA", "US", "NA"]
    assert numbers_of(tmp, path, schema) == [1.5, 0, 2.5]
    put(path, "y;x\n0;-999,00\n1;1,5\n")
    number = {"column": "x", "transform": "none", "missing_values": ["-999,00"]}
    marked = {"label": "y", "numerical": [number], "format": {"decimal": ",", "delimiter": ";"}}
    assert numbers_of(tmp, path, marked) == [0, 1.5]
    put(path, "y,c,d\n0,US,NA\n1,NA,US\n")
    fields = [{"column": "c", "dictionary": "s", "missing_values": ["NA"]}]
    fields.append({"column": "d", "dictionary": "s"})
    values_of(tmp / "shared", path, {"label": "y", "categorical": fields})
    assert scored(tmp / "shared", [["NA", "NA"], ["US", "US"]])[0] == 0


@row("`True`, `TRUE`, `true`, a bool")
def _(tmp):
    path = put(tmp / "a.csv", csv(["True", "FALSE", "true", "TRUE"]))
    assert values_of(tmp, path) == ["true", "false", "true", "true"]
    assert scored(tmp, [[True], [False], ["True"], [1], [0], [1.0]]) == [1, 2, 1, 1, 2, 1]
    assert scored(tmp, pa.table({"c": [True, False]})) == [1, 2]


@row("`yes` and `Y`")
def _(tmp):
    field = {"column": "c", "true_values": ["yes", "Y"], "false_values": ["no", "N"]}
    schema = {"label": "y", "categorical": [field]}
    path = put(tmp / "a.csv", csv(["yes", "N", "Y", "no"]))
    assert values_of(tmp, path, schema) == ["true", "false", "true", "false"]
    assert scored(tmp, [["yes"], ["Y"], [True]]) == scored(tmp, [[True]] * 3)
    put(path, csv(["yes", "Yes"]))
    refusal(tmp / "n", path, "line 3, column c: expected true, false or 'yes'", schema)
    numbers = {"column": "c", "true_values": ["2"], "false_values": ["1"]}
    put(path, csv(["1", "2.0", "2", "1.0"]))
    two = {"label": "y", "categorical": [numbers], "numerical": [{**numbers, "transform": "none"}]}
    assert values_of(tmp / "two", path, two) == ["false", "true", "true", "false"]
    assert numbers_of(tmp / "two", path, two) == [0, 1, 1, 0]
    assert scored(tmp / "two", pa.table({"c": [1, 2]})) == scored(tmp / "two", [[1.0], ["2"]])


@row("`12.0`, `12`, 12")
def _(tmp):
    path = put(tmp / "a.csv", csv(["12.0", "12", "1.10", "1.1"]))
    assert values_of(tmp, path) == ["12", "12", "1.10", "1.1"]
    assert scored(tmp, pa.table({"c": [12.0]})) == scored(tmp, [[12]]) == scored(tmp, [["12.0"]])


@row("`00507`")
def _(tmp):
    assert values_of(tmp, put(tmp / "a.csv", csv(["00507", "10001"]))) == ["00507", "10001"]
    with pytest.raises(ValueError, match="column 'c': expected values such as '00507'.*the num"):
        scored(tmp, pa.table({"c": [507]}))


@row("`2026-11-20T08:00:00Z`, a timestamp")
def _(tmp):
    texts = ["2026-11-20T08:00:00", "2026-11-20 08:00:00.000", "2026-11-21", "2026-11-21 00:00:00"]
    texts += ["2026-11-20T08:00:00Z", "2026-11-20 09:00:00+01:00"]
    values = values_of(tmp, put(tmp / "a.csv", csv(texts)))
    known = ["2026-11-20 08:00:00", "2026-11-21", "2026-11-20 08:00:00Z"]
    assert values == [one for one in known for _ in range(2)]
    for unit in ("s", "ms", "us", "ns"):
        naive = pa.array(["2026-11-20 08:00:00"]).cast(pa.timestamp(unit))
        zoned = naive.cast(pa.int64()).cast(pa.timestamp(unit, "Europe/Zurich"))
        assert scored(tmp, pa.table({"c": naive})) == scored(tmp, [[texts[0]]]) != [0]
        assert scored(tmp, pa.table({"c": zoned})) == scored(tmp, [[values[4]]]) != [0]


@row("epochs in s, ms, us, ns, also with a fraction")
def _(tmp):
    for unit, text in (("s", "1700000000.25"), ("ms", "1700000000250"), ("us", "1700000000250000")):
        path = put(tmp / unit / "a.csv", f"y,c,t\n0,a,{text}\n1,b,{text}\n")
        times = times_of(tmp / unit, path, {"column": "t", "unit": unit})
        assert times == ["2023-11-14T22:13:20.250000"] * 2


@row("`20/11/2026 08:00`")
def _(tmp):
    path = put(tmp / "a.csv", "y,c,t\n0,a,20/11/2026 08:00\n1,b,21/11/2026 08:00\n")
    time = {"column": "t", "format": "%d/%m/%Y %H:%M", "zone": "UTC"}
    assert times_of(tmp, path, time)[0] == "2026-11-20T08:00:00.000000"
    put(path, "y,c,t\n0,a,2026-11-20\n1,b,21/11/2026 08:00\n")
    message = "line 2, column t: expected a time of the form %d/%m"
    refusal(tmp / "n", path, message, {**SCHEMA, "time": time})


@row("a timestamp of ORC without a zone, as Hive and Spark write all of theirs")
def _(tmp):
    local = pa.array([datetime(2026, 7, 1, 8), datetime(2026, 1, 1, 8)])
    path = put(tmp / "a.orc", {"y": [0, 1], "c": local, "t": local})
    refusal(tmp, path, "expected timestamps with a time zone", {**SCHEMA, "time": "t"})
    times = times_of(tmp, path, {"column": "t", "zone": "Europe/Zurich"})
    assert [time[:13] for time in times] == ["2026-07-01T06", "2026-01-01T07"]
    values = values_of(tmp / "values", path)
    assert values == ["2026-07-01 08:00:00", "2026-01-01 08:00:00"]


@row("times of ORC before 1678 or after 2262")
def _(tmp):
    columns = {"y": [0, 1], "c": pa.array([datetime(1500, 1, 1), datetime(2300, 1, 1)])}
    path = put(tmp / "a.orc", columns)
    refusal(tmp, path, r"a\.orc: stripe 0: .*out of range for nanosecond")
    for name in ("b.parquet", "c.arrow"):
        path = put(tmp / name / name, columns)
        assert values_of(tmp / name, path) == ["1500-01-01", "2300-01-01"]


@row("ids beyond 2^53")
def _(tmp):
    ids = [1_700_000_000_000_000_000 + k for k in range(3)]
    for kind in ("csv", "jsonl", "parquet", "orc", "arrow"):
        path = put(tmp / kind / f"a.{kind}", {"y": [0, 1, 0], "c": ids})
        assert values_of(tmp / kind, path) == list(map(str, ids))
        assert scored(tmp / kind, [[id] for id in ids]) == [1, 2, 3]
    path = put(tmp / "floats.parquet", {"y": [0, 1, 0], "c": [*map(float, ids)]})
    refusal(tmp, path, "row 0, column c: expected integers, got the float 1.7e")


@row("`Action|Comedy`")
def _(tmp):
    columns = {"y": [0, 1], "c": ["Action|Comedy", "Action"]}
    assert values_of(tmp, put(tmp / "a.csv", columns)) == ["Action|Comedy", "Action"]
    schema = {"label": "y", "categorical": [{"column": "c", "max_length": 3}]}
    for kind in ("csv", "jsonl", "parquet"):
        output = tmp / f"lists {kind}"
        prepare(schema, [put(tmp / f"a.{kind}", columns)], output, output_ordering="input")
        lengths = np.fromfile(output / "train" / "cat_0.lengths.bin", np.int8)
        assert lengths.tolist() == [2, 1], kind


@row("ratings of which 4 and 5 count")
def _(tmp):
    path = put(tmp / "a.csv", "y,c\n5,a\n3.5,b\n4.0,c\n")
    label = {"column": "y", "positive": [4, 5], "any_negative": True}
    values_of(tmp, path, {**SCHEMA, "label": label}, report=True)
    assert "y is 4 or 5" in (tmp / "dataset" / "report.html").read_text()
    assert np.fromfile(tmp / "dataset" / "train" / "label.bin", np.int8).tolist() == [1, 0, 1]
    transform = Transform.load(tmp / "dataset" / layout.TRANSFORM)
    frame = pa.table({"y": ["4", "4.5"], "c": ["a", "b"]})
    rows, bad = scoring_reader(transform, labeled=True).read(frame.to_batches()[0])
    assert (rows.labels.tolist(), bad) == ([True, False], [])
    put(path, "y,c\n5,a\n3.5,b\nbad,c\n")
    message = "line 4, column y: expected a number such as '4' or '5', got 'bad'"
    refusal(tmp / "other", path, message, {**SCHEMA, "label": label})


@row("`$1,234.50`, `12.3 %`")
def _(tmp):
    for place, text in enumerate(('"$1,234.50"', "12.3 %")):
        path = put(tmp / str(place) / "a.csv", f"y,x\n0,{text}\n1,2\n")
        schema = {"label": "y", "numerical": ["x"]}
        refusal(path.parent, path, "line 2, column x: expected a number, got", schema)


@row("a number, bool or time for a field that never had one")
def _(tmp):
    values_of(tmp, put(tmp / "a.csv", csv(["red", "blue"])))
    for kind, value in (("number", 7), ("boolean", True), ("time", date(2026, 11, 20))):
        with pytest.raises(ValueError, match=f"column 'c': expected .*'blue'.*got the {kind}"):
            scored(tmp, [[value], [None]])


@row("values that training never saw")
def _(tmp):
    values_of(tmp, put(tmp / "a.csv", csv(["red", "blue"])))
    assert scored(tmp, [["green"], ["red"]]) == [0, 2]
    shares = Shares((), ["c", "d"], [True, True])
    shares.add(np.zeros((2, 2), bool), np.array([[True, False], [True, True]]))
    assert shares.strangers().startswith("no value of c occurred in the training data")


@pytest.mark.parametrize("title", ROWS)
def test_the_page_says_what_happens(title, tmp_path):
    ROWS[title](tmp_path)


def test_every_row_of_the_page_is_run():
    assert titles() == list(ROWS)

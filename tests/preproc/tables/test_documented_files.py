"""Every row of docs/guide/files.md does what the page says."""

import bz2
import gzip
import json
import lzma
import re
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, orc
from tables_testing import COLUMNAR, prepare

from dlrm.data.clicks import layout
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.columns import column_of
from dlrm.data.tables.draft import draft
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.samples import Seen, batches_of as drafted_batches
from dlrm.data.transform.transform import Transform
from dlrm.flags import ConfigFlags, UsageError
from dlrm.preproc.execution.engines import TaskError
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
    table = pa.table({"y": [0, 1], "c": ["a", "b"]})
    for name in ("c.orc", "c.ARROW", "c.feather"):
        (tmp / name).mkdir()
        (orc.write_table if name == "c.orc" else feather.write_feather)(table, tmp / name / name)
        assert values_of(tmp / name, tmp / name / name) == ["a", "b"]
    for name in ("a.CSV", "a.txt", "a.data"):
        folder = tmp / name
        folder.mkdir()
        (folder / name).write_text(csv("ab"))
        assert values_of(folder, folder / name) == ["a", "b"]
    for name in ("b.tsv", "b.NDJSON", "b.json", "b.Parquet", "b.pq"):
        folder = tmp / name
        folder.mkdir()
        if name.endswith("tsv"):
            (folder / name).write_text(csv("ab").replace(",", "\t"))
        elif "j" in name.lower():
            (folder / name).write_text('{"y": 0, "c": "a"}\n{"y": 1, "c": "b"}\n')
        else:
            pq.write_table(table, folder / name)
        assert values_of(folder, folder / name) == ["a", "b"]


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
    packed = {"day1.csv.GZ": gzip.compress(raw), "day2.csv.bz2": bz2.compress(raw)}
    packed |= {"day3.csv.xz": lzma.compress(raw), "day4.csv.zst": bytes(pa.compress(raw, "zstd"))}
    packed |= {"day5.csv": gzip.compress(raw) + gzip.compress(b"1,c\n")}
    (tmp / "in").mkdir()
    for name, content in packed.items():
        (tmp / "in" / name).write_bytes(content)
    assert values_of(tmp, tmp / "in") == [*"ab" * 5, "c"]


@row("a folder")
def _(tmp):
    for name, value in (("2.csv", "b"), ("sub/3.csv", "c"), ("1.csv", "a"), ("_4.csv", "d")):
        (tmp / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp / "in" / name).write_text(csv([value, value]))
    (tmp / "other").mkdir()
    (tmp / "other" / "x.csv").write_text(csv(["e", "e"]))
    (tmp / "in" / "linked").symlink_to(tmp / "other")
    assert values_of(tmp, tmp / "in") == [*"aabbeecc"]
    (tmp / "in" / "broken.csv").symlink_to(tmp / "nowhere")
    with pytest.raises(ValueError, match="broken.csv: expected a regular file or a folder"):
        find_tables([tmp / "in"])


@row("`README.md`, `schema.yaml`, pictures, checksums in a folder")
def _(tmp):
    for name in ("README.md", "schema.yaml", "a.png", "a.csv.md5", "a.csv"):
        (tmp / name).write_text(csv("ab"))
    said = []
    assert [file.path.name for file in find_tables([tmp], say=said.append)] == ["a.csv"]
    assert re.match(
        r"left out: 4 files \(1 .md, 1 .md5, 1 .png, 1 .yaml: README.md, a.csv.md5, a.png, ...\)",
        said[0],
    )
    assert len(said) == 1


@row("`part-00000` and other names without a suffix")
def _(tmp):
    (tmp / "in").mkdir()
    (tmp / "in" / "part-00000").write_text(csv("ab"))
    (tmp / "in" / "part-00001.csv").write_text(csv("bc"))
    assert values_of(tmp, tmp / "in") == [*"abbc"]
    pq.write_table(pa.table({"y": [0, 1]}), tmp / "table")
    (tmp / "lines").write_text('{"y": 0}\n')
    orc.write_table(pa.table({"y": [0, 1]}), tmp / "stripes")
    feather.write_feather(pa.table({"y": [0, 1]}), tmp / "batches")
    stream(tmp / "stream", pa.record_batch({"y": [0, 1]}))
    (tmp / "text").write_text("ORCID,c\n1,a\n")
    names = ("table", "lines", "stripes", "batches", "stream", "text")
    kinds = [find_tables([tmp / name])[0].kind.name for name in names]
    assert kinds == ["parquet", "jsonl", "orc", "arrow", "arrow", "csv"]


@row("a file with another suffix")
def _(tmp):
    (tmp / "a.log").write_text(csv("ab"))
    for given in (tmp / "a.log", tmp):
        with pytest.raises(ValueError, match=r"a\.log: expected the name of .*--input_format"):
            find_tables([given])
    assert find_tables([tmp], "csv")[0].path == tmp / "a.log"


@row("files of several kinds")
def _(tmp):
    (tmp / "a.csv").write_text(csv("ab"))
    (tmp / "b.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"files of one kind, got a.csv .csv., b.jsonl .jsonl."):
        find_tables([tmp])


@row("a part of 0 bytes, or with a header alone")
def _(tmp):
    (tmp / "in").mkdir()
    for name, content in (("1.csv", ""), ("2.csv", csv("")), ("3.csv", csv("ab"))):
        (tmp / "in" / name).write_text(content)
    assert values_of(tmp, tmp / "in") == ["a", "b"]
    counted = 0
    for file in find_tables([tmp / "in"]):
        counted += sum(batch.num_rows for batch, _ in file.kind.batches(file, TextFormat(), ["c"]))
    assert counted == 2


@row("Parquet, ORC or Arrow that is cut off, or of 0 bytes")
def _(tmp):
    table = pa.table({"y": [0, 1], "c": ["a", "b"]})
    writers = {"a.parquet": pq.write_table, "a.orc": orc.write_table}
    for name, write in (writers | {"a.arrow": feather.write_feather}).items():
        write(table, tmp / name)
        whole = (tmp / name).read_bytes()
        for end in (0, len(whole) // 2, len(whole) - 1):
            (tmp / name).write_bytes(whole[:end])
            message = rf"{name}: no (Parquet|ORC|Arrow) file, or damaged"
            refusal(tmp, tmp / name, message, restart=True)


@row("`day=2026-11-20/country=CH/`")
def _(tmp):
    for kind, content in (("csv", csv("ab")), ("jsonl", '{"y": 0, "c": "a"}\n{"y": 1}\n')):
        folder = tmp / kind / "c=x" / "country=CH"
        folder.mkdir(parents=True)
        (folder / f"a.{kind}").write_text(content)
        schema = {"label": "y", "categorical": ["country", "c"]}
        assert values_of(tmp / kind, tmp / kind, schema) == ["CH", "CH"]
        file = next(one for one in find_tables([tmp / kind / "c=x"]) if one.kind.name == kind)
        file = file._replace(root=tmp / kind)
        batch, _ = next(b for b in file.kind.batches(file, TextFormat(), ["c"]) if b[0].num_rows)
        assert column_of(batch, "c").to_pylist() == ["x", "x"]
        inner = next(f for f in find_tables([folder.parent]) if f.kind.name == kind)
        assert (inner.root, inner.path.parent) == (tmp / kind, folder)
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
    (tmp / "a.csv").write_text('y,c\n0,"a,b"\n1,"say ""hi"""\n0,"two\nlines"\n1, "x"\n')
    said = prepare(SCHEMA, [tmp / "a.csv"], tmp / "said")
    assert any("quoted cells extend 1 row over 2 lines, the first at line 4" in one for one in said)
    values = values_of(tmp, tmp / "a.csv")
    assert values == ["a,b", 'say "hi"', "two\nlines", "x"]


@row("tab-separated text with quotes in it")
def _(tmp):
    lines = [f"{i % 2}\tc{i}\n" for i in range(8)]
    lines[2], lines[5] = '0\t"how to\n', '1\ttv 55"\n'
    (tmp / "a.tsv").write_text("y\tc\n" + "".join(lines))
    quiet = {**SCHEMA, "format": {"quote": "none"}}
    values = values_of(tmp, tmp / "a.tsv", quiet)
    assert values == ["c0", "c1", '"how to', "c3", "c4", 'tv 55"', "c6", "c7"]
    drafted = values_of(tmp / "again", tmp / "a.tsv", SCHEMA, quote="none")
    assert drafted == values
    remembered = Transform.load(tmp / "again" / "dataset" / layout.TRANSFORM).schema.format
    assert remembered == TextFormat(quote="none")


@row("Spark's CSV, with `\\\"` in quoted cells")
def _(tmp):
    (tmp / "a.csv").write_text('y,c\n0,"say \\"hi\\", you"\n1,C:\\dir\n0,"a\\\\"\n')
    values = values_of(tmp, tmp / "a.csv", {**SCHEMA, "format": {"escape": "\\"}})
    assert values == ['say "hi", you', "C:\\dir", "a\\"]


@row("`;`, tab or `|` between cells")
def _(tmp):
    (tmp / "a.csv").write_text(csv("ab").replace(",", ";"))
    refusal(tmp, tmp / "a.csv", "no column 'y'.*try --delimiter ';'")
    values = values_of(tmp, tmp / "a.csv", {**SCHEMA, "format": {"delimiter": ";"}})
    assert values == ["a", "b"]
    refusal(tmp / "other", tmp / "a.csv", "the delimiter '.' is not in its first", delimiter="|")


@row("no header")
def _(tmp):
    (tmp / "a.csv").write_text("0,a\n1,b\n")
    numbered = {"label": "0", "categorical": ["1"]}
    assert values_of(tmp, tmp / "a.csv", numbered, header=False) == ["a", "b"]
    assert values_of(tmp / "n", tmp / "a.csv", SCHEMA, columns=("y", "c")) == ["a", "b"]


@row("Latin-1, UTF-16 and other encodings")
def _(tmp):
    for encoding in ("latin-1", "utf-16", "cp1252"):
        folder = tmp / encoding
        folder.mkdir()
        (folder / "a.csv").write_bytes(csv(["é", "ü"]).encode(encoding))
        schema = {**SCHEMA, "format": {"encoding": encoding}}
        assert values_of(folder, folder / "a.csv", schema) == ["é", "ü"]
        expected = "UTF-16; try --encoding" if encoding == "utf-16" else "line 2.*not CSV in UTF-8"
        refusal(folder / "n", folder / "a.csv", expected)


@row("`1.234,50` and `1,234.50`")
def _(tmp):
    schema = {"label": "y", "numerical": [{"column": "x", "transform": "none"}]}
    for text, marks in (
        ("1.234,50", {"decimal": ",", "thousands": ".", "delimiter": ";"}),
        ("1,234.50", {"thousands": ",", "delimiter": ";"}),
    ):
        folder = tmp / text
        folder.mkdir()
        (folder / "a.csv").write_text(f"y;x\n0;{text}\n1;7\n")
        made = {**schema, "format": marks}
        prepare(made, [folder / "a.csv"], folder / "d", output_ordering="input")
        numbers = np.fromfile(folder / "d" / "train" / "numerical.bin", np.float16)
        assert numbers.tolist() == [np.float16(1234.5), 7]
        (folder / "a.csv").write_text("y;x\n0;1.5,5\n1;7\n")
        refusal(folder, folder / "a.csv", r"line 2, column x: expected a number, got '1\.5", made)
    marks = {"decimal": ",", "thousands": "."}  # of CSV alone, not of JSON
    lists = {"column": "t", "type": "integer", "max_length": 3, "missing_values": ["1.000"]}
    (tmp / "a.csv").write_text("y;t\n0;1.234|7\n1;\n1;7|1.000\n")
    made = {"label": "y", "categorical": [lists], "format": {**marks, "delimiter": ";"}}
    prepare(made, [tmp / "a.csv"], tmp / "lists", output_ordering="input")
    ids = np.fromfile(tmp / "lists" / "train" / "cat_0.values.bin", np.int8).tolist()
    transform = Transform.load(tmp / "lists" / layout.TRANSFORM)
    assert [id and transform.value(0, id) for id in ids] == ["1234", "7", "7", 0]
    (tmp / "a.jsonl").write_text('{"y": 0, "x": 1.234}\n{"y": 1, "x": 7}\n')
    prepare({**schema, "format": marks}, [tmp / "a.jsonl"], tmp / "json", output_ordering="input")
    numbers = np.fromfile(tmp / "json" / "train" / "numerical.bin", np.float16)
    assert numbers.tolist() == [np.float16(1.234), 7]


@row("a byte order mark, CR LF, blank lines")
def _(tmp):
    content = "\ufeff" + csv("ab").replace("\n", "\r\n\r\n")
    (tmp / "a.csv").write_bytes(content.encode())
    assert values_of(tmp, tmp / "a.csv") == ["a", "b"]


@row("a row with more or fewer cells")
def _(tmp):
    (tmp / "a.csv").write_text("y,c\n0,a\n1\n1,b\n")
    refusal(tmp, tmp / "a.csv", r"a\.csv, line 3: expected 2 columns \(y, c\), got 1")
    options = {"bad_lines": "quarantine", "max_bad_lines": 0.5}
    assert values_of(tmp / "q", tmp / "a.csv", SCHEMA, **options) == ["a", "b"]
    assert "line 3" in (tmp / "q" / "dataset" / "quarantine" / "a.csv.tsv").read_text()


@row("a quote that is not closed")
def _(tmp):
    (tmp / "a.csv").write_text('y,c\n0,a\n1,"b\n')
    refusal(tmp, tmp / "a.csv", r"a\.csv, line 3: not CSV .*is a quote not closed")


@row("a cell of a megabyte")
def _(tmp):
    (tmp / "a.csv").write_text(csv(["a" * 1_000_000, '"' + "b" * 1_000_000 + '"""']))
    assert [len(value) for value in values_of(tmp, tmp / "a.csv")] == [1_000_000, 1_000_001]


@row("a JSON array instead of lines")
def _(tmp):
    (tmp / "a.json").write_text('[{"y": 0, "c": "a"}]')
    refusal(tmp, tmp / "a.json", "on each line, got an array; `jq -c .\\[\\]`")


@row("maps in JSON")
def _(tmp):
    lines = [{"y": i % 2, "c": "ab"[i % 2], "style": {"color": "red"}} for i in range(4)]
    (tmp / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen = Seen()
    found = draft(drafted_batches(find_tables([tmp]), TextFormat(), seen=seen), "y")
    assert found.schema.categorical_names == ["c"]
    assert "style" in seen.nested
    assert values_of(tmp, tmp / "a.jsonl") == ["a", "b", "a", "b"]
    used = {"label": "y", "categorical": ["style"]}
    refusal(tmp / "n", tmp / "a.jsonl", "line 1, column style: expected one value", used)


@row("a key that some rows of JSON lines do not have")
def _(tmp):
    (tmp / "a.jsonl").write_text('{"y": 0}\n{"y": 1, "c": "b"}\n')
    assert values_of(tmp, tmp / "a.jsonl") == [None, "b"]
    file = find_tables([tmp / "a.jsonl"])[0]
    one = TextFormat(chunk_rows=1)
    batches = file.kind.batches(file, one, ["c"])
    assert [batch.column(0).to_pylist() for batch, _ in batches] == [
        [None],
        ["b"],
        [],
    ]


@row("nothing, null, NaN of pandas")
def _(tmp):
    pandas = pytest.importorskip("pandas")
    (tmp / "a.jsonl").write_text('{"y": 0, "c": null}\n{"y": 1, "c": "b"}\n{"y": 1, "c": ""}\n')
    assert values_of(tmp, tmp / "a.jsonl") == [None, "b", None]
    frame = pandas.DataFrame({"c": [float("nan"), None, pandas.NaT, "b"]}, dtype=object)
    assert scored(tmp, frame[["c"]].to_numpy().tolist()) == [0, 0, 0, 1]


@row("NaN of other tables, `nan` where all other values are numbers")
def _(tmp):
    nan = float("nan")
    pq.write_table(pa.table({"y": [0, 1, 1], "c": [1.5, nan, 2.0]}), tmp / "a.parquet")
    assert values_of(tmp, tmp / "a.parquet") == ["1.5", None, "2"]
    assert scored(tmp, [["nan"], [nan], ["1.5"]]) == [0, 0, 1]
    label = {"label": {"column": "c", "positive": "2", "any_negative": True}, "categorical": ["y"]}
    (other := tmp / "other").mkdir()
    message = "row 1, column c: expected a label that is not missing"
    refusal(other, tmp / "a.parquet", message, label)
    number = {**SCHEMA, "numerical": ["c"]}
    refusal(other, tmp / "a.parquet", "row 1, column c: expected a finite number", number)


@row("`NA` in one column of prices")
def _(tmp):
    (tmp / "a.csv").write_text("y,c,price\n0,NA,1.5\n1,US,NA\n1,NA,2.5\n")
    price = {"column": "price", "transform": "none", "missing_values": ["NA"]}
    schema = {**SCHEMA, "numerical": [price]}
    assert values_of(tmp, tmp / "a.csv", schema) == ["NA", "US", "NA"]
    numbers = np.fromfile(tmp / "dataset" / "train" / "numerical.bin", np.float16)
    assert numbers.tolist() == [1.5, 0, 2.5]
    (tmp / "a.csv").write_text("y;x\n0;-999,00\n1;1,5\n")
    number = {"column": "x", "transform": "none", "missing_values": ["-999,00"]}
    marked = {"label": "y", "numerical": [number], "format": {"decimal": ",", "delimiter": ";"}}
    prepare(marked, [tmp / "a.csv"], tmp / "marked", output_ordering="input")
    numbers = np.fromfile(tmp / "marked" / "train" / "numerical.bin", np.float16)
    assert numbers.tolist() == [0, 1.5]
    (tmp / "a.csv").write_text("y,c,d\n0,US,NA\n1,NA,US\n")
    fields = [{"column": "c", "dictionary": "s", "missing_values": ["NA"]}]
    fields.append({"column": "d", "dictionary": "s"})
    values_of(tmp / "shared", tmp / "a.csv", {"label": "y", "categorical": fields})
    assert scored(tmp / "shared", [["NA", "NA"], ["US", "US"]])[0] == 0


@row("`True`, `TRUE`, `true`, a bool")
def _(tmp):
    (tmp / "a.csv").write_text(csv(["True", "FALSE", "true", "TRUE"]))
    assert values_of(tmp, tmp / "a.csv") == ["true", "false", "true", "true"]
    assert scored(tmp, [[True], [False], ["True"], [1], [0], [1.0]]) == [1, 2, 1, 1, 2, 1]
    assert scored(tmp, pa.table({"c": [True, False]})) == [1, 2]


@row("`yes` and `Y`")
def _(tmp):
    field = {"column": "c", "true_values": ["yes", "Y"], "false_values": ["no", "N"]}
    schema = {"label": "y", "categorical": [field]}
    (tmp / "a.csv").write_text(csv(["yes", "N", "Y", "no"]))
    assert values_of(tmp, tmp / "a.csv", schema) == ["true", "false", "true", "false"]
    assert scored(tmp, [["yes"], ["Y"], [True]]) == scored(tmp, [[True]] * 3)
    numbers = {"column": "c", "true_values": ["2"], "false_values": ["1"]}
    (tmp / "c.csv").write_text(csv(["1", "2.0", "2", "1.0"]))
    two = {"label": "y", "categorical": [numbers], "numerical": [{**numbers, "transform": "none"}]}
    assert values_of(tmp / "two", tmp / "c.csv", two) == ["false", "true", "true", "false"]
    read = np.fromfile(tmp / "two" / "dataset" / "train" / "numerical.bin", np.float16)
    assert read.tolist() == [0, 1, 1, 0]
    typed = pa.table({"c": [1, 2]})
    assert scored(tmp / "two", typed) == scored(tmp / "two", [[1.0], ["2"]])
    (tmp / "b.csv").write_text(csv(["yes", "Yes"]))
    refusal(
        tmp / "n", tmp / "b.csv", "b.csv, line 3, column c: expected true, false or 'yes'", schema
    )


@row("`12.0`, `12`, 12")
def _(tmp):
    (tmp / "a.csv").write_text(csv(["12.0", "12", "1.10", "1.1"]))
    assert values_of(tmp, tmp / "a.csv") == ["12", "12", "1.10", "1.1"]
    assert scored(tmp, pa.table({"c": [12.0]})) == scored(tmp, [[12]]) == scored(tmp, [["12.0"]])


@row("`00507`")
def _(tmp):
    (tmp / "a.csv").write_text(csv(["00507", "10001"]))
    assert values_of(tmp, tmp / "a.csv") == ["00507", "10001"]
    with pytest.raises(
        ValueError, match="column 'c': expected values such as '00507'.*got the num"
    ):
        scored(tmp, pa.table({"c": [507]}))


@row("`2026-11-20T08:00:00Z`, a timestamp")
def _(tmp):
    texts = ["2026-11-20T08:00:00", "2026-11-20 08:00:00.000", "2026-11-21", "2026-11-21 00:00:00"]
    (tmp / "a.csv").write_text(csv([*texts, "2026-11-20T08:00:00Z", "2026-11-20 09:00:00+01:00"]))
    values = values_of(tmp, tmp / "a.csv")
    assert values[0] == values[1] == "2026-11-20 08:00:00"
    assert values[2] == values[3] == "2026-11-21"
    assert values[4] == values[5] == "2026-11-20 08:00:00Z"
    for unit in ("s", "ms", "us", "ns"):
        naive = pa.array(["2026-11-20 08:00:00"]).cast(pa.timestamp(unit))
        zoned = naive.cast(pa.int64()).cast(pa.timestamp(unit, "Europe/Zurich"))
        assert scored(tmp, pa.table({"c": naive})) == scored(tmp, [[texts[0]]]) != [0]
        assert scored(tmp, pa.table({"c": zoned})) == scored(tmp, [[values[4]]]) != [0]


@row("epochs in s, ms, us, ns, also with a fraction")
def _(tmp):
    for unit, text in (("s", "1700000000.25"), ("ms", "1700000000250"), ("us", "1700000000250000")):
        (tmp / unit).mkdir()
        (tmp / unit / "a.csv").write_text(f"y,c,t\n0,a,{text}\n1,b,{text}\n")
        schema = {**SCHEMA, "time": {"column": "t", "unit": unit}}
        values_of(tmp / unit, tmp / unit / "a.csv", schema)
        times = np.fromfile(tmp / unit / "dataset" / "train" / "time.bin", np.int64)
        assert times.tolist() == [1_700_000_000_250_000] * 2


@row("`20/11/2026 08:00`")
def _(tmp):
    (tmp / "a.csv").write_text("y,c,t\n0,a,20/11/2026 08:00\n1,b,21/11/2026 08:00\n")
    time = {"column": "t", "format": "%d/%m/%Y %H:%M", "zone": "UTC"}
    values_of(tmp, tmp / "a.csv", {**SCHEMA, "time": time})
    times = np.fromfile(tmp / "dataset" / "train" / "time.bin", np.int64)
    assert times.astype("datetime64[us]").astype(str).tolist()[0] == "2026-11-20T08:00:00.000000"
    (tmp / "a.csv").write_text("y,c,t\n0,a,2026-11-20\n1,b,21/11/2026 08:00\n")
    schema = {**SCHEMA, "time": time}
    refusal(tmp / "n", tmp / "a.csv", "line 2, column t: expected a time of the form %d/%m", schema)


@row("a timestamp of ORC without a zone, as Hive and Spark write all of theirs")
def _(tmp):
    local = pa.array([datetime(2026, 7, 1, 8), datetime(2026, 1, 1, 8)])
    table = pa.table({"y": [0, 1], "c": local, "t": local})
    orc.write_table(table, tmp / "a.orc")
    refusal(tmp, tmp / "a.orc", "expected timestamps with a time zone", {**SCHEMA, "time": "t"})
    time = {"column": "t", "zone": "Europe/Zurich"}
    values = values_of(tmp, tmp / "a.orc", {**SCHEMA, "time": time}, restart=True)
    assert values == ["2026-07-01 08:00:00", "2026-01-01 08:00:00"]
    times = np.fromfile(tmp / "dataset" / "train" / "time.bin", "<M8[us]")
    assert times.astype("M8[h]").astype(str).tolist() == ["2026-07-01T06", "2026-01-01T07"]


@row("times of ORC before 1678 or after 2262")
def _(tmp):
    table = pa.table({"y": [0, 1], "c": pa.array([datetime(1500, 1, 1), datetime(2300, 1, 1)])})
    orc.write_table(table, tmp / "a.orc")
    refusal(tmp, tmp / "a.orc", r"a\.orc: stripe 0: .*out of range for nanosecond")
    for name, write in (("b.parquet", pq.write_table), ("c.arrow", feather.write_feather)):
        (tmp / name).mkdir()
        write(table, tmp / name / name)
        assert values_of(tmp / name, tmp / name / name) == ["1500-01-01", "2300-01-01"]


@row("ids beyond 2^53")
def _(tmp):
    ids = [1_700_000_000_000_000_000 + k for k in range(3)]
    for kind in ("csv", "jsonl", "parquet", "orc", "arrow"):
        (tmp / kind).mkdir()
        path = tmp / kind / f"a.{kind}"
        if kind == "csv":
            path.write_text(csv(ids))
        elif kind == "jsonl":
            path.write_text("".join(f'{{"y": {i % 2}, "c": {id}}}\n' for i, id in enumerate(ids)))
        else:
            COLUMNAR[path.suffix][1](pa.table({"y": [0, 1, 0], "c": ids}), path, 2)
        assert values_of(tmp / kind, path) == list(map(str, ids))
        assert scored(tmp / kind, [[id] for id in ids]) == [1, 2, 3]
    pq.write_table(pa.table({"y": [0, 1, 0], "c": [*map(float, ids)]}), tmp / "floats.parquet")
    refusal(tmp, tmp / "floats.parquet", "row 0, column c: expected integers, got the float 1.7e")


@row("`Action|Comedy`")
def _(tmp):
    (tmp / "a.csv").write_text(csv(["Action|Comedy", "Action"]))
    assert values_of(tmp, tmp / "a.csv") == ["Action|Comedy", "Action"]
    schema = {"label": "y", "categorical": [{"column": "c", "max_length": 3}]}
    prepare(schema, [tmp / "a.csv"], tmp / "lists", output_ordering="input")
    (tmp / "a.jsonl").write_text('{"y": 0, "c": "Action|Comedy"}\n{"y": 1, "c": ["Action"]}\n')
    pq.write_table(pa.table({"y": [0, 1], "c": ["Action|Comedy", "Action"]}), tmp / "a.parquet")
    for kind in ("csv", "jsonl", "parquet"):
        output = tmp / f"lists {kind}"
        prepare(schema, [tmp / f"a.{kind}"], output, output_ordering="input")
        lengths = np.fromfile(output / "train" / "cat_0.lengths.bin", np.int8)
        assert lengths.tolist() == [2, 1], kind


@row("ratings of which 4 and 5 count")
def _(tmp):
    (tmp / "a.csv").write_text("y,c\n5,a\n3.5,b\n4.0,c\n")
    label = {"column": "y", "positive": [4, 5], "any_negative": True}
    values_of(tmp, tmp / "a.csv", {**SCHEMA, "label": label}, report=True)
    assert "y is 4 or 5" in (tmp / "dataset" / "report.html").read_text()
    transform = Transform.load(tmp / "dataset" / layout.TRANSFORM)
    frame = pa.table({"y": ["4", "4.5"], "c": ["a", "b"]})
    rows, bad = scoring_reader(transform, labeled=True).read(frame.to_batches()[0])
    assert (rows.labels.tolist(), bad) == ([True, False], [])
    assert np.fromfile(tmp / "dataset" / "train" / "label.bin", np.int8).tolist() == [1, 0, 1]
    (other := tmp / "other").mkdir()
    (other / "a.csv").write_text("y,c\n5,a\n3.5,b\nbad,c\n")
    message = "line 4, column y: expected a number such as '4' or '5', got 'bad'"
    refusal(other, other / "a.csv", message, {**SCHEMA, "label": label})


@row("`$1,234.50`, `12.3 %`")
def _(tmp):
    for folder, text in ((tmp / "a", '"$1,234.50"'), (tmp / "b", "12.3 %")):
        folder.mkdir()
        (folder / "a.csv").write_text(f"y,x\n0,{text}\n1,2\n")
        schema = {"label": "y", "numerical": ["x"]}
        refusal(folder, folder / "a.csv", "line 2, column x: expected a number, got", schema)


@row("a number, bool or time for a field that never had one")
def _(tmp):
    (tmp / "a.csv").write_text(csv(["red", "blue"]))
    values_of(tmp, tmp / "a.csv")
    for kind, value in (("number", 7), ("boolean", True), ("time", date(2026, 11, 20))):
        with pytest.raises(ValueError, match=f"column 'c': expected .*'blue'.*got the {kind}"):
            scored(tmp, [[value], [None]])


@row("values that training never saw")
def _(tmp):
    (tmp / "a.csv").write_text(csv(["red", "blue"]))
    values_of(tmp, tmp / "a.csv")
    assert scored(tmp, [["green"], ["red"]]) == [0, 2]
    shares = Shares((), ["c", "d"], [True, True])
    shares.add(np.zeros((2, 2), bool), np.array([[True, False], [True, True]]))
    assert shares.strangers().startswith("no value of c occurred in the training data")


@pytest.mark.parametrize("title", ROWS)
def test_the_page_says_what_happens(title, tmp_path):
    ROWS[title](tmp_path)


def test_every_row_of_the_page_is_run():
    assert titles() == list(ROWS)

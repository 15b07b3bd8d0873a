"""`dlrm.scripts.schema` drafts a schema for `dlrm.scripts.prepare`, and prints the next command."""

import os
import re
import shlex

import forked
import pytest

from dlrm.data.schema.schema import Schema
from dlrm.scripts.prepare import main as prepare
from dlrm.scripts.schema import with_crosses
from dlrm.scripts.simulate_logs.command import Simulation, simulate

ROWS = "".join(f"{i % 40},{'?' if i % 9 == 0 else 'ab'[i % 2]},{'yes' * (i % 4 == 0) or 'no'}\n"
               for i in range(400))  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_command_that_it_prints_prepares_a_dataset(tmp_path):
    (tmp_path / "rows.csv").write_text(ROWS)
    arguments = ["--input=rows.csv", "--label=bought", "--columns=age,kind,bought"]
    done = forked.call("dlrm.scripts.schema", *arguments, code=0)
    assert "label:       bought, 'yes' counts as 1, the affirmative one: 25.00%" in done.stdout
    assert "drafted from all 400 rows" in done.stdout
    schema = Schema.load(tmp_path / "schema.yaml")
    assert (schema.numerical_names, schema.categorical_names) == (["age"], ["kind"])
    assert schema.label.positive == "yes"
    assert [field.missing_values for field in schema.categorical] == [("?",)]
    assert "missing:     '?' in kind" in done.stdout
    module, *flags = shlex.split(done.stdout.splitlines()[-1])
    assert (module, flags[0]) == ("dlrm", "prepare")
    without_java = {**os.environ, "PATH": "", "JAVA_HOME": "/nowhere"}
    prepared = forked.succeed(module, *flags, cwd=tmp_path, env=without_java)
    assert (tmp_path / "dataset" / "manifest.json").exists()
    *_, before, command = prepared.stdout.splitlines()
    assert before == "train on it with"
    module, *flags = shlex.split(command)
    trained = forked.succeed(module, *flags, "--max_steps=3", "--base_device=cpu", cwd=tmp_path)
    assert "train       288 rows" in trained.stdout
    assert (tmp_path / "run").is_dir()


def test_what_is_in_doubt_and_lines_that_are_no_rows_are_printed(tmp_path):
    rows = [f'"{i % 37},490",{i % 2}' for i in range(400)]
    (tmp_path / "rows.csv").write_text("\n".join(["price,y", *rows[:300], "1,2,3", *rows[300:]]))
    done = forked.call("dlrm.scripts.schema", "--input=rows.csv", "--label=y", code=0)
    assert "warning:     price may be numbers, such as '0,490': --decimal and" in done.stdout
    assert "skipped 1 row that cannot be read; the first: line 302, expected 2" in done.stdout
    assert "drafted from all 400 rows" in done.stdout
    assert "--bad_lines=quarantine" in done.stdout.splitlines()[-1]
    (tmp_path / "rows.csv").write_text("\n".join(["price,y", *rows[:90], "1,2,3", "4"]))
    words = ["--input=rows.csv", "--label=y", "--overwrite"]
    done = forked.call("dlrm.scripts.schema", *words)
    assert "rows.csv, line 92: expected 2 columns (price, y), got 3" in done.stderr


SHOPS = {"label": "y", "numerical": ["n"], "categorical": ["a", "b"]}


def test_crosses_are_added_to_the_draft(tmp_path):
    (tmp_path / "rows.csv").write_text("".join(f"{i % 5},v{i % 7},{i % 2}\n" for i in range(70)))
    words = ["--input=rows.csv", "--label=y", "--columns=a,b,y", "--cross=a,b:50"]
    forked.call("dlrm.scripts.schema", *words, code=0)
    (cross,) = Schema.load(tmp_path / "schema.yaml").crosses
    assert (cross.fields, cross.buckets) == (("a", "b"), 50)


@pytest.mark.parametrize(
    ("cross", "message"),
    [
        ("a", "cross a: fields"),
        (
            "a,b:x",
            "cross a_x_b:x: fields: expected categorical fields with one value a row, got 'b:x'",
        ),
        ("a,b:0", "cross a_x_b: buckets"),
        ("a,n", "cross a_x_n: fields: expected categorical fields with one value a row, got "),
    ],
)
def test_crosses_that_cannot_be_are_named(cross, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        with_crosses(Schema.from_dict(SHOPS), [cross])


def test_mistakes_end_in_one_line(tmp_path):
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "schema.yaml").write_text("mine")
    cases = {
        ("--input=rows.csv", "--label=2", "--noheader"): "schema.yaml: exists; --overwrite repl",
        ("--input=no.csv", "--label=2", "--output=a"): "no.csv: no such file",
        ("--input=rows.csv", "--label=y", "--output=a"): "no column 'y'; the columns are 0, ?, yes "
        "(its header; --columns or --noheader say otherwise)",
    }
    for arguments, expected in cases.items():
        done = forked.call("dlrm.scripts.schema", *arguments)
        assert done.returncode != 0
        assert done.stderr.startswith("error: ")
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1
    assert (tmp_path / "schema.yaml").read_text() == "mine"


def test_another_separator_of_cells_is_named(tmp_path):
    delimiter, shown, quote = "\t", "$'\\t'", '"'
    lines = [["age", "poutcome", "y"], *(["1", "none", "no"], ["2", "some", "yes"]) * 9]
    joined = [delimiter.join(f"{quote}{cell}{quote}" for cell in line) for line in lines]
    (tmp_path / "bank.csv").write_text("\n".join(joined) + "\n")
    (tmp_path / "s.yaml").write_text("label: {column: y, positive: 'yes'}\nnumerical: [age]\n")
    words = ["--input=bank.csv", "--label=y"]
    drafted = forked.call("dlrm.scripts.schema", *words, code=0)
    assert drafted.stdout.startswith(f"format:      delimiter {delimiter!r}"), drafted.stdout
    given = [*words, f"--delimiter={delimiter}", "--output=given.yaml"]
    forked.call("dlrm.scripts.schema", *given, code=0)
    schemas = [Schema.load(tmp_path / f"{name}.yaml") for name in ("schema", "given")]
    assert schemas[0] == schemas[1]
    assert schemas[0].format.delimiter == delimiter
    words = ["dlrm.scripts.prepare", "--input=bank.csv", "--schema=s.yaml", "--output=prepared"]
    done = forked.call(*words, "--cores=1")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"; try --delimiter {shown}"), done.stderr
    forked.call(*words, "--cores=1", f"--delimiter={delimiter}", code=0)


def test_no_separator_is_named_that_does_not_give_the_missing_column(tmp_path):
    (tmp_path / "a.csv").write_text("age;x,kind\n1;2,a\n")
    done = forked.call("dlrm.scripts.schema", "--input=a.csv", "--label=y")
    assert "no column 'y'; the columns are age;x, kind (its header;" in done.stderr
    assert "--delimiter" not in done.stderr


LOG = "\t".join(["1", *"5" * 13, *["0a"] * 26]) + "\n"
TITLED = "Export of 2026\na,n,y\n" + "u,5,1\nv,6,0\n" * 30
ADVICE = {  # a file, a command for it, and what it may not say
    "C13: the file is there": (LOG, "prepare --schema=criteo --output=d", "no such"),
    "C17: no character can be written": (
        "a\x01y\nu\x011\nv\x010\n",
        r"schema --delimiter=\x01",
        "error",
    ),
    "C18: the name has a colon": ("a:t,b:t,y\nu,v,1\nw,x,0\n", "schema --cross=a:t,b:t", "error"),
    "C19: both fail, too": (
        TITLED,
        "prepare --schema=s.yaml --output=d",
        "--columns or --noheader",
    ),
}


@pytest.mark.parametrize("fault", ADVICE)
def test_what_is_there_is_taken_and_no_advice_is_wrong(fault, tmp_path):
    text, command, wrong = ADVICE[fault]
    (tmp_path / "rows.csv").write_text(text * (50 if text == LOG else 1))
    (tmp_path / "s.yaml").write_text("label: y\ncategorical: [a]\nnumerical: [n]\n")
    program, *words = command.split()
    words += ["--input=rows.csv", *(["--label=y"] if program == "schema" else [])]
    done = forked.call(f"dlrm.scripts.{program}", *words)
    assert wrong not in done.stderr


def test_flags_of_tables_are_refused_for_logs_and_those_of_logs_for_tables(tmp_path, capsys):
    tables_only = ("--test_fraction=0.1", "--columns=a,b", "--split_key=user")
    for schema, wrong in (("criteo", tables_only), ("schema.yaml", LOGS_ONLY)):
        for flag in wrong:
            words = [f"--schema={schema}", f"--input={tmp_path}", f"--output={tmp_path}/o", flag]
            assert prepare(words) == 1
            assert f"{flag.partition('=')[0]}: is for " in capsys.readouterr().err


LOGS_ONLY = (
    *("--num_days=2", "--num_numerical=2", "--num_categorical=3", "--frequency_limit=1,4:3"),
    *("--dictionary_days=0-0", "--numeric_transform=nvidia", "--output_format=binary"),
)


def test_logs_take_the_options_of_logs(tmp_path):
    simulate(Simulation(rows=300, days=2, num_numerical=2, num_categorical=3), tmp_path / "raw")
    common = (*LOGS_ONLY, "--engine=local", "--cores=1")
    words = ("--schema=criteo", "--input=raw", "--output=a", *common)
    done = forked.call("dlrm.scripts.prepare", *words, code=0)
    *_, before, command = done.stdout.splitlines()
    assert before == "train on it with"
    assert command.startswith("  dlrm train --dataset a/binary_dataset --recipe auto ")
    words = ("--input_folder=raw", "--output_folder=b", *common)
    assert forked.call("dlrm.preproc.logs.prepare_logs", *words).returncode == 0
    for name in ("train_data.bin", "test_data.bin", "transform/transform.json"):
        one, other = (tmp_path / folder / "binary_dataset" / name for folder in "ab")
        assert one.read_bytes() == other.read_bytes()


def drafted(tmp_path, files, *words):
    """Drafts files in one process; returns the lines and the schema's text."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    names = sorted({name.partition("/")[0] for name in files})
    words = [f"--input={','.join(names)}", "--label=y", *words]
    done = forked.call("dlrm.scripts.schema", *words, code=0)
    return done.stdout, (tmp_path / "schema.yaml").read_text()


def test_the_format_needs_no_flags_later(tmp_path):
    rows = "".join(f"{i % 9};{i % 50},5;Zürich {i % 7};{i % 2}\n" for i in range(199))
    rows += "7;2.000,0;Basel;1\n"
    content = ("shop;price;city;y\n" + rows).encode("latin-1")
    out, text = drafted(tmp_path, {"a.csv": content})
    assert out.startswith("format:      delimiter ';', encoding 'latin-1', decimal ',', thousands")
    assert "the encoding is in doubt" in out
    assert "format: {delimiter: ;, encoding: latin-1, decimal: ',', thousands: .}" in text
    assert ", 0.5 .. 2000; a number" in text
    assert Schema.load(tmp_path / "schema.yaml").numerical_names == ["price"]
    module, *flags = shlex.split(out.splitlines()[-1])
    forked.call(module, *flags, "--cores=1", code=0)


def test_tabs_have_no_quotes_and_lines_of_quoted_cells_are_said(tmp_path):
    queries = ['b\t1\n"how to\t0\ntv 55"\t1\n'] * 40
    out, text = drafted(tmp_path, {"a.tsv": "query\ty\n" + "".join(queries)})
    assert "format: {quote: none}" in text
    assert "drafted from all 120 rows" in out
    out, _ = drafted(
        tmp_path, {"a.tsv": "", "b.csv": 'q,y\n"a\nb",1\nc,0\n' * 1}, "--overwrite", '--quote="'
    )
    assert "quoted cells extend 1 row over 2 lines, the first at line 2" in out


def test_what_files_do_not_share_is_left_out(tmp_path):
    rows = "".join(f"{i % 2},{'ab'[i % 3 == 0]},{i % 5}\n" for i in range(50))
    files = {"d/a.csv": f"y,x,old\n{rows}", "d/b.csv": f"y,x,new\n{rows}", "d/c.csv": ""}
    out, text = drafted(tmp_path, files)
    assert "left out:    old, d/b.csv does not have it; prepare needs it in every file" in out
    assert "left out:    new, d/a.csv does not have it" in out
    assert "#   new: d/a.csv does not have it" in text
    module, *flags = shlex.split(out.splitlines()[-1])
    assert forked.call(module, *flags, "--cores=1").returncode == 0
    done = forked.call("dlrm.scripts.schema", "--input=d", "--label=new", "--output=n")
    assert "d/a.csv: no column 'new'; the columns are y, x, old" in done.stderr


def test_empty_columns_row_numbers_and_odd_names(tmp_path):
    rows = "".join(f"{i},{i % 2},,{i % 3}.5,{i % 7},0{i % 9}\n" for i in range(50))
    header = ",y,empty,x,\x1b[31mred,zip\n"
    out, text = drafted(tmp_path, {"a.csv": header + rows, "o'\x07.csv": header + rows})
    assert "left out:    '', row numbers, by the name that pandas gives its index" in out
    assert "left out:    empty, no value" in out
    assert "\x1b" not in out + text
    assert "\x07" not in out
    assert "codes, as numbers begin with 0" in text
    assert "\\x07.csv" in out.splitlines()[-1]


def test_nested_and_mixed_columns_of_json_are_left_out(tmp_path):
    rows = '{"y": 0, "x": 1.5, "style": {"color": "red"}, "m": [1], "u": "a"}\n'
    rows += '{"y": 1, "x": 2.5, "style": null, "m": 3, "u": "b"}\n'
    out, _ = drafted(tmp_path, {"a.dat": rows}, "--input_format=jsonl")
    assert "left out:    style, nested, such as {'color': 'red'} in line 1" in out
    assert "left out:    m, values in some rows, lists in others" in out
    assert out.splitlines()[-1].endswith("--input=a.dat --input_format=jsonl --output=dataset")

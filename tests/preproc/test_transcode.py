"""CSV becomes a dataset that readers accept; errors in it are named."""

import csv
import json
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from nvidia_reader import read_as_nvidia

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.preproc.transcode import CsvConfig, transcode_csv
from dlrm.preproc.transcode_spec import transcode_spec
from dlrm.scripts import transcode

ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status"),
    *("occupation", "relationship", "race", "sex", "capital_gain", "capital_loss"),
    *("hours_per_week", "native_country", "income"),
)
ADULT_NUMERICAL = (
    *("age", "fnlwgt", "education_num", "capital_gain", "capital_loss"),
    "hours_per_week",
)


def write_csv(path, rows, header=True):
    """Writes dicts as a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if header:
            writer.writeheader()
        writer.writerows(rows)
    return str(path)


def shop_rows(num_rows):
    """Draws rows with blanks, quotes and missing cells; `key` is the place in the file."""
    draw = random.Random(0)
    return [
        {
            "key": key,
            "shop": draw.choice(["north", " south ", 'o\'er, the "hill"', "Zürich", "?", ""]),
            "price": draw.choice(["", "?", f" {draw.uniform(-5, 100):.3f}", draw.randint(0, 9)]),
            "bought": draw.choice(["yes", "no "]),
            "user": f"u{int(draw.paretovariate(0.8))}",
        }
        for key in range(num_rows)
    ]


def shop_config(path, output, **changes):
    arguments = {
        "input": path,
        "output": str(output),
        "label": "bought",
        "positive": "yes",
        "numerical": ("price", "key"),
        "categorical": ("user", "shop"),
        "numeric_transform": "none",
        "chunk_size": 17,
    } | changes
    return CsvConfig(**arguments)


def read_back(directory):
    """Returns numericals, ids and labels of each split, all rows at once."""
    train, test, _ = open_datasets(DataConfig(dataset=str(directory)))
    return {
        "train": [tensor.numpy() for tensor in train.batch(0)[:3]],
        "test": [tensor.numpy() for tensor in test.batch(0)[:3]] if len(test) else None,
    }


def clean(cell):
    cell = str(cell).strip()
    return "" if cell == "?" else cell


def test_every_row_is_in_one_split_with_its_own_values(tmp_path):
    rows = shop_rows(503)
    config = shop_config(write_csv(tmp_path / "shop.csv", rows), tmp_path / "out")
    report = transcode_csv(config)
    data = read_back(tmp_path / "out")
    assert report.rows == {"train": 403, "test": 100}
    keys = {split: columns[0][:, 1].astype(int).tolist() for split, columns in data.items()}
    assert sorted(keys["train"] + keys["test"]) == list(range(503))
    assert keys["train"] != sorted(keys["train"])

    # An independent reference: dictionaries of the training rows, the most frequent value first.
    dictionary = {}
    for name in ("user", "shop"):
        values = [clean(rows[key][name]) for key in keys["train"]]
        kept = sorted(set(values) - {""}, key=lambda value: (-values.count(value), value))  # noqa: B023
        dictionary[name] = {value: i for i, value in enumerate(kept, 1)}
    for split, (numerical, ids, labels) in data.items():
        for place, key in enumerate(keys[split]):
            price = clean(rows[key]["price"])
            assert numerical[place, 0] == np.float16(float(price) if price else 0)
            assert labels[place] == (rows[key]["bought"].strip() == "yes")
            assert ids[place].tolist() == [
                dictionary[name].get(clean(rows[key][name]), 0) for name in ("user", "shop")
            ]
    assert report.cardinalities == {name: len(d) + 1 for name, d in dictionary.items()}
    assert report.positives["train"] == data["train"][2].sum()


def test_values_that_count_as_label_0_are_reported_and_ten_of_them_shown(root, tmp_path):
    rows = [{"y": f"v{i}", "x": i} for i in range(13)]
    path = write_csv(tmp_path / "a.csv", [*rows, rows[4], rows[4]])
    flags = ("--label=y", "--positive=v0", "--numerical=x", "--test_fraction=0")
    done = run(root, "--input", path, "--output", tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("labels")]
    assert line.startswith("labels counted as 0: 'v4' (3 rows), 'v1' (1 rows), 'v10'")
    assert line.count("rows") == 10
    assert line.endswith("and 2 values more")


def test_the_result_depends_on_the_seed_but_not_on_the_chunks(tmp_path):
    path = write_csv(tmp_path / "shop.csv", shop_rows(100))

    def files(output, **changes):
        transcode_csv(shop_config(path, tmp_path / output, **changes))
        return json.loads((tmp_path / output / "manifest.json").read_text())["files"]

    first = files("first")
    assert files("again", chunk_size=1000) == first
    assert files("other", seed=1) != first


@pytest.mark.parametrize("unit", ["1e200", "1e-200", "1.7e308"])
def test_a_column_whose_deviation_is_beyond_float64_is_named(tmp_path, unit):
    rows = [{"y": key % 2, "x": f"{'-' * (key % 2)}{unit}"} for key in range(100)]
    path = write_csv(tmp_path / "a.csv", rows)
    with pytest.raises(ValueError, match=r"a\.csv: column x: its standard deviation is beyond"):
        transcode_csv(CsvConfig(path, str(tmp_path / "out"), "y", numerical=("x",)))
    assert not (tmp_path / "out").exists()


def test_logarithms_are_of_x_plus_2_and_small_arguments_are_raised_and_counted(tmp_path):
    cells = {"": 2, "0": 2, "1.5": 3.5, "-1": 1, "-1.5": 1, "-30": 1, "1e30": 1e30, "62": 64}
    path = tmp_path / "a.csv"
    path.write_text("y,x\n" + "".join(f"0,{cell}\n" for cell in cells))
    config = CsvConfig(
        str(path),
        str(tmp_path / "out"),
        "y",
        numerical=("x",),
        numeric_transform="log",
        test_fraction=0.0,
    )
    assert transcode_csv(config).clamped == 2
    found = read_back(tmp_path / "out")["train"][0][:, 0]
    expected = np.float16([math.log(argument) for argument in cells.values()])
    assert sorted(found) == sorted(expected)


def test_headers_columns_and_indices_name_the_same_columns(tmp_path):
    rows = shop_rows(40)
    named = write_csv(tmp_path / "named.csv", rows)
    bare = write_csv(tmp_path / "bare.csv", rows, header=False)
    names = tuple(rows[0])
    transcode_csv(shop_config(named, tmp_path / "a"))
    transcode_csv(shop_config(bare, tmp_path / "b", columns=names))
    transcode_csv(
        shop_config(
            bare,
            tmp_path / "c",
            header=False,
            label="3",
            numerical=("2", "0"),
            categorical=("4", "1"),
        )
    )
    new = tuple(name.upper() for name in names)
    transcode_csv(
        shop_config(
            named,
            tmp_path / "d",
            header=True,
            columns=new,
            label="BOUGHT",
            numerical=("PRICE", "KEY"),
            categorical=("USER", "SHOP"),
        )
    )
    first = read_back(tmp_path / "a")
    for other in "bcd":
        for split, columns in read_back(tmp_path / other).items():
            for column, expected in zip(columns, first[split], strict=True):
                np.testing.assert_array_equal(column, expected)


BAD_FILES = {  # tests/preproc/tables/test_table_inputs.py has the others
    "a cell that is no number": ("0,1,a\n1,12x,b\n", {}, r"line 3, column x: .*number, got '12x'"),
    "a label that is not 0 or 1": (
        "0,1,a\nyes,1,b\n",
        {},
        r"line 3, column y: .*--positive.*'yes'",
    ),
    "a label that means missing": (
        "0,1,a\n1,1,b\n?,1,b\n",
        {"positive": "1"},
        r"line 4, column y: expected a label .*got '\?'",
    ),
    "not a number": (
        "0,nan,a\n1,1,b\n",
        {},
        r"line 2, column x: expected a finite number \(--missing_values \?,nan counts it as "
        r"missing\), got 'nan'",
    ),
    "too few rows to divide": (
        "0,1,a\n1,2,b\n",
        {},
        "no row is test, of 2 rows .--test_fraction 0.2.",
    ),
    "a cell of many lines": (
        "0,1,a\n" + '1,2,"b' + "\n0,3,c" * 100 + '"\n1,4,d\n',
        {},
        "line 3: expected a row of at most 100 lines, got .* to line 103",
    ),
}


@pytest.mark.parametrize(
    "cell", ["1_000", "\u0661\u0662", "\uff11", "0x10", "1,5", "1e999", "-Infinity"]
)
def test_what_only_python_calls_a_number_is_refused(tmp_path, cell):
    path = write_csv(tmp_path / "a.csv", [{"y": 0, "x": 1}, {"y": 1, "x": cell}])
    with pytest.raises(ValueError, match=rf"line 3, column x: expected a .*number.*'{cell}'"):
        transcode_csv(CsvConfig(path, str(tmp_path / "out"), "y", ("x",)))


@pytest.mark.parametrize(("cell", "advised"), [("65,49", True), ("k.A.", False)])
def test_decimal_commas_are_advised_to_draft_a_schema(tmp_path, capsys, cell, advised):
    path = write_csv(tmp_path / "a.csv", [{"y": 0, "x": 1}, {"y": 1, "x": cell}])
    output = tmp_path / "out"
    flags = [f"--input={path}", f"--output={output}", "--label=y", "--numerical=x", "--cores=1"]
    assert transcode.main(flags) == 1
    assert ("; dlrm schema --decimal , drafts a schema" in capsys.readouterr().err) is advised


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, case):
    text, changes, message = BAD_FILES[case]
    path = tmp_path / "bad.csv"
    path.write_bytes(b"y,x,c\n" + text.encode("latin-1"))
    arguments = {"label": "y", "numerical": ("x",), "categorical": ("c",)} | changes
    with pytest.raises(ValueError, match=rf"bad\.csv.*{message}"):
        transcode_csv(CsvConfig(str(path), str(tmp_path / "out"), **arguments))
    assert [p.name for p in tmp_path.iterdir()] == ["bad.csv"]


def test_running_again_is_refused_and_appends_nothing(tmp_path):
    config = shop_config(write_csv(tmp_path / "shop.csv", shop_rows(50)), tmp_path / "out")
    transcode_csv(config)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        transcode_csv(config)
    assert len(read_back(tmp_path / "out")["train"][2]) == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numerical": (), "categorical": ()}, "--numerical, --categorical: expected one column"),
        ({"categorical": ("user", "price")}, "columns named twice: price"),
        ({"numeric_transform": "ln"}, "--numeric_transform ln: expected one of log"),
        ({"test_fraction": 1.0}, "--test_fraction"),
        ({"delimiter": "||"}, "--delimiter"),
        ({"frequency_limit": 0}, "--frequency_limit 0: expected 1 or more"),
    ],
)
def test_an_impossible_configuration_is_refused_by_its_flag(changes, message):
    with pytest.raises(ValueError, match=message):
        shop_config("in.csv", "out", **changes)


@pytest.mark.parametrize(
    "name",
    ["../evil.yaml", "/tmp/evil.yaml", "..", "", "manifest.json", "model_size.json", "train"],
)
def test_a_name_for_the_specification_that_is_no_file_of_its_own_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"--feature_spec_out: expected .* got '{name}'"):
        shop_config("in.csv", "out", feature_spec_out=name)
    write_spec(tmp_path)
    with pytest.raises(ValueError, match=f"--feature_spec_out: expected .* got '{name}'"):
        transcode_spec(str(tmp_path), str(tmp_path / "out"), feature_spec_out=name)
    assert not (tmp_path / "out").exists()


# NVIDIA's way: a feature specification with chunks of csv.


def write_spec(directory, *, cardinality="auto", test_user=4):
    sections = {
        "feature_spec": {
            "user": {"dtype": "int32", "cardinality": cardinality},
            "shop": {"dtype": "int32", "cardinality": 300},
            "price": {"dtype": "float32"},
            "age": {"dtype": "float32"},
            "comment": {"dtype": "str"},
            "clicked": {"dtype": "bool"},
        },
        "source_spec": {
            split: [
                {
                    "type": "csv",
                    "features": ["clicked", "price", "user", "comment"],
                    "files": [f"{split}_0.csv", f"{split}_1.csv"],
                },
                {"type": "csv", "features": ["age", "shop"], "files": [f"{split}_more.csv"]},
            ]
            for split in ("train", "test")
        },
        "channel_spec": {
            "categorical": ["user", "shop"],
            "numerical": ["age", "price"],
            "label": ["clicked"],
        },
        "metadata": {},
    }
    (directory / "feature_spec.yaml").write_text(yaml.safe_dump(sections))
    for split, last in (("train", 2), ("test", test_user)):
        (directory / f"{split}_0.csv").write_text("1,0.5,0,hello\n0,1.5,1,\n")
        (directory / f"{split}_1.csv").write_text(f'1,,{last},"a,b"\n')
        (directory / f"{split}_more.csv").write_text("20,299\n30,0\n40,7\n")
    return sections


def test_a_specification_keeps_ids_and_the_order_of_rows(tmp_path):
    write_spec(tmp_path)
    report = transcode_spec(str(tmp_path), str(tmp_path / "out"), chunk_size=1)
    data = read_back(tmp_path / "out")
    assert report.cardinalities == {"user": 5, "shop": 300}  # largest id of both splits, plus 1
    assert report.rows == {"train": 3, "test": 3}
    numerical, ids, labels = data["train"]
    assert numerical.tolist() == [[20, 0.5], [30, 1.5], [40, 0]]
    assert ids.tolist() == [[0, 299], [1, 0], [2, 7]]
    assert labels.tolist() == [1, 0, 1]
    assert data["test"][1].tolist() == [[0, 299], [1, 0], [4, 7]]


def test_nvidias_reader_takes_what_was_made_of_a_specification_with_validation(tmp_path):
    sections = write_spec(tmp_path)
    sections["source_spec"]["validation"] = sections["source_spec"]["test"]
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(sections))
    transcode_spec(str(tmp_path), str(tmp_path / "out"))
    labels, numbers, ids = read_as_nvidia(tmp_path / "out")["test"]
    assert (labels.tolist(), numbers[:, 0].tolist()) == ([1, 0, 1], [20, 30, 40])
    assert np.stack(ids, 1).tolist() == [[0, 299], [1, 0], [4, 7]]
    validation = open_datasets(DataConfig(dataset=str(tmp_path / "out"))).validation
    assert validation.batch(0).categorical.tolist() == [[0, 299], [1, 0], [4, 7]]


@pytest.mark.parametrize("chunk_size", [1, 100])
def test_bad_rows_of_a_specification_may_be_left_out(tmp_path, chunk_size):
    """Wherever the value is: a row is that of all chunks."""
    write_spec(tmp_path)
    (tmp_path / "train_0.csv").write_text("1,0.5,0,hello\n0,1.5\n")
    (tmp_path / "test_more.csv").write_text("20,299\n30,-1\n40,7\n")
    how = {"bad_lines": "quarantine", "max_bad_lines": 0.5, "report": False}
    spec = str(tmp_path), str(tmp_path / "out")
    report = transcode_spec(*spec, chunk_size=chunk_size, **how)
    assert report.rows == {"train": 2, "test": 2}
    data = read_back(tmp_path / "out")
    assert data["train"][1].tolist() == [[0, 299], [2, 7]]
    assert data["test"][1].tolist() == [[0, 299], [4, 7]]
    (left_out,) = (tmp_path / "out" / "quarantine").iterdir()
    train, test = left_out.read_text().splitlines()
    assert "train_0.csv, line 2 and train_more.csv, line 2\texpected 4 columns" in train
    assert "test_0.csv, line 2 and test_more.csv, line 2\tcolumn shop: expected an int" in test


def test_what_breaks_a_specification_is_named(tmp_path):
    def fails(message):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            transcode_spec(str(tmp_path), str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()

    def save(sections):
        (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(sections))

    write_spec(tmp_path, cardinality=4)
    where = r"test_1\.csv, line 1 and test_more\.csv, line 3, column user"
    fails(rf"{where}: .*less than its cardinality, 4, got '4'")
    write_spec(tmp_path, test_user=-3)
    fails(rf"{where}: expected an integer id from 0.*got '-3'")
    write_spec(tmp_path, cardinality=0)
    fails('feature user: expected a cardinality of 1 or more, or "auto", got 0')
    sections = write_spec(tmp_path)
    (tmp_path / "train_more.csv").write_text("20,299\n")
    fails(r"train_more\.csv: expected 3 rows, .*got 1")
    (tmp_path / "train_more.csv").unlink()
    fails(r"train_more\.csv: no such file")
    sections["source_spec"]["test"][1]["type"] = "split_binary"
    save(sections)
    fails("source_spec test: expected chunks of type csv")
    sections = write_spec(tmp_path)
    del sections["source_spec"]["train"][1]
    save(sections)
    fails("source_spec train: expected feature shop once, got it 0 times")
    sections = write_spec(tmp_path)
    sections["feature_spec"]["user"]["list"] = {"max_length": 3}
    save(sections)
    fails("feature user: expected one id a row, got a list field, which")
    sections = write_spec(tmp_path)
    del sections["source_spec"]["test"]
    save(sections)
    fails("expected the splits train and test")


# The command.


def run(root, *arguments):
    command = [sys.executable, "-m", "dlrm.scripts.transcode", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_help_lists_every_flag(root):
    text = run(root, "--help").stdout
    assert "seed of the choice of test rows" in text
    flags = "input feature_spec_in output feature_spec_out chunk_size label positive numerical "
    flags += "categorical header columns numeric_transform test_fraction seed frequency_limit "
    for flag in (flags + "missing_values delimiter").split():
        assert re.search(rf"--(\[no\])?{flag}:", text), flag


def test_the_command_transcodes_either_way_and_names_errors(root, tmp_path):
    write_spec(tmp_path)
    done = run(root, "--input", tmp_path, "--output", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert "train: 3 rows, 2 positive (66.7%)" in done.stdout
    path = write_csv(tmp_path / "shop.csv", shop_rows(50))
    arguments = ("--input", path, "--label=bought", "--positive=yes", "--numerical=price,key")
    done = run(root, *arguments, "--categorical=user,shop", "--output", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert "table shop: " in done.stdout
    negatives = sum(row["bought"] == "no " for row in shop_rows(50))
    assert f"labels counted as 0: 'no' ({negatives} rows)\n" in done.stdout
    again = run(root, *arguments, "--output", tmp_path / "b")
    assert again.returncode == 1
    assert re.fullmatch(r"error: .*b: exists and is not empty.*\n", again.stderr)
    mixed = run(root, "--input", tmp_path, "--numerical=price", "--output", tmp_path / "c")
    assert mixed.returncode == 1
    assert "--numerical: expected --label too" in mixed.stderr


def test_adult_becomes_a_dataset(shared_data, tmp_path):
    report = transcode_csv(
        CsvConfig(
            str(shared_data / "adult" / "adult.data"),
            str(tmp_path / "adult"),
            "income",
            ADULT_NUMERICAL,
            tuple(name for name in ADULT_COLUMNS[:-1] if name not in ADULT_NUMERICAL),
            positive=">50K",
            columns=ADULT_COLUMNS,
        )
    )
    assert report.rows == {"train": 26_049, "test": 6_512}
    assert sum(report.positives.values()) == 7_841
    assert report.cardinalities["sex"] == 3
    train = open_datasets(DataConfig(dataset=str(tmp_path / "adult"))).train
    assert train.categorical_names[0] == "workclass"
    numerical = train.batch(0).numerical.float()
    assert numerical.mean(0).abs().max() < 1e-3
    assert (numerical.std(0) - 1).abs().max() < 1e-2

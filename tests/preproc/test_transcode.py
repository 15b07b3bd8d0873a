"""CSV becomes a dataset that readers accept; errors in it are named."""

import csv
import gzip
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
from preproc_testing import splitmix64

from dlrm.data.clicks.datasets import DataConfig, open_datasets
from dlrm.data.clicks.layout import id_dtype
from dlrm.data.sources.columns import TextColumn
from dlrm.data.transform.transform import Transform
from dlrm.preproc.transcode import CsvConfig, transcode_csv
from dlrm.preproc.transcode_spec import transcode_spec

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


def shop_rows(num_rows, seed=0):
    """Draws rows with blanks, quotes and missing cells; `key` is the place in the file."""
    draw = random.Random(seed)
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


SEED = 12345  # the default


def order_of(num_rows, seed):
    """Returns rows in the order of their hashes, as in training."""
    return sorted(range(num_rows), key=lambda row: splitmix64(seed, row))


def test_rows(num_rows, count):
    """Returns the rows for testing."""
    return sorted(order_of(num_rows, SEED + 0x5EED_0001)[:count])


test_rows.__test__ = False


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


def test_values_that_are_rare_in_training_share_id_0(tmp_path):
    rows = shop_rows(300)
    config = shop_config(
        write_csv(tmp_path / "shop.csv", rows),
        tmp_path / "out",
        frequency_limit=5,
        test_fraction=0.0,
    )
    report = transcode_csv(config)
    users = [row["user"] for row in rows]
    frequent = {user for user in users if users.count(user) >= 5}
    assert 1 < len(frequent) < len(set(users))
    assert report.cardinalities["user"] == len(frequent) + 1
    ids = read_back(tmp_path / "out")["train"][1][:, 0]
    assert (ids == 0).sum() == sum(user not in frequent for user in users)
    assert report.rows == {"train": 300, "test": 0}


def test_standardised_training_rows_have_mean_0_and_deviation_1(tmp_path):
    path = write_csv(tmp_path / "shop.csv", shop_rows(2000))
    transcode_csv(shop_config(path, tmp_path / "out", numeric_transform="standardise"))
    transcode_csv(shop_config(path, tmp_path / "raw"))
    raw, scaled = (read_back(tmp_path / name) for name in ("raw", "out"))
    for split in ("train", "test"):
        keys = raw[split][0][:, 1].astype(float)
        mean, deviation = (
            raw["train"][0][:, 1].astype(float).mean(),
            np.std(raw["train"][0][:, 1], dtype=float),
        )
        np.testing.assert_allclose(scaled[split][0][:, 1], (keys - mean) / deviation, atol=2e-3)
    missing = sum(not clean(row["price"]) for row in shop_rows(2000))
    assert sum((scaled[s][0][:, 0] == 0).sum() for s in scaled) == missing


@pytest.mark.parametrize(
    "cells", [("7", "7"), ("0.1", "0.1"), ("0.3", "0.30000000000000004"), ("1e200", "1e200")]
)
def test_a_constant_column_is_0_after_standardising(tmp_path, cells):
    path = tmp_path / "a.csv"
    text = "".join(f"{label},{cell}\n" for label, cell in enumerate(cells))
    path.write_text("y,x\n" + text * 50)
    config = CsvConfig(str(path), str(tmp_path / "out"), "y", numerical=("x",))
    transcode_csv(config)
    data = read_back(tmp_path / "out")
    assert not data["train"][0].any()
    assert not data["test"][0].any()


@pytest.mark.parametrize("value", ["0.1", "0.3"])
def test_another_value_of_a_column_that_was_constant_in_training_does_not_overflow(tmp_path, value):
    rows = [{"y": key % 2, "x": value} for key in range(100)]
    rows[test_rows(100, 20)[0]]["x"] = 5
    path = write_csv(tmp_path / "a.csv", rows)
    transcode_csv(CsvConfig(path, str(tmp_path / "out"), "y", numerical=("x",)))
    data = read_back(tmp_path / "out")
    assert not data["train"][0].any()
    assert data["test"][0].max() == np.float16(5 - float(value))


@pytest.mark.parametrize("unit", ["1e200", "1e-200", "1.7e308"])
def test_a_column_whose_deviation_is_beyond_float64_is_named(tmp_path, unit):
    rows = [{"y": key % 2, "x": f"{'-' * (key % 2)}{unit}"} for key in range(100)]
    path = write_csv(tmp_path / "a.csv", rows)
    with pytest.raises(ValueError, match=r"a\.csv: column x: its standard deviation is beyond"):
        transcode_csv(CsvConfig(path, str(tmp_path / "out"), "y", numerical=("x",)))
    assert not (tmp_path / "out").exists()


def test_an_overflow_after_standardising_does_not_advise_standardising(tmp_path):
    rows = [{"y": key % 2, "x": key % 2} for key in range(100)]
    rows[test_rows(100, 20)[0]]["x"] = 1e6
    path = write_csv(tmp_path / "a.csv", rows)
    with pytest.raises(ValueError, match="column x: 1000000.0, standardised, is beyond") as error:
        transcode_csv(CsvConfig(path, str(tmp_path / "out"), "y", numerical=("x",)))
    assert "log or standardise" not in str(error.value)


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


def test_the_fitted_transform_that_is_kept_gives_the_bytes_that_were_written(tmp_path):
    rows = shop_rows(200)
    path = write_csv(tmp_path / "shop.csv", rows)
    for transform in ("none", "log", "standardise"):
        output = tmp_path / transform
        transcode_csv(
            shop_config(
                path, output, numeric_transform=transform, numerical=("price",), frequency_limit=2
            )
        )
        fitted = Transform.load(output / "transform")
        columns = [
            TextColumn.from_bytes([str(row[name]).encode() for row in rows])
            for name in ("price", "user", "shop")
        ]
        numerical, ids, _ = fitted.of_texts(columns)
        test = test_rows(200, 40)
        train = [key for key in order_of(200, SEED) if key not in test]
        written = [
            (output / "train" / name).read_bytes()
            for name in ("numerical.bin", "cat_0.bin", "cat_1.bin")
        ]
        dtypes = [np.float16, *map(id_dtype, fitted.cardinalities)]
        found = [numerical[train, 0], ids[0][train], ids[1][train]]
        assert written == [c.astype(d).tobytes() for c, d in zip(found, dtypes, strict=True)]
    bad = [TextColumn.from_bytes(cells) for cells in ([b"1", b"x"], [b"a", b"b"], [b"", b""])]
    with pytest.raises(ValueError, match="row 1, column price: expected a number, got 'x'"):
        fitted.of_texts(bad)


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


def test_a_directory_compressed_files_and_other_delimiters_are_read(tmp_path):
    rows = shop_rows(30)
    (tmp_path / "in").mkdir()
    whole = write_csv(tmp_path / "whole.csv", rows)
    for part, name in ((rows[:10], "a.csv"), (rows[10:], "b.csv")):
        write_csv(tmp_path / "in" / name, part)
    text = (tmp_path / "in" / "b.csv").read_bytes()
    (tmp_path / "in" / "b.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text))
    (tmp_path / "in" / "b.csv").unlink()
    transcode_csv(shop_config(whole, tmp_path / "one"))
    transcode_csv(shop_config(str(tmp_path / "in"), tmp_path / "many"))
    (tmp_path / "tabs.tsv").write_text("y\tx\n0\t1\n1\t2\n\n0\t3\n")
    report = transcode_csv(
        CsvConfig(
            str(tmp_path / "tabs.tsv"),
            str(tmp_path / "tabs"),
            "y",
            ("x",),
            delimiter="\t",
            test_fraction=0.4,
        )
    )
    assert report.rows == {"train": 2, "test": 1}
    for a, b in zip(
        read_back(tmp_path / "one")["test"], read_back(tmp_path / "many")["test"], strict=True
    ):
        np.testing.assert_array_equal(a, b)


BAD_FILES = {
    "a cell that is no number": ("0,1,a\n1,12x,b\n", {}, r"line 3, column x: .*number, got '12x'"),
    "digits grouped as in Python": ("0,1_000,a\n1,2,b\n", {}, "line 2, column x: .*got '1_000'"),
    "an infinite number": (
        "0,1,a\n1,inf,b\n",
        {},
        r"line 3, column x: .*finite number .*, got 'inf'",
    ),
    "not a number": (
        "0,nan,a\n1,1,b\n",
        {},
        r"line 2, column x: expected a finite number \(--missing_values \?,nan counts it as "
        r"missing\), got 'nan'",
    ),
    "a label that is not 0 or 1": (
        "0,1,a\nyes,1,b\n",
        {},
        r"line 3, column y: .*--positive.*'yes'",
    ),
    "a missing label": (",1,a\n1,1,b\n", {"positive": "1"}, r"line 2, column y: expected a label"),
    "a label that means missing": (
        "0,1,a\n1,1,b\n?,1,b\n",
        {"positive": "1"},
        r"line 4, column y: expected a label .*got '\?'",
    ),
    "a label that never occurs": (
        "0,1,a\n1,1,b\n",
        {"positive": "2"},
        r"no row has the label '2'; found '0', '1'",
    ),
    "too few cells": ("0,1,a\n\n1,1\n", {}, r"line 4: expected 3 columns \(y, x, c\), got 2"),
    "too many cells": ("0,1,a,b\n", {}, "line 2: expected 3 columns .*got 4"),
    "an unknown column": (
        "0,1,a\n",
        {"categorical": ("d",)},
        "no column 'd'; the columns are y, x",
    ),
    "a number beyond float16": (
        "0,1,a\n1,65520,b\n",
        {"numeric_transform": "none", "test_fraction": 0.0},
        r"line 3, column x: 65520\.0 is beyond float16 \(up to 65504\)",
    ),
    "no rows": ("", {}, "expected rows, got none"),
    "too few rows to divide": (
        "0,1,a\n1,2,b\n",
        {},
        "no row is test, of 2 rows .--test_fraction 0.2.",
    ),
    "a quote that is never closed": (
        '0,1,a\n1,2,"b\n0,3,c\n1,4,d\n',
        {},
        "line 3: not CSV .*reading up to line 5.*quote",
    ),
    "a quote within a quoted cell": ('0,1,"a\n1,2,"b\n', {}, "line 2: not CSV .*quote"),
    "a cell of many lines": (
        "0,1,a\n" + '1,2,"b' + "\n0,3,c" * 100 + '"\n1,4,d\n',
        {},
        "line 3: expected a row of at most 100 lines, got .* to line 103",
    ),
    "a null byte in a binary file": ("0,1,\x00\xff\n", {}, "not CSV in UTF-8"),
}


@pytest.mark.parametrize(
    "cell", ["1_000", "\u0661\u0662", "\uff11", "0x10", "1,5", "1e999", "-Infinity"]
)
def test_what_only_python_calls_a_number_is_refused(tmp_path, cell):
    path = write_csv(tmp_path / "a.csv", [{"y": 0, "x": 1}, {"y": 1, "x": cell}])
    with pytest.raises(ValueError, match=rf"line 3, column x: expected a .*number.*'{cell}'"):
        transcode_csv(CsvConfig(path, str(tmp_path / "out"), "y", ("x",)))


@pytest.mark.parametrize("others", [["2", "3"], ["", "n_a"]])
def test_cells_that_read_as_numbers_are_missing_where_the_user_says_so(tmp_path, others):
    cells = ["nan", "-inf", "-999", *others]
    path = write_csv(tmp_path / "a.csv", [{"y": 0, "x": cell} for cell in cells])
    transcode_csv(
        CsvConfig(
            path,
            str(tmp_path / "out"),
            "y",
            ("x",),
            missing_values=("nan", "-inf", "-999", "n_a"),
            numeric_transform="none",
            test_fraction=0.0,
        )
    )
    found = sorted(read_back(tmp_path / "out")["train"][0][:, 0].tolist())
    assert found == sorted([0, 0, 0, *(float(cell) if cell.isdigit() else 0 for cell in others)])


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, case):
    text, changes, message = BAD_FILES[case]
    path = tmp_path / "bad.csv"
    path.write_bytes(b"y,x,c\n" + text.encode("latin-1"))
    arguments = {"label": "y", "numerical": ("x",), "categorical": ("c",)} | changes
    with pytest.raises(ValueError, match=rf"bad\.csv.*{message}"):
        transcode_csv(CsvConfig(str(path), str(tmp_path / "out"), **arguments))
    assert [p.name for p in tmp_path.iterdir()] == ["bad.csv"]


def test_a_bad_cell_of_a_second_file_is_named_with_it(tmp_path):
    for name, cell in (("a", 1), ("b", "x")):
        (tmp_path / f"{name}.csv").write_text(f"y,x\n0,1\n1,{cell}\n")
    with pytest.raises(ValueError, match=r"b\.csv, line 3, column x"):
        transcode_csv(CsvConfig(str(tmp_path), str(tmp_path / "out"), "y", ("x",)))


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_number_too_large_is_named_with_its_file_among_others(tmp_path, name):
    for other in "abc":
        (tmp_path / f"{other}.csv").write_text("y,x\n" + "0,1\n" * 5)
    (tmp_path / f"{name}.csv").write_text("y,x\n0,1\n\n1,7e4\n")
    config = CsvConfig(str(tmp_path), str(tmp_path / "out"), "y", ("x",), numeric_transform="none")
    with pytest.raises(ValueError, match=rf"{name}\.csv, line 4, column x: 70000\.0 is beyond"):
        transcode_csv(config)


def test_a_headerless_file_read_as_one_with_a_header_says_how_to_tell(tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    with pytest.raises(ValueError, match="no column 'y'; the columns are 1, 2 .*--noheader"):
        transcode_csv(CsvConfig(str(tmp_path / "a.csv"), str(tmp_path / "out"), "y", ("x",)))


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
        ({"numeric_transform": "ln"}, "--numeric_transform: expected one of log"),
        ({"test_fraction": 1.0}, "--test_fraction"),
        ({"delimiter": "||"}, "--delimiter"),
        ({"frequency_limit": 0}, "--frequency_limit: expected 1 or more, got 0"),
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


def test_what_breaks_a_specification_is_named(tmp_path):
    def fails(message):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            transcode_spec(str(tmp_path), str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()

    def save(sections):
        (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(sections))

    write_spec(tmp_path, cardinality=4)
    fails(r"test_1\.csv, line 1, column user: .*less than its cardinality, 4, got '4'")
    write_spec(tmp_path, test_user=-3)
    fails(r"test_1\.csv, line 1, column user: expected an integer id from 0.*got '-3'")
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


def test_a_number_beyond_float16_in_adult_is_named(shared_data, tmp_path):
    config = CsvConfig(
        str(shared_data / "adult" / "adult.data"),
        str(tmp_path / "adult"),
        "income",
        ("fnlwgt",),
        positive=">50K",
        columns=ADULT_COLUMNS,
        numeric_transform="none",
    )
    with pytest.raises(ValueError, match=r"adult\.data, line \d+, column fnlwgt: \d+"):
        transcode_csv(config)

"""A dataset is converted back to Parquet, with ids or with the original values."""

import json
import os
import shutil
from collections import Counter, defaultdict
from datetime import datetime, timedelta, timezone

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preproc_testing import binary_files, write_days
from tables_testing import prepare
from test_inputs import prepared as prepared_logs
from test_scripts import PREPROC

from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.manifest import read_manifest
from dlrm.preproc import convert_to_parquet

convert = convert_to_parquet.convert_to_parquet
ROWS = 1000
PARTS = slice(0, 800), slice(800, ROWS)  # train and test
SCHEMA = {
    "label": {"column": "kind", "positive": "yes"},
    "numerical": ["x", {"column": "weight", "transform": "none"}],
    "categorical": [
        {"column": "city", "frequency_limit": 3, "hash_buckets": 5},
        {"column": "last_city", "dictionary": "cities"},
        {"column": "next_city", "dictionary": "cities"},
        {"column": "number", "type": "integer", "max_ids": 40},
    ],
    "weight": "weight",
    "groups": ["number"],
    "time": "when",
}
CITIES = ("city", "last_city", "next_city")


def table():
    """Columns as lists."""
    random = np.random.default_rng(5)
    cities = ["Zürich", "Genève", "東京", "a" * 300, " b ", "", None, *map(str, range(60))]
    begin = datetime(2026, 11, 20, tzinfo=timezone.utc)
    return {
        "kind": np.where(random.random(ROWS) < 0.3, "yes", "no").tolist(),
        "x": random.normal(0, 3, ROWS).tolist(),
        "weight": (random.integers(1, 64, ROWS) / 16).tolist(),
        **{name: [cities[i % 67] for i in random.zipf(1.4, ROWS)] for name in CITIES},
        "number": (random.zipf(1.3, ROWS) % 100 - 20).tolist(),
        "when": [begin + timedelta(seconds=i) for i in range(ROWS)],
    }


@pytest.fixture(scope="module")
def frame():
    return table()


@pytest.fixture(scope="module")
def dataset(local, frame, tmp_path_factory):
    """Of tables, with training rows in input order; the last 200 rows are test rows."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "in").mkdir()
    pq.write_table(pa.table(frame), folder / "in" / "rows.parquet", row_group_size=90)
    options = {"test_from": str(frame["when"][800]), "output_ordering": "input", "report": True}
    prepare(SCHEMA, [folder / "in"], folder / "dataset", local, **options)
    return folder / "dataset"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(convert_to_parquet, "_GROUP_ROWS", 300)


def stripped(value):
    return (value or "").strip() or None


def test_decoded_values_are_those_of_the_table(dataset, frame, tmp_path):
    assert convert(dataset, tmp_path / "out") == {"train": 800, "test": 200}
    train, test = ({name: v[part] for name, v in frame.items()} for part in PARTS)
    cities = Counter(filter(None, map(stripped, train["city"])))
    numbers = Counter(train["number"])
    known = {"city": {city for city, count in cities.items() if count >= 3}}
    known |= dict.fromkeys(CITIES[1:], {stripped(v) for name in CITIES[1:] for v in train[name]})
    known["number"] = {*sorted(numbers, key=lambda n: (-numbers[n], n < 0, n))[:40]}
    assert len(known["city"]) < len(cities)
    assert len(numbers) > 40
    for split, rows in {"train": train, "test": test}.items():
        found = pq.read_table(tmp_path / "out" / split)
        file = pq.ParquetFile(tmp_path / "out" / split / "part-0.parquet")
        assert file.num_row_groups == -(-len(rows["x"]) // 300)
        assert found["kind"].to_pylist() == [kind == "yes" for kind in rows["kind"]]
        for name, values in known.items():
            read = rows[name] if name == "number" else map(stripped, rows[name])
            expected = [value if value in values else None for value in read]
            assert found[name].to_pylist() == expected, name
        assert found.schema.field("number").type == pa.int64()
        x = (np.array(rows["x"]) - np.mean(train["x"])) / np.std(train["x"])
        np.testing.assert_array_equal(found["x"], x.astype("<f4").astype("<f2"))
        assert found["weight"].to_pylist() == rows["weight"]
        assert found["weight_"].to_pylist() == rows["weight"]  # the sample weight
        assert found["when"].to_pylist() == rows["when"]
        groups = defaultdict(set)
        for number, group in zip(rows["number"], found["group_number"].to_pylist(), strict=True):
            groups[number].add(group)
        assert len(set.union(*groups.values())) == sum(map(len, groups.values())) == len(groups)
    manifest = read_manifest(tmp_path / "out", convert_to_parquet.KIND, check_crc=True)
    assert manifest["rows"] == {"train": 800, "test": 200}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Lines of two days and their dataset, with training rows in order."""
    random, folder = np.random.default_rng(2), tmp_path_factory.mktemp("logs")
    values = ["a", "0000000b", "ffffffff", "123456789abcdef0", "100000000", "0", "", "12345678"]
    days = []
    for rows in (700, 250):
        fields = [random.choice(values + [f"{i:x}"], 3) for i in range(rows)]
        days.append([[f"{i % 2}", f"{i % 9}", "", *row] for i, row in enumerate(fields)])
    text = ["".join("\t".join(row) + "\n" for row in day) for day in days]
    options = ["--num_numerical=2", "--num_categorical=3", "--frequency_limit=5"]
    raw = write_days(folder / "raw", *text)
    return days, prepared_logs(raw, folder / "out", *options, "--output_ordering=input")


def test_values_of_logs_are_hexadecimal(logs, tmp_path):
    days, dataset = logs
    assert convert(dataset, tmp_path / "o") == {"train": 700, "test": 125, "validation": 125}
    parts = {"train": days[0], "test": days[1][:125], "validation": days[1][125:]}
    for split, rows in parts.items():
        found = pq.read_table(tmp_path / "o" / split)
        assert found["label"].to_pylist() == [row[0] == "1" for row in rows]
        numbers = [np.float16(np.float32(np.log(int(row[1]) + 2))) for row in rows]
        assert found["num_0"].to_pylist() == numbers
        for i in range(3):
            counts = Counter(int(row[3 + i], 16) for row in sum(days, []) if row[3 + i])
            keys = [int(row[3 + i], 16) if row[3 + i] else None for row in rows]
            expected = [f"{key:08x}" if counts[key] >= 5 else None for key in keys]
            assert found[f"cat_{i}"].to_pylist() == expected
    assert "123456789abcdef0" in set(found["cat_1"].to_pylist())


def test_ids_come_back_as_the_same_dataset(logs, tmp_path):
    _, dataset = logs
    assert sum(convert(dataset, tmp_path / "ids", "ids").values()) == 950
    sizes = json.loads((tmp_path / "ids" / "model_size.json").read_text())
    assert [size + 1 for size in sizes.values()] == FeatureSpec.load(dataset).cardinalities
    paths = [f"--src_dir={tmp_path / 'ids'}", f"--dst_dir={tmp_path / 'rows'}"]
    forked.succeed(PREPROC / "parquet_to_binary.py", *paths)
    numbers = f"--numerical_features={len(FeatureSpec.load(dataset).numerical)}"
    paths = [f"--dataset={tmp_path / 'rows'}", f"--output={tmp_path / 'again'}"]
    forked.succeed("dlrm.scripts.split_dataset", *paths, numbers)
    assert binary_files(tmp_path / "again") == binary_files(dataset)


def test_what_cannot_be_converted_is_named_and_leaves_nothing(dataset, logs, tmp_path):
    def refused(error, match, source, *arguments, **options):
        with pytest.raises(error, match=match):
            convert(source, tmp_path / "out", *arguments, **options)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*"))

    shutil.copytree(dataset, copy := tmp_path / "copy")
    with open(copy / "test" / "cat_0.bin", "r+b") as file:
        file.seek(150)
        file.write(b"\x7f")
    refused(ValueError, r"test/cat_0.bin.*CRC-32 .*damaged", copy)
    size = FeatureSpec.load(copy).cardinalities[0]
    expected = rf"cat_0.bin: row 150: expected an id within 0-{size - 1}, got 127"
    refused(ValueError, expected, copy, verify_data="never")
    os.truncate(copy / "train" / "weight.bin", 12)
    refused(ValueError, r"weight.bin: expected 3200 bytes, got 12", copy)
    (copy / "manifest.json").unlink()
    refused(ValueError, r"weight.bin: expected 3200 bytes \(800 rows.*got 12", copy, "ids")
    (copy / "transform" / "texts_0.npy").unlink()
    refused(FileNotFoundError, "texts_0.npy: missing", copy)
    shutil.rmtree(copy / "transform")
    refused(FileNotFoundError, "nothing says what ids stand for; --values ids", copy)
    refused(ValueError, "--values text: expected one of decoded, ids", dataset, "text")
    for output in (dataset, dataset / "parquet", dataset.parent):
        with pytest.raises(ValueError, match="expected a directory apart from"):
            convert(dataset, output, replace=True)
    convert(dataset, tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        convert(dataset, tmp_path / "out")
    assert convert(dataset, tmp_path / "out", "ids", replace=True)["test"] == 200

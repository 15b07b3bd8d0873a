"""Encodings never leak a row's own label and give a row the same numbers everywhere."""

import json
import math
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score
from tables_testing import contents, prepare

import dlrm
from dlrm.data.sources.columns import Coded, TextColumn, hash_texts
from dlrm.data.tables.row_reader import RowReader
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.transform import Transform
from dlrm.preproc.convert_to_parquet import convert_to_parquet
from dlrm.preproc.execution.engines import TaskError
from dlrm.serving.rows.raw import inputs_of_text, text_of_lines

ROWS = 4000
BOTH = ["count", {"kind": "target", "folds": 4, "smoothing": 2}]
SCHEMA = {
    "label": "y",
    "numerical": ["x"],
    "categorical": [
        {"column": "shop", "encodings": BOTH, "frequency_limit": 9},
        {"column": "user", "type": "integer", "encodings": ["target"]},
    ],
    "crosses": [{"fields": ["user", "shop"], "frequency_limit": 2, "encodings": ["count"]}],
    "missing_values": ["?"],
}
NAMES = ["x", "shop_count", "shop_target", "user_target", "user_x_shop_count"]


def table(rows=ROWS, seed=0):
    draw = np.random.default_rng(seed)
    shop = draw.integers(0, 40, rows)
    return pa.table(
        {
            "y": (draw.random(rows) < 0.1 + 0.02 * shop).astype(np.int8),
            "x": draw.normal(size=rows),
            "shop": pa.array([f"s{i}" if i else "?" for i in shop], mask=draw.random(rows) < 0.1),
            "user": pa.array(draw.integers(-9, 300, rows), mask=draw.random(rows) < 0.05),
            "w": draw.random(rows).astype(np.float32),
        }
    )


def numbers(dataset, split):
    values = np.fromfile(dataset / split / "numerical.bin", np.float16)
    return values.reshape(-1, values.size // (dataset / split / "label.bin").stat().st_size)


def labels(dataset, split):
    return np.fromfile(dataset / split / "label.bin", bool)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encodings")
    pq.write_table(table(), folder / "train.parquet")
    others = {"test": [write_test(folder)]}
    prepare(SCHEMA, [folder / "train.parquet"], folder / "d", others=others, report=True)
    return folder / "d"


def test_a_planted_leak_is_there_in_the_fold_and_not_out_of_it(tmp_path):
    """Labels are random, and each row's unique value would reveal its label if allowed."""
    draw = np.random.default_rng(3)
    ids = [f"id {i}" for i in range(ROWS)]
    rows = pa.table({"y": draw.integers(0, 2, ROWS), "id": ids})
    schema = {"label": "y", "categorical": [{"column": "id", "encodings": ["target"]}]}
    made = dlrm.Dataset.from_arrow(rows, schema, tmp_path / "d", output_ordering="input", test=rows)
    outside, inside = numbers(made.path, "train")[:, 0], numbers(made.path, "test")[:, 0]
    truth = labels(made.path, "train")
    assert roc_auc_score(truth, inside) == 1, "the same rows, encoded as any others are"
    assert roc_auc_score(truth, outside) == pytest.approx(0.5, abs=0.05)


def test_targets_are_of_the_other_folds_and_tell_what_they_can(dataset):
    """Labels depend on the shop; both splits learn as much from it."""
    found = [
        roc_auc_score(labels(dataset, s), numbers(dataset, s)[:, 2]) for s in ("train", "test")
    ]
    assert found[0] == pytest.approx(found[1], abs=0.03)
    assert min(found) > 0.6
    means = numbers(dataset, "train").astype(np.float64)
    np.testing.assert_allclose(means.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(means.std(0), 1, atol=1e-3)


def test_a_row_has_the_same_bits_as_test_rows_text_and_table(dataset):
    """`dlrm.load`, `predict` and the server use the last two."""
    transform = Transform.load(dataset / "transform")
    assert transform.schema.numerical_names == NAMES
    rows = table(900, 1)
    read, bad = RowReader(transform.schema).read(rows.combine_chunks().to_batches()[0])
    assert not bad
    of_table = transform.apply(read.numerical, read.categorical)
    columns = [rows[name].to_pylist() for name in transform.names]
    cells = [["" if v is None else str(v) for v in row] for row in zip(*columns, strict=True)]
    text = text_of_lines("\n".join(map("\t".join, cells)).encode(), len(cells[0]))
    of_text = inputs_of_text(Transform.load(dataset / "transform"), text)
    expected = numbers(dataset, "test")
    np.testing.assert_array_equal(of_table.numerical, expected)
    np.testing.assert_array_equal(of_text.numerical, expected)
    for i in range(3):
        ids = np.fromfile(dataset / "test" / f"cat_{i}.bin", of_table.ids[i].dtype)
        np.testing.assert_array_equal(of_table.ids[i], ids)
        np.testing.assert_array_equal(of_text.ids[:, i], ids)


def test_numbers_are_those_of_the_definition(dataset):
    """In plain Python, for a known, a missing and an unseen value."""
    shops = [None if s == "?" else s for s in table()["shop"].to_pylist()]
    clicks = table()["y"].to_pylist()
    transform = Transform.load(dataset / "transform")
    keys = hash_texts(TextColumn.from_bytes([b"s7", b"unseen"]))
    (_, field), encoded = transform.schema.encoded[0], transform.encoded[0]
    found = encoded(field.encodings, Coded(keys, np.array([0, -1, 1])), None)
    prior = sum(clicks) / len(clicks)
    for place, shop in enumerate(["s7", None, "unseen"]):
        own = [click for click, one in zip(clicks, shops, strict=True) if one == shop]
        assert found[0][place] == math.log1p(len(own))
        assert found[1][place] == (sum(own) + 2 * prior) / (len(own) + 2)


def test_weights_weigh_targets_and_not_counts(tmp_path):
    rows = pa.table({"y": [1, 0, 0, 1], "c": list("aabb"), "w": [0.5, 1.5, 3.0, 1.0]})
    schema = {"label": "y", "categorical": [{"column": "c", "encodings": BOTH}], "weight": "w"}
    made = dlrm.Dataset.from_arrow(rows, schema, tmp_path / "d", test=rows)
    values = Transform.load(made.path / "transform").encoded[0].values
    prior, strength = 1.5 / 6, 2 * 6 / 4
    shares = [(p + strength * prior) / (w + strength) for p, w in ((0, 0), (0.5, 2), (1, 4))]
    expected = {(math.log1p(n), share) for n, share in zip((0, 2, 2), shares, strict=True)}
    assert set(map(tuple, values[:3].tolist())) == expected
    heavy = rows.set_column(2, "w", [[1.0, 2.0**31, 1.0, 1.0]])
    with pytest.raises(ValueError, match="row 1, column w: expected a weight below 2147483648"):
        dlrm.Dataset.from_arrow(heavy, schema, tmp_path / "heavy", test=rows)


def test_values_far_from_training_are_the_largest_number(tmp_path):
    """For example an unseen value, where all counts are about equal."""
    rows = pa.table({"y": [0, 1] * 50, "c": ["a"] * 99 + ["b"]})
    schema = {"label": "y", "categorical": [{"column": "c", "encodings": ["count"]}]}
    made = dlrm.Dataset.from_arrow(rows, schema, tmp_path / "d", test=rows)
    transform = Transform.load(made.path / "transform")
    transform.numerical[0] = transform.numerical[0]._replace(deviation=1e-9)
    found = transform.of_texts([TextColumn.from_bytes([b"a", b"other"])]).numerical
    assert found[:, 0].tolist() == [65504.0, -65504.0]


def test_reports_checks_and_parquet_know_the_features(dataset, tmp_path, capsys):
    facts = json.loads((dataset / "report.json").read_text())
    assert [one["name"] for one in facts["numerical"]] == NAMES
    assert facts["numerical"][3]["encoding"] == {"kind": "target", "of": "user"}
    assert facts["numerical"][1]["missing"] == {"train": 0, "test": 0}
    assert facts["categorical"][2]["name"] == "user_x_shop"
    convert_to_parquet(dataset, tmp_path / "parquet")
    written = pq.read_table(tmp_path / "parquet" / "test" / "part-0.parquet")
    assert written.column_names == ["y", *NAMES, "shop", "user", "user_x_shop"]
    np.testing.assert_array_equal(
        written["user_target"].to_numpy(), numbers(dataset, "test")[:, 3].astype(np.float32)
    )
    users, shops = table(900, 1)["user"].to_pylist(), table(900, 1)["shop"].to_pylist()
    found = written["user_x_shop"].to_pylist()
    assert any(found)
    for crossed, user, shop in zip(found, users, shops, strict=True):
        assert crossed in (None, f"{user} & {shop}")


def test_other_encodings_make_another_transform(dataset, tmp_path):
    shutil.copytree(dataset / "transform", tmp_path / "model" / "transform")
    first, second = SCHEMA["categorical"]
    pq.write_table(table(), tmp_path / "a.parquet")
    for name, entry, expected in (
        ("same", BOTH, None),
        ("kinds", ["target"], "encodings of shop: count, target for the model and target here"),
        ("numbers", ["count", "target"], "encodings of shop: other numbers for its values"),
    ):
        schema = SCHEMA | {"categorical": [{**first, "encodings": entry}, second]}
        others = {"test": [write_test(tmp_path)]}
        prepare(schema, [tmp_path / "a.parquet"], tmp_path / name, others=others)
        if expected is None:
            assert compare_transforms(tmp_path / "model", tmp_path / name) is None
            continue
        with pytest.raises(ValueError, match=re.escape(expected)):
            compare_transforms(tmp_path / "model", tmp_path / name)


def write_test(folder):
    pq.write_table(table(900, 1), folder / "test.parquet")
    return folder / "test.parquet"


def test_a_damaged_file_is_named(dataset, tmp_path):
    for name, content in contents(dataset / "transform").items():
        (tmp_path / name).write_bytes(content)
    values = np.load(tmp_path / "encoded_values_1.npy", mmap_mode="r+")
    values[3] += 1
    transform = Transform.load(tmp_path)
    with pytest.raises(ValueError, match="encoded_values_1.npy: expected CRC-32"):
        transform.check_all()
    np.save(tmp_path / "encoded_values_1.npy", values[1:])
    with pytest.raises(
        ValueError, match=r"encoded_values_1.npy: expected shape \[\d+, 1\] of type"
    ):
        Transform.load(tmp_path)
    (tmp_path / "encoded_keys_0.npy").unlink()
    with pytest.raises(FileNotFoundError, match="encoded_keys_0.npy: missing"):
        Transform.load(tmp_path)


def test_a_column_that_is_not_there_is_named(tmp_path):
    pq.write_table(table(), tmp_path / "a.parquet")
    entry = {"column": "shpo", "encodings": ["target"]}
    with pytest.raises((ValueError, TaskError), match=r"a\.parquet: no column 'shpo'; the columns"):
        prepare(SCHEMA | {"categorical": [entry], "crosses": []}, [tmp_path], tmp_path / "d")


def test_a_schema_describes_a_log_in_criteos_format(tmp_path):
    """Without a header: label, 13 integers, 26 hashes, separated by tabs."""
    draw = np.random.default_rng(0)
    lines = []
    for row in range(300):
        integers = ["" if draw.random() < 0.3 else str(draw.integers(-2, 99)) for _ in range(13)]
        hashes = [f"{draw.integers(0, 20):08x}" * (draw.random() < 0.9) for _ in range(26)]
        lines.append("\t".join([str(row % 2), *integers, *hashes]) + "\n")
    (tmp_path / "day_0.csv").write_text("".join(lines))
    schema = {
        "label": "0",
        "numerical": [{"column": str(i), "transform": "log"} for i in range(1, 14)],
        "categorical": [{"column": str(i), "encodings": ["target"]} for i in range(14, 40)],
        "crosses": [{"fields": ["14", "15"], "buckets": 100}],
    }
    options = {"header": False, "delimiter": "\t", "test_fraction": 0.2}
    prepare(schema, [tmp_path / "day_0.csv"], tmp_path / "d", **options)
    assert numbers(tmp_path / "d", "test").shape == (60, 13 + 26)
    assert (tmp_path / "d" / "test" / "cat_26.bin").stat().st_size == 60

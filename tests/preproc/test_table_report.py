"""The report on tables: raw units, drift of splits, days and files, and a page for every screen."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preproc_testing import Page
from tables_testing import prepare

from dlrm.data.transform.transform import Transformed
from dlrm.preproc.report.statistics import Periods, Statistics, ends_of_bin

DAY = 86_400_000_000
NASTY = "<b>&amp; a name that is much longer than a phone is wide, of forty words or so"
SCHEMA = {
    "label": "bought",
    "numerical": [
        {"column": "age", "transform": "standardize"},
        {"column": "price", "transform": "log"},
        {"column": "delay", "transform": "quantile"},
        {"column": "ratio", "transform": "none"},
    ],
    "categorical": [
        {"column": "color", "max_ids": 2, "hash_buckets": 3},
        {"column": NASTY, "type": "integer", "frequency_limit": 3},
    ],
}


def table(rows=4000):
    random = np.random.default_rng(3)
    split = np.where(np.arange(rows) % 4 == 0, "test", "train").astype(object)
    split[::16] = "validation"
    day = np.arange(rows) * 3 // rows  # 0, 1, 2
    color = np.where(np.arange(rows) % 2 == 0, "red", "blue").astype(object)
    color[split == "test"] = "red"
    color[5::21] = "rare"
    color[1::40] = None
    age = random.integers(18, 81, rows).astype(float)
    age[random.random(rows) < 0.25] = np.nan
    return pa.table(
        {
            "bought": random.random(rows) < 0.25,
            "age": pa.array(age, from_pandas=True),
            "price": np.where(random.random(rows) < 0.4, 0.0, random.lognormal(3, 1, rows)),
            "delay": random.integers(-500, 500, rows),
            "ratio": random.normal(0, 4, rows),
            "color": pa.array(color),
            NASTY: random.integers(-1, 1200, rows),
            "split": split,
            "when": pa.array(day * DAY + 20_000 * DAY + 5, pa.timestamp("us", "UTC")),
        }
    )


def prepared(local, folder, output, schema=None, division=None, **options):
    division = division or {"split_column": "split"}
    prepare(schema or SCHEMA, [folder], output, local, report=True, **division, **options)
    return json.loads((output / "report.json").read_text())


@pytest.fixture(scope="module")
def whole():
    return table()


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    """Three files, one a day, each of several row groups."""
    folder = tmp_path_factory.mktemp("tables")
    days = whole["when"].cast(pa.int64()).to_numpy() // DAY
    for day in np.unique(days):
        part = whole.filter(pa.array(days == day))
        pq.write_table(part, folder / f"part-{day}.parquet", row_group_size=300)
    return folder


@pytest.fixture(scope="module")
def timed(local, folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("timed") / "dataset"
    return prepared(local, folder, output, SCHEMA | {"time": "when"}), output


def test_quantiles_are_in_the_units_of_the_column(timed, whole):
    report, _ = timed
    train = whole.filter(pa.array(whole["split"].to_numpy(zero_copy_only=False) == "train"))
    for feature in report["numerical"]:
        values = train[feature["name"]].drop_null().to_numpy()
        scale = np.abs(values - values.mean()).max() if feature["name"] == "age" else 1
        for quantile, found in feature["quantiles"].items():
            shares = np.clip(float(quantile) + np.array([-0.01, 0.01]), 0, 1)
            slack = 0.01 * max(abs(found), scale) * np.array([-1, 1])
            low, high = np.quantile(values, shares) + slack
            assert low <= found <= high, (feature["name"], quantile)
    age, price, delay, ratio = report["numerical"]
    assert age["missing"]["train"] == round(train["age"].null_count / len(train), 6)
    assert all(isinstance(value, int) for value in age["quantiles"].values())
    assert price["quantiles"]["0.25"] == 0
    assert min(delay["quantiles"].values()) < -450
    assert min(ratio["quantiles"].values()) < -8
    rules = ["standardize", "log", "quantile", "none"]
    assert [feature["transform"] for feature in report["numerical"]] == rules


def test_categorical_fields_say_ids_buckets_and_what_has_none(timed, whole):
    report, _ = timed
    color, number = report["categorical"]
    splits = whole["split"].to_numpy(zero_copy_only=False)
    names = ("train", "test", "validation")
    parts = {name: whole.filter(pa.array(splits == name)) for name in names}
    train, test = parts["train"], parts["test"]
    assert (color["distinct_values"], color["max_ids"], color["hash_buckets"]) == (3, 2, 3)
    assert color["cardinality"] == 1 + 2 + 3
    assert set(color["values_without_id"].values()) == {0}
    rare = {name: part["color"].to_pylist() for name, part in parts.items()}
    third = min({"red", "blue", "rare"}, key=rare["train"].count)
    assert color["values_in_buckets"] == {
        name: round(values.count(third) / (len(values) - values.count(None)), 6)
        for name, values in rare.items()
    }
    assert color["missing"]["train"] == round(train["color"].null_count / len(train), 6)
    values, counts = np.unique(train[NASTY].to_numpy(), return_counts=True)
    own = values[counts >= 3]
    assert (number["distinct_values"], number["cardinality"]) == (len(values), 1 + len(own))
    outside = ~np.isin(test[NASTY].to_numpy(), own)
    assert number["values_without_id"]["test"] == round(float(outside.mean()), 6)


def test_drift_is_the_population_stability_index_against_training_rows(local, tmp_path):
    """Two halves against shares of 0.9 and 0.1: 0.4 ln 1.8 - 0.4 ln 0.2."""
    days, even = np.repeat([0, 1, 2, 3], 100), ["a"] * 50 + ["b"] * 50
    numbers = np.tile(1000 + np.linspace(-7.77, 7.77, 100), 4)
    numbers[350:] = np.nan
    rows = pa.table(
        {
            "bought": days % 2,
            "kind": [*even, *even, *(["a"] * 90 + ["b"] * 10), *even],
            "number": pa.array(numbers, from_pandas=True),
            "when": pa.array(days * DAY - 2 * DAY, pa.timestamp("us", "UTC")),
        }
    )
    (tmp_path / "in").mkdir()
    pq.write_table(rows, tmp_path / "in" / "all.parquet")
    schema = {"label": "bought", "categorical": ["kind"], "numerical": ["number"], "time": "when"}
    division = {"test_from": "1970-01-01", "validation_from": "1970-01-02"}
    report = prepared(local, tmp_path / "in", tmp_path / "out", schema, division)
    expected = round(0.4 * np.log(1.8) - 0.4 * np.log(0.2), 4)
    (kind,), (number,) = report["categorical"], report["numerical"]
    of_splits = {"test": expected, "validation": 0}
    assert kind["drift"] == {"splits": of_splits, "slices": [0, 0, expected, 0]}
    # Half of the last day is missing, and so are five of ten bins; 1e-4 replaces 0.
    gone, rare = 1e-4, 5 * (1e-4 - 0.1) * np.log(1e-4 / 0.1)
    expected = round((0.5 - gone) * np.log(0.5 / gone) + rare, 4)
    assert number["drift"]["slices"] == [0, 0, 0, pytest.approx(expected, abs=2e-4)]
    assert number["missing"] == {"train": 0, "test": 0, "validation": 0.5}
    assert number["quantiles"]["0.5"] == 999.92  # 999.9215, within 1/512 deviation
    assert report["sliced_by"] == "day"
    first = {"slice": "1969-12-31", "rows": 100, "positives": 100, "positive_rate": 1.0}
    assert report["slices"][1] == first


def test_days_are_told_apart_where_there_are_times_and_files_elsewhere(
    timed, local, folder, whole, tmp_path
):
    by_time, by_file = timed[0], prepared(local, folder, tmp_path / "files")
    assert (by_time["sliced_by"], by_file["sliced_by"]) == ("day", "file")
    assert [one["slice"] for one in by_time["slices"]] == ["2024-10-04", "2024-10-05", "2024-10-06"]
    assert [one["slice"] for one in by_file["slices"]] == [
        f"part-{20_000 + day}.parquet" for day in range(3)
    ]
    for mine, theirs in zip(by_time["slices"], by_file["slices"], strict=True):
        assert {**mine, "slice": ""} == {**theirs, "slice": ""}
    for kind in ("numerical", "categorical"):
        assert by_time[kind] == by_file[kind]
    labels = whole["bought"].to_numpy(zero_copy_only=False)
    assert sum(one["positives"] for one in by_file["slices"]) == labels.sum()


def test_rows_left_out_are_counted(local, tmp_path):
    splits = ["train"] * 82 + ["test"] * 10 + ["validation"] * 7
    text = ["bought,age,split", *(f"{i % 2},{i},{split}" for i, split in enumerate(splits))]
    text[7] = "1,old,train"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.csv").write_text("\n".join(text) + "\n")
    division = {"split_column": "split", "keep_negatives": 0.25}
    schema, aside = {"label": "bought", "numerical": ["age"]}, {"bad_lines": "quarantine"}
    paths = tmp_path / "in", tmp_path / "out"
    report = prepared(local, *paths, schema, division, max_bad_lines=0.1, **aside)
    assert report["rows_quarantined"] == [{"file": "rows.csv", "rows": 1}]
    kept = report["splits"]["train"]["rows"] - report["splits"]["train"]["positives"]
    assert report["negatives"] == {"kept": 0.25, "rows_left_out": 40 - kept}
    assert 0 < kept < 40
    assert report["sliced_by"] is None
    text = (tmp_path / "out" / "report.html").read_text()
    assert "a share of 0.25 is kept" in text
    assert "rows.csv" in text


def test_page_shows_ten_features_first_and_all_of_them_on_demand(local, tmp_path):
    random, names = np.random.default_rng(0), [f"f{i}" for i in range(14)]
    splits = ["train"] * 300 + ["test"] * 299 + ["validation"]
    rows = {"bought": random.random(600) < 0.5, "split": splits}
    rows |= {name: random.random(600) + np.repeat([0, i / 9], 300) for i, name in enumerate(names)}
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(rows), tmp_path / "in" / "all.parquet")
    schema = {"label": "bought", "numerical": names}
    report = prepared(local, tmp_path / "in", tmp_path / "out", schema)
    drift = {f["name"]: max(f["drift"]["splits"].values()) for f in report["numerical"]}
    worst = sorted(drift, key=drift.get, reverse=True)[:10]
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert [row[0] for row in page.tables[0][1:]] == worst
    largest = [[f"{drift[name]:.3f}", "large"] for name in worst[:3]]
    assert [row[2:4] for row in page.tables[0][1:4]] == largest
    everything = page.tables[1]
    assert [row[0] for row in everything[1:]] == names
    drifted = sum(value >= 0.1 for value in drift.values())
    assert f"<dt>fields that drift</dt><dd>{drifted}</dd>" in text
    scale = min(max(drift.values()), 0.6)
    found = set(re.findall(r'<s style="left:(.*?)"', text))
    assert found == {f"{100 * limit / scale:.1f}%" for limit in (0.1, 0.25)}
    assert page.tags.index("details") < page.tags.index("summary")
    assert text.index("<details") < text.index("Drift of every field") < text.index("</details>")


def test_page_fits_a_phone_and_escapes_names(timed):
    text = (timed[1] / "report.html").read_text()
    page = Page(text)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "&lt;b&gt;&amp;amp; a name" in text
    assert "<b>&" not in text
    assert {"caption", "details", "summary", "main", "h1"} <= set(page.tags)
    assert page.tags.count("caption") == page.tags.count("table") == text.count('role="region"')
    rows = next(one for one in page.tables if one[0] == ["part", "rows", "share positive"])
    assert [row[1] for row in rows[1:]] == ["1,334", "1,333", "1,333"]  # labels of the bars


def test_periods_are_days_or_weeks():
    assert Periods.from_times(0, 31 * DAY - 1, 31) == (0, 1)
    assert Periods.from_times(0, 31 * DAY, 31) == (0, 7)
    assert Periods.from_times(-1, 0, 31) == (-1, 1)
    assert Periods.from_times(0, 1000 * DAY, 31) == (0, 35)
    times = np.array([8 * DAY, -1, 0, 7 * DAY - 1, -DAY])
    found = {name: rows.tolist() for name, rows in Periods(-1, 7).divide(times)}
    assert found == {"1969-12-31": [1, 2, 4], "1970-01-07": [0, 3]}


def test_ends_of_a_bin_hold_every_number_that_is_counted_in_it():
    random = np.random.default_rng(1)
    numbers = np.r_[random.normal(0, 1, 200), random.lognormal(0, 6, 200), 0.0, 65504.0, -65504.0]
    for number in numbers[np.abs(numbers) <= 65504]:
        counts = Statistics.empty(1, 0)
        rows = Transformed(np.array([[number]]).astype(np.float16), [], 0)
        counts.add(np.ones(1, bool), rows, np.zeros((1, 1), bool), [])
        least, greatest = ends_of_bin(np.flatnonzero(counts.numbers[0]))
        assert least <= number <= greatest
        assert greatest - least <= max(abs(number) / 50, 1e-6)

"""`dlrm.scripts.evaluate` on a table's dataset with groups, weights and sampled negatives."""

import json

import forked
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

import dlrm

SCHEMA = """
label: clicked
numerical: [age]
categorical: [city]
weight: importance
groups: [user]
time: {column: seen, unit: s}
"""
DAY = 86_400


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A table's dataset and a model, trained on 0.3 of the negatives."""
    folder = tmp_path_factory.mktemp("table")
    random = np.random.default_rng(0)
    rows = 1500
    ages, cities = random.integers(18, 90, rows), random.choice(list("xyz"), rows)
    chances = 1 / (1 + np.exp(-(ages - 70 + 20 * (cities == "x")) / 10))
    columns = {
        "clicked": (random.random(rows) < chances).astype(np.int8),
        "age": ages,
        "city": cities,
        "importance": random.integers(0, 3, rows),
        "user": [f"u{user}" for user in random.integers(0, 30, rows)],
        "device": random.choice(list("pq"), rows),
        "seen": 19_000 * DAY + random.integers(-2 * DAY, 2 * DAY, rows),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    pa.csv.write_csv(pa.table(columns), folder / "rows.csv")
    lines = [json.dumps(row) for row in pa.table(columns).to_pylist()]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "schema.yaml").write_text(SCHEMA)
    for words in (
        ["prepare", f"--schema={folder / 'schema.yaml'}", f"--input={folder / 'rows.parquet'}"]
        + [f"--output={folder / 'dataset'}", "--keep_negatives=0.3", "--cores=1", "--noreport"],
        ["main", f"--dataset={folder / 'dataset'}", "--base_device=cpu", "--embedding_dim=4"]
        + ["--bottom_mlp_sizes=8,4", "--top_mlp_sizes=8,1", "--max_steps=60", "--batch_size=64"]
        + ["--mlp_optimizer=adam", "--embedding_optimizer=adam", "--lr=0.02", "--warmup_steps=0"]
        + ["--decay_steps=0", f"--save_checkpoint_path={folder / 'run'}"],
    ):
        forked.succeed(f"dlrm.scripts.{words[0]}", *words[1:])
    return folder


def judged(model, *flags):
    words = [f"--checkpoint={model / 'run'}", "--bootstrap=5", f"--output={model / 'out'}"]
    done = forked.call("dlrm.scripts.evaluate", *words, *flags, code=0)
    return done.stdout, json.loads((model / "out" / "evaluation.json").read_text())


def evaluated(model, *flags):
    said, facts = judged(model, f"--dataset={model / 'dataset'}", *flags)
    return said, facts["models"][0]


def check_metrics(found, labels, chances, weights, groups):
    """Compares a model's metrics with those of scikit-learn, group by group."""
    expected = roc_auc_score(labels, chances, sample_weight=weights)
    assert found["auc"]["value"] == pytest.approx(expected, rel=1e-5)
    grouped, impressions = 0.0, 0.0
    for group in np.unique(groups):
        mine = (groups == group) & (weights > 0)
        if 0 < labels[mine].sum() < mine.sum():
            share = weights[mine].sum()
            auc = roc_auc_score(labels[mine], chances[mine], sample_weight=weights[mine])
            grouped, impressions = grouped + share * auc, impressions + share
    assert found["gauc_by_impressions"]["value"] == pytest.approx(grouped / impressions, rel=1e-5)


def test_groups_weights_and_days_are_those_of_the_dataset(model):
    data = f"--dataset={model / 'dataset'}"
    _, facts = judged(model, data, "--groups=user", "--weights=importance", "--slices=day")
    rows, chances = rows_and_chances(model)
    test = test_rows(len(chances))
    labels, weights, users = (rows[name][test] for name in ("clicked", "importance", "user"))
    check_metrics(facts["models"][0], labels, chances[test], weights, users)
    check_days(facts, rows["seen"][test], labels, chances[test], weights)


def check_days(facts, times, labels, chances, weights):
    (slices,) = [one["slices"] for one in facts["slices"] if one["by"] == "day (UTC)"]
    expected = {18_998: "2022-01-06", 18_999: "2022-01-07", 19_000: "2022-01-08"}
    expected[19_001] = "2022-01-09"
    assert [one["name"] for one in slices] == list(expected.values())
    for day, one in zip(expected, slices, strict=True):
        mine = times // DAY == day
        assert (one["rows"], one["clicks"]) == (mine.sum(), labels[mine].sum())
        auc = roc_auc_score(labels[mine], chances[mine], sample_weight=weights[mine])
        assert one["models"][0]["auc"]["value"] == pytest.approx(auc, rel=1e-5)


def test_groups_weights_and_days_are_columns_of_a_raw_table(model):
    rows, chances = rows_and_chances(model)
    for groups, weights, kind in (
        ("user", "weight", "parquet"),
        ("device", "age", "csv"),
        ("city", "importance", "jsonl"),
    ):
        column = rows["importance" if weights == "weight" else weights]
        given = (f"--groups={groups}", f"--weights={weights}", "--slices=day")
        said, facts = judged(model, f"--input={model / 'rows'}.{kind}", *given)
        assert "over groups" in said
        check_metrics(facts["models"][0], rows["clicked"], chances, column, rows[groups])
        check_days(facts, rows["seen"], rows["clicked"], chances, column)


def test_a_model_of_another_dictionary_reads_rows_by_its_own(model, tmp_path):
    rows = pq.read_table(model / "rows.parquet").sort_by("city")
    pq.write_table(rows.slice(600), tmp_path / "other.parquet")  # most are of z, none is of x
    words = [f"--schema={model / 'schema.yaml'}", f"--input={tmp_path / 'other.parquet'}"]
    words += [f"--output={tmp_path / 'd'}", "--cores=1", "--noreport"]
    forked.succeed("dlrm.scripts.prepare", *words)
    small = ["--embedding_dim=4", "--bottom_mlp_sizes=4", "--top_mlp_sizes=8,1", "--max_steps=20"]
    small += [f"--dataset={tmp_path / 'd'}", "--base_device=cpu", "--lr=0.1", "--warmup_steps=0"]
    forked.succeed("dlrm.scripts.main", *small, f"--save_checkpoint_path={tmp_path / 'run'}")
    where = f"--input={model / 'rows.parquet'}"
    _, facts = judged(model, where, f"--against={tmp_path / 'run'}")
    alone = dlrm.load(tmp_path / "run").evaluate(pq.read_table(model / "rows.parquet"))
    assert facts["models"][1]["auc"]["value"] == pytest.approx(alone["auc"], abs=1e-6)
    assert facts["models"][1]["log_loss"]["value"] == pytest.approx(alone["log_loss"], abs=1e-6)


def refused(model, *flags):
    done = forked.call("dlrm.scripts.evaluate", f"--checkpoint={model / 'run'}", *flags)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_columns_that_are_not_there_are_named(model, tmp_path):
    dataset, table = f"--dataset={model / 'dataset'}", f"--input={model / 'rows.parquet'}"
    assert "test, which has user" in refused(model, dataset, "--groups=nope")
    line = refused(model, dataset, "--weights=nope")
    assert "weights of" in line
    assert "test, which has weight" in line
    line = refused(model, dataset, "--groups=user", "--split=validation")
    assert "validation, which does not exist" in line
    assert "no column 'nope'; the columns are clicked, age," in refused(
        model, table, "--groups=nope"
    )
    assert "no/such.npy: no such file (--weights)" in refused(model, table, "--weights=no/such.npy")
    line = refused(model, table, "--weights=city")
    assert "row 0, column city: expected a number" in line


def rows_and_chances(model):
    """Returns the table's columns and the model's predictions."""
    rows = {name: np.asarray(column) for name, column in column_of(model).items()}
    inputs = {name: rows[name] for name in ("age", "city")}
    return rows, dlrm.load(model / "run").predict(inputs)


def test_a_sample_of_negatives_is_said_and_corrected(model):
    said, biased = evaluated(model)
    assert "was trained on 0.3 of the rows with label 0" in said
    assert biased["calibration"]["value"] > 1.3
    said, corrected = evaluated(model, "--sampling_rate=0.3")
    assert "was trained on" not in said
    assert corrected["calibration"]["value"] == pytest.approx(1, abs=0.25)
    assert corrected["auc"]["value"] == pytest.approx(biased["auc"]["value"])


def column_of(model):
    return pq.read_table(model / "rows.parquet").to_pydict()


def test_rows(rows):
    """The rows that `--test_fraction 0.2` takes, in order; see tests/preproc/tables."""
    mask = 2**64 - 1
    hashes = []
    for row in range(rows):
        x = ((row + 1) * 0x9E3779B97F4A7C15 + 0x5EED_0001) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        hashes.append(x ^ (x >> 31))
    return np.sort(np.argsort(hashes)[: rows // 5])


test_rows.__test__ = False


def test_the_share_of_kept_negatives_is_said_by_all_commands(model):
    words = [f"--dataset={model / 'dataset'}", "--mode=test", "--base_device=cpu"]
    words += ["--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=8,1"]
    done = forked.run("dlrm.scripts.main", *words, f"--load_checkpoint_path={model / 'run'}")
    assert "note: training rows are 0.3 of those with label 0" in done.stdout, done.stderr
    assert "note: the dataset's sample weights weight the loss" in done.stdout
    scores = (f"--checkpoint={model / 'run'}", f"--output={model / 'scores.npy'}")
    done = forked.call("dlrm.scripts.predict", *scores, f"--input={model / 'rows.parquet'}")
    assert "was trained on 0.3 of the rows with label 0" in done.stdout, done.stderr
    assert "has no fitted transform" not in done.stdout


def test_converted_numbers_are_no_raw_rows(model):
    converted = model / "converted"
    words = [f"--dataset={model / 'dataset'}", f"--output={converted}"]
    forked.call("dlrm.scripts.convert", *words, code=0)
    scores = (f"--checkpoint={model / 'run'}", f"--output={model / 'scores.npy'}")
    done = forked.call("dlrm.scripts.predict", *scores, f"--input={converted / 'test'}")
    assert done.returncode == 1
    assert "are transformed already" in done.stderr


def test_a_page_replaces_nothing_but_a_page(model):
    words = [f"--checkpoint={model / 'run'}", f"--dataset={model / 'dataset'}", "--bootstrap=5"]
    done = forked.call("dlrm.scripts.evaluate", *words, f"--output={model / 'dataset'}")
    assert done.returncode == 1
    assert "expected nothing, or an earlier evaluation to replace, got a 'dataset'" in done.stderr
    assert (model / "dataset" / "feature_spec.yaml").exists()

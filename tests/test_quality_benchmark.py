"""`benchmarks/quality.py` reads tables, tunes on training rows alone, and scores test rows once."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

import dlrm
from dlrm.data.schema.schema import Schema

SCHEMA = {
    "label": {"column": "y", "positive": "yes"},
    "missing_values": ["?"],
    "numerical": ["x"],
    "categorical": ["shop"],
}


@pytest.fixture(scope="module")
def quality(root):
    sys.path.insert(0, str(root / "benchmarks"))
    import quality

    yield quality
    sys.path.remove(str(root / "benchmarks"))


def table(rows, seed):
    random = np.random.default_rng(seed)
    x, shop = random.normal(size=rows), random.integers(0, 10, rows)
    clicked = random.random(rows) < 1 / (1 + np.exp(-x - np.sin(shop)))
    return pa.table(
        {"y": np.where(clicked, "yes", "no"), "x": x, "shop": [f"s{one}" for one in shop]}
    )


def job(quality, contender, test, **others):
    given = {"space": None, "in_order": False, "trials": 3, "members": 2, "seed": 1, "threads": 1}
    schema = Schema.from_dict(SCHEMA)
    given |= {"contender": contender, "train": table(800, 0), "test": test, "schema": schema}
    return quality.Job(**given | others)


def test_an_untuned_model_is_that_of_fit(quality):
    test = table(400, 1)
    found = quality.contend(job(quality, "as_it_was", test, members=2))
    labels = np.array(test["y"]) == "yes"
    train = table(800, 0)
    dataset = dlrm.Dataset.from_arrow(train, SCHEMA, test=train.slice(0, 100))
    settings = {"test_freq": 10**9, "set_aside": 0.0, "base_device": "cpu"}
    logits = [dlrm.fit(dataset, seed=seed, **settings).logits(test) for seed in (1, 2)]
    for one, metrics in zip(logits, found["members"], strict=True):
        assert metrics["auc"] == pytest.approx(roc_auc_score(labels, one))
        probability = 1 / (1 + np.exp(-one.astype(np.float64)))
        assert metrics["log_loss"] == pytest.approx(log_loss(labels, probability))
        assert metrics["calibration"] == pytest.approx(probability.sum() / labels.sum())
    mean = roc_auc_score(labels, np.mean(logits, 0))
    assert found["mean of members"]["auc"] == pytest.approx(mean)
    assert found["trials"] == []


@pytest.fixture
def in_this_process(quality, monkeypatch):
    """Runs contenders in this process; returns the jobs done."""
    done = []

    def contend(given):
        done.append(given)
        return quality.contend(given)

    monkeypatch.setattr(quality, "_in_a_process", contend)
    return done


def run(quality, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, words)])
    quality.main()


def test_anyones_rows_are_judged_and_results_kept(
    quality, monkeypatch, in_this_process, tmp_path, capsys
):
    pq.write_table(table(600, 0), tmp_path / "train.parquet")
    cells = zip(*table(300, 1).to_pydict().values(), strict=True)
    lines = ["y,x,shop", *(",".join(map(str, row)) for row in cells), "no,?,?"]
    (tmp_path / "test.csv").write_text("\n".join(lines) + "\n")
    Schema.from_dict(SCHEMA).save(tmp_path / "schema.yaml")
    words = [
        *(f"--raw={tmp_path / 'train.parquet'}", f"--test={tmp_path / 'test.csv'}"),
        *(f"--schema={tmp_path / 'schema.yaml'}", f"--output={tmp_path / 'results.json'}"),
        *("--contenders=as_it_was,logistic", "--trials=2", "--members=2"),
        *("--against=logistic", "--threads=1"),
    ]
    run(quality, monkeypatch, *words)
    shown = capsys.readouterr().out
    assert "600 training and 301 test rows, 1 fold" in shown
    assert "as_it_was, mean of 2" in shown
    assert "paired with logistic" in shown
    assert 'logistic: {"C"' in shown
    assert [one.contender for one in in_this_process] == ["as_it_was", "logistic"]
    held_out = in_this_process[0].train
    assert in_this_process[0].in_order
    assert len(held_out) == 600
    run(quality, monkeypatch, *words)
    assert len(in_this_process) == 2
    assert capsys.readouterr().out == shown
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert len(results) == 2
    with pytest.raises(SystemExit):
        run(quality, monkeypatch, *words, "--trials=3")
    assert "--trials 3: " in capsys.readouterr().err


def test_adult_is_divided_in_folds_that_are_tested_once(quality, tmp_path):
    line = "{}, Private, 2, Bachelors, 13, ?, Sales, Own, White, Male, 0, 0, 40, Peru, {}"
    lines = [line.format(age, (" <=50K", " >50K")[age % 2]) for age in range(50)]
    (tmp_path / "adult.data").write_text("\n".join(lines) + "\n\n")
    options = quality.argparse.Namespace(adult=tmp_path / "adult.data", folds=5, seed=1)
    data = quality._adult(options)
    tested = [test["age"].to_pylist() for _, test in data.splits]
    assert sorted(sum(tested, [])) == list(range(50))
    for train, test in data.splits:
        assert sorted(train["age"].to_pylist() + test["age"].to_pylist()) == list(range(50))
    rows = data.splits[0][1]
    assert set(rows["marital_status"].to_pylist()) == {None}
    assert quality.labels_of(rows, data.schema).tolist() == [age % 2 for age in tested[0]]


def test_differences_are_paired_over_folds(quality):
    def result(*aucs):
        members = [{"auc": one, "log_loss": 0.5, "calibration": 1.0} for one in aucs]
        mean = {"auc": max(aucs) + 0.1, "log_loss": 0.4, "calibration": 1.0}
        costs = {"tuning_seconds": 2.0, "fit_seconds": 1.5, "peak_bytes": 5e8}
        return {"members": members, "mean of members": mean, **costs}

    results = {
        "rows/ours/0": result(0.70, 0.72),
        "rows/ours/1": result(0.80, 0.82),
        "rows/logistic/0": result(0.70),
        "rows/logistic/1": result(0.83),
    }
    split = (table(20, 0), table(5, 1))
    data = quality.Data("rows", Schema.from_dict(SCHEMA), [split, split])
    lines = quality.report(data, ["ours", "logistic"], results, "logistic")
    by_name = {line[:12].strip(): line.split() for line in lines}
    assert by_name["ours"][1:4] == ["-0.00500", "±", "0.02121"]  # mean of 0.01 and -0.02
    assert by_name["ours"][-3:] == ["1", "of", "2"]
    assert "0.76000 ± 0.07071" in "\n".join(lines)
    assert "0.87000 ± 0.07071" in "\n".join(lines)  # the mean of members

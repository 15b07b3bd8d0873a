"""`dlrm.scripts.predict`: a score for every row of a log, a CSV or a dataset, in order."""

import bz2
import gzip
import json
import lzma
import os
import re
from functools import partial

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trained_model
from sklearn.metrics import log_loss, roc_auc_score

import dlrm
from dlrm.data.clicks.feature_spec import FeatureSpec

predict = partial(forked.call, "dlrm.scripts.predict")
scored = partial(predict, code=0)


def flags_of(trained, source, output, *others):
    return (
        f"--checkpoint={trained.checkpoint}",
        f"--input={source}",
        f"--output={output}",
        *others,
    )


def ids_of_test(trained, index):
    spec = FeatureSpec.load(trained.dataset)
    name = spec.categorical[index]
    return np.fromfile(spec.file("test", name), spec.dtype(name))


@pytest.fixture(scope="module")
def expected(trained):
    """The scores of the test rows, row by row through Python."""
    return dlrm.load(trained.checkpoint).predict(trained.rows)


def test_a_log_and_its_dataset_get_the_same_scores(trained, expected, tmp_path):
    for source, name in ((trained.log, "log.npy"), (trained.dataset, "dataset.npy")):
        done = scored(*flags_of(trained, source, tmp_path / name))
        assert "auc 0." in done.stdout
        scores = np.load(tmp_path / name)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_standard_input_without_labels(trained, expected, tmp_path):
    lines = "".join(f"{line}\n" for line in trained.rows[:20])
    flags = flags_of(trained, "-", tmp_path / "s.npy", "--nolabel", "--output_kind=logit")
    forked.succeed("dlrm.scripts.predict", *flags, input=lines)
    logits = np.load(tmp_path / "s.npy").astype(np.float64)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), expected[:20], rtol=1e-5)


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_packed_log_is_scored_or_named(trained, suffix, tmp_path):
    (path := tmp_path / f"log{suffix}").write_bytes(PACKED[suffix](trained.log.read_bytes()))
    done = predict(*flags_of(trained, path, tmp_path / "s.npy"))
    assert not done.returncode or f"{path}: compressed" in done.stderr


def test_a_row_is_explained(trained, expected, tmp_path):
    done = scored(*flags_of(trained, trained.log, tmp_path / "s.npy", "--explain=412"))
    lines = done.stdout.splitlines()
    (place,) = (index for index, line in enumerate(lines) if line.startswith("row 412: logit "))
    logit = float(lines[place].split()[3].rstrip(";"))
    assert logit == pytest.approx(np.log(expected[412] / (1 - expected[412])), abs=1e-3)
    fields = [line.rpartition("  ")[0] if line[-1] in "+-" else line for line in lines[place + 1 :]]
    added = [float(line.split()[-1]) for line in fields]
    assert len(added) == 7
    assert np.abs(added).tolist() == sorted(np.abs(added), reverse=True)
    done = predict(*flags_of(trained, trained.log, tmp_path / "none.npy", "--explain=1000"))
    assert "error: --explain 1000: expected a row below 1,000" in done.stderr
    assert not (tmp_path / "none.npy").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:3], "2" + lines[3][1:]], "line 4: expected the label 0 or 1"),
        (lambda lines: [lines[0], "", lines[1]], "line 2: expected 8 fields, got an empty line"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(trained, tmp_path, change, message):
    log = tmp_path / "log.tsv"
    log.write_text("\n".join(change(trained.lines)) + "\n")
    done = predict(*flags_of(trained, log, tmp_path / "s.npy"))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert f"{log}, {message}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["log.tsv"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input=/nowhere/x"], "/nowhere/x: no such file or directory"),
        (["--checkpoint=/nowhere/x"], "/nowhere/x: no checkpoint here"),
        (["--split=validation"], "has no validation split"),
        (["--columns=a,b"], "--columns: is for models of tables"),
    ],
)
def test_bad_flags_are_named(trained, tmp_path, flags, message):
    done = predict(*flags_of(trained, trained.dataset, tmp_path / "s.npy"), *flags)
    assert done.returncode == 1
    assert message in done.stderr


def train_on_csv(folder, rows, letters, words, label="clicked"):
    """Trains on a CSV whose clicks depend on age and city; returns it and its rows, and flags."""
    random = np.random.default_rng(0)
    ages, cities = random.integers(18, 90, rows), random.choice(list(letters), rows)
    clicks = ages + 20 * (cities == "x") + random.normal(0, 10, rows) > 60
    lines = [f"{c},{words[k]},{a}\n" for c, k, a in zip(cities, clicks * 1, ages, strict=True)]
    csv = folder / "rows.csv"
    csv.write_text("city,clicked,age\n" + "".join(lines))
    schema = {
        "label": label,
        "numerical": [{"column": "age", "transform": "standardize"}],
        "categorical": ["city"],
        "missing_values": ["?"],
    }
    (folder / "schema.yaml").write_text(json.dumps(schema))
    model = ["--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=8,1"]
    run = ["--max_steps=20", "--batch_size=64", "--lr=0.1", "--warmup_steps=0", "--decay_steps=0"]
    run += [f"--save_checkpoint_path={folder / 'run'}", f"--log_path={folder / 'log'}"]
    dataset = folder / "dataset"
    given = [f"--schema={folder / 'schema.yaml'}", f"--input={csv}", f"--output={dataset}"]
    forked.succeed("dlrm.scripts.prepare", *given, "--test_fraction=0", "--cores=1")
    forked.succeed("dlrm.scripts.main", f"--dataset={dataset}", "--base_device=cpu", *model, *run)
    where = [f"--checkpoint={folder / 'run'}", f"--output={folder / 'scores.npy'}"]
    return csv, {"age": ages.tolist(), "city": cities.tolist()}, clicks, where


def test_csv_rows_get_the_scores_of_their_dataset(tmp_path):
    csv, columns, labels, where = train_on_csv(tmp_path, 600, "xyz", "01")
    words = [*where, f"--input={csv}"]
    done = scored(*words)
    assert "auc 0." in done.stdout  # labels of 0 and 1
    scores = np.load(tmp_path / "scores.npy")
    np.testing.assert_allclose(dlrm.load(tmp_path / "run").predict(columns), scores, rtol=1e-5)
    assert np.corrcoef(scores, labels)[0, 1] > 0.5
    csv.write_text("city,clicked,age\nx,1,30\ny,0,old\n")
    done = predict(*words)
    assert done.returncode == 1
    assert f"{csv}, line 3, column age: expected a number, got 'old'" in done.stderr
    csv.write_text("x,1,30\ny,0,40\n")
    scored(*words, "--columns=city,clicked,age")
    done = predict(*words, "--header")
    assert done.returncode == 1
    assert (
        f"{csv}: no column 'age'; the columns are x, 1, 30; where the file has no header, "
        "--columns names them" in done.stderr
    )
    csv.write_text("city;clicked;age\nx;1;30\n")
    for more in ([], ["--header"]):
        done = predict(*words, *more)
        assert done.stderr.endswith("; try --delimiter ';'\n")
        scored(*words, *more, "--delimiter=;")
    csv.write_text("x,1,30\ny,0,40\n")
    done = predict(*words, "--columns=city,clicked,years")
    assert done.stderr.endswith("the columns are city, clicked, years\n")


@pytest.mark.parametrize("kind", ["input", "directory", "pipe"])
def test_an_output_that_must_not_be_replaced_is_refused(trained, tmp_path, kind):
    log = tmp_path / "day.npy"
    log.write_text(trained.log.read_text())
    output = {"input": log, "directory": tmp_path, "pipe": tmp_path / "pipe"}[kind]
    if kind == "pipe":
        os.mkfifo(output)
    done = predict(*flags_of(trained, log, output))
    assert done.returncode == 1
    assert done.stderr.startswith("error: --output ")
    assert "ends in .npy" not in done.stderr
    assert log.read_text() == trained.log.read_text()


def test_an_output_of_another_name_than_npy_is_refused(trained, tmp_path):
    output = tmp_path / "scores.csv"
    done = predict(*flags_of(trained, trained.log, output))
    assert (done.returncode, done.stderr.startswith(f"error: --output {output}: ")) == (1, True)
    assert not output.exists()


def test_an_output_that_is_a_link_stays_one(trained, tmp_path):
    (tmp_path / "link.npy").symlink_to("scores.npy")
    scored(*flags_of(trained, trained.log, tmp_path / "link.npy"))
    assert (tmp_path / "link.npy").is_symlink()
    assert len(np.load(tmp_path / "scores.npy")) == len(trained.lines)


def test_a_row_without_a_finite_score_is_named(trained, tmp_path):
    checkpoint, row = trained_model.overflowing(trained, tmp_path)
    ruined = trained._replace(checkpoint=checkpoint)
    for source, where in (
        (trained.log, f"{trained.log}, line {row + 1}"),
        (trained.dataset, f"{trained.dataset}: test row {row}"),
    ):
        done = predict(*flags_of(ruined, source, tmp_path / "s.npy", "--batch_size=32"))
        assert done.returncode == 1
        problem = "expected a finite score, got (nan|-?inf): the model's weights .* numbers\n$"
        assert re.match(f"error: {re.escape(where)}: {problem}", done.stderr)
        assert not (tmp_path / "s.npy").exists()


def test_values_that_say_nothing_are_counted(trained, tmp_path):
    log = tmp_path / "log"
    rows = [line.split("\t") for line in trained.lines[:200]]
    for index, row in enumerate(rows):
        row[6] = "deadbeef" if index % 4 else ""  # 1 of 4 values is missing
    log.write_text("".join("\t".join(row) + "\n" for row in rows))
    done = predict(*flags_of(trained, log, tmp_path / "s.npy"))
    first = "values: categorical 2 is unknown in 75.0 % and missing in 25.0 % of the rows, "
    assert first in done.stdout
    unknown = "no value of categorical 2 occurred in the training data"
    assert f"; the other 4 fields have fewer\nwarning: {unknown}" in done.stdout
    known = predict(*flags_of(trained, trained.dataset, tmp_path / "s.npy"))
    names = range(len(trained_model.TABLES))
    shares = [100 * float((ids_of_test(trained, i) == 0).mean()) for i in names]
    most = int(np.argmax(shares))
    expected = f"values: categorical {most} is without an id in {shares[most]:.1f} % of the rows, "
    assert expected in known.stdout


def test_rows_of_one_class_are_said_to_have_no_auc(trained, tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"0{line[1:]}\n" for line in trained.lines[:50]))
    done = scored(*flags_of(trained, log, tmp_path / "s.npy"))
    assert "auc" not in done.stdout
    assert "log_loss" in done.stdout
    assert "note: no AUC can be computed, since all 50 rows have the label 0\n" in done.stdout


@pytest.fixture(scope="module")
def csv_model(tmp_path_factory):
    """A CSV whose labels are words, its clicks, and flags that score it."""
    folder, words = tmp_path_factory.mktemp("csv"), ("no", "yes")
    csv, _, clicks, flags = train_on_csv(
        folder, 300, "xyz?", words, {"column": "clicked", "positive": "yes"}
    )
    return csv, clicks, flags


def test_a_csv_with_labels_is_judged(csv_model):
    csv, clicks, flags = csv_model
    done = scored(*flags, f"--input={csv}")
    scores = np.load(csv.with_name("scores.npy"))
    auc = re.search(r"^auc ([\d.]+)  log_loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(auc[1]) == pytest.approx(roc_auc_score(clicks, scores), abs=1e-5)
    assert float(auc[2]) == pytest.approx(log_loss(clicks, scores.astype(float)), abs=1e-5)
    assert re.search(r"^values: city is missing in 2\d\.\d % of the rows; ", done.stdout, re.M)
    assert done.stdout.count("calibration: predicted over observed clicks, 1 is right\n") == 1
    assert "auc" not in predict(*flags, f"--input={csv}", "--nolabel").stdout


def test_a_column_that_parquet_lacks_is_named(csv_model, tmp_path):
    _, _, flags = csv_model
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"city": ["x"]} | {f"c{i}": [i] for i in range(20)}), path)
    done = predict(*flags, f"--input={path}")
    names = ", ".join(["city", *(f"c{i}" for i in range(19))])
    assert done.stderr == f"error: {path}: no column 'age'; the columns are {names}, ...\n"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "--input: "),
        (["--spark_table=a", "--spark_sql=b"], "expected one of the two"),
        (["--spark_table=a", "--input=b"], "--input: expected no --spark_table a beside it"),
        (["--spark_table=a", "--conf=b"], "--conf: "),
    ],
)
def test_one_source_is_scored(csv_model, sources, message):
    done = predict(*csv_model[2], *sources)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_a_csv_without_labels_is_scored(csv_model, tmp_path):
    csv, _, flags = csv_model
    bare = tmp_path / "bare.csv"
    bare.write_text("age,city\n30,x\n40,y\n")
    done = scored(*flags, f"--input={bare}")
    assert "2 scores" in done.stdout
    assert "log_loss" not in done.stdout


@pytest.mark.parametrize(
    ("content", "judged"), [("x,yes,30\ny,no,40\n", True), ("x,30\ny,40\n", False)]
)
def test_a_csv_without_a_header_has_the_columns_of_the_training_data(
    csv_model, tmp_path, content, judged
):
    _, _, flags = csv_model
    (tmp_path / "named.csv").write_text("city,clicked,age\nx,yes,30\ny,no,40\n")
    (tmp_path / "bare.csv").write_text(content)
    scores = []
    for name in ("named", "bare"):
        done = scored(*flags, f"--input={tmp_path / name}.csv", f"--output={tmp_path / name}.npy")
        scores.append(np.load(tmp_path / f"{name}.npy").tolist())
    assert scores[0] == scores[1]
    assert ("log_loss" in done.stdout) == judged
    (tmp_path / "bare.csv").write_text("30\n")
    done = predict(*flags, f"--input={tmp_path}/bare.csv")
    assert "bare.csv, line 1: expected 3 columns (city, clicked, age), got 1" in done.stderr


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("?", "expected a label that is not missing, got '?'"),
        ("yes.", "expected 'yes' or 'no', got 'yes.'"),
    ],
)
def test_a_label_that_cannot_be_read_is_named(csv_model, tmp_path, label, problem):
    _, _, flags = csv_model
    bad = tmp_path / "bad.csv"
    bad.write_text(f"age,city,clicked\n30,x,yes\n40,y,{label}\n")
    done = predict(*flags, f"--input={bad}")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {bad}, line 3, column clicked: {problem}; "
        "--nolabel scores rows without their labels\n"
    )
    scored(*flags, f"--input={bad}", "--nolabel")


def test_a_log_with_labels_needs_no_flag_for_none(trained, tmp_path):
    done = predict(*flags_of(trained, trained.log, tmp_path / "s.npy", "--nolabel"))
    assert done.returncode == 1
    assert "got 8; lines that begin with a label need no --nolabel\n" in done.stderr

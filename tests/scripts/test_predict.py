"""`dlrm.scripts.predict`: a score for every row of a log, a CSV or a dataset, in order."""

import os
import subprocess
import sys

import numpy as np
import pytest

import dlrm


def predict(*flags, stdin=None):
    command = [sys.executable, "-m", "dlrm.scripts.predict", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)


def flags_of(trained, source, output, *others):
    return (
        f"--checkpoint={trained.checkpoint}",
        f"--input={source}",
        f"--output={output}",
        *others,
    )


@pytest.fixture(scope="module")
def expected(trained):
    """The scores of the test rows, row by row through Python."""
    return dlrm.load(trained.checkpoint).predict([x.split("\t", 1)[1] for x in trained.lines])


def test_a_log_and_its_dataset_get_the_same_scores(trained, expected, tmp_path):
    for source, name in ((trained.log, "log.npy"), (trained.dataset, "dataset.npy")):
        done = predict(*flags_of(trained, source, tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert "auc 0." in done.stdout
        scores = np.load(tmp_path / name)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_standard_input_without_labels(trained, expected, tmp_path):
    lines = "".join(line.split("\t", 1)[1] + "\n" for line in trained.lines[:20])
    flags = flags_of(trained, "-", tmp_path / "s.npy", "--nolabel", "--output_kind=logit")
    done = predict(*flags, stdin=lines)
    assert done.returncode == 0, done.stderr
    logits = np.load(tmp_path / "s.npy").astype(np.float64)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), expected[:20], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:3], "2" + lines[3][1:]], "line 4: expected the label 0 or 1"),
        (lambda lines: [*lines[:2], "0\t1\t2\tx"], "line 3, numerical 2: expected an integer"),
        (lambda lines: [*lines[:5], lines[5] + "\t1"], "line 6: expected up to 8 fields, got 9"),
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
        (["--columns=a,b"], "--columns: is for models of CSV data"),
    ],
)
def test_bad_flags_are_named(trained, tmp_path, flags, message):
    done = predict(*flags_of(trained, trained.dataset, tmp_path / "s.npy"), *flags)
    assert done.returncode == 1
    assert message in done.stderr


def test_the_dataset_of_another_model_is_refused(trained, other_trained, tmp_path):
    done = predict(*flags_of(trained, other_trained.dataset, tmp_path / "s.npy"))
    assert done.returncode == 1
    assert "the dataset of another model" in done.stderr


def test_csv_rows_get_the_scores_of_their_dataset(tmp_path):
    random = np.random.default_rng(0)
    ages, cities = random.integers(18, 90, 600), random.choice(list("xyz"), 600)
    labels = (ages + 20 * (cities == "x") + random.normal(0, 10, 600) > 60).astype(int)
    rows = [f"{c},{label},{a}" for c, label, a in zip(cities, labels, ages, strict=True)]
    csv = tmp_path / "rows.csv"
    csv.write_text("city,clicked,age\n" + "\n".join(rows) + "\n")
    model = ["--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=8,1"]
    run = ["--max_steps=20", "--batch_size=64", "--lr=0.1", "--warmup_steps=0", "--decay_steps=0"]
    for words in (
        ["transcode", "--input", csv, "--output", tmp_path / "dataset", "--label=clicked"]
        + ["--numerical=age", "--categorical=city", "--test_fraction=0"],
        ["main", f"--dataset={tmp_path / 'dataset'}", "--base_device=cpu", *model, *run]
        + [f"--save_checkpoint_path={tmp_path / 'run'}", f"--log_path={tmp_path / 'log'}"],
        ["predict", f"--checkpoint={tmp_path / 'run'}", f"--input={csv}"]
        + [f"--output={tmp_path / 'scores.npy'}"],
    ):
        command = [sys.executable, "-m", f"dlrm.scripts.{words[0]}", *map(str, words[1:])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    scores = np.load(tmp_path / "scores.npy")
    columns = {"age": ages.tolist(), "city": cities.tolist()}
    np.testing.assert_allclose(dlrm.load(tmp_path / "run").predict(columns), scores, rtol=1e-5)
    assert np.corrcoef(scores, labels)[0, 1] > 0.5
    csv.write_text("city,clicked,age\nx,1,30\ny,0,old\n")
    done = predict(*words[1:])
    assert done.returncode == 1
    assert f"{csv}, line 3, age: expected a number, got 'old'" in done.stderr
    csv.write_text("x,1,30\ny,0,40\n")
    done = predict(*words[1:])
    assert done.returncode == 1
    assert (
        f"{csv}: no column 'age'; the columns are ['x', '1', '30']; where the file has no header, "
        "--columns names them" in done.stderr
    )
    done = predict(*words[1:], "--columns=city,clicked,age")
    assert done.returncode == 0, done.stderr
    done = predict(*words[1:], "--columns=city,clicked,years")
    assert done.stderr.endswith("the columns are ['city', 'clicked', 'years']\n")


@pytest.mark.parametrize("kind", ["input", "directory", "pipe"])
def test_an_output_that_must_not_be_replaced_is_refused(trained, tmp_path, kind):
    log = tmp_path / "day"
    log.write_text(trained.log.read_text())
    output = {"input": log, "directory": tmp_path, "pipe": tmp_path / "pipe"}[kind]
    if kind == "pipe":
        os.mkfifo(output)
    done = predict(*flags_of(trained, log, output))
    assert done.returncode == 1
    assert done.stderr.startswith("error: --output ")
    assert log.read_text() == trained.log.read_text()


def test_an_output_that_is_a_link_stays_one(trained, tmp_path):
    (tmp_path / "link.npy").symlink_to("scores.npy")
    assert predict(*flags_of(trained, trained.log, tmp_path / "link.npy")).returncode == 0
    assert (tmp_path / "link.npy").is_symlink()
    assert len(np.load(tmp_path / "scores.npy")) == len(trained.lines)

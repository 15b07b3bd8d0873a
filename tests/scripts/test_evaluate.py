"""`dlrm.scripts.evaluate`: what it prints and writes, and what it refuses."""

import html.parser
import json
import re

import forked
import numpy as np
import pytest
import trained_model
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

import dlrm
from dlrm.scripts.evaluate.page import decimals
from dlrm.scripts.evaluate.rows import read_groups, read_weights


def evaluate(trained, *flags):
    return forked.call("dlrm.scripts.evaluate", f"--checkpoint={trained.checkpoint}", *flags)


@pytest.fixture(scope="module")
def rows(trained):
    """Labels and chances of the test rows."""
    lines = [line.split("\t", 1) for line in trained.lines]
    labels = np.array([line[0] == "1" for line in lines])
    return labels, dlrm.load(trained.checkpoint).predict([line[1] for line in lines])


def test_a_dataset_and_its_log_have_the_metrics_of_scikit_learn(trained, rows, tmp_path):
    labels, chances = rows
    expected = {"auc": roc_auc_score(labels, chances), "log_loss": log_loss(labels, chances)}
    halves = [tmp_path / "day_6", tmp_path / "day_7"]
    for path, part in zip(halves, (trained.lines[:400], trained.lines[400:]), strict=True):
        path.write_text("\n".join(part) + "\n")
    for flag in (f"--dataset={trained.dataset}", f"--input={halves[0]},{halves[1]}"):
        output = tmp_path / "out"
        done = evaluate(trained, flag, "--bootstrap=20", f"--output={output}")
        assert done.returncode == 0, done.stderr
        assert "AUC by DeLong, all others by a bootstrap of 20 over rows" in done.stdout
        facts = json.loads((output / "evaluation.json").read_text())
        first_words = {line.partition("  ")[0] for line in done.stdout.splitlines()}
        assert {"AUC", "log loss", "gain in the top 1 %"} <= first_words
        assert not {*facts["models"][0]} & first_words - {"calibration"}
        for name, value in expected.items():
            found = facts["models"][0][name]
            assert found["value"] == pytest.approx(value, rel=1e-5)
            assert found["low"] < value < found["high"]
    sliced = {one["by"]: one["slices"] for one in facts["slices"]}
    first, second = sliced["file"]
    assert (first["name"], first["rows"], second["rows"]) == (str(halves[0]), 400, 600)
    assert first["models"][0]["auc"]["value"] == pytest.approx(
        roc_auc_score(labels[:400], chances[:400]), rel=1e-5
    )
    assert sum(one["rows"] for one in sliced["values without an id"]) == 1000


def ece_of(chances, labels):
    """The calibration error by deciles, in float64; scores must not tie across two deciles."""
    order = np.argsort(chances, kind="stable")
    deciles = np.minimum((np.arange(len(order)) + 0.5) * 10 / len(order), 9).astype(int)
    gaps = np.bincount(deciles, (chances - labels)[order], 10)
    return np.abs(gaps).sum() / len(order)


def test_calibration_errors_by_decile_and_slice_before_and_after(trained, rows, tmp_path):
    done = evaluate(
        trained,
        *(f"--input={trained.log}", "--recalibrate", "--slices=categorical 2"),
        *("--bootstrap=0", f"--output={tmp_path / 'out'}"),
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    after = facts["recalibration"]
    labels, before = rows
    before = before.astype(np.float64)
    logits = np.log(before / (1 - before))[:, None]
    mapped, even = np.empty(1000), np.arange(1000) % 2 == 0
    for part in (even, ~even):
        line = LogisticRegression(C=np.inf, tol=1e-8).fit(logits[~part], labels[~part])
        mapped[part] = line.predict_proba(logits[part])[:, 1]
    for chances, metrics, deciles, divisions in (
        (before, facts["models"][0], facts["curves"][0]["reliability"], facts["slices"]),
        (mapped, after["judged"], after["reliability"], after["slices"]),
    ):
        assert metrics["ece"]["value"] == pytest.approx(ece_of(chances, labels), abs=2e-5)
        assert deciles["weight"] == [100] * 10
        parts = np.array_split(np.argsort(chances, kind="stable"), 10)
        for name, values in (("predicted", chances), ("observed", labels)):
            expected = [values[part].mean() for part in parts]
            np.testing.assert_allclose(deciles[name], expected, atol=2e-5)
        fields = np.array([line.split("\t")[6] for line in trained.lines])
        sliced = {one["name"]: one for one in divisions[-1]["slices"]}
        value = next(name for name in sliced if (fields == name).sum() > 50)
        chosen = fields == value
        found = sliced[value]["models"][0]["ece"]["value"]
        assert found == pytest.approx(ece_of(chances[chosen], labels[chosen]), abs=2e-5)
    assert after["judged"]["ece"]["value"] < facts["models"][0]["ece"]["value"]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("decile of the scores") for line in lines) == 2
    (sliced,) = (line for line in lines if line.startswith("categorical 2"))
    assert sliced.split("  ")[-1] == "recalibrated"
    shown = [line.split() for line in lines if line.startswith("expected calibration error")]
    pair = [facts["models"][0]["ece"]["value"], after["judged"]["ece"]["value"]]
    assert shown[1][-2:] == [f"{value:.4f}" for value in pair]
    page = (tmp_path / "out" / "evaluation.html").read_text()
    assert "Deciles of the scores" in page
    assert "Recalibrated, judged on the half it was not fitted to" in page


class Outline(html.parser.HTMLParser):
    """Collects the elements of a page and checks that all are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.content = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in ("meta", "rect", "path", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.content += data


def contrast(one, other):
    """WCAG 2's contrast of two colors."""

    def luminance(color):
        digits = color.lstrip("#")
        digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_two_models_of_the_same_rows_and_their_page(trained, rows, tmp_path, monkeypatch):
    recalibrated, output = tmp_path / "recalibrated", tmp_path / "out"
    data = f"--dataset={trained.dataset}"
    done = evaluate(
        trained,
        data,
        "--bootstrap=0",
        "--recalibrate",
        f"--recalibrated_checkpoint={recalibrated}",
    )
    assert done.returncode == 0, done.stderr
    assert "recalibrated, judged on the half it was not fitted to" in done.stdout
    done = evaluate(trained, data, f"--checkpoint={recalibrated}", "--sampling_rate=0.5")
    assert "expected a checkpoint without a recalibration" in done.stderr
    again = tmp_path / "again"  # the same fit to the scores of the network replaces the first
    done = evaluate(
        trained,
        *(data, f"--checkpoint={recalibrated}", "--bootstrap=0", "--recalibrate"),
        f"--recalibrated_checkpoint={again}",
    )
    assert re.search(r"\ncalibration +1\.0000", done.stdout), done.stdout + done.stderr
    files = [path / "recalibration/recalibration.json" for path in (again, recalibrated)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (again / "MODEL.md").read_text().count("## Recalibration") == 1
    folder = tmp_path / "page\x1b[31m\nerror: "
    words = (f"--checkpoint={recalibrated}", "--bootstrap=0", f"--output={folder}")
    done = evaluate(trained, data, *words)
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert f"page: {tmp_path}/page\\x1b[31m\\nerror: /evaluation.html\n" in done.stdout
    where = f"{trained.dataset} (test, selection, recalibrated on)"
    assert f"{recalibrated} on {where}: 1,000 rows" in done.stdout
    assert f"Rows: {where}" in (folder / "evaluation.html").read_text()
    assert f"fitted to {trained.dataset} (test), so" in (recalibrated / "MODEL.md").read_text()
    done = evaluate(
        trained, f"--checkpoint={recalibrated}", f"--input={trained.log}", "--bootstrap=0"
    )
    assert f"{recalibrated} on {trained.log}: 1,000 rows" in done.stdout
    groups = tmp_path / "users.npy"
    np.save(groups, [f"user {row % 37}" for row in range(1000)])
    done = evaluate(
        trained,
        *(data, f"--against={recalibrated}", f"--groups={groups}", f"--output={output}"),
        *("--bootstrap=30", "--slices=categorical 2,numerical 0", "--importance"),
        "--importance_rows=300",  # the stride of rows is a power of two
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((output / "evaluation.json").read_text())
    one, other = facts["models"]
    labels, chances = rows
    users = np.arange(1000) % 37
    aucs = [roc_auc_score(labels[users == u], chances[users == u]) for u in range(37)]
    sizes = np.bincount(users)
    assert one["gauc_by_impressions"]["value"] == pytest.approx(np.average(aucs, weights=sizes))
    assert facts["differences"]["auc"]["value"] == pytest.approx(0, abs=1e-5)  # same ranking
    # Platt's fit has the lowest log loss of any line on these rows, and is calibrated.
    assert facts["differences"]["log_loss"]["value"] > 0
    assert other["calibration"]["value"] == pytest.approx(1, abs=1e-4)
    sliced = {one["by"]: one["slices"] for one in facts["slices"]}
    assert sum(one["rows"] for one in sliced["categorical 2"]) == 1000
    assert len(sliced["numerical 0"]) == 10
    assert len(facts["importance"]) == 7
    assert facts["importance_rows"] == 250
    assert "importance (250 of 1,000 rows)" in done.stdout
    text = (output / "evaluation.html").read_text()
    page = Outline(text)
    tags = [tag for tag, _ in page.seen]
    assert tags.count("h1") == 1
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert "http" not in text
    assert any(a.get("name") == "viewport" for tag, a in page.seen if tag == "meta")
    charts = [attributes for tag, attributes in page.seen if tag == "svg"]
    assert [a["aria-label"].partition(".")[0] for a in charts] == [
        "Reliability, and the number of rows by score", "Gain", "Lift", "Precision and recall"
    ]  # fmt: skip
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in charts)
    regions = [a for tag, a in page.seen if a.get("role") == "region"]
    assert len(regions) == tags.count("table")
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
    links = [a["href"] for tag, a in page.seen if tag == "a"]
    assert links == [f"#{a['id']}" for tag, a in page.seen if tag == "section"]
    assert "expected calibration error" in page.content
    assert ">ece<" not in text
    curves = facts["curves"][0]
    assert sum(curves["scores"]["rows"]) == sum(curves["reliability"]["weight"]) == 1000
    low, observed, high = (curves["reliability"][name] for name in ("low", "observed", "high"))
    assert all(a <= b <= c and a < c for a, b, c in zip(low, observed, high, strict=True))
    for color in re.findall(r"(?:[^-]color|fill): (#[0-9a-f]{3,6})", text.partition("</style>")[0]):
        assert contrast(color, "#fff") >= 4.5
    drawn = {a["stroke"] for tag, a in page.seen if a.get("stroke-width") and tag == "path"}
    assert drawn
    assert all(contrast(color, "#fff") >= 3 for color in drawn)  # graphics


def test_a_score_that_is_no_number_names_its_row(trained, tmp_path):
    checkpoint, row = trained_model.overflowing(trained, tmp_path)
    done = evaluate(trained, f"--checkpoint={checkpoint}", f"--dataset={trained.dataset}")
    assert done.returncode == 1
    assert f"{trained.dataset}: test row {row}: expected a finite score, got" in done.stderr


def test_columns_are_read_row_for_row(tmp_path):
    texts, numbers = tmp_path / "users.npy", tmp_path / "weights.npy"
    np.save(texts, ["b", "a", "b"])
    np.save(numbers, np.array([0.5, 0, 2]))
    assert read_groups(texts, 3).tolist() == [1, 0, 1]
    assert read_weights(numbers, 3).tolist() == [0.5, 0, 2]
    with pytest.raises(ValueError, match="--weights .*users.npy: expected numbers, got <U1"):
        read_weights(texts, 3)
    with pytest.raises(ValueError, match="--groups .*: expected integers or texts, got float64"):
        read_groups(numbers, 3)
    np.save(numbers, np.array([1, np.nan]))
    with pytest.raises(ValueError, match="weights.npy: row 1: expected a finite"):
        read_weights(numbers, 2)
    texts.write_text("a\nb\n")
    with pytest.raises(ValueError, match="--groups .*users.npy: not a .npy file"):
        read_groups(texts, 2)


def test_bad_input_is_named(trained, other_trained, tmp_path):
    one_class = tmp_path / "one_class.tsv"
    one_class.write_text("\n".join(x for x in trained.lines if x[0] == "0") + "\n")
    np.save(tmp_path / "zeros", np.zeros(1000))
    np.save(tmp_path / "huge", np.full(1000, 1e308))
    np.save(tmp_path / "short", np.ones(999, int))
    data = f"--dataset={trained.dataset}"
    for flags, message in (
        ([], "--dataset or --input: expected the rows to judge, got none"),
        ([f"--input={trained.log},{trained.dataset}"], "expected files, or one dataset, got"),
        ([data, "--slices=nothing"], "--slices nothing: "),
        ([data, f"--groups={tmp_path}/short.npy"], "one value for each of 1,000 rows, got 999"),
        ([data, f"--weights={tmp_path}/zeros.npy"], "expected a weight above 0, got 1,000 zeros"),
        ([data, f"--weights={tmp_path}/huge.npy"], "huge.npy: expected weights whose sum is at"),
        ([data, "--groups=nope"], "test, which has none"),
        ([f"--input={trained.log}", "--groups=nope"], "nope: no such file (--groups)"),
        ([data, "--slices=day"], "--slices day: expected rows with a time, got"),
        ([f"--input={trained.log}", "--slices=day"], "expected rows of a table whose schema names"),
        ([data, f"--against={other_trained.checkpoint}"], "its transform is not that of"),
        ([data, f"--recalibrated_checkpoint={tmp_path}/x"], "needs --recalibrate or --sampling"),
        ([f"--input={trained.log}", "--nolabel"], "line 1: expected"),
    ):
        done = evaluate(trained, "--bootstrap=0", *flags)
        assert done.returncode == 1, (flags, done.stdout)
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
    done = evaluate(trained, f"--input={one_class}", "--bootstrap=10", "--importance")
    assert done.returncode == 0, done.stderr
    assert "rows have the label 0, so metrics of two classes are undefined" in done.stdout
    assert "rows of --importance have one class, so no field is measured" in done.stdout


@pytest.mark.parametrize(
    ("reach", "digits"),
    [(0.005, 3), (0.0152, 3), (0.05, 2), (0.14, 2), (0.6, 1), (40, 0), (1e-9, 6), (0, 4)],
)
def test_digits_follow_the_width_of_an_interval(reach, digits):
    assert decimals(0.75 - reach, 0.75 + reach) == digits
    assert decimals(None, None) == 4

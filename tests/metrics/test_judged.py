"""Models are evaluated on the same rows and on slices of them."""

from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.metrics.judged import ScoredRows, judge, judge_slices
from dlrm.scripts.evaluate.slices import by_day, by_decile, by_unknown, by_value


def scored(count=600, seed=0, **others):
    random = np.random.default_rng(seed)
    labels = (random.random(count) < 0.3).astype(np.float32)
    logits = tuple(random.normal(labels * size, 1).astype(np.float32) for size in (1.6, 0.4))
    return ScoredRows(logits, labels, **others)


def test_intervals_hold_the_values_and_differences_are_of_pairs():
    rows = scored(groups=np.arange(600) // 4)
    found = judge(rows, 100)
    assert "all by a bootstrap of 100 over groups" in found.method
    for logits, metrics in zip(rows.logits, found.models, strict=True):
        assert metrics["auc"].value == pytest.approx(roc_auc_score(rows.labels, logits))
        for name, interval in metrics.items():
            assert interval.low <= interval.value <= interval.high, name
    for name, difference in found.differences.items():
        pair = [metrics[name].value for metrics in found.models]
        assert difference.value == pytest.approx(pair[0] - pair[1])
    assert found.differences["auc"].p < 0.05
    assert {"gauc_by_impressions", "gauc_by_clicks"} <= found.differences.keys()


@pytest.mark.parametrize(
    "others", [{"groups": np.arange(40) // 10}, {"weights": np.arange(40) + 1}]
)
def test_no_interval_leaves_the_values_that_a_metric_can_have(others):
    labels = (np.arange(40) % 10 < 3).astype(np.float32)
    nearly = labels * 8 + np.where(np.arange(40) == 4, 9, 0)  # one negative is above all clicks
    (metrics,) = judge(ScoredRows((nearly.astype(np.float32),), labels, **others), 200).models
    assert metrics["auc"].value > 0.9
    for name, (value, low, high) in metrics.items():
        most = 100 / float(name[5:-1]) if name.startswith("lift@") else 1
        if name not in ("log_loss", "normalized_entropy", "calibration"):
            assert 0 <= low <= value <= high <= most + 1e-12, name


def test_groups_of_one_row_have_no_grouped_auc():
    found = judge(scored(50, groups=np.arange(50)), 5).to_json()
    assert found["models"][0]["gauc_by_clicks"] == {"value": None, "low": None, "high": None}
    assert found["models"][0]["auc"]["value"] is not None


def test_weights_count_rows_so_often():
    weights = np.random.default_rng(1).integers(0, 3, 600)
    rows = scored(weights=weights.astype(float))
    value = judge(rows, 0).models[0]["log_loss"].value
    chances = 1 / (1 + np.exp(-rows.logits[0]))
    assert value == pytest.approx(log_loss(rows.labels, chances, sample_weight=weights), rel=1e-5)


def test_slices_are_the_rows_that_they_name():
    rows = scored()
    random = np.random.default_rng(2)
    ids, numbers = random.integers(0, 30, 600), np.round(random.normal(0, 1, 600), 1)
    common = by_value(ids, lambda number: f"id {number}")
    assert (len(common), common[-1][0]) == (11, "all others")
    counts = [chosen.sum() for _, chosen in common[:-1]]
    assert counts == sorted(np.bincount(ids).tolist(), reverse=True)[:10]
    deciles = by_decile(numbers)
    for slices in (common, deciles, by_unknown(ids)):
        assert (np.sum([chosen for _, chosen in slices], axis=0) == 1).all()
    names = ["0", "1", "2", "3 to 5", "6 to 9", "10 or more"]
    assert [name for name, _ in by_unknown(ids)] == names
    assert [name for name, _ in by_unknown(ids.clip(max=1))] == ["0", "1"]
    ends = [tuple(map(float, name.split(" to "))) for name, _ in deciles]
    assert all(before[1] < after[0] for before, after in zip(ends, ends[1:], strict=False))
    found = judge_slices(rows, common, 10)
    here = common[3][1]
    value = found[3]["models"][1]["auc"]["value"]
    assert value == pytest.approx(roc_auc_score(rows.labels[here], rows.logits[1][here]))


def test_a_slice_without_rows_or_weight_has_no_metrics():
    none, heavy = np.zeros(600, bool), np.arange(600) < 5
    weights = np.where(heavy, 0.0, 1.0)
    for rows in (scored(), scored(weights=weights), scored(groups=np.arange(600) % 7)):
        first, *_ = judge_slices(rows, [("none", none), ("heavy", heavy)], 10)
        assert (first["name"], first["rows"]) == ("none", 0)
        assert first["models"][0]["log_loss"]["value"] is None
    _, second = judge_slices(scored(weights=weights), [("none", none), ("heavy", heavy)], 10)
    assert (second["rows"], second["models"][0]["auc"]["value"]) == (0, None)


def test_scores_that_are_no_numbers_are_named():
    rows = scored()
    rows.logits[1][17] = np.nan
    with pytest.raises(ValueError, match="row 17: expected a finite number as its score, got nan"):
        judge(rows, 0)
    with pytest.raises(ValueError, match="expected one score, label and weight a row"):
        judge(ScoredRows((rows.logits[0][1:],), rows.labels), 0)


def test_days_are_those_of_utc_and_the_earliest_of_many_are_together():
    first = datetime(1969, 12, 1, tzinfo=timezone.utc)  # also before 1970
    stamps = [first + timedelta(hours=7 * i) for i in range(200)]  # 59 days
    days = [stamp.strftime("%Y-%m-%d") for stamp in stamps]
    slices = by_day(np.array([int(stamp.timestamp()) * 10**6 for stamp in stamps]))
    names = sorted(set(days))
    assert [name for name, _ in slices] == [f"before {names[-31]}", *names[-31:]]
    for name, chosen in slices[1:]:
        assert chosen.tolist() == [day == name for day in days]
    assert slices[0][1].tolist() == [day < names[-31] for day in days]
    assert len(by_day(np.array([5, 7]))) == 1

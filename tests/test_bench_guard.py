"""The guard of the benchmarks compares ratios, here invented ones, with those of a processor."""

import json
import math
import sys

import pytest

ZEN, XEON = "Zen, avx512", "Xeon, avx512"
RECORDS = {ZEN: {"step": 4.0, "auc": 8.0}}


@pytest.fixture(scope="module")
def guard(root):
    sys.path.insert(0, str(root / "benchmarks"))
    import guard

    yield guard
    sys.path.remove(str(root / "benchmarks"))


@pytest.mark.parametrize(
    ("ratios", "code"),
    [
        ({"step": 4.0, "auc": 8.0}, 0),
        ({"step": 3.1, "auc": 20.0}, 0),
        ({"step": 2.9, "auc": 20.0}, 1),
        ({"step": 3.0, "auc": 8.0}, 1),  # by a quarter
        ({"step": math.nan, "auc": 8.0}, 1),
    ],
)
def test_a_ratio_that_falls_by_a_quarter_fails(guard, ratios, code):
    outcome = guard.judged(ratios, RECORDS, ZEN, 0.02)
    assert (outcome.code, outcome.records) == (code, None)
    assert outcome.lines[0] == f"processor: {ZEN}"
    assert ("failed: step: a quarter" in outcome.lines[-1]) == bool(code)


def test_an_unknown_processor_is_recorded_and_passes(guard):
    outcome = guard.judged({"step": 1.23456, "auc": 2.0}, RECORDS, XEON, 0.02)
    assert outcome.code == 0
    assert outcome.records == {**RECORDS, XEON: {"step": 1.235, "auc": 2.0}}
    assert outcome.lines[-1] == "recorded, with nothing to compare with: step, auc"


def test_a_record_is_replaced_only_on_request(guard):
    outcome = guard.judged({"step": 1.0, "auc": 1.0}, RECORDS, ZEN, 0.0, again=True)
    assert (outcome.code, outcome.records) == (0, {ZEN: {"step": 1.0, "auc": 1.0}})


@pytest.mark.parametrize("processor", [ZEN, XEON])
def test_a_run_on_a_busy_machine_does_not_count(guard, processor):
    outcome = guard.judged({"step": 0.1, "auc": 0.1}, RECORDS, processor, 0.31, again=True)
    assert (outcome.code, outcome.records) == (2, None)
    assert outcome.lines[-1].startswith("this run does not count: other programs took 31% of")


def test_records_survive_a_file_and_damage_is_named(guard, tmp_path):
    path = tmp_path / "guard.json"
    assert guard.read_records(path) == {}
    path.write_text(json.dumps(RECORDS))
    assert guard.read_records(path) == RECORDS
    for text in ('{"Zen": 3}', "[1]", '{"Zen": {"step": "fast"}}', "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"guard\.json: expected ratios"):
            guard.read_records(path)

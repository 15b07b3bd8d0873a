import json
import re

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.scripts.simulate_logs import command as simulate_logs
from dlrm.scripts.simulate_logs.__main__ import main
from dlrm.scripts.simulate_logs.command import Simulation, Simulator, simulate


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_seed_decides_every_byte(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        simulate(Simulation(rows=300, days=3, seed=seed), tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert (tmp_path / "a" / "day_0").read_bytes() != (tmp_path / "c" / "day_0").read_bytes()


def test_lines_are_in_criteo_format(tmp_path):
    simulate(Simulation(rows=2000, days=3), tmp_path / "raw")
    days = [(tmp_path / "raw" / f"day_{i}").read_text() for i in range(3)]
    assert [day.count("\n") for day in days] == [666, 667, 667]
    rows = [line.split("\t") for day in days for line in day.splitlines()]
    for row in rows:
        assert row[0] in "01"
        assert len(row) <= 40
        assert all(re.fullmatch(r"(-?[1-9]\d*|0|)", field) for field in row[1:14]), row
        assert all(re.fullmatch(r"([0-9a-f]{8}|)", field) for field in row[14:]), row
        assert row[-1], "a field that is missing at the end should have been cut off"
    missing = sum(field == "" for row in rows for field in row) / (40 * len(rows))
    assert 0.02 < missing < 0.4
    numbers = [int(field) for row in rows for field in row[1:14] if field]
    assert min(numbers) == -2
    assert max(numbers) > 1000


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (2, 50)])
def test_other_numbers_of_columns(tmp_path, shape):
    numerical, categorical = shape
    simulation = Simulation(
        rows=50, days=2, num_numerical=numerical, num_categorical=categorical, missing=0.0
    )
    simulate(simulation, tmp_path / "raw")
    for line in (tmp_path / "raw" / "day_1").read_text().splitlines():
        assert line.count("\t") == numerical + categorical


def test_planted_judgment_is_that_of_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.setattr(simulate_logs, "_CHUNK_ROWS", 1000)  # the halves meet within a chunk
    simulation = Simulation(rows=8401, days=2, seed=5)
    planted = simulate(simulation, tmp_path / "raw")
    assert planted == json.loads((tmp_path / "raw" / "planted.json").read_text())
    chunks = list(Simulator(simulation).chunks(1))
    assert b"".join(c.rows for c in chunks) == (tmp_path / "raw" / "day_1").read_bytes()
    label = np.concatenate([chunk.label for chunk in chunks])
    probability = np.concatenate([chunk.probability for chunk in chunks])
    middle = len(label) // 2
    for name, part in (("test", slice(middle)), ("validation", slice(middle, None))):
        assert planted[name]["rows"] == len(label[part])
        assert planted[name]["auc"] == pytest.approx(
            roc_auc_score(label[part], probability[part]), abs=1e-6
        )
        assert planted[name]["log_loss"] == pytest.approx(log_loss(label[part], probability[part]))
    written = [line[0] == "1" for line in (tmp_path / "raw" / "day_1").read_text().splitlines()]
    assert written == label.tolist()


def test_clicks_follow_the_planted_probability():
    chunk = next(Simulator(Simulation(rows=100_000, days=2, click_rate=0.1)).chunks(0))
    assert chunk.label.mean() == pytest.approx(0.1, abs=0.01)
    high = chunk.probability > np.quantile(chunk.probability, 0.9)
    error = chunk.label[high].mean() - chunk.probability[high].mean()
    assert abs(error) < 4 * (0.5 / high.sum() ** 0.5)  # four standard deviations


def test_ids_follow_a_power_law_that_drifts():
    simulator = Simulator(Simulation(rows=100_000, days=2, num_numerical=0, num_categorical=1))
    days = [next(simulator.chunks(day)).rows.splitlines() for day in (0, 1)]
    ids = [[line[2:] for line in day if len(line) > 2] for day in days]
    counts = np.unique(ids[0], return_counts=True)[1]
    assert np.sort(counts)[-10:].sum() > 0.3 * counts.sum()
    new = set(ids[1]) - set(ids[0])
    assert sum(i in new for i in ids[1]) > 0.02 * len(ids[1])


def test_wrong_flags_are_named(tmp_path, capsys):
    for flags, words in (
        (["--days", "1"], "--days 1"),
        (["--rows", "3", "--days", "2"], "--rows 3"),
        (["--click_rate", "1.5"], "--click_rate 1.5"),
    ):
        assert main(["--output", str(tmp_path / "raw"), *flags]) == 1
        assert words in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("not ours")
    assert main(["--output", str(tmp_path / "mine"), "--rows", "100"]) == 1
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert not (tmp_path / "raw").exists()


def test_too_few_rows_for_an_auc_say_so(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "raw"), "--rows=5", "--days=2"]) == 0
    assert capsys.readouterr().out.endswith("AUC: test undefined, validation undefined\n")


def test_effects_turn_and_ids_are_replaced_day_by_day():
    still, moving = (
        Simulator(
            Simulation(
                rows=300_000, days=3, num_numerical=0, num_categorical=1, missing=0.0, **others
            )
        )
        for others in ({}, {"drift": 0.5, "new_ids": 0.2})
    )
    first, *later = (
        [line[2:] for line in chunk.rows.splitlines()]
        for chunk in map(_first, [(moving, 0), (still, 2), (moving, 2)])
    )
    kept = [np.isin(day, first).mean() for day in later]
    assert kept[1] < 0.75 * kept[0]  # two fifths of the ids are others after two days
    effects = [_effect_by_id(simulator, day) for simulator, day in ((moving, 0), (moving, 2))]
    ids = sorted(effects[0].keys() & effects[1].keys())
    assert len(ids) > 20
    correlation = np.corrcoef([effects[0][i] for i in ids], [effects[1][i] for i in ids])[0, 1]
    assert correlation == pytest.approx(np.cos(1.0), abs=0.35)


def _first(of):
    simulator, day = of
    return next(simulator.chunks(day))


def _effect_by_id(simulator, day):
    chunk = next(simulator.chunks(day))
    ids = [line[2:] for line in chunk.rows.splitlines()]
    logits = np.log(chunk.probability / (1 - chunk.probability))
    return dict(zip(ids, logits - logits.mean(), strict=True))

"""A model is judged, compared, explained, recalibrated and drawn from Python."""

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import dlrm

pl = pytest.importorskip("polars")

ROWS = 4200
SETTINGS = {"top_mlp_sizes": (16, 1), "batch_size": 64, "base_device": "cpu", "epochs": 1}


def rows_of(seed: int) -> pd.DataFrame:
    """Returns rows whose label follows price and item, and whose noise tells nothing."""
    draw = np.random.default_rng(seed)
    item, price = draw.integers(0, 20, ROWS), draw.normal(0, 1, ROWS)
    click = draw.random(ROWS) < 1 / (1 + np.exp(-2 * np.sin(item) - price))
    noise = [f"n{i}" for i in draw.integers(0, 5, ROWS)]
    user = draw.integers(0, 50, ROWS)
    times = pd.date_range("2026-11-20", periods=ROWS, freq="min")
    return pd.DataFrame(
        {"click": click, "price": price, "item_id": item, "user_id": user, "noise": noise}
    ).assign(time=times)


@pytest.fixture(scope="module")
def dataset():
    schema = {
        "label": "click",
        "numerical": ["price"],
        "categorical": ["item_id", "user_id", "noise"],
        "time": "time",
    }
    return dlrm.Dataset.from_arrow(
        rows_of(1), schema, test_from="2026-11-22T04:00Z", validation_from="2026-11-22T12:00Z"
    )


@pytest.fixture(scope="module")
def model(dataset):
    return dlrm.fit(dataset, embedding_dim=8, **SETTINGS)


@pytest.fixture(scope="module")
def later():
    return rows_of(2)


def test_the_last_hours_of_times_of_pandas_without_zone_are_judged(dataset, model):
    assert dataset.rows == {"train": 52 * 60, "test": 8 * 60, "validation": ROWS - 60 * 60}
    for split in ("test", "validation"):
        found = model.evaluate(dataset, split)
        assert found["auc"] == pytest.approx(model.results[f"{split}_auc"], abs=1e-6)
        assert model.evaluate(str(dataset.path), split) == found


def test_intervals_hold_the_metrics(model, later):
    plain, found = model.evaluate(later), model.evaluate(later, intervals=True)
    for name, value in plain.items():
        assert found[name].value == pytest.approx(value, abs=1e-6)
        assert found[name].low < value < found[name].high
    assert "ece" in found


def test_fields_that_tell_more_lose_more(model, later):
    found = model.importance(later, rows=2000)
    assert {one.field for one in found[:2]} == {"item_id", "price"}
    assert {one.field for one in found} == {"item_id", "price", "user_id", "noise"}
    assert found[1].low > 0.01
    assert abs(found[-1].auc_lost) < 0.01
    with pytest.raises(ValueError, match="^importance: expected rows of both classes, got"):
        model.importance(later[later.click])


def test_three_settings_are_compared_and_the_best_judged_once(dataset):
    models = {
        dim: dlrm.fit(dataset, embedding_dim=dim, max_steps=12 * dim, **SETTINGS)
        for dim in (1, 2, 4)
    }
    scores = {dim: m.evaluate(dataset, "test")["auc"] for dim, m in models.items()}
    best, worst = max(scores, key=scores.get), min(scores, key=scores.get)
    difference = models[best].compare(models[worst], dataset, "test")["auc"]
    assert difference.value == pytest.approx(scores[best] - scores[worst], abs=1e-6)
    assert difference.low < difference.value < difference.high
    assert difference.p < 0.05
    assert models[best].results["validation_auc"] > 0.6
    stream = pa.Table.from_pandas(rows_of(3).head(900)).to_reader(500)
    assert models[best].compare(models[worst], stream)["auc"].value > 0


def test_a_recalibrated_model_is_a_new_one_and_is_saved(model, later, tmp_path):
    often = later.assign(click=later.click | (np.arange(ROWS) % 3 == 0))
    before = model.evaluate(often)["calibration"]
    other = model.recalibrate(often)
    assert model.evaluate(often)["calibration"] == before < 0.9
    assert other.evaluate(often)["calibration"] == pytest.approx(1, abs=0.02)
    again = other.recalibrate(often)
    other.save(tmp_path / "saved")
    loaded = dlrm.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.predict(often), other.predict(often))
    assert loaded.results == model.results
    again.save(tmp_path / "again")
    assert dlrm.load(tmp_path / "again").recalibration.kind == "platt"
    with pytest.raises(ValueError, match="^recalibrate: expected rows of both classes"):
        model.recalibrate(later[later.click])


def test_a_recalibrated_model_of_a_temporary_run_can_be_saved(later, tmp_path):
    frame = later[["click", "price", "item_id"]].head(500)
    model = dlrm.fit(frame, label="click", embedding_dim=4, max_steps=2, base_device="cpu")
    model = model.recalibrate(frame)
    gc.collect()
    model.save(tmp_path / "saved")
    folder = model.path.parent
    del model
    gc.collect()
    assert not folder.exists()


@pytest.mark.usefixtures("curves")
def test_pictures_show_the_training_and_the_calibration(model, later, tmp_path):
    drawn = model.plot(later)
    titles = [axis.get_title() for axis in drawn.axes]
    assert titles == ["Training", "AUC of the test rows", "Calibration", "Gain"]
    x, y = drawn.axes[2].lines[1].get_data()
    assert np.abs(x - y).max() < 0.15
    drawn.savefig(tmp_path / "picture.png")
    assert len(model.plot().axes) == 2


def test_a_plot_without_matplotlib_says_what_installs_it(model):
    with pytest.raises(ImportError, match=r"^plot: .*; pip install 'matplotlib>=3.8' installs it$"):
        model.plot()


def test_one_row_and_a_user_with_many_items_are_scored(model):
    items = list(range(500))
    rows = [{"price": 0.5, "item_id": i % 20, "user_id": 7, "noise": "n1"} for i in items]
    scores = model.predict(rows)
    many = {"price": 0.5, "item_id": [i % 20 for i in items], "user_id": 7, "noise": "n1"}
    np.testing.assert_array_equal(model.predict(many), scores)
    np.testing.assert_array_equal(model.predict({**many, "item_id": np.array(items) % 20}), scores)
    assert model.predict(rows[3]) == scores[3]
    assert model.predict(pd.DataFrame(rows).iloc[3]) == scores[3]
    np.testing.assert_array_equal(
        model.predict([row for _, row in pd.DataFrame(rows).iloc[:5].iterrows()]), scores[:5]
    )
    with pytest.raises(ValueError, match="^rows: expected columns of one length, got {'price': 2"):
        model.predict({**many, "price": [1, 2]})
    with pytest.raises(ValueError, match="^row 1: no column 'noise'; expected price"):
        model.predict([rows[0], {"price": 1, "item_id": 1, "user_id": 1}])


def test_a_list_of_one_row_is_no_column():
    draw = np.random.default_rng(5)
    tags = [[f"t{i}" for i in draw.integers(0, 6, draw.integers(1, 4))] for _ in range(200)]
    user = draw.integers(0, 9, 200)
    frame = pd.DataFrame({"click": [len(one) > 1 for one in tags], "user": user, "tags": tags})
    schema = {"label": "click", "categorical": ["user", {"column": "tags", "max_length": 3}]}
    model = dlrm.fit(frame, schema, embedding_dim=4, max_steps=5, base_device="cpu")
    rows = [{"user": 1, "tags": ["t1", "t2"]}, {"user": 1, "tags": ["t3"]}]
    scores = model.predict(rows)
    assert model.predict(rows[0]) == scores[0]
    two = {"user": 1, "tags": [["t1", "t2"], ["t3"]]}
    np.testing.assert_array_equal(model.predict(two), scores)


def test_a_model_scores_in_a_pool_of_processes(model, later):
    parts = [later.iloc[:100], later.iloc[100:250]]
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        scores = [*pool.map(model.predict, parts)]
    np.testing.assert_array_equal(np.concatenate(scores), model.predict(later.iloc[:250]))


def test_columns_have_roles_in_a_draft_and_those_that_leak_are_named():
    frame = rows_of(1)
    cart = frame.click & (np.arange(ROWS) % 50 > 0)
    frame = frame.assign(cart=cart, answer=np.where(frame.click, "good", "bad"), weight=1.5)
    frame = frame.drop(columns="click").rename(columns={"time": "seen"})
    given = {"positive": "good", "weight": "weight", "groups": "user_id", "time": "seen"}
    settings = {**SETTINGS, "max_steps": 2, "embedding_dim": 4}
    leaks = "used cart, which nearly tells the label; print.model.draft.text... shows it"
    with pytest.warns(UserWarning, match=leaks) as warned:
        model = dlrm.fit(frame, label="answer", **given, **settings)
    assert warned[0].filename == __file__
    schema = model.draft.schema
    assert schema.label.positive == "good"
    assert (schema.weight, schema.groups, schema.time.column) == ("weight", ("user_id",), "seen")
    assert "nearly tells the label (96" in model.draft.text()
    assert "draft: used cart, which nearly tells the label" in str(model)
    assert "time: seen" in str(model)


def test_what_users_need_is_what_the_package_lists():
    names = dir(dlrm)
    assert {"fit", "load", "Dataset", "Schema"} <= set(names)
    assert not [name for name in names if name in ("importlib", "files", "machine", "Any")]
    assert all(getattr(dlrm, name).__doc__ for name in names if not name.startswith("_"))


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda model, rows: model.evaluate(rows.assign(click=2)), r"row 0, .* 0 or 1 \(label"),
        (lambda model, rows: model.predict(pl.from_pandas(rows).lazy()), "rows: .*; its collect"),
        (lambda model, rows: model.importance(rows, rows=0), "^rows: expected 2 or more, got 0$"),
        (lambda model, rows: model.compare(None, rows), "^other: expected a model, .* NoneType$"),
    ],
)
def test_what_cannot_be_judged_is_named_in_the_words_of_python(judge, message, model, later):
    with pytest.raises(ValueError, match=message):
        judge(model, later)


def test_a_file_without_labels_is_named_once_and_a_wrong_label_without_a_flag(
    model, later, tmp_path
):
    file = tmp_path / "rows.parquet"
    later.drop(columns="click").to_parquet(file)
    with pytest.raises(ValueError, match=f"^{file}: expected rows with labels, got none$"):
        model.evaluate(file)
    later.assign(click=2).to_parquet(file)
    with pytest.raises(ValueError, match="row 0, column click: expected a label .* got '2'$"):
        model.evaluate(file)
    with pytest.raises(FileNotFoundError, match=r"no such file or directory \(frame\)$"):
        model.evaluate("nowhere.csv")


def test_models_of_other_labels_are_not_compared(model, later):
    schema = {"label": {"column": "click", "positive": "false"}, "numerical": ["price"]}
    other = dlrm.fit(later, schema, embedding_dim=4, max_steps=1, **SETTINGS)
    with pytest.raises(ValueError, match="^other: expected a model of the same label"):
        model.compare(other, later)

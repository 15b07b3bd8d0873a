"""`dlrm.Classifier` as scikit-learn uses estimators."""

import pickle
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import dlrm

pl = pytest.importorskip("polars")

EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "repeated rows are in other batches",
    "check_classifier_data_not_an_array": "few whole numbers of a frame are drafted as categorical",
}


def rows(count, seed=0):
    """Draws rows with a number and a shop that tell the class, and a number that does not."""
    random = np.random.default_rng(seed)
    price, noise = random.normal(size=(2, count))
    shop = random.choice(["north", "south", "east"], count)
    bought = price + 2 * (shop == "north") + random.normal(size=count) > 0.7
    frame = pd.DataFrame({"price": price, "noise": noise, "shop": shop})
    return frame, np.where(bought, "yes", "no")


@pytest.fixture(scope="module")
def fitted():
    return dlrm.Classifier(epochs=1, base_device="cpu", random_state=3).fit(*rows(3000))


def test_scores_are_probabilities_of_the_two_classes(fitted):
    frame, y = rows(500, 1)
    scores = fitted.predict_proba(frame)
    assert fitted.classes_.tolist() == ["no", "yes"]
    np.testing.assert_allclose(scores.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        scores[:, 1], 1 / (1 + np.exp(-fitted.decision_function(frame))), rtol=1e-5
    )
    assert (fitted.predict(frame) == np.where(scores[:, 1] > 0.5, "yes", "no")).all()
    assert roc_auc_score(y == "yes", scores[:, 1]) > 0.8


def test_equal_rows_of_pandas_and_polars_have_equal_scores(fitted):
    frame, _ = rows(50, 1)
    expected = fitted.predict_proba(frame)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (fitted.predict_proba(pl.from_pandas(frame)) == expected).all()
    copy = pickle.loads(pickle.dumps(fitted))
    assert (copy.predict_proba(frame) == expected).all()


def test_importances_name_the_columns_that_tell_the_class(fitted):
    price, noise, shop = fitted.feature_importances_
    assert fitted.feature_names_in_.tolist() == ["price", "noise", "shop"]
    assert min(price, shop) > 0.03 > 0.01 > abs(noise)


def test_a_number_and_id_in_doubt_has_one_importance_until_the_user_decides():
    frame, y = rows(1000)
    frame["stock"] = np.random.default_rng(2).choice(10**6, 200)[np.arange(1000) % 200]
    made = dlrm.Classifier(epochs=1, base_device="cpu")
    with pytest.warns(UserWarning, match=r"took stock as a number.*\(numerical=\[...\], cat"):
        made.fit(frame, y)
    assert "stock_number" in made.schema_.numerical_names
    assert len(made.feature_importances_) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.set_params(numerical=["stock"]).fit(frame, y)
        made.set_params(numerical=None, categorical=["stock"]).fit(frame, y)
    assert made.schema_.numerical_names == ["price", "noise"]


def test_importances_that_cannot_be_measured_are_no_attribute(monkeypatch):
    made = dlrm.Classifier(epochs=1, base_device="cpu").fit(*rows(100))

    def refuse(*_):
        raise ValueError("expected rows of both classes")

    monkeypatch.setattr(type(made.model_), "importance", refuse)
    assert not hasattr(made, "feature_importances_")


def test_parameters_are_those_of_fit_and_survive_a_clone():
    made = dlrm.Classifier(embedding_dim=4, random_state=1)
    copy = clone(made).set_params(lr=0.01)
    assert repr(copy) == "Classifier(embedding_dim=4, lr=0.01, random_state=1)"
    assert made.get_params()["lr"] is None
    with pytest.raises(TypeError, match="'learning_rate'; did you mean 'lr'"):
        dlrm.Classifier(learning_rate=0.1)
    with pytest.raises(ValueError, match="epochs"):
        dlrm.Classifier(epochs=0).fit(*rows(50))


def test_an_array_has_numbers_but_for_the_columns_called_categorical():
    frame, y = rows(600)
    codes = frame["shop"].map({"north": 0, "south": 2, "east": 1})
    array = np.column_stack([frame["price"], codes])
    array[5, 1] = np.nan
    made = dlrm.Classifier(epochs=1, categorical=[1], base_device="cpu").fit(array, y == "yes")
    assert (made.schema_.numerical_names, made.schema_.categorical_names) == (["x0"], ["x1"])
    whole = array[array[:, 1] == 2][:3]  # as few rows have the texts of many
    everything = made.predict_proba(array)
    assert (made.predict_proba(whole) == everything[array[:, 1] == 2][:3]).all()


def test_frames_have_the_columns_that_the_user_names():
    frame, y = rows(300)
    frame["size"] = np.arange(300) % 4
    as_drafted = dlrm.Classifier(epochs=1, base_device="cpu").fit(frame, y)
    assert as_drafted.schema_.categorical_names == ["shop", "size"]
    named = dlrm.Classifier(epochs=1, numerical=["size"], base_device="cpu").fit(frame, y)
    assert named.schema_.numerical_names == ["price", "noise", "size"]


@pytest.mark.parametrize("named", ["2", np.array([2])])
def test_columns_are_named_by_their_numbers_too(named):
    frame, y = rows(200)
    array = np.column_stack([frame["price"], frame["noise"], np.arange(200) % 4])
    numbered = pd.DataFrame(array)  # with the columns 0, 1 and 2
    made = dlrm.Classifier(epochs=np.int64(1), categorical=named, base_device="cpu")
    assert made.fit(numbered, y).schema_.categorical_names == ["2"]
    if not isinstance(named, str):
        array[:, 1] = np.arange(200) % 3  # few whole numbers, which a draft would take for ids
        schema = made.fit(array, y).schema_
        assert (schema.numerical_names, schema.categorical_names) == (["x0", "x1"], ["x2"])


def test_categorical_lists_stay_lists_and_a_column_has_one_role():
    frame, y = rows(200)
    frame["tags"] = [["a", "b"], ["b"], ["c"], []] * 50
    made = dlrm.Classifier(epochs=1, categorical=["tags"], base_device="cpu").fit(frame, y)
    assert any("max_length" in field for field in made.schema_.to_dict()["categorical"])
    assert made.predict_proba(frame[:3]).shape == (3, 2)
    with pytest.raises(ValueError, match="categorical, numerical: 'price' is in both"):
        dlrm.Classifier(categorical=["price"], numerical=["price"]).fit(frame, y)
    frame["facts"] = [{"a": 1}] * 200
    with pytest.raises(ValueError, match="categorical: 'facts': expected values that have a text"):
        dlrm.Classifier(categorical=["facts"]).fit(frame, y)


def test_an_evaluation_set_chooses_the_weights_and_can_stop_early():
    frame, y = rows(2000)
    eval_frame, eval_y = rows(500, 1)
    made = dlrm.Classifier(epochs=20, early_stop=2, test_freq=5, lr=0.02, base_device="cpu")
    tests = []
    made = clone(made).set_params(on_test=lambda step, _: tests.append(step))
    made.fit(frame, y, sample_weight=np.ones(2000), eval_set=[(eval_frame, eval_y)])
    results = made.model_.results
    assert results["selection_split"] == "test"
    assert tests[:2] == [5, 10]
    assert results["best_epoch"] < 19
    found = roc_auc_score(eval_y == "yes", made.predict_proba(eval_frame)[:, 1])
    assert results["best_auc"] == pytest.approx(found, abs=1e-6)


def test_a_weight_counts_as_much_as_it_says():
    frame, y = rows(2000)
    weights = np.where(y == "yes", 5.0, 1.0)
    plain = dlrm.Classifier(epochs=1, base_device="cpu").fit(frame, y)
    heavy = dlrm.Classifier(epochs=1, base_device="cpu").fit(frame, y, weights)
    share = np.average(y == "yes", weights=weights)
    assert heavy.predict_proba(frame)[:, 1].mean() == pytest.approx(share, abs=0.05)
    assert plain.predict_proba(frame)[:, 1].mean() < share - 0.2


def test_searches_folds_and_calibration_take_it():
    frame, y = rows(600)
    made = dlrm.Classifier(epochs=1, lr=0.02, base_device="cpu")
    assert cross_val_score(made, frame, y, cv=2, scoring="roc_auc").min() > 0.7
    pipeline = make_pipeline(StandardScaler(), made)
    search = GridSearchCV(pipeline, {"classifier__lr": [1e-6, 0.02]}, cv=2, scoring="roc_auc")
    assert search.fit(frame[["price", "noise"]], y).best_params_ == {"classifier__lr": 0.02}
    calibrated = CalibratedClassifierCV(made, cv=2).fit(frame, y)
    assert calibrated.predict_proba(frame).shape == (600, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": ["a", "b", "c"] * 20}, "y has 3 classes. sklearn.multiclass.OneVsRest"),
        ({"y": ["a"] * 60}, "y: expected two classes, got 1 class: a"),
        ({"y": ["a", "b"] * 10}, "inconsistent numbers of samples"),
        ({"sample_weight": np.ones(7)}, "sample_weight.shape"),
        ({"sample_weight": -np.ones(60)}, "Negative values in data passed to `sample_weight`"),
        ({"X": [{"a": 1}] * 60}, "Expected 2D array|must be a string or a real number"),
        ({"X": np.array([[1, "a"], [{}, 2]] * 30, object)}, "X: column 0: expected numbers or te"),
        ({"eval_set": (rows(60)[0], ["no"] * 60)}, r"eval_set: .* got \['no'\]"),
        ({"eval_set": (rows(60)[0], ["maybe"] * 60)}, r"eval_set: y\[0\] is maybe, which is none"),
        ({"eval_set": (rows(60)[0][["price"]], rows(60)[1])}, "feature names should match"),
        ({"eval_set": 3}, "eval_set: expected one pair"),
        ({"eval_set": [rows(60), rows(60)]}, "eval_set: expected one pair"),
        ({"eval_set": (rows(60)[0][:0], [])}, "eval_set: expected rows of two classes"),
        ({"X": rows(60)[0][:0], "y": []}, "X, y: expected rows, got none"),
        ({"X": rows(60)[0][[]]}, "X: expected columns, got none"),
        ({"X": pl.from_pandas(rows(60)[0]).lazy()}, r"X: .* got LazyFrame; its collect\(\) reads"),
        ({"y": np.array(["a", None] * 30, object)}, "y: row 1: expected a class, got None"),
        ({"y": np.array(["a", 1] * 30, object)}, "y: row 1: .* of one type, as 'a', got 1"),
        ({"sample_weight": np.zeros(60)}, "sample_weight: expected a weight above 0, got zeros"),
    ],
)
def test_what_cannot_be_trained_on_is_named(change, message):
    frame, y = rows(60)
    with pytest.raises((ValueError, TypeError), match=message):
        dlrm.Classifier(epochs=1).fit(**({"X": frame, "y": y} | change))


def test_sparse_matrices_and_other_columns_are_refused(fitted):
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match="Sparse data was passed for X"):
        dlrm.Classifier().fit(sparse.eye(4).tocsr(), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="expected two classes"):
        fitted.fit(rows(5)[0], ["yes"] * 5)
    assert set(fitted.predict(rows(50)[0])) == {"no", "yes"}, "the earlier model stays"
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(rows(5)[0].rename(columns={"shop": "store"}))
    with pytest.raises(ValueError, match="'size' is no column of X"):
        dlrm.Classifier(numerical=["size"]).fit(*rows(50))


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "dlrm.api.classifier", raising=False)
    with pytest.raises(ImportError, match=r"; pip install 'scikit-learn>=1.6' installs it$"):
        dlrm.Classifier  # noqa: B018


@pytest.mark.slow
def test_check_estimator_expects_two_failures():
    made = dlrm.Classifier(base_device="cpu")
    found = check_estimator(made, expected_failed_checks=EXPECTED, on_skip=None, on_fail=None)
    by_status = {status: [] for status in ("passed", "xfail", "failed", "skipped")}
    for one in found:
        by_status[one["status"]].append(one["check_name"])
    assert not by_status["failed"]
    assert sorted(by_status["xfail"]) == sorted(EXPECTED)
    assert len(by_status["passed"]) > 50

"""`dlrm.fit` trains as the command does; its model is scored, evaluated and saved."""

import errno
import json
import re
import resource
import shutil

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

import dlrm
from dlrm.tasks.recipe import training_defaults
from dlrm.train.checkpoints.checkpoint import Checkpoint

ROWS = 3000
SCHEMA = {
    "label": {"column": "bought", "positive": "yes"},
    "numerical": ["price"],
    "categorical": ["shop", "user"],
}
SETTINGS = {"embedding_dim": 4, "top_mlp_sizes": (16, 1), "epochs": 2, "batch_size": 64}


def table() -> pa.Table:
    """Returns rows with some missing shops and prices; the best possible AUC is about 0.79."""
    draw = np.random.default_rng(1)
    shop, price = draw.integers(0, 20, ROWS), draw.normal(0, 1, ROWS)
    logit = 1.2 * np.sin(shop) + price - 0.5
    return pa.table(
        {
            "bought": np.where(draw.random(ROWS) < 1 / (1 + np.exp(-logit)), "yes", "no"),
            "price": pa.array(price, mask=draw.random(ROWS) < 0.05),
            "shop": pa.array([f"s{i}" for i in shop], mask=draw.random(ROWS) < 0.05),
            "user": [f"u{i}" for i in draw.integers(0, 200, ROWS)],
        }
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return dlrm.Dataset.from_arrow(table(), SCHEMA, tmp_path_factory.mktemp("fit") / "dataset")


@pytest.fixture(scope="module")
def model(dataset):
    return dlrm.fit(dataset, base_device="cpu", **SETTINGS)


def trained_by_the_command(dataset, settings, folder):
    aside = {"set_aside": 0.1}  # since there are no validation rows
    values = training_defaults(round(0.9 * dataset.rows["train"]), aside | settings)
    words = [
        f"--{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}"
        for name, v in values.items()
    ]
    where = [
        f"--dataset={dataset.path}",
        "--save_checkpoint_path=run",
        "--base_device=cpu",
        "--log_path=log.json",
    ]
    forked.succeed("dlrm.scripts.main", *where, *words, cwd=folder)
    return Checkpoint.open(folder / "run").path


MIXED = {
    **{"numerical_embedding": "piecewise", "wide": True, "dropout": 0.3, "self_ensemble": True},
    **{"ensemble": "dot*2,quadratic", "batch_norm": True, "ema_decay": 0.5},
}


def test_other_parts_train_as_by_the_command_on_the_transforms_bins(tmp_path):
    prices = {"column": "price", "transform": "standardize", "bins": 8}
    constant = pa.array([7.0] * ROWS)
    schema = {**SCHEMA, "numerical": [prices, "seven"]}
    dataset = dlrm.Dataset.from_arrow(
        table().append_column("seven", constant), schema, tmp_path / "dataset"
    )
    state = torch.get_rng_state()
    model = dlrm.fit(dataset, base_device="cpu", **SETTINGS, **MIXED)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator"
    theirs = trained_by_the_command(dataset, {**SETTINGS, **MIXED}, tmp_path)
    for name in ("dense.safetensors", "average.safetensors", "tables/0.bin", "tables/3.bin"):
        assert (theirs / name).read_bytes() == (model.path / name).read_bytes()
    fitted = json.loads((dataset.path / "transform" / "transform.json").read_text())["numerical"][0]
    mean, deviation = (float.fromhex(fitted[name]) for name in ("mean", "deviation"))
    raw = np.array([float.fromhex(edge) for edge in fitted["edges"]])
    assert len(raw) == 9
    edges = model.model.numerical_embedding.edges
    expected = ((raw - mean) / deviation).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(edges[0].unique(), expected)
    assert len(edges[1].unique()) == 1
    rows = table().append_column("seven", constant).slice(0, 50)
    np.testing.assert_array_equal(dlrm.load(theirs).predict(rows), model.predict(rows))
    assert np.isfinite(model.predict(rows)).all()


def test_a_student_is_that_of_the_command(dataset, model, tmp_path):
    settings = {**SETTINGS, "dropout": 0.2, "distill": model.path, "distill_weight": 0.4}
    student = dlrm.fit(dataset, base_device="cpu", **settings)
    theirs = trained_by_the_command(dataset, settings, tmp_path)
    for name in ("dense.safetensors", "tables/0.bin"):
        assert (theirs / name).read_bytes() == (student.path / name).read_bytes()
    assert (
        dlrm.update(student, dataset, max_steps=2).results["test_auc"] > 0.6
    )  # without the teacher
    del settings["distill"]
    with pytest.raises(ValueError, match=r"^distill_weight 0.4 needs distill$"):
        dlrm.fit(dataset, base_device="cpu", **settings)
    with pytest.raises(FileNotFoundError, match="nowhere: no checkpoint here"):
        dlrm.fit(dataset, base_device="cpu", distill="nowhere", **SETTINGS)


def test_the_weights_are_those_of_the_command(dataset, model, tmp_path):
    theirs = trained_by_the_command(dataset, SETTINGS, tmp_path)
    assert theirs.name == model.path.name
    for name in ("dense.safetensors", "tables/0.bin", "tables/1.bin"):
        assert (theirs / name).read_bytes() == (model.path / name).read_bytes()
    summary = [line for line in (tmp_path / "log.json").read_text().splitlines() if line][-1]
    logged = json.loads(summary.removeprefix("DLLL "))["data"]
    assert logged["test_auc"] == model.results["test_auc"] > 0.7
    found = dlrm.load(theirs).results  # which has no summary of its own
    assert found["set_aside_auc"] == model.results["set_aside_auc"]
    assert (found["holdout_split"], "test_auc" in found) == ("test", False)
    shutil.copy(tmp_path / "log.json", tmp_path / "run")
    assert dlrm.load(theirs).results["test_auc"] == model.results["test_auc"]


def test_without_a_schema_one_is_drafted(model):
    drafted = dlrm.fit(table().to_reader(), label="bought", base_device="cpu", **SETTINGS)
    schema = drafted.transform.schema
    assert schema.label == dlrm.Schema.from_dict(SCHEMA).label
    assert (schema.numerical_names, schema.categorical_names) == (["price"], ["shop", "user"])
    same = model.predict(table())
    np.testing.assert_array_equal(drafted.predict(table()), same)


def test_what_a_draft_leaves_in_doubt_is_a_warning():
    rows = table().append_column("row", pa.array(range(ROWS)))
    rows = rows.append_column("same", pa.array(["a"] * ROWS))
    expected = "the schema drafted from the table left out row, same; "
    with pytest.warns(UserWarning, match=f"^{expected}.*schema= takes another$") as warned:
        dlrm.fit(rows, label="bought", base_device="cpu", max_steps=1, embedding_dim=4)
    assert warned[0].filename == __file__


def test_labels_that_cannot_be_learned_are_a_warning_and_those_of_one_class_an_error():
    rows = table().set_column(0, "bought", pa.array(np.random.default_rng(5).integers(0, 2, ROWS)))
    expected = r"no better than a constant .* test rows: .* entropy is 1\.\d+.* try recipe=\"auto\""
    with pytest.warns(UserWarning, match=expected):
        dlrm.fit(rows, label="bought", base_device="cpu", lr=0.05, epochs=1)
    rows = rows.set_column(0, "bought", pa.array([1] * ROWS))
    with pytest.raises(ValueError, match="label: expected training rows of both .* got 1 in all 2"):
        dlrm.fit(rows, label="bought", base_device="cpu")


def test_its_scores_are_judged_as_scikit_learn_does(model):
    rows = table()
    labels, scores = np.array(rows["bought"]) == "yes", model.predict(rows)
    found = model.evaluate(rows)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    assert found["log_loss"] == pytest.approx(log_loss(labels, scores.astype(float)), rel=1e-5)
    assert found["calibration"] == pytest.approx(scores.sum() / labels.sum(), rel=1e-4)


def test_a_row_has_one_score_however_it_is_given(model):
    rows = table().slice(0, 200).drop_columns("bought")
    scores = model.predict(rows)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(model.predict(rows.to_pylist()), scores, rtol=1e-6)
    np.testing.assert_allclose(model.predict(rows.to_reader(7)), scores, rtol=1e-5)
    model.batch_size = 9
    np.testing.assert_allclose(model.predict(rows), scores, rtol=1e-5)
    model.batch_size = 1000
    assert model.predict(rows.slice(0, 0)).shape == (0,)
    polars = pytest.importorskip("polars")
    np.testing.assert_array_equal(model.predict(polars.from_arrow(rows)), scores)


def test_what_is_saved_is_read_wherever_checkpoints_are(model, dataset, tmp_path, monkeypatch):
    rows, scores = table(), model.predict(table())
    model.save(tmp_path / "saved")
    np.testing.assert_array_equal(dlrm.load(tmp_path / "saved").predict(rows), scores)
    with pytest.raises(FileExistsError, match="saved: exists .* overwrite=True replaces a check"):
        model.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="directory ftp://host/x: expected a URI of s3://"):
        model.save("ftp://host/x")
    model.save(tmp_path / "saved", overwrite=True)
    pq.write_table(rows, tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    words = ["--checkpoint=saved", "--input=rows.parquet", "--output=scores.npy"]
    forked.call("dlrm.scripts.predict", *words, code=0)
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), scores)
    words = ["--mode=test", f"--dataset={dataset.path}", "--load_checkpoint_path=saved"]
    done = forked.succeed("dlrm.scripts.main", *words, "--base_device=cpu", cwd=tmp_path)
    auc = float(re.search(r"Finished testing: auc (0\.\d+)", done.stdout)[1])
    assert auc == pytest.approx(model.results["test_auc"], abs=1e-6)


def test_bad_rows_are_named_by_their_place_in_the_table(model):
    rows = table()
    prices = [str(price) for price in rows["price"].to_pylist()]
    prices[40] = "dear"
    model.batch_size = 16
    texts = pa.array([None if price == "None" else price for price in prices])
    changed = rows.set_column(1, "price", texts)
    with pytest.raises(ValueError, match="^row 40, column price: expected a number, got 'dear'"):
        model.evaluate(changed)
    with pytest.raises(ValueError, match="^frame: expected rows to evaluate, got none$"):
        model.evaluate(rows.slice(0, 0))
    with pytest.raises(ValueError, match="^frame: no column 'bought'"):
        model.evaluate(rows.drop_columns("bought"))
    labels = pa.array(["yes", "perhaps"] * (ROWS // 2))
    with pytest.raises(ValueError, match="^row 1, column bought: expected .*got 'perhaps'"):
        model.evaluate(rows.set_column(0, "bought", labels))


def test_a_model_says_what_it_is(model, tmp_path):
    shown = repr(model)
    assert shown.startswith(f"Predictor({str(model.path)!r}: 1 numerical and 2 categorical fields")
    auc, loss = model.results["test_auc"], model.results["test_log_loss"]
    rows = round(ROWS * 0.8 * 0.9)
    tested = f"; test auc {auc:.4f}, log loss {loss:.4f} (hold-out))"
    assert shown.endswith(f", trained on {rows:,} rows{tested}")
    model.save(tmp_path / "saved")
    loaded = dlrm.load(tmp_path / "saved")
    assert repr(loaded).endswith(f", trained on {rows:,} rows{tested}")
    assert loaded.results == model.results
    first, *columns, tested, chosen, _ = str(loaded).splitlines()
    assert first == f"DLRM of 1 numerical and 2 categorical fields, trained on {rows:,} rows"
    assert columns == ["label: bought (yes is 1)", "numerical: price", "categorical: shop, user"]
    calibration = model.results["test_calibration"]
    assert tested == (
        f"test (hold-out): AUC {auc:.4f}, log loss {loss:.4f}, calibration {calibration:.4f}"
    )
    assert chosen.startswith("set_aside (selection): AUC 0.")
    page = loaded._repr_html_()
    assert page.count("<table") == 2
    assert f"{auc:.4f}" in page


def test_a_row_of_pandas_is_one_row_in_all_its_versions(model, monkeypatch):
    frame = table().to_pandas()
    expected = model.predict(frame[:1])
    monkeypatch.setattr(type(frame.iloc[0]), "__arrow_c_stream__", None, raising=False)  # of 3.0
    np.testing.assert_array_equal(model.predict(frame.iloc[0]), expected)


def test_nothing_is_printed_unless_asked(capfd):
    quick = {**SETTINGS, "max_steps": 3}
    model = dlrm.fit(table(), SCHEMA, test_fraction=0.5, seed=3, base_device="cpu", **quick)
    assert capfd.readouterr() == ("", "")
    assert model.path.name in [f"step-00000000{step}" for step in (1, 2, 3)]
    dlrm.fit(table(), SCHEMA, verbose=True, base_device="cpu", **quick)
    shown = capfd.readouterr().out
    assert "DLL" not in shown
    assert re.search(r"^test +AUC 0\.\d+ .* hold-out$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"embeding_dim": 1}, TypeError, "did you mean 'embedding_dim'"),
        ({"zzz": 1}, TypeError, r"fit\(\): got 'zzz'; expected one of .* help\(fit\) has"),
        ({"epochs": "two"}, ValueError, "^epochs: expected int, got 'two'$"),
        ({"epochs": 1.5}, ValueError, "^epochs: expected int, got 1.5$"),
        ({"lr": True}, ValueError, "^lr: expected float, got True$"),
        ({"ema_decay": "0.9"}, ValueError, r"^ema_decay: expected float \| None, got '0.9'$"),
        ({"top_mlp_sizes": (8.0, 1)}, ValueError, r"^top_mlp_sizes: expected tuple\[int"),
        ({"test_fraction": "0.1"}, ValueError, "^test_fraction: expected float, got '0.1'$"),
        ({"lr": -1.0}, ValueError, "^lr=-1.0: expected"),
        ({"ensemble": 10**24}, ValueError, "^ensemble=1000000000000000000000000: expected 1"),
        ({"bottom_mlp_sizes": (8, 5)}, ValueError, "the last size must equal embedding_dim 4"),
        ({"base_device": "gpu"}, ValueError, "^base_device=gpu: expected"),
        ({"schema": None}, ValueError, "schema, label: expected a schema, or the label's column"),
        ({"schema": "bought"}, FileNotFoundError, "^schema 'bought': .*; label='bought' names"),
        ({"data": "nowhere"}, FileNotFoundError, "nowhere"),
        ({"data": __file__}, ValueError, r"test_fit\.py: .* got a file; read it into a table"),
        ({"schema": None, "label": ["bought", "shop"]}, ValueError, "^label: .* one column, got"),
        ({"schema": None, "label": "user"}, ValueError, "^column user: .*; positive, .* several"),
        ({"schema": None, "label": "bought", "time": 3}, ValueError, "^time: .* column, got 3"),
        ({"schema": None, "label": "user", "weight": "user"}, ValueError, "^weight: .* another"),
        ({"time": "price"}, ValueError, "^time: is for a table without a schema"),
        ({"on_test": 3}, ValueError, "^on_test: expected a function, got 3"),
        ({"metrics": {"auc": max}}, ValueError, "^metrics: expected a name .*, got 'auc'"),
        ({"metrics": {"gini": 3}}, ValueError, "^metrics: 'gini': expected a function, got 3"),
        ({"recipe": "best"}, ValueError, "^recipe=best: expected one of"),
        ({"recipe": "auto", "data": table()[:9]}, ValueError, "recipe=auto: expected 100 train"),
        ({"metrics": max}, ValueError, "^metrics: expected a dict from names to functions"),
        ({"metrics": {"gini": lambda *_: "x"}}, ValueError, "'gini': expected a number, got 'x'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, error, message):
    given = {"data": table(), "schema": SCHEMA, **SETTINGS, **arguments}
    with pytest.raises(error, match=message):
        dlrm.fit(given.pop("data"), given.pop("schema"), **given)


def test_lists_and_whole_numbers_are_taken_for_tuples_and_floats(dataset):
    settings = {**SETTINGS, "bottom_mlp_sizes": [8, 4], "lr": 1, "dropout": 0, "ema_decay": None}
    settings |= {"batch_size": np.int64(64), "lr": np.float32(1), "top_mlp_sizes": np.array([8, 1])}
    settings |= {"schedule": "linear", "amp": False}  # also names of a training's parts
    assert "test_auc" in dlrm.fit(dataset, base_device="cpu", max_steps=1, **settings).results


def test_a_dataset_takes_no_schema_and_its_splits(dataset):
    for name, value in {"schema": SCHEMA, "test_fraction": 0.3, "test": table()}.items():
        with pytest.raises(ValueError, match=f"^{name}: is for a table in memory; .* is a dataset"):
            dlrm.fit(dataset, **{name: value})


def test_a_checkpoint_names_its_dataset_by_an_absolute_path(dataset, monkeypatch):
    monkeypatch.chdir(dataset.path.parent)
    model = dlrm.fit(dataset.path.name, base_device="cpu", max_steps=1, **SETTINGS)
    assert Checkpoint(model.path).config["flags"]["dataset"] == str(dataset.path)


def test_the_guide_example_runs(root, tmp_path, monkeypatch):
    polars = pytest.importorskip("polars")
    draw = np.random.default_rng(0)
    columns = ("age", "education_num", "capital_gain")
    frame = {name: draw.integers(1, 90, 400) for name in columns}
    for name in ("workclass", "marital_status", "occupation", "relationship"):
        frame[name] = draw.choice(["a", "b", "c"], 400)
    frame["income"] = np.where(frame["age"] > 50, ">50K", "<=50K")
    monkeypatch.chdir(tmp_path)
    polars.DataFrame(frame).write_csv("adult.csv")
    text = (root / "docs" / "guide" / "python.md").read_text()
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names := {})
    assert names["model"].results["test_auc"] > 0.9
    assert dlrm.load("adult-model").evaluate(names["frame"])["auc"] > 0.9


def test_tables_in_files_are_trained_to_the_same_bits(dataset, tmp_path):
    where = {"table_files": str(tmp_path / "files")}
    parts = {"gradient_accumulation_steps": 2, "ema_decay": 0.9}
    trained = dlrm.fit(dataset, base_device="cpu", **SETTINGS, **where, **parts)
    found = trained.model.state_dict()
    trained.save(tmp_path / "saved")
    with pytest.raises(FileExistsError):
        trained.save(tmp_path / "saved")
    trained.save(tmp_path / "saved", overwrite=True)
    saved = dlrm.load(tmp_path / "saved").model.state_dict()
    assert all(saved[name].equal(tensor) for name, tensor in found.items())
    expected = dlrm.fit(dataset, base_device="cpu", **SETTINGS, **parts).model.state_dict()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("error")
def test_a_model_without_numerical_fields_warns_of_nothing(tmp_path):
    rows = table().drop(["price"])
    settings = {**SETTINGS, "epochs": 2, "lr": 0.02, "bottom_mlp_sizes": (8, 4)}
    trained = dlrm.fit(rows, SCHEMA | {"numerical": []}, base_device="cpu", **settings)
    scores = trained.predict(rows)
    trained.save(tmp_path / "saved")
    loaded = dlrm.load(tmp_path / "saved")
    assert loaded.model.bottom_mlp[0].weight.shape == (8, 0)
    np.testing.assert_array_equal(loaded.predict(rows), scores)


def fit_where_files_are_short(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
    rows = np.arange(20_000)
    few_bytes = pa.table({"y": rows % 2, "x": (rows % 3) * 0.5})  # as Parquet
    try:
        dlrm.fit(few_bytes, label="y")
    except OSError as error:
        path.write_text(json.dumps([error.errno, error.filename]))


def test_a_full_disk_is_an_oserror_with_the_path(tmp_path):
    process = forked.CONTEXT.Process(target=fit_where_files_are_short, args=(tmp_path / "error",))
    process.start()
    process.join()
    number, name = json.loads((tmp_path / "error").read_text())
    assert number == errno.EFBIG
    assert "dataset" in name


def test_a_column_can_be_a_number_and_an_id(tmp_path):
    random = np.random.default_rng(0)
    rows = table().slice(0, 600).append_column("age", pa.array(random.integers(-1, 30, 600)))
    numerical = [{"column": "age", "missing_values": ["-1"]}, "price"]
    categorical = [{"column": "age", "type": "integer"}, "shop"]
    schema = {**SCHEMA, "numerical": numerical, "categorical": categorical}
    model = dlrm.fit(rows, schema, max_steps=4, batch_size=64, embedding_dim=4, base_device="cpu")
    assert model.transform.names == ["age", "price", "shop"]
    assert model.row_transform.schema.numerical_names == ["age_number", "price"]
    assert model.row_transform.schema.categorical_names == ["age", "shop"]
    scores = model.predict(rows)
    model.save(tmp_path / "model")
    loaded = dlrm.load(tmp_path / "model")
    dicts = rows.drop_columns(["bought"]).to_pylist()
    for given in (rows.to_pylist(), dicts):
        np.testing.assert_allclose(loaded.predict(given), scores, rtol=1e-6)
    changed = [{**row, "age": 500} for row in dicts[:5]]
    assert not np.allclose(loaded.predict(changed), scores[:5])
    assert set(loaded.evaluate(rows)) >= {"auc"}

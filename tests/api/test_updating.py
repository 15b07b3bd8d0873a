"""`model.update` trains a model on with the rows of a table or a dataset."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from test_fit import SCHEMA, table

import dlrm
from dlrm.serving.network.recalibration import load_recalibration, of_sampling_rate
from dlrm.train.checkpoints.checkpoint import Checkpoint

BATCH = 64
GOING_ON = {"continue_lr": "constant", "set_aside": 0, "epochs": 1}


@pytest.fixture(scope="module")
def frames():
    """A first table, and two further ones of whole batches."""
    rows = table()
    return rows.slice(0, 1500), rows.slice(1500, 10 * BATCH), rows.slice(1500 + 10 * BATCH, BATCH)


@pytest.fixture(scope="module")
def model(frames):
    small = {"embedding_dim": 4, "top_mlp_sizes": (16, 1), "epochs": 1, "batch_size": BATCH}
    return dlrm.fit(frames[0], SCHEMA, base_device="cpu", dropout=0.2, **small)


def weights(model):
    return {name: value.clone() for name, value in model.model.state_dict().items()}


def test_updates_one_after_another_are_one_long_training(model, frames):
    before = weights(model)
    first = dlrm.update(model, frames[1], **GOING_ON)
    second = dlrm.update(first, frames[2], **GOING_ON)
    whole = dlrm.update(model, pa.concat_tables(frames[1:]), **GOING_ON)
    for name, value in weights(second).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=0, atol=0)
        torch.testing.assert_close(before[name], weights(model)[name], rtol=0, atol=0)
    assert not any(torch.equal(value, before[name]) for name, value in weights(second).items()
                   if value.is_floating_point())  # fmt: skip
    sizes = [one.model.config.table_sizes for one in (model, second)]
    assert sizes[1] == tuple(second.transform.cardinalities)
    assert sum(sizes[1]) > sum(sizes[0])  # by a new user
    steps = [Checkpoint(one.path).progress["step"] for one in (model, second)]
    assert steps[1] - steps[0] == 11


def test_an_update_chooses_and_reports_like_a_fit_and_keeps_what_the_model_has(model, frames):
    recalibrated = model._with_recalibration(of_sampling_rate(0.5))
    made = dlrm.update(recalibrated, frames[1], test=frames[2], base_device="cpu")
    assert made.results["selection_split"] == "set_aside"
    assert made.results["holdout_split"] == "test"
    assert made.recalibration is recalibrated.recalibration
    flags = Checkpoint(made.path).config["flags"]
    assert (flags["continue_lr"], flags["dropout"], flags["batch_size"]) == ("rewarm", 0.2, BATCH)
    rows = frames[2].drop_columns("bought")
    np.testing.assert_array_equal(made.predict(rows), dlrm.load(made.path)._with_recalibration(
        made.recalibration).predict(rows))  # fmt: skip


def test_a_saved_model_goes_on_from_a_dataset(model, frames, tmp_path):
    model._with_recalibration(of_sampling_rate(0.5)).save(tmp_path / "saved")
    loaded = dlrm.load(tmp_path / "saved")
    dataset = dlrm.Dataset.from_arrow(frames[0], SCHEMA, tmp_path / "same")
    run = tmp_path / "run"
    made = dlrm.update(loaded, dataset, save_checkpoint_path=run, verbose=True)
    assert made.path.parent == run
    assert load_recalibration(made.path).kind == "sampling"
    other = dlrm.Dataset.from_arrow(frames[1], SCHEMA)
    with pytest.raises(ValueError, match="expected the transform of .*saved with further values"):
        dlrm.update(loaded, other)


def test_mistakes_are_named(model, frames):
    unreadable = frames[2].set_column(0, "bought", pa.array(["yes", "maybe"] * (BATCH // 2)))
    dataset = dlrm.Dataset.from_arrow(frames[1], SCHEMA)
    for data, arguments, error, said in (
        (frames[1], {"learning_rate": 1.0}, TypeError, r"update\(\): got 'learning_rate'; .*'lr'"),
        (frames[1], {"continue_lr": "up"}, ValueError, "continue_lr=up: expected one of schedule"),
        (frames[1], {"top_mlp_sizes": (8, 1)}, ValueError, "of another architecture"),
        (frames[1].slice(0, 0), {}, ValueError, "frame: expected rows, got none"),
        (frames[1].drop_columns("shop"), {}, ValueError, "shop"),
        (dataset, {"test": frames[2]}, ValueError, "^test: is for a table in memory; .* a dataset"),
        (unreadable, {}, ValueError, "column bought: .*'yes' or 'no', got 'maybe'"),
    ):
        with pytest.raises(error, match=said):
            dlrm.update(model, data, **arguments)


def test_a_model_of_a_recipe_is_updated_by_one_pass_in_any_mode_but_its_schedule(frames):
    model = dlrm.fit(frames[0], SCHEMA, base_device="cpu", recipe="auto", epochs=2, embedding_dim=2)
    assert Checkpoint(model.path).config["flags"]["schedule"] == "linear"
    before = Checkpoint(model.path).progress["step"]
    made = dlrm.update(model, frames[2], continue_lr="constant", batch_size=BATCH, set_aside=0)
    assert Checkpoint(made.path).progress["step"] == before + 1
    with pytest.raises(
        ValueError, match=r"continue_lr=schedule: .*depends on the length of the run"
    ):
        dlrm.update(model, frames[2], continue_lr="schedule")

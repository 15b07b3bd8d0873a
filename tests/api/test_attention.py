"""A list that is attended to, from a table with a shared table to a served model."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import dlrm
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.model.dlrm import DLRM
from dlrm.serving.importance import contributions, permutation_importance
from dlrm.serving.rows.raw import inputs_of_text, text_of_lines
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.nvidia import write_nvidia
from dlrm.train.checkpoints.state import Parameters

SCHEMA = {
    "label": "click",
    "numerical": ["age"],
    "categorical": [
        {"column": "item", "type": "integer", "table": "items"},
        "user",
        {
            "column": "seen",
            "type": "integer",
            "table": "items",
            "max_length": 8,
            "pooling": "attention",
            "target": "item",
        },
        {"column": "bought", "type": "integer", "table": "items", "max_length": 3},
    ],
}
MODEL = {
    "embedding_dim": 8,
    "bottom_mlp_sizes": (8,),
    "top_mlp_sizes": (16, 1),
    "epochs": 2,
    "batch_size": 128,
    "set_aside": 0,
    "attention_hidden": 5,
}


def draw(rows=1500, seed=0):
    random = np.random.default_rng(seed)
    seen, bought = (
        [random.integers(0, 30, n).tolist() for n in random.integers(0, most, rows)]
        for most in (12, 3)
    )
    item = random.integers(0, 30, rows)
    likes = np.array([i in own for i, own in zip(item, seen, strict=True)])
    return pa.table(
        {
            "click": (likes ^ (random.random(rows) < 0.1)).astype("i1"),
            "age": random.integers(18, 90, rows),
            "item": item,
            "user": [f"u{i}" for i in random.integers(0, 20, rows)],
            "seen": pa.array(seen, pa.list_(pa.int64())),
            "bought": pa.array(bought, pa.list_(pa.int64())),
        }
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("attended") / "data"
    return dlrm.Dataset.from_arrow(draw(), dlrm.Schema.from_dict(SCHEMA), path)


@pytest.fixture(scope="module")
def model(dataset):
    return dlrm.fit(dataset, **MODEL)


def test_the_dataset_and_the_model_have_one_table_for_the_three_fields(dataset, model):
    spec = FeatureSpec.load(dataset.path)
    assert spec.field_tables == (0, 1, 0, 0)
    assert spec.targets == (None, None, 0, None)
    assert spec.poolings == (None, None, "attention", None)
    assert spec.cardinalities == [31, 21, 31, 31]
    config = model.model.config
    assert config.embedding_rows == (31, 21)
    assert config.attended == {2: 0}
    assert sum(len(table) for table in model.model.embeddings.tables()) == 52
    assert not np.allclose(model.model.attention["2"].output_bias.item(), 1)  # it is trained


def test_a_saved_model_gives_the_same_scores_in_every_form_of_the_rows(model, tmp_path):
    rows = draw(40, seed=1)
    expected = model.predict(rows)
    assert np.ptp(expected) > 0.01
    np.testing.assert_array_equal(model.predict(rows.to_pylist()), expected)
    model.save(tmp_path / "saved")
    np.testing.assert_array_equal(dlrm.load(tmp_path / "saved").predict(rows), expected)
    empty = [{**row, "seen": []} for row in rows.to_pylist()]
    assert np.isfinite(model.predict(empty)).all()


def test_the_order_of_seen_items_is_not_their_meaning_but_the_candidate_is(model):
    row = {"age": 30, "user": "u1", "item": 3, "seen": [3, 4, 5], "bought": []}
    same, other = {**row, "seen": [5, 3, 4]}, {**row, "item": 9}
    scores = model.predict([row, same, other])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert scores[0] != pytest.approx(scores[2], rel=1e-4)


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"amp": True}], ids=str)
def test_it_trains_by_parts_and_in_half_precision(dataset, model, settings):
    found = dlrm.fit(dataset, **MODEL, **settings)
    expected = model.predict(draw(50, seed=2))
    tolerance = 0.05 if "amp" in settings else 1e-4
    np.testing.assert_allclose(found.predict(draw(50, seed=2)), expected, atol=tolerance)


@pytest.mark.long
def test_a_served_model_scores_raw_rows_and_ids(model, tmp_path):
    scorer = pytest.importorskip("dlrm.serving.server.scorer", reason="needs dlrm[serve]")
    export = pytest.importorskip("dlrm.deployment.export", reason="needs dlrm[serve]")
    model.save(tmp_path / "saved")
    words = [f"--checkpoint={tmp_path / 'saved'}", f"--save-dir={tmp_path / 'models'}", "--python"]
    export.run(export.parse(words))
    rows = draw(30, seed=1)
    lines = [text_of(row) for row in rows.to_pylist()]
    inputs = inputs_of_rows(model, rows)
    names = ("numerical", "ids", "lengths")
    numbers = [inputs.numerical.astype("f4"), inputs.ids.astype("i8"), inputs.lengths.astype("i4")]
    asked = [
        {"raw__0": np.array(lines, "S").view(np.uint8).reshape(len(lines), -1)},
        {f"input__{place}": array for place, array in zip(range(len(names)), numbers, strict=True)},
    ]
    answers = scorer.OnnxScorer(tmp_path / "models/model/1", batch_size=100, threads=1).answer(
        asked
    )
    for answer in answers:
        assert not isinstance(answer, Exception), answer
        np.testing.assert_allclose(answer.ravel(), model.logits(rows), rtol=1e-4, atol=1e-5)


def test_explanations_count_the_candidate_and_the_list(model):
    rows = draw(300, seed=3)
    inputs, labels = inputs_of_rows(model, rows), np.array(rows["click"], np.float32)
    found = permutation_importance(model, inputs, labels)
    assert len(found) == 5
    parts = contributions(model, inputs)
    assert parts.shape == (300, 5)
    assert (np.abs(parts).max(0) > 0).all()
    empty = np.array([not seen for seen in rows["seen"].to_pylist()])
    assert np.abs(parts[empty, 3]).max() == 0


def text_of(row):
    cells = (row[name] for name in ("age", "item", "user", "seen", "bought"))
    return "\t".join("|".join(map(str, c)) if isinstance(c, list) else str(c) for c in cells)


def inputs_of_rows(model, rows):
    lines = "\n".join(text_of(row) for row in rows.to_pylist())
    text = text_of_lines(lines.encode(), len(model.row_transform.names))
    return inputs_of_text(model.row_transform, text)


def test_rows_may_be_added_to_a_shared_table(model, tmp_path):
    saved = Checkpoint(model.path)
    config, rows = model.config, [40, 21]
    sizes = tuple(rows[table] for table in config.field_tables)
    larger = DLRM(replace(config, table_sizes=sizes))
    saved.load(Parameters(larger, larger.table_parameters()), table_sizes=rows)
    for name in [name for name in saved.dense if name.startswith("attention")]:
        del saved.dense[name]
    with pytest.raises(ValueError, match="NVIDIA's code does not have"):
        write_nvidia(saved, tmp_path / "nvidia")

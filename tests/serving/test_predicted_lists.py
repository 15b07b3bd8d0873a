"""Rows with lists get the scores of testing; tests/routes brings them in every form."""

import csv
import json

import forked
import listed_model
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import dlrm
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.serving.importance import contributions, permutation_importance
from dlrm.serving.rows.tables import read_inputs, scoring_reader
from dlrm.serving.sources import inputs_of

ROWS = 300


@pytest.fixture(scope="module")
def predictor(listed):
    return dlrm.load(listed.checkpoint)


@pytest.fixture(scope="module")
def inputs(listed, predictor):
    """The inputs of all rows, and their labels."""
    table = predictor.transform
    (batch,) = pq.read_table(listed.table).combine_chunks().to_batches()
    made, rows = read_inputs(table, scoring_reader(table, labeled=True), batch)
    return made, rows.labels.astype(np.float32)


def vectors_of(predictor, row):
    """Returns the ids and weights of a row's fields, from the dictionaries alone."""
    transform = predictor.transform
    values = [
        {transform.value(table, number): number for number in range(1, size)}
        for table, size in enumerate(transform.cardinalities)
    ]
    kept = slice(-20, None)
    tags = (row["tags"] or [])[-4:]
    return [
        ([values[0].get(row["user"], 0)], [1.0]),
        ([values[1].get(tag, 0) for tag in tags], [1.0] * len(tags)),
        ([values[2].get(str(i), 0) for i in row["history"][kept]], row["history_weights"][kept]),
    ]


def test_scores_are_those_of_plain_torch(listed, predictor, inputs):
    """In float64, from Python rows: cut lists, sums, weighted means, dots, MLPs."""
    state = {name: value.double() for name, value in predictor.model.state_dict().items()}
    tables = [table.double() for table in predictor.model.embeddings.tables()]

    def layer(name, values):
        return state[f"{name}.weight"][:, : len(values)] @ values + state[f"{name}.bias"]

    expected = []
    for row, number in zip(listed.rows[:ROWS], inputs[0].numerical[:, 0].tolist(), strict=False):
        hidden = layer("bottom_mlp.0", torch.tensor([number]).double()).relu()
        vectors = [layer("bottom_mlp.2", hidden).relu()]
        for table, (ids, factors) in zip(tables, vectors_of(predictor, row), strict=True):
            own = table[ids] * torch.tensor(factors).double().unsqueeze(1)
            vectors.append(own.sum(0) / (max(len(ids), 1) if table is tables[2] else 1))
        dots = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        hidden = layer("top_mlp.0", torch.cat([vectors[0], torch.stack(dots)])).relu()
        expected.append(layer("output", hidden).item())
    found = predictor.logits(listed.rows[:ROWS])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert len({round(score, 4) for score in expected}) > 200


def test_commands_score_files_and_datasets(listed, predictor, tmp_path):
    rows, expected = listed.rows[:ROWS], predictor.predict(listed.rows[:ROWS])
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([listed_model.cell(value) for value in row.values()] for row in rows)
    words = [f"--checkpoint={listed.checkpoint}", f"--output={tmp_path / 'scores.npy'}"]
    source = f"--input={tmp_path / 'rows.csv'}"
    done = forked.succeed("dlrm.scripts.predict", *words, source, "--explain=3")
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, atol=1e-6)
    history = rows[3]["history"][-20:]
    shown = ", ".join(map(str, history[:4])) + f" and {len(history) - 4} more"
    assert len(history) > 5
    assert shown in done.stdout, done.stdout
    forked.succeed("dlrm.scripts.predict", *words, f"--input={listed.dataset}")
    test = open_datasets(DataConfig(str(listed.dataset), test_batch_size=10_000)).test
    batch = test.batch(0)
    logits, labels = predictor.logits_of(inputs_of(batch)), batch.labels.numpy()
    np.testing.assert_allclose(
        np.load(tmp_path / "scores.npy"), 1 / (1 + np.exp(-logits)), atol=1e-6
    )
    assert len(labels) == len(logits) < len(listed.rows) / 2


REFUSED = [
    ({"tags": [["a"]]}, "row 1, column tags: expected a list of values, got "),
    ({"tags": {"a"}}, "expected values, or lists of them, got {'a'}"),
    ({"tags": [{"a": 1}]}, "expected values, or lists of them, got {'a': 1}"),
    ({"user": ["a"]}, "row 1, column user: expected one value, got "),
    ({"history_weights": [1.0]}, "row 1, column history: expected as many weights in history_we"),
    ({"history": ["x"], "history_weights": [1]}, "row 1, column history: place 0 .* got 'x'"),
    ({"history": [1], "history_weights": ["inf"]}, "row 1, column history_weights: place 0 .*inf"),
    ({"history": [1], "history_weights": [None]}, "history_weights: place 0 .* got no value"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_lists_that_cannot_be_read_are_named(listed, predictor, changes, message):
    with pytest.raises(ValueError, match=message):
        predictor.predict([listed.rows[0], {**listed.rows[1], **changes}])


def one_by_one(predictor, rows):
    """Returns the scores of rows, each given alone."""
    return np.concatenate([predictor.predict([row]) for row in rows])


USER = {"age": 30, "tags": ["t1", "t2", "t3"], "history": [5, 7], "history_weights": [0.5, 1.0]}
LISTS = ("tags", "history", "history_weights")
FORMS = {
    "a flat list": lambda value: value,
    "a flat array": np.array,
    "a flat tuple": tuple,
    "a list of one list": lambda value: [value],
    "text": lambda value: "|".join(map(str, value)),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_list_counts_for_all_candidates(predictor, form):
    """There are as many tags as candidates, so each could be taken for the tag of one."""
    given = USER | {name: FORMS[form](USER[name]) for name in LISTS}
    users = ["u0", "u1", "u2"]
    expected = one_by_one(predictor, [USER | {"user": user} for user in users])
    found = predictor.predict(given | {"user": users})
    np.testing.assert_allclose(found, expected, atol=1e-6)
    apart = one_by_one(predictor, [USER | {"user": "u0", "tags": [tag]} for tag in USER["tags"]])
    assert np.abs(apart - expected[0]).min() > 1e-3
    assert predictor.predict(given | {"user": "u0"}).tolist() == pytest.approx(expected[:1])


def test_columns_have_a_list_for_each_row(listed, predictor):
    rows = [{**row, "tags": None} for row in listed.rows[:3]]
    for some in (listed.rows[:9], rows, rows[:1]):
        columns = {name: [row[name] for row in some] for name in some[0]}
        found = predictor.predict(columns)
        np.testing.assert_allclose(found, one_by_one(predictor, some), atol=1e-6)


def test_columns_without_ordinary_ones_are_rows_of_lists_of_lists(predictor):
    rows = [USER | {"user": "u0", "tags": tags} for tags in (["t1"], [], None)]
    found = predictor.predict(rows[0] | {"tags": [row["tags"] for row in rows]})
    np.testing.assert_allclose(found, one_by_one(predictor, rows), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tags": [["t1"], ["t2"]]}, "expected columns of one length, got {'user': 3, 'tags': 2}"),
        ({"tags": [[["t1"]]]}, "column tags: expected a list of values, got "),
        ({"tags": ["t1", "t2|t3", ""]}, r"row 1, column tags: expected .* got the text 't2\|t3'"),
        ({"tags": {"t1"}}, "expected values, or lists of them, got {'t1'}"),
        ({"user": ["u0"], "age": [1, 2]}, "of one length, got {'age': 2, 'user': 1}"),
    ],
)
def test_lists_for_another_number_of_rows_are_named(predictor, changes, message):
    with pytest.raises(ValueError, match=message):
        predictor.predict(USER | {"user": ["u0", "u1", "u2"]} | changes)


def test_planted_lists_matter_and_useless_fields_do_not(predictor, inputs):
    found = permutation_importance(predictor, *inputs)
    lost = {one.field: one.auc_lost for one in found}
    assert lost["tags"] > 0.05
    assert lost["history"] > 0.005
    assert abs(lost["age"]) < 0.02
    assert abs(lost["user"]) < 0.02


def test_dealt_lists_go_to_their_rows_with_their_weights(predictor, inputs, monkeypatch):
    """Scored rows have another row's list in one table and their own in the others."""
    made, seen = inputs[0].part(0, 50), []
    monkeypatch.setattr(
        predictor,
        "logits_of",
        lambda given: seen.append(given) or np.zeros(len(given.numerical), np.float32),
    )
    permutation_importance(predictor, made, (np.arange(50) % 2).astype(np.float32), seed=5)

    def bag(given, row, table):
        one = given.part(row, row + 1)
        begin = one.lengths[0, :table].sum()
        own = slice(begin, begin + one.lengths[0, table])
        return one.ids[own].tolist(), one.weights[own].tolist()

    (dealt,) = [
        given
        for given in seen[1:]
        if any(bag(given, row, 2) != bag(made, row, 2) for row in range(50))
    ]
    order = np.random.default_rng([5, 3]).permutation(50)
    for row in range(50):
        assert bag(dealt, row, 2) == bag(made, order[row], 2)
        assert [bag(dealt, row, t) for t in (0, 1)] == [bag(made, row, t) for t in (0, 1)]


def test_contributions_are_what_growing_tables_add(predictor, inputs):
    """Checks each field's derivative by a factor on its input by differences."""
    part, step = inputs[0].part(0, 20), 1e-2
    found = contributions(predictor, part)
    assert found.shape == (20, 4)
    of_numbers = [
        predictor.logits_of(part._replace(numerical=part.numerical.astype(float) * factor))
        for factor in (1 + step, 1 - step)
    ]
    expected = np.subtract(*of_numbers) / (2 * step)
    np.testing.assert_allclose(found[:, 0], expected, atol=0.02, rtol=0.05)
    (weight, _), *_ = predictor.model.embeddings.table_parameters()
    begins = np.cumsum([0, *predictor.model.config.embedding_rows])
    for table in range(3):
        own, sides = slice(begins[table], begins[table + 1]), []
        for factor in (1 + step, 1 - step):
            kept = weight.detach()[own].clone()
            with torch.no_grad():
                weight[own] *= factor
            sides.append(predictor.logits_of(part).astype(np.float64))
            with torch.no_grad():
                weight[own] = kept
        expected = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(found[:, 1 + table], expected, atol=0.02, rtol=0.05)
    empty = part.lengths[:, 1] == 0
    assert empty.any()
    assert not found[empty, 2].any()


def test_evaluate_slices_by_the_length_of_a_list(listed, inputs, tmp_path):
    words = [f"--checkpoint={listed.checkpoint}", f"--input={listed.table}", "--bootstrap=0"]
    words += [f"--output={tmp_path / 'evaluation'}", "--slices=tags,user"]
    forked.succeed("dlrm.scripts.evaluate", *words)
    facts = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    slices = {one["by"]: one["slices"] for one in facts["slices"]}
    lengths = np.bincount(inputs[0].lengths[:, 1])
    assert {s["name"]: s["rows"] for s in slices["ids of tags"]} == {
        str(length): count for length, count in enumerate(lengths)
    }
    counts = {s["name"]: s["rows"] for s in slices["user"]}
    assert counts["u0"] == sum(row["user"] == "u0" for row in listed.rows)


def test_a_batch_of_a_dataset_has_its_lists(listed, predictor):
    test = open_datasets(DataConfig(str(listed.dataset), test_batch_size=100)).test
    batch = test.batch(1)
    made = inputs_of(batch)
    assert made.arrays[2].shape == (100, 3)
    with torch.no_grad():
        expected = predictor.model(
            batch.numerical, batch.categorical, batch.lengths, id_weights=batch.id_weights
        )
    np.testing.assert_array_equal(predictor.logits_of(made), expected.numpy())

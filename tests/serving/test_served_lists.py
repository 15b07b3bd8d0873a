"""Requests with lists are read and scored together, and a bad one fails alone."""

import json

import numpy as np
import pytest
from table_testing import dictionary_of
from test_scorer import Asked, Tensor, raw

from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.serving.server import backend
from dlrm.serving.server.names import KIND
from dlrm.serving.server.reader import Reader, max_rows, named

MAX_ROWS = 100
FACTS = {
    "num_numerical": 1,
    "table_sizes": [3, 4],
    "hashed": False,
    "categorical_names": ["user", "tags"],
    "numerical_dtype": "float32",
    "ids_dtype": "int64",
    "lists": {"weighted": True, "longest": {"1": 3}},
}


@pytest.fixture
def directory(tmp_path):
    """A served model's version for rows of a number, a user and weighted tags."""
    (tmp_path / "model.json").write_text(json.dumps(FACTS))
    tags = CategoricalField("tags", max_length=3, weights="factors")
    schema = Schema(Label("y"), (NumericalField("age", "none"),), (CategoricalField("user"), tags))
    texts = [dictionary_of(values) for values in (["ann", "bob"], ["x", "y", "z"])]
    Transform(schema, [Fitted(0.0, 1.0)], texts, ["string"] * 2).save(tmp_path / "transform")
    write_manifest(tmp_path, KIND)
    return tmp_path


@pytest.fixture
def reader(directory):
    return Reader(directory, MAX_ROWS)


def request(*rows):
    """A request of rows of a user, tags and their weights."""
    users, lists, factors = zip(*rows, strict=True)
    ids = [one for user, own in zip(users, lists, strict=True) for one in (user, *own)]
    weights = [one for own in factors for one in (1.0, *own)]
    return {
        "input__0": np.zeros((len(rows), 1), np.float32),
        "input__1": np.array(ids, np.int64),
        "input__2": np.array([[1, len(own)] for own in lists], np.int32),
        "input__3": np.array(weights, np.float32),
    }


def test_a_model_whose_fields_must_have_values_is_read(tmp_path):
    """Ids and required numbers have no missing values, which rows of other fields may have."""
    facts = {**FACTS, "table_sizes": [3], "categorical_names": ["user"], "lists": None}
    (tmp_path / "model.json").write_text(json.dumps(facts))
    number = NumericalField("age", "none", required=True)
    schema = Schema(Label("y"), (number,), (CategoricalField("user", "id", cardinality=3),))
    Transform(schema, [Fitted(0.0, 1.0)], [Dictionary.ids(2)], ["string"]).save(
        tmp_path / "transform"
    )
    write_manifest(tmp_path, KIND)
    ok, bad, worse = Reader(tmp_path, MAX_ROWS).read([raw("1\t2"), raw("1\t"), raw("\t2")])
    assert (ok.numerical.tolist(), ok.ids.tolist()) == ([[1.0]], [[2]])
    assert "row 0, column user: expected an integer id" in str(bad)
    assert "row 0, column age: expected a number, got no value" in str(worse)


def test_requests_of_ids_and_of_raw_rows_are_read(reader):
    one = request((2, [1, 3], [0.5, 2.0]), (0, [], []))
    lines = raw("1.5\tbob\tx|z\t0.5|2", "0\tother", "0\tann\tx|x|y|z\t9|9|1|1")
    ids, text = reader.read([one, lines])
    assert [array.tolist() for array in named(ids).values()] == [v.tolist() for v in one.values()]
    assert text.numerical.tolist() == [[1.5], [0.0], [0.0]]
    assert text.ids.tolist() == [2, 1, 3, 0, 1, 1, 2, 3]  # the last three of the third list
    assert text.lengths.tolist() == [[1, 2], [1, 0], [1, 3]]
    assert text.weights.tolist() == [1, 0.5, 2, 1, 1, 9, 1, 1]
    assert [array.dtype for array in text.arrays] == ["f4", "i8", "i4", "f4"]


GOOD = request((1, [1, 2], [1.0, 1.0]), (2, [3], [1.0]))
LINES = {"tags": "1\tann\tx|y\t1", "factors": "1\tann\tx\tnan", "user": "1\tann\tx\t1\t7"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {**GOOD, "input__2": np.array([[1, -2], [1, 1]], np.int32)},
            r"row 0, column tags \(table 1\): expected a length of 0 to 3, got -2",
        ),
        ({**GOOD, "input__2": np.array([[0, 3], [1, 1]])}, r"user .* a length of 1, got 0"),
        ({**GOOD, "input__1": GOOD["input__1"] + 2}, "column user .* expected an id from 0 to 2"),
        ({**GOOD, "input__3": GOOD["input__3"] * np.nan}, "expected a finite weight, got nan"),
        (
            {name: tensor for name, tensor in GOOD.items() if name != "input__3"},
            "expected the inputs input__0, input__1, input__2 and input__3, or raw__0 alone; got",
        ),
        (raw(LINES["tags"]), "row 0, column tags: expected as many weights in factors .* got 1"),
        (raw(LINES["factors"]), "row 0, column factors: .*place 0 of the list: .*"),
        (raw(LINES["user"]), "row 0: expected up to 4 fields, got 5"),
    ],
)
def test_a_bad_request_fails_alone_and_says_why(reader, bad, message):
    for others in ([], [GOOD, GOOD]):
        *good, error = reader.read([*others, bad])
        assert [inputs.ids.tolist() for inputs in good] == [[1, 1, 2, 2, 3]] * len(others)
        with pytest.raises(ValueError, match=message):
            raise error


def test_a_request_does_not_take_the_ids_of_another(reader):
    """Together, the lengths of both add up."""
    good = {**GOOD, "input__1": np.ones(5, np.int64)}  # valid everywhere
    short = {**good, "input__2": np.array([[1, 1], [1, 1]], np.int32)}
    long = {**good, "input__2": np.array([[1, 3], [1, 1]], np.int32)}
    for error, got in zip(reader.read([short, long]), (4, 6), strict=True):
        assert str(error) == f"lengths: expected a sum of 5, the number of ids, got {got}"


@pytest.mark.parametrize("shape", [(2**62,), (2**62, 0), (2**62, 2), (-1,), (), (401,)])
@pytest.mark.parametrize("name", ["input__1", "input__2", "input__3"])
def test_a_shape_that_lies_is_refused_before_data_is_touched(reader, name, shape):
    lying = Asked(Tensor(name, np.zeros(2), shape or (0, 0, 0)))
    with pytest.raises(ValueError, match=rf"{name}: expected .*, got \["):
        raise backend.read([lying], reader)[0]


def test_scores_of_requests_are_their_own(directory, monkeypatch):
    scorer = pytest.importorskip("dlrm.serving.server.scorer", reason="needs onnxruntime")

    def score(numerical, ids, lengths, weights):
        ends = lengths.sum(1).cumsum()
        rows = np.split(ids * weights, ends[:-1])
        return np.array([[own.sum()] for own in rows], np.float32)

    monkeypatch.setattr(scorer, "open_session", lambda *_: score)
    one, bad, two = scorer.OnnxScorer(directory, MAX_ROWS).answer(
        [request((2, [1, 3], [0.5, 2.0]), (1, [], [])), raw("x\tann"), GOOD]
    )
    assert (one.tolist(), two.tolist()) == ([[8.5], [1]], [[4], [5]])
    assert str(bad) == "row 0, column age: expected a number, got 'x'"


def test_the_most_rows_of_a_request_are_in_the_configuration():
    assert max_rows({"max_batch_size": 64, "parameters": {}}) == 64
    parameters = {"max_rows": {"string_value": "32"}}
    assert max_rows({"max_batch_size": 0, "parameters": parameters}) == 32
    assert max_rows({"parameters": parameters}) == 32

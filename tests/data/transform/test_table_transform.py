"""Schemas and fitted transforms are stored unchanged; invalid ones are refused by name."""

import json

import numpy as np
import pytest
from column_testing import transform_texts
from hypothesis import given, strategies as st
from table_testing import dictionary_of

from dlrm.data.schema.fields import Cross
from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema, TimeField
from dlrm.data.sources.columns import Coded, TextColumn
from dlrm.data.sources.row_error import RowError
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.numerical import label_reader
from dlrm.data.transform.transform import Transform, stack_ids

NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
WORDS = st.sampled_from(["yes", "1", "1.5", "null", "a: b", "- x", "#", "", " ", "~", "1e3", "{"])


FORMATS = [
    None,
    TextFormat(("a", "b"), False, ";", "none", None, "latin-1", ",", ".", "gzip"),
    TextFormat(delimiter="\t", quote="'", escape="\\", header=True),
]


@st.composite
def schemas(draw):
    names = iter(draw(st.lists(NAME | WORDS.filter(bool), min_size=9, max_size=9, unique=True)))
    numerical = [
        NumericalField(
            next(names),
            rule,
            draw(st.sampled_from([0, 2, 256])),
            missing_values=draw(st.sampled_from([None, (), ("NA", "-1")])),
        )
        for rule in draw(st.lists(st.sampled_from(["log", "standardize", "quantile"]), max_size=3))
    ]
    categorical = [
        CategoricalField(
            next(names),
            kind,
            draw(st.integers(1, 9)),
            draw(st.none() | st.just(7)),
            true_values=draw(st.sampled_from([(), ("yes", "1")])),
            false_values=draw(st.sampled_from([(), ("no",)])),
        )
        for kind in draw(st.lists(st.sampled_from(["string", "integer"]), min_size=1, max_size=3))
    ]
    positive = draw(st.none() | WORDS | st.just(("4", "5")))
    negative = draw(st.none() | st.just(("a", "1"))) if positive not in ("a", "1") else None
    label = Label(next(names), positive, negative)
    unit, form = draw(st.sampled_from([(None, None), ("ns", None), (None, "%d/%m/%Y")]))
    time = TimeField("time", draw(st.sampled_from([None, "UTC"])), unit, form)
    columns = tuple(field.column for field in categorical)
    categorical.append(CategoricalField("rows of a table", "id", cardinality=300))
    options = {"keep": "first", "ordered": False, "weights": "listed for", "pooling": "mean"}
    categorical.append(CategoricalField("list of values", max_length=4, **options))
    crosses = [Cross(columns, "crossed", 7, draw(st.none() | st.just(2)))] if columns[1:] else []
    return Schema(
        label,
        tuple(numerical),
        tuple(categorical),
        tuple(draw(st.lists(WORDS, max_size=3))),
        draw(st.none() | st.just("weight")),
        ("user",) if draw(st.booleans()) else (),
        draw(st.none() | st.just(time)),
        tuple(crosses),
        draw(st.sampled_from(FORMATS)),
    )


@given(schemas())
def test_a_schema_is_the_same_once_written_and_read(tmp_path_factory, schema):
    path = tmp_path_factory.mktemp("schema") / "schema.yaml"
    schema.save(path)
    assert Schema.load(path) == schema
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


LIST = "{column: l, max_length: 2}"
FIELDS = "fields: expected categorical fields with one value a row"
REFUSED = [
    ("label: y", "numerical, categorical: expected one field or more, got none"),
    ("numerical: [x]", "label: missing"),
    ("[1]", "expected a map"),
    ("{label: y, numerical: x}", "numerical: expected a list of fields, got 'x'"),
    ("{label: y, numerical: [[x]]}", "numerical: expected a column or a map, got ['x']"),
    ("{label: y, numerical: [{}]}", "numerical: column: missing"),
    ("{label: y, numerical: [x, x]}", "columns used twice: x"),
    ("{label: y, numerical: [x, x_number], categorical: [x]}", "the number of x: expected a name "),
    ("{label: y, numerical: [{column: x, bins: 1}]}", "numerical field x: bins: expected 0, or 2"),
    ("{label: y, numerical: [{column: x, bins: a}]}", "numerical x: bins: expected an integer, go"),
    ("{label: y, numerical: [{column: x, transform: ln}]}", "numerical field x: transform: expect"),
    ("{label: y, categorical: [{column: c, type: int}]}", "categorical field c: type: expected"),
    (
        "{label: y, categorical: [{column: c, frequency_limit: true}]}",
        "categorical c: frequency_lim",
    ),
    ("{label: y, categorical: [{column: c, max_ids: 0}]}", "categorical field c: max_ids 0: expec"),
    ("{label: y, categorical: [{column: c, hash_buckets: -1}]}", "categorical field c: hash_bucke"),
    (
        "{label: y, numerical: [x], weigth: z}",
        "expected some of label, numerical, categorical, missing_values, weight, groups, time, "
        "crosses, format, got 'weigth' as well; did you mean weight?",
    ),
    ("{label: y, numerical: [x], weight: y}", "weight: expected another column than the label"),
    ("{label: y, numerical: [x], groups: u}", "groups: expected a list of texts, got 'u'"),
    ("{label: y, numerical: [x], groups: [a/b]}", "groups: expected columns that can name files"),
    ("{label: y, numerical: [x], missing_values: '?'}", "missing_values: expected a list of texts"),
    (
        "{label: y, numerical: [x], time: {column: t, unit: min}}",
        "time t: unit: expected one of s, m",
    ),
    ("{label: y, numerical: [x], version: 2}", "version: expected 1, got 2"),
    ("{label: y, numerical: [x], format: [1]}", "format: expected a map with fields, got [1]"),
    ("{label: y, numerical: [x], format: {quote: ab}}", "format: quote: expected one character of"),
    ("{label: y, numerical: [x], format: {encoding: utf-99}}", "format: encoding: expected a name"),
    (
        "{label: y, numerical: [x], format: {delimiter: ';', quote: ';'}}",
        "format: delimiter, quote: expected two characters, got ';'",
    ),
    ("{label: y, numerical: [x], format: {header: 1}}", "format: header: expected true or false"),
    ("{label: y, numerical: [x], format: {chunk_rows: 9}}", "format: expected some of columns, he"),
    (
        "{label: y, categorical: [{column: c, true_values: [a], missing_values: [a]}]}",
        "categorical field c: expected one meaning of 'a', got true and missing",
    ),
    (
        "{label: y, categorical: [{column: c, false_values: ['True']}]}",
        "categorical field c: expected one meaning of 'True', got true and false",
    ),
    (
        "{label: y, numerical: [x], time: {column: t, format: abc}}",
        "time t: format: expected directives such as %d/%m/%Y %H:%M, got 'abc'",
    ),
    (
        "{label: {column: y, positive: [4, 5], negative: [5]}, numerical: [x]}",
        "label y: expected values that count as 1 or as 0, got '5' as both",
    ),
    (
        "{label: y, categorical: [{column: a, dictionary: d}, "
        "{column: b, dictionary: d, max_ids: 3}]}",
        "categorical field b: max_ids: expected none, as of a, which shares dictionary 'd', got 3; "
        "leave max_ids out at b, or change a",
    ),
    *(
        (f"{{label: y, categorical: [{{column: a, table: t}}, {{column: b, {entries}}}, c]}}", said)
        for entries, said in (
            ("table: t, type: integer", "categorical field b: type: expected string, as of a, whi"),
            ("table: t, dictionary: d", "categorical field b: dictionary: expected none beside ta"),
            ("table: ''", "categorical field b: table: expected a name, got ''"),
            ("target: a", "categorical field b: target: expected max_length too, which makes"),
            ("table: t, max_length: 3, target: a", "categorical field b: target: expected pooling"),
            ("table: t, max_length: 3, pooling: attention", "categorical field b: pooling: attent"),
            (
                "table: t, max_length: 3, pooling: attention, target: a, ordered: false",
                "categorical field b: pooling: attention: expected a target, the candidate's field,"
                " table: NAME here and there, so that list and candidate share a table, and an "
                "ordered list, got target: a, table: t, ordered: false",
            ),
            ("max_length: 3, pooling: attention, target: a", "categorical field b: pooling: atten"),
            (
                "table: t, max_length: 3, pooling: attention, target: c",
                "categorical field b: target: expected a field of table 't', got c, which has a "
                "table of its own; write table: t at c",
            ),
            (
                "table: t, max_length: 3, pooling: attention, target: y",
                "categorical field b: target: expected a categorical field with one value a row, "
                "got the label y",
            ),
            (
                "table: t, max_length: 3, pooling: attention, target: b",
                "categorical field b: target: expected a categorical field with one value a row, "
                "got list field b",
            ),
        )
    ),
    *(
        (f"{{label: y, numerical: [n], categorical: [a, b, {LIST}], crosses: [{cross}]}}", message)
        for cross, message in (
            ("a", "crosses: expected a map with fields, got 'a'"),
            ("{fields: [a], buckets: 3}", "cross a: fields: expected two or more different ones"),
            ("{fields: [a, b]}", "cross a_x_b: buckets: expected 1 or more, or a frequency_limit"),
            ("{fields: [a, b], buckets: 3, max_ids: 5}", "cross a_x_b: max_ids: expected a freq"),
            ("{name: z, fields: [a, b], frequency_limit: 0}", "categorical field z: frequency_l"),
            ("{fields: [a, c], buckets: 3}", f"cross a_x_c: {FIELDS}, got 'c'"),
            ("{fields: [a, n], buckets: 3}", f"cross a_x_n: {FIELDS}, got numerical field n"),
            ("{name: b, fields: [a, b], buckets: 3}", "cross b: expected a name that no other"),
        )
    ),
    ("{label: y, numerical: [{column: x, buckets: 2}]}", "numerical x: expected some of column, t"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_schema_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "schema.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as failed:
        Schema.load(path)
    assert str(failed.value).startswith(f"{path}: {message}")


def test_columns_may_be_numbers(tmp_path):
    (tmp_path / "schema.yaml").write_text("{label: 0, numerical: [1, {column: 2}], weight: 3}")
    schema = Schema.load(tmp_path / "schema.yaml")
    assert schema.columns == ["0", "1", "2", "3"]


SCHEMA = Schema.from_dict(
    {
        "label": {"column": "y", "positive": "ja"},
        "numerical": [{"column": "x", "transform": "quantile", "bins": 2}, "z"],
        "categorical": [
            {"column": "c", "hash_buckets": 5},
            {"column": "i", "type": "integer"},
            {"column": "j", "type": "integer"},
        ],
        "missing_values": ["?"],
    }
)


@pytest.fixture
def saved(tmp_path):
    fitted = [Fitted(0.0, 1.0, np.array([0.0, 2.0]), np.array([0.25, 0.75])), Fitted(1.5, 0.5)]
    numbers = [
        Dictionary(np.array([7, (1 << 64) - 3], np.uint64)),
        Dictionary(np.empty(0, np.uint64)),
    ]
    made = Transform(
        SCHEMA, fitted, [dictionary_of(["b", "ä"]), *numbers], ["string"] * 3, ["nein"]
    )
    made.save(tmp_path / "transform")
    return tmp_path / "transform"


def cells(*texts):
    return TextColumn.from_bytes([text.encode() for text in texts])


def test_a_transform_is_the_same_once_written_and_read(saved):
    transform = Transform.load(saved)
    assert transform.schema == SCHEMA
    assert [one.values() for one in transform.dictionaries] == [["b", "ä"], [7, -3], []]
    rows = [cells("1", " ", "9"), cells("2", "?", "1.5"), cells("ä ", "?", "new")]
    numbers, ids, _ = transform_texts(
        transform, [*rows, cells("7", "-3", "8"), cells("1", "", "?")]
    )
    ids = stack_ids(ids, 3)
    assert numbers.tolist() == [[0.5, 1.0], [0.5, 0.0], [0.75, 0.0]]
    assert ids[:, 0].tolist()[:2] == [2, 0]
    assert 3 <= ids[2, 0] < 8
    assert ids[:, 1:].tolist() == [[1, 0], [2, 0], [0, 0]]
    read = label_reader(transform.schema, transform.known_labels)
    assert [read("ja"), read("nein")] == [True, False]
    coded = transform.encode(1, Coded(np.array([7, 9], np.uint64), np.array([1, -1, 0])))
    assert coded.tolist() == [0, 0, 1]


def test_a_cell_that_cannot_be_transformed_is_named(saved):
    transform = Transform.load(saved)
    row = [cells("1"), cells("2"), cells("b"), cells("7"), cells("1")]
    for place, text, problem in (
        (0, "many", "row 0, column x: expected a number, got 'many'"),
        (1, "inf", "row 0, column z: expected a finite number (--missing_values ?,inf counts it"),
        (1, "1e9", "row 0, column z: 1000000000.0, standardized, is beyond float16"),
        (3, "1.5", "row 0, column i: expected an integer of 64 bits, got '1.5'"),
    ):
        with pytest.raises(RowError) as failed:
            transform_texts(transform, [*row[:place], cells(text), *row[place + 1 :]])
        assert str(failed.value).startswith(problem)


@pytest.mark.parametrize("name", ["dictionary_0", "texts_0", "ends_0", "dictionary_1"])
def test_damaged_dictionaries_are_named(saved, name):
    path = saved / f"{name}.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert name in refusal(saved)
    for cut in (content[:-1], content[:20], b""):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match=name):
            Transform.load(saved)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        Transform.load(saved)


def places(value, path=()):
    """Yields the path of every entry of nested maps and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


def refusal(directory):
    """Returns the error of loading a whole transform, or "" if it loads."""
    try:
        loaded = Transform.load(directory)
        for dictionary in range(len(loaded.dictionaries)):
            loaded.check(dictionary)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    assert all(np.isfinite(one.mean) for one in loaded.numerical)
    return ""


WRONG = [None, -1, 1 << 70, "x", "0x1p5000", "nan", [], {}, True, 1.5, [None], {"a": 1}]


def test_no_entry_of_the_facts_can_end_in_anything_but_a_named_refusal(saved, tmp_path):
    path = saved / "transform.json"
    facts = json.loads(path.read_text())
    refused = 0
    for place in places(facts):
        for wrong in [*WRONG, "missing"]:
            changed = json.loads(json.dumps(facts))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            if wrong == "missing":
                del inner[place[-1]]
            else:
                inner[place[-1]] = wrong
            path.write_text(json.dumps(changed))
            problem = refusal(saved)
            refused += bool(problem)
            assert problem.startswith(str(saved)) or not problem, (place, wrong)
    assert refused > 300

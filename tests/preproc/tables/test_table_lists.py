"""Fields with several values a row: from any source to files of a dataset, and back."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tables_testing import check_bad_row, contents, prepare, write_table

import dlrm
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.draft import draft
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.samples import batches_of
from dlrm.data.transform.transform import Transform
from dlrm.preproc.convert_to_parquet import convert_to_parquet
from dlrm.preproc.errors import TaskError

SCHEMA = {
    "label": "y",
    "categorical": [
        {"column": "tags", "max_length": 2, "weights": "w"},
        "c",
        {"column": "items", "type": "integer", "max_length": 4, "pooling": "mean"},
    ],
}
ROWS = {
    "y": [0, 1, 0, 1],
    "tags": [["b", "a", "b"], [], None, ["c", None]],
    "w": [[1.0, -2.0, 0.5], None, [], [3.0, 0.0]],
    "c": ["x", "y", "x", "z"],
    "items": [[7], [8, 7], None, [9, 9, 9, 7]],
}
TEST = {"test_fraction": 0.0, "output_ordering": "input"}


def write(path, **columns):
    return write_table({**ROWS, **columns}, path)


def lists(dataset, split, name):
    """Returns a list field's rows, and weights if any, as Python lists."""
    spec = FeatureSpec.load(dataset)
    rows = spec.num_rows(split)
    bags = ListColumn(spec, split, name, rows).read(0, rows)
    cuts = np.cumsum(bags.lengths)[:-1]
    parts = [
        [one.tolist() for one in np.split(array, cuts)]
        for array in (bags.values, bags.weights)
        if array is not None
    ]
    return parts if len(parts) > 1 else parts[0]


LONG = {"tags": [["a"], [], [], ["a", "b", "c"]], "w": [[1.0], [], [], [1.0, 1.0, 1.0]]}
BAD = {
    "long": (LONG, "tags: expected a list of up to 2 values, got 3 (keep: first"),
    "fewer weights": ({"w": [[1.0, 2.0, 3.0], [], [], [3.0]]}, "tags: expected as many weights in"),
    "nan": (
        {"w": [[1.0, 2.0, 3.0], [], [], [3.0, float("nan")]]},
        "w: place 1 of the list: expected a finite number, got nan",
    ),
    "text": ({"items": [["1"], [], [], ["1", "2", "many"]]}, "items: place 2 of the list: expecte"),
}


@pytest.mark.parametrize(
    ("case", "kind"), [*((case, "parquet") for case in BAD), ("text", "jsonl")]
)
def test_a_bad_list_is_named_and_can_be_put_aside(tmp_path, case, kind):
    columns, problem = BAD[case]
    rows = {"tags": [["b", "a"], [], [], ["c", None]], "w": [[1.0, 2.0], [], [], [1.0, 2.0]]}
    for name, values in columns.items():
        rows[name] = [values[0][:2], *values[1:]] if name in rows else values
    schema = json.loads(json.dumps(SCHEMA))
    schema["categorical"][0]["keep"] = "all"
    path = write(tmp_path / f"a.{kind}", **rows)
    where = f"{path}, row group 1, row 1" if kind == "parquet" else f"{path}, line 4"
    check_bad_row(schema, path, where, f"column {problem}", tmp_path / "d", **TEST)


@pytest.mark.parametrize(("name", "value"), [("items", 1), ("w", 1.0)])
def test_lists_and_values_are_told_apart(tmp_path, name, value):
    path = write(tmp_path / "a.parquet", **{name: [value] * 4})
    message = f"{path}: column '{name}': expected a list of values a row, got the type"
    with pytest.raises((ValueError, TaskError), match=message):
        prepare(SCHEMA, [path], tmp_path / "d", **TEST)


def test_null_lists_of_a_fixed_size_are_read_in_memory_and_refused_in_parquet(tmp_path):
    table = pa.table({**ROWS, "items": pa.array([[1, 2], None] * 2, pa.list_(pa.int32(), 2))})
    dlrm.Dataset.from_arrow(table, SCHEMA, tmp_path / "frame", test=table, output_ordering="input")
    assert lists(tmp_path / "frame", "train", "items") == [[1, 2], []] * 2
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises((ValueError, TaskError), match="row group 0: null lists of a fixed size"):
        prepare(SCHEMA, [tmp_path / "a.parquet"], tmp_path / "d", **TEST)
    whole = table.set_column(4, "items", table["items"].fill_null([3, 4]))
    pq.write_table(whole, tmp_path / "b.parquet")
    prepare(SCHEMA, [tmp_path / "b.parquet"], tmp_path / "d", **TEST)
    assert lists(tmp_path / "d", "train", "items") == [[1, 2], [3, 4]] * 2


def drawn(rows=9000):
    draw = np.random.default_rng(7)
    tags = [[f"t{n}" for n in draw.geometric(0.2, k)] for k in draw.integers(0, 5, rows)]
    return {
        "y": draw.integers(0, 2, rows),
        "tags": tags,
        "w": [draw.normal(size=len(row)).tolist() for row in tags],
        "c": draw.integers(0, 9, rows).astype(str),
        "items": [draw.integers(0, 30, k).tolist() for k in draw.integers(0, 6, rows)],
    }


def test_row_groups_change_nothing(tmp_path):
    columns, written = drawn(), []
    for size, part in ((9000, None), (300, 9000)):
        pq.write_table(pa.table(columns), tmp_path / f"{size}.parquet", row_group_size=size)
        options = {"test_fraction": 0.5, "validation_fraction": 0.1, "split_bytes": part}
        prepare(SCHEMA, [tmp_path / f"{size}.parquet"], tmp_path / str(size), **options)
        written.append(contents(tmp_path / str(size), ".bin"))
    assert written[0] == written[1]
    starts = np.frombuffer(written[0]["test/cat_0.starts.bin"], "<i8")
    lengths = np.frombuffer(written[0]["test/cat_0.lengths.bin"], "i1")
    assert starts.tolist() == [0, lengths[:4096].sum(), lengths.sum()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    pq.write_table(pa.table(drawn(500)), folder / "a.parquet")
    prepare(SCHEMA, [folder / "a.parquet"], folder / "d", test_fraction=0.2, report=True)
    return folder / "d"


def test_a_dataset_goes_back_to_parquet_and_again_to_the_same_bytes(prepared, tmp_path):
    assert not (prepared / "model_size.json").exists()  # its readers expect one id a row
    convert_to_parquet(prepared, tmp_path / "decoded")
    convert_to_parquet(prepared, tmp_path / "ids", values="ids")
    table = pq.read_table(tmp_path / "ids/train/part-0.parquet")
    assert table["tags"].to_pylist() == lists(prepared, "train", "tags")[0]
    assert table["w"].to_pylist() == lists(prepared, "train", "tags")[1]
    assert table["items"].to_pylist() == lists(prepared, "train", "items")
    assert not (tmp_path / "ids/model_size.json").exists()
    names = {"train": "train", "test": "test"}
    files = {n: [tmp_path / "decoded" / n / "part-0.parquet"] for n in names}
    decoded = pq.read_table(files["test"][0])
    values = dict(enumerate(dictionary_of(prepared, 0), 1))
    ids = lists(prepared, "test", "tags")[0]
    assert decoded["tags"].to_pylist() == [[values.get(i) for i in row] for row in ids]
    others = {"test": files["test"]}
    prepare(SCHEMA, files["train"], tmp_path / "d", others=others, output_ordering="input")
    for split in names:
        again, before = (contents(p / split, "lengths.bin") for p in (tmp_path / "d", prepared))
        assert again == before


def dictionary_of(dataset, place):
    return Transform.load(dataset / "transform").dictionaries[place].values()


def test_the_report_says_how_long_lists_are(prepared):
    facts = json.loads((prepared / "report.json").read_text())["categorical"][2]["list"]
    lengths = np.array([len(row) for row in lists(prepared, "train", "items")])
    assert facts["max_length"] == 4
    assert facts["mean_length"] == pytest.approx(lengths.mean(), abs=1e-6)
    assert facts["empty"]["train"] == pytest.approx((lengths == 0).mean(), abs=1e-6)
    ordered = np.sort(lengths)
    quantiles = [ordered[int(np.ceil(q * len(ordered))) - 1] for q in (0.25, 0.5, 0.75)]
    assert [facts["length_quantiles"][q] for q in ("0.25", "0.5", "0.75")] == quantiles
    everything = np.array([len(row) for row in drawn(500)["items"]])
    cut = sum(facts["cut"][n] * rows for n, rows in (("train", 400), ("test", 100)))
    assert cut == pytest.approx((everything > 4).sum(), abs=0.01)
    page = (prepared / "report.html").read_text()
    assert "<h2>Lists</h2>" in page
    assert "quantiles of lengths" in page


def test_nvidias_binary_format_has_no_lists(tmp_path):
    with pytest.raises(ValueError, match=r"--output_format binary: expected a schema without list"):
        prepare(SCHEMA, [write(tmp_path / "a.parquet")], tmp_path / "d", output_format="binary")


def test_a_draft_has_list_fields(tmp_path):
    path = write(tmp_path / "a.jsonl", tags=[["b", "a", "b"], [], None, ["c", "a"]])
    made = draft(batches_of(find_tables([path]), TextFormat()), "y")
    fields = {field.column: field for field in made.schema.categorical}
    assert (fields["tags"].max_length, fields["items"].max_length) == (3, 4)
    assert (fields["tags"].type, fields["items"].type) == ("string", "integer")
    assert made.comments["tags"].startswith("lists of up to 3, 1.25 on average, 50.00% empty; 3 ")
    assert "a list of numbers" in made.left_out["w"]
    assert Schema.from_dict(yaml.safe_load(made.text())) == made.schema


WRONG = [
    ({"keep": "first"}, "keep: expected max_length too"),
    ({"max_length": 1 << 31}, "max_length: expected 1 or more, 2147483645 at most, got"),
    ({"max_length": 5, "keep": "last", "ordered": False}, "keep: expected first or all, as"),
    ({"max_length": 5, "pooling": "max"}, "pooling: expected one of sum, mean, attention,"),
    ({"max_length": 5, "weights": "y"}, "columns used twice: y"),
]


@pytest.mark.parametrize(("entry", "problem"), WRONG)
def test_a_wrong_list_field_is_named(entry, problem):
    with pytest.raises(ValueError, match=problem):
        Schema.from_dict({"label": "y", "categorical": [{"column": "t", **entry}]})


def test_a_list_is_cut_and_null_and_empty_lists_are_rows_without_ids(tmp_path):
    prepare(SCHEMA, [write(tmp_path / "a.parquet")], tmp_path / "d", **TEST)
    # "b" occurs twice, including the one cut off: ids are b 1, a 2, c 3.
    ids, weights = lists(tmp_path / "d", "train", "tags")
    assert ids == [[2, 1], [], [], [3, 0]]
    assert weights == [[-2.0, 0.5], [], [], [3.0, 0.0]]
    assert lists(tmp_path / "d", "train", "items") == [[1], [3, 1], [], [2, 2, 2, 1]]
    assert (tmp_path / "d/train/cat_1.bin").read_bytes() == bytes([1, 2, 1, 3])
    spec = FeatureSpec.load(tmp_path / "d")
    assert (spec.lists["items"].pooling, spec.num_rows("test")) == ("mean", 0)
    facts = yaml.safe_load((tmp_path / "d" / "feature_spec.yaml").read_text())["source_spec"]
    types = {chunk["type"] for chunk in facts["train"]}
    assert types == {"split_binary", "split_binary_list"}  # NVIDIA's reader refuses the second

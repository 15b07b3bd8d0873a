"""Valid feature specifications are accepted, and each broken rule is refused."""

import copy
import json

import numpy as np
import pytest
import yaml

from dlrm.data.clicks.feature_spec import FeatureSpec

SECTIONS = {  # names and files unlike our writers'; the numericals are in the last chunk
    "feature_spec": {
        "clicked": {"dtype": "bool"},
        "user": {"dtype": "int64", "cardinality": 1000},
        "shop": {"dtype": "int8", "cardinality": 5},
        "age": {"dtype": "float16"},
        "price": {"dtype": "float16"},
    },
    "source_spec": {
        split: [
            {"type": "split_binary", "features": ["clicked"], "files": [f"{split}/y"]},
            {"type": "split_binary", "features": ["shop"], "files": [f"{split}/shop"]},
            {"type": "split_binary", "features": ["user"], "files": [f"{split}/user"]},
            {"type": "split_binary", "features": ["age", "price"], "files": [f"{split}/x"]},
        ]
        for split in ("train", "test")
    },
    "channel_spec": {
        "categorical": ["user", "shop"],
        "numerical": ["age", "price"],
        "label": ["clicked"],
    },
    "metadata": {},
}


def write(directory, sections):
    path = directory / "feature_spec.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_nvidia_names_and_files_are_read(tmp_path):
    spec = FeatureSpec.load(write(tmp_path, SECTIONS))
    assert spec.categorical == ["user", "shop"]
    assert spec.cardinalities == [1000, 5]
    assert spec.numerical == ["age", "price"]
    assert spec.label == "clicked"
    assert spec.splits == ["train", "test"]
    assert spec.dtype("user") == np.int64
    assert spec.file("test", "price") == tmp_path / "test" / "x"
    assert FeatureSpec.load(tmp_path) == spec


def test_anchors_and_a_missing_metadata_are_accepted(tmp_path):
    (tmp_path / "feature_spec.yaml").write_text(
        """
feature_spec:
  y: {dtype: bool}
  a: &id {dtype: int8, cardinality: 3}
  b: *id
source_spec:
  train: &chunks
    - {type: split_binary, features: [y], files: [y.bin]}
    - {type: split_binary, features: [a], files: [a.bin]}
    - {type: split_binary, features: [b], files: [b.bin]}
  test: *chunks
channel_spec: {label: [y], categorical: [a, b], numerical: []}
"""
    )
    assert FeatureSpec.load(tmp_path).cardinalities == [3, 3]


def test_save_and_load_give_the_same_specification(tmp_path):
    spec = FeatureSpec.default(tmp_path, 2, [3, 200], metadata={"by": "me"})
    spec.save()
    assert FeatureSpec.load(tmp_path) == spec


def test_validation_is_not_listed_but_found_by_its_folder(tmp_path):
    spec = FeatureSpec.default(tmp_path, 2, [3, 200], ["train", "test", "validation"])
    spec.save()
    listed = yaml.safe_load(spec.path.read_text())["source_spec"]
    assert listed.keys() == {"train", "test"}  # NVIDIA's reader refuses others
    assert FeatureSpec.load(tmp_path).splits == ["train", "test"]
    (tmp_path / "validation").mkdir()  # an empty folder is not a split
    assert FeatureSpec.load(tmp_path).splits == ["train", "test"]
    (tmp_path / "validation" / "cat_1.bin").touch()
    assert FeatureSpec.load(tmp_path) == spec
    with pytest.raises(FileNotFoundError, match=r"validation/label\.bin: missing"):
        spec.num_rows("validation")


@pytest.mark.parametrize("folder", ["validation", "val"])
def test_validation_has_the_file_names_of_training(tmp_path, folder):
    path = write(tmp_path, SECTIONS)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "y").touch()
    spec = FeatureSpec.load(path)
    assert spec.splits == ["train", "test", "validation"]
    assert spec.file("validation", "price") == tmp_path / folder / "x"


def test_a_listed_validation_split_is_taken_as_it_is(tmp_path):
    listed = [
        {**chunk, "files": [chunk["files"][0].replace("train", "held_out")]}
        for chunk in SECTIONS["source_spec"]["train"]
    ]
    path = write(tmp_path, change(["source_spec", "validation"], listed))
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "y").touch()
    spec = FeatureSpec.load(path)
    assert spec.file("validation", "price") == tmp_path / "held_out" / "x"
    spec.save()  # no folder determines its location
    assert FeatureSpec.load(path) == spec


def test_default_names_are_those_of_nvidia(tmp_path):
    spec = FeatureSpec.default(tmp_path, 2, [3, 200])
    assert spec.numerical == ["num_0", "num_1"]
    assert spec.categorical == ["cat_0.bin", "cat_1.bin"]
    assert spec.file("train", "num_1") == tmp_path / "train" / "numerical.bin"
    assert spec.file("test", "cat_1.bin") == tmp_path / "test" / "cat_1.bin"
    assert [spec.dtype(name) for name in spec.categorical] == [np.int8, np.int16]


def change(path, value):
    """Returns the sections with the entry at `path` replaced, or removed if `value` is None."""
    sections = copy.deepcopy(SECTIONS)
    *parents, last = path
    place = sections
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return sections


def chunk(features, **changes):
    return {"type": "split_binary", "features": features, "files": ["f"]} | changes


BROKEN_RULES = {
    "no channel_spec": (["channel_spec"], None, "expected the sections"),
    "an unknown section": (["more"], {}, "expected the sections"),
    "no test split": (["source_spec", "test"], None, r"got \['train'\]"),
    "an unknown split": (["source_spec", "dev"], [], r"splits train and test.*'dev'"),
    "an unknown channel": (
        ["channel_spec", "text"],
        [],
        "channel_spec: expected categorical, numerical and label",
    ),
    "two labels": (
        ["channel_spec", "label"],
        ["clicked", "age"],
        "channel_spec: .*with one label, got",
    ),
    "a feature in two channels": (
        ["channel_spec", "categorical"],
        ["user", "shop", "age"],
        r"channel_spec: .*unknown or repeated \['age'\]",
    ),
    "a feature in no channel": (
        ["channel_spec", "categorical"],
        ["user"],
        r"channel_spec: .*missing \['shop'\]",
    ),
    "no dtype": (["feature_spec", "shop"], {"cardinality": 5}, "feature shop: expected a numpy"),
    "an unknown dtype": (
        ["feature_spec", "shop", "dtype"],
        "int7",
        "feature shop: .*expected a numpy dtype, got .*'int7'",
    ),
    "ids that are no integers": (["feature_spec", "shop", "dtype"], "float32", "signed integer"),
    "no cardinality": (["feature_spec", "shop"], {"dtype": "int8"}, "shop: .* cardinality >= 1"),
    "a cardinality of 0": (["feature_spec", "shop", "cardinality"], 0, "cardinality >= 1, got 0"),
    "a cardinality beyond the dtype": (
        ["feature_spec", "shop", "cardinality"],
        129,
        "feature shop: expected a signed integer dtype for 129 ids, got 'int8'",
    ),
    "a list without a length": (
        ["feature_spec", "shop", "list"],
        {"max_length": 0},
        "feature shop: list: max_length: expected 1 to 2147483645, got 0",
    ),
    "a list in one file": (
        ["feature_spec", "shop", "list"],
        {"max_length": 2, "weighted": True},
        "chunk 1: expected type split_binary_list and 4 files",
    ),
    "wide numericals": (["feature_spec", "age", "dtype"], "float32", "age: expected dtype float16"),
    "a label that is no bool": (
        ["feature_spec", "clicked", "dtype"],
        "int8",
        "expected dtype bool",
    ),
    "a chunk without files": (
        ["source_spec", "train", 0],
        {"type": "split_binary", "features": ["clicked"]},
        "train chunk 0: expected type, features and files",
    ),
    "a chunk of csv": (
        ["source_spec", "test", 1, "type"],
        "csv",
        "test chunk 1: expected type split_binary and 1 file, got .*csv",
    ),
    "no features in a chunk": (
        ["source_spec", "train", 0, "features"],
        [],
        "the label, one categorical",
    ),
    "two files in a chunk": (
        ["source_spec", "train", 0, "files"],
        ["a", "b"],
        "train chunk 0: expected type split_binary and 1 file",
    ),
    "two tables in a chunk": (
        ["source_spec", "train", 1],
        chunk(["shop", "user"]),
        "the label, one categorical feature, or",
    ),
    "numericals in another order": (
        ["source_spec", "train", 3],
        chunk(["price", "age"]),
        "all numerical ones in channel order, got",
    ),
    "a feature without a chunk": (["source_spec", "train", 1], None, r"missing \['shop'\]"),
    "a feature in two chunks": (
        ["source_spec", "train", 1],
        chunk(["user"]),
        r"repeated \['user'\]",
    ),
    "an unknown feature in a chunk": (
        ["source_spec", "train", 1],
        chunk(["shoe"]),
        r"unknown or repeated \['shoe'\]",
    ),
}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_is_named_with_the_file(tmp_path, rule):
    path, value, message = BROKEN_RULES[rule]
    with pytest.raises(ValueError, match=rf"feature_spec\.yaml: .*{message}"):
        FeatureSpec.load(write(tmp_path, change(path, value)))


ODD = [-5, None, "text", [], [5], {}, {"a": 1}, [[]], [None], 1e999, [{"type": "split_binary"}]]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        *(("feature_spec",), ("source_spec",), ("channel_spec",), ("feature_spec", "price")),
        *(("feature_spec", "shop", "dtype"), ("feature_spec", "shop", "cardinality")),
        *(("source_spec", "train"), ("source_spec", "train", 0)),
        *(("source_spec", "train", 0, "files"), ("source_spec", "train", 0, "features")),
        *(("channel_spec", "label"), ("channel_spec", "numerical")),
    ],
    ids=repr,
)
def test_a_value_of_another_type_is_an_error_that_names_the_file(tmp_path, path, value):
    sections = copy.deepcopy(SECTIONS)
    inner = sections
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=r"^\S+feature_spec\.yaml: "):
        FeatureSpec.load(write(tmp_path, sections))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "train/../../x", ""])
def test_files_of_a_specification_are_in_its_folder(tmp_path, name):
    sections = copy.deepcopy(SECTIONS)
    sections["source_spec"]["train"][0]["files"] = [name]
    with pytest.raises(ValueError, match=r"feature_spec\.yaml: expected a path within"):
        FeatureSpec.load(write(tmp_path, sections))


def test_no_features_at_all_is_refused(tmp_path):
    sections = copy.deepcopy(SECTIONS)
    sections["feature_spec"] = {"clicked": {"dtype": "bool"}}
    sections["channel_spec"] = {"categorical": [], "numerical": [], "label": ["clicked"]}
    sections["source_spec"] = {s: [chunk(["clicked"])] for s in ("train", "test")}
    with pytest.raises(ValueError, match="at least one numerical or categorical"):
        FeatureSpec.load(write(tmp_path, sections))


@pytest.mark.parametrize("text", [b"a: [", b"- 1", b"", "gr\u00f6\u00dfe: 1".encode("latin-1")])
def test_a_file_that_is_no_specification_is_named(tmp_path, text):
    (tmp_path / "feature_spec.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=r"feature_spec\.yaml: .*(invalid YAML|expected a map)"):
        FeatureSpec.load(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"feature_spec\.yaml: no such feature"):
        FeatureSpec.load(tmp_path)


def test_an_unknown_split_or_feature_is_refused(tmp_path):
    spec = FeatureSpec.default(tmp_path, 1, [3])
    with pytest.raises(ValueError, match="no split 'validation', only train, test"):
        spec.file("validation", "label")
    with pytest.raises(ValueError, match="no feature 'cat_9'"):
        spec.file("train", "cat_9")


def write_2020(directory, rows, num_numerical, tables, splits=("train", "test")):
    """Writes a 2020 dataset. `tables`: greatest id and stored dtype of each."""
    sizes = {f"_c{14 + i}": greatest for i, (greatest, _) in enumerate(tables)}
    (directory / "model_size.json").write_text(json.dumps(sizes, indent=4))
    for split in splits:
        (directory / split).mkdir()
        np.zeros(rows, bool).tofile(directory / split / "label.bin")
        np.zeros((rows, num_numerical), np.float16).tofile(directory / split / "numerical.bin")
        for i, (greatest, dtype) in enumerate(tables):
            np.full(rows, greatest, dtype).tofile(directory / split / f"cat_{i}.bin")


@pytest.mark.parametrize(
    ("greatest", "dtype"),
    [
        # NVIDIA's 2020 writer derived the width from the greatest id, its reader from the
        # cardinality, one more: at the boundary a dataset may have either.
        (126, np.int8),
        (126, np.int16),
        (127, np.int16),
        (127, np.int8),
        (32766, np.int16),
        (32766, np.int32),
        (32767, np.int16),
        (32767, np.int32),
        (2, np.int64),
    ],
)
def test_a_dataset_of_2020_has_the_widths_of_its_files(tmp_path, greatest, dtype):
    write_2020(tmp_path, 5, 4, [(greatest, dtype), (3, np.int8)])
    spec = FeatureSpec.load(tmp_path)
    assert spec.cardinalities == [greatest + 1, 4]
    assert spec.dtype("cat_0.bin") == dtype
    assert len(spec.numerical) == 4
    assert spec.splits == ["train", "test"]
    assert [spec.num_rows(split) for split in spec.splits] == [5, 5]


@pytest.mark.parametrize("name", ["val", "validation"])
def test_a_dataset_of_2020_may_have_a_validation_split(tmp_path, name):
    write_2020(tmp_path, 2, 1, [(3, np.int8)], ["train", "test", name])
    spec = FeatureSpec.load(tmp_path)
    assert spec.splits == ["train", "test", "validation"]
    assert spec.file("validation", "label") == tmp_path / name / "label.bin"


def test_ids_too_narrow_for_their_table_are_refused(tmp_path):
    write_2020(tmp_path, 2, 1, [(3, np.int8)])
    (tmp_path / "model_size.json").write_text('{"_c14": 128}')
    with pytest.raises(ValueError, match="signed integer dtype for 129 ids, got 'int8'"):
        FeatureSpec.load(tmp_path)


def test_a_file_of_2020_that_is_no_whole_number_of_ids_is_named(tmp_path):
    write_2020(tmp_path, 3, 1, [(3, np.int8)])
    (tmp_path / "train" / "cat_0.bin").write_bytes(b"\0" * 4)
    with pytest.raises(ValueError, match=r"cat_0\.bin: 4 bytes .* 3 rows"):
        FeatureSpec.load(tmp_path)

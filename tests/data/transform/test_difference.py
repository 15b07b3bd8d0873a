"""Fitted transforms are equal, or the difference is named."""

import re

import numpy as np
import pytest
from table_testing import dictionary_of, table_transform

from dlrm.data.schema.schema import CategoricalField, Label, Schema
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.transform import Transform

HASHES = np.array([0x68FD1E64, 0x05DB9164, 0x25C83C98, 7], np.uint32)
CITIES = ["Rome", "Oslo", "Lima"]


def check_extends(checkpoint, dataset):
    return compare_transforms(checkpoint, dataset, extended=True)


def log_of(directory, num_numerical=2, dictionaries=(HASHES, HASHES[:2]), rule="readme"):
    Transform.from_logs(num_numerical, dictionaries, rule).save(directory / "transform")
    return directory


def csv_of(directory, **changes):
    facts = {
        "scales": {"age": (30.5, 7.25), "hours": (40.0, 2.0)},
        "dictionaries": {"city": CITIES, "job": ["a", "b"]},
        "missing_values": ("?",),
        "label": "income",
        "positive": ">50K",
    }
    table_transform(**facts | changes).save(directory / "transform")
    return directory


def test_the_same_transform_is_no_difference(tmp_path):
    assert compare_transforms(log_of(tmp_path / "a"), log_of(tmp_path / "b")) is None
    swapped = {"missing_values": ("?", "-")}
    assert compare_transforms(csv_of(tmp_path / "c"), csv_of(tmp_path / "d")) is None
    other = csv_of(tmp_path / "e", missing_values=("-", "?"))
    assert compare_transforms(csv_of(tmp_path / "f", **swapped), other) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dictionaries": (HASHES[[2, 1, 0, 3]], HASHES[:2])}, "categorical 0: id 1 is 68fd1e64 f"),
        (
            {"dictionaries": (HASHES,)},
            "'categorical 1' for the model and None here.",
        ),
        ({"num_numerical": 3}, "numerical 2: None for the model and 'numerical 2' here."),
        ({"rule": "nvidia"}, "transform: 'log' for the model and 'nvidia' here."),
    ],
)
def test_what_differs_of_logs_is_said(tmp_path, changes, message):
    model, here = log_of(tmp_path / "model"), log_of(tmp_path / "here", **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        compare_transforms(model, here)
    assert str(raised.value).startswith(f"{here}: its transform is not that of {model}, so ")
    said = compare_transforms(model, here, allowed=True)
    assert said.startswith(f"note: {here}: its transform is not that of {model}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dictionaries": {"city": ["Rome", "Lima", "Oslo"], "job": ["a", "b"]}},
            "categorical city: id 2 is 'Oslo' for the model and 'Lima' here",
        ),
        (
            {"scales": {"age": (30.5, 7.25), "hours": (40.0, 2.0000000000000004)}},
            "numerical hours: deviation: 2.0 for the model and 2.0000000000000004 here",
        ),
        (
            {"numeric_transform": "log"},
            "age: transform: 'standardize' for the model and 'log' here",
        ),
        (
            {"scales": {"hours": (40.0, 2.0), "age": (30.5, 7.25)}},
            "numerical 0: 'age' for ",
        ),
        (
            {"dictionaries": {"new": ["x"], "city": CITIES, "other": ["y"], "job": ["a", "b"]}},
            r"categorical 0: 'city' for the model and 'new' here\. A model takes the fields",
        ),
        (
            {"dictionaries": {"town": CITIES, "job": ["a", "b"]}},
            "categorical 0: 'city' for ",
        ),
        ({"missing_values": ()}, r"missing_values: \['\?'\] for the model and \[\] here"),
        (
            {"label": "wage", "positive": None},
            r"label: \['income', '>50K'\] for the model and \['wage'\] here",
        ),
    ],
)
def test_what_differs_of_csv_is_said(tmp_path, changes, message):
    model, here = csv_of(tmp_path / "model"), csv_of(tmp_path / "here", **changes)
    with pytest.raises(ValueError, match=message):
        compare_transforms(model, here)


def test_what_differs_of_lists_is_said(tmp_path):
    def lists_of(directory, **entries):
        field = CategoricalField("city", max_length=3, **entries)
        schema = Schema(Label("y"), categorical=(field,))
        transform = Transform(schema, [], [dictionary_of(CITIES)], ["string"])
        transform.save(directory / "transform")
        return directory

    model, same = lists_of(tmp_path / "a"), lists_of(tmp_path / "b")
    assert compare_transforms(model, same) is None
    assert compare_transforms(model, lists_of(tmp_path / "d", keep="last")) is None
    other = lists_of(tmp_path / "c", keep="first", weights="w")
    message = "categorical city: kept: 'last' for the model and 'first' here"
    with pytest.raises(ValueError, match=message):
        compare_transforms(model, other)


MORE = np.r_[HASHES, [9]].astype(np.uint32)


def test_dictionaries_with_further_values_at_their_ends_extend_others(tmp_path):
    model = log_of(tmp_path / "model")
    assert check_extends(model, log_of(tmp_path / "same")) is None
    assert check_extends(model, log_of(tmp_path / "more", dictionaries=(MORE, HASHES[:3]))) is None
    named = csv_of(tmp_path / "csv")
    more = csv_of(
        tmp_path / "csv more", dictionaries={"city": [*CITIES, "Bonn"], "job": ["a", "b"]}
    )
    assert check_extends(named, more) is None
    none = tmp_path / "none"
    none.mkdir()
    assert check_extends(none, none) is None
    for pair in ((none, model), (model, none)):
        assert check_extends(*pair).startswith(f"note: {none} has no fitted transform, so nothing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dictionaries": (MORE[[0, 1, 4, 2, 3]], HASHES[:2])}, "categorical 0: id 3 is 25c83c98"),
        ({"dictionaries": (HASHES[:3], HASHES)}, "categorical 0: id 4 is 00000007 for the model a"),
        ({"rule": "nvidia"}, "transform: 'log' for the model and 'nvidia' here."),
    ],
)
def test_what_does_not_extend_a_log_is_said(tmp_path, changes, message):
    model, here = log_of(tmp_path / "model"), log_of(tmp_path / "here", **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        check_extends(model, here)
    assert str(raised.value).startswith(f"{here}: expected the transform of {model} with further")


def test_what_does_not_extend_named_columns_is_said(tmp_path):
    def city_of(name, cities, buckets=0, **entries):
        field = CategoricalField("city", hash_buckets=buckets, **entries)
        schema = Schema(Label("y"), categorical=(field,))
        made = Transform(schema, [], [dictionary_of(cities)], ["string"])
        made.save(tmp_path / name / "transform")
        return tmp_path / name

    plain = city_of("plain", CITIES)
    with pytest.raises(ValueError, match="city: id 2 is 'Oslo' for the model and 'Bonn' here"):
        check_extends(plain, city_of("inserted", ["Rome", "Bonn", "Oslo", "Lima"]))
    with pytest.raises(ValueError, match=r"'Bonn' here \(its hash buckets follow its dictionary"):
        check_extends(city_of("few", CITIES, 4), city_of("more", [*CITIES, "Bonn"], 4))
    listed = city_of("list", CITIES, max_length=3)
    assert check_extends(listed, city_of("longer", [*CITIES, "Bonn"], max_length=3)) is None
    with pytest.raises(ValueError, match="city: id 1 is 'Rome' for the model and 'Oslo' here"):
        check_extends(listed, city_of("other", CITIES[1:] + CITIES[:1], max_length=3))
    scaled = csv_of(tmp_path / "scaled", scales={"age": (30.5, 7.25), "hours": (41.0, 2.0)})
    with pytest.raises(ValueError, match="numerical hours: mean: 40.0"):
        check_extends(csv_of(tmp_path / "csv"), scaled)


def test_a_log_is_no_csv(tmp_path):
    with pytest.raises(ValueError, match="label: .'label'. for the model and .'income', '>50K'."):
        compare_transforms(log_of(tmp_path / "log"), csv_of(tmp_path / "csv"))


def test_what_has_no_transform_is_not_compared_and_that_is_said_of_a_model_with_one(tmp_path):
    model, none = log_of(tmp_path / "model"), tmp_path / "none"
    none.mkdir()
    assert compare_transforms(none, model) is compare_transforms(none, None) is None
    for dataset, name in ((none, str(none)), (None, "the data")):
        said = compare_transforms(model, dataset)
        assert said.startswith(f"note: {name} has no fitted transform, so nothing tells")


def test_dictionaries_of_the_same_checksums_are_not_read(tmp_path):
    model, here = log_of(tmp_path / "model"), log_of(tmp_path / "here")
    other = HASHES[::-1].copy()
    np.save(here / "transform" / "dictionary_0.npy", other)  # unlike its checksum
    assert compare_transforms(model, here) is None


def test_long_dictionaries_are_compared_to_their_end(tmp_path):
    numbers = np.arange(3_000_000, dtype=np.uint32)
    changed = numbers.copy()
    changed[-1] = 2**32 - 1
    model = log_of(tmp_path / "model", dictionaries=(numbers,))
    here = log_of(tmp_path / "here", dictionaries=(changed,))
    with pytest.raises(ValueError, match="id 3000000 is 002dc6bf for the model and ffffffff here"):
        compare_transforms(model, here)


def test_a_damaged_transform_is_named(tmp_path):
    model, here = csv_of(tmp_path / "model"), csv_of(tmp_path / "here")
    path = here / "transform" / "transform.json"
    path.write_text(path.read_text().replace('"income"', "[7]"))
    with pytest.raises(ValueError, match=r"here/transform/transform\.json: not a fitted transform"):
        compare_transforms(model, here)

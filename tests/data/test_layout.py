"""Dtypes and the small files of a dataset."""

import json

import numpy as np
import pytest

from dlrm.data import layout


@pytest.mark.parametrize(
    ("cardinality", "dtype"),
    [
        (1, np.int8),
        (126, np.int8),
        (127, np.int16),  # strictly below the maximum, as in NVIDIA's writer
        (128, np.int16),
        (32766, np.int16),
        (32767, np.int32),
        (2**31 - 2, np.int32),
    ],
)
def test_ids_are_as_narrow_as_nvidia_makes_them(cardinality, dtype):
    assert layout.id_dtype(cardinality) == dtype


def test_a_table_too_large_for_int32_is_refused():
    with pytest.raises(ValueError, match="cardinality 2147483647"):
        layout.id_dtype(2**31 - 1)


def test_model_size_holds_greatest_ids_under_criteo_column_names(tmp_path):
    layout.write_model_size(tmp_path, [3, 100])
    text = (tmp_path / "model_size.json").read_text()
    assert json.loads(text) == {"_c14": 2, "_c15": 99}
    assert layout.read_model_size(tmp_path) == [3, 100]


def test_model_size_is_read_in_the_order_of_the_file_whatever_the_names(tmp_path):
    (tmp_path / "model_size.json").write_text('{"_c15": 7, "b": 0, "_c14": 9}')
    assert layout.read_model_size(tmp_path) == [8, 1, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: no JSON"),
        ("[1]", "expected a map"),
        ('{"_c14": "12"}', "entry _c14: expected a greatest id"),  # what NVIDIA's generator wrote
        ('{"_c14": -1}', "entry _c14: .* got -1"),
        ('{"_c14": true}', "entry _c14: .* got True"),
    ],
)
def test_a_wrong_model_size_is_named(tmp_path, text, message):
    (tmp_path / "model_size.json").write_text(text)
    with pytest.raises(ValueError, match=rf"model_size\.json: {message}"):
        layout.read_model_size(tmp_path)


def test_a_dataset_without_a_manifest_is_foreign(tmp_path):
    assert layout.read_dataset_manifest(tmp_path) is None
    layout.write_dataset_manifest(tmp_path, {"train": 1, "test": 2}, [3], {"limit": 15})
    manifest = layout.read_dataset_manifest(tmp_path)
    assert manifest["rows"] == {"train": 1, "test": 2}
    assert manifest["cardinalities"] == [3]
    assert manifest["transform"] == {"limit": 15}

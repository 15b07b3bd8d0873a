"""Requests are read and scored together, and a bad one fails alone."""

import json
import sys

import numpy as np
import pytest

from dlrm.data.transform import Transform
from dlrm.serving.reader import Reader

DICTIONARIES = [np.array([0xA, 0xB], np.uint32), np.array([0xC], np.uint32)]


@pytest.fixture
def reader(tmp_path):
    facts = {
        "num_numerical": 1,
        "table_sizes": [3, 2],
        "hashed": False,
        "categorical_names": ["user", "city"],
        "numerical_dtype": "float32",
        "ids_dtype": "int64",
    }
    (tmp_path / "model.json").write_text(json.dumps(facts))
    Transform(1, DICTIONARIES).save(tmp_path / "transform")
    return Reader(tmp_path, 4096)


def raw(*lines):
    padded = np.array([line.encode() for line in lines])
    return {"raw__0": padded.view(np.uint8).reshape(len(lines), -1)}


def ids(*rows):
    return {"input__0": np.zeros((len(rows), 1), np.float32), "input__1": np.array(rows)}


def test_requests_of_any_length_are_read(reader):
    read = reader.read([raw("1\ta\tc"), raw("\tb", "98\tffff\tC")])
    assert [inputs.ids.tolist() for inputs in read] == [[[1, 1]], [[2, 0], [0, 1]]]
    numbers = np.concatenate([inputs.numerical for inputs in read])
    np.testing.assert_allclose(numbers, np.log([[3], [2], [100]]), rtol=1e-3)
    assert (read[0].ids.dtype, numbers.dtype) == (np.int64, np.float32)


def test_a_bad_request_fails_alone(reader):
    good, bad = ids([2, 1]), ids([0, 0], [1, 2])
    one, error, three = reader.read([good, bad, raw("1\tb\tc")])
    assert (one.ids.tolist(), three.ids.tolist()) == ([[2, 1]], [[2, 1]])
    assert str(error) == "row 1, table 1 (city): expected an id from 0 to 1, got 2"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (raw("1\tz\tc"), "row 0, categorical 0: .* got 'z'"),
        (raw("1\ta\tc\td"), "expected up to 3 fields, got 4"),
        ({"input__0": np.zeros((1, 1), np.float32)}, "expected the inputs .* got input__0"),
        ({**ids([0, 0]), **raw("1")}, "got input__0, input__1, raw__0"),
        ({}, "got -"),
        (ids([0]), r"expected \[1, 2\]"),
        ({**ids([0, 0]), "input__0": np.full((1, 1), np.inf, np.float32)}, "finite number"),
    ],
)
def test_what_is_wrong_is_said(reader, request_, message):
    (error,) = reader.read([request_])
    assert isinstance(error, ValueError)
    (_, again) = reader.read([ids([0, 0]), request_])
    assert str(error) == str(again)
    with pytest.raises(ValueError, match=message):
        raise error


def test_no_rows_are_no_error(reader):
    (none,) = reader.read([{"raw__0": np.empty((0, 4), np.uint8)}])
    assert none.ids.shape == (0, 2)


def test_reading_needs_no_torch(root):
    import subprocess

    code = "import dlrm.serving.reader, dlrm.serving.backend, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0

"""Requests are read and scored together, and a bad one fails alone."""

import json
import tracemalloc
from itertools import chain

import numpy as np
import pytest

from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.serving.rows.raw import inputs_of_text
from dlrm.serving.server import backend
from dlrm.serving.server.names import KIND
from dlrm.serving.server.reader import Reader

DICTIONARIES = [np.array([0xA, 0xB], np.uint32), np.array([0xC], np.uint32)]


MAX_ROWS = 100


@pytest.fixture
def directory(tmp_path):
    facts = {
        "num_numerical": 1,
        "table_sizes": [3, 2],
        "hashed": False,
        "categorical_names": ["user", "city"],
        "numerical_dtype": "float32",
        "ids_dtype": "int64",
    }
    (tmp_path / "model.json").write_text(json.dumps(facts))
    Transform.from_logs(1, DICTIONARIES).save(tmp_path / "transform")
    write_manifest(tmp_path, KIND)
    return tmp_path


@pytest.fixture
def reader(directory):
    return Reader(directory, MAX_ROWS)


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


def zeros(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype)


ROWS, COLUMNS = np.zeros((1, 1), np.float32), np.zeros((1, 2), np.int64)
FAULTS = [
    (raw("x\ta\tc"), "row 0, column numerical 0: expected an integer .* 18 digits, got 'x'"),
    (raw("1\ta\tc", "1\ta\tc\td"), "row 1: expected up to 3 fields, got 4"),
    ({"raw__0": zeros(2)}, r"raw__0: expected \[rows, width\] .*, got \[2\]"),
    ({"raw__0": zeros(0, 4)}, r"1 to 100 rows .*, got \[0, 4\]"),
    ({"raw__0": zeros(101, 2)}, r"1 to 100 rows .*, got \[101, 2\]"),
    ({"raw__0": zeros(1, 2**20 + 1)}, r"a width of up to 1048576, got \[1, 1048577\]"),
    ({"raw__0": zeros(1, 4, dtype=np.int32)}, "raw__0: expected uint8, got int32"),
    ({"input__0": ROWS}, "input__0 and input__1, or raw__0 alone; got input__0"),
    ({}, "got -"),
    ({"input__0": zeros(1, 5, dtype=np.float32), "input__1": COLUMNS}, r"got \[1, 5\]"),
    ({"input__0": zeros(2, 1, dtype=np.float32), "input__1": COLUMNS}, r"expected \[2, 2\]"),
    ({"input__0": zeros(1, 1, dtype=object), "input__1": COLUMNS}, "floating type, got .* object"),
    ({"input__0": ROWS, "input__1": COLUMNS.astype("U1")}, "integer type, .* <U1"),
    ({"input__0": ROWS * np.nan, "input__1": COLUMNS}, "row 0, column numerical 0: .* finite"),
    ({"input__0": ROWS, "input__1": COLUMNS - 1}, r"column user \(table 0\): .* got -1"),
    (
        {"input__0": ROWS, "input__1": COLUMNS.astype(np.uint64) + np.uint64(2**64 - 1)},
        r"column user \(table 0\): .* got 18446744073709551615",
    ),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_every_fault_fails_its_own_request_only(reader, fault, message):
    good = [raw("1\ta\tc"), ids([2, 1]), raw("98\tb", "\tb\tC"), ids([0, 0], [1, 1])]
    alone = [reader.read([request])[0] for request in good]
    mixed = list(chain.from_iterable((request, fault) for request in good))
    read = reader.read([fault, *mixed])
    for error in read[::2]:
        with pytest.raises(ValueError, match=message):
            raise error
    for found, expected in zip(read[1::2], alone, strict=True):
        np.testing.assert_array_equal(found.numerical, expected.numerical)
        np.testing.assert_array_equal(found.ids, expected.ids)


@pytest.mark.parametrize("error", [MemoryError("of 8 GB"), IndexError("7"), ZeroDivisionError()])
def test_an_error_that_nobody_foresaw_fails_its_own_request_only(reader, monkeypatch, error):
    def fails(transform, text):
        if b"bb" in text.data.tobytes():
            raise error
        return inputs_of_text(transform, text)

    monkeypatch.setattr("dlrm.serving.server.reader.inputs_of_text", fails)
    first, wrong, last = reader.read([raw("1\ta\tc"), raw("1\tbb\tc"), raw("1\tb\tc")])
    assert (first.ids.tolist(), last.ids.tolist()) == ([[1, 1]], [[2, 1]])
    assert str(wrong) == f"expected a request that can be answered, got {error!r}"


def test_an_error_does_not_keep_the_data_of_its_request(reader):
    wide = {"raw__0": np.full((1, 2**20), ord("1"), np.uint8)}
    tracemalloc.start()
    try:
        errors = [reader.read([wide, raw("1\ta\tc")])[0] for _ in range(20)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(isinstance(error, ValueError) for error in errors)
    assert held < 2**20


class Tensor:
    """A server tensor whose data may be missing."""

    def __init__(self, name, array, shape=None):
        self._name, self._array, self._shape = name, array, shape

    def name(self):
        return self._name

    def shape(self):
        return list(self._shape or self._array.shape)

    def __dlpack__(self, **options):
        assert self._shape is None, "the data was touched"
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Asked:
    """A server request."""

    def __init__(self, *tensors):
        self._tensors = tensors

    def inputs(self):
        if not self._tensors:
            raise RuntimeError("no inputs")
        return self._tensors


@pytest.mark.parametrize(
    "shape", [(2**62, 2), (2**62, 0), (2**62, 13), (1, 2**40), (2**31, 2**33), (-1, 2), (2,), ()]
)
@pytest.mark.parametrize("name", ["raw__0", "input__0", "input__1", "unknown"])
def test_a_shape_that_lies_is_refused_before_data_is_touched(reader, name, shape):
    good = Asked(Tensor("raw__0", raw("1\ta\tc")["raw__0"]))
    lying = Asked(Tensor(name, zeros(2), shape or (0, 0, 0)))
    read = reader.read(backend.read([good, lying, Asked(), good], reader))
    assert read[0].ids.tolist() == read[3].ids.tolist() == [[1, 1]]
    with pytest.raises(ValueError, match=rf"{name}: expected .*, got \["):
        raise read[1]
    with pytest.raises(ValueError, match="expected a request that can be answered, got Runtime"):
        raise read[2]


class Server:
    """Stands for `triton_python_backend_utils`."""

    class TritonError(Exception):
        INVALID_ARG = 3

    class Tensor:
        @staticmethod
        def from_dlpack(name, capsule):
            if name == "unknown":
                raise TypeError("no such output")
            return name

    class InferenceResponse:
        def __init__(self, tensors=(), error=None):
            self.tensors, self.error = tensors, error


def test_an_answer_that_cannot_be_sent_fails_alone():
    scores = np.zeros((1, 1), np.float32)
    answers = [{"output__0": scores}, {"unknown": scores}, ValueError("no"), {"output__0": scores}]
    sent = backend.responses(Server, answers)
    assert [response.tensors for response in sent] == [["output__0"], (), (), ["output__0"]]
    errors = [response.error.args[0] for response in sent[1:3]]
    assert errors[0].startswith("expected a request that can be answered, got TypeError")
    assert errors[1] == "no"


def test_scores_that_cannot_be_computed_fail_their_own_request_only(directory, monkeypatch):
    scorer = pytest.importorskip("dlrm.serving.server.scorer", reason="needs onnxruntime")

    def score(numerical, ids):
        if (ids == [2, 0]).all(1).any():
            raise RuntimeError("out of memory")
        return np.where(ids == [0, 1], np.nan, 10 * ids[:, :1] + ids[:, 1:])[:, :1].astype("f4")

    monkeypatch.setattr(scorer, "open_session", lambda *_: score)
    answer = scorer.OnnxScorer(directory, MAX_ROWS).answer
    one, bad, worse, four, none = answer(
        [
            *(ids([1, 1], [2, 1]), ids([2, 0]), ValueError("unreadable"), raw("1\ta\tc")),
            ids([1, 1], [0, 1]),
        ]
    )
    assert (one.tolist(), four.tolist()) == ([[11], [21]], [[11]])
    assert str(none).startswith("row 1: expected a finite score, got nan: ")
    assert str(bad) == "expected a request that can be answered, got RuntimeError('out of memory')"
    assert str(worse) == "unreadable"
    assert answer([]) == []

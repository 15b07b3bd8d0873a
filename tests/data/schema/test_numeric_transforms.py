"""Numerical transforms: known answers, inverses, and the way from a table to scores."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest

import dlrm
from dlrm.data import layout
from dlrm.data.choices import CRITEO_TRANSFORMS, described
from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.numeric_transforms import NUMERIC_TRANSFORMS
from dlrm.data.schema.schema import NumericalField, Schema
from dlrm.data.sources import native
from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.transform import Transform
from dlrm.serving.rows.inputs import Inputs

X = [4.0, -40.0, None, 5.0, -2.5]
FITTED = Fitted(1.0, 2.0, np.array([0.0, 4.0, 8.0]), np.array([0.25, 0.5, 1.0]))
KNOWN = {  # results of X with FITTED, and how many are clamped
    "log": ([math.log(6), 0, math.log(2), math.log(7), 0], 2),
    "nvidia": ([math.log(7), 0, 0, math.log(8), 0], 2),
    "standardize": ([1.5, -20.5, 0, 2, -1.75], 0),
    "quantile": ([0.5, 0.25, 0.5, 0.625, 0.25], 0),
    "none": ([4, -40, 0, 5, -2.5], 0),
}


def half(value):
    """Returns a number rounded to float32, then to float16."""
    return float(np.float16(np.float32(value)))


def parsed(values):
    missing = np.array([value is None for value in values])
    return Parsed(np.array([value or 0.0 for value in values]), missing)


@pytest.mark.parametrize("name", NUMERIC_TRANSFORMS)
def test_known_answers(name):
    results, clamped = NUMERIC_TRANSFORMS[name].apply(parsed(X), FITTED)
    assert results.dtype == np.float16
    assert (results.tolist(), clamped) == ([half(one) for one in KNOWN[name][0]], KNOWN[name][1])


@pytest.mark.skipif(native.host is None, reason="the native library is not built")
@pytest.mark.parametrize("size", [0, 7, 100_003])
def test_native_halves_are_those_of_numpy(size):
    bits = np.random.default_rng(0).integers(0, 1 << 32, size, np.uint32)
    bits[::2] = (bits[::2] & 0x8FFFFFFF) | 0x30000000  # near the smallest halves, and above
    bits[1::7] = bits[1::7] & 0xFFFFF000 | 0x1000  # halfway between two
    singles = np.nan_to_num(bits.view(np.float32))
    with np.errstate(over="ignore"):
        expected = singles.astype(np.float16)
    assert native.host.to_half(singles).tobytes() == expected.tobytes()


def test_numbers_beyond_float16_are_named_with_a_remedy():
    assert NUMERIC_TRANSFORMS["none"].overflow(1e6) == (
        "1000000.0 is beyond float16 (up to 65504), in which numerical features are stored; choose "
        "the transform log or standardize, or scale the column"
    )
    results, _ = NUMERIC_TRANSFORMS["none"].apply(parsed([1e6, 1.0]))
    assert np.isinf(results).tolist() == [True, False]


def test_help_has_a_meaning_of_each():
    assert described(CRITEO_TRANSFORMS) == (
        "readme: ln(x + 2), with 0 for a missing x; nvidia: ln(x + 3), and 0 if x is missing"
    )


@pytest.mark.parametrize("name", NUMERIC_TRANSFORMS)
def test_a_dataset_its_report_and_scores_agree_on_every_transform(name, tmp_path):
    x = [None if i % 10 == 0 else float(i % 97 - 6) for i in range(400)]
    rows = pa.table({"y": [0, 1, 1, 0] * 100, "x": x, "c": ["a", "b"] * 200})
    fields = {"numerical": [{"column": "x", "transform": name}], "categorical": ["c"]}
    schema = {"label": "y", **fields}
    made = dlrm.Dataset.from_arrow(rows, schema, tmp_path / "d", test=rows, report=True)
    transform = Transform.load(made.path / layout.TRANSFORM)
    expected, clamped = NUMERIC_TRANSFORMS[name].apply(parsed(x), transform.numerical[0])
    numbers = np.fromfile(made.path / "test" / "numerical.bin", np.float16)
    assert numbers.tolist() == expected.tolist()
    report = json.loads((made.path / "report.json").read_text())
    assert report["splits"]["test"]["values_raised_to_1"] == clamped
    assert report["numerical"][0]["transform"] == name
    assert report["numerical"][0]["quantiles"]["0.75"] == pytest.approx(64, abs=4)
    settings = {"max_steps": 4, "batch_size": 64, "embedding_dim": 4, "base_device": "cpu"}
    model = dlrm.fit(made, **settings)
    ids = np.fromfile(made.path / "test" / "cat_0.bin", np.int8).astype(np.int64)
    inputs = Inputs(numbers.astype(np.float32)[:, None], ids[:, None])
    np.testing.assert_allclose(model.logits(rows), model.logits_of(inputs), rtol=1e-5, atol=1e-6)


def test_the_default_transform_is_not_stored():
    facts = {"label": "y", "numerical": [{"column": "x", "transform": "standardize"}]}
    schema = Schema.from_dict(facts)
    assert schema.numerical == (NumericalField("x", "standardize"),)
    assert "transform" not in str(schema.to_dict())

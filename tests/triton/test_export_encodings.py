"""Models with encodings and crosses are served with the numbers that preprocessing computed."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from trained_model import Trained

import dlrm
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.serving.predictor import inputs_of

pytestmark = pytest.mark.long
SCHEMA = {
    "label": "y",
    "numerical": ["x"],
    "categorical": ["shop", {"column": "user", "encodings": ["count", "target"], "max_ids": 20}],
    "crosses": [{"fields": ["shop", "user"], "buckets": 50, "encodings": ["target"]}],
}
SERVED = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from dlrm.data.transform.transform import Transform
from dlrm.serving import rows
assert Path(rows.__file__).is_relative_to(sys.argv[1]), rows.__file__
text = rows.text_of_lines(Path(sys.argv[2]).read_bytes(), 3)
inputs = rows.inputs_of_text(Transform.load(Path(sys.argv[1], "transform")), text)
np.savez(sys.argv[3], numerical=inputs.numerical, ids=inputs.ids)
"""


@pytest.fixture(scope="module")
def rows():
    draw = np.random.default_rng(0)
    shop, user = draw.integers(0, 9, 1500), draw.integers(0, 90, 1500)
    clicks = draw.random(1500) < 1 / (1 + np.exp(2 - shop / 4 - user / 50))
    texts = {"shop": [f"s{i}" for i in shop], "user": [f"u{i}" for i in user]}
    absent = draw.random(1500) < 0.1
    texts["user"] = pa.array(texts["user"], mask=absent)
    return pa.table({"y": clicks.astype(np.int8), "x": draw.normal(size=1500), **texts})


@pytest.fixture(scope="module")
def model(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded")
    dataset = dlrm.Dataset.from_arrow(rows[:1200], SCHEMA, folder / "dataset", test=rows[1200:])
    settings = {"embedding_dim": 4, "top_mlp_sizes": (8, 1), "epochs": 1, "batch_size": 64}
    fitted = dlrm.fit(dataset, base_device="cpu", numerical_embedding="piecewise", **settings)
    fitted.save(folder / "run")
    return folder


@pytest.fixture(scope="module")
def inputs(model):
    test = open_datasets(DataConfig(str(model / "dataset"), test_batch_size=300)).test
    return inputs_of(test.batch(0))


def test_scores_of_a_table_are_those_of_the_dataset(model, inputs, rows):
    predictor = dlrm.load(model / "run")
    expected = predictor.logits_of(inputs)
    held = rows[1200:]
    np.testing.assert_array_equal(predictor.logits(held), expected)
    np.testing.assert_array_equal(predictor.logits(held.to_pylist()), expected)
    names = predictor.transform.schema.numerical_names
    assert names == ["x", "user_count", "user_target", "shop_x_user_target"]


def test_the_exported_transform_gives_the_same_bits(export, model, inputs, rows, tmp_path):
    trained = Trained(model / "dataset", model / "run", model, [])
    repository = export(trained, tmp_path / "repository")
    version = repository / "model" / "1"
    cells = zip(*(rows[1200:][name].to_pylist() for name in ("x", "shop", "user")), strict=True)
    lines = ["\t".join("" if cell is None else str(cell) for cell in row) for row in cells]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    words = [version, tmp_path / "lines", tmp_path / "found.npz"]
    command = [sys.executable, "-c", SERVED, *map(str, words)]
    subprocess.run(command, check=True, cwd=tmp_path, env={"PATH": ""})
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_array_equal(found["numerical"], inputs.numerical)
    np.testing.assert_array_equal(found["ids"], inputs.ids)

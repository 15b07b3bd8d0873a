"""Models with registered layers: fitted, saved, loaded, scored by commands, and refused."""

import forked
import numpy as np
import own_layers
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import dlrm
from dlrm.model.dlrm import DLRM
from dlrm.train.checkpoints.directory import find_checkpoint
from dlrm.train.checkpoints.nvidia import write_nvidia
from dlrm.train.checkpoints.saved_model import read_saved

SCHEMA = {"label": "clicked", "numerical": ["price", "hour"], "categorical": ["user", "item"]}
SETTINGS = {"base_device": "cpu", "embedding_dim": 8, "epochs": 2, **own_layers.OWN}


def table(rows=2000):
    """Returns rows that depend on the price; the best possible AUC is 0.8."""
    draw = np.random.default_rng(2)
    price = draw.normal(size=rows)
    clicked = (draw.random(rows) < np.where(price > 0, 0.8, 0.2)).astype(int)
    ids = {"user": draw.integers(0, 40, rows), "item": draw.integers(0, 20, rows)}
    return pa.table({"clicked": clicked, "price": price, "hour": draw.integers(0, 24, rows), **ids})


@pytest.fixture(scope="module")
def model():
    return dlrm.fit(table(), SCHEMA, **SETTINGS)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    model.save(folder / "model")
    pq.write_table(table(50), folder / "rows.parquet")
    return folder


def test_a_model_with_own_layers_learns_and_loads_with_equal_scores(model, saved):
    assert model.results["test_auc"] > 0.7
    loaded = dlrm.load(saved / "model")
    np.testing.assert_array_equal(loaded.predict(table()), model.predict(table()))
    assert loaded.evaluate(table()) == model.evaluate(table())
    network = loaded.model
    assert isinstance(network, DLRM)
    assert isinstance(network.interact.own.module, own_layers.Bilinear)
    assert isinstance(network.numerical_embedding.own.module, own_layers.ScaledFields)
    assert isinstance(network.top_mlp[0].module, own_layers.Residual)


def test_the_same_settings_give_the_same_weights(model):
    torch.manual_seed(99)
    again = dlrm.fit(table(), SCHEMA, **SETTINGS)
    np.testing.assert_array_equal(again.predict(table(50)), model.predict(table(50)))


def predict(saved, folder):
    given = f"--checkpoint={saved / 'model'}", f"--input={saved / 'rows.parquet'}"
    return forked.run("dlrm.scripts.predict", *given, "--output=scores.npy", cwd=folder)


def test_a_process_without_the_layers_refuses_the_checkpoint(saved, tmp_path):
    done = predict(saved, tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert (
        "config.json: interaction_op bilinear: expected cuda_dot, dot, cat, dcn, quadratic, or "
        in line
    )
    assert line.endswith('@dlrm.register_interaction("bilinear")')


def test_commands_find_the_layers_of_an_installed_package(model, saved, root, tmp_path):
    described = tmp_path / "own_layers-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: own_layers\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[dlrm.layers]\nany = own_layers\n")
    (tmp_path / "own_layers.py").write_text((root / "tests" / "own_layers.py").read_text())
    done = predict(saved, tmp_path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        np.load(tmp_path / "scores.npy"), model.predict(table(50)), rtol=0, atol=1e-6
    )


def test_nvidias_format_has_no_own_layers(tmp_path):
    settings = {"top_mlp": "residual", "embedding_dim": 8, "max_steps": 1, "base_device": "cpu"}
    dlrm.fit(table(), SCHEMA, save_checkpoint_path=tmp_path / "run", **settings)
    with pytest.raises(ValueError, match="--top_mlp residual: NVIDIA's code does not have it"):
        write_nvidia(read_saved(find_checkpoint(tmp_path / "run")), tmp_path / "theirs")


def test_a_wrong_shape_is_named_before_training():
    @dlrm.register_interaction("crossed")
    class Crossed(torch.nn.Module):
        def __init__(self, num_vectors, dim):
            super().__init__()

        def forward(self, dense, embeddings):
            return embeddings * dense.unsqueeze(1)

    expected = (
        r"interaction_op crossed: expected an output \[samples, width\], got \[samples, 4, 8\]"
    )
    with pytest.raises(ValueError, match=f"^{expected} from Crossed$"):
        dlrm.fit(table(), SCHEMA, **{**SETTINGS, "interaction_op": "crossed"})

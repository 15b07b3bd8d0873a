"""Shared tables, attention and widths, written by `make_shape_fixtures`, are read as they were."""

import forked
import numpy as np
import pytest
from archives import SCORES, SHAPES, unpack
from make_shape_fixtures import FURTHER, HALF, STEPS, TRAIN, first_ids, scores

from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.directory import last_checkpoint

pytestmark = pytest.mark.long


@pytest.fixture(params=SHAPES, ids=lambda path: path.name.split(".tar")[0])
def shaped(request, tmp_path):
    """Returns the files of an earlier version."""
    return unpack(request.param, tmp_path)


def test_there_are_shapes():
    assert SHAPES


def test_a_dataset_and_a_model_have_their_ids_and_scores(shaped):
    expected = shaped.expected
    assert first_ids(shaped.folder / "data") == {n: expected[n] for n in ("ids", "lengths")}
    half = last_checkpoint(shaped.folder / "run")
    found = scores(half, shaped.folder / "raw/day_1.parquet")
    np.testing.assert_allclose(found, expected["half"], **SCORES)
    config = read_config(half)
    assert config["dataset"]["field tables"] == [0, 0]
    if expected.get("kind") == "widths":
        assert config["dataset"]["embedding dims"] == [3, 3]
        assert [(t["dim"], t["state"]) for t in config["tables"]] == [(3, ["sum"]), (1, ["z", "n"])]


def test_a_training_goes_on(shaped, monkeypatch):
    monkeypatch.chdir(shaped.folder)
    assert last_checkpoint(shaped.folder / "run").name.endswith(str(HALF))
    done = forked.run(
        "dlrm.scripts.main",
        *TRAIN,
        *FURTHER[shaped.expected.get("kind", "attention")],
        "--save_checkpoint_path=run",
        "--resume",
        f"--max_steps={STEPS}",
    )
    assert done.returncode == 0, done.stderr
    found = scores(last_checkpoint(shaped.folder / "run"), shaped.folder / "raw/day_1.parquet")
    np.testing.assert_allclose(found, shaped.expected["whole"], rtol=1e-3, atol=1e-4)
    assert np.abs(np.subtract(found, shaped.expected["half"])).max() > 1e-3


def test_an_export_scores_as_its_checkpoint(shaped):
    torch = pytest.importorskip("torch")
    network = torch.jit.load(shaped.folder / "models/model/1/model.pt")
    ids, lengths = (torch.tensor(shaped.expected[name]) for name in ("ids", "lengths"))
    numbers = torch.zeros(len(lengths), 0)
    assert network(numbers, ids, lengths.int()).isfinite().all()

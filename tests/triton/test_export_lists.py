"""Models with lists are exported and served with the checkpoint's scores."""

import importlib.util
import json

import listed_model
import numpy as np
import pytest
from triton_testing import ask, config_of, export_steps, raw, run_client

import dlrm
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.sources import inputs_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def exported(export, listed, tmp_path_factory):
    """A repository with the model, exported without flags; tests must not change it."""
    return export(listed, tmp_path_factory.mktemp("exported"))


def report_of(repository):
    return json.loads((repository / "model" / "1" / "report.json").read_text())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_platform_agrees_with_the_checkpoint(export, listed, tmp_path, platform):
    repository = export(listed, tmp_path, f"--{platform}")
    report, version = report_of(repository), repository / "model" / "1"
    assert report["rows"] > 400
    assert report["greatest_difference"] < 1e-5
    score = PLATFORMS[platform].open(version)
    test = open_datasets(DataConfig(str(listed.dataset), test_batch_size=99)).test
    inputs = inputs_of(test.batch(3))
    numbers, ids, lengths, weights = inputs.arrays
    found = score(numbers.astype("f4"), ids.astype("i8"), lengths.astype("i4"), weights)
    expected = dlrm.load(listed.checkpoint).logits_of(inputs)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_shapes_have_the_rows_and_nothing_is_batched(exported, listed):
    config = config_of(exported / "model")
    inputs = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["input"]}
    assert inputs == {
        "input__0": ("TYPE_FP32", ["-1", "1"]),
        "input__1": ("TYPE_INT64", ["-1"]),
        "input__2": ("TYPE_INT32", ["-1", "3"]),
        "input__3": ("TYPE_FP32", ["-1"]),
        "raw__0": ("TYPE_UINT8", ["-1", "-1"]),
    }
    assert config["output"][0]["dims"] == ["-1", "1"]
    assert "max_batch_size" not in config
    assert "dynamic_batching" not in config
    assert config["parameters"]["max_rows"] == {"string_value": "4096"}
    facts = json.loads((exported / "model" / "1" / "model.json").read_text())
    assert facts["lists"] == {"weighted": True, "longest": {"1": 4, "2": 20}}
    lengths = np.fromfile(exported / "model" / "warmup" / "lengths of 4096", np.int32)
    np.testing.assert_array_equal(lengths, np.ones(4096 * 3, np.int32))


def test_a_delay_to_batch_requests_is_refused(export, listed, tmp_path):
    with pytest.raises(ValueError, match="--triton-dyn-batching-delay 5.0: expected none"):
        export(listed, tmp_path / "none", "--triton-dyn-batching-delay=5")
    assert not (tmp_path / "none").exists()


def test_a_dataset_without_lists_is_refused(export, listed, trained, tmp_path):
    flags = [f"--dataset={trained.dataset}", "--allow-other-transform"]
    with pytest.raises(ValueError, match="the dataset of another model|expected lists"):
        export(listed, tmp_path / "none", *flags)


@pytest.fixture(scope="module")
def server(export, serve, listed, tmp_path_factory):
    """Serves the model, and an ensemble of its transform and model."""
    if importlib.util.find_spec("pytriton") is None:
        pytest.skip("nvidia-pytriton is not installed")
    directory = tmp_path_factory.mktemp("triton")
    repository = export(listed, directory / "repository")
    export_steps(export, listed, repository)
    with serve(repository, directory / "log") as running:
        yield running


@pytest.fixture
def scores(server):
    """Queries the server; returns its scores."""
    import tritonclient.grpc as grpc

    client = grpc.InferenceServerClient(server.grpc)
    return lambda arrays, model="model": ask(client, arrays, model).as_numpy("output__0")[:, 0]


@pytest.mark.parametrize("model", ["model", "steps_raw"])
def test_raw_rows_get_the_scores_of_the_predictor(scores, listed, model):
    rows = listed.rows[:200]
    found = scores(raw(map(listed_model.text_of, rows)), model)
    expected = dlrm.load(listed.checkpoint).logits(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_client_sends_datasets_and_logs(server, listed, tmp_path, protocol):
    log = tmp_path / "rows.tsv"
    rows = listed.rows[:100]
    log.write_text("".join(f"{r['click']}\t{listed_model.text_of(r)}\n" for r in rows))
    predictor = dlrm.load(listed.checkpoint)
    test = open_datasets(DataConfig(str(listed.dataset), test_batch_size=10_000)).test
    logits = predictor.logits_of(inputs_of(test.batch(0)))
    for source, expected in ((listed.dataset, logits), (log, predictor.logits(rows))):
        flags = [f"--protocol={protocol}", "-u", getattr(server, protocol), "--batch-size=64"]
        flags += ["--input", source, "--output", tmp_path / "scores.npy"]
        done = run_client(*flags)
        assert done.returncode == 0, done.stderr
        found = np.load(tmp_path / "scores.npy")
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

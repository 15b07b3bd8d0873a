"""The main command in this process, on a small dataset."""

import pytest
import torch
from small_dataset import MODEL, RUN, write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Directory of a dataset with train, test and validation."""
    return write_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture
def command(request, tmp_path, monkeypatch, dataset):
    """Runs `dlrm.scripts.main` with the small dataset and model; returns its summary.

    It runs on the test's `device`, or on the CPU if it has none.
    """
    from dlrm.scripts.common import click_command, dlrm_flags

    monkeypatch.chdir(tmp_path)
    named = "device" in request.fixturenames
    device = request.getfixturevalue("device") if named else "cpu"

    def run(*arguments, data=dataset, model=MODEL, training=RUN):
        own = [f"--dataset={data}", f"--base_device={device}"]
        values = dlrm_flags.parse([*own, *model, *training, *arguments])
        torch.set_num_threads(1)  # tests are too small for more threads
        return click_command.run(values)

    return run

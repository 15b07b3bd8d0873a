"""Commands that write models, for `test_command_kills`; each call runs in a fork, see killing.py.

All forks have one process id, as containers do that are restarted.
"""

import os

from dlrm.deployment import export
from dlrm.scripts.tune import main as tune_main
from dlrm.serving.loading import load
from dlrm.serving.network.recalibration import of_sampling_rate, write_recalibrated
from dlrm.train.checkpoints.checkpoint import Checkpoint


def recalibrate(checkpoint, folder):
    """Writes a recalibrated checkpoint, unless an earlier call has."""
    os.getpid = lambda: 1
    if not (folder / "made").exists():
        write_recalibrated(Checkpoint.open(checkpoint).path, of_sampling_rate(0.5), folder / "made")


def save(checkpoint, folder):
    """Saves a model over an earlier one."""
    os.getpid = lambda: 1
    load(checkpoint).save(folder / "made", overwrite=True)


def update(checkpoint, folder):
    """Adds a version to an exported model."""
    os.getpid = lambda: 1
    repository = folder / "repository"
    words = [f"--checkpoint={checkpoint}", f"--save-dir={repository}", "--ts-trace", "--no-raw"]
    update = ["--update"] * (repository / "model").exists()
    export.run(export.parse([*words, *update]))


def search(dataset, folder):
    """Searches settings, or resumes the search."""
    os.getpid = lambda: 1
    (folder / "space.yaml").write_text(
        "lr: [0.01, 0.02]\nembedding_dim: 2\ntop_mlp_sizes: [[4, 1]]"
    )
    words = {"dataset": dataset, "output": folder / "made", "space": folder / "space.yaml"}
    words |= {"processes": 1, "trials": 2, "rungs": 1}
    assert tune_main([f"--{name}={value}" for name, value in words.items()]) == 0

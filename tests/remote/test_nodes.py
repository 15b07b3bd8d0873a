"""Several nodes, simulated on one machine by ranks with caches of their own."""

import os
import socket

import forked
import pytest
import trained_model

from dlrm.remote.publish import publish
from dlrm.train.checkpoints.directory import find_checkpoint

FLAGS = [*trained_model.MODEL, *trained_model.TRAINING]


def train(folder, *flags):
    """Trains with a rank on each of two nodes; returns the output and the exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        own["XDG_CACHE_HOME"] = str(folder / f"node{rank}")
        options = {"stdout": folder / "output", "cwd": folder, "env": os.environ | own}
        processes.append(forked.start("dlrm.scripts.main", *FLAGS, *flags, **options))
    for process in processes:
        process.join(120)
    return (folder / "output").read_text(), [process.exitcode for process in processes]


@pytest.mark.parametrize("limit", [[], ["--cache_gib=0.004"]], ids=["fetched", "streamed"])
def test_nodes_with_caches_of_their_own_train_on_a_dataset_at_a_uri(
    limit, trained, bucket, tmp_path
):
    uri = bucket.below("dataset")
    publish(trained.dataset, uri, None)
    where = [f"--dataset={uri}", f"--save_checkpoint_path={tmp_path}/run"]
    said, codes = train(tmp_path, *where, *limit)
    assert codes == [0, 0], said
    assert list(tmp_path.glob("run/step-*/manifest.json"))
    assert all(any((tmp_path / f"node{rank}").iterdir()) for rank in range(2))


def test_nodes_with_caches_of_their_own_load_a_checkpoint_at_a_uri(trained, bucket, tmp_path):
    uri, step = bucket.below("model"), find_checkpoint(trained.checkpoint)
    publish(step, uri.below(step.name), None)
    where = [f"--dataset={trained.dataset}", f"--load_checkpoint_path={uri}"]
    said, codes = train(tmp_path, *where, "--mode=test")
    assert codes == [0, 0], said
    assert f"weights from {uri.below(step.name)}" in said


def test_nodes_without_a_common_folder_for_checkpoints_are_refused(trained, bucket, tmp_path):
    where = [f"--dataset={trained.dataset}", f"--save_checkpoint_path={bucket.below('run')}"]
    said, codes = train(tmp_path, *where)
    assert codes == [1, 1]
    assert "is not the same directory as on rank 0; all nodes need one" in said
    assert "--cache_dir" in said

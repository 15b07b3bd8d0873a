"""Several nodes, simulated on one machine by ranks with caches of their own."""

import os
import re
import shutil
import socket

import forked
import pytest
import trained_model

from dlrm.manifest import write_manifest
from dlrm.remote.publish import publish
from dlrm.train.checkpoints.checkpoint import Checkpoint

FLAGS = [*trained_model.MODEL, *trained_model.TRAINING]


def train(folder, *flags, own=None):
    """Trains with a rank on each of two nodes, which have their own working folder and cache.

    Args:
        folder: has `output`, and the folder of each node.
        own: rank -> further flags.

    Returns:
        The output and the exit codes.
    """
    (folder / "output").unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        place = folder / f"node{rank}"
        place.mkdir(exist_ok=True)
        given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given |= {"OMP_NUM_THREADS": 1, "XDG_CACHE_HOME": place / "cache"}
        env = os.environ | {name: str(value) for name, value in given.items()}
        words = [*FLAGS, *flags, *(own or {}).get(rank, [])]
        options = {"stdout": folder / "output", "cwd": place, "env": env}
        processes.append(forked.start("dlrm.scripts.main", *words, **options))
    for process in processes:
        process.join(120)
    return (folder / "output").read_text(), [process.exitcode for process in processes]


def test_nodes_with_caches_of_their_own_train_on_a_dataset_at_a_uri(trained, bucket, tmp_path):
    uri = bucket.below("dataset")
    publish(trained.dataset, uri, None)
    where = [f"--dataset={uri}", f"--save_checkpoint_path={tmp_path}/run"]
    said, codes = train(tmp_path, *where)
    assert codes == [0, 0], said
    assert list(tmp_path.glob("run/step-*/manifest.json"))
    assert all(any((tmp_path / f"node{rank}/cache").iterdir()) for rank in range(2))


def test_nodes_with_caches_of_their_own_load_a_checkpoint_at_a_uri(trained, bucket, tmp_path):
    uri, step = bucket.below("model"), Checkpoint.open(trained.checkpoint).path
    publish(step, uri.below(step.name), None)
    where = [f"--dataset={trained.dataset}", f"--load_checkpoint_path={uri}"]
    said, codes = train(tmp_path, *where, "--mode=test")
    assert codes == [0, 0], said
    assert f"weights from {uri.below(step.name)}" in said


def test_hosts_save_where_all_see_one_folder(trained, bucket, tmp_path):
    where = [f"--dataset={trained.dataset}", "--save_checkpoint_path=run"]
    said, codes = train(tmp_path, *where)
    assert codes == [1, 1]
    assert f"error: rank 1: {tmp_path}/node1/run: expected the folder of rank 0" in said
    where[1] = f"--save_checkpoint_path={bucket.below('run')}"
    said, codes = train(tmp_path, *where)
    assert codes == [1, 1]
    assert f"error: rank 1: {bucket.below('run')}: expected the folder of rank 0" in said
    where.append(f"--cache_dir={tmp_path}/cache")
    said, codes = train(tmp_path, *where, "--max_steps=20")
    assert codes == [0, 0], said
    said, codes = train(tmp_path, *where, "--resume")
    assert codes == [0, 0], said
    assert f"resumed from {bucket.below('run')}" in said


@pytest.fixture(scope="module")
def other_dataset(trained, tmp_path_factory):
    """A dataset of the same rows whose manifest differs."""
    other = shutil.copytree(trained.dataset, tmp_path_factory.mktemp("other") / "dataset")
    write_manifest(other, "dataset", rows=dict(trained_model.ROWS), note="prepared later")
    return other


def test_hosts_with_other_copies_are_refused(trained, other_dataset, tmp_path):
    said, codes = train(
        tmp_path, own={0: [f"--dataset={trained.dataset}"], 1: [f"--dataset={other_dataset}"]}
    )
    assert codes == [1, 1]
    assert "error: the ranks of a run must agree:\n  SHA-256 of the dataset's manifest" in said
    (tmp_path / "node0").mkdir(exist_ok=True)
    shutil.copytree(Checkpoint.open(trained.checkpoint).path, tmp_path / "node0/model")
    where = [f"--dataset={trained.dataset}", "--load_checkpoint_path=model", "--mode=test"]
    said, codes = train(tmp_path, *where)
    assert codes == [1, 1]
    assert re.search("SHA-256 of the checkpoint's manifest.json: '.*' on rank 0, 'none' on 1", said)

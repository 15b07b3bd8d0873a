"""Several nodes, simulated on one machine by ranks with caches of their own."""

import os
import re
import shutil
import socket
import time

import forked
import pytest
import trained_model

from dlrm.distributed import OtherRankError
from dlrm.manifest import read_manifest, write_manifest
from dlrm.remote.publish import publish
from dlrm.session.nodes import check_data, clock_notes
from dlrm.train.checkpoints.checkpoint import read_progress
from dlrm.train.checkpoints.directory import all_checkpoints, find_checkpoint, last_checkpoint

FLAGS = [*trained_model.MODEL, *trained_model.TRAINING]


def start(folder, *flags, nodes=(1, 1), module="dlrm.scripts.main", own=None, clicks=True):
    """Starts a rank or several on each node; a node has its own working folder and cache.

    Args:
        folder: has `output`, and the folder of each node.
        nodes: number of ranks of each node.
        own: rank -> further flags.
        clicks: whether the flags of a click model come first.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes, places = [], [(n, local) for n, count in enumerate(nodes) for local in range(count)]
    for rank, (node, local) in enumerate(places):
        place = folder / f"node{node}"
        place.mkdir(exist_ok=True)
        given = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": local}
        given |= {"LOCAL_WORLD_SIZE": nodes[node], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given |= {"OMP_NUM_THREADS": 1, "XDG_CACHE_HOME": place / "cache"}
        env = os.environ | {name: str(value) for name, value in given.items()}
        words = [*(FLAGS if clicks else []), *flags, *(own or {}).get(rank, [])]
        options = {"stdout": folder / "output", "cwd": place, "env": env}
        processes.append(forked.start(module, *words, **options))
    return processes


def train(folder, *flags, **options):
    """Trains on several nodes; returns the output and the exit codes."""
    (folder / "output").unlink(missing_ok=True)
    processes = start(folder, *flags, **options)
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
    uri, step = bucket.below("model"), find_checkpoint(trained.checkpoint)
    publish(step, uri.below(step.name), None)
    where = [f"--dataset={trained.dataset}", f"--load_checkpoint_path={uri}"]
    said, codes = train(tmp_path, *where, "--mode=test")
    assert codes == [0, 0], said
    assert f"weights from {uri.below(step.name)}" in said


RUN = ["--save_checkpoint_path=run", "--checkpoint_freq=20", "--keep_checkpoints=9"]


def weights(run):
    """Returns the files of the last checkpoint but the states of generators, and its name."""
    last = last_checkpoint(run)
    files = [path for path in last.rglob("*") if path.suffix in (".bin", ".safetensors")]
    shown = {path.relative_to(last): path.read_bytes() for path in files if "rng" not in path.name}
    return last.name, shown


def losses(run):
    return [entry["loss"] for entry in read_progress(last_checkpoint(run))["curve"]]


@pytest.fixture(scope="module")
def on_one_node(trained, tmp_path_factory):
    """The run of four ranks on one node."""
    folder = tmp_path_factory.mktemp("one")
    said, codes = train(folder, f"--dataset={trained.dataset}", *RUN, nodes=(4,))
    assert codes == [0] * 4, said
    return folder / "node0/run"


@pytest.mark.slow
def test_nodes_without_a_common_folder_gather_their_checkpoints(trained, on_one_node, tmp_path):
    where = [f"--dataset={trained.dataset}", *RUN]
    said, codes = train(tmp_path, *where, nodes=(2, 2))
    assert codes == [0] * 4, said
    assert "ranks 2, 3 on other nodes do not see" in said
    run = tmp_path / "node0/run"
    assert weights(run) == weights(on_one_node)
    assert losses(run) == losses(on_one_node)
    assert [path.name for path in all_checkpoints(run)] == [
        path.name for path in all_checkpoints(on_one_node)
    ]
    for path in all_checkpoints(run):
        read_manifest(path, "checkpoint", check_crc=True)
    assert not [*(tmp_path / "node1/run").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(4,), (2, 2), (1, 3), (1, 1, 1, 1), (2,)], ids=str)
def test_any_number_of_nodes_resumes(trained, on_one_node, tmp_path, nodes):
    run = tmp_path / "node0/run"
    shutil.copytree(on_one_node, run)
    for path in all_checkpoints(run)[1:]:
        shutil.rmtree(path)
    where = [f"--dataset={trained.dataset}", *RUN, "--resume", "--async_checkpoint"]
    said, codes = train(tmp_path, *where, nodes=nodes)
    assert codes == [0] * sum(nodes), said
    assert "resumed from" in said
    if sum(nodes) == 4:
        assert weights(run) == weights(on_one_node)
    else:  # sums in another order
        assert losses(run) == pytest.approx(losses(on_one_node), rel=1e-4)
    for node in range(1, len(nodes)):
        assert not [*(tmp_path / f"node{node}/run").iterdir()]


@pytest.mark.slow
def test_nodes_train_from_and_test_a_checkpoint_of_the_first(trained, tmp_path):
    (tmp_path / "node0").mkdir()
    model = find_checkpoint(trained.checkpoint)
    shutil.copytree(model.parent, tmp_path / "node0/model")
    where = [f"--dataset={trained.dataset}", "--load_checkpoint_path=model"]
    seen_by_all = f"--save_checkpoint_path={tmp_path}/run"
    said, codes = train(tmp_path, *where, seen_by_all, "--epochs=1", nodes=(1, 2))
    assert codes == [0] * 3, said
    assert not [*tmp_path.glob("run/.node*")]
    assert re.search(f"weights from .*model/{model.name}", said), said
    where[1] = "--continue_from=model"
    said, codes = train(tmp_path, *where, *RUN, "--epochs=1", nodes=(1, 2))
    assert codes == [0] * 3, said
    assert all_checkpoints(tmp_path / "node0/run")
    where[1] = "--load_checkpoint_path=model"
    tested, codes = train(tmp_path, *where, "--mode=test", nodes=(1, 2))
    assert codes == [0] * 3, tested
    alone, codes = train(tmp_path, *where, "--mode=test", nodes=(1,))
    assert codes == [0], alone
    auc = re.compile(r"\bauc : ([\d.]+)")
    assert auc.findall(tested) == auc.findall(alone) != []


@pytest.mark.slow
def test_a_node_learns_from_a_teacher_of_the_first(trained, tmp_path):
    (tmp_path / "node0").mkdir()
    shutil.copytree(find_checkpoint(trained.checkpoint).parent, tmp_path / "node0/teacher")
    where = [f"--dataset={trained.dataset}", "--distill=teacher", "--max_steps=4"]
    said, codes = train(tmp_path, *where, *RUN, nodes=(1, 1))
    assert codes == [0, 0], said
    assert "labels are mixed with the probabilities of teacher/step-" in said


@pytest.mark.slow
def test_nodes_with_caches_of_their_own_save_at_a_uri(trained, bucket, tmp_path):
    where = [f"--dataset={trained.dataset}", f"--save_checkpoint_path={bucket.below('run')}"]
    said, codes = train(tmp_path, *where)
    assert codes == [0, 0], said
    said, codes = train(tmp_path, *where, "--resume")
    assert codes == [0, 0], said
    assert f"resumed from {bucket.below('run')}" in said


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(trained, on_one_node, tmp_path):
    where = [f"--dataset={trained.dataset}", *RUN, "--resume"]
    processes = start(tmp_path, *where, nodes=(2, 2))
    while not (found := [*tmp_path.glob("node0/run/step-*/manifest.json")]):
        time.sleep(0.01)
    processes[3].kill()
    for process in processes:
        process.join(120)
    assert all(process.exitcode for process in processes), (tmp_path / "output").read_text()
    assert found[0].exists()
    said, codes = train(tmp_path, *where, nodes=(2, 2))
    assert codes == [0] * 4, said
    assert "resumed from" in said
    assert weights(tmp_path / "node0/run") == weights(on_one_node)
    assert not [*(tmp_path / "node1/run").iterdir()], "what the killed ranks left is removed"


NETWORK = [
    *(
        "--mode=train",
        "--model=efficientnet_b0",
        "--image_size=32",
        "--num_classes=7",
        "--data=generated",
    ),
    *("--test_batch_size=8", "--synthetic_dataset_num_entries=16", "--batch_size=2", "--epochs=2"),
    *(
        "--norm=group",
        "--lr=0.001",
        "--base_device=cpu",
        "--weight_avg_exp=0.5",
        "--ckpts_per_epoch=2",
        *RUN[:1],
    ),
]


@pytest.mark.slow
def test_image_networks_are_gathered_and_averaged_alike(tmp_path):
    found = []
    for nodes in ((2,), (1, 1)):
        place = tmp_path / str(len(nodes))
        place.mkdir()
        options = {"nodes": nodes, "module": "dlrm.scripts.cnn", "clicks": False}
        for more in ([], ["--resume"]):
            said, codes = train(place, *NETWORK, *more, **options)
            assert codes == [0, 0], said
        (average,) = place.glob("node0/run/averaged-*/dense.safetensors")
        found.append((weights(place / "node0/run"), average.read_bytes()))
    assert found[0] == found[1]
    assert not [*place.glob("node1/run/*")]


@pytest.mark.slow
def test_checkpoints_on_another_node_alone_are_named(trained, on_one_node, tmp_path):
    (tmp_path / "node1").mkdir()
    shutil.copytree(on_one_node, tmp_path / "node1/run")
    said, codes = train(tmp_path, f"--dataset={trained.dataset}", *RUN, "--resume")
    assert codes == [1, 1]
    assert "error: rank 1: run/" in said or "node1/run/step-" in said
    assert "has none: start this node as the first" in said


@pytest.fixture(scope="module")
def other_dataset(trained, tmp_path_factory):
    """A dataset of the same rows whose manifest differs."""
    other = shutil.copytree(trained.dataset, tmp_path_factory.mktemp("other") / "dataset")
    write_manifest(other, "dataset", rows=dict(trained_model.ROWS), note="prepared later")
    return other


@pytest.mark.slow
def test_nodes_with_different_datasets_are_refused(trained, other_dataset, tmp_path):
    own = {0: [f"--dataset={trained.dataset}"], 1: [f"--dataset={other_dataset}"]}
    said, codes = train(tmp_path, own=own)
    assert codes == [1, 1]
    assert "error: the ranks of a run must read copies of one dataset" in said
    assert f"--dataset {other_dataset}: manifest.json with SHA-256" in said


def on_hosts(world, function, *arguments, clock=0.0):
    """Calls a function on a host of its own for each rank, with a clock of its own."""
    now = time.time() + world.rank * clock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{world.rank}")
        patch.setattr(time, "time", lambda: now)
        return function(*arguments, world)


def compared(world, dataset):
    return on_hosts(world, check_data, {"dataset": str(dataset), "test_dataset": None})


def test_a_node_with_another_dataset_or_a_part_of_one_is_named(
    ranks, trained, other_dataset, tmp_path
):
    part = shutil.copytree(trained.dataset, tmp_path / "part")
    (part / "manifest.json").unlink()
    for theirs, what in (
        (other_dataset, "manifest.json with SHA-256 "),
        (part, "no manifest.json"),
    ):
        first, second = ranks(2).call(compared, [(trained.dataset,), (theirs,)])
        assert isinstance(second, OtherRankError)
        assert f"--dataset {theirs}: {what}" in str(first)
        assert " on rank 1 (host1), manifest.json with SHA-256 " in str(first)
    assert ranks(2).call(compared, [(trained.dataset,)] * 2) == [None, None]


def noted(world, clock):
    return on_hosts(world, clock_notes, clock=clock)


def test_a_clock_that_differs_is_named(ranks):
    assert ranks(2).call(noted, [(10.0,)] * 2) == [[], []]
    for notes in ranks(2).call(noted, [(-200.0,)] * 2):
        (note,) = notes
        assert note.startswith("note: the clock of rank 1 (host1) is 200 s behind that of rank 0")

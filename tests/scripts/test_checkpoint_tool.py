"""`dlrm.scripts.checkpoint` shows and converts; NVIDIA's model is `nvidia_model`."""

import json
import math
import os
from functools import partial

import forked
import numpy as np
import pytest
import torch
from compared_checkpoints import differing
from nvidia_model import NvidiaModel, scored_by
from sklearn.metrics import roc_auc_score
from small_dataset import NUM_NUMERICAL, TABLE_SIZES

from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.scripts.checkpoint import describe, describe_run, statistics
from dlrm.serving.loading import load_model
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.nvidia import write_nvidia
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.checkpoints.tables import SavedRows

checkpoint_tool = partial(forked.call, "dlrm.scripts.checkpoint")
NATURAL, BY_SIZE, MAPPED = [0, 1, 2, 3], [1, 3, 0, 2], [3, 0, 2, 1]
FLAGS_2020 = {"loss_scale": 1024, "interaction_op": "dot", "lr": 28.0, "hash_indices": False}
FLAGS_2020_DISTRIBUTED = FLAGS_2020 | {"bottom_features_ordered": False, "backend": "nccl"}
FLAGS_2021 = {"interaction_op": "cuda_dot", "cuda_graphs": True, "bottom_features_ordered": False}


def mapping(*tables_by_rank):
    vectors = [len(tables) + (rank == 0) for rank, tables in enumerate(tables_by_rank)]
    return {"bottom_mlp": 0, "embedding": list(tables_by_rank), "vectors_per_gpu": vectors}


def data(**more):
    return {"epoch": 1, "step": 77, **more}


def inputs(rows=9):
    random = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, size, (rows,), generator=random) for size in TABLE_SIZES]
    return torch.randn(rows, NUM_NUMERICAL, generator=random), torch.stack(ids, dim=1)


def save_ours(path, seed=1, interaction="cuda_dot", top=(16, 5, 1), change=None, step=5):
    """Saves a model of ours with its flags and progress."""
    config = DLRMConfig(TABLE_SIZES, NUM_NUMERICAL, 4, (8, 4), top, interaction)
    model = DLRM(config, seed=seed)
    if change:
        with torch.no_grad():
            change(model)
    flags = {
        "embedding_dim": 4,
        "bottom_mlp_sizes": [8, 4],
        "top_mlp_sizes": list(top),
        "interaction_op": interaction,
        "hash_indices": False,
        "max_table_size": None,
        "dataset": "somewhere",
    }
    saved = {"flags": flags, "dataset": {"table sizes": list(TABLE_SIZES)}}
    history = [
        {"step": 4, "auc": 0.75},
        {"step": 5, "loss": 0.3, "lr": 1.0},
        {"step": 5, "auc": 0.7},
    ]
    progress = {"step": step, "best": {"auc": 0.75, "step": 4, "epoch": 1.5}, "history": history}
    Checkpoint.save(path, Parameters(model, model.embeddings.table_parameters()), saved, progress)
    return model


# What NVIDIA's versions save: the order of a run, its padding, flags and data
DIRECTORIES = {
    "2020, one GPU": (NATURAL, 1, FLAGS_2020, data()),
    "2020, two GPUs": (
        MAPPED,
        1,
        FLAGS_2020_DISTRIBUTED,
        data(device_mapping=mapping([3, 0], [2, 1])),
    ),
    "2020, two GPUs, ordered": (
        NATURAL,
        1,
        FLAGS_2020_DISTRIBUTED | {"bottom_features_ordered": True},
        data(device_mapping=mapping([3, 0], [2, 1])),
    ),
    "2021, one GPU": (BY_SIZE, 2, FLAGS_2021, data(device_mapping=mapping(BY_SIZE))),
    "2021, one GPU, ordered in vain": (
        BY_SIZE,
        2,
        FLAGS_2021 | {"bottom_features_ordered": True},
        data(device_mapping=mapping(BY_SIZE)),
    ),
    "2021, many GPUs": (
        MAPPED,
        2,
        FLAGS_2021,
        data(device_mapping=mapping([], [3], [0], [2], [1])),
    ),
    "2021, many GPUs, ordered": (
        NATURAL,
        2,
        FLAGS_2021 | {"bottom_features_ordered": True},
        data(device_mapping=mapping([], [3], [0], [2], [1])),
    ),
}


@pytest.mark.parametrize("interaction", ["dot", "cat"])
@pytest.mark.parametrize("which", DIRECTORIES)
def test_what_nvidia_saved_gives_the_same_logits_and_comes_back_bit_for_bit(
    tmp_path, which, interaction
):
    order, padding, flags, saved_data = DIRECTORIES[which]
    flags = flags | ({"interaction_op": "cat"} if interaction == "cat" else {})
    theirs = NvidiaModel(order, TABLE_SIZES, interaction, padding)
    theirs.save(tmp_path / "theirs", flags, saved_data)
    Checkpoint(tmp_path / "theirs").copy(tmp_path / "ours")
    ours = load_model(tmp_path / "ours")
    torch.testing.assert_close(ours(*inputs()), theirs(*inputs()))
    write_nvidia(Checkpoint(tmp_path / "ours"), tmp_path / "back")
    for file in sorted((tmp_path / "theirs").iterdir()):
        back = tmp_path / "back" / file.name
        if file.suffix == ".bin":
            assert file.read_bytes() == back.read_bytes()
        elif file.name != "metadata.pt":
            one, other = (torch.load(f, weights_only=True) for f in (file, back))
            torch.testing.assert_close(
                {k: [*v] for k, v in one.items()},
                {k: [*v] for k, v in other.items()},
                rtol=0,
                atol=0,
            )
    again = NvidiaModel.load(tmp_path / "back", order, interaction, padding)
    assert torch.equal(again(*inputs()), theirs(*inputs()))


@pytest.mark.parametrize(
    ("interaction", "padding", "top"),
    [("cuda_dot", "one", (1,)), ("dot", "multiple_of_8", (16, 5, 1)), ("cat", "one", (16, 5, 1))],
)
@pytest.mark.parametrize(
    ("feature_order", "order"), [("natural", NATURAL), ("size_sorted", BY_SIZE), (None, BY_SIZE)]
)
def test_ours_gives_nvidia_the_same_logits_and_comes_back_bit_for_bit(
    tmp_path, feature_order, order, interaction, padding, top
):
    model = save_ours(tmp_path / "ours", interaction=interaction, top=top)
    saved = Checkpoint(tmp_path / "ours")
    assert write_nvidia(saved, tmp_path / "theirs", feature_order, padding) == order
    kind = "cat" if interaction == "cat" else "dot"
    zeros = 1 if padding == "one" else 2
    theirs = NvidiaModel.load(tmp_path / "theirs", order, kind, zeros)
    torch.testing.assert_close(theirs(*inputs()), model(*inputs()).detach())
    Checkpoint(tmp_path / "theirs").copy(tmp_path / "back")
    assert not differing(tmp_path / "ours", tmp_path / "back")
    for file in ("config.json", "progress.json", "dense.safetensors", "tables/2.bin"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "back" / file).read_bytes()


def test_what_nvidia_does_not_have_is_refused(tmp_path):
    save_ours(tmp_path / "ours")
    for name, value in {
        "interaction_op": "sum",
        "wide": True,
        "batch_norm": True,
        "ema_decay": 0.0,
    }.items():
        saved = Checkpoint(tmp_path / "ours")
        saved.config["flags"][name] = value
        with pytest.raises(ValueError, match=f"ours: --{name}"):
            write_nvidia(saved, tmp_path / "theirs")
    for part in ("numerical_embedding.edges", "interact.weights", "adapters.0"):
        saved = Checkpoint(tmp_path / "ours")
        saved.dense[part] = torch.zeros(1)
        with pytest.raises(ValueError, match=rf"expected a DLRM, .* {part.partition('.')[0]}"):
            write_nvidia(saved, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_converted_model_tests_as_nvidia_s_does(command, dataset, tmp_path):
    order, padding, flags, saved_data = DIRECTORIES["2021, one GPU"]
    theirs = NvidiaModel(order, TABLE_SIZES, "dot", padding)
    theirs.save(tmp_path / "theirs", flags, saved_data)
    done = checkpoint_tool(
        "convert", "--to=dlrm", "--output", tmp_path / "ours", tmp_path / "theirs"
    )
    assert done.returncode == 0, done.stderr
    assert "feature order: [1, 3, 0, 2], the device_mapping in metadata.pt" in done.stdout
    assert "no optimizer state" in done.stdout
    tested = command("--mode=test", f"--load_checkpoint_path={tmp_path / 'ours'}", model=[])
    assert tested["auc"] == pytest.approx(roc_auc_score(*scored_by(theirs, dataset)), abs=1e-5)


def test_an_order_that_cannot_be_known_is_asked_for(tmp_path):
    NvidiaModel(BY_SIZE, TABLE_SIZES, "dot", 2).save(tmp_path / "theirs", FLAGS_2021, data())
    words = ("convert", "--to=dlrm", "--output", tmp_path / "ours", tmp_path / "theirs")
    refused = checkpoint_tool(*words)
    assert refused.returncode == 2
    assert "--feature_order natural or size_sorted" in refused.stderr
    assert not (tmp_path / "ours").exists()
    assert checkpoint_tool(*words, "--feature_order=size_sorted").returncode == 0
    theirs = NvidiaModel(BY_SIZE, TABLE_SIZES, "dot", 2)
    torch.testing.assert_close(load_model(tmp_path / "ours")(*inputs()), theirs(*inputs()))


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_not_run(tmp_path):
    theirs = NvidiaModel(NATURAL, TABLE_SIZES)
    theirs.save(tmp_path / "theirs", FLAGS_2020 | {"x": Harmful(tmp_path / "harm")}, data())
    words = ("convert", "--to=dlrm", "--output", tmp_path / "ours", tmp_path / "theirs")
    refused = checkpoint_tool(*words)
    assert refused.returncode == 2
    assert "metadata.pt: has code, posix.mkdir, which is not run" in refused.stderr
    assert checkpoint_tool(*words, "--feature_order=natural").returncode == 0  # the rest is good
    torch.testing.assert_close(load_model(tmp_path / "ours")(*inputs()), theirs(*inputs()))
    torch.save(Harmful(tmp_path / "harm"), tmp_path / "theirs" / "top_model.mlp.pt")
    with pytest.raises(ValueError, match="top_model.mlp.pt: has code"):
        describe(tmp_path / "theirs", feature_order="natural")
    assert not (tmp_path / "harm").exists()


def drop_the_last_layer(path):
    (path / "top_model.out.pt").unlink()


def cut_a_table(path):
    os.truncate(path / "bottom_model.embeddings.1.bin", 100)


def drop_a_table(path):
    (path / "bottom_model.embeddings.1.bin").unlink()


def cut_a_layer(path):
    os.truncate(path / "bottom_model.mlp.pt", 300)


def widen_the_top(path):
    layers = torch.load(path / "top_model.mlp.pt", weights_only=True)
    layers["weights"][0] = torch.zeros(16, 33)
    torch.save(layers, path / "top_model.mlp.pt")


def drop_all_tables(path):
    for file in path.glob("*.bin"):
        file.unlink()


def with_file(name, **content):
    """Returns a damage: another content of a file of torch."""
    return lambda path: torch.save(content, path / name)


def layers(name, weights, biases):
    return with_file(name, weights=[*map(torch.zeros, weights)], biases=[*map(torch.zeros, biases)])


BOTTOM, LAST, SHAPE = "bottom_model.mlp.pt", "top_model.out.pt", "embeddings.1.meta.pt"
ONES, OTHER = torch.ones(1, 7), data(device_mapping=mapping([0, 7]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_the_last_layer, "top_model.out.pt: no such file"),
        (cut_a_table, "embeddings.1.bin: expected 3200 bytes, 200 rows of 4 float32, got 100"),
        (drop_a_table, "embeddings.1.bin: missing, though there are 3 tables"),
        (cut_a_layer, "bottom_model.mlp.pt: damaged"),
        (widen_the_top, "has 33 inputs; expected 14 and 1 or 2 of padding"),
        (layers(BOTTOM, [(8, 3)], []), f"{BOTTOM}: expected lists of weights and biases"),
        (layers(BOTTOM, [], []), f"{BOTTOM}: no layers"),
        (layers(BOTTOM, [(8, 3)], [5]), rf"{BOTTOM}: .*a weight \[8, 3\] with a bias \[5\]"),
        (with_file(LAST, weight=ONES), f"{LAST}: expected a layer, got KeyError"),
        (with_file(LAST, weight=ONES[0], bias=ONES[0]), rf"{LAST}: .*a weight \[7\]"),
        (
            with_file(LAST, weight=ONES, bias=ONES[:, 0]),
            r"theirs: a layer \[1, 7\] after one of 5",
        ),
        (drop_all_tables, r"no bottom_model.embeddings.<i>.bin"),
        (with_file(SHAPE), f"{SHAPE}: expected a shape of two sizes, got KeyError"),
        (with_file(SHAPE, shape=[200, 4, 1]), f"{SHAPE}: expected a shape of two sizes, got Value"),
        (
            with_file(SHAPE, shape=[160, 5]),
            f"{SHAPE}: rows of 5, but the bottom MLP .* vectors of 4",
        ),
        (with_file("metadata.pt", data=OTHER), "metadata.pt: device_mapping .* is not of 4 tables"),
        (
            lambda path: torch.save([1], path / "metadata.pt"),
            "metadata.pt: expected a dict, .*--feat",
        ),
    ],
)
def test_what_is_wrong_with_a_directory_of_nvidia_is_named(tmp_path, damage, message):
    NvidiaModel(NATURAL, TABLE_SIZES).save(tmp_path / "theirs", FLAGS_2020, data())
    damage(tmp_path / "theirs")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Checkpoint(tmp_path / "theirs").load(Parameters(torch.nn.Linear(1, 1)))


def test_an_order_that_is_asked_for_is_found_or_refused(tmp_path):
    theirs = NvidiaModel(NATURAL, sorted(TABLE_SIZES, reverse=True))
    theirs.save(tmp_path / "theirs", {"lr": torch.tensor([0.5])}, data())
    saved = Checkpoint(tmp_path / "theirs")
    assert saved.notes["feature order"] == "[0, 1, 2, 3], natural, which is also by size"
    assert saved.config["flags"]["lr"] == [0.5]
    with pytest.raises(ValueError, match=r"metadata\.pt: has no device_mapping"):
        describe(tmp_path / "theirs", feature_order="device_mapping")
    with pytest.raises(ValueError, match="--feature_order device_mapping: expected natural or siz"):
        write_nvidia(saved, tmp_path / "other", "device_mapping")
    theirs.save(tmp_path / "mapped", FLAGS_2020, data(device_mapping=mapping([3, 0], [2, 1])))
    saved = Checkpoint(tmp_path / "mapped", "device_mapping")
    assert saved.notes["feature order"] == f"{MAPPED}, the device_mapping, as asked for"


def test_inspect_shows_a_checkpoint(tmp_path):
    def spoil(model):
        model.embeddings.weight[3, 1] = math.nan
        model.embeddings.weight[TABLE_SIZES[0]] = torch.tensor([3.0, 0.0, 4.0, 0.0])
        model.output.bias[0] = -math.inf

    save_ours(tmp_path / "c", change=spoil)
    done = checkpoint_tool("inspect", tmp_path / "c", "--json", "--check")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == 5
    assert found["metrics"] == {"auc": 0.7}
    assert found["best_so_far"] == {"step": 4, "epoch": 1.5, "metrics": {"auc": 0.75}}
    assert found["architecture"]["num_numerical_features"] == NUM_NUMERICAL
    assert found["architecture"]["top_mlp_sizes"] == [16, 5, 1]
    assert [table["rows"] for table in found["tables"]] == list(TABLE_SIZES)
    assert [table["num_nan"] for table in found["tables"]] == [1, 0, 0, 0]
    assert found["tables"][1]["norm_max"] == 5
    assert found["tables"][1]["bytes"] == TABLE_SIZES[1] * 16
    assert found["dense"]["output.bias"]["num_inf"] == 1
    assert found["dense"]["top_mlp.0.weight"]["shape"] == [16, 16]
    shown = checkpoint_tool("inspect", tmp_path / "c").stdout
    assert "values that are NaN or infinite: 2" in shown
    assert (
        "norm_mean"
        not in json.loads(
            checkpoint_tool("inspect", tmp_path / "c", "--json", "--noweights").stdout
        )["tables"][0]
    )


def test_inspect_lists_a_run_and_its_best(tmp_path):
    for step in (3, 4, 5):
        save_ours(tmp_path / f"step-{step:09d}", step=step)
    found = describe_run(tmp_path)["checkpoints"]
    assert [(c["name"], c["best"], c["metrics"]) for c in found] == [
        ("step-000000003", False, {}),
        ("step-000000004", True, {"auc": 0.75}),
        ("step-000000005", False, {"auc": 0.7}),
    ]
    lines = checkpoint_tool("inspect", tmp_path).stdout.splitlines()[1:]
    for line, metrics in zip(
        lines, ("not tested at", "auc 0.750000  <- best", "auc 0.7"), strict=True
    ):
        assert metrics in line


def test_a_flipped_bit_is_found_by_whatever_reads_the_file(tmp_path):
    save_ours(tmp_path / "c")
    file = tmp_path / "c" / "tables" / "1.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert (
        checkpoint_tool("inspect", "--noweights", tmp_path / "c").returncode == 0
    )  # reads no table
    for words in (
        ("inspect",),
        ("inspect", "--noweights", "--check"),
        ("convert", "--to=nvidia", f"--output={tmp_path / 'n'}"),
    ):
        done = checkpoint_tool(*words, tmp_path / "c")
        assert done.returncode == 2
        assert f"{file}: expected CRC-32" in done.stderr
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "command: expected a value, got none"),
        (["list", "x"], "expected one of inspect, convert, got list"),
        (["inspect", "a", "b"], "expected command and directory only, got ['inspect', 'a', 'b']"),
        (["inspect", "nowhere"], "nowhere: no such directory"),
        (["inspect", "."], "no checkpoint here"),
        (["inspect", ".", "--to=nvidia"], "--to: means nothing to inspect"),
        (["convert", "."], "expected --to nvidia or dlrm and --output DIR"),
    ],
)
def test_mistakes_end_with_2_and_a_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    done = checkpoint_tool(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_other_models_can_be_looked_at_but_not_converted(tmp_path):
    other = torch.nn.Linear(3, 2)
    Checkpoint.save(tmp_path / "c", Parameters(other), {"flags": {"lr": 1.0}}, {"step": 2})
    assert "weight" in checkpoint_tool("inspect", tmp_path / "c").stdout
    refused = checkpoint_tool("convert", "--to=nvidia", "--output", tmp_path / "n", tmp_path / "c")
    assert refused.returncode == 2
    assert "expected a DLRM" in refused.stderr


def test_nothing_is_overwritten(tmp_path):
    save_ours(tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    words = ("convert", "--to=nvidia", "--output", tmp_path / "full", tmp_path / "ours")
    refused = checkpoint_tool(*words)
    assert refused.returncode == 2
    assert "exists and is not empty" in refused.stderr
    assert os.listdir(tmp_path / "full") == ["mine"]


def test_large_tables_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm.train.checkpoints.tables.BLOCK_BYTES", 40)
    values = np.arange(35, dtype=np.float32).reshape(7, 5)
    values.tofile(tmp_path / "a.bin")
    rows = SavedRows(tmp_path / "a.bin", 7, 5)
    assert [first for first, _ in rows.blocks()] == [0, 2, 4, 6]
    found = statistics(block for _, block in rows.blocks())
    assert found["norm_mean"] == pytest.approx(np.linalg.norm(values, axis=1).mean())
    assert found["norm_max"] == pytest.approx(np.linalg.norm(values[-1]))

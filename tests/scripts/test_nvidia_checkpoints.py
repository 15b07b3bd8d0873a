"""Directories of NVIDIA's program are tested, trained and scored unchanged."""

import forked
import numpy as np
import pytest
import torch
from compared_checkpoints import differing
from nvidia_model import NvidiaModel, scored_by
from sklearn.metrics import roc_auc_score
from small_dataset import MODEL, TABLE_SIZES

import dlrm
from dlrm.train.checkpoints.directory import last_checkpoint

BY_SIZE = [1, 3, 0, 2]
FLAGS_2021 = {  # as absl gives them; lists of sizes as the program leaves them
    **{"mode": "train", "seed": 12345, "batch_size": 65536, "test_batch_size": 65536, "lr": 24.0},
    **{"epochs": 1, "max_steps": None, "warmup_factor": 0, "warmup_steps": 8000},
    **{"decay_steps": 24000, "decay_start_step": 48000, "decay_power": 2, "decay_end_lr": 0.0},
    **{"embedding_type": "custom_cuda", "embedding_dim": 4, "interaction_op": "cuda_dot"},
    **{"top_mlp_sizes": [16, 5, 1], "bottom_mlp_sizes": ["8", "4"], "dataset": "/data"},
    **{"feature_spec": "feature_spec.yaml", "dataset_type": "parametric"},
    **{"shuffle_batch_order": False, "max_table_size": None, "hash_indices": False},
    **{"synthetic_dataset_num_entries": 33554432, "synthetic_dataset_table_sizes": ["100000"] * 26},
    **{"load_checkpoint_path": None, "save_checkpoint_path": "/model", "log_path": "./log.json"},
    **{"test_freq": None, "test_after": 0.0, "print_freq": 200, "base_device": "cuda"},
    **{"amp": True, "cuda_graphs": False, "optimized_mlp": True, "auc_device": "GPU"},
    **{"backend": "nccl", "bottom_features_ordered": False, "freeze_mlps": False},
}
MAPPING = {"bottom_mlp": 0, "embedding": [BY_SIZE], "vectors_per_gpu": [5]}


@pytest.fixture
def theirs(tmp_path):
    """The model, saved in `theirs`."""
    model = NvidiaModel(BY_SIZE, TABLE_SIZES, "dot", padding=2)
    data = {"epoch": 0, "step": 77, "device_mapping": MAPPING}
    model.save(tmp_path / "theirs", FLAGS_2021, data)
    return model


@pytest.fixture
def scored(dataset, theirs):
    """Labels of the test split, and NVIDIA's logits for it."""
    return scored_by(theirs, dataset)


def test_it_is_tested(command, scored, tmp_path, capsys):
    tested = command("--mode=test", f"--load_checkpoint_path={tmp_path / 'theirs'}", model=[])
    assert tested["auc"] == pytest.approx(roc_auc_score(*scored), abs=1e-5)
    said = capsys.readouterr().out
    assert f"weights from {tmp_path / 'theirs'}" in said
    assert f"architecture from {tmp_path / 'theirs'}: embedding_dim 4" in said


def test_a_training_goes_on_with_its_weights_alone(command, theirs, tmp_path, capsys):
    run = f"--save_checkpoint_path={tmp_path / 'run'}"
    command(run, f"--continue_from={tmp_path / 'theirs'}", "--max_steps=2", model=[])
    assert "its weights alone: NVIDIA's format has no optimizer state" in capsys.readouterr().out
    command(run, "--resume", "--max_steps=3", model=[])
    assert last_checkpoint(tmp_path / "run").name == "step-000000003"


def test_training_begins_with_its_weights(command, theirs, tmp_path):
    theirs_at = tmp_path / "theirs"
    saving = [f"--save_checkpoint_path={tmp_path / 'run'}", f"--load_checkpoint_path={theirs_at}"]
    frozen = ["--max_steps=2", "--freeze_mlps", "--freeze_embeddings"]
    command(*saving, *frozen, model=[])
    assert not differing(theirs_at, last_checkpoint(tmp_path / "run"), with_state=False)
    command(f"--load_checkpoint_path={theirs_at}", "--max_steps=2", model=[])
    wrong = [*MODEL[:-1], "--top_mlp_sizes=9,1"]
    with pytest.raises(ValueError, match=r"theirs: of another architecture"):
        command(f"--load_checkpoint_path={theirs_at}", "--max_steps=1", model=wrong)


def test_it_scores_rows(dataset, scored, tmp_path):
    words = [f"--checkpoint={tmp_path / 'theirs'}", f"--input={dataset}", "--output_kind=logit"]
    forked.call("dlrm.scripts.predict", *words, f"--output={tmp_path / 'scores.npy'}", code=0)
    logits = np.load(tmp_path / "scores.npy")
    torch.testing.assert_close(torch.from_numpy(logits), scored[1])
    assert dlrm.load(tmp_path / "theirs").model.config.table_sizes == TABLE_SIZES


def test_what_it_lacks_is_said(command, theirs, dataset, tmp_path):
    theirs.save(tmp_path / "unknown", FLAGS_2021, {"epoch": 0, "step": 77})
    with pytest.raises(ValueError, match=r"unknown: the order .*checkpoint convert --to dlrm"):
        command("--mode=test", f"--load_checkpoint_path={tmp_path / 'unknown'}", model=[])
    (tmp_path / "theirs" / "top_model.out.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"top_model\.out\.pt: no such file"):
        command("--mode=test", f"--load_checkpoint_path={tmp_path / 'theirs'}", model=[])

"""The main command, as a user runs it, on a small dataset whose clicks can be learnt."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from small_dataset import MODEL, RUN, TABLE_SIZES, write_dataset

from dlrm.data.feature_spec import FeatureSpec
from dlrm.scripts import main


def log_entries(path="log.json"):
    with open(path) as file:
        return [json.loads(line.removeprefix("DLLL ")) for line in file]


def test_training_learns_and_reports(command, tmp_path, capsys):
    summary = command("--epochs=3", "--save_checkpoint_path=run")
    assert summary["test_auc"] > 0.75
    assert summary["validation_auc"] > 0.75
    assert summary["best_auc"] == summary["test_auc"]
    assert summary["average_train_throughput"] > 0
    assert {"best_epoch", "best_validation_loss", "training_loss"} <= set(summary)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    entries = log_entries()
    assert entries[0]["step"] == "PARAMETER"
    assert entries[0]["data"]["lr"] == 0.02
    assert entries[-1]["step"] == []
    assert entries[-1]["data"] == summary
    units = {e["metric"]: e["metadata"]["unit"] for e in entries if e["type"] == "METADATA"}
    assert units["average_train_throughput"] == "samples/s"
    assert {"timestamp", "datetime", "elapsedtime", "type"} <= set(entries[0])
    out = capsys.readouterr().out
    assert re.search(
        r"^Epoch:\[0/3\] \[4/16\]  eta: 0:00:\d\d  loss: \d\.\d{4}  "
        r"step_time: \d\.\d{6}  lr: 0.0200$",
        out,
        re.MULTILINE,
    )
    assert re.search(
        r"^DLL .* - \(\) average_train_throughput : [\d.]+ samples/s$", out, re.MULTILINE
    )


def test_a_checkpoint_tests_as_it_trained_and_brings_its_architecture(command, dataset, capsys):
    trained = command("--epochs=2", "--save_checkpoint_path=run")
    tested = command("--mode=test", "--load_checkpoint_path=run", model=[], training=[])
    assert tested["auc"] == trained["test_auc"]
    assert tested["log_loss"] == trained["test_log_loss"]
    assert "embedding_dim 4" in capsys.readouterr().out
    assert log_entries()[-1]["data"]["auc"] == tested["auc"]
    assert any("best_auc" in e.get("data", {}) for e in log_entries())  # the training's log is kept


def test_the_reported_auc_is_scikit_learns(command, dataset):
    command("--epochs=1", "--save_checkpoint_path=run")
    tested = command("--mode=test", "--load_checkpoint_path=run")
    import torch

    from dlrm.model.dlrm import DLRM, DLRMConfig
    from dlrm.train.checkpoint import Parameters, find_checkpoint, load_checkpoint

    spec = FeatureSpec.load(dataset)
    numerical = np.fromfile(spec.file("test", "num_0"), np.float16).reshape(-1, 3)
    ids = [np.fromfile(spec.file("test", n), spec.dtype(n)) for n in spec.categorical]
    labels = np.fromfile(spec.file("test", "label"), bool)
    config = DLRMConfig(
        TABLE_SIZES, 3, 4, bottom_mlp_sizes=(8, 4), top_mlp_sizes=(16, 1), interaction_op="dot"
    )
    model = DLRM(config)
    load_checkpoint(find_checkpoint("run"), Parameters(model, model.embeddings.table_parameters()))
    with torch.no_grad():
        scores = model(torch.tensor(numerical), torch.tensor(np.stack(ids, axis=1)))
    assert tested["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)


@pytest.mark.parametrize("extra", [[], ["--shuffle_batch_order"], ["--amp"]])
def test_a_resumed_run_logs_what_an_uninterrupted_one_does(command, tmp_path, extra):
    whole = command("--epochs=2", "--log_path=whole.json", "--save_checkpoint_path=whole", *extra)
    halves = ["--epochs=2", "--log_path=halves.json", "--save_checkpoint_path=halves", *extra]
    command(*halves, "--max_steps=19")
    resumed = command(*halves, "--resume")

    def steps(path):
        return [
            (e["step"], e["data"]["loss"], e["data"]["lr"])
            for e in log_entries(path)
            if e["type"] == "LOG" and e["step"] != "PARAMETER" and "lr" in e["data"]
        ]

    cut = [1, 2]  # the last line of the first half, which no uninterrupted run prints
    assert [step for step in steps("halves.json") if step[0] != cut] == steps("whole.json")
    assert resumed["test_auc"] == whole["test_auc"]
    assert resumed["validation_log_loss"] == whole["validation_log_loss"]


def test_resume_without_a_checkpoint_starts_at_0_and_says_so(command, capsys):
    command("--max_steps=2", "--save_checkpoint_path=run", "--resume")
    assert "no checkpoint in" in capsys.readouterr().out


def test_resume_refuses_other_arithmetic_by_name(command, tmp_path):
    command("--max_steps=2", "--save_checkpoint_path=run")
    with pytest.raises(ValueError, match="--lr: 0.02 in the checkpoint, now 0.5"):
        command("--save_checkpoint_path=run", "--resume", "--lr=0.5")
    other = write_dataset(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match="dataset's manifest"):
        command("--save_checkpoint_path=run", "--resume", data=other)


def test_a_warm_start_begins_with_the_checkpoints_weights(command):
    trained = command("--epochs=2", "--save_checkpoint_path=run")
    started = command("--max_steps=1", "--test_freq=1", "--lr=1e-9", "--load_checkpoint_path=run")
    assert started["test_auc"] == pytest.approx(trained["test_auc"], abs=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
def test_every_embedding_optimizer_trains(command, optimizer):
    lr = {"sgd": 1.0, "adam": 0.02}.get(optimizer, 0.1)
    mlp = optimizer.removeprefix("row_wise_")
    summary = command(
        "--epochs=3", f"--lr={lr}", f"--embedding_optimizer={optimizer}", f"--mlp_optimizer={mlp}"
    )
    assert summary["test_auc"] > 0.65


@pytest.mark.parametrize("embedding_type", ["joint", "joint_sparse", "multi_table", "custom_cuda"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_embedding_types_train_alike(command, embedding_type, optimizer):
    flags = ["--max_steps=6", "--test_freq=6", f"--embedding_optimizer={optimizer}"]
    expected = command(*flags)
    actual = command(*flags, f"--embedding_type={embedding_type}")
    assert actual["test_log_loss"] == pytest.approx(expected["test_log_loss"], rel=1e-5)


@pytest.mark.parametrize("flag", ["--amp", "--amp_dtype=fp16 --amp", "--amp --loss_scale=64"])
def test_half_precision_learns_as_well(command, flag, capsys):
    full = command("--epochs=3")
    half = command("--epochs=3", *flag.split())
    assert half["test_auc"] == pytest.approx(full["test_auc"], abs=0.01)
    assert half["test_auc"] != full["test_auc"]
    assert ("--loss_scale is not used" in capsys.readouterr().out) == ("64" in flag)


def test_frozen_parameters_stay(command):
    flags = ["--max_steps=3", "--test_freq=3"]
    frozen = command(*flags, "--freeze_mlps", "--freeze_embeddings")
    still = command(*flags, "--lr=1e-12")
    assert frozen["test_log_loss"] == pytest.approx(still["test_log_loss"], abs=1e-6)
    mlps = command(*flags, "--freeze_embeddings")
    assert mlps["test_log_loss"] != pytest.approx(still["test_log_loss"], abs=1e-6)


def test_inference_benchmark_reports_every_batch_size(command):
    summary = command(
        "--mode=inference_benchmark",
        "--inference_benchmark_batch_sizes=1,64",
        "--inference_benchmark_steps=20",
    )
    for size in (1, 64):
        mean = summary[f"mean_inference_latency_batch_{size}"]
        assert summary[f"mean_inference_throughput_batch_{size}"] == pytest.approx(size / mean)
        assert (
            summary[f"p50_inference_latency_batch_{size}"]
            <= (summary[f"p99_inference_latency_batch_{size}"])
        )


def test_the_short_run_is_told_flags_that_fit(command, capsys):
    command("--warmup_steps=6400")
    assert "--warmup_steps 0 --decay_start_step 8 --decay_steps 8" in capsys.readouterr().out


def test_flags_that_do_nothing_say_so(command, capsys):
    command("--max_steps=1", "--output_dir=/tmp/x", "--cuda_graphs")
    out = capsys.readouterr().out
    assert "--output_dir is not used" in out
    assert "--cuda_graphs is not used" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume"], "--resume needs --save_checkpoint_path"),
        (["--checkpoint_freq=5"], "--checkpoint_freq 5 needs --save_checkpoint_path"),
        (["--Adam_MLP_optimizer", "--mlp_optimizer=sgd"], "--Adam_MLP_optimizer contradicts"),
        (["--embedding_dim=8"], "--bottom_mlp_sizes 8,4.*--embedding_dim 8"),
        (["--top_mlp_sizes=16,x,1"], "--top_mlp_sizes 16,x,1: expected integers"),
        (["--max_table_size=8"], "--max_table_size 8 needs --hash_indices"),
        (["--num_numerical_features=13"], "--num_numerical_features 13: the dataset has 3"),
        (["--base_device=tpu"], "--base_device tpu"),
        (["--load_checkpoint_path=/nowhere"], "/nowhere: no checkpoint here"),
        (["--log_path=/dev/null/log.json"], "/dev/null"),
        (["--save_checkpoint_path=/dev/null/run"], "/dev/null"),
        (
            ["--embedding_type=joint", "--embedding_optimizer=row_wise_adagrad"],
            "row_wise_adagrad needs --embedding_type joint_fused",
        ),
        (
            ["--mode=inference_benchmark", "--inference_benchmark_batch_sizes=5000"],
            "--inference_benchmark_batch_sizes 5000: expected 1 to 1500",
        ),
    ],
)
def test_contradictions_are_refused(command, flags, message):
    with pytest.raises((ValueError, OSError), match=message):
        command(*flags)


def test_a_run_never_writes_over_anothers_checkpoints(command):
    command("--max_steps=1", "--save_checkpoint_path=run")
    with pytest.raises(FileExistsError, match="--resume goes on from it"):
        command("--max_steps=1", "--save_checkpoint_path=run")


def test_a_checkpoint_of_another_architecture_is_named(command):
    command("--max_steps=1", "--save_checkpoint_path=run")
    with pytest.raises(ValueError, match=r"top_mlp.0.weight: \[16, 16\] in the checkpoint"):
        command("--mode=test", "--load_checkpoint_path=run", "--top_mlp_sizes=32,1")


def shell(arguments, cwd):
    command = [sys.executable, "-m", "dlrm.scripts.main", "--base_device=cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_errors_are_one_line_and_an_exit_code(tmp_path):
    done = shell(["--dataset=/nowhere"], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: /nowhere: no such dataset directory (--dataset)\n"


def test_an_id_beyond_its_table_ends_the_run_with_its_name(tmp_path):
    data = write_dataset(tmp_path / "data")
    spec = FeatureSpec.load(data)
    with open(spec.file("train", "cat_2.bin"), "r+b") as file:
        file.seek(300)
        file.write(bytes([3]))
    done = shell([f"--dataset={data}", *MODEL, *RUN], tmp_path)
    assert done.returncode == 1
    assert "id 3 of table 2 in batch row 44: expected 0 <= id < 3" in done.stderr  # 300 - 256
    assert "--hash_indices" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "curves.png").exists()


def test_a_diverging_run_ends_with_advice(tmp_path):
    data = write_dataset(tmp_path / "data")
    flags = ["--lr=1e30", "--mlp_optimizer=sgd", "--embedding_optimizer=sgd"]
    done = shell([f"--dataset={data}", *MODEL, *RUN, *flags], tmp_path)
    assert done.returncode == 1
    assert re.search(r"^error: the loss became (nan|inf) between steps 1 and", done.stderr, re.M)
    assert "smaller --lr" in done.stderr


def test_main_refuses_words_that_are_no_flags():
    from absl import app

    with pytest.raises(app.UsageError, match="expected flags only"):
        main.main(["main", "train"])

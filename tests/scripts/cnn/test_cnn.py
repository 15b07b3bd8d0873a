"""The command of image networks, as a user runs it, on few and small images."""

import csv
import json
import shutil

import pytest
import small_images
import torch
from network_commands import resumes_bit_for_bit
from safetensors.torch import load_file, save_file

from dlrm.manifest import write_manifest
from dlrm.vision import command as cnn, flags as cnn_flags

pytestmark = pytest.mark.long
MODEL = ["--model=efficientnet_b0", "--norm=group", "--image_size=32", "--num_classes=7"]
DATA = ["--data=generated", "--synthetic_dataset_num_entries=32", "--batch_size=4"]
RUN = ["--optimizer=momentum", "--lr=0.01", "--print_freq=1", "--test_batch_size=16"]


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    small_images.shrink(monkeypatch.setitem)
    yield
    torch.set_num_threads(threads)


def command(*arguments, model=MODEL, data=DATA, training=RUN):
    own = ["--base_device=cpu", *model, *data, *training]
    return cnn.run(cnn_flags.parse([*own, *arguments]))


def weights(path):
    return load_file(next(path.glob("step-*8/dense.safetensors")))


def test_training_reports_and_saves(tmp_path, capsys, device):
    summary = command("--epochs=1", "--save_checkpoint_path=run", f"--base_device={device}")
    assert {"training_loss", "best_top1", "test_top5", "average_train_throughput"} <= set(summary)
    out = capsys.readouterr().out
    assert "batch: 4 x 1 x 1 = 4" in out
    assert (tmp_path / "run" / "step-000000008" / "manifest.json").exists()
    assert (
        json.loads((tmp_path / "run" / "log.json").read_text().splitlines()[-1][5:])["data"]
        == summary
    )


def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path):
    options = [
        *("--epochs=1", "--optimizer=rmsprop_tf", "--ema_decay=0.9", "--mixup_alpha=0.2"),
        *("--gradient_accumulation_steps=1", "--amp", "--recompute", "--no_validation"),
    ]
    resumes_bit_for_bit(command, tmp_path, options, stop=3, steps=8)


def test_resuming_with_other_values_is_refused(tmp_path):
    command("--save_checkpoint_path=run", "--max_steps=2")
    with pytest.raises(ValueError, match="--lr: 0.01 in the checkpoint, now 0.02"):
        command("--save_checkpoint_path=run", "--resume", "--lr=0.02")
    with pytest.raises(ValueError, match="the global batch .*: 4 in the checkpoint, now 8"):
        command("--save_checkpoint_path=run", "--resume", "--replicas=2")
    log = (tmp_path / "run" / "log.json").read_text()
    with pytest.raises(FileExistsError, match="from an earlier run"):
        command("--save_checkpoint_path=run")
    assert (tmp_path / "run" / "log.json").read_text() == log


def test_fewer_processes_than_replicas_leave_the_batch_as_it_is(capsys):
    still = [*MODEL, "--dropout=0", "--drop_path=0"]
    half = command("--gradient_accumulation_steps=2", "--replicas=2", "--max_steps=2", model=still)
    assert "and the global batch stays 16" in capsys.readouterr().out
    whole = command("--batch_size=16", "--max_steps=2", model=still)
    assert half["training_loss"] == pytest.approx(whole["training_loss"], rel=1e-4)


def test_validation_goes_over_all_checkpoints(tmp_path):
    training = [*RUN, "--ckpts_per_epoch=2", "--weight_avg_exp=0.5", "--ema_decay=0.5"]
    trained = command("--epochs=1", "--save_checkpoint_path=run", training=training)
    assert "averaged_top1" in trained
    names = ["step-000000004", "step-000000008"]
    validate = ["--mode=validate", "--restore_path=run"]
    best = command(*validate, model=[], training=["--test_batch_size=16"])
    with open(tmp_path / "run" / "validation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["checkpoint"], row["weights"]) for row in rows]
    both = [(name, weights) for name in names for weights in ("trained", "average")]
    assert found == [*both, ("averaged-0.5-000000008", "trained")]
    assert float(rows[-1]["loss"]) == pytest.approx(trained["averaged_loss"])
    assert float(rows[3]["loss"]) == pytest.approx(trained["test_loss"])  # the moving average
    assert best["best_top1"] == max(float(row["top1"]) for row in rows)
    with pytest.raises(ValueError, match="--model resnet50: run.* has efficientnet_b0"):
        command(*validate, "--model=resnet50", model=[], training=[])
    again = command(*validate, "--amp", model=[], training=["--test_batch_size=16"])
    assert again["best_loss"] != best["best_loss"]  # not the figures of another precision
    again = command(*("--epochs=1", "--save_checkpoint_path=run", "--resume"), training=training)
    assert again["averaged_loss"] == trained["averaged_loss"]


def test_weights_that_are_no_numbers_are_not_the_best(tmp_path):
    command("--epochs=1", "--save_checkpoint_path=run", "--checkpoint_freq=4")
    file = tmp_path / "run" / "step-000000008" / "dense.safetensors"
    saved = load_file(file)
    saved["classifier.weight"][:] = torch.nan
    save_file(saved, file)
    (file.parent / "manifest.json").unlink()
    write_manifest(file.parent, "checkpoint")
    validate = ["--mode=validate", "--restore_path=run", "--test_batch_size=16"]
    assert command(*validate, model=[], training=[])["best_step"] == 4
    shutil.rmtree(tmp_path / "run" / "step-000000004")
    with pytest.raises(ValueError, match="no checkpoint has a finite loss"):
        command(*validate, "--results=other.csv", model=[], training=[])


@pytest.mark.parametrize(
    ("model", "own", "other", "known"),
    [
        ("resnet50", "--depths=1,1,2,1", "--depths=1,1,1,1", "1, 1, 2, 1"),
        ("efficientnet_b0", "--width=0.5", "--width=0.25", "0.5"),
    ],
)
def test_a_checkpoint_knows_its_sizes(model, own, other, known):
    sizes = [f"--model={model}", "--norm=group", "--image_size=32", "--num_classes=7"]
    data = ["--data=generated", "--synthetic_dataset_num_entries=8", "--batch_size=4"]
    command(own, "--save_checkpoint_path=run", model=sizes, data=data)
    validate = ("--mode=validate", "--restore_path=run", "--test_batch_size=8")
    assert command(*validate, model=[], data=data[:2])["best_loss"] > 0
    with pytest.raises(ValueError, match=f"{other.split('=')[0]} .*: .* has .*{known}"):
        command(*validate, other, model=[], data=data[:2])


def test_the_inference_benchmark_leaves_the_first_pass_out(capsys):
    summary = command("--mode=benchmark_inference", "--repeat=3")
    out = capsys.readouterr().out
    rates = [float(line.split()[2]) for line in out.splitlines() if line.startswith("pass ")]
    assert summary["mean_inference_throughput"] == pytest.approx(sum(rates[1:]) / 2, rel=1e-3)
    assert summary["p50_inference_latency"] <= summary["p99_inference_latency"]


def test_the_training_benchmark_counts_steps_after_the_warmup():
    data = ["--data=synthetic", "--synthetic_dataset_num_entries=8", "--batch_size=4"]
    summary = command("--mode=benchmark_training", "--max_steps=5", data=data)
    assert set(summary) == {"training_loss", "average_train_throughput"}


def test_weights_of_another_architecture_are_named(tmp_path):
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="of another architecture; differing: .*conv"):
        command("--init_checkpoint=weights.safetensors")


def test_code_in_a_file_of_weights_is_not_run(tmp_path):
    class Code:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"conv1.weight": Code()}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="has code, .*, which is not run"):
        command("--init_checkpoint=weights.pt")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe=amazon"], "--recipe=amazon: value should be one of <gaudi"),
        (["--lr_drops=a,b"], "--lr_drops a,b"),
        (["--pipeline_splits=block9z"], "--pipeline_splits block9z: no such stage; expected of"),
        (["--base_lr_exp=-3"], "--base_lr_exp -3.0 contradicts --lr"),
        (["--resume"], "--resume needs"),
        (["--weight_avg_exp=0.9"], "--weight_avg_exp 0.9 needs --save_checkpoint_path"),
        (["--data=dataset"], "--dataset: expected a directory"),
        (["--start_epoch=3"], "--start_epoch 3"),
        (["--mode=validate"], "--mode validate needs --restore_path"),
        (["--init_checkpoint=none.pt"], "none.pt: no such file"),
        (["--mode=benchmark_inference", "--repeat=1"], "--repeat.1"),
        (["--max_grad_norm=0"], "--max_grad_norm 0.0"),
        (["--execution=graph", "--recompute"], "--recompute contradicts --execution graph"),
    ],
)
def test_mistakes_are_named(flags, message):
    with pytest.raises((ValueError, OSError), match=message):
        command(*flags)


@pytest.mark.parametrize("flags", [["--no_validation"], ["--mode=benchmark_training"]])
def test_a_run_without_tests_does_not_blame_the_test_set(capsys, flags):
    command("--max_steps=1", *flags)
    assert "no test: none was asked for, or there is no test set" in capsys.readouterr().out


@pytest.fixture(scope="module")
def losses():
    """Losses of runs that several tests compare with theirs."""
    return {}


@pytest.fixture
def plain(losses):
    """The training loss without options."""
    if not losses:
        losses["plain"] = command("--no_validation", "--max_steps=2")["training_loss"]
    return losses["plain"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--io=float32", "--nochannels_last"],
        ["--amp", "--amp_dtype=fp16", "--loss_scale=128", "--max_grad_norm=1"],
        ["--recipe=gaudi", "--norm=batch", "--epochs=1"],
        ["--recipe=nvidia", "--mixup_alpha=0.2"],
        ["--data=synthetic", "--cutmix_lambda=0.85"],
    ],
)
def test_options_reach_the_training(flags, plain):
    summary = command("--no_validation", "--max_steps=2", *flags)
    assert 1 < summary["training_loss"] < 6  # ln 7 is 1.9
    assert summary["training_loss"] != plain

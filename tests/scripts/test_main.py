"""The main command, as a user runs it, on a small dataset whose clicks can be learned."""

import importlib.util
import json
import re

import forked
import numpy as np
import pytest
import torch
import trained_model
from op_recorder import OpRecorder
from small_dataset import MODEL, RUN, write_dataset

from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.tasks import assembly, memory
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory

pytestmark = pytest.mark.long


def log_entries(path="log.json"):
    with open(path) as file:
        return [json.loads(line.removeprefix("DLLL ")) for line in file]


@pytest.mark.usefixtures("curves")
def test_training_learns_and_reports(command, tmp_path, capsys, device):
    summary = command("--epochs=3", "--save_checkpoint_path=run")
    assert summary["test_auc"] > 0.75
    assert summary["validation_auc"] > 0.75
    assert summary["best_auc"] == summary["test_auc"]
    assert summary["average_train_throughput"] > 0
    assert {"best_epoch", "best_validation_loss", "training_loss"} <= set(summary)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    entries = log_entries("run/log.json")
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


def test_the_short_form_says_what_runs_and_what_can_follow(command, capsys, dataset):
    short = "--log_format=short"
    trained = command("--epochs=2", "--save_checkpoint_path=run", short)
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"train       4,000 rows, 32 steps of 256 rows \(2 epochs\), [\d,]+ parameters, .*", first
    )
    tests, closing = lines[:2], lines[lines.index("") + 1 :]
    assert [line[:22] for line in tests] == ["test        step 16/32", "test        step 32/32"]
    auc = f"AUC {trained['test_auc']:.4f}  log loss {trained['test_log_loss']:.4f}"
    assert sum(auc in line for line in tests) == 1
    assert closing[0].startswith(f"test        {auc}  calibration ")
    assert closing[0].endswith("  selection")
    assert closing[1].startswith(f"validation  AUC {trained['validation_auc']:.4f}  ")
    assert closing[1].endswith("  hold-out")
    assert [line.split()[0] for line in closing[2:6]] == ["speed", "time", "saved", "curves"]
    assert closing[4].startswith("saved       run/step-0000000")
    assert closing[6] == f"next        dlrm evaluate --checkpoint run --dataset {dataset}"
    assert len(closing) <= 10
    command("--epochs=3", "--save_checkpoint_path=run", "--resume")
    assert "DLL " in capsys.readouterr().out
    command("--mode=test", "--load_checkpoint_path=run", short, model=[], training=[])
    out = capsys.readouterr().out
    assert re.search(r"^average test throughput +[\d.e+]+ samples/s$", out, re.MULTILINE)
    assert "DLL " not in out


def test_a_checkpoint_tests_as_it_trained_and_brings_its_architecture(command, capsys, device):
    trained = command("--epochs=2", "--save_checkpoint_path=run")
    tested = command("--mode=test", "--load_checkpoint_path=run", model=[], training=[])
    assert tested["auc"] == trained["test_auc"]
    assert tested["log_loss"] == trained["test_log_loss"]
    out = capsys.readouterr().out
    assert "embedding_dim 4" in out
    assert out.count("calibration: predicted over observed clicks, 1 is right\n") == 2
    assert log_entries()[-1]["data"]["auc"] == tested["auc"]


def test_log_and_curves_are_beside_the_checkpoints_and_a_resumed_run_appends(command, tmp_path):
    command("--max_steps=2", "--save_checkpoint_path=run")
    before = (tmp_path / "run" / "log.json").read_text()
    command("--max_steps=4", "--save_checkpoint_path=run", "--resume")
    assert not (tmp_path / "log.json").exists()
    assert (tmp_path / "run" / "log.json").read_text().startswith(before)
    assert [e.get("step") for e in log_entries("run/log.json")].count("PARAMETER") == 2
    command("--max_steps=2", "--save_checkpoint_path=other", "--log_path=named.json")
    assert (tmp_path / "named.json").exists()
    assert not (tmp_path / "other" / "log.json").exists()


@pytest.mark.parametrize(
    "extra", [[], ["--shuffle_batch_order", "--amp", "--embedding_dtype=bf16"]]
)
def test_a_resumed_run_logs_what_an_uninterrupted_one_does(command, tmp_path, extra, device):
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
    found = zip(*(step for step in steps("halves.json") if step[0] != cut), strict=True)
    same = 0 if device == "cpu" else 1e-4  # unordered sums of a GPU drift
    for values, expected in zip(found, zip(*steps("whole.json"), strict=True), strict=True):
        assert values == expected or values == pytest.approx(expected, rel=same, abs=0)
    for metric in ("test_auc", "validation_log_loss"):
        assert resumed[metric] == pytest.approx(whole[metric], rel=same, abs=0)


def test_a_refused_command_leaves_the_earlier_log_alone(command, tmp_path):
    command("--max_steps=2", "--save_checkpoint_path=run")
    before = (tmp_path / "run" / "log.json").read_text()
    for wrong in (["--save_checkpoint_path=run"], ["--dataset=/nowhere"], ["--amp_dtype=bf16"]):
        with pytest.raises((ValueError, OSError)):
            command(*wrong)
    assert (tmp_path / "run" / "log.json").read_text() == before


def test_resume_without_a_checkpoint_starts_at_0_and_says_so(command, capsys):
    command("--max_steps=2", "--save_checkpoint_path=run", "--resume")
    assert "no checkpoint in" in capsys.readouterr().out


def test_a_run_whose_rate_falls_to_its_end_keeps_its_length(command):
    falling = ["--schedule=linear", "--warmup=0.5", "--batch_size=64", "--lr=0.02"]
    falling += ["--save_checkpoint_path=run", "--print_freq=1", "--max_steps=8"]
    command(*falling, training=[])
    steps = [e["data"] for e in log_entries("run/log.json") if e["type"] == "LOG"]
    rates = [data["lr"] for data in steps if "step_time" in data]
    top = 0.02 * np.array([1, 2, 3, 4, 3, 2, 1]) / 4  # of the steps 2 to 8
    assert rates == pytest.approx(top)
    with pytest.raises(ValueError, match="--max_steps: 8 in the checkpoint, now 9"):
        command(*falling, "--resume", "--max_steps=9", training=[])


def test_resume_refuses_other_arithmetic_by_name(command, tmp_path):
    command("--max_steps=2", "--save_checkpoint_path=run")
    with pytest.raises(ValueError, match="--lr: 0.02 in the checkpoint, now 0.5"):
        command("--save_checkpoint_path=run", "--resume", "--lr=0.5")
    other = write_dataset(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match="dataset's first and last batch"):
        command("--save_checkpoint_path=run", "--resume", data=other)


def test_a_warm_start_begins_with_the_checkpoints_weights(command):
    trained = command("--epochs=2", "--save_checkpoint_path=run")
    started = command("--max_steps=1", "--test_freq=1", "--lr=1e-9", "--load_checkpoint_path=run")
    assert started["test_auc"] == pytest.approx(trained["test_auc"], abs=1e-4)
    warm = ["--load_checkpoint_path=run", "--save_checkpoint_path=two"]
    command("--max_steps=1", *warm, model=[])  # with the architecture of the checkpoint
    command("--mode=test", "--load_checkpoint_path=two", model=[])
    command("--max_steps=2", "--save_checkpoint_path=two", "--resume", model=[])


@pytest.mark.parametrize(
    ("optimizer", "amp"),
    [("sgd", []), ("adagrad", ["--amp"]), ("row_wise_adagrad", []), ("adam", ["--amp"])],
)
def test_bf16_tables_train_as_fp32_ones(command, optimizer, amp):
    lr = {"sgd": 0.1, "adam": 0.002}.get(optimizer, 0.02)  # low, so steps amplify no rounding
    run = [*amp, f"--lr={lr}", f"--embedding_optimizer={optimizer}", "--mlp_optimizer=adagrad"]
    losses = {}
    for dtype in ("fp32", "bf16"):
        log = f"{dtype}.json"
        command("--epochs=2", *run, f"--embedding_dtype={dtype}", f"--log_path={log}")
        entries = [e["data"] for e in log_entries(log) if e["type"] == "LOG"]
        losses[dtype] = [e["loss"] for e in entries if "lr" in e and "loss" in e]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.01
    # Looked-up vectors are rounded by up to 2**-9; under --amp, so are those of fp32 tables, and
    # only values half way between two bfloat16 round differently, which adds up over the steps.
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2**-10 if amp else 2**-9)
    if amp:
        assert losses["bf16"][:3] == pytest.approx(losses["fp32"][:3], rel=1e-5)
    else:
        assert losses["bf16"] != losses["fp32"]


def test_nvidias_names_of_layouts_train_the_same_model(command):
    names = ("joint_fused", "joint", "joint_sparse", "multi_table", "custom_cuda")
    words = ("--max_steps=3", "--test_freq=3")
    found = [command(*words, f"--embedding_type={name}")["test_log_loss"] for name in names]
    assert len(set(found)) == 1


@pytest.mark.parametrize("flag", ["--amp_dtype=fp16 --amp", "--amp --loss_scale=64"])
def test_half_precision_learns_as_well(command, flag, capsys, device):
    full = command("--epochs=2")
    half = command("--epochs=2", *flag.split())
    assert half["test_auc"] == pytest.approx(full["test_auc"], abs=0.01)
    assert half["test_auc"] != full["test_auc"]
    unused = "64" in flag and device == "cpu"  # where half means bfloat16
    assert ("note: --loss_scale is not used" in capsys.readouterr().out) == unused


def test_inference_benchmark_reports_every_batch_size(command, device, capsys):
    summary = command(
        "--mode=inference_benchmark",
        "--inference_benchmark_batch_sizes=1,64",
        "--inference_benchmark_steps=20",
        "--inference_benchmark_runtimes=native,eager,torchscript,onnx",
    )
    others = ("1_eager", "64_torchscript", "64_onnx") if device == "cpu" else ()
    for end in ("1", "64", *others):
        if end.endswith("onnx") and importlib.util.find_spec("onnxruntime") is None:
            continue
        mean = summary[f"mean_inference_latency_batch_{end}"]
        throughput = summary[f"mean_inference_throughput_batch_{end}"]
        assert throughput == pytest.approx(int(end.split("_")[0]) / mean)
        p50, p99 = (summary[f"{p}_inference_latency_batch_{end}"] for p in ("p50", "p99"))
        assert p50 <= p99
    for which in summary:
        assert which.startswith(("mean_", "p50_", "p95_", "p99_"))
    lines = capsys.readouterr().out.splitlines()  # a row when it is measured, before the summary
    head = next(index for index, line in enumerate(lines) if line.split()[:1] == ["batch"])
    measured = len([which for which in summary if which.startswith("mean_inference_latency")])
    rows, summarized = lines[head + 1 : head + 1 + measured], lines[head + 1 + measured :]
    assert {line.split()[0] for line in rows} == {"1", "64"}
    assert summarized[0].startswith("DLL ")


def test_default_batch_sizes_are_limited_to_the_test_set(command, capsys):
    summary = command("--mode=inference_benchmark", "--inference_benchmark_steps=2")
    sizes = {which.rpartition("_")[2] for which in summary}
    assert sizes == {"1", "64", "1500"}
    assert "note: the largest batch size is 1500" in capsys.readouterr().out


@pytest.mark.slow
def test_inference_benchmark_times_lists_in_every_runtime(command, device):
    if device != "cpu":
        pytest.skip("other runtimes are measured on the CPU only")
    pytest.importorskip("onnxruntime", reason="needs dlrm[serve]")
    pytest.importorskip("onnxscript", reason="needs dlrm[serve]")
    summary = command(
        "--mode=inference_benchmark",
        "--dataset_type=synthetic_random",
        "--synthetic_dataset_hotness=7",
        "--inference_benchmark_batch_sizes=1,64",
        "--inference_benchmark_steps=3",
        "--inference_benchmark_runtimes=native,eager,torchscript,onnx",
    )
    for end in ("1", "64", "1_eager", "64_eager", "1_torchscript", "1_onnx", "64_onnx"):
        assert summary[f"mean_inference_latency_batch_{end}"] > 0


def advised(capsys):
    """Returns the flags that a run's output proposes, or None."""
    (found,) = re.findall(r"Flags that fit: (.*)", capsys.readouterr().out) or [None]
    return found


@pytest.mark.parametrize(
    "chosen",
    ["--lr=0.02", "--mlp_optimizer=sgd", "--embedding_optimizer=adam"],
)
def test_the_short_run_is_told_a_schedule_that_fits(command, capsys, chosen):
    command("--max_steps=16", "--batch_size=64", chosen, training=[])
    assert advised(capsys) == "--warmup_steps 0 --decay_start_step 8 --decay_steps 8"


def test_a_run_whose_rate_is_0_in_most_of_its_steps_says_so(command, capsys):
    flags = ["--warmup_steps=1", "--decay_start_step=2", "--decay_steps=3", "--lr=0.01"]
    command("--max_steps=12", "--batch_size=64", *flags, training=[])
    assert "note: the learning rate is 0 from step 5 on, so 8 of this" in capsys.readouterr().out


def test_the_short_run_by_default_learns_with_the_flags_it_is_told(command, capsys):
    model = ["--embedding_dim=16", "--bottom_mlp_sizes=512,256,16"]
    run = ["--batch_size=64", "--epochs=4", "--print_freq=20", "--test_after=9"]
    command(*run, model=model, training=[])
    flags = advised(capsys).split()
    with pytest.raises(FloatingPointError, match="became"):  # schedule only
        command(*run, *flags[flags.index("--warmup_steps") :], model=model, training=[])
    command(*run, *flags, "--log_path=advised.json", model=model, training=[])
    data = [entry.get("data", {}) for entry in log_entries("advised.json")]
    losses = [d["loss"] for d in data if "loss" in d]
    assert losses[-1] < 0.9 * losses[0]


def test_a_resumed_run_is_told_no_other_flags(command, capsys):
    saved = ["--warmup_steps=6400", "--save_checkpoint_path=run", "--resume"]
    command("--max_steps=2", *saved)
    assert advised(capsys) is not None
    command("--max_steps=4", *saved)
    assert advised(capsys) is None


def test_flags_that_do_nothing_say_so(command, capsys):
    command("--max_steps=1", "--output_dir=/tmp/x", "--cuda_graphs")
    out = capsys.readouterr().out
    assert "note: --output_dir is not used" in out
    assert "note: --cuda_graphs is not used; it is for GPUs. Steps run eagerly" in out


def test_what_is_frozen_stays_as_it_was(command):
    frozen = ["--max_steps=3", "--test_freq=3", "--freeze_embeddings", "--max_grad_norm=1"]
    after = command(*frozen, "--freeze_mlps")
    before = command("--mode=test", "--log_path=before.json")
    assert after["test_log_loss"] == before["log_loss"]
    assert command(*frozen)["test_log_loss"] != pytest.approx(before["log_loss"], abs=1e-6)


@pytest.fixture
def recording(monkeypatch):
    """Lets the command record operators on the CPU as it records CUDA graphs on a GPU."""
    recorder = OpRecorder()
    monkeypatch.setattr(assembly, "CudaRecorder", lambda device: recorder)
    monkeypatch.setattr(assembly, "_why_not_recorded", lambda *_: None)
    return recorder


def test_recorded_steps_are_the_same_steps(command, recording):
    amp = ["--epochs=2", "--test_freq=5", "--amp", "--print_freq=1", "--test_batch_size=32"]
    expected = command(*amp, "--log_path=eager.json")
    assert not recording.recordings
    summary = command(*amp, "--cuda_graphs", "--save_checkpoint_path=run")
    assert recording.recordings >= 2  # steps and test batches
    steps = [
        [e["data"] for e in log_entries(path) if e.get("step")]
        for path in ("eager.json", "run/log.json")
    ]
    losses = [[data["loss"] for data in entries if "loss" in data] for entries in steps]
    assert losses[0] == losses[1]
    assert len(losses[0]) > 20
    assert summary["test_auc"] == expected["test_auc"]
    test = ["--mode=test", "--load_checkpoint_path=run", "--amp", "--test_batch_size=32"]
    tested = command(*test, "--cuda_graphs")
    assert tested["auc"] == summary["test_auc"]
    benchmark = ["--mode=inference_benchmark", "--inference_benchmark_runtimes=native"]
    before = recording.recordings
    command(*benchmark, "--cuda_graphs", "--inference_benchmark_batch_sizes=1,32")
    assert recording.recordings == before + 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--resume"], "--resume"),
        (["--resume", "--mode=test", "--save_checkpoint_path=run"], "--resume contradicts --mode"),
        (["--checkpoint_freq=5"], "--checkpoint_freq 5"),
        (["--early_stop=2"], "--early_stop 2"),
        (["--schedule=linear"], "--warmup_steps"),
        (["--embedding_dim=8"], "--bottom_mlp_sizes 8,4.*--embedding_dim 8"),
        (["--synthetic_dataset_hotness=3"], "--synthetic_dataset_hotness"),
        (["--synthetic_dataset_hotness=3,x"], "--synthetic_dataset_hotness 3,x"),
        (["--max_table_size=8"], "--max_table_size 8"),
        (["--num_numerical_features=13"], "--num_numerical_features 13: the dataset has 3"),
        (["--load_checkpoint_path=/nowhere"], "/nowhere"),
        (["--save_checkpoint_path=/dev/null/run"], "/dev/null"),
        (
            ["--mode=inference_benchmark", "--inference_benchmark_batch_sizes=5000"],
            "--inference_benchmark_batch_sizes 5000: expected 1 to 1500",
        ),
        (
            ["--mode=inference_benchmark", "--inference_benchmark_runtimes=fast"],
            "--inference_benchmark_runtimes fast",
        ),
        (["--cross_rank=4"], "--cross_rank 4"),
        (["--ema_decay=1"], "--ema_decay 1.0"),
        (["--profile=2", "--mode=test"], "--profile 2"),
    ],
)
def test_contradictions_are_refused(command, flags, named):
    with pytest.raises((ValueError, OSError), match=named):
        command(*flags)


def test_a_run_never_writes_over_anothers_checkpoints(command):
    command("--max_steps=1", "--save_checkpoint_path=run")
    with pytest.raises(FileExistsError, match="--resume continues from it"):
        command("--max_steps=1", "--save_checkpoint_path=run")
    running = CheckpointDirectory("run")
    running.claim()
    with pytest.raises(BlockingIOError, match="another run saves here"):
        command("--max_steps=2", "--save_checkpoint_path=run", "--resume")
    running.release()


def test_a_checkpoint_of_another_architecture_is_named(command):
    command("--max_steps=1", "--save_checkpoint_path=run")
    with pytest.raises(ValueError, match=r"top_mlp.0.weight: \[16, 16\] in the checkpoint"):
        command("--mode=test", "--load_checkpoint_path=run", "--top_mlp_sizes=32,1")


def shell(arguments, cwd):
    return forked.run("dlrm.scripts.main", "--base_device=cpu", *arguments, cwd=cwd, curves=True)


def test_an_id_beyond_its_table_ends_the_run_with_its_name(tmp_path):
    data = write_dataset(tmp_path / "data")
    spec = FeatureSpec.load(data)
    with open(spec.file("train", "cat_2.bin"), "r+b") as file:
        file.seek(300)
        file.write(bytes([3]))
    done = shell([f"--dataset={data}", *MODEL, *RUN, "--verify_data=never"], tmp_path)
    assert done.returncode == 1
    named = "train row 300, field categorical 2 (cat_2.bin): expected an id from 0 to 2, got 3"
    assert f"error: {data}: {named}" in done.stderr
    assert "--hash_indices" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "curves.png").exists()


def test_a_diverging_run_ends_with_advice(tmp_path):
    data = write_dataset(tmp_path / "data")
    flags = ["--lr=1e30", "--mlp_optimizer=sgd", "--embedding_optimizer=sgd"]
    done = shell([f"--dataset={data}", *MODEL, *RUN, *flags], tmp_path)
    assert done.returncode == 1
    assert re.search(r"^error: the \w+ became (nan|inf) between steps 1 and", done.stderr, re.M)
    assert "smaller --lr" in done.stderr


@pytest.mark.parametrize("steps", [1, 7])
def test_ruined_weights_are_neither_judged_nor_saved(command, tmp_path, steps):
    flags = ["--lr=1e38", "--mlp_optimizer=sgd", "--embedding_optimizer=sgd", "--test_freq=1"]
    with pytest.raises(FloatingPointError, match="became (nan|inf) between steps 1 and 1"):
        command(*flags, f"--max_steps={steps}", "--save_checkpoint_path=run")
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_test_names_the_row_without_a_finite_score(command, trained, tmp_path):
    checkpoint, row = trained_model.overflowing(trained, tmp_path)
    named = f"{trained.dataset}: test row {row}: expected a finite score, got (nan|-?inf)"
    tested = ["--mode=test", f"--load_checkpoint_path={checkpoint}"]
    with pytest.raises(ValueError, match=named):
        command(*tested, data=trained.dataset, model=[], training=["--test_batch_size=77"])


def test_a_validation_row_without_a_finite_score_ends_the_run(command, dataset, monkeypatch):
    whole, rows = assembly.Recommendation.infer, {"test": 1500, "validation": 1501}
    seen = 0

    def infer(task, batch):
        nonlocal seen
        seen += len(batch.labels)
        logits = whole(task, batch)
        if seen > rows["test"] + 800:
            logits[3] = float("nan")
        return logits

    monkeypatch.setattr(assembly.Recommendation, "infer", infer)
    with pytest.raises(ValueError, match=f"{dataset}: validation row 803: expected a finite score"):
        command("--epochs=1")


def test_a_test_of_one_class_says_that_there_is_no_auc(command, tmp_path, capsys):
    data = write_dataset(tmp_path / "data")
    spec = FeatureSpec.load(data)
    np.ones(1500, bool).tofile(spec.file("test", spec.label))
    command("--mode=test", "--verify_data=never", data=data)
    said = "note: no AUC can be computed, since all 1,500 rows have the label 1\n"
    assert said in capsys.readouterr().out


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_named_by_training_tests_and_resuming(command, tmp_path):
    data = write_dataset(tmp_path / "data")
    command("--max_steps=1", "--save_checkpoint_path=run", data=data)
    spec = FeatureSpec.load(data)
    tested = ["--mode=test", "--load_checkpoint_path=run"]
    for file, words in (
        (spec.file("train", "cat_1.bin"), ["--max_steps=2"]),
        (spec.file("test", "label"), tested),
        (Checkpoint.open("run").path / "tables/1.bin", tested),
        (
            Checkpoint.open("run").path / "optimizer.safetensors",
            ["--save_checkpoint_path=run", "--resume"],
        ),
    ):
        flip(file)
        with pytest.raises(ValueError, match=f"{file.name}: expected CRC-32"):
            command(*words, data=data)
        flip(file)


def test_a_test_does_not_read_the_training_rows(command, tmp_path):
    data = write_dataset(tmp_path / "data")
    spec = FeatureSpec.load(data)
    numbers = np.fromfile(spec.file("train", spec.numerical[0]), np.float16)
    numbers[:] = np.nan
    numbers.tofile(spec.file("train", spec.numerical[0]))
    assert command("--mode=test", data=data)["auc"] > 0
    with pytest.raises(ValueError, match="numerical.bin: row 0, field numerical 0"):
        command(data=data)


def test_the_row_optimizer_knows_the_tables_where_a_step_looks_up_once(command, monkeypatch):
    told, make = [], assembly.Recommendation.optimizers

    def optimizers(task, config, one_look_up):
        told.append(one_look_up)
        return make(task, config, one_look_up)

    monkeypatch.setattr(assembly.Recommendation, "optimizers", optimizers)
    command("--max_steps=2")
    command("--max_steps=2", "--gradient_accumulation_steps=2")
    assert told == [True, False]


def test_micro_batches_and_clipping_train_as_well(command):
    whole = command("--max_steps=8", "--max_grad_norm=0.05")
    parts = command("--max_steps=8", "--max_grad_norm=0.05", "--gradient_accumulation_steps=3")
    assert parts["training_loss"] == pytest.approx(whole["training_loss"], rel=1e-3)
    assert whole["training_loss"] != command("--max_steps=8")["training_loss"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [  # 383 rows of 4 floats, and Adam's two of each
        ([], 383 * 48),
        (["--freeze_embeddings"], 383 * 16),
        (["--mode=test"], 383 * 16),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_they_are_made(
    command, monkeypatch, arguments, needed
):
    monkeypatch.setattr(assembly, "Recommendation", None)
    monkeypatch.setattr(memory.Footprint, "batch", 0)
    monkeypatch.setattr(memory, "host_memory", lambda: (needed, 2**30))
    with pytest.raises(TypeError):  # it fits and is built
        command(*arguments)
    monkeypatch.setattr(memory, "host_memory", lambda: (needed - 1, 2**30))
    with pytest.raises(ValueError, match=r"the embedding tables need .* on the host.*_files DIR"):
        command(*arguments)


def has_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("asked", "count", "message"),
    [
        ("cuda", None, "built without CUDA"),
        ("cuda", 0, "no CUDA device"),
        ("cuda:2", 2, "below 2"),
        ("cpu:0", 2, "expected cpu, cuda or"),
    ],
)
def test_a_device_that_is_not_here_is_named(command, monkeypatch, asked, count, message):
    has_gpus(monkeypatch, count or 0)
    if count is None:
        monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match=f"--base_device {asked}: .*{message}"):
        command(f"--base_device={asked}")


def test_tables_that_do_not_fit_on_the_gpu_are_refused_before_they_are_made(command, monkeypatch):
    asked = []

    def mem_get_info(device):
        asked.append(device)
        return 383 * 48 - 1, 80 << 30

    has_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    with pytest.raises(ValueError, match=r"on cuda, .* more processes$"):
        command("--base_device=cuda")
    assert asked == ["cuda"]


def test_an_empty_checkpoint_path_saves_nothing(command, tmp_path):
    command("--max_steps=2", "--save_checkpoint_path=")
    assert not list(tmp_path.glob("**/step-*"))


def test_a_resumed_run_keeps_the_matrix_products_it_was_started_with(command):
    def recorded():
        return Checkpoint.open("run").config["flags"]["mlp_products"]

    saving = ("--save_checkpoint_path=run", "--base_device=cpu")
    command("--max_steps=2", "--mlp_products=torch", *saving)
    assert recorded() == "torch"
    command("--max_steps=3", "--resume", *saving)
    assert recorded() == "torch"
    with pytest.raises(ValueError, match=r"--mlp_products"):
        command("--max_steps=4", "--resume", "--mlp_products=native", *saving)

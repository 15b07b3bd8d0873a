"""The command of BERT, as a user runs it, on few and short texts."""

import json

import numpy as np
import pytest
import torch
from network_commands import resumes_bit_for_bit
from safetensors.torch import load_file, save_file

from dlrm.language import command as bert, flags as bert_flags
from dlrm.language.bert import BertConfig, BertForQuestionAnswering
from dlrm.language.writer import PretrainingTextConfig, write_dataset
from dlrm.tasks import run as runs

pytestmark = pytest.mark.long
SMALL = ("--num_layers=1", "--hidden_size=16", "--num_heads=2", "--intermediate_size=32")
RUN = ("--lr=1e-3", "--print_freq=1", "--batch_size=4", "--test_batch_size=8")
LENGTH = ("--max_seq_length=24", "--max_query_length=8", "--doc_stride=8")
WORDS = ("who", "saw", "the", "red", "blue", "cat", "dog", "in", "house", "garden", "at", "night")
GENERATED = (
    *("--data=generated", "--synthetic_dataset_num_entries=32", "--vocab_size=60"),
    *("--max_seq_length=16", "--max_predictions_per_seq=3"),
)


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def texts(tmp_path):
    """A vocabulary, pairs, questions and raw text of a dozen words."""
    random = np.random.default_rng(0)
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, ".")
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")

    def words(count):
        return " ".join(random.choice(WORDS, count))

    for name, count in (("train.tsv", 32), ("dev.tsv", 12)):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for number in range(count):
            lines.append(
                f"{number % 2}\t{number}\t{number}\t{words(5)}\t{words(random.integers(3, 9))}"
            )
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    for name, count in (("train-v1.1.json", 16), ("dev-v1.1.json", 6)):
        paragraphs = []
        for number in range(count):
            context = words(12)
            start = len(" ".join(context.split()[:4])) + 1
            answer = {"text": context[start:].split()[0], "answer_start": start}
            question = {"id": f"{name}-{number}", "question": words(4), "answers": [answer]}
            paragraphs.append({"context": context, "qas": [question]})
        data = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (tmp_path / name).write_text(json.dumps(data))
    documents = ["\n".join(f"{words(6)} ." for _ in range(8)) for _ in range(12)]
    (tmp_path / "raw.txt").write_text("\n\n".join(documents) + "\n")
    return tmp_path


def command(*arguments):
    return bert.run(bert_flags.parse(["--base_device=cpu", *arguments]))


def finetune(task, *arguments):
    own = (f"--task={task}", "--dataset=.", "--vocab_file=vocab.txt", *SMALL, *LENGTH, *RUN)
    return command("--mode=finetune", *own, *arguments)


def pretrain(*arguments):
    return command("--mode=pretrain", *SMALL, *RUN, *GENERATED, *arguments)


def weights(directory, file="dense.safetensors"):
    return load_file(max(directory.glob(f"step-*/{file}")))


@pytest.mark.parametrize("task", ["mrpc", "squad"])
def test_fine_tuning_reports_and_saves(texts, capsys, task, device):
    here = f"--base_device={device}"
    summary = finetune(task, "--epochs=1", "--save_checkpoint_path=run", here)
    metric = {"mrpc": "accuracy_and_f1", "squad": "f1"}[task]
    assert {"training_loss", f"best_{metric}", "test_f1", "average_train_throughput"} <= set(
        summary
    )
    out = capsys.readouterr().out
    rows = {"mrpc": 32, "squad": 32 if "32 rows" in out else 16}[task]
    assert f"train: {rows} rows of" in out
    assert f"BERT 1 x 16 for {task}" in out
    assert out.count("note: --length_window 50") == 1
    assert "initial weights" in out
    assert (
        json.loads((texts / "run" / "log.json").read_text().splitlines()[-1][5:])["data"] == summary
    )
    saved = weights(texts / "run")
    assert saved["bert.embeddings.word_embeddings.weight"].shape == (18, 16)  # of the vocabulary


def test_fine_tuning_learns():
    data = ("--data=generated", "--vocab_size=60", "--max_seq_length=16", "--epochs=60")
    own = ("--mode=finetune", "--task=squad", *SMALL, "--synthetic_dataset_num_entries=8")
    plain = ("--hidden_dropout=0", "--attention_dropout=0", "--lr=0.01", "--test_freq=60")
    summary = command(*own, *data, *plain, "--batch_size=8")
    assert summary["test_loss"] < 0.5  # it began with ln 16, 2.8
    assert summary["test_f1"] > 90


def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path):
    options = ("--optimizer=lamb", "--ema_decay=0.9", "--gradient_accumulation_steps=2")
    options += ("--total_steps=5", "--amp", "--recompute", "--no_validation")
    resumes_bit_for_bit(pretrain, tmp_path, options, stop=2, steps=5)


def test_a_resumed_fine_tuning_takes_up_the_order_by_length(texts):
    options = ("--epochs=2", "--test_freq=100", "--length_window=2")
    finetune("mrpc", *options, "--save_checkpoint_path=whole")
    finetune("mrpc", *options, "--save_checkpoint_path=cut", "--max_steps=5")
    finetune("mrpc", *options, "--save_checkpoint_path=cut", "--resume")
    for name, value in weights(texts / "whole").items():
        assert torch.equal(value, weights(texts / "cut")[name]), name
    with pytest.raises(ValueError, match="--lr: 0.001 in the checkpoint, now 0.002"):
        finetune("mrpc", *options, "--save_checkpoint_path=cut", "--resume", "--lr=0.002")
    train = texts / "train.tsv"
    train.write_text(train.read_text() + "1\t0\t0\tcat\tdog\n")
    with pytest.raises(ValueError, match="dataset's rows: 32 in the checkpoint, now 33"):
        finetune("mrpc", *options, "--save_checkpoint_path=cut", "--resume")


def test_phase_2_takes_weights_and_moments_and_begins_anew(tmp_path, capsys, monkeypatch):
    common = ("--recipe=gaudi", "--no_validation")
    pretrain(*common, "--total_steps=3", "--save_checkpoint_path=p1")
    begun = {}
    trainers = runs.Trainer

    class Watched(trainers):
        def fit(self, *loaders):
            begun["weights"] = {k: v.clone() for k, v in self.task.model.state_dict().items()}
            (optimizer,) = self.optimizers
            names = {p: n for n, p in self.task.model.named_parameters()}
            begun["state"] = {
                f"{names[p]}/{key}": value.clone()
                for p, state in optimizer.state.items()
                for key, value in state.items()
            }
            begun["step"] = self.progress.step
            return super().fit(*loaders)

    monkeypatch.setattr(runs, "Trainer", Watched)
    longer = ("--phase=2", "--max_seq_length=32", "--total_steps=3", "--load_checkpoint_path=p1")
    pretrain(*common, *longer, "--save_checkpoint_path=p2")
    assert begun["step"] == 0
    for name, value in weights(tmp_path / "p1").items():
        assert torch.equal(value, begun["weights"][name]), name
    moments = weights(tmp_path / "p1", "optimizer.safetensors")
    assert moments.keys() == begun["state"].keys()
    for name, value in moments.items():
        expected = torch.zeros_like(value) if name.endswith("/step") else value
        assert torch.equal(begun["state"][name], expected), name
    assert any(value.any() for name, value in moments.items() if name.endswith("/exp_avg"))
    out = capsys.readouterr().out
    assert "phase 2: weights and moments from" in out
    rates = [line.partition("lr: ")[2] for line in out.splitlines() if "lr: " in line][-2:]
    expected = [1e-3 * (1 / 3) ** 0.5, 0]  # at steps 2 and 3 of 3
    assert [float(rate) for rate in rates] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("task", ["pretrain", "mrpc", "squad"])
def test_evaluation_tests_the_best_checkpoint(texts, task):
    best = ("--epochs=2", "--checkpoint_freq=3", "--save_checkpoint_path=run")
    if task == "pretrain":
        trained, data = pretrain(*best), GENERATED
    else:
        trained, data = finetune(task, *best), ("--dataset=.",)
    metrics = command("--mode=evaluate", "--load_checkpoint_path=run", *data)
    for name in ("loss", {"squad": "f1", "mrpc": "accuracy"}.get(task, "masked_accuracy")):
        assert metrics[f"test_{name}"] == pytest.approx(trained[f"test_{name}"], rel=1e-5)
    if task == "squad":
        answers = json.loads((texts / "predictions.json").read_text())
        assert answers.keys() == {f"dev-v1.1.json-{number}" for number in range(6)}


def test_weights_of_others_are_fine_tuned_and_evaluated(texts, capsys):
    config = BertConfig("base", 1, 16, 2, 32, vocab_size=18)
    model = BertForQuestionAnswering(config, seed=3)
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): value
        for name, value in model.state_dict().items()
    }
    save_file(state, texts / "public.safetensors")
    flags = (
        "--init_checkpoint=public.safetensors",
        "--vocab_file=vocab.txt",
        "--dataset=.",
        *SMALL,
    )
    command("--mode=evaluate", "--task=squad", *flags, *LENGTH)
    finetune(
        "mrpc",
        "--init_checkpoint=public.safetensors",
        "--max_steps=1",
        "--lr=1e-9",
        "--save_checkpoint_path=run",
    )
    out = capsys.readouterr().out
    assert "weights from public.safetensors, but for bert.pooler" in out
    assert "classifier.weight" in out
    name = "bert.encoder.layer.0.attention.self.query.weight"
    torch.testing.assert_close(weights(texts / "run")[name], model.state_dict()[name])
    with pytest.raises(ValueError, match="public.safetensors: expected all weights of --task mrpc"):
        command("--mode=evaluate", "--task=mrpc", *flags, *LENGTH)


def test_fine_tuning_begins_with_what_was_pretrained(texts):
    prepare()
    command(
        "--mode=pretrain",
        "--dataset=shards",
        *SMALL,
        *RUN,
        "--epochs=1",
        "--save_checkpoint_path=pre",
    )
    own = ("--task=mrpc", "--dataset=.", "--vocab_file=vocab.txt", "--lr=1e-9", "--batch_size=4")
    command(
        "--mode=finetune",
        *own,
        "--init_checkpoint=pre",
        "--max_steps=1",
        "--save_checkpoint_path=fine",
    )
    before, after = weights(texts / "pre"), weights(texts / "fine")
    shared = before.keys() & after.keys()
    assert len(shared) > 20
    for name in shared:
        torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=0)
    with pytest.raises(
        ValueError, match="of --task pretrain, and not mrpc; --init_checkpoint takes"
    ):
        command("--mode=finetune", *own, "--load_checkpoint_path=pre")


def prepare(**options):
    config = PretrainingTextConfig(vocab_file="vocab.txt", max_seq_length=32, **options)
    return write_dataset(config, ["raw.txt"], "shards")


def test_prepared_text_is_pretrained_on(texts, capsys):
    summary = prepare(dupe_factor=2)
    assert summary.documents == 12
    data = ("--dataset=shards", "--test_dataset=shards")
    trained = command(
        "--mode=pretrain", *data, *SMALL, *RUN, "--epochs=1", "--save_checkpoint_path=run"
    )
    assert {"test_masked_accuracy", "test_next_sentence_accuracy"} <= trained.keys()
    assert f"train: {summary.rows:,} rows of" in capsys.readouterr().out
    words = weights(texts / "run")["bert.embeddings.word_embeddings.weight"]
    assert len(words) == 18  # the dataset's vocabulary
    with pytest.raises(ValueError, match="expected rows of --max_seq_length 64, got 32"):
        command("--mode=pretrain", *data, *SMALL, *RUN, "--max_seq_length=64")


@pytest.mark.parametrize("latency", ["low", "minimum"])
def test_the_inference_benchmark_leaves_the_first_pass_out(capsys, latency):
    flags = ("--mode=inference_benchmark", "--task=squad", *SMALL, "--max_seq_length=16")
    size = ("--batch_size=2", "--batches_per_step=3", "--repeat=3", f"--latency={latency}")
    summary = command(*flags, *size)
    out = capsys.readouterr().out
    assert "test: 6 rows" in out
    rates = [float(line.split()[2]) for line in out.splitlines() if line.startswith("pass ")]
    assert summary["mean_inference_throughput"] == pytest.approx(sum(rates[1:]) / 2, rel=1e-3)
    order = [summary[f"{name}_inference_latency"] for name in ("min", "p50", "p99", "p999", "max")]
    assert order == sorted(order)
    assert order[0] <= summary["mean_inference_latency"] <= order[-1]


def test_the_benchmark_times_a_checkpoints_network(texts, capsys):
    finetune("mrpc", "--max_steps=1", "--save_checkpoint_path=run")
    flags = ("--mode=inference_benchmark", "--load_checkpoint_path=run", "--repeat=2")
    command(*flags, "--dataset=.", "--batch_size=max")
    out = capsys.readouterr().out
    assert "for mrpc" in out
    assert "test: 12 rows" in out
    assert "batch: 8 x 1 x 1" in out  # max is 8 on the CPU


def test_fewer_processes_than_replicas_leave_the_batch_as_it_is(capsys):
    still = ("--hidden_dropout=0", "--attention_dropout=0", "--max_steps=2", "--no_validation")
    half = pretrain("--gradient_accumulation_steps=2", "--replicas=2", *still)
    assert "and the global batch stays 16" in capsys.readouterr().out
    whole = pretrain("--batch_size=16", *still)
    assert half["training_loss"] == pytest.approx(whole["training_loss"], rel=1e-5)


def test_a_run_shorter_than_its_curve_says_so(capsys):
    pretrain("--total_steps=100", "--max_steps=1", "--no_validation")
    assert "the run has 1 of the 100 steps of the learning rate's curve" in capsys.readouterr().out
    pretrain("--total_steps=20", "--epochs=1", "--no_validation")
    assert "the run has 8 of the 20 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--amp", "--amp_dtype=fp16", "--loss_scale=128", "--max_grad_norm=1"],
        ["--recipe=graphcore", "--layers_per_stage=1"],
        ["--recipe=nvidia", "--amp"],
        ["--data=synthetic"],
    ],
)
def test_options_reach_the_training(flags):
    summary = pretrain("--no_validation", "--max_steps=3", *flags)
    assert summary["training_loss"] == pytest.approx(np.log(60) + np.log(2), rel=0.1)
    assert summary["training_loss"] != pretrain("--no_validation", "--max_steps=3")["training_loss"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--mode: expected one of pretrain, finetune, evaluate"),
        (["--mode=finetune"], "--mode finetune needs --task"),
        (["--mode=evaluate", "--load_checkpoint_path=none"], "none: no checkpoint here"),
        (["--mode=evaluate", "--task=mrpc"], "--mode evaluate needs --load_checkpoint_path"),
        (["--mode=pretrain", "--task=squad"], "--task squad contradicts --mode pretrain"),
        (["--mode=finetune", "--task=pretrain"], "--task pretrain is of --mode pretrain"),
        (["--mode=finetune", "--task=mrpc"], "--dataset: expected a path, or --data generated"),
        (["--mode=pretrain", "--phase=3"], "--phase=3"),
        (["--mode=finetune", "--task=squad", "--phase=2"], "--phase 2 is of --mode pretrain"),
        (["--mode=pretrain", "--size=huge"], "--size=huge: value should be one of <base.large"),
        (["--mode=pretrain", "--num_heads=7"], "--num_heads 7"),
        (["--mode=pretrain", "--batch_size=few"], "--batch_size few"),
        (["--mode=pretrain", "--batch_size=0"], "--batch_size 0"),
        (["--mode=pretrain", "--layers_per_stage=3,3"], "add up to the 12 layers"),
        (
            ["--mode=pretrain", *["--layers_per_stage=12", "--encoder_start_stage=2"]],
            "--encoder_start_stage=2",
        ),
        (["--mode=pretrain", "--length_window=-1"], "--length_window=-1"),
        (["--mode=pretrain", "--doc_stride=0"], "--doc_stride=0"),
        (["--mode=pretrain", "--resume"], "--resume needs --mode pretrain or finetune and"),
        (["--mode=pretrain", "--total_steps=0"], "--total_steps=0"),
        (["--mode=pretrain", "--init_checkpoint=none.pt"], "none.pt: no such file"),
        (["--mode=pretrain", "--execution=graph", "--recompute"], "--recompute contradicts"),
    ],
)
def test_mistakes_are_named(flags, message):
    few = ("--num_layers=12", *SMALL[1:], *GENERATED)
    made_up = few if "--mode=pretrain" in flags else ()
    with pytest.raises((ValueError, OSError), match=message):
        command(*made_up, *flags)


@pytest.mark.parametrize("mode", ["pretrain", "inference_benchmark"])
def test_rows_that_the_network_cannot_read_are_named_before_the_first(mode, monkeypatch):
    monkeypatch.setattr(bert, "make_task", lambda *_: pytest.fail("a network was made"))
    few = ("--max_position_embeddings=15", *SMALL, *GENERATED, "--task=pretrain", "--batch_size=4")
    with pytest.raises(
        ValueError, match="--max_position_embeddings 15: expected at least .* rows, 16 tokens"
    ):
        command(f"--mode={mode}", *few)


def test_mistakes_in_files_are_named(texts):
    own = ("--mode=finetune", "--task=mrpc", "--dataset=.", *SMALL)
    with pytest.raises(ValueError, match="--task mrpc needs --vocab_file"):
        command(*own)
    with pytest.raises(FileNotFoundError, match=r"none.txt: no such file \(--vocab_file\)"):
        command(*own, "--vocab_file=none.txt")
    (texts / "unmasked.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\ncat\n")
    with pytest.raises(ValueError, match=r"unmasked.txt: .*\[MASK\]"):
        command(*own, "--vocab_file=unmasked.txt")
    with pytest.raises(ValueError, match="18 tokens, more than --vocab_size 10"):
        command(*own, "--vocab_file=vocab.txt", "--vocab_size=10")
    (texts / "dev.tsv").unlink()
    with pytest.raises(FileNotFoundError, match="No such file .*dev.tsv"):
        command(*own, "--vocab_file=vocab.txt")

"""Real rows pass through the whole pipeline, by the README's commands for users' own rows."""

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

import forked
import numpy as np
import pytest

from dlrm.language import command as bert, flags as bert_flags
from dlrm.language.pairs import COLUMNS, majority_baseline, read_pairs
from dlrm.language.squad import exact_match_and_f1, read_squad

pytestmark = pytest.mark.long
ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/guide/images.md", "docs/guide/language.md")


def run(arguments, cwd, env=None) -> str:
    if arguments[0] == "dlrm":
        done = forked.run(*arguments, cwd=cwd, env=env, curves=True, timeout=3600)
    else:
        options = {"capture_output": True, "text": True}
        done = subprocess.run(arguments, cwd=cwd, env=env, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def summary(folder: Path) -> dict:
    """Returns the summary of the last run in a folder; logs are beside checkpoints."""
    log = max(folder.rglob("log.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(log.read_text().splitlines()[-1].removeprefix("DLLL "))["data"]


def shell_block(heading: str) -> list[str]:
    """Returns the lines of the first shell block under a heading, with continuations joined."""
    text = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    (_, section) = re.split(rf"^##+ {re.escape(heading)}$", text, flags=re.MULTILINE)
    return section.split("```bash\n")[1].split("```")[0].replace("\\\n", " ").splitlines()


def documented_commands(heading: str) -> list[list[str]]:
    """Returns the same, split into words."""
    lines = shell_block(heading)
    return [shlex.split(line, comments=True) for line in lines if line and line[0] != "#"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "engine"),
    [(150_000, "local"), pytest.param(700_000, "spark", marks=pytest.mark.spark)],
)
def test_the_demo_comes_close_to_the_planted_best(tmp_path, rows, engine):
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("no Java, which Spark needs")
    flags = [f"--output={tmp_path}", f"--rows={rows}", f"--engine={engine}"]
    shown = run(["dlrm", "demo", *flags], tmp_path)
    auc, best = (
        float(re.search(rf"^{name} +(?:test )?(0\.\d+)", shown, re.M).group(1))
        for name in ("ROC AUC", "best possible")
    )
    assert best - 0.02 < auc < best, shown
    for name in ("dataset", "checkpoints", "log", "curves"):
        path = re.search(rf"^{name} +(\S+)$", shown, re.M).group(1)
        assert (tmp_path / path).exists(), name


def adult_auc(shared_data, directory: Path, seed: int, *flags: str) -> float:
    """Runs the README's commands for Adult with another seed; returns the held-out AUC."""
    directory.mkdir()
    shutil.copy(shared_data / "adult" / "adult.data", directory / "adult.data")
    header, drafting, *others = shell_block("Your own CSV")
    run(["bash", "-ec", header], directory)
    run(shlex.split(drafting, comments=True), directory)
    for words in map(shlex.split, others):
        given = ["--base_device=cpu", *flags] if words[:2] == ["dlrm", "train"] else []
        run([*words, f"--seed={seed}", *given], directory)
    return summary(directory)["test_auc"]


@pytest.mark.slow
def test_adult_reaches_0_92_on_the_mean_of_five_random_fifths(shared_data, tmp_path):
    aucs = []
    for seed in range(1, 6):
        aucs.append(adult_auc(shared_data, tmp_path / str(seed), seed))
    assert statistics.mean(aucs) >= 0.92, aucs


@pytest.mark.slow
def test_bfloat16_costs_adult_less_than_0_002_of_auc(shared_data, tmp_path):
    exact = adult_auc(shared_data, tmp_path / "fp32", 1)
    half = adult_auc(shared_data, tmp_path / "bf16", 1, "--amp", "--embedding_dtype=bf16")
    assert half == pytest.approx(exact, abs=0.002)
    assert half != exact, "--amp changed nothing"


def test_criteo_rows_go_from_raw_logs_to_an_auc_and_back_from_a_checkpoint(
    shared_data, tmp_path, root
):
    lines = (shared_data / "criteo_tb" / "tb_500_shared.tsv").read_bytes().splitlines(True)
    clicks = [line for line in lines if line.startswith(b"1")]
    others = [line for line in lines if not line.startswith(b"1")]
    (tmp_path / "raw").mkdir()
    for day in range(3):
        rows = others[day::3]
        for number, click in enumerate(clicks[day::3]):  # clicks in both halves of the last day
            rows.insert(30 * number, click)
        (tmp_path / "raw" / f"day_{day}").write_bytes(b"".join(rows))
    environment = {
        **os.environ,
        "INPUT_PATH": str(tmp_path / "raw"),
        "OUTPUT_PATH": str(tmp_path / "out"),
        "ENGINE": "local",  # tests/preproc compares the engines, also on these rows
        "FREQUENCY_LIMIT": "2",
        "PYTHON": sys.executable,
    }
    run([root / "preproc" / "prepare_dataset.sh"], tmp_path, environment)
    given = ["--base_device=cpu", "--test_batch_size=50"]
    given.append(f"--dataset={tmp_path / 'out' / 'binary_dataset'}")
    training = ["--epochs=4", "--batch_size=32", "--lr=0.5", "--warmup_steps=2"]
    run(["dlrm", "train", *given, *training, "--save_checkpoint_path=run"], tmp_path)
    trained = summary(tmp_path)
    tested = ["--load_checkpoint_path=run", "--log_path=tested/log.json"]
    run(["dlrm", "test", *given, *tested], tmp_path)
    assert 0 < trained["test_auc"] < 1
    assert 0 < trained["validation_auc"] < 1
    assert summary(tmp_path / "tested")["auc"] == trained["test_auc"]


def bert_commands(heading: str) -> list[str]:
    """Returns the lines of a shell block, run with this Python."""
    python = f"{shlex.quote(sys.executable)} -m dlrm bert --base_device=cpu"
    return [re.sub("^dlrm bert", python, line) for line in shell_block(heading)]


def link_texts(shared_data: Path, directory: Path) -> None:
    """Links the real rows where the README's commands expect them."""
    names = {"mrpc/train.tsv": "train.tsv", "mrpc/dev.tsv": "dev.tsv"}
    names["squad/train-v1.1.slice.json"] = "train-v1.1.slice.json"
    names["vocab/bert-base-uncased-vocab.txt"] = "vocab.txt"
    for source, name in names.items():
        (directory / name).symlink_to(shared_data / source)


@pytest.mark.slow
def test_a_small_network_learns_pairs_by_heart(shared_data, tmp_path):
    pytest.importorskip("tokenizers", reason="no tokenizers (extra text)")
    link_texts(shared_data, tmp_path)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    head, training, evaluation, *_ = bert_commands("Questions and pairs from scratch")
    for command in (head, training):
        run(["bash", "-c", command], tmp_path, one_thread)
    assert summary(tmp_path)["test_accuracy"] >= 0.99
    shown = run(["bash", "-c", evaluation], tmp_path, one_thread)
    majority = majority_baseline(read_pairs(tmp_path / "dev.tsv").labels)
    assert f"accuracy {majority['accuracy']:.6f}" in shown
    assert majority["accuracy"] < summary(tmp_path)["test_accuracy"] < 1


@pytest.mark.slow
def test_a_small_network_learns_answers_by_heart(shared_data, tmp_path):
    pytest.importorskip("tokenizers", reason="no tokenizers (extra text)")
    link_texts(shared_data, tmp_path)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    *_, training, evaluation = bert_commands("Questions and pairs from scratch")
    run(["bash", "-c", training], tmp_path, one_thread)
    assert summary(tmp_path)["test_f1"] >= 90
    run(["bash", "-c", evaluation], tmp_path, one_thread)
    answers = json.loads((tmp_path / "predictions.json").read_text())
    questions = read_squad(tmp_path / "train-v1.1.slice.json")
    assert list(answers) == [question.id for question in questions]
    assert all(answers[question.id] in question.context for question in questions)
    found = exact_match_and_f1(questions, answers)
    assert found["f1"] == summary(tmp_path)["test_f1"] >= 90


def test_the_commands_for_questions_and_pairs_start(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers", reason="no tokenizers (extra text)")
    words = ["who", "sat", "the", "cat", "dog"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    pairs = [f"{i % 2}\t1\t2\tthe {words[3 + i % 2]} sat\tthe cat" for i in range(32)]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(["\t".join(COLUMNS), *pairs]))
    asked = [
        {"id": str(i), "question": "who sat", "answers": [{"text": "cat", "answer_start": 4}]}
        for i in range(32)
    ]
    content = {"data": [{"paragraphs": [{"context": "The cat sat.", "qas": asked}]}]}
    (tmp_path / "train-v1.1.slice.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    for line in bert_commands("Questions and pairs from scratch"):
        if line.startswith("head"):
            run(["bash", "-c", line], tmp_path)
            continue
        _, _, module, name, *arguments = shlex.split(line)
        assert (module, name) == ("dlrm", "bert")
        if "finetune" in arguments:
            arguments += ["--epochs=1", "--test_after=1"]
        bert.run(bert_flags.parse(arguments))
        results = summary(tmp_path)
        assert any(name.endswith("f1") and 0 <= value <= 100 for name, value in results.items())
    assert len(json.loads((tmp_path / "predictions.json").read_text())) == 32
    assert capsys.readouterr().out.count("more frequent class: accuracy 0.500000  f1 0.0") == 2


def sign_command(folder: Path, model: str) -> list[str]:
    """The guide's command that trains a network on the photographs."""
    pytest.importorskip("PIL", reason="no Pillow, which decodes images")
    (training,) = (words for words in documented_commands("Photographs of signs") if model in words)
    given = [str(folder) if word == "signdigits" else word for word in training]
    assert str(folder) in given, training
    return [*given, "--base_device=cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "least"), [("resnet50", 0.90), ("efficientnet_b0", 0.80)])
def test_networks_learn_photographs_of_signs(shared_data, tmp_path, model, least):
    with tarfile.open(shared_data / "signdigits" / "signdigits_shared.tar") as tar:
        tar.extractall(tmp_path / "digits", filter="data")
    training = sign_command(tmp_path / "digits", model)
    # Takes minutes on one core: tests run in parallel, and threads wait long for a busy core.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = run(training, tmp_path, one_thread)
    assert "train 1,322  test 331 images of 10 classes" in shown
    assert summary(tmp_path)["test_top1"] >= least


@pytest.mark.parametrize(
    "model", ["resnet50", pytest.param("efficientnet_b0", marks=pytest.mark.slow)]
)
def test_the_commands_for_photographs_of_signs_start(tmp_path, model):
    training = sign_command(tmp_path / "digits", model)
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0)
    for number in range(50):
        path = tmp_path / "digits" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(noise.integers(0, 256, (90, 90, 3), np.uint8)).save(path)
    run([*training, "--epochs=3", "--max_steps=2"], tmp_path)
    results = summary(tmp_path)
    assert 0 < results["training_loss"] < 5  # ln 2 is 0.69


def wikitext_commands(vocabulary: Path) -> tuple[list[list[str]], list[str]]:
    """The README's commands that prepare articles and pre-train on them."""
    pytest.importorskip("tokenizers", reason="no tokenizers, which cuts texts into WordPieces")
    *prepare, training = documented_commands("Articles of WikiText-2")
    given = [
        [str(vocabulary) if word == "vocab.txt" else word for word in words] for words in prepare
    ]
    assert len(given) == 2
    return given, training


@pytest.mark.slow
def test_a_small_bert_learns_from_articles_of_wikipedia(shared_data, tmp_path):
    text = (shared_data / "wikitext2" / "valid.txt").read_text(encoding="utf-8")
    articles = [part for part in re.split(r"(?m)^(?= = [^=])", text) if part.strip()]
    held_out = articles[9::10]
    kept = [article for article in articles if article not in held_out]
    assert (len(kept), len(held_out)) == (54, 6)
    (tmp_path / "train.txt").write_text("".join(kept), encoding="utf-8")
    (tmp_path / "test.txt").write_text("".join(held_out), encoding="utf-8")
    prepare, training = wikitext_commands(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    shown = [run(words, tmp_path) for words in prepare]
    assert "54 documents" in shown[0]
    assert "6 documents" in shown[1]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as above
    run([*training, "--base_device=cpu"], tmp_path, one_thread)
    found = summary(tmp_path)
    assert found["test_masked_loss"] < 6.6  # token frequencies alone do not reach it
    (curves,) = tmp_path.rglob("curves.png")
    assert curves.stat().st_size > 1000


def test_the_commands_for_articles_of_wikipedia_start(tmp_path):
    vocabulary = tmp_path / "made_up.txt"
    words = [f"w{letter}" for letter in "abcdefghij"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *words, "."]))
    noise = np.random.default_rng(0)
    for name in ("train", "test"):
        articles = []
        for number in range(4):
            sentences = [" ".join(noise.choice(words, 9)) for _ in range(20)]
            articles.append(f" = {number} = \n \n {' . '.join(sentences)} . \n")
        (tmp_path / f"{name}.txt").write_text("".join(articles))
    prepare, training = wikitext_commands(vocabulary)
    for command in prepare:
        assert "4 documents, 80 sentences" in run(command, tmp_path)
    run([*training, "--base_device=cpu", "--total_steps=2", "--test_freq=2"], tmp_path)
    found = summary(tmp_path)
    assert 0 < found["test_masked_loss"] < 3.5  # ln 16 is 2.8

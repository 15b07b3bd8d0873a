"""A campaign: every command names the file in which it reads a flipped byte.

Flips are seeded, and the seed is printed; `DLRM_FLIPS_SEED` chooses another.
"""

import multiprocessing
import os
import random
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import trained_model

from dlrm.data.verification import MEMORY
from dlrm.preproc import convert_to_binary

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("DLRM_FLIPS_SEED", "1"))
FLIPS = int(os.environ.get("DLRM_FLIPS", "100"))  # per kind of directory, over all its files
UNREAD = (MEMORY, "report.json", "report.html")
# What commands import. Commands define flags, so each process imports them itself.
PRELOADED = [
    *("dlrm.environment", "dlrm.session.session", "dlrm.tasks.footprint"),
    *("dlrm.tasks.recommendation", "dlrm.serving.predictor", "dlrm.serving.network.runtimes"),
    *(
        "dlrm.train.checkpoints.nvidia",
        "dlrm.train.checkpoints.diff",
        "matplotlib.pyplot",
        "torch.distributed",
    ),
]


def run(words, output):
    """Runs a command in a process that has imported torch already; returns its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_be, args=([str(word) for word in words], str(output)))
    process.start()
    process.join(120)
    assert process.exitcode is not None, f"{words}: still runs"
    return process.exitcode, output.read_text()


def _be(words, output):
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = words
    if words[0].endswith(".py"):
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


class Campaign:
    """Flips bytes in copies of inputs and counts the runs that name them."""

    def __init__(self, folder, files):
        self.folder, self.files, self.random = folder, files, random.Random(SEED)
        self.flips, self.named, self.missed = 0, 0, []

    def flip(self, number):
        """Flips a byte of the next file; returns file, place and undo function."""
        self.flips += 1
        path = self.files[number % len(self.files)]
        whole = path.read_bytes()
        damaged, place = bytearray(whole), self.random.randrange(len(whole))
        damaged[place] ^= self.random.randrange(1, 256)
        path.write_bytes(damaged)
        return path, place, lambda: path.write_bytes(whole)

    def expect(self, path, place, command, words):
        code, printed = run(words, self.folder / "output")
        if code not in (0, None) and path.name in printed:
            self.named += 1
        else:
            last = printed.strip().splitlines()[-1:] or [""]
            self.missed.append(f"{path} byte {place}, {command}: exit code {code}, {last[0]}")

    def report(self, what):
        runs = self.named + len(self.missed)
        print(f"\n{what}: {self.flips} flips, seed {SEED}: {self.named} of {runs} runs named them")
        assert not self.missed, "\n".join(self.missed[:20])


def files_below(directory):
    """Returns the files that a command reads: not the memory of checks, nor the report."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and path.stat().st_size and path.name not in UNREAD
    )


def whole(words, tmp_path):
    code, printed = run(words, tmp_path / "output")
    assert code == 0, printed


def test_flips_in_a_split_dataset(trained, tmp_path):
    dataset, model = tmp_path / "dataset", tmp_path / "run"
    shutil.copytree(trained.dataset, dataset)
    shutil.copytree(trained.checkpoint, model)
    steps = ["--max_steps=3", f"--log_path={tmp_path / 'log.json'}"]
    main = ["dlrm.scripts.main", f"--dataset={dataset}", *trained_model.TRAINING, *steps]
    loaded = [*main, f"--load_checkpoint_path={model}"]
    # A resumed run must be of the copy and have the flags of the training before.
    resumed = [*main[:-2], *trained_model.MODEL, main[-1], "--resume", "--epochs=3"]
    commands = {
        "train": [*main, *trained_model.MODEL],
        "train on": [*loaded],
        "resume": [*resumed, f"--save_checkpoint_path={tmp_path / 'resumed'}"],
        "test": [*loaded, "--mode=test"],
        "predict": [
            "dlrm.scripts.predict",
            *(f"--checkpoint={model}", f"--input={dataset}", f"--output={tmp_path / 'scores.npy'}"),
        ],
    }
    reads_train = {"train", "train on", "resume"}
    campaign = Campaign(tmp_path, files_below(dataset))
    for words in commands.values():
        shutil.copytree(model, tmp_path / "resumed", dirs_exist_ok=True)
        whole(words, tmp_path)
        shutil.rmtree(tmp_path / "resumed")
        (dataset / MEMORY).unlink()
    for number in range(FLIPS):
        path, place, undo = campaign.flip(number)
        for name, words in commands.items():
            if path.parent.name == "train" and name not in reads_train:
                continue
            shutil.copytree(model, tmp_path / "resumed", dirs_exist_ok=True)
            campaign.expect(path, place, name, words)
            shutil.rmtree(tmp_path / "resumed")
        undo()
    campaign.report("split dataset")


def test_flips_in_a_checkpoint(trained, tmp_path):
    model = tmp_path / "run"
    shutil.copytree(trained.checkpoint, model)
    (step,) = model.glob("step-*")
    main = ["dlrm.scripts.main", f"--dataset={trained.dataset}", *trained_model.TRAINING]
    main += [f"--log_path={tmp_path / 'log.json'}"]
    commands = {
        "test": [*main, "--mode=test", f"--load_checkpoint_path={model}"],
        "train on": [*main, f"--load_checkpoint_path={model}", "--max_steps=3"],
        "resume": [
            *(*main, *trained_model.MODEL, f"--save_checkpoint_path={model}", "--resume"),
        ],
        "predict": [
            "dlrm.scripts.predict",
            *(f"--checkpoint={model}", f"--input={trained.log}"),
            f"--output={tmp_path / 'scores.npy'}",
        ],
        "inspect a run": ["dlrm.scripts.checkpoint", "inspect", model],
        "inspect": ["dlrm.scripts.checkpoint", "inspect", step],
        "convert": [
            *("dlrm.scripts.checkpoint", "convert", "--to=nvidia"),
            *(f"--output={tmp_path / 'theirs'}", model),
        ],
    }
    for words in commands.values():
        whole(words, tmp_path)
        shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
    campaign = Campaign(tmp_path, files_below(model))
    for number in range(FLIPS):
        path, place, undo = campaign.flip(number)
        for name, words in commands.items():
            reads_no_table = name == "inspect a run" and path.parent.name == "tables"
            reads_no_pointer = name == "inspect" and path.name == "best.json"
            if not reads_no_table and not reads_no_pointer:
                campaign.expect(path, place, name, words)
                shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
        undo()
    campaign.report("checkpoint")


def test_flips_in_a_binary_dataset(trained, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs dlrm[preproc]")
    parquet = pytest.importorskip("pyarrow.parquet")
    random = np.random.default_rng(0)
    rows = 2000
    columns = {"label": random.integers(0, 2, rows, np.int8)}
    columns |= {f"n{i}": random.random(rows, np.float32) for i in range(3)}
    columns |= {f"c{i}": random.integers(0, 50, rows, np.int32) for i in range(4)}
    table = pyarrow.table(columns)
    for split, begin, end in (("train", 0, 1800), ("test", 1800, 1900), ("validation", 1900, rows)):
        (tmp_path / "parquet" / split).mkdir(parents=True)
        parquet.write_table(table[begin:end], tmp_path / f"parquet/{split}/rows.parquet")
    dataset = tmp_path / "dataset"
    convert_to_binary.convert(tmp_path / "parquet", dataset, 1)
    main = ["dlrm.scripts.main", f"--dataset={dataset}", "--dataset_type=binary"]
    main += ["--num_numerical_features=3", *trained_model.TRAINING, *trained_model.MODEL]
    main += [f"--log_path={tmp_path / 'log.json'}"]
    model = f"--save_checkpoint_path={tmp_path / 'run'}"
    whole([*main, model], tmp_path)
    commands = {
        "train": [*main, "--max_steps=3"],
        "test": [*main, "--mode=test", f"--load_checkpoint_path={tmp_path / 'run'}"],
    }
    unread = {
        "train": "test_data.bin",
        "test": "train_data.bin",
    }  # in three steps, nothing is tested
    campaign = Campaign(tmp_path, files_below(dataset))
    for number in range(FLIPS // 4):
        path, place, undo = campaign.flip(number)
        for name, words in commands.items():
            if path.name in ("val_data.bin", unread[name]):
                continue
            campaign.expect(path, place, name, words)
        undo()
    campaign.report("binary dataset")

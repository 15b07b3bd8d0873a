"""Files that --profile writes for a run's steps."""

import gzip
import json

import torch

from dlrm.language import flags as bert_flags
from dlrm.vision import command as cnn, flags as cnn_flags


def losses(path):
    entries = [json.loads(line.removeprefix("DLLL ")) for line in path.read_text().splitlines()]
    return [e["data"]["loss"] for e in entries if e.get("step") and "loss" in e["data"]]


def events(path):
    with gzip.open(path, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def steps(names):
    return {name for name in names if name.startswith("ProfilerStep")}


def test_some_steps_are_recorded_and_all_losses_stay(command, tmp_path, capsys):
    command("--max_steps=12", "--print_freq=1", "--log_path=plain/log.json")
    capsys.readouterr()
    command("--max_steps=12", "--print_freq=1", "--log_path=seen/log.json", "--profile=3")
    assert losses(tmp_path / "seen/log.json") == losses(tmp_path / "plain/log.json")
    assert len(losses(tmp_path / "plain/log.json")) == 11
    names = events(tmp_path / "seen/profile-rank0.json.gz")
    assert steps(names) == {f"ProfilerStep#{step}" for step in (5, 6, 7)}
    assert names.count("Optimizer.step#RowAdam.step") == 3, "one a step"
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("operators that took"))
    column = lines[start + 2].index("Self CPU %") + len("Self CPU %")
    shares = [float(line[:column].split()[-1].strip("%")) for line in lines[start + 4 : start + 14]]
    assert shares == sorted(shares, reverse=True)
    assert not list(tmp_path.glob("plain/profile*"))


def test_a_run_that_is_too_short_says_so(command, tmp_path, capsys):
    command("--max_steps=7", "--profile=3")
    said = "note: no profile: --profile 3 follows 5 steps of warm-up, and the run took 7"
    assert said in capsys.readouterr().out
    assert not list(tmp_path.glob("profile*"))


def test_image_networks_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    arguments = ["--model=resnet50", "--depths=1,1,1,1", "--image_size=32"]
    arguments += ["--data=generated", "--synthetic_dataset_num_entries=16", "--batch_size=2"]
    run = ["--base_device=cpu", "--no_validation", "--max_steps=7", "--profile=2", "--lr=0.01"]
    cnn.run(cnn_flags.parse([*arguments, *run]))
    names = events(tmp_path / "profile-rank0.json.gz")
    assert len(steps(names)) == 2
    assert names.count("Optimizer.step#SGD.step") == 2


def test_language_networks_have_the_flag():
    assert bert_flags.parse(["--mode=pretrain", "--profile=4"])["profile"] == 4

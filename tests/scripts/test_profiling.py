"""Files that --profile writes for a run's steps."""

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from dlrm.language import flags as bert_flags
from dlrm.session.profiling import timeline
from dlrm.vision import command as cnn, flags as cnn_flags


def losses(path):
    entries = [json.loads(line.removeprefix("DLLL ")) for line in path.read_text().splitlines()]
    return [e["data"]["loss"] for e in entries if e.get("step") and "loss" in e["data"]]


def events(path):
    with gzip.open(path, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def steps(names):
    return {name for name in names if name.startswith("ProfilerStep")}


def test_a_timeline_has_each_operator_once_by_its_kind():
    always = ProfilerAction.RECORD
    a, b = torch.randn(300, 300), torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.SGD([b], lr=1.0)
    with profile(activities=[ProfilerActivity.CPU], schedule=lambda _: always) as profiler:
        for _ in range(3):
            profiler.step()
            torch.addmm(a, a, a).matmul(a)
            b.grad = torch.ones(10)
            optimizer.step()
            torch.cat([a, a]).clone()
    rows = timeline(profiler.events())
    assert {kind: len(pieces) for (_, kind), pieces in rows.items() if kind != "other"} == {
        "products, convolutions": 2,
        "optimizers": 1,
        "copies": 3,
    }  # of the last step; `ones` fills
    order = [min(rows["CPU", kind]) for kind in ("products, convolutions", "optimizers")]
    assert order == sorted(order)
    assert all(begin >= 0 and ms >= 0 for pieces in rows.values() for begin, ms in pieces)


@pytest.mark.usefixtures("curves")
def test_some_steps_are_recorded_and_drawn_and_all_losses_stay(command, tmp_path, capsys):
    command("--max_steps=12", "--print_freq=1", "--log_path=plain/log.json")
    capsys.readouterr()
    command("--max_steps=12", "--print_freq=1", "--log_path=seen/log.json", "--profile=3")
    assert losses(tmp_path / "seen/log.json") == losses(tmp_path / "plain/log.json")
    assert len(losses(tmp_path / "plain/log.json")) == 11
    names = events(tmp_path / "seen/profile-rank0.json.gz")
    assert len(steps(names)) == 3
    assert names.count("Optimizer.step#RowAdam.step") == 3, "one a step"
    assert (tmp_path / "seen/profile-rank0.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("operators that took"))
    longest = [line.split() for line in lines[start + 1 : start + 11]]
    shares = [float(words[0].removesuffix("%")) for words in longest]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100
    assert all(words[3] == "calls" for words in longest)
    assert not list(tmp_path.glob("plain/profile*"))


def test_the_first_steps_are_left_out(command, tmp_path, capsys):
    command("--max_steps=9", "--benchmark_warmup_steps=7", "--profile=2", "--print_freq=4")
    assert len(steps(events(tmp_path / "profile-rank0.json.gz"))) == 2
    assert "no picture of the profile: " in capsys.readouterr().out


def test_a_run_that_is_too_short_says_so(command, tmp_path, capsys):
    command("--max_steps=7", "--profile=3")
    said = "note: no profile: --profile 3 follows 5 steps of warm-up, and the run took 7"
    assert said in capsys.readouterr().out
    assert not list(tmp_path.glob("profile*"))


def test_only_trainings_are_recorded(command):
    with pytest.raises(ValueError, match="--profile 2 contradicts --mode test"):
        command("--mode=test", "--profile=2")


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

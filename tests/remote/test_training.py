"""Trainings whose checkpoints are at a URI: killed, resumed, stopped and without a store."""

import json
import os
import random
import signal
import time

import forked
import pytest
import trained_model

from dlrm.remote import objects as stores
from dlrm.remote.localize import checkpoint_among
from dlrm.remote.mirror import NOT_UPLOADED, NotUploadedError
from dlrm.remote.objects import open_store
from dlrm.scripts.common import click_command, dlrm_flags
from dlrm.tasks.ending import STOPPED

LAST = "step-000000064"
_OF_THE_RUN = ("manifest.json", "MODEL.md", "config.json", "progress.json")  # with times and paths


@pytest.fixture
def flags(trained, tmp_path, monkeypatch):
    """Flags of a training that saves eight times; its last is its best checkpoint."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own = [*trained_model.MODEL, *trained_model.TRAINING]
    return [f"--dataset={trained.dataset}", *own, "--checkpoint_freq=8", "--test_freq=16"]


def at(uri):
    """Returns the content of all objects below a URI."""
    store, base = open_store(uri), uri.folder
    found = store.entries(base)
    return {e.key.removeprefix(base): bytes(store.read(e)) for e in found}


def weights_of(files):
    """Returns the files of the last checkpoint that are the same in all runs."""
    own = {name.removeprefix(f"{LAST}/"): c for name, c in files.items() if name.startswith(LAST)}
    progress = json.loads(own["progress.json"])
    kept = {name: content for name, content in own.items() if name not in _OF_THE_RUN}
    return kept | {"best": progress["best"], "curve": [e["loss"] for e in progress["curve"]]}


def local_weights(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return weights_of({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})


@pytest.fixture
def expected(flags, tmp_path):
    """The last checkpoint of a local training that nothing has interrupted."""
    forked.succeed("dlrm.scripts.main", *flags, f"--save_checkpoint_path={tmp_path / 'local'}")
    return local_weights(tmp_path / "local")


class Killer:
    """Kills a process when it sends its n-th request that writes or deletes.

    Args:
        number: the number.
        after: whether it is killed while the request is answered.
    """

    def __init__(self, number, after):
        self.number, self.after, self.process, self.requests = number, after, None, 0

    def __call__(self, method, path):
        if method in ("PUT", "DELETE") and self.process is not None:
            self.requests += 1
            if self.requests == self.number:
                self.process.kill()
                return not self.after
        return False


def killed(flags, uri, folder, watchers, number, after):
    """Runs a training that is killed; returns its output."""
    killer = Killer(number, after)
    watchers.append(killer)
    output = folder / "output"
    killer.process = forked.start(
        "dlrm.scripts.main", *flags, f"--save_checkpoint_path={uri}", "--resume", stdout=output
    )
    killer.process.join(60)
    watchers.remove(killer)
    return killer.process.exitcode, output.read_text()


def check_loads(flags, uri, folder):
    """Checks that the best of the checkpoints that a killed run has left at a URI is loaded."""
    keys = [entry.key for entry in open_store(uri).entries(uri.folder)]
    if any(key.endswith("/manifest.json") for key in keys):
        best = checkpoint_among(uri, keys)
        loaded = [f"--load_checkpoint_path={uri}", "--mode=test", f"--log_path={folder / 'log'}"]
        tested = forked.succeed("dlrm.scripts.main", *flags[:-2], *loaded)
        assert f"weights from {best}" in tested.stdout


def check_resumed(flags, uri, expected):
    """Checks that the command of a killed run completes it."""
    forked.succeed("dlrm.scripts.main", *flags, f"--save_checkpoint_path={uri}", "--resume")
    found = at(uri)
    assert weights_of(found) == expected
    assert {name.partition("/")[0] for name in found} == {LAST, "best.json", "log.json"}
    assert found["log.json"].count(b'"PARAMETER"') in (1, 2)


def test_a_killed_training_goes_on_from_its_uri(flags, bucket, tmp_path, watchers, expected):
    uri = bucket.below("run")
    code, said = killed(flags, uri, tmp_path, watchers, 60, True)
    assert code == -signal.SIGKILL, said
    check_resumed(flags, uri, expected)


@pytest.mark.slow
def test_trainings_killed_at_any_request_end_alike(
    flags, bucket, tmp_path, watchers, expected, monkeypatch
):
    draw = random.Random(20261126)
    for turn in range(20):
        uri = bucket.below(f"run{turn}")
        number, after = draw.randrange(1, 160), draw.random() < 0.5
        code, said = killed(flags, uri, tmp_path, watchers, number, after)
        assert code in (0, -signal.SIGKILL), said  # it may have ended before
        check_loads(flags, uri, tmp_path)
        if turn % 4 == 0:  # goes on where the cache is not
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine{turn}"))
        check_resumed(flags, uri, expected)


def test_a_run_goes_on_from_the_newest_checkpoint_at_a_uri(flags, bucket, tmp_path):
    first, second = bucket.below("day1"), bucket.below("day2")
    short = [*flags[:-2], "--max_steps=3", f"--log_path={tmp_path / 'log'}"]  # without a test
    forked.succeed("dlrm.scripts.main", *short, f"--save_checkpoint_path={first}")
    words = [
        short[0],
        "--max_steps=2",
        f"--continue_from={first}",
        f"--save_checkpoint_path={second}",
    ]
    said = forked.succeed("dlrm.scripts.main", *words, "--base_device=cpu").stdout
    assert f"continues from {first}/step-000000003 after step 3" in said
    assert "step-000000005/manifest.json" in at(second)
    done = forked.run(
        "dlrm.scripts.main", *words[:3], f"--save_checkpoint_path={first}", "--resume"
    )
    assert f"{first}/step-000000003: is in --save_checkpoint_path {first}" in done.stderr


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command line in this process, with little patience for a failing store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(stores._RETRIES, "max_retries", 0)
    return lambda *words: click_command.run(dlrm_flags.parse([*words]))


def test_seeds_need_a_directory_of_this_machine(flags, run):
    message = "--seeds 1-2 --save_checkpoint_path s3://b/run: expected a path of this"
    with pytest.raises(ValueError, match=message):
        run(*flags, "--save_checkpoint_path=s3://b/run", "--seeds=1-2")


@pytest.mark.slow
def test_a_training_without_a_store_keeps_its_checkpoints(flags, bucket, run, watchers, capsys):
    uri = bucket.below("run")
    watchers.append(lambda method, path: method == "PUT")
    saves = [*flags, f"--save_checkpoint_path={uri}"]
    with pytest.raises(NotUploadedError) as raised:
        run(*saves)
    assert f"{uri}: 1 checkpoint is not uploaded (s3://" in str(raised.value)
    assert "warning: s3://" in capsys.readouterr().err
    assert not at(uri)
    watchers.clear()
    with pytest.raises(FileExistsError, match=f"has {LAST} of an earlier run that could not"):
        run(*saves)
    run(*saves, "--resume")
    assert {name.partition("/")[0] for name in at(uri)} == {LAST, "best.json", "log.json"}


@pytest.fixture
def endless(flags, bucket, tmp_path):
    """Starts a training at a URI that does not end, once; returns its process and its output."""
    uri, started = bucket.below("run"), []

    def start(*words):
        output = tmp_path / f"output{len(started)}"
        words = [*flags, f"--save_checkpoint_path={uri}", "--epochs=1000000", *words]
        started.append(forked.start("dlrm.scripts.main", *words, stdout=output))
        return started[-1], output

    yield start
    for process in started:
        process.kill()


def names_at(uri):
    return {entry.key.removeprefix(uri.folder) for entry in open_store(uri).entries(uri.folder)}


def wait_for_step(uri, after=""):
    """Waits for a checkpoint after another; returns its name."""
    end = time.monotonic() + 60
    while True:
        steps = sorted(name.partition("/")[0] for name in names_at(uri) if "/manifest" in name)
        if steps and steps[-1] > after:
            return steps[-1]
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_exit_codes(endless, flags, bucket, watchers):
    uri = bucket.below("run")
    process, output = endless()
    wait_for_step(uri)
    second = forked.run("dlrm.scripts.main", *flags, f"--save_checkpoint_path={uri}", "--resume")
    assert second.returncode == 1
    assert second.stderr == f"error: {uri}: another process of this machine writes there\n"
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == STOPPED, output.read_text()
    newest = wait_for_step(uri)
    assert f"--resume continues from {uri}/{newest}" in output.read_text()

    process, output = endless("--resume")
    newest = wait_for_step(uri, newest)
    watchers.append(lambda method, path: method == "PUT")
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == NOT_UPLOADED, output.read_text()
    assert "not uploaded (" in output.read_text().splitlines()[-1]

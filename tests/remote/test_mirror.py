"""Directories of checkpoints shown at URIs, and the right to write there."""

import json
import time
from contextlib import suppress

import pytest

from dlrm.files import MANIFEST
from dlrm.manifest import sealed_json, write_manifest
from dlrm.remote import mirror as module, objects as stores
from dlrm.remote.cache import Cache
from dlrm.remote.localize import localize
from dlrm.remote.mirror import NotUploadedError, mirrored
from dlrm.remote.objects import open_store


class StoppedError(Exception):
    """As of a training that has saved."""


@pytest.fixture
def uri(bucket):
    return bucket.below("runs/one")


@pytest.fixture
def impatient(monkeypatch):
    """Lets failures be noticed at once."""
    monkeypatch.setitem(stores._RETRIES, "max_retries", 0)
    monkeypatch.setattr(module, "_PATIENCE", 0.5)


def save(path, step, best=None):
    """Writes a checkpoint whose progress names the best; returns its directory."""
    directory = path / f"step-{step:09d}"
    (directory / "tables").mkdir(parents=True)
    (directory / "tables" / "0.bin").write_bytes(b"rows of %d" % step)
    progress = {"step": step, "best": {"step": best, "auc": 0.5} if best else {}}
    (directory / "progress.json").write_text(json.dumps(progress))
    write_manifest(directory, "checkpoint")
    if best:
        (path / "best.json").write_text(sealed_json({"step": best, "auc": 0.5}))
    return directory


def files_at(uri):
    base = uri.folder
    return {entry.key.removeprefix(base) for entry in open_store(uri).entries(base)}


def files_of(*steps):
    names = (MANIFEST, "progress.json", "tables/0.bin")
    return {f"step-{step:09d}/{name}" for step in steps for name in names}


def stop(cache, uri, save):
    """Saves a checkpoint in a run that is then stopped, so that its local directory stays."""
    with suppress(StoppedError), mirrored(cache, uri, saved=(StoppedError,)) as run:
        run.saved([save(run.path)])
        raise StoppedError


def wait_until(act):
    end = time.monotonic() + 60
    while not act():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_kept_checkpoints_are_shown_and_others_removed(uri, watchers):
    seen = []
    watchers.append(lambda method, path: seen.append((method, path.partition("/one/")[2])))
    with mirrored(Cache.open(), uri) as run:
        first = save(run.path, 10, best=10)
        run.saved([first])
        wait_until(lambda: "best.json" in files_at(uri))
        (run.path / "log.json").write_text("DLLL {}\nDLLL half")
        run.add_log(run.path / "log.json")
        second = save(run.path, 20, best=10)
        run.saved([first, second])
        wait_until(lambda: files_of(20) | {"log.json"} <= files_at(uri))
        store = open_store(uri)
        assert bytes(store.read(store.entry(uri.below("log.json").key))) == b"DLLL {}\n"
        assert files_at(uri) == files_of(10, 20) | {"best.json", "log.json"}
        third = save(run.path, 30, best=30)
        run.saved([third])
    assert files_at(uri) == files_of(30) | {"best.json", "log.json"}
    assert not run.path.exists()
    written = [path for method, path in seen if method == "PUT" and path]
    assert written.index(f"{first.name}/{MANIFEST}") == 2
    assert written.index("best.json") == 3
    removed = [path for method, path in seen if method == "DELETE"]
    for step in (first, second):
        own = [path for path in removed if path.startswith(step.name)]
        assert own[0] == f"{step.name}/{MANIFEST}"


def test_a_resumed_run_has_the_newest_and_the_best(uri):
    with mirrored(Cache.open(), uri, keep=2) as run:
        run.saved([save(run.path, step, best=10) for step in (10, 20, 30)])
        (run.path / "log.json").write_text("DLLL {}\n")
    with (
        pytest.raises(FileExistsError, match=f"{uri}/step-000000030: from an earlier run"),
        mirrored(Cache.open(), uri),
    ):
        pass
    with mirrored(Cache.open(), uri, keep=2, resume=True) as run:
        steps = sorted(run.path.glob("step-*"))
        assert [step.name[-2:] for step in steps] == ["10", "30"]
        assert (run.path / "log.json").read_text() == "DLLL {}\n"
        run.saved(steps)
        wait_until(lambda: not run._changed.is_set() and run._best)
        assert files_of(10, 20, 30) <= files_at(uri)  # the last two
        run.saved([*steps, save(run.path, 40, best=10)])
    assert files_at(uri) == files_of(10, 30, 40) | {"best.json", "log.json"}
    assert localize(uri).endswith("/step-000000010")


def test_what_a_killed_run_could_not_upload_is_used(uri, impatient, watchers):
    cache = Cache.open()
    with mirrored(cache, uri) as run:
        run.saved([save(run.path, 10)])
    watchers.append(lambda method, path: method == "PUT" and "step-000000020" in path)
    with (
        pytest.raises(NotUploadedError, match=f"{uri}: 1 checkpoint is not uploaded .*kept in"),
        mirrored(cache, uri, resume=True) as run,
    ):
        run.saved([save(run.path, 20)])
    watchers.clear()
    with mirrored(cache, uri, resume=True) as run:
        assert {step.name[-2:] for step in run.path.glob("step-*")} == {"10", "20"}
        run.saved([run.path / "step-000000020"])
    assert files_at(uri) == files_of(20)


def test_what_another_machine_has_changed_is_fetched(uri, tmp_path, capsys):
    here, there = Cache.open(), Cache.open(tmp_path / "there")
    stop(here, uri, lambda path: save(path, 20))
    assert files_at(uri) == files_of(20)
    with mirrored(there, uri, resume=True) as run:
        run.saved([save(run.path, 30)])
    with mirrored(here, uri, resume=True) as run:
        assert [step.name[-2:] for step in run.path.glob("step-*")] == ["30"]
    assert "another run has changed it, so step-000000020 that" in capsys.readouterr().err


def test_a_failing_store_is_warned_about_once(uri, impatient, watchers, capsys):
    with mirrored(Cache.open(), uri) as run:
        watchers.append(lambda method, path: method == "PUT" and "step-" in path)
        steps = [save(run.path, 10)]
        run.saved(steps)
        said = []
        wait_until(lambda: said.append(capsys.readouterr().err) or said[-1])
        err = "".join([*said, capsys.readouterr().err])
        assert err.count("\n") == 1
        assert f"warning: {uri}: 1 checkpoint is not uploaded yet (s3://" in err
        steps.append(save(run.path, 20))
        run.saved(steps)
        wait_until(lambda: "2 checkpoints are" in capsys.readouterr().err)
        watchers.clear()
    assert capsys.readouterr().err == f"note: {uri}: uploaded now\n"
    assert files_of(20) <= files_at(uri)

"""A running writer keeps its files; those of an ended one are removed or restored."""

import errno
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from dlrm import files, locks
from dlrm.files import atomic_directory, atomic_file, write_atomically
from dlrm.manifest import read_manifest, write_manifest


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def other_process(work):
    """Runs `work(pause)` in a fork until it calls `pause`, then until the block ends.

    Yields a function that kills it instead.
    """
    (reached, reaching), (going, go) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        status = 1
        try:
            work(lambda: (os.write(reaching, b"."), os.read(going, 1)))
            status = 0
        finally:
            os._exit(status)
    os.close(going)
    assert os.read(reached, 1) == b"."
    killed = []
    try:
        yield lambda: killed.append(os.kill(pid, signal.SIGKILL))
    finally:
        os.close(go)
        status = os.waitpid(pid, 0)[1]
        for end in (reached, reaching):
            os.close(end)
    assert bool(killed) or status == 0


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchanges(request, monkeypatch):
    """Says whether the system can exchange two names."""
    if not request.param:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    return request.param


def write(final, text, pause=lambda: None, replace=True):
    """Writes a directory of two files with the same text, of which a mixture can be told."""
    with atomic_directory(final, replace) as staging:
        (staging / "one").write_text(text)
        pause()
        (staging / "two").write_text(text)
        write_manifest(staging, "dataset", text=text)


def content(final):
    read_manifest(final, "dataset", check_crc=True)
    return {(final / name).read_text() for name in ("one", "two")}


def test_a_lock_ends_with_its_process_however_it_ends(tmp_path):
    path = tmp_path / "folder" / "lock"

    def hold(pause):
        with locks.lock(path):
            pause()

    with other_process(hold) as kill:
        with pytest.raises(BlockingIOError, match="^at work$"), locks.lock(path, "at work"):
            pytest.fail("the block must not run")
        kill()
        with locks.lock(path):  # waits
            pass


@pytest.mark.parametrize("is_command", [False, True])
def test_a_fork_does_not_hold_a_lock_but_a_command_that_inherits_it(tmp_path, is_command):
    path, left = tmp_path / "lock", tmp_path / "left"

    def sleeping(held):
        if is_command:
            return subprocess.Popen(["sleep", "60"], pass_fds=[held]).pid
        if not (process := os.fork()):
            time.sleep(60)
            os._exit(0)
        return process

    def hold(pause):
        with locks.lock(path) as held:
            left.write_text(str(sleeping(held)))
            pause()

    with other_process(hold) as kill:
        kill()
    outcome = pytest.raises(BlockingIOError) if is_command else nullcontext()
    with outcome, locks.lock(path, "at work"):
        pass
    os.kill(int(left.read_text()), signal.SIGKILL)
    with locks.lock(path):
        pass


def test_writers_with_one_process_id_do_not_mix_what_they_write(tmp_path, monkeypatch, exchanges):
    """As in two containers, in each of which the writer is process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    final = tmp_path / "dataset"
    write(final, "first")
    with other_process(lambda pause: write(final, "second", pause)):
        write(final, "third")
        assert content(final) == {"third"}
    assert content(final) == {"second"}
    assert names(tmp_path) == ["dataset"]


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    final = tmp_path / "dataset"
    with other_process(lambda pause: write(final, "killed", pause)) as kill:
        kill()
    assert len(names(tmp_path)) == 1
    write(final, "next")
    assert content(final) == {"next"}
    assert names(tmp_path) == ["dataset"]


def test_a_file_that_is_being_written_is_left_to_its_writer(tmp_path):
    def write_slowly(pause):
        with atomic_file(tmp_path / "scores") as partial:
            partial.write_text("slow")
            pause()

    with other_process(write_slowly):
        write_atomically(tmp_path / "scores", "fast")
        assert (tmp_path / "scores").read_text() == "fast"
    assert (tmp_path / "scores").read_text() == "slow"
    with other_process(write_slowly) as kill:
        kill()
    assert len(names(tmp_path)) == 2
    write_atomically(tmp_path / "scores", "next")
    assert names(tmp_path) == ["scores"]


def test_without_locks_nothing_of_another_process_is_removed(tmp_path, monkeypatch):
    def no_locks(descriptor, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    with locks.lock(tmp_path / "lock", "at work") as held, locks.lock(tmp_path / "lock", "at work"):
        assert held is None
    (tmp_path / "lock").unlink()
    final = tmp_path / "dataset"
    with other_process(lambda pause: write(final, "slow", pause)):
        write(final, "fast")
        assert content(final) == {"fast"}
    assert content(final) == {"slow"}
    assert names(tmp_path) == ["dataset"]


def test_ctrl_c_between_two_renames_keeps_the_old_directory(tmp_path, monkeypatch):
    final, rename = tmp_path / "dataset", Path.rename
    write(final, "old")

    def interrupted(source, target):
        rename(source, target)
        if source == final:
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(final, "new")
    assert content(final) == {"old"}
    assert names(tmp_path) == ["dataset"]


def test_a_directory_that_appeared_meanwhile_is_kept(tmp_path):
    final = tmp_path / "dataset"

    def appear():
        write(final, "first")

    with pytest.raises(FileExistsError, match="dataset: another process has written it meanwhile"):
        write(final, "second", appear, replace=False)
    assert content(final) == {"first"}
    assert names(tmp_path) == ["dataset"]


def test_a_reader_never_finds_a_gap_or_a_mixture(tmp_path):
    final, rounds = tmp_path / "dataset", 30
    write(final, "0")
    over = threading.Event()
    found = []

    def read():
        while not over.is_set():
            try:
                with locks.unreplaced(final):
                    texts = content(final)
            except locks.ReplacedError:
                continue
            found.append(len(texts))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(rounds):
            write(final, str(number))
    finally:
        over.set()
        reader.join()
    assert set(found) == {1}


def test_an_error_of_a_replaced_directory_says_so(tmp_path):
    final = tmp_path / "dataset"
    write(final, "first")

    def read_replaced():
        with locks.unreplaced(final):
            write(final, "second")
            raise ValueError("damaged")

    with pytest.raises(locks.ReplacedError, match="dataset: was replaced"):
        read_replaced()
    with pytest.raises(ValueError, match="damaged"), locks.unreplaced(final):
        raise ValueError("damaged")

"""Runs killed anywhere resume and end in the same bytes; nothing of two runs is mixed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preproc_testing import GOOD, KilledError, killed_at, write_days
from tables_testing import Inline, contents

from dlrm.data.sources.log_lines import LogFormat
from dlrm.preproc.duckdb_engine import local_engine
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.logs import pipeline
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.raw_log import find_days
from dlrm.preproc.prepare import input_facts
from dlrm.preproc.stages.stage import PreparationRun
from dlrm.preproc.work_folder import open_work_folder
from dlrm.scripts.simulate_logs.command import Simulation, simulate

pytestmark = pytest.mark.long
COMMAND = Path(__file__).resolve().parents[2] / "preproc" / "spark_data_utils.py"


def prepare(engine, raw, output, restart=False, replace=True, **options):
    options = LogOptions(frequency_limit="1", **options)
    days = find_days(raw)
    facts = options.facts() | input_facts(days)
    with open_work_folder(output / "dataset", facts, replace, restart) as work:
        pipeline.prepare(PreparationRun(engine, work, options, lambda text: None), days)
        work.publish()


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw") / "logs"
    simulate(Simulation(rows=150, days=2, num_numerical=2, num_categorical=3), folder)
    return folder


@pytest.fixture(scope="module")
def whole(raw, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    prepare(Inline(), raw, output, log_format=LogFormat(2, 3), split_bytes=2000)
    return contents(output)


def test_a_result_says_no_more_than_is_on_the_disk(raw, tmp_path, monkeypatch):
    """A power failure leaves a file as it was at its last fsync."""
    on_disk, fsync, rename, seen = {}, os.fsync, Path.replace, [0]

    def wait(descriptor):
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        on_disk[path.stat().st_ino] = None if path.is_dir() else path.read_bytes()

    def replace(self, target):
        of_task = target.suffix == ".json" and target.parent.suffix == ".tasks"
        if of_task or target.name == "described.done":
            seen[0] += 1
            written = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
            for path, content in written.items():
                if of_task and path.parent.name == "output":
                    continue  # no task writes these
                if content.strip(b"\0"):
                    assert on_disk.get(path.stat().st_ino) == content, path
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", wait)
    monkeypatch.setattr(Path, "replace", replace)
    prepare(Inline(), raw, tmp_path, log_format=LogFormat(2, 3), split_bytes=2000)
    assert seen[0] > 20


def leave_work_folder(monkeypatch, raw, output, options):
    """Ends a run between publishing its output and removing its work folder."""
    with monkeypatch.context() as patch:
        patch.setattr("dlrm.preproc.work_folder.remove_work_folder", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(Inline(), raw, output, **options)


@pytest.mark.parametrize("became", ["deleted", "deleted after it replaced", "another", "cut off"])
def test_complete_means_that_the_output_is_there(raw, whole, tmp_path, monkeypatch, became):
    options = {"log_format": LogFormat(2, 3), "split_bytes": 2000}
    if became == "another":
        prepare(Inline(), raw, tmp_path / "other", seed=1, **options)
    elif became == "deleted after it replaced":
        prepare(Inline(), raw, tmp_path / "run", seed=1, **options)
    leave_work_folder(monkeypatch, raw, tmp_path / "run", options)
    dataset = tmp_path / "run" / "dataset"
    if became == "cut off":
        (dataset / "train" / "label.bin").write_bytes(b"")
    else:
        shutil.rmtree(dataset)
    if became == "another":
        (tmp_path / "other" / "dataset").rename(dataset)
    prepare(Inline(), raw, tmp_path / "run", **options)
    assert contents(tmp_path / "run") == whole


def test_what_is_published_already_needs_no_leave_to_replace_it(raw, whole, tmp_path, monkeypatch):
    options = {"log_format": LogFormat(2, 3), "split_bytes": 2000, "replace": False}
    leave_work_folder(monkeypatch, raw, tmp_path, options)
    prepare(Inline(), raw, tmp_path, **options)
    assert contents(tmp_path) == whole
    with pytest.raises(FileExistsError, match="exists and is not empty") as refused:
        prepare(Inline(), raw, tmp_path, **options)
    whole_of = (
        r"a finished dataset with all its files, of [-\d]{10} [:\d]{8} UTC, made with numeric_"
    )
    assert re.search(f"{whole_of}.*seed 0.*; if this command made it", str(refused.value))
    (tmp_path / "dataset" / "train" / "label.bin").write_bytes(b"")
    with pytest.raises(FileExistsError, match=r"not empty; name another or remove it$"):
        prepare(Inline(), raw, tmp_path, **options)


def test_killed_while_it_tidies_up_after_publishing_the_retry_says_that_the_output_is_whole(
    raw, tmp_path, monkeypatch
):
    options = {"log_format": LogFormat(2, 3), "split_bytes": 2000, "replace": False}
    remove = shutil.rmtree

    def stop(folder, **how):
        if str(folder).endswith(".removed"):
            raise KilledError
        remove(folder, **how)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stop)
        with pytest.raises(KilledError):
            prepare(Inline(), raw, tmp_path, **options)
    with pytest.raises(FileExistsError, match="It holds a finished dataset with all its files"):
        prepare(Inline(), raw, tmp_path, **options)


def begin(raw, output, **options):
    """Leaves an unfinished run."""
    with killed_at(20):
        prepare(Inline(), raw, output, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numeric_transform": "nvidia"}, "--numeric_transform was readme and is nvidia"),
        ({"dictionary_days": (0, 0)}, r"--dictionary_days was not there and is \[0, 0\]"),
    ],
)
def test_a_changed_option_is_named(raw, tmp_path, change, message):
    options = {"log_format": LogFormat(2, 3), "split_bytes": 2000}
    begin(raw, tmp_path, **options)
    with pytest.raises(ValueError, match=f"{message}. --restart discards it and begins"):
        prepare(Inline(), raw, tmp_path, **(options | change))
    prepare(Inline(), raw, tmp_path, restart=True, **(options | change))
    prepare(Inline(), raw, tmp_path / "direct", **(options | change))
    assert contents(tmp_path / "dataset") == contents(tmp_path / "direct" / "dataset")


def test_a_folder_of_others_is_not_touched(raw, tmp_path):
    foreign = tmp_path / "dataset.unfinished"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("not ours")
    for restart in (False, True):
        with pytest.raises(FileExistsError, match="not written by this program"):
            prepare(Inline(), raw, tmp_path, restart, log_format=LogFormat(2, 3))
    assert (foreign / "thesis.txt").read_text() == "not ours"


def test_two_runs_at_once_are_refused(raw, tmp_path):
    with (
        open_work_folder(tmp_path / "dataset", {}, True, False),
        pytest.raises(FileExistsError, match="another process is at work"),
    ):
        prepare(Inline(), raw, tmp_path)


class Crash:
    """A task that kills its process a given number of times."""

    def __init__(self, folder, times):
        self.folder, self.times = folder, times

    def __call__(self, item):
        for number in range(self.times):
            try:
                (self.folder / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"done{item}").touch()


def test_a_process_that_is_killed_is_replaced(tmp_path):
    with local_engine(2) as engine:
        engine.run("stage", Crash(tmp_path, 2), range(4))
        assert len(list(tmp_path.glob("done*"))) == 4
    (tmp_path / "b").mkdir()
    killed = pytest.raises(EngineError, match="a process was killed 3 times")
    with local_engine(1) as engine, killed:
        engine.run("stage", Crash(tmp_path / "b", 99), range(4))


def test_processes_end_with_the_one_that_started_them(tmp_path):
    code = (
        "import sys, time; sys.path[:0] = sys.argv[1:]\n"
        "from dlrm.preproc.execution.engines import local_engine\n"
        "if __name__ == '__main__':\n"
        "  with local_engine(2) as e: e.run('sleep', time.sleep, [0, 0]);"
        " print(*e._pool._processes, flush=True); time.sleep(60)\n"
    )
    (tmp_path / "run.py").write_text(code)
    root = str(COMMAND.parents[1])
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", root], stdout=subprocess.PIPE, text=True
    )
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) in (1, 2)
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(600):
        if not any(Path(f"/proc/{pid}").exists() for pid in children):
            return
        time.sleep(0.1)
    pytest.fail("processes are left")


def test_a_full_disk_is_named_and_the_run_goes_on(tmp_path):
    days = write_days(tmp_path / "raw", GOOD * 4000, GOOD * 2000)
    disk = tmp_path / "small disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        options = {"log_format": LogFormat(2, 3), "split_bytes": 20_000}
        with pytest.raises((TaskError, OSError), match=r"No space left on device: .*small disk"):
            prepare(Inline(), days, disk, **options)
        assert not (disk / "dataset").exists()
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        prepare(Inline(), days, disk, **options)
        prepare(Inline(), days, tmp_path / "direct", **options)
        assert contents(disk / "dataset") == contents(tmp_path / "direct" / "dataset")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # this process has mapped files


def test_the_time_of_an_input_is_readable_and_keeps_its_nanoseconds(tmp_path):
    path, output = tmp_path / "day_0", tmp_path / "dataset"
    path.write_text("1234")
    os.utime(path, ns=(0, 1_790_000_000_000_000_021))
    facts = input_facts([path])
    assert facts == {str(path): "of 4 bytes, changed at 1790000000000000021"}  # as it was stored
    with open_work_folder(output, facts, True, False) as work:
        work.finish("stage", {})
    os.utime(path, ns=(0, 1_790_000_001_000_000_000))
    was, now = "2026-09-21 14:13:20.000000021 UTC", "2026-09-21 14:13:21.000000000 UTC"
    with (
        pytest.raises(ValueError, match=f"was of 4 bytes, changed at {was} and is .* {now}"),
        open_work_folder(output, input_facts([path]), True, False),
    ):
        pass


@pytest.mark.parametrize("done", [8, 20])
def test_another_content_of_the_same_size_and_time_is_refused(raw, tmp_path, done):
    days, options = tmp_path / "days", {"log_format": LogFormat(2, 3), "split_bytes": 2000}
    shutil.copytree(raw, days)
    with killed_at(done):
        prepare(Inline(), days, tmp_path, **options)
    path = days / "day_0"
    content, status = path.read_bytes(), path.stat()
    path.write_bytes((b"1" if content[:1] == b"0" else b"0") + content[1:])  # a label
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    with pytest.raises(
        (ValueError, TaskError), match="day_0: expected CRC-32 .*changed; --restart"
    ):
        prepare(Inline(), days, tmp_path, **options)
    prepare(Inline(), days, tmp_path, restart=True, **options)

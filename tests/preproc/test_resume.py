"""Runs killed anywhere resume and end in the same bytes; nothing of two runs is mixed."""

import gzip
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preproc_testing import GOOD, killed_at, small_disk, write_days
from tables_testing import Inline, contents

from dlrm.data.sources.log_lines import LogFormat
from dlrm.manifest import read_manifest
from dlrm.preproc.duckdb_engine import thread_engine
from dlrm.preproc.errors import TaskError
from dlrm.preproc.logs import pipeline
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.raw_log import find_days
from dlrm.preproc.prepare import input_facts
from dlrm.preproc.stage import PreparationRun
from dlrm.preproc.work_folder import open_work_folder
from dlrm.scripts.simulate_logs.command import Simulation, simulate

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"log_format": LogFormat(2, 3), "split_bytes": 2000}


def prepare(engine, raw, output, restart=False, replace=True, **options):
    options = LogOptions(frequency_limit="1", **(SMALL | options))
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
    prepare(Inline(), raw, output)
    return contents(output)


def test_a_result_says_no_more_than_is_on_the_disk(raw, tmp_path, monkeypatch):
    """A power failure leaves a file as it was at its last fsync."""
    on_disk, fsync, rename, seen = {}, os.fsync, Path.replace, []
    days = tmp_path / "days"
    shutil.copytree(raw, days)
    (days / "day_0.gz").write_bytes(gzip.compress((days / "day_0").read_bytes()))
    (days / "day_0").unlink()

    def wait(descriptor):
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        on_disk[path.stat().st_ino] = None if path.is_dir() else path.read_bytes()

    def replace(self, target):
        if (marker := Path(target)).suffix == ".done":
            seen.append(marker.stem)
            for path in marker.parent.rglob("*"):
                if path.is_file() and path.stat().st_size:
                    assert on_disk.get(path.stat().st_ino) == path.read_bytes(), (marker, path)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", wait)
    monkeypatch.setattr(Path, "replace", replace)
    prepare(Inline(), days, tmp_path / "out")
    stages = ["input.unpack", "count.part_bytes", "count", "lookups", "written", "manifest"]
    assert seen == [*stages, "described"]


@pytest.mark.parametrize("number", range(2, 12))
def test_a_run_killed_at_a_rename_goes_on_in_other_parts(raw, whole, tmp_path, number):
    with killed_at(number):
        prepare(Inline(), raw, tmp_path)
    for output in tmp_path.glob("dataset.unfinished/*/output"):
        (output / ".manifest.json.partial-0123456789abcdef").touch()  # as a kill leaves it
    prepare(Inline(), raw, tmp_path, split_bytes=700 + 100 * number)
    assert contents(tmp_path) == whole
    read_manifest(tmp_path / "dataset", "dataset", check_crc=True)


def leave_work_folder(monkeypatch, raw, output, **options):
    """Ends a run between publishing its output and removing its work folder."""
    with monkeypatch.context() as patch:
        patch.setattr("dlrm.preproc.work_folder.remove_work_folder", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(Inline(), raw, output, **options)


@pytest.mark.parametrize("became", ["deleted", "deleted after it replaced", "another", "cut off"])
def test_complete_means_that_the_output_is_there(raw, whole, tmp_path, monkeypatch, became):
    if became == "another":
        prepare(Inline(), raw, tmp_path / "other", seed=1)
    elif became == "deleted after it replaced":
        prepare(Inline(), raw, tmp_path / "run", seed=1)
    leave_work_folder(monkeypatch, raw, tmp_path / "run")
    dataset = tmp_path / "run" / "dataset"
    if became == "cut off":
        (dataset / "train" / "label.bin").write_bytes(b"")
    else:
        shutil.rmtree(dataset)
    if became == "another":
        (tmp_path / "other" / "dataset").rename(dataset)
    prepare(Inline(), raw, tmp_path / "run")
    assert contents(tmp_path / "run") == whole


def test_what_is_published_already_needs_no_leave_to_replace_it(raw, whole, tmp_path, monkeypatch):
    leave_work_folder(monkeypatch, raw, tmp_path, replace=False)
    prepare(Inline(), raw, tmp_path, replace=False)
    assert contents(tmp_path) == whole
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        prepare(Inline(), raw, tmp_path, replace=False)


def test_a_changed_option_is_named(raw, tmp_path):
    with killed_at("lookups.done"):
        prepare(Inline(), raw, tmp_path)
    change = {"numeric_transform": "nvidia", "dictionary_days": (0, 0)}
    named = r"--dictionary_days was not there and is \[0, 0\]; --numeric_transform was readme and "
    with pytest.raises(ValueError, match=f"{named}is nvidia. --restart discards it and begins"):
        prepare(Inline(), raw, tmp_path, **change)
    prepare(Inline(), raw, tmp_path, restart=True, **change)
    prepare(Inline(), raw, tmp_path / "direct", **change)
    assert contents(tmp_path / "dataset") == contents(tmp_path / "direct" / "dataset")


def test_a_folder_of_others_is_not_touched(raw, tmp_path):
    foreign = tmp_path / "dataset.unfinished"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("not ours")
    for restart in (False, True):
        with pytest.raises(FileExistsError, match="not written by this program"):
            prepare(Inline(), raw, tmp_path, restart)
    assert (foreign / "thesis.txt").read_text() == "not ours"


def test_a_full_disk_is_named_and_the_run_goes_on(tmp_path):
    days = write_days(tmp_path / "raw", GOOD * 40_000, GOOD * 20_000)
    options = {"split_bytes": 200_000}
    prepare(Inline(), days, tmp_path / "direct", **options)
    disk = tmp_path / "small disk"
    with small_disk(disk, "8k"), thread_engine(1, disk) as engine:
        for size, message in (
            ("24k", "No space left on device: .*small disk"),
            ("500k", "the dataset: needs .* GB on the disk, .*small disk.* has"),  # before the work
            ("1040k", "No space left on device: .*small disk"),  # at its end
        ):
            subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
            with pytest.raises((TaskError, OSError, ValueError), match=message) as error:
                prepare(engine, days, disk, **options)
            assert "\n" not in str(error.value)
            assert not (disk / "dataset").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        prepare(engine, days, disk, **options)
        assert contents(disk / "dataset") == contents(tmp_path / "direct" / "dataset")


def test_the_time_of_an_input_is_readable_and_keeps_its_nanoseconds(tmp_path):
    path, output = tmp_path / "day_0", tmp_path / "dataset"
    path.write_text("1234")
    os.utime(path, ns=(0, 1_790_000_000_000_000_021))
    facts = input_facts([path])
    assert facts == {str(path): "of 4 bytes, changed at 1790000000000000021"}  # as it was stored
    with open_work_folder(output, facts, True, False) as work:
        work.finish("count", {})
    os.utime(path, ns=(0, 1_790_000_001_000_000_000))
    was, now = "2026-09-21 14:13:20.000000021 UTC", "2026-09-21 14:13:21.000000000 UTC"
    with (
        pytest.raises(ValueError, match=f"was of 4 bytes, changed at {was} and is .* {now}"),
        open_work_folder(output, input_facts([path]), True, False),
    ):
        pass


def test_another_content_of_the_same_size_and_time_is_refused(raw, tmp_path):
    days = tmp_path / "days"
    shutil.copytree(raw, days)
    with killed_at("lookups.done"):
        prepare(Inline(), days, tmp_path)
    path = days / "day_0"
    content, status = path.read_bytes(), path.stat()
    path.write_bytes((b"1" if content[:1] == b"0" else b"0") + content[1:])  # a label
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(TaskError, match="day_0: expected CRC-32 .*changed; --restart"):
        prepare(Inline(), days, tmp_path)
    prepare(Inline(), days, tmp_path, restart=True)


TABLE = """{"label": "y", "numerical": ["x", {"column": "q", "transform": "quantile", "bins": 9}],
 "categorical": [{"column": "c", "frequency_limit": 2}, {"column": "i", "type": "integer"}],
 "crosses": [{"fields": ["c", "i"], "frequency_limit": 2}]}"""


def command_of(folder, kind="tables"):
    """Writes an input of 30,000 rows; returns a command that prepares it, up to its output."""
    if kind == "logs":
        simulate(Simulation(rows=30_000, days=3), folder / "logs")
        flags = [f"--input_folder={folder / 'logs'}", "--engine=local", "--output_folder="]
        return [sys.executable, "-m", "dlrm.preproc.logs.prepare_logs", *flags]
    draw = random.Random(0)
    lines = (
        f"{draw.randrange(2)},{draw.random()},{draw.randrange(99)},w{draw.randrange(3000)},"
        f"{draw.randrange(-50, 50)}\n"
        for _ in range(30_000)
    )
    (folder / "rows.csv").write_text("y,x,q,c,i\n" + "".join(lines))
    (folder / "schema.yaml").write_text(TABLE)
    flags = [f"--schema={folder / 'schema.yaml'}", f"--input={folder / 'rows.csv'}"]
    flags += ["--test_fraction=0.3", "--engine=local", "--output="]
    return [sys.executable, "-m", "dlrm.scripts.prepare", *flags]


def started(command, output, *flags):
    command = [*command[:-1], f"{command[-1]}{output}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **how)


def finished(process):
    """Waits for a process; returns what it wrote to its standard error."""
    error = process.communicate()[1]
    assert bool(process.returncode) == bool(error)
    return error


def test_of_two_runs_into_one_output_one_wins_and_the_other_is_told(tmp_path):
    command, output = command_of(tmp_path), tmp_path / "dataset"
    runs = [started(command, output, "--cores=1") for _ in range(2)]
    (line,) = "".join(finished(run) for run in runs).splitlines()
    assert sorted(run.returncode for run in runs) == [0, 1]
    assert re.search("another process is at work here|exists and is not empty", line)
    alone = started(command, tmp_path / "alone", "--cores=1")
    assert finished(alone) == ""
    assert contents(output) == contents(tmp_path / "alone")


def kill(process, draw):
    """Kills a run with its processes, or only the process that was started."""
    if draw.random() < 0.5:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tables", "logs"])
def test_kills_at_random_moments_lose_and_double_no_row(kind, tmp_path):
    """30 kills; each run has its own number of cores, memory and size of parts."""
    command, draw, kills = command_of(tmp_path, kind), random.Random(20261129), 0
    began = time.monotonic()
    assert finished(started(command, tmp_path / "whole")) == ""
    seconds, whole = time.monotonic() - began, contents(tmp_path / "whole")
    assert sum(len(data) for name, data in whole.items() if "label" in name) == 30_000
    while kills < 30:
        output = tmp_path / f"after {kills}"
        for _ in range(5):
            how = [f"--cores={draw.choice([1, 2, 3, 5])}", f"--memory={draw.choice([128, 900])}MB"]
            how.append(f"--split_bytes={draw.choice([50_000, 150_000, 400_000])}")
            run = started(command, output, *how)
            try:
                run.wait(draw.uniform(0.2, 1.1) * seconds)
            except subprocess.TimeoutExpired:
                kill(run, draw)
                kills += 1
            else:
                break
        else:
            run = started(command, output)
        error = finished(run)  # if a kill came after all was done, the command says so
        assert not error or "exists and is not empty" in error
        assert contents(output) == whole, kills
        shutil.rmtree(output)

"""Faults of earlier engines that no engine may have again."""

import fcntl
import multiprocessing
import os
import pickle
import signal
import stat
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from preproc_testing import GOOD, binary_files, write_days
from table_oracle import Oracle
from tables_testing import Inline, contents, prepare, write_table

from dlrm.data.schema.schema import Schema
from dlrm.data.tables.files import find_tables
from dlrm.preproc.duckdb_engine import local_engine
from dlrm.preproc.logs import prepare_logs
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables
from dlrm.preproc.work_folder import open_work_folder

SCHEMA = {"label": "y", "numerical": ["x"], "categorical": ["c", "d"]}
SCHEMA["crosses"] = [{"fields": ["c", "d"], "frequency_limit": 1}]


def rows_of(count):
    """Returns columns of values of which a fifth are new."""
    y, c = [i % 2 for i in range(count)], [f"c{i % max(count // 5, 1)}" for i in range(count)]
    return {"y": y, "x": [*range(count)], "c": c, "d": [f"d{i % 7}" for i in range(count)]}


class Counting(Inline):
    """Counts what parts, and functions over them, are and return."""

    def __init__(self):
        super().__init__()
        self.work = Counter()

    def _counted(self, name, function, parts):
        """Returns a function that counts its results, beside what is sent to processes."""
        self.work[f"{name} parts"] += len(parts)
        self.work[f"{name} sent"] += sum(len(pickle.dumps((function, part))) for part in parts)

        def call(part):
            self.work[f"{name} calls"] += 1
            for batch in function(part):
                self.work[f"{name} batches"] += 1
                self.work[f"{name} records"] += len(batch)
                self.work[f"{name} bytes"] += batch.nbytes
                yield batch

        return call

    def map(self, task, items):
        self.work["map sent"] += sum(len(pickle.dumps((task, item))) for item in items)
        return super().map(task, items)

    def counts(self, parts, partial_counts, *how):
        return super().counts(parts, self._counted("counts", partial_counts, parts), *how)

    def sorted_rows(self, parts, packed_rows, *how):
        return super().sorted_rows(parts, self._counted("rows", packed_rows, parts), *how)


def of_process():
    """Returns how often, and how many bytes, this process has read and written."""
    lines = Path("/proc/self/io").read_text().splitlines()[:4]
    return Counter({name: int(n) for name, n in (line.split(": ") for line in lines)})


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_work_is_linear_in_the_rows(suffix, tmp_path):
    """Also with parts of a size, whose number then grows with the rows."""
    prepare(SCHEMA, [write_table(rows_of(9), tmp_path / f"first{suffix}", 500)], tmp_path / "d")
    found = []
    for count in (5_000, 20_000):
        path, engine = write_table(rows_of(count), tmp_path / f"{count}{suffix}", 500), Counting()
        before = of_process()
        prepare(SCHEMA, [path], tmp_path / str(count), engine, split_bytes=8_000, report=False)
        found.append(engine.work + (of_process() - before))
    few, many = found
    assert many["counts parts"] > 15
    assert many["counts calls"] == many["counts parts"] == many["rows calls"]
    assert many["rows records"] == 20_000 + many["rows parts"]  # and facts
    for name, number in many.items():
        assert number <= 4.6 * few[name] + 100, (name, few[name], number)


def test_a_lock_holds_where_those_of_directories_are_of_one_machine_alone(tmp_path, monkeypatch):
    """As on NFS."""
    lock = fcntl.flock

    def flock(descriptor, operation):
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    of_run = partial(open_work_folder, tmp_path / "dataset", {"--seed": 0}, False, False)
    with of_run() as work:
        work.finish("count", 7)
        with pytest.raises(BlockingIOError, match="another process is at work here"), of_run():
            pass
    with of_run() as work:
        assert work.result("count") == 7


def test_a_worker_that_is_killed_changes_nothing_and_leaves_nothing(tmp_path):
    path, output = write_table(rows_of(4_000), tmp_path / "a.csv"), tmp_path / "dataset"
    prepare(SCHEMA, [path], tmp_path / "expected", report=True)
    others, killed = {*multiprocessing.active_children()}, []

    def kill():
        while not killed:
            time.sleep(0.001)
            if [*tmp_path.glob("dataset.unfinished/*/spill/*.arrow")]:  # a part has been read
                own = [one for one in multiprocessing.active_children() if one not in others]
                killed.extend(own[:1])
                os.kill(own[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    options = TableOptions(Schema.from_dict(SCHEMA), split_bytes=4_096)
    tables, engine = {"train": find_tables([path])}, partial(local_engine, 2)
    prepare_tables(options, tables, output, engine, say=lambda line: None)
    thread.join()
    assert contents(output) == contents(tmp_path / "expected")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.csv", "dataset", "expected"}


PLACES = ["<root>", "{root}", "%s", "$0", "\\1", "~", "file:///x", "/tmp", "null", "<work>/x"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_values_that_look_like_the_place_of_a_file_are_kept(suffix, tmp_path, monkeypatch):
    """Work folders once had such words in place of paths."""
    monkeypatch.chdir(tmp_path)
    values = [*PLACES, str(tmp_path), str(tmp_path / "d.unfinished" / "x")]
    rows = [{"y": values[i % 2], "c": value} for i, value in enumerate(values * 2)]
    label = {"column": "y", "positive": "<root>"}
    schema = {"label": label, "categorical": ["c"], "groups": ["c"]}
    path = write_table({name: [row[name] for row in rows] for name in "yc"}, Path(f"a{suffix}"))
    prepare(schema, [path], "d", split_bytes=1)
    expected = Oracle(schema, rows, {}).files
    assert contents("d", ".bin") == expected


def test_killed_runs_of_logs_go_on_with_other_cores_memory_and_parts(tmp_path):
    raw = write_days(tmp_path / "raw", GOOD * 9_000, GOOD * 4_000)
    command = [f"--input_folder={raw}", "--engine=local", "--frequency_limit=1"]
    command += ["--num_numerical=2", "--num_categorical=3"]

    def started(output, *flags):
        words = [*command, f"--output_folder={tmp_path / output}", *flags]
        run = multiprocessing.get_context("fork").Process(target=prepare_logs.main, args=[words])
        run.start()
        return run

    first = "--cores=3", "--memory=128MB", "--split_bytes=9000"
    second = "--cores=1", "--memory=300MB", "--split_bytes=30000"
    for done, flags in enumerate((first, second)):
        run = started("killed", *flags)
        while len([*tmp_path.glob("killed/*.unfinished/*/*.done")]) <= done and run.is_alive():
            time.sleep(0.001)
        run.kill()
        run.join()
    runs = [started(*how) for how in (("killed", "--cores=2"), ("whole", "--cores=1"))]
    for run in runs:
        run.join()
    made = [binary_files(tmp_path / name / "binary_dataset") for name in ("killed", "whole")]
    assert made[0] == made[1]
    assert len(made[0]["train/label.bin"]) == 18_000

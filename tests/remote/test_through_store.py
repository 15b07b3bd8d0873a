"""Preparation whose tasks share no folder, and exchange files through a store of objects."""

import functools
import json
import os
import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from tables_testing import Inline, write_table

from dlrm import manifest
from dlrm.data.tables.files import find_tables
from dlrm.data.transform.schema import Schema
from dlrm.files import MANIFEST
from dlrm.preproc.errors import TaskError
from dlrm.preproc.execution import stored_work, work_folder
from dlrm.preproc.execution.spark_engine import SparkEngine
from dlrm.preproc.execution.spark_query import SparkQuery
from dlrm.preproc.execution.stored_work import driver_folder, outlined
from dlrm.preproc.prepare_tables import prepare_tables
from dlrm.preproc.stages.division import SplitConfig
from dlrm.preproc.stages.options import IncrementConfig
from dlrm.preproc.tables.options import TableOptions
from dlrm.remote import transfer
from dlrm.remote.cache import Cache
from dlrm.remote.publish import RUN, fetched_directory, find_published
from dlrm.remote.store import open_store
from dlrm.remote.task_files import NodeFiles

ROWS = 2000
SCHEMA = {
    "label": "label",
    "numerical": ["number", {"column": "age", "transform": "quantile"}],
    "categorical": [
        "word",
        {"column": "genre", "separator": "|", "max_length": 3, "frequency_limit": 2},
        "user",
    ],
}


class KilledError(BaseException):
    """Must not be caught, like SIGKILL."""


class Counting(Inline):
    """Counts the tasks that it runs."""

    ran = 0

    def run(self, stage, task, items):
        self.ran += len(items)
        super().run(stage, task, items)


class Twice(Inline):
    """Runs every task twice, as a retry or speculation does."""

    def run(self, stage, task, items):
        super().run(stage, task, [item for item in items for _ in range(2)])


@pytest.fixture(scope="module")
def table():
    values = random.Random(1)
    return {
        "label": [values.randrange(2) for _ in range(ROWS)],
        "number": [values.random() for _ in range(ROWS)],
        "age": [values.randrange(90) for _ in range(ROWS)],
        "word": [f"x{values.randrange(200)}" for _ in range(ROWS)],
        "genre": ["|".join(f"g{values.randrange(20)}" for _ in range(i % 5)) for i in range(ROWS)],
        "user": [f"u{values.randrange(300)}" for _ in range(ROWS)],
    }


def options(**others):
    schema = Schema.from_dict(SCHEMA)
    return TableOptions(schema, SplitConfig(test_fraction=0.2), **{"split_bytes": 20_000} | others)


def prepare_local(source, output, **others):
    """Prepares a file into a folder; returns its manifest, which has the sum of each file."""
    with patch.object(os, "fsync"):
        tables = {"train": find_tables([source])}
        prepare_tables(options(**others), tables, output, lambda: nullcontext(Inline()))
    return (output / MANIFEST).read_bytes()


def prepare(source, output, engine=None, replace=False, restart=False, **others):
    """Prepares an object into a URI, without a folder; returns what was printed."""
    said = []
    with driver_folder(Cache.open()) as files, patch.object(os, "fsync"):
        tables = {"train": find_tables([outlined(files, str(source), "input")])}
        how = {"replace": replace, "restart": restart, "say": said.append}
        started = nullcontext(engine or Inline())
        prepare_tables(options(**others), tables, output, lambda: started, **how)
    return said


def manifest_at(uri):
    with fetched_directory(Cache.open(), uri) as path:
        return (path / MANIFEST).read_bytes()


def keys_below(uri):
    return [entry.key.removeprefix(uri.folder) for entry in open_store(uri).entries(uri.folder)]


@pytest.fixture
def source(table, store_uri, tmp_path):
    """Returns a table as a file and as an object of a kind."""

    def source(suffix):
        path = write_table(table, tmp_path / f"rows{suffix}", 400)
        uri = store_uri.below(path.name)
        open_store(uri).write(uri.key, path)
        return path, uri

    return source


@pytest.mark.parametrize(
    ("suffix", "engine"), [(".parquet", Twice), (".csv", Inline), (".orc", Inline)]
)
def test_the_bytes_are_those_of_a_local_run_also_of_tasks_that_run_twice(
    suffix, engine, source, store_uri, tmp_path
):
    path, uri = source(suffix)
    output, expected = store_uri.below("out"), prepare_local(path, tmp_path / "here", report=True)
    prepare(uri, output, engine(), report=True)
    assert manifest_at(output) == expected
    keys = keys_below(output)
    assert not any(key.startswith(RUN) for key in keys)
    assert not any(key.endswith("train/label.bin") for key in keys)  # it is in slices
    assert not any((tmp_path / "cache/dlrm/remote/streams").iterdir())


def test_slices_are_read_in_any_range(source, store_uri, tmp_path, monkeypatch):
    for module in (manifest, transfer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 512)
    path, uri = source(".parquet")
    prepare_local(path, tmp_path / "local", report=False)
    output, chance = store_uri.below("out"), random.Random(0)
    prepare(uri, output, report=False)
    found, store = find_published(output), open_store(output)
    sliced = {name: entry for name, entry in found.entries.items() if len(entry.slices) > 1}
    assert {"train/label.bin", "train/numerical.bin"} <= {*sliced}
    for name, entry in sliced.items():
        whole = (tmp_path / "local" / name).read_bytes()
        for _ in range(9):
            begin, end = sorted(chance.choices(range(entry.size + 1), k=2))
            assert bytes(store.read(entry, begin, end)) == whole[begin:end]


@contextmanager
def killed_at_write(number):
    """Ends a run, as a kill does, before an object is uploaded by a task."""
    upload, seen = NodeFiles.upload, iter(range(10**6))

    def act(self, *arguments):
        if next(seen) == number:
            raise KilledError
        return upload(self, *arguments)

    with patch.object(NodeFiles, "upload", act), pytest.raises(KilledError):
        yield


def test_a_killed_run_goes_on_with_the_tasks_that_the_store_has(source, store_uri, tmp_path):
    path, uri = source(".csv")
    output, expected = store_uri.below("out"), prepare_local(path, tmp_path / "local")
    finished, whole, rest = (1, 4, 4, 2), Counting(), Counting()
    for number in finished:
        with killed_at_write(number):
            prepare(uri, output)
        assert find_published(output) is None
    said = prepare(uri, output, rest)
    prepare(uri, store_uri.below("at once"), whole)
    assert rest.ran == whole.ran - sum(finished) > 0
    assert said[0] == f"resuming the run in {output.below(RUN)}"
    assert manifest_at(output) == expected


def test_a_run_killed_after_publishing_has_nothing_left_to_do(source, store_uri):
    _, uri = source(".parquet")
    output = store_uri.below("out")
    with (
        patch.object(stored_work, "_remove_run", side_effect=KilledError),
        pytest.raises(KilledError),
    ):
        prepare(uri, output)
    published = manifest_at(output)
    assert any(key.startswith(RUN) for key in keys_below(output))
    prepare(uri, output)
    assert manifest_at(output) == published
    assert not any(key.startswith(RUN) for key in keys_below(output))


class Rows(SparkEngine):
    """A session of Spark with one table, each partition of which is read by two attempts."""

    cores, version, reads = 2, "4.0.0", 0

    def __init__(self, path):
        self._table, self.columns = pq.read_table(path), pq.read_schema(path).names

    def session(self):
        return self

    def select(self, *names):
        return self

    table = select

    def sql(self, query):
        return SimpleNamespace(collect=list)

    def run(self, stage, task, items):
        Inline().run(stage, task, items)

    def collect(self, stage, task, frame, columns):
        from pyspark import TaskContext
        from pyspark.sql import Row

        self.reads += 1
        batches = self._table.to_batches(400)
        parts = [batches[:2], [], batches[2:]]
        found = []
        for number, part in enumerate(parts):
            context = SimpleNamespace(partitionId=functools.partial(int, number))
            with patch.object(TaskContext, "get", lambda context=context: context):
                attempts = [[*task(iter(part))] for _ in range(2)]
            for batch in attempts[0]:
                found += [Row(**row) for row in batch.to_pylist()]
        return found[::-1]


def test_rows_that_spark_reads_twice_are_there_once_and_not_read_again(source, store_uri, tmp_path):
    pytest.importorskip("pyspark")
    path, _ = source(".parquet")
    engine, output, said = Rows(path), store_uri.below("out"), []
    prepare_local(path, tmp_path / "local")

    def prepare_rows():
        with driver_folder(Cache.open()), patch.object(os, "fsync"):
            how = {"query": SparkQuery("sales"), "say": said.append}
            prepare_tables(options(), {}, output, lambda: nullcontext(engine), **how)

    for number in (3, 8):  # while rows are read, and in the next stage
        with killed_at_write(number):
            prepare_rows()
    assert len([key for key in keys_below(output) if "/spark/" in key]) == 2
    prepare_rows()
    assert engine.reads == 2
    assert f"resuming the run in {output.below(RUN)}" in said
    expected = json.loads((tmp_path / "local" / MANIFEST).read_bytes())
    made = json.loads(manifest_at(output))
    assert made["transform"]["spark"]["partitions"] == 2
    different = {name for name in made["files"] if made["files"][name] != expected["files"][name]}
    assert different <= {"report.json", "report.html"}  # which name the files


@pytest.mark.parametrize("numerics", ["keep", "refit"])
def test_a_day_extends_another_one_with_the_bytes_of_folders(numerics, table, store_uri, tmp_path):
    output, days = store_uri.below("2"), []
    for day, rows in (("1", slice(0, 1200)), ("2", slice(1200, ROWS))):
        columns = {name: values[rows] for name, values in table.items()}
        path = write_table(columns, tmp_path / f"{day}.parquet", 400)
        days.append((path, store_uri.below(path.name)))
        open_store(store_uri).write(days[-1][1].key, path)
    prepare_local(days[0][0], tmp_path / "first")
    how = {"extend": tmp_path / "first", "numerics": numerics}
    expected = prepare_local(days[1][0], tmp_path / "second", increment=IncrementConfig(**how))
    prepare(days[0][1], store_uri.below("1"))
    assert manifest_at(store_uri.below("1")) == (tmp_path / "first" / MANIFEST).read_bytes()
    with fetched_directory(Cache.open(), store_uri.below("1")) as parent:
        how = {"increment": IncrementConfig(parent, numerics=numerics)}
        with killed_at_write(12):
            prepare(days[1][1], output, **how)
        said = prepare(days[1][1], output, Twice(), **how)
    assert said[0] == f"resuming the run in {output.below(RUN)}"
    assert manifest_at(output) == expected


def test_other_options_are_refused_unless_the_run_is_discarded(source, store_uri, tmp_path):
    path, uri = source(".parquet")
    output = store_uri.below("out")
    with killed_at_write(4):
        prepare(uri, output)
    with pytest.raises(
        ValueError, match=rf"{output.below(RUN)}: has a run.*--output_ordering was total_random"
    ):
        prepare(uri, output, output_ordering="input")
    prepare(uri, output, output_ordering="input", restart=True)
    made = prepare_local(path, tmp_path / "local", output_ordering="input")
    assert manifest_at(output) == made


def test_two_drivers_that_begin_at_once_do_not_share_a_run(source, store_uri):
    _, uri = source(".parquet")
    output = store_uri.below("out")
    with patch.object(stored_work, "_record", lambda uri: None), killed_at_write(4):
        prepare(uri, output)
    with (
        patch.object(stored_work, "_record", lambda uri: None),
        pytest.raises(FileExistsError, match=f"{output.below(RUN)}/run.json: another process"),
    ):
        prepare(uri, output)


def test_rows_that_are_left_out_have_the_place_of_their_object(store_uri):
    uri, output = store_uri.below("rows.csv"), store_uri.below("out")
    columns = "label,number,age,word,genre,user\n"
    lines = [f"{i % 2},{i},{i % 9},w,g,u{i % 7}" for i in range(200)]
    lines[150] = "1,none,3,w,g,u"
    open_store(uri).write(uri.key, (columns + "\n".join(lines) + "\n").encode())
    prepare(uri, output, bad_lines="quarantine", max_bad_lines=0.1)
    with fetched_directory(Cache.open(), output) as path:
        text = (path / "quarantine" / "rows.csv.tsv").read_text()
    assert text.startswith(f"{uri}, line 152\t")


def test_an_earlier_dataset_is_replaced_only_if_that_is_wanted(source, store_uri):
    _, uri = source(".parquet")
    output = store_uri.below("out")
    prepare(uri, output)
    first = keys_below(output)
    with pytest.raises(FileExistsError, match=f"{output}: exists"):
        prepare(uri, output)
    prepare(uri, output, replace=True)
    second = keys_below(output)
    assert len(first) == len(second)
    assert {*first} & {*second} == {MANIFEST}


def test_an_input_that_changes_between_two_stages_is_named(source, store_uri, tmp_path, table):
    _, uri = source(".parquet")

    class Changing(Inline):
        def run(self, stage, task, items):
            if stage == "transform.columns":
                other = {**table, "number": [0.5] * ROWS}
                pq.write_table(pa.table(other), tmp_path / "other", row_group_size=400)
                open_store(uri).write(uri.key, tmp_path / "other")
            super().run(stage, task, items)

    with pytest.raises(TaskError, match=f"{uri}: was replaced by another object"):
        prepare(uri, store_uri.below("out"), Changing())


def test_objects_that_are_missing_or_short_are_named(source, store_uri):
    _, uri = source(".parquet")
    output = store_uri.below("out")
    prepare(uri, output)
    store = open_store(output)
    key = next(key for key in keys_below(output) if key.endswith("/shuffle.1"))
    place = output.below(key)
    content = bytes(store.read(store.entry(place.key)))
    store.write(place.key, content[:-1])
    with pytest.raises(ValueError, match=f"{place}: expected {len(content)} bytes, got"):
        find_published(output)
    store.remove(place.key)
    with pytest.raises(FileNotFoundError, match=f"{place}: missing"):
        find_published(output)
    place = output.below(next(key for key in keys_below(output) if key.endswith("slices.json")))
    record = json.loads(bytes(store.read(store.entry(place.key))))
    later = manifest.sealed_json(record | {"version": 2})
    store.write(place.key, later.encode())
    with pytest.raises(ValueError, match=f"{place}: expected slices of version 1, got 2"):
        find_published(output)


def test_a_driver_without_room_for_the_results_says_what_they_need(source, store_uri, tmp_path):
    path, uri = source(".parquet")
    output, said = store_uri.below("out"), "memory, of which 5,000 bytes are free"
    with patch.object(work_folder, "host_memory", lambda: (5000, 10**9)):
        with pytest.raises(OSError, match=f"{output.below(RUN)}.*{said}"):
            prepare(uri, output)
        with pytest.raises(OSError, match=f"{tmp_path}/local.unfinished, count: .*{said}"):
            prepare_local(path, tmp_path / "local")


def test_rows_that_are_lost_or_there_twice_are_noticed():
    data = random.Random(0).randbytes(100)
    joined = manifest.JoinedChecksum("label.bin")
    joined.add(0, 60, manifest.slice_sums(0, data[:60]))
    for place in (59, 61):
        with pytest.raises(ValueError, match=f"label.bin: expected the bytes from 60 on.*{place}"):
            joined.add(place, 1, [0])


def test_paths_of_this_machine_are_refused(store_uri, tmp_path, capsys):
    from dlrm.scripts.prepare.__main__ import main

    (tmp_path / "schema.yaml").write_text("label: a\nnumerical: [b]")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    common = [f"--schema={tmp_path}/schema.yaml", "--through_store", f"--input={tmp_path}/rows.csv"]
    assert main([*common, f"--output={store_uri.below('out')}"]) == 1
    assert f"--input {tmp_path}/rows.csv: expected a URI" in capsys.readouterr().err
    assert main([*common, f"--output={tmp_path}/out"]) == 1
    assert "--through_store: expected a URI as --output, got" in capsys.readouterr().err

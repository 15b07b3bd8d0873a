"""Rows in a store equal those in memory through evictions, checkpoints and damage."""

import contextlib
import errno
import os
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm.store.config import TableStoreConfig, bytes_of
from dlrm.store.layout import RowBlock
from dlrm.store.memory import RowKind, memory_of, slots_within
from dlrm.store.native import FullError, native_store
from dlrm.store.row_stores import limited_stores
from dlrm.store.row_view import RowView
from dlrm.store.undo import undo_numbers

TABLES = {0: 700, 3: 5, 4: 1300}
ROWS = sum(TABLES.values())
WIDTH = 5
ROW_BYTES = 4 * WIDTH + 4


def config(path, slots=300):
    return TableStoreConfig(str(memory_of(slots, ROW_BYTES, ROWS)), str(path))


def fields(slots):
    return {"weight": torch.full((slots, WIDTH), -1.0), "sum": torch.full((slots,), -1.0)}


def initial():
    weights = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    return weights, torch.zeros(ROWS)


def blocks(weights, at_once=100):
    for first in range(0, ROWS, at_once):
        part = weights[first : first + at_once].contiguous()
        yield RowBlock(first, len(part), {"weight": part})  # sums are zeros


class Trained:
    """A store whose rows change in steps, mirrored in plain tensors."""

    def __init__(self, path, slots=300, checkpoints=None):
        kinds = [RowKind(4, TABLES, ROW_BYTES)]
        self.store = limited_stores(config(path, slots), kinds, checkpoints=checkpoints).parts[4]
        self.fields = fields(self.store.slots)
        self.weights, self.sums = initial()
        self.random = np.random.default_rng(1)

    def create(self):
        self.store.create(self.fields, blocks(self.weights))
        return self

    def view(self, entry):
        self.store = RowView(entry, self.fields, self.store.slots)
        return self

    def step(self, count=80):
        records = self.random.integers(0, ROWS, count)
        slots, ticket = self.store.prepare(records)
        rows, slots = torch.from_numpy(records), torch.from_numpy(slots)
        assert self.fields["weight"][slots].equal(self.weights[rows])
        assert self.fields["sum"][slots].equal(self.sums[rows])
        self.store.mark(ticket)
        new = torch.from_numpy(self.random.random((ROWS, WIDTH), np.float32))[rows]
        for tensor, place, value in (
            (self.fields["weight"], slots, new),
            (self.weights, rows, new),
            (self.fields["sum"], slots, new[:, 0].contiguous()),
            (self.sums, rows, new[:, 0].contiguous()),
        ):
            for target, one in zip(place.tolist(), value, strict=True):
                tensor[target] = one
        self.store.release(ticket)

    def steps(self, count):
        for _ in range(count):
            self.step()

    def rows_equal(self, weights, sums):
        found = self.store.read(0, ROWS)
        return np.array_equal(found["weight"], weights) and np.array_equal(found["sum"][:, 0], sums)


def test_rows_are_those_of_memory_through_evictions(tmp_path):
    run = Trained(tmp_path).create()
    run.store.pin()
    for _ in range(60):
        run.step()
    counters = run.store.counters()
    assert counters["reads"] > 1000
    assert counters["writes"] > 500
    assert counters["hits"] > 100
    run.store.checkpoint()
    assert run.rows_equal(run.weights, run.sums)


def test_checkpoints_are_restored_from_the_newest_back(tmp_path):
    run, saved = Trained(tmp_path).create(), []
    for _ in range(4):
        for _ in range(10):
            run.step()
        saved.append((run.store.checkpoint(), run.weights.clone(), run.sums.clone()))
    for _ in range(10):
        run.step()
    run.store.close()  # as a killed process leaves it
    for entry, weights, sums in reversed(saved):
        viewing = Trained(tmp_path).view(entry)
        assert viewing.rows_equal(weights, sums)
    for entry, weights, sums in reversed(saved[1:]):
        resumed = Trained(tmp_path)
        resumed.store.restore(entry, resumed.fields)
        assert resumed.rows_equal(weights, sums)
        assert undo_numbers(resumed.store.directory)[-1] == entry["generation"]
        resumed.weights, resumed.sums = weights.clone(), sums.clone()
        resumed.step()  # a run that resumes and is killed
        resumed.store.prune([e for e, *_ in saved[:1]])
        resumed.store.close()
    resumed.store.restore(saved[0][0], resumed.fields)
    assert resumed.rows_equal(*saved[0][1:])


def test_a_checkpoint_is_read_while_the_training_writes(tmp_path):
    run = Trained(tmp_path).create()
    entry, weights, sums = run.store.checkpoint(), run.weights.clone(), run.sums.clone()
    reader = Trained(tmp_path).view(entry)
    for _ in range(30):
        run.step()
        run.store.checkpoint()
    assert not run.rows_equal(weights, sums)
    other = Trained(tmp_path).view(entry)
    run.steps(30)
    assert reader.rows_equal(weights, sums)
    for _ in range(10):  # as an evaluation reads them
        records = run.random.integers(0, ROWS, 100)
        slots, ticket = other.store.prepare(records)
        assert other.fields["weight"][torch.from_numpy(slots)].equal(weights[records])
        other.store.release(ticket)
        run.steps(5)


def test_undo_files_go_with_the_last_checkpoint_that_needs_them(tmp_path):
    run = Trained(tmp_path).create()
    kept = [run.store.checkpoint() for _ in range(4)]
    run.store.prune(kept[1:])
    assert undo_numbers(run.store.directory) == [2, 3, 4]
    run.store.prune(kept[3:])
    assert undo_numbers(run.store.directory) == [4]
    with pytest.raises(ValueError, match="undo-000000001.bin.*its rows are gone"):
        RowView(kept[0], {})


def test_a_flipped_byte_names_table_row_and_file(tmp_path):
    run = Trained(tmp_path).create()
    file = run.store.directory / "rows.bin"
    content = bytearray(file.read_bytes())
    record = 4 * WIDTH + 4 + 8
    per_page = 4096 // 32
    assert record == 32
    place = 710 // per_page * 4096 + 710 % per_page * 32
    content[place + 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows.bin: table 4, row 5: damaged"):
        run.store.prepare(np.array([710]))


def test_a_truncated_file_is_named(tmp_path):
    run = Trained(tmp_path).create()
    entry = run.store.checkpoint()
    run.store.close()
    os.truncate(run.store.directory / "rows.bin", 8192)
    with pytest.raises(ValueError, match=r"rows.bin: expected \d+ bytes, got 8192: truncated"):
        run.store.restore(entry, run.fields)


@pytest.mark.parametrize(("number", "left"), [(1, 0.5), (2, 0.5), (2, 0.9)])
def test_a_truncated_undo_file_is_named(number, left, tmp_path):
    run = Trained(tmp_path).create()
    entry = run.store.checkpoint()
    run.steps(20)
    run.store.checkpoint()
    run.steps(20)
    run.store.close()
    path = run.store.directory / f"undo-{number:09d}.bin"
    os.truncate(path, int(path.stat().st_size * left))
    with pytest.raises(ValueError, match=f"undo-{number:09d}.bin: .*(damaged|truncated)"):
        run.store.restore(entry, run.fields)


def test_rows_of_a_run_that_was_moved_are_not_replaced(tmp_path):
    folder = tmp_path / "run"
    run = Trained(tmp_path / "store", checkpoints=folder).create()
    run.store.checkpoint()
    run.store.close()
    # The run was killed before its checkpoint appeared.
    again = Trained(tmp_path / "store", checkpoints=folder).create()
    entry = again.store.checkpoint()
    again.store.prune([entry])
    again.store.close()
    with pytest.raises(ValueError, match="has the rows of the checkpoints that were saved in"):
        Trained(tmp_path / "store", checkpoints=folder).create()
    again.store.restore(entry, again.fields)
    assert again.rows_equal(again.weights, again.sums)


def test_other_stores_are_refused(tmp_path):
    run = Trained(tmp_path / "a", checkpoints=tmp_path / "run").create()
    entry = run.store.checkpoint()
    with pytest.raises(BlockingIOError, match="another run uses this store"):
        Trained(tmp_path / "a").create()
    run.store.close()
    with pytest.raises(ValueError, match="resume that run, name another --table_store"):
        Trained(tmp_path / "a").create()
    other = Trained(tmp_path / "b").create()
    other.store.close()
    with pytest.raises(ValueError, match="expected the store .* got the store .* of another run"):
        other.store.restore(entry, other.fields)
    with pytest.raises(ValueError, match=r"expected a store of .*exp_avg float32\[5\].* sum "):
        run.store.restore(entry, {**run.fields, "exp_avg": run.fields["weight"]})


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    run = Trained(tmp_path).create()
    entry, weights, sums = run.store.checkpoint(), run.weights.clone(), run.sums.clone()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (66_000, before[1]))
    try:
        with pytest.raises(OSError, match="undo-000000001.bin") as caught:
            run.steps(300)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(OSError, match="undo-000000001.bin"):
        run.store.checkpoint()
    run.store.close()
    run.store.restore(entry, run.fields)
    assert run.rows_equal(weights, sums)


def test_no_room_at_the_start_is_said_before_any_work(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="the rows need 66KB.*rows.bin"):
            Trained(tmp_path).create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def unprivileged():
    """Runs as another user if root, who may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_read_only_store_is_read_and_neither_made_nor_trained():
    with tempfile.TemporaryDirectory() as folder:  # pytest's is closed to other users
        os.chmod(folder, 0o755)
        run = Trained(Path(folder, "store")).create()
        entry, weights, sums = run.store.checkpoint(), run.weights.clone(), run.sums.clone()
        run.store.close()
        RowView(entry, {}).read(0, ROWS)  # loads what another user may not read
        directory = run.store.directory
        for path, mode in [(p, 0o444) for p in directory.iterdir()] + [(directory, 0o555)]:
            path.chmod(mode)
        directory.parent.chmod(0o555)
        with unprivileged():
            assert Trained(Path(folder, "store")).view(entry).rows_equal(weights, sums)
            with pytest.raises(PermissionError, match="rows.bin"):
                Trained(Path(folder, "store")).store.restore(entry, run.fields)
            with pytest.raises(PermissionError, match=f"{folder}/none"):
                Trained(Path(folder, "none")).create()
        directory.parent.chmod(0o755)
        directory.chmod(0o755)


def test_too_few_slots_change_nothing(tmp_path):
    run = Trained(tmp_path).create()
    held = np.arange(200)
    _, ticket = run.store.prepare(held)
    with pytest.raises(FullError) as caught:
        run.store.prepare(np.arange(100, 350))
    assert (caught.value.needed, caught.value.held) == (250, 200)
    with pytest.raises(
        ValueError, match="needs 250, beside 200 that others use; expected at least"
    ):
        run.store.prepare_anyhow(np.arange(100, 350))
    run.store.release(ticket)
    run.store.prepare(np.arange(100, 350))


def test_numbers_of_another_type_are_refused(tmp_path):
    run = Trained(tmp_path).create()
    for records in (np.arange(3, dtype=np.int32), np.arange(6)[::2]):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            run.store.prepare(records)


def test_memory_of_another_size_is_refused(tmp_path):
    run = Trained(tmp_path)
    with pytest.raises(ValueError, match="expected a row of each field a slot"):
        run.store.create(fields(run.store.slots - 1), blocks(run.weights))


def test_without_the_native_module_the_flag_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dlrm.store._row_store", None)
    native_store.cache_clear()
    with pytest.raises(ValueError, match="--table_store: needs the native module"):
        Trained(tmp_path)


def test_memory_is_at_most_what_is_asked_for():
    for memory in (20_000_000, 100_000_000, 10**9):
        slots = slots_within(memory, 64, 10**7)
        assert memory_of(slots, 64, 10**7) <= memory
        assert slots == 10**7 or memory < memory_of(slots + 1, 64, 10**7)


@pytest.mark.parametrize(
    ("size", "expected"), [("8GB", 8 * 10**9), ("512MiB", 2**29), ("1000", 1000), ("1.5k", 1500)]
)
def test_sizes_are_read(size, expected):
    assert bytes_of(size) == expected


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"table_memory": "8GB"}, "--table_memory 8GB needs --table_store"),
        ({"table_store": "/x"}, "--table_store /x needs --table_memory"),
        ({"table_memory": "eight", "table_store": "/x"}, "--table_memory eight: expected a size"),
        ({"table_memory": "0GB", "table_store": "/x"}, "expected a size such as 8GB"),
    ],
)
def test_impossible_settings_are_named(given, match):
    with pytest.raises(ValueError, match=match):
        TableStoreConfig(**given)

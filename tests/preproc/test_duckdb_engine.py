"""Sums and order of the local engine, its memory, its disk, and processes that are killed."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from inline_engine import InlineEngine
from preproc_testing import small_disk

from dlrm.preproc.duckdb_engine import local_engine, thread_engine
from dlrm.preproc.engine import COUNTS, FACTS, ROWS, facts_batch
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.options import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def counts_of(part, column, occurrences):
    """Returns counts in the form of a part; values are texts, or integers."""
    keys = [hash(v) % 2**61 if isinstance(v, bytes) else v for v in occurrences]
    texts = [v if isinstance(v, bytes) else None for v in occurrences]
    arrays = [[column] * len(keys), keys, texts, [*occurrences.values()]]
    arrays = [pa.array(a, field.type) for a, field in zip(arrays, COUNTS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=COUNTS)


def summed(engine, parts, limits):
    """Returns the engine's values and counts by column, and the number of other values."""
    kept, others = {}, Counter()
    for batch in engine.counts(
        range(len(parts)), parts.__getitem__, limits, True, lambda part: None
    ):
        for column, key, text, n in zip(*(c.to_pylist() for c in batch.columns), strict=True):
            if n == 0:
                others[column] += key
            else:
                kept.setdefault(column, []).append((key if text is None else text, n))
    return kept, others


def test_counts_are_summed_and_ordered_by_count_and_then_by_value():
    draw = np.random.default_rng(0)
    ends = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]  # unsigned
    words = [b"", b"a", b"a\0", b"ab", b"\xc3\xa4", b"z", b"\xff"]  # as bytes
    columns = [ends, words, [*range(500)]]
    parts, totals = [], [Counter() for _ in columns]
    for part in range(7):
        batches = [facts_batch(COUNTS, part, {"part": part})]
        for column, pool in enumerate(columns):
            own = Counter(pool[i] for i in draw.integers(0, len(pool), 90))
            totals[column] += own
            batches.append(counts_of(part, column, own))
        parts.append(batches)
    limits = [1, 1, 3]
    kept, others = summed(InlineEngine(), parts, limits)
    assert [n for _, n in kept.pop(FACTS)] == [1] * 7
    for column, total in enumerate(totals):
        expected = sorted(((-n, value) for value, n in total.items() if n >= limits[column]))
        assert kept[column] == [(value, -n) for n, value in expected]
        assert others[column] == len(total) - len(expected)
    assert others[2] > 0


def test_rows_are_ordered_by_split_and_key_as_unsigned_numbers():
    keys = [3, 2**64 - 1, 0, 2**63]

    def part(number):
        rows = [b"%d" % (number * 2**60 % 7)] * len(keys)
        splits = [number % 2] * len(keys)
        arrays = [pa.array(splits, pa.int32()), pa.array(keys, pa.uint64())]
        arrays.append(pa.array(rows, pa.large_binary()))
        return [pa.RecordBatch.from_arrays(arrays, schema=ROWS)]

    done = []
    with thread_engine(2) as engine:
        found = pa.Table.from_batches(engine.sorted_rows(range(2), part, [], iter, done.append))
    assert sorted(done) == [0, 1]
    assert found["split"].to_pylist() == [0] * 4 + [1] * 4
    assert found["key"].to_pylist() == sorted(keys) * 2


@pytest.mark.parametrize("limit", [1, 100])
def test_two_texts_of_one_hash_are_named_however_rare_they_are(limit):
    parts = []
    for text in (b"this", b"that", b"this"):
        arrays = [[0], [77], [text], [1]]
        arrays = [pa.array(a, field.type) for a, field in zip(arrays, COUNTS, strict=True)]
        parts.append([pa.RecordBatch.from_arrays(arrays, schema=COUNTS)])
    with pytest.raises(TaskError, match="texts b'that' and b'this' have the same 64-bit hash"):
        summed(InlineEngine(), parts, [limit])


def many_rows(part, rows=20_000, width=400):
    draw = np.random.default_rng(part)
    keys = draw.integers(0, 2**64 - 1, rows, np.uint64)
    contents = pa.array([draw.bytes(width) for _ in range(rows)], pa.large_binary())
    arrays = [pa.array(np.zeros(rows, np.int32)), pa.array(keys), contents]
    return [pa.RecordBatch.from_arrays(arrays, schema=ROWS)]


def sorted_keys(engine, parts=20):
    """Returns the keys of 160 MB of rows, as the engine sorts them."""
    found = engine.sorted_rows(range(parts), many_rows, [], iter, lambda part: None)
    return np.concatenate([batch.column(1).to_numpy() for batch in found])


def test_memory_is_a_size():
    for text, size in (("128MB", 128_000_000), ("1.5 GiB", 1_500_000_000), (None, None)):
        assert RunConfig(memory=text).memory_bytes == size
    for text in ("127MB", "4", "lots", "-4GB", ""):
        with pytest.raises(ValueError, match="--memory: expected a size of 128MB or more, such as"):
            RunConfig(memory=text)


def test_with_little_memory_it_goes_on_on_the_disk_and_leaves_nothing_there(tmp_path):
    with thread_engine(1) as engine:
        expected = sorted_keys(engine)
    assert (expected[1:] >= expected[:-1]).all()
    with local_engine(2, tmp_path, 128_000_000) as engine:
        np.testing.assert_array_equal(sorted_keys(engine), expected)
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_named(tmp_path):
    named = pytest.raises(TaskError, match=r"need more than 4 MB .* a larger --memory")
    with local_engine(1, tmp_path, 4 << 20) as engine, named as error:
        sorted_keys(engine)
    assert "\n" not in str(error.value)


def test_a_full_disk_is_named(tmp_path):
    disk, named = tmp_path / "small disk", "small disk.*: No space left on device"
    engine = local_engine(1, disk, 64 << 20)
    with small_disk(disk, "20m"), engine as running, pytest.raises(TaskError, match=named) as error:
        sorted_keys(running)
    assert "\n" not in str(error.value)


ERRORS = [
    (ValueError("expected a number, got 'x'"), "^expected a number, got 'x'$"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device: '.*/spill'"),
]


@pytest.mark.parametrize(("error", "match"), ERRORS)
def test_errors_of_a_function_are_its_own_and_a_full_disk_is_named(tmp_path, error, match):
    def fails(part):
        raise error

    with thread_engine(2, tmp_path / "spill") as engine:
        for result in (engine.sorted_rows([0], fails, [], iter, print), engine.map(fails, [0])):
            with pytest.raises(TaskError, match=match):
                list(result)


def crash(item, folder, times, last):
    """Notes a call; kills its process in the first calls with the last item."""
    (folder / f"{time.monotonic_ns()}.{item}").touch()
    if item == last:
        calls = len(list(folder.glob(f"*.{last}")))
        if calls <= times:
            os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def many(part):
    keys = np.random.default_rng(part).permutation(1_500_000).astype(np.uint64)
    texts = pa.array(keys).cast(pa.string()).cast(pa.large_binary())
    arrays = [np.zeros(len(keys), np.int32), keys, texts, np.ones(len(keys), np.int64)]
    return [pa.RecordBatch.from_arrays([*map(pa.array, arrays)], schema=COUNTS)]


def test_a_query_ends_with_what_the_handler_of_a_signal_raises():
    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)

    def on_part(part):
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()

    try:
        with thread_engine(2) as engine, pytest.raises(SystemExit, match="143"):
            for _ in engine.counts([0], many, [1], True, on_part):
                pass
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)


def test_copies_of_a_process_are_ended_before_they_begin(tmp_path):
    code = (
        "import os, signal, time\n"
        "from dlrm.data.workers import end_processes, process_pool\n"
        "def stop(*_): raise SystemExit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.register_at_fork(after_in_child=lambda: time.sleep(0.5))\n"
        "pool = process_pool(3, forked=True)\n"
        "for _ in range(3): pool.submit(os.getpid)\n"
        "end_processes(pool)\n"
        "print('ended')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("ended\n", "")


def test_only_what_a_killed_process_was_at_is_done_again(tmp_path):
    with local_engine(2) as engine:
        found = list(engine.map(partial(crash, folder=tmp_path, times=1, last=19), range(20)))
    assert found == [item * item for item in range(20)]
    assert len(list(tmp_path.iterdir())) <= 20 + 3  # at most three are under way


def test_a_process_that_is_killed_again_and_again_ends_the_run(tmp_path):
    with local_engine(1) as engine, pytest.raises(EngineError, match="was killed 3 times.*--cores"):
        list(engine.map(partial(crash, folder=tmp_path, times=99, last=1), range(4)))


def test_processes_end_with_the_one_that_started_them(tmp_path):
    code = (
        "import sys, time\n"
        "from dlrm.preproc.duckdb_engine import local_engine\n"
        "if __name__ == '__main__':\n"
        "  with local_engine(2) as e: list(e.map(time.sleep, [0, 0]));"
        " print(*e._pool._processes, flush=True); time.sleep(60)\n"
    )
    (tmp_path / "run.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py"], stdout=subprocess.PIPE, text=True, env=environment
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

"""A `prepare` by URI that is killed, run again, publishes what a local run writes.

Until it ends, there is at the URI what was there before, or nothing.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dlrm.files import MANIFEST
from dlrm.remote.cache import Cache
from dlrm.remote.localize import localize
from dlrm.remote.objects import open_store
from dlrm.remote.publish import find_published

pytestmark = pytest.mark.slow

SEED, KILLS, ROWS = 20261126, 20, 6000


def write_rows(path, seed):
    values = random.Random(seed)
    lines = (
        f"{values.randrange(2)},{values.random()},x{values.randrange(900)}" for _ in range(ROWS)
    )
    path.write_text("\n".join(["label,number,word", *lines]) + "\n")


@pytest.fixture
def inputs(store_uri, tmp_path, root, monkeypatch):
    """Files of rows, there as objects too, and the datasets that local runs make of them."""
    monkeypatch.setenv("PYTHONPATH", str(root))
    (tmp_path / "schema.yaml").write_text("label: label\nnumerical: [number]\ncategorical: [word]")
    made = {}
    for name, seed in (("old", 1), ("new", 2)):
        path = tmp_path / f"{name}.csv"
        write_rows(path, seed)
        open_store(store_uri).write(path.name, path)
        assert prepared(tmp_path, path, tmp_path / name).wait() == 0
        made[name] = contents(tmp_path / name)
    assert made["old"] != made["new"]
    return made


def prepared(folder, source, output, *flags):
    """Starts the command."""
    words = ["prepare", f"--schema={folder}/schema.yaml", f"--input={source}", f"--output={output}"]
    words += ["--split_bytes=16384", "--overwrite", "--no-report", *flags]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-m", "dlrm", *words],
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
    )


def contents(path):
    """Returns the bytes of files that do not state times or paths."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != MANIFEST and "json" not in file.suffix
    }


def kill(process):
    """Kills a command with its processes."""
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def written(endpoint):
    """Returns how many requests have changed objects."""
    counts = endpoint.facts()["counts"]
    return sum(counts.get(name, 0) for name in ("PUT", "POST", "DELETE"))


class WhileItWrites:
    """Kills a command after a random number of requests that change objects."""

    def __init__(self, endpoint, run):
        self._endpoint, before = endpoint, written(endpoint)
        run()
        self._requests = written(endpoint) - before

    def wait(self, process, moments):
        before = written(self._endpoint)
        count = moments.randrange(1, self._requests + 1)
        while process.poll() is None and written(self._endpoint) - before < count:
            time.sleep(0.002)


def test_twenty_kills_change_nothing(endpoint, inputs, store_uri, tmp_path, monkeypatch):
    output, reader = store_uri.below("dataset"), Cache.open(tmp_path / "reader")

    def there():
        assert find_published(output) is not None
        copy = localize(output, reader)
        found = contents(Path(copy))
        (name,) = (name for name, expected in inputs.items() if expected == found)
        return name

    def run(name):
        assert prepared(tmp_path, store_uri.below(f"{name}.csv"), output).wait() == 0
        assert there() == name
        folders = {entry.key.split("/")[1] for entry in open_store(output).entries("dataset/")}
        assert len(folders) <= 1 + len(inputs), f"expected a manifest, and both versions: {folders}"

    run("old")
    endpoint.set(latency=0.02)
    when, moments, found = WhileItWrites(endpoint, lambda: run("new")), random.Random(SEED), []
    for _ in range(KILLS // 2):
        before = found[-1] if found else "new"
        wanted = "old" if before == "new" else "new"
        for _ in range(2):
            process = prepared(tmp_path, store_uri.below(f"{wanted}.csv"), output)
            when.wait(process, moments)
            kill(process)
            found.append(there())
        run(wanted)
        found.append(wanted)
    print(f"{KILLS} kills; there was after each, and after each end: {found}")

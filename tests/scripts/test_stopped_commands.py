"""Commands in processes of their own that are stopped as from a terminal, or whose disk is full."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SIZES = ("8k", "256k", "1m")
MOUNT = (
    'mount -t tmpfs -o "size=$0" disk "$1" && shift && "$@"; code=$?; ls -AR "$DISK"; exit $code'
)


def run(*words, cwd):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, words)], check=False, cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Returns a directory with a table, its schema, a dataset, a trained run and days of logs."""
    path = tmp_path_factory.mktemp("work")
    draw, rows = np.random.default_rng(0), 400_000
    columns = {
        "clicked": (draw.random(rows) < 0.3).astype(np.int64),
        "price": draw.random(rows),
        "item": [f"item {item}" for item in draw.integers(0, 100_000, rows)],
    }
    pq.write_table(pa.table(columns), path / "rows.parquet")
    python = (sys.executable, "-m")
    run(
        *python, *["dlrm.scripts.schema", "--input", "rows.parquet", "--label", "clicked"], cwd=path
    )
    prepare = "dlrm.scripts.prepare --schema schema.yaml --input rows.parquet --output data"
    run(*python, *prepare.split(), cwd=path)
    train = "dlrm.scripts.main --dataset data --recipe auto --max_steps 3"
    run(*python, *train.split(), "--save_checkpoint_path=run", cwd=path)
    simulate = "dlrm.preproc.simulate_logs --output days --rows 400000 --days 2"
    run(*python, *simulate.split(), cwd=path)
    return path


def ends(group):
    """Returns whether a group of processes ends, without a signal."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


STOPPED = {
    "schema": "dlrm.scripts.schema --input=rows.parquet --label=clicked --output={}/s --overwrite",
    "prepare": "dlrm.scripts.prepare --schema=schema.yaml --input=rows.parquet --output={}/o "
    "--cores=2",
    "prepare_logs": "dlrm.preproc.prepare_logs --input_folder=days --output_folder={}/o --cores=2 "
    "--engine=local",
    "evaluate": "dlrm.scripts.evaluate --checkpoint=run --input=data --output={}/o",
    "tune": "dlrm.scripts.tune --dataset=data --output={}/o --trials=9 --processes=2",
    "convert": "dlrm.scripts.convert --dataset=data --output={}/o",
}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", STOPPED)
def test_a_group_of_processes_ends_in_one_line(name, number, code, work, tmp_path):
    seed = int.from_bytes(os.urandom(4))
    wait = random.Random(seed).uniform(0.2, 8)
    print(f"seed {seed}: {number} after {wait:.2f} s")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", *STOPPED[name].format(tmp_path).split()],
        cwd=work,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(wait)
    is_over = process.poll() is not None
    if not is_over:
        os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    if is_over or process.returncode == 0:
        return
    assert process.returncode == code, error
    assert re.fullmatch(r"error: (interrupted|terminated)(; .*)?\n", error)
    left = [path.name for path in tmp_path.rglob("*") if ".partial-" in path.name]
    assert not left or name in ("tune", "prepare", "prepare_logs")  # of a killed worker
    assert ends(process.pid), "a worker is left"


FULL = {
    "schema": "-m dlrm.scripts.schema --input=rows.parquet --label=clicked --output={}/s",
    "prepare": "-m dlrm.scripts.prepare --schema=schema.yaml --input=rows.parquet --output={}/o "
    "--cores=2",
    "prepare_logs": "-m dlrm.preproc.prepare_logs --input_folder=days --output_folder={}/o "
    "--cores=2 --engine=local",
    "main": "-m dlrm.scripts.main --dataset=data --recipe=auto --max_steps=3 "
    "--save_checkpoint_path={}/o",
    "log": "-m dlrm.scripts.main --dataset=data --recipe=auto --max_steps=60 --print_freq=1 "
    "--log_path={}/o",
    "evaluate": "-m dlrm.scripts.evaluate --checkpoint=run --input=data --output={}/o",
    "predict": "-m dlrm.scripts.predict --checkpoint=run --input=data --output={}/o.npy",
    "compare": "-m dlrm.scripts.compare run --output={}/o",
    "convert": "-m dlrm.scripts.convert --dataset=data --output={}/o",
    "checkpoint": "-m dlrm.scripts.checkpoint grow --table_sizes=200000 --output={}/o run",
    "tune": "-m dlrm.scripts.tune --dataset=data --output={}/o --trials=1",
    "export": "ROOT/triton/export.py --checkpoint=run --save-dir={}/o",
    "simulate": "-m dlrm.preproc.simulate_logs --output={}/o --rows=100000",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_a_line_with_a_path(name, size, work, tmp_path):
    if not shutil.which("unshare"):
        pytest.skip("no unshare, which mounts a small disk")
    unshare = ["unshare", "-rm", "sh", "-c", MOUNT, size, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DISK": str(tmp_path)}
    options = {"cwd": work, "env": env, "capture_output": True, "text": True}
    if subprocess.run([*unshare, "true"], check=False, **options).returncode:
        pytest.skip("a user may not mount a small disk here")
    words = FULL[name].format(tmp_path).replace("ROOT", str(ROOT)).split()
    done = subprocess.run([*unshare, sys.executable, *words], check=False, **options)
    if done.returncode == 0:
        return
    *notes, line = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path) in line
    assert re.search("No space left|requested and|on the disk", line)
    assert "Traceback" not in done.stderr
    assert not any(note.startswith("error: ") for note in notes)
    assert ".partial-" not in done.stdout

"""Commands in processes of their own that are stopped as from a terminal, or whose disk is full."""

import json
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
import yaml
from pyarrow import csv

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
    csv.write_csv(pa.table(columns).slice(0, 50_000), path / "rows.csv")
    python = (sys.executable, "-m")
    run(
        *python, *["dlrm.scripts.schema", "--input", "rows.parquet", "--label", "clicked"], cwd=path
    )
    prepare = "dlrm.scripts.prepare --schema schema.yaml --input rows.parquet --output data"
    run(*python, *prepare.split(), cwd=path)
    train = "dlrm.scripts.main --dataset data --recipe auto --max_steps 3"
    run(*python, *train.split(), "--save_checkpoint_path=run", cwd=path)
    simulate = "dlrm.scripts.simulate_logs --output days --rows 400000 --days 2"
    run(*python, *simulate.split(), cwd=path)
    width, tables = 4 * (1 + 13 + 26), {f"cat_{i}.bin": 99 for i in range(26)}
    for split in ("train", "test"):
        (path / "binary").mkdir(exist_ok=True)
        (path / f"binary/{split}_data.bin").write_bytes(bytes(20_000 * width))
    (path / "binary/model_size.json").write_text(json.dumps(tables))
    spec = {
        "feature_spec": {name: {"dtype": "int32", "cardinality": 99} for name in ("label", "item")},
        "source_spec": {
            split: [{"type": "csv", "features": ["label", "item"], "files": [f"{split}.csv"]}]
            for split in ("train", "test")
        },
        "channel_spec": {"label": ["label"], "numerical": [], "categorical": ["item"]},
    }
    (path / "csv.yaml").write_text(yaml.safe_dump(spec))
    (path / "text").mkdir()
    words = np.array(["a", "cat", "saw", "the", "dog"])[draw.integers(0, 5, (20_000, 12))]
    (path / "text/all.txt").write_text("\n\n".join(" ".join(line) for line in words.tolist()))
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "saw", "the", "dog")
    (path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    return path


def ends(group):
    """Returns whether a group of processes ends, without a signal."""
    for _ in range(600):
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
    "prepare_logs": "dlrm.preproc.logs.prepare_logs --input_folder=days --output_folder={}/o "
    "--engine=local",
    "evaluate": "dlrm.scripts.evaluate --checkpoint=run --input=data --output={}/o",
    "tune": "dlrm.scripts.tune --dataset=data --output={}/o --trials=9 --processes=2",
    "convert": "dlrm.scripts.convert --dataset=data --output={}/o",
}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", STOPPED)
def test_a_group_of_processes_ends_in_one_line(name, number, code, work, tmp_path):
    wait = random.Random(f"{name} {code}").uniform(0.2, 8)
    print(f"{number} after {wait:.2f} s")
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
    _, error = process.communicate(timeout=120)
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
    "prepare_logs": "-m dlrm.preproc.logs.prepare_logs --input_folder=days --output_folder={}/o "
    "--cores=2 --engine=local",
    "main": "-m dlrm.scripts.main --dataset=data --recipe=auto --max_steps=3 "
    "--save_checkpoint_path={}/o",
    "log": "-m dlrm.scripts.main --dataset=data --recipe=auto --max_steps=60 --print_freq=1 "
    "--log_path={}/o",
    "evaluate": "-m dlrm.scripts.evaluate --checkpoint=run --input=data --output={}/o",
    "predict": "-m dlrm.scripts.predict --checkpoint=run --input=data --output={}/o.npy",
    "convert": "-m dlrm.scripts.convert --dataset=data --output={}/o",
    "tune": "-m dlrm.scripts.tune --dataset=data --output={}/o --trials=1",
    "export": "ROOT/triton/export.py --checkpoint=run --save-dir={}/o",
    "simulate": "-m dlrm.scripts.simulate_logs --output={}/o --rows=100000",
    "gen_csv": "-m dlrm.scripts.gen_csv --feature_spec_in=csv.yaml --output={}/o --size=100000",
    "split_dataset": "-m dlrm.scripts.split_dataset --dataset=binary --numerical_features=13 "
    "--output={}/o",
    "synthetic": "-m dlrm.scripts.prepare_synthetic_dataset --synthetic_dataset_dir={}/o "
    "--synthetic_dataset_num_entries=100000 --synthetic_dataset_table_sizes=9,9",
    "text": "-m dlrm.language.prepare_text --source=text --output={}/o "
    "--vocab_file=vocab.txt --max_seq_length=64 --input_format=sentences --processes=2",
    "bert": "-m dlrm.scripts.bert --mode=pretrain --data=generated --num_layers=1 --num_heads=2 "
    "--hidden_size=64 --intermediate_size=128 --synthetic_dataset_num_entries=32 --batch_size=4 "
    "--vocab_size=9000 --max_seq_length=16 --lr=1e-3 --max_steps=2 --save_checkpoint_path={}/o",
    "cnn": "-m dlrm.scripts.cnn --model=efficientnet_b0 --norm=group --image_size=32 "
    "--num_classes=7 --data=generated --synthetic_dataset_num_entries=16 --batch_size=4 "
    "--optimizer=momentum --lr=0.01 --max_steps=2 --save_checkpoint_path={}/o",
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

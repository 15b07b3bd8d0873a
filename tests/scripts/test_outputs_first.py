"""Commands write all of their output before a line that nobody reads ends them."""

import contextlib
import io
import json
import os
import sys

import forked
import numpy as np
import pytest
import yaml
from small_dataset import write_dataset

from dlrm.scripts.commands import COMMANDS, run

SPEC = {
    "feature_spec": {name: {"dtype": "int32", "cardinality": 99} for name in ("label", "item")},
    "source_spec": {
        split: [{"type": "csv", "features": ["label", "item"], "files": [f"{split}.csv"]}]
        for split in ("train", "test")
    },
    "channel_spec": {"label": ["label"], "numerical": [], "categorical": ["item"]},
}
# Command: its flags, with OUT for the folder of its outputs.
FLAGS = {
    "schema": "--input=rows.csv --label=y --output=OUT/schema.yaml",
    "prepare": "--schema=schema.yaml --input=rows.csv --output=OUT/data --cores=1 --noreport",
    "convert": "--dataset=small --values=ids --output=OUT/parquet",
    "evaluate": "--checkpoint=run --dataset=DATASET --bootstrap=0 --recalibrate --output=OUT/page "
    "--recalibrated_checkpoint=OUT/run",
    "predict": "--checkpoint=run --input=LOG --output=OUT/scores.npy --explain=1",
    "tune": "--dataset=small --output=OUT/tuning --trials=1 --rungs=1 --processes=1 --seed=3",
    "simulate": "--output=OUT/logs --rows=200 --days=2",
    "synthetic": "--synthetic_dataset_dir=OUT/data --synthetic_dataset_num_entries=64 "
    "--synthetic_dataset_table_sizes=9,9",
    "gen-csv": "--feature_spec_in=csv.yaml --output=OUT/csv --size=50",
    "transcode": "--input=csv --output=OUT/data",
    "split-dataset": "--dataset=binary --output=OUT/data --cores=1",
}


TIMED = {"study.journal"}  # with times


@pytest.fixture(scope="module")
def work(trained, tmp_path_factory):
    """Returns a folder with inputs of all commands."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "rows.csv").write_text("y,x\n" + "".join(f"{i % 2},{i % 7}\n" for i in range(99)))
    (folder / "schema.yaml").write_text("{label: y, numerical: [x]}")
    (folder / "csv.yaml").write_text(yaml.safe_dump(SPEC))
    write_dataset(folder / "small", {"train": 600, "test": 10})
    (folder / "run").symlink_to(trained.checkpoint)
    forked.call(
        "dlrm.scripts.gen_csv",
        f"--feature_spec_in={folder}/csv.yaml",
        f"--output={folder}/csv",
        "--size=40",
        code=0,
    )
    (folder / "binary").mkdir()
    for split in ("train", "test"):
        np.zeros((20, 16), "<i4").tofile(folder / f"binary/{split}_data.bin")
    (folder / "binary/model_size.json").write_text(json.dumps({"cat_0.bin": 9, "cat_1.bin": 9}))
    return folder


def files(folder):
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if path.name not in TIMED}


def run_unread(name, words, error):
    """Runs a command whose standard output is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), error.open("w", buffering=1)
    sys.exit(run(COMMANDS[name], words))


@pytest.mark.parametrize("name", FLAGS)
def test_outputs_are_whole_where_nobody_reads_the_lines(name, work, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(work)
    flags = FLAGS[name].replace("DATASET", str(trained.dataset)).replace("LOG", str(trained.log))
    read, unread = tmp_path / "read", tmp_path / "unread"
    read.mkdir()
    unread.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(COMMANDS[name], flags.replace("OUT", str(read)).split()) == 0
    words, error = flags.replace("OUT", str(unread)).split(), tmp_path / "error"
    process = forked.CONTEXT.Process(target=run_unread, args=(name, words, error))
    process.start()
    process.join()
    assert files(unread) == files(read) != {}
    if name not in ("transcode", "split-dataset"):  # whose lines are all before the output
        assert error.read_text() == "error: [Errno 32] Broken pipe: 'standard output'\n"
        assert process.exitcode == 1

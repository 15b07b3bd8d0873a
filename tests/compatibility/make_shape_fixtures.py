"""Writes a dataset and a model with a shared table and attention, for later versions to read.

    python tests/compatibility/make_shape_fixtures.py OUTPUT [widths|quadratic|mixed]

With another kind there is no attention, and the table has fewer columns than the interaction.
FTRL updates the wide term of "widths", quadratic layers with dropout make the loss of two passes
of "quadratic", and members of two kinds are those of "mixed".

`make_fixtures` describes OUTPUT and OUTPUT.tar.xz. `data` is a dataset of simulated histories,
`run` is a training run on it that was stopped halfway, and `models` is the export of its last
checkpoint. `expected.json` has the ids of the first rows, and the scores of the checkpoint and of
an uninterrupted run.
"""

import json
import os
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
from make_fixtures import ROOT, call

import dlrm
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.transform.schema import Schema
from dlrm.serving.predictor import inputs_of
from dlrm.train.checkpoints.directory import last_checkpoint

ROWS, STEPS, HALF = 900, 12, 6
TRAIN = [
    *("--dataset=data", "--base_device=cpu", "--embedding_dim=4", "--bottom_mlp_sizes=4"),
    *("--top_mlp_sizes=8,1", "--batch_size=64", "--test_batch_size=200", "--wide"),
    *("--embedding_optimizer=adagrad", "--mlp_optimizer=adam"),
    *("--lr=0.05", "--warmup_steps=2", "--decay_steps=0", "--log_path=log.json", "--test_freq=3"),
    "--epochs=3",
]
FURTHER = {
    "attention": ["--attention_hidden=5"],
    "widths": ["--wide_optimizer=ftrl", "--ftrl_beta=0.01", "--ftrl_l1=0.001"],
    "quadratic": ["--interaction_op=quadratic", "--self_ensemble", "--dropout=0.1"],
    "mixed": ["--ensemble=dot,quadratic", "--quadratic_layers=1"],
}


def scores(checkpoint: Path, table: Path) -> list[float]:
    """Returns the scores of a file's rows."""
    rows = pq.read_table(table).drop_columns("click")
    return dlrm.load(checkpoint).predict(rows).tolist()


def first_ids(dataset: Path) -> dict[str, list]:
    """Returns the ids and lengths of the first training rows."""
    batch = SplitDataset(FeatureSpec.load(dataset), "train", 20).batch(0)
    inputs = inputs_of(batch)
    assert inputs.lengths is not None
    return {"ids": inputs.ids.tolist(), "lengths": inputs.lengths.tolist()}


def narrow(schema: Path) -> None:
    """Gives the fields of a schema tables of 3 columns, and no attention."""
    found = Schema.load(schema)
    changes = {"pooling": None, "target": None, "embedding_dim": 3}
    fields = tuple(replace(field, **changes) for field in found.categorical)  # type: ignore[arg-type]
    replace(found, categorical=fields).save(schema)


def trained(folder: str, steps: int, kind: str) -> Path:
    """Trains up to a step; returns the last checkpoint."""
    words = [f"--save_checkpoint_path={folder}", f"--max_steps={steps}"]
    call("-m", "dlrm.scripts.main", *TRAIN, *FURTHER[kind], *words)
    found = last_checkpoint(Path(folder))
    assert found is not None
    assert found.name.endswith(f"{steps:09}"), found
    return found


def main(output: Path, kind: str = "attention") -> None:
    """Writes the files and packs them."""
    output.mkdir()
    os.chdir(output)
    history = ["--history=3", f"--rows={ROWS}", "--days=2", "--output=raw"]
    call("-m", "dlrm.scripts.simulate_logs", *history)
    if kind != "attention":
        narrow(Path("raw/schema.yaml"))
    days = ["--schema=raw/schema.yaml", "--input=raw/day_0.parquet"]
    call("-m", "dlrm.scripts.prepare", *days, "--output=data", "--engine=local", "--noreport")
    half, whole = trained("run", HALF, kind), trained("whole", STEPS, kind)
    call(ROOT / "triton/export.py", f"--checkpoint={half}", "--save-dir=models", "--ts-trace")
    shutil.rmtree("models/model_transform")  # its code reads what the same version wrote
    expected = {
        "kind": kind,
        **first_ids(Path("data")),
        "half": scores(half, Path("raw/day_1.parquet")),
        "whole": scores(whole, Path("raw/day_1.parquet")),
    }
    shutil.rmtree("whole")
    for name in ("curves.png", "log.json", "raw/day_0.parquet"):
        Path(name).unlink(missing_ok=True)
    Path("expected.json").write_text(json.dumps(expected) + "\n")
    with tarfile.open(f"{output}.tar.xz", "w:xz") as tar:
        for path in sorted(output.iterdir()):
            tar.add(path, path.name)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or {*sys.argv[2:]} - {*FURTHER}:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])

"""Reads fixtures through the package's public names, when they are stored and when tested."""

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow.parquet import read_table

import dlrm
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.language import command as bert, flags as bert_flags
from dlrm.language.pretraining.dataset import open_pretraining
from dlrm.scripts import main
from dlrm.scripts.common import dlrm_flags
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.vision import command as cnn, flags as cnn_flags
from dlrm.vision.loader import ImageDataset

SPLITS = ("train", "test", "validation")
# Measures of a run that do not depend on the machine's speed.
_MEASURES = ("auc", "loss", "top1", "top5", "accuracy", "epoch", "step")

# Scores requests with an exported version alone: its folder has its own `dlrm`.
# The classes stand in for the server's, which model.py receives and returns.
_ANSWER = """
import json, sys, types
from pathlib import Path
import numpy as np

version = Path(sys.argv[1]).resolve()

class Tensor:
    def __init__(self, name, array):
        self._name, self.array = name, array
    def name(self):
        return self._name
    def shape(self):
        return self.array.shape
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
    @staticmethod
    def from_dlpack(name, lent):
        return Tensor(name, np.from_dlpack(lent).copy())

class Request:
    def __init__(self, **arrays):
        self.tensors = [Tensor(name, array) for name, array in arrays.items()]
    def inputs(self):
        return self.tensors

class TritonError(Exception):
    INVALID_ARG = 3

class Response:
    def __init__(self, tensors=(), error=None):
        if error is not None:
            raise error
        (self.answer,) = [tensor.array for tensor in tensors]

server = types.ModuleType("triton_python_backend_utils")
server.Tensor, server.TritonError, server.InferenceResponse = Tensor, TritonError, Response
sys.modules[server.__name__] = server
model = types.ModuleType("model")
exec(compile((version / "model.py").read_text(), "model.py", "exec"), model.__dict__)
instance = model.TritonPythonModel()
config = {"max_batch_size": 4096, "parameters": {"threads": {"string_value": "1"}}}
instance.initialize(
    {
        "model_repository": str(version.parent),
        "model_version": version.name,
        "model_config": json.dumps(config),
    }
)
import dlrm
assert Path(dlrm.__file__).resolve().is_relative_to(version), dlrm.__file__
assert "torch" not in sys.modules
asked = np.load(sys.argv[2])
inputs = {"numerical": "input__0", "ids": "input__1", "lengths": "input__2"}
found = instance.execute(
    [
        Request(raw__0=asked["raw"]),
        Request(**{name: asked[key] for key, name in inputs.items() if key in asked}),
    ]
)
np.savez(sys.argv[3], raw=found[0].answer, ids=found[1].answer)
"""


def known(summary: dict[str, Any]) -> dict[str, float]:
    """Returns the measures of a summary that are the same in every run."""
    return {name: v for name, v in summary.items() if any(part in name for part in _MEASURES)}


def read_rows(kind: str, dataset: Path, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns all rows of a dataset, by names like "train labels".

    Args:
        kind: "clicks", "images" or "text".
        dataset: a directory.
        options: keywords of `DataConfig` or `open_pretraining`.
    """
    if kind == "text":
        options = {n: v for n, v in options.items() if n != "check_crc"}  # a keyword of 0.1.0
        data = open_pretraining(dataset, **options)
        batch = data.read(np.arange(data.num_samples))._asdict()
        return {name: t.numpy() for name, t in batch.items() if isinstance(t, torch.Tensor)}
    rows = {}
    if kind == "images":
        for split in ("train", "test"):
            images = ImageDataset(dataset, split)
            read = images.read(np.arange(images.num_samples))
            rows |= {f"{split} images": read[0].numpy(), f"{split} labels": read[1].numpy()}
        return rows
    where = {"dataset": str(dataset), "synthetic_dataset_dir": str(dataset)}
    config = DataConfig(**where, batch_size=128, test_batch_size=128, **options)
    for split, data in zip(SPLITS, open_datasets(config), strict=True):
        batches = [data.batch(i) for i in range(-(-data.num_samples // 128))] if data else []
        for name in ("numerical", "categorical", "labels", "lengths") if batches else ():
            if getattr(batches[0], name) is not None:
                rows[f"{split} {name}"] = torch.cat([getattr(b, name) for b in batches]).numpy()
    return rows


def run(command: str, arguments: list[str]) -> dict[str, float]:
    """Runs a command in this process; returns its summary."""
    if command == "main":
        return main.run(dlrm_flags.parse(arguments))
    if command == "cnn":
        return cnn.run(cnn_flags.parse(arguments))
    return bert.run(bert_flags.parse(arguments))


def score(
    command: str, flags: list[str], directory: Path, folder: Path
) -> dict[str, dict[str, float]]:
    """Tests a run's checkpoints with its own command; returns the measures of each.

    The DLRM command tests one checkpoint, here the last; the other commands also test the EMA.

    Args:
        command: "main", "cnn" or "bert".
        flags: flags of its training.
        directory: holds the checkpoints.
        folder: holds the datasets.
    """
    datasets = [flag.format(folder) for flag in flags if "dataset=" in flag]
    with tempfile.TemporaryDirectory() as scratch:
        common = ["--base_device=cpu", *datasets, f"--log_path={scratch}/log.json"]
        if command == "main":
            one = last_checkpoint(directory)
            more = ["--mode=test", f"--load_checkpoint_path={one}", "--test_batch_size=200"]
            return {"last": known(run(command, [*common, *more]))}
        name = {"cnn": "restore_path", "bert": "load_checkpoint_path"}[command]
        mode = {"cnn": "validate", "bert": "evaluate"}[command]
        more = [f"--mode={mode}", f"--{name}={directory}", f"--results={scratch}/results.csv"]
        run(command, [*common, *more, "--test_batch_size=8"])
        with open(f"{scratch}/results.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    return {
        f"{row['checkpoint']} {row['weights']}": {k: float(v) for k, v in known(row).items()}
        for row in rows
    }


def scores_of_rows(folder: Path, flags: list[str], directory: Path) -> dict[str, np.ndarray]:
    """Returns the logits of a DLRM run's best and last checkpoints.

    Scores raw rows if the checkpoint has a transform, else the dataset's test rows.
    """
    (dataset,) = (flag.partition("=")[2].format(folder) for flag in flags if "dataset=" in flag)
    found = {}
    for name, path in (("best", directory), ("last", last_checkpoint(directory))):
        predictor = dlrm.load(path)
        if predictor.transform is None:
            rows = open_datasets(DataConfig(dataset=dataset, test_batch_size=300)).test
            found[name] = predictor.score_batch(rows.batch(0))[0]
        elif not predictor.transform.is_log:
            columns = json.loads((folder / "expected" / "columns.json").read_text(encoding="utf-8"))
            cells = zip(*columns.values(), strict=True)  # lists are texts, as in CSV
            found[name] = predictor.logits([dict(zip(columns, row, strict=True)) for row in cells])
        else:
            lines = (folder / "expected" / "lines.tsv").read_text().splitlines()
            found[name] = predictor.logits(lines)
    return found


def answers(version: Path, folder: Path, dataset: str) -> dict[str, np.ndarray]:
    """Returns requests to a version that was exported from a dataset's model, and its responses."""
    lines = (folder / "expected" / "lines.tsv").read_text(encoding="utf-8").splitlines()
    padded = np.array([line.encode() for line in lines])
    raw = padded.view(np.uint8).reshape(len(lines), -1)
    config = DataConfig(dataset=str(folder / dataset), test_batch_size=50)
    batch = open_datasets(config).test.batch(0)
    asked = {"raw": raw, "numerical": batch.numerical.numpy().astype(np.float32)}
    asked["ids"] = batch.categorical.numpy().astype(np.int64)
    if batch.lengths is not None:
        asked["lengths"] = batch.lengths.numpy().astype(np.int32)
    return asked | ask(version, asked)


def ask(version: Path, asked: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns an exported version's responses to requests with raw rows and with ids."""
    with tempfile.TemporaryDirectory() as scratch:
        np.savez(f"{scratch}/asked.npz", **asked)
        files = [f"{scratch}/asked.npz", f"{scratch}/found.npz"]
        command = [sys.executable, "-I", "-B", "-c", _ANSWER, str(version.resolve()), *files]
        done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, check=False)
        assert done.returncode == 0, done.stderr
        with np.load(files[1]) as found:
            return {f"answer_{name}": found[name] for name in found.files}


def run_often(call: Callable[..., Any], module: str, lines: list[list[str]]) -> None:
    """Runs a command with each of several command lines, all in one other process.

    Args:
        call: runs a script with arguments.
        module: the command's module, with `main`.
        lines: the arguments of each run.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(lines, file)
        file.flush()
        call(Path(__file__).with_name("run_often.py"), module, file.name)


def scores_of_files(
    call: Callable[..., Any], folder: Path, files: dict[str, list[str]]
) -> dict[str, dict[str, np.ndarray]]:
    """Returns run -> file -> the logits of the run's best checkpoint.

    Args:
        call: see `run_often`.
        folder: the files of a version.
        files: run -> files in `tables/`.
    """
    pairs = [(run, name) for run, names in files.items() for name in names]
    with tempfile.TemporaryDirectory() as scratch:
        lines = [
            [*_on_table(folder, run, name), f"--output={scratch}/{run}/{name}.npy"]
            for run, name in pairs
        ]
        run_often(
            call, "dlrm.scripts.predict.__main__", [[*one, "--output_kind=logit"] for one in lines]
        )
        return {
            run: {name: np.load(f"{scratch}/{run}/{name}.npy") for name in names}
            for run, names in files.items()
        }


def measures_of_files(
    call: Callable[..., Any], folder: Path, files: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Returns run -> measures of the run's best checkpoint, with weights and groups of the schema.

    Args:
        call: see `run_often`.
        folder: the files of a version.
        files: run -> file in `tables/`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        lines = []
        for run, name in files.items():
            schema = dlrm.load(folder / "runs" / run).row_transform.schema
            more = ["--bootstrap=0", f"--output={scratch}/{run}"]
            more += ["--weights=weight"] * bool(schema.weight)
            more += [f"--groups={name}" for name in schema.groups[:1]]
            lines.append([*_on_table(folder, run, name), *more])
        run_often(call, "dlrm.scripts.evaluate.__main__", lines)
        found = {}
        for run in files:
            facts = json.loads(Path(scratch, run, "evaluation.json").read_text())
            values = facts["models"][0].items()
            found[run] = {name: one["value"] for name, one in values if isinstance(one, dict)}
        return found


def _on_table(folder: Path, run: str, name: str) -> list[str]:
    return [f"--checkpoint={folder / 'runs' / run}", f"--input={folder / 'tables' / name}"]


def scores_in_memory(folder: Path, run: str) -> dict[str, np.ndarray]:
    """Returns the logits of the best checkpoint of a run for rows in each form."""
    predictor = dlrm.load(folder / "runs" / run)
    table, names = predictor.row_transform, predictor.row_transform.names
    rows = json.loads((folder / "expected" / "dicts.json").read_text(encoding="utf-8"))
    found = {}
    if table.lists:  # others take no lists, which the frame has
        found["frame"] = predictor.logits(read_table(folder / "tables" / "rows.parquet"))
    else:
        rows = [row for row in rows if not isinstance(row["tags"], list)]
    columns = {name: [row[name] for row in rows] for name in names}
    texts = [row for row in rows if not isinstance(row["tags"], list)]
    lines = ["\t".join(row[name] or "" for name in names) for row in texts]
    sequences = [list(row) for row in zip(*columns.values(), strict=True)]
    given = {"dicts": rows, "sequences": sequences, "columns": columns, "lines": lines}
    return found | {name: predictor.logits(given) for name, given in given.items()}

"""Writes an exported model into a Triton model repository, once it agrees with the checkpoint."""

import filecmp
import json
import math
import os
import shutil
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tritonclient.grpc.model_config_pb2 import ModelConfig

from dlrm.data import layout
from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import Datasets, open_datasets
from dlrm.data.sources.row_error import RowError
from dlrm.deployment import repository
from dlrm.deployment.repository import Serving
from dlrm.files import atomic_directory, make_directories
from dlrm.locks import new_suffix, unreplaced
from dlrm.manifest import write_manifest
from dlrm.metrics.clicks import click_metrics
from dlrm.remote.uri import is_uri, shown
from dlrm.serving.loading import load
from dlrm.serving.network.exportable import Exportable, example_like
from dlrm.serving.network.platforms import Score
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.predictor import Predictor
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.scoring import field_names, probability
from dlrm.serving.server.names import FACTS, KIND
from dlrm.serving.sources import check_dataset, inputs_of
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.version import __version__

if TYPE_CHECKING:  # the command, which imports this module to act
    from dlrm.deployment.export import ExportConfig

ROWS_ON_DISK = ("split", "binary", "memmap", "parametric")
MAX_DIFFERENCE = 1e-4  # of a score, relative to the greatest: float32 sums in another order
MAX_AUC_CHANGE = {"fp32": 1e-5, "fp16": 5e-4}  # by the precision of the tables
MOST_DELAY = 60_000  # milliseconds
_BATCH = 4096  # rows scored at a time


class Reference(NamedTuple):
    """Rows that an exported model is compared on, with their logits by the checkpoint.

    Generated rows have no dataset, and their labels are all 0.
    """

    dataset: str | None
    split: str
    inputs: Inputs
    labels: np.ndarray
    logits: np.ndarray


class Export(NamedTuple):
    """A model, and how it is exported."""

    predictor: Predictor
    tables: torch.Tensor
    serving: Serving
    reference: Reference


def export_model(options: "ExportConfig") -> None:
    """Exports a model.

    Raises:
        ValueError, OSError, ImportError: errors that the user can fix.
    """
    model_directory = options.save_dir / options.triton_model_name
    version = _version(options, model_directory)
    with Checkpoint.held(options.checkpoint) as held, unreplaced(held.path):
        loaded = _load(held.path, options)
    write = _write_update if options.update else _write_new
    lines = write(options, loaded, version)
    print(f"{model_directory / str(version)}: {options.platform}, {options.output_kind}")
    print("\n".join(lines))


def _version(options: "ExportConfig", directory: Path) -> int:
    """Returns the version to write, after checking that it can be written."""
    for flag, least in (("triton_max_batch_size", 1), ("triton_engine_count", 1), ("threads", 0)):
        if (value := getattr(options, flag)) < least:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: expected {least} or more")
    delay = options.triton_dyn_batching_delay
    if not 0 <= delay <= MOST_DELAY:
        raise ValueError(
            f"--triton-dyn-batching-delay {delay}: expected milliseconds, 0 to {MOST_DELAY}"
        )
    name = options.triton_model_name
    if name != Path(name).name or name in ("", ".", ".."):
        raise ValueError(f"--triton-model-name {name!r}: expected the name of one directory")
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{existing}: expected a directory that can be written (--save-dir)")
    asked = options.triton_model_version
    if asked is not None and asked < 1:
        raise ValueError(f"--triton-model-version {asked}: expected 1 or more")
    if not options.update:
        if directory.exists():
            raise ValueError(
                f"{directory}: there is a model of that name; --update adds a version to it, "
                "--triton-model-name names another"
            )
        return asked or 1
    repository.read_triton_config(directory)
    last = max((int(path.name) for path in directory.glob("[0-9]*")), default=0)
    if asked is not None and asked <= last:
        raise ValueError(
            f"--triton-model-version {asked}: expected more than {last}, the last in {directory}"
        )
    return asked or last + 1


def _load(path: Path, options: "ExportConfig") -> Export:
    """Loads the checkpoint and the rows to compare on, which must match the model."""
    dataset, kind = _rows_to_compare(path, options)
    predictor = load(path, dataset, options.allow_other_transform, print, options.allow_links)
    if dataset is None:
        reference = _generated(predictor, options)
    else:
        reference = _reference(dataset, kind, predictor, options)
    serving = Serving(
        options,
        raw=not options.no_raw and predictor.transform is not None,
        lists=reference.inputs.lengths is not None,
        weighted=reference.inputs.weights is not None,
    )
    if serving.lists and options.triton_dyn_batching_delay:
        raise ValueError(
            f"--triton-dyn-batching-delay {options.triton_dyn_batching_delay}: expected none for a "
            "model of lists, whose requests the server does not batch"
        )
    tables = quantize_tables(predictor.model, options.embedding_precision)
    return Export(predictor, tables, serving, reference)


def _rows_to_compare(path: Path, options: "ExportConfig") -> tuple[str | None, str]:
    """Returns the dataset to score, None if it is gone, and its type; by default the training's."""
    trained = Checkpoint(path).config["flags"]
    if options.dataset and not options.dataset.is_dir():
        raise ValueError(f"--dataset {options.dataset}: expected a dataset's directory, got none")
    dataset = options.dataset or trained.get("dataset")
    kind = options.dataset_type or trained.get("dataset_type")
    is_there = dataset and kind in ROWS_ON_DISK and Path(dataset).is_dir()
    return str(dataset) if is_there else None, kind


def _generated(predictor: Predictor, options: "ExportConfig") -> Reference:
    """Returns rows of normally distributed numericals and uniformly distributed ids.

    Raises:
        ValueError: only a dataset has what is needed: lists, or the AUC that quantizing costs.
    """
    config, transform = predictor.model.config, predictor.transform
    needs_dataset = options.dataset or options.embedding_precision != "fp32"
    if needs_dataset or transform is None or transform.longest:
        raise ValueError(
            "--dataset: expected the directory of a dataset, whose real rows the exported model "
            f"is judged by; {_trained_on(predictor.path)}; "
            "dlrm.Dataset.from_arrow(frame, schema, DIR) writes one from a table"
        )
    rows, draw = max(options.verify_rows, 1), np.random.default_rng(0)
    numerical = draw.normal(size=(rows, config.num_numerical_features)).astype(np.float16)
    ids = draw.integers(0, config.table_sizes, (rows, len(config.table_sizes)))
    inputs = Inputs(numerical.astype(_numerical_dtype(options)), ids.astype(options.ids))
    return Reference(None, "", inputs, np.zeros(rows, np.float32), predictor.logits_of(inputs))


def _numerical_dtype(options: "ExportConfig") -> str:
    return "float16" if options.fp16 else "float32"


def _trained_on(checkpoint: Path) -> str:
    trained = Checkpoint(checkpoint).config["flags"]
    if not trained.get("dataset"):
        return f"{checkpoint} does not name the dataset that it was trained on"
    kind = trained.get("dataset_type")
    return f"{checkpoint} was trained on {trained['dataset']} ({kind}), which is not there"


def _reference(dataset: str, kind: str, predictor: Predictor, options: "ExportConfig") -> Reference:
    config, max_rows = predictor.model.config, max(options.verify_rows, 1)
    datasets = open_datasets(
        DataConfig(
            dataset=dataset,
            dataset_type=kind,
            batch_size=max_rows,
            test_batch_size=max_rows,
            num_numerical_features=config.num_numerical_features,
            allow_links=options.allow_links,
        )
    )
    split, rows = _split_with_rows(datasets)
    check_dataset(dataset, rows, config)
    if predictor.transform and bool(predictor.transform.longest) == rows.one_id_each:
        raise ValueError(f"{dataset}: expected lists in the fields in which the model has them")
    batch = rows.batch(0)
    try:
        logits, labels = predictor.logits_of(inputs_of(batch)), batch.labels.cpu().numpy()
    except RowError as error:
        error.where = f"{dataset}: {split} row {error.row}"
        raise
    numerical, ids, lengths, weights = inputs_of(batch)
    inputs = Inputs(
        numerical.astype(_numerical_dtype(options)),
        ids.astype(options.ids),
        None if lengths is None else lengths.astype(np.int32),
        weights,
    )
    return Reference(dataset, split, inputs, labels, logits)


def _split_with_rows(datasets: Datasets) -> tuple[str, ClickDataset]:
    """Returns the first split with rows: the test split, or else others; training has rows."""
    others = (("test", datasets.test), ("validation", datasets.validation))
    found = ((name, rows) for name, rows in others if rows is not None and rows.num_samples)
    return next(found, ("train", datasets.train))


def _configs(name: str, export: Export) -> dict[str, ModelConfig]:
    """Returns directory in the repository -> configuration; the model itself comes last."""
    config, serving = export.predictor.model.config, export.serving
    sizes = (config.num_numerical_features, len(config.table_sizes))
    configs = {}
    if serving.raw and not serving.platform.takes_raw:
        configs[f"{name}_transform"] = repository.transform_config(name, *sizes, serving)
        configs[f"{name}_raw"] = repository.ensemble_config(name, serving)
    return {**configs, name: repository.triton_config(name, *sizes, serving)}


def _write_new(options: "ExportConfig", export: Export, version: int) -> list[str]:
    """Writes new models: all of them, or none."""
    with ExitStack() as staged:
        for name, config in _configs(options.triton_model_name, export).items():
            top = staged.enter_context(_staged(options.save_dir / name, options.save_dir))
            repository.write_config(top, config)
            directory = top / str(version)
            directory.mkdir()
            if name == options.triton_model_name:
                return _write_version(directory, export)
            if config.backend == "python":
                _write_facts(directory, export)
                _write_transform(directory, export)
                repository.write_backend(directory)
                _finish(directory)
    raise AssertionError("the model itself is always among them")


def _write_update(options: "ExportConfig", export: Export, version: int) -> list[str]:
    """Writes a further version of a model, with the inputs and outputs of the others."""
    name = options.triton_model_name
    top = options.save_dir / name
    before, after = repository.read_triton_config(top), _configs(name, export)[name]
    for field in ("backend", "platform", "input", "output"):
        old, new = str(getattr(before, field)), str(getattr(after, field))
        if old != new:
            raise ValueError(
                f"{top}: a version must have the {field} of the others: expected\n{old}\n"
                f"got\n{new}\nUse the flags of the first export, or another --triton-model-name"
            )
    kind = before.parameters["output_kind"].string_value
    if kind != options.output_kind:
        raise ValueError(f"--output-kind {options.output_kind}: {top} has {kind}")
    transform = options.save_dir / f"{name}_transform"
    if transform.is_dir() and not _same_files(
        max(transform.glob(f"[0-9]*/{layout.TRANSFORM}")), _transform_of(export)
    ):
        raise ValueError(
            f"{transform}: expected the transform of the new version, got another: an ensemble "
            "cannot take a new transform and new tables at one instant, as --python does; use "
            "another --triton-model-name"
        )
    with _staged(top / str(version), options.save_dir) as directory:
        return _write_version(directory, export)


def _staged(path: Path, repository: Path) -> AbstractContextManager[Path]:
    """Returns `atomic_directory(path)`, filled where a polling server does not look.

    Such a server takes every directory of the repository for a model, and loads all versions of a
    model again if anything in its directory changes. If nothing can be written beside the
    repository, or it is a file system of its own, it logs an error until the export is complete.
    """
    make_directories(repository)
    parent = repository.resolve().parent
    beside = repository if _can_rename(parent, repository) else repository / "model"
    return atomic_directory(path, beside=beside)


def _can_rename(source: Path, target: Path) -> bool:
    """Returns whether files can be renamed into another directory, which a bind mount prevents.

    The system compares the mounts before it looks for the file, so none is needed.
    """
    if not os.access(source, os.W_OK | os.X_OK) or source.stat().st_dev != target.stat().st_dev:
        return False
    name = f".{new_suffix()}"
    try:
        os.rename(source / name, target / name)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


def _write_version(directory: Path, export: Export) -> list[str]:
    """Writes a version and compares it with the checkpoint; returns the report as lines."""
    _write_facts(directory, export)
    serving, inputs = export.serving, export.reference.inputs
    module = Exportable(
        export.predictor.model,
        export.tables,
        serving.options.output_kind == "probability",
        export.predictor.recalibration,
    )
    serving.platform.write(module, example_like(inputs), directory)
    if serving.platform.takes_raw:
        if serving.raw:
            _write_transform(directory, export)
        repository.write_backend(directory)
    lines = _report(directory, export)
    _finish(directory)
    return lines


def _finish(directory: Path) -> None:
    """Completes a version, whose files have been written."""
    write_manifest(directory, KIND)
    repository.keep_bytecode_out(directory)


def _report(directory: Path, export: Export) -> list[str]:
    """Compares a version with the checkpoint, writes `report.json` and returns the same as lines.

    Raises:
        ValueError: they differ by more than the precision of the tables explains.
    """
    reference, options = export.reference, export.serving.options
    before, after = reference.logits, _scores(export.serving.platform.open(directory), reference)
    is_probability, precision = options.output_kind == "probability", options.embedding_precision
    before = probability(before) if is_probability else before
    old, new = (
        click_metrics(_logits(x) if is_probability else torch.from_numpy(x), labels)
        for labels in [torch.from_numpy(reference.labels)]
        for x in (before, after)
    )
    changed = new["auc"] - old["auc"]
    changed = 0.0 if math.isnan(changed) else changed  # of one class
    difference, greatest = (
        float(np.abs(scores).max(initial=0)) for scores in (before - after, before)
    )
    exact, allowed = precision == "fp32", MAX_AUC_CHANGE[precision]
    if not (abs(changed) if exact else -changed) <= allowed:
        raise ValueError(
            f"the exported model ranks otherwise than the checkpoint: AUC {new['auc']:.6f}, before "
            f"{old['auc']:.6f}; expected a change of {allowed:g} at most (--embedding-precision)"
        )
    limit = MAX_DIFFERENCE * max(1.0, greatest)
    if exact and not difference <= limit:
        raise ValueError(
            "the exported model scores otherwise than the checkpoint: a score differs by "
            f"{difference:g}, expected {limit:g} at most"
        )
    size, full = export.tables.nbytes, 4 * export.tables.numel()
    report = {
        "checkpoint": shown(str(export.predictor.path)),
        "dataset": reference.dataset and shown(reference.dataset),
        "split": reference.split,
        "rows": len(before),
        "greatest_difference": difference,
        "greatest_score": greatest,
        "embedding_precision": precision,
        "table_bytes": size,
        "table_bytes_fp32": full,
    }
    if reference.dataset is None:
        trained, judged = Checkpoint(export.predictor.path).config["flags"].get("dataset"), ""
        rows = "generated rows, since the dataset of the training is gone (--dataset)"
        if is_uri(trained):
            rows = f"generated rows, since --dataset does not name {trained}, which it would fetch"
    else:
        for name, change in (("auc", changed), ("log_loss", new["log_loss"] - old["log_loss"])):
            report |= {name: new[name], f"{name}_before": old[name], f"{name}_change": change}
        rows = f"rows of {reference.dataset} ({reference.split})"
        judged = (
            f" AUC {new['auc']:.6f} (change {changed:+.1e}), log loss "
            f"{new['log_loss']:.6f} ({report['log_loss_change']:+.1e}),"
        )
    text = json.dumps(report, indent=1)
    (directory / "report.json").write_text(text + "\n", encoding="utf-8")
    return [
        f"agreement: on {len(before):,} {rows},{judged} greatest difference of a score "
        f"{difference:.1e}",
        f"tables: {precision}, {size:,} bytes, {size / full:.3f} of fp32",
    ]


def _scores(score: Score, reference: Reference) -> np.ndarray:
    """Returns the scores `[rows]` of an exported model, computed some thousand rows at a time."""
    begins = range(0, len(reference.logits), _BATCH)
    parts = [reference.inputs.part(begin, begin + _BATCH).arrays for begin in begins]
    return np.concatenate([score(*arrays)[:, 0] for arrays in parts])


def _logits(probabilities: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(probabilities).double().logit(eps=1e-9)


def _write_facts(directory: Path, export: Export) -> None:
    """Writes `model.json`."""
    config, serving = export.predictor.model.config, export.serving
    options = serving.options
    facts = {
        "num_numerical": config.num_numerical_features,
        "table_sizes": list(config.table_sizes),
        "hashed": config.hash_indices,
        "categorical_names": field_names(export.predictor)[1],
        "numerical_dtype": _numerical_dtype(options),
        "ids_dtype": options.ids,
        "output_kind": options.output_kind,
        "checkpoint": export.predictor.path.name,
        "dlrm_version": __version__,
    }
    if serving.lists:
        transform = export.predictor.transform
        longest = None if transform is None else transform.longest
        facts["lists"] = {"weighted": serving.weighted, "longest": longest}
    (directory / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _write_transform(directory: Path, export: Export) -> None:
    shutil.copytree(_transform_of(export), directory / layout.TRANSFORM)


def _transform_of(export: Export) -> Path:
    transform = export.predictor.transform
    assert transform is not None
    assert transform.directory is not None
    return transform.directory


def _same_files(one: Path, other: Path) -> bool:
    names = [sorted(path.name for path in directory.iterdir()) for directory in (one, other)]
    return names[0] == names[1] and not filecmp.cmpfiles(one, other, names[0], shallow=False)[1]

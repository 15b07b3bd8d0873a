"""Writes an exported model into a Triton model repository, once it agrees with the checkpoint."""

import filecmp
import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dlrm.data import layout
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.sources.row_error import RowError
from dlrm.deployment.config import ExportConfig
from dlrm.deployment.model_config import model_configs, model_inputs, write_config
from dlrm.deployment.repository import keep_bytecode_out, staged, write_backend
from dlrm.documents import read_json
from dlrm.files import check_replaceable
from dlrm.locks import unreplaced
from dlrm.manifest import write_manifest
from dlrm.metrics.clicks import click_metrics
from dlrm.remote.uri import shown
from dlrm.serving.exported import exported_version
from dlrm.serving.loading import load
from dlrm.serving.network.exportable import Exportable, example_like
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.predictor import Predictor
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.scoring import field_names, probability
from dlrm.serving.server.names import FACTS, KIND
from dlrm.serving.sources import check_dataset, inputs_of
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.version import __version__

ROWS_ON_DISK = ("split", "binary", "memmap", "parametric")
MAX_ROWS = 65536  # to compare an exported model on
MAX_DIFFERENCE = 1e-4  # of a score, relative to the greatest: float32 sums in another order
MAX_AUC_CHANGE = {"fp32": 1e-5, "fp16": 5e-4}  # by the precision of the tables
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
    """A model, and how it is exported: also, if `raw`, for raw rows."""

    options: ExportConfig
    predictor: Predictor
    tables: torch.Tensor
    reference: Reference
    raw: bool


def run(options: ExportConfig) -> None:
    """Exports a model.

    Raises:
        ValueError, OSError, ImportError: errors that the user can fix.
    """
    directory = options.save_dir / options.triton_model_name
    newest = exported_version(directory)
    version = _version(options, directory, newest)
    with Checkpoint.held(options.checkpoint) as held, unreplaced(held.path):
        export = _load(held.path, options)
    if newest is None:
        lines = _write_new(export, version)
    else:
        _check_like(newest, export)
        with staged(directory / str(version), options.save_dir) as place:
            lines = _write_version(place, export)
    print(f"{directory / str(version)}: {options.platform}, {options.output_kind}")
    print("\n".join(lines))


def _version(options: ExportConfig, directory: Path, newest: Path | None) -> int:
    """Returns the version to write, after checking that it can be written."""
    if options.update and newest is None:
        raise FileNotFoundError(f"{directory}: no served model, to which --update adds a version")
    if directory.exists() and not options.update:
        raise ValueError(
            f"{directory}: there is a model of that name; --update adds a version to it, "
            "--triton-model-name names another"
        )
    last = 0 if newest is None else int(newest.name)
    version = options.triton_model_version or last + 1
    if version <= last:
        raise ValueError(
            f"--triton-model-version {version}: expected more than {last}, the last in {directory}"
        )
    check_replaceable(directory / str(version), replace=False)
    return version


def _load(path: Path, options: ExportConfig) -> Export:
    """Loads the checkpoint and the rows to compare on, which must match the model."""
    trained = Checkpoint(path).config["flags"]
    if options.dataset and not options.dataset.is_dir():
        raise ValueError(f"--dataset {options.dataset}: expected a dataset's directory, got none")
    named = options.dataset or trained.get("dataset")
    kind = options.dataset_type or trained.get("dataset_type")
    is_there = named and kind in ROWS_ON_DISK and Path(named).is_dir()
    dataset = str(named) if is_there else None
    predictor = load(path, dataset, options.allow_other_transform, print, options.allow_links)
    if dataset is None:
        reference = _generated(predictor, options, f"{named or 'that of the training'} ({kind})")
    else:
        reference = _reference(dataset, kind, predictor, options)
    if reference.inputs.lengths is not None and options.triton_dyn_batching_delay:
        raise ValueError(
            f"--triton-dyn-batching-delay {options.triton_dyn_batching_delay}: expected none for a "
            "model of lists, whose requests the server does not batch"
        )
    tables = quantize_tables(predictor.model, options.embedding_precision)
    raw = not options.no_raw and predictor.transform is not None
    return Export(options, predictor, tables, reference, raw)


def _generated(predictor: Predictor, options: ExportConfig, missing: str) -> Reference:
    """Returns rows of normally distributed numericals and uniformly distributed ids.

    Raises:
        ValueError: only a dataset has what is needed: lists, or the AUC that quantizing costs.
    """
    config, transform = predictor.model.config, predictor.transform
    needs_dataset = options.dataset or options.embedding_precision != "fp32"
    if needs_dataset or transform is None or transform.longest:
        raise ValueError(
            "--dataset: expected the directory of a dataset, whose real rows the exported model "
            f"is judged by; {missing} is not there; "
            "dlrm.Dataset.from_arrow(frame, schema, DIR) writes one from a table"
        )
    draw = np.random.default_rng(0)
    numerical = draw.normal(size=(MAX_ROWS, config.num_numerical_features)).astype(np.float16)
    ids = draw.integers(0, config.table_sizes, (MAX_ROWS, len(config.table_sizes)))
    inputs = _as_sent(Inputs(numerical, ids), options)
    return Reference(None, "", inputs, np.zeros(MAX_ROWS, "f4"), predictor.logits_of(inputs))


def _reference(dataset: str, kind: str, predictor: Predictor, options: ExportConfig) -> Reference:
    """Returns rows of the first split with rows: the test split, or else others."""
    config = predictor.model.config
    data = DataConfig(
        dataset=dataset,
        dataset_type=kind,
        batch_size=MAX_ROWS,
        test_batch_size=MAX_ROWS,
        num_numerical_features=config.num_numerical_features,
        allow_links=options.allow_links,
    )
    splits = open_datasets(data).named()
    names = [name for name in ("test", "validation") if name in splits]
    split = next((name for name in names if splits[name].num_samples), "train")
    rows = splits[split]
    check_dataset(dataset, rows, config)
    if predictor.transform and bool(predictor.transform.longest) == rows.one_id_each:
        raise ValueError(f"{dataset}: expected lists in the fields in which the model has them")
    batch = rows.batch(0)
    try:
        logits, labels = predictor.score_batch(batch)
    except RowError as error:
        error.where = f"{dataset}: {split} row {error.row}"
        raise
    return Reference(dataset, split, _as_sent(inputs_of(batch), options), labels, logits)


def _as_sent(inputs: Inputs, options: ExportConfig) -> Inputs:
    """Returns rows with the types that clients send."""
    numerical = inputs.numerical.astype("float16" if options.fp16 else "float32")
    lengths = None if inputs.lengths is None else inputs.lengths.astype(np.int32)
    return Inputs(numerical, inputs.ids.astype(options.ids), lengths, inputs.weights)


def _check_like(newest: Path, export: Export) -> None:
    """Raises ValueError unless an export can follow the newest version of the same model."""
    before, after = read_json(newest / FACTS), _facts(export)
    for name in ("platform", "output_kind", "inputs"):
        if before.get(name) != after[name]:
            raise ValueError(
                f"{newest / FACTS}: a version must have the {name} of the others, "
                f"{before.get(name)}, got {after[name]}: use the flags of the first export, or "
                "another --triton-model-name"
            )
    step = newest.parent.with_name(f"{newest.parent.name}_transform")
    if step.is_dir():
        old, new = max(step.glob(f"[0-9]*/{layout.TRANSFORM}")), _transform_of(export)
        names = {path.name for folder in (old, new) for path in folder.iterdir()}
        if len(filecmp.cmpfiles(old, new, names, shallow=False)[0]) < len(names):
            raise ValueError(
                f"{step}: expected the transform of the new version, got another: an ensemble "
                "cannot take a new transform and new tables at one instant, as --python does; use "
                "another --triton-model-name"
            )


def _write_new(export: Export, version: int) -> list[str]:
    """Writes new models, all of them or none; returns the report as lines."""
    lines: list[str] = []
    repository, own = export.options.save_dir, export.options.triton_model_name
    with ExitStack() as published:  # the last first, and so parts before what uses them
        configs = model_configs(export.options, export.reference.inputs, export.raw)
        for name, config in configs.items():
            top = published.enter_context(staged(repository / name, repository))
            write_config(top, config)
            (top / str(version)).mkdir()
            if name == own:
                lines = _write_version(top / str(version), export)
            elif "backend" in config:
                _write_script(top / str(version), export)
    return lines


def _write_version(directory: Path, export: Export) -> list[str]:
    """Writes a version and compares it with the checkpoint; returns the report as lines."""
    options, predictor = export.options, export.predictor
    platform, is_probability = PLATFORMS[options.platform], options.output_kind == "probability"
    network = Exportable(predictor.model, export.tables, is_probability, predictor.recalibration)
    platform.write(network, example_like(export.reference.inputs), directory)
    score, inputs = platform.open(directory), export.reference.inputs
    begins = range(0, len(inputs.numerical), _BATCH)
    parts = [score(*inputs.part(begin, begin + _BATCH).arrays) for begin in begins]
    report = _report(export, np.concatenate(parts)[:, 0])
    text = json.dumps(report, indent=1)
    (directory / "report.json").write_text(text + "\n", encoding="utf-8")
    if platform.takes_raw:
        _write_script(directory, export)
    else:
        _finish(directory, export)
    return _lines(report)


def _write_script(directory: Path, export: Export) -> None:
    """Adds the python backend, and the transform of raw rows."""
    if export.raw:
        shutil.copytree(_transform_of(export), directory / layout.TRANSFORM)
    write_backend(directory)
    _finish(directory, export)


def _finish(directory: Path, export: Export) -> None:
    """Completes a version, whose other files have been written."""
    text = json.dumps(_facts(export), indent=1)
    (directory / FACTS).write_text(text + "\n", encoding="utf-8")
    write_manifest(directory, KIND)
    keep_bytecode_out(directory)


def _transform_of(export: Export) -> Path:
    transform = export.predictor.transform
    assert transform is not None
    assert transform.directory is not None
    return transform.directory


def _report(export: Export, after: np.ndarray) -> dict:
    """Compares the scores of an export with those of the checkpoint.

    Raises:
        ValueError: they differ by more than the precision of the tables explains.
    """
    reference, precision = export.reference, export.options.embedding_precision
    before, is_probability = reference.logits, export.options.output_kind == "probability"
    before = probability(before) if is_probability else before
    labels, (old, new) = torch.from_numpy(reference.labels), map(torch.from_numpy, (before, after))
    if is_probability:
        old, new = (scores.double().logit(eps=1e-9) for scores in (old, new))
    metrics, metrics_before = click_metrics(new, labels), click_metrics(old, labels)
    changed = {name: metrics[name] - metrics_before[name] for name in ("auc", "log_loss")}
    auc = 0.0 if math.isnan(changed["auc"]) else changed["auc"]  # of one class
    difference = float(np.abs(before - after).max(initial=0))
    greatest = float(np.abs(before).max(initial=0))
    exact, allowed = precision == "fp32", MAX_AUC_CHANGE[precision]
    if not (abs(auc) if exact else -auc) <= allowed:
        raise ValueError(
            "the exported model ranks otherwise than the checkpoint: AUC "
            f"{metrics['auc']:.6f}, before {metrics_before['auc']:.6f}; expected a change of "
            f"{allowed:g} at most (--embedding-precision)"
        )
    limit = MAX_DIFFERENCE * max(1.0, greatest)
    if exact and not difference <= limit:
        raise ValueError(
            "the exported model scores otherwise than the checkpoint: a score differs by "
            f"{difference:g}, expected {limit:g} at most"
        )
    report = {
        "checkpoint": shown(str(export.predictor.path)),
        "dataset": reference.dataset and shown(reference.dataset),
        "split": reference.split,
        "rows": len(before),
        "greatest_difference": difference,
        "greatest_score": greatest,
        "embedding_precision": precision,
        "table_bytes": export.tables.nbytes,
        "table_bytes_fp32": 4 * export.tables.numel(),
    }
    if reference.dataset is not None:
        for name, change in changed.items():
            report |= {name: metrics[name], f"{name}_before": metrics_before[name]}
            report[f"{name}_change"] = change
    return report


def _lines(report: dict) -> list[str]:
    """Returns a report in words."""
    rows, judged = "generated rows, since the dataset of the training is not here (--dataset)", ""
    if report["dataset"] is not None:
        rows = f"rows of {report['dataset']} ({report['split']})"
        judged = (
            f" AUC {report['auc']:.6f} (change {report['auc_change']:+.1e}), log loss "
            f"{report['log_loss']:.6f} ({report['log_loss_change']:+.1e}),"
        )
    size, full = report["table_bytes"], report["table_bytes_fp32"]
    return [
        f"agreement: on {report['rows']:,} {rows},{judged} greatest difference of a score "
        f"{report['greatest_difference']:.1e}",
        f"tables: {report['embedding_precision']}, {size:,} bytes, {size / full:.3f} of fp32",
    ]


def _facts(export: Export) -> dict:
    """Returns the content of `model.json`."""
    predictor, options, rows = export.predictor, export.options, export.reference.inputs
    config = predictor.model.config
    facts = {
        "num_numerical": config.num_numerical_features,
        "table_sizes": list(config.table_sizes),
        "hashed": config.hash_indices,
        "categorical_names": field_names(predictor)[1],
        "numerical_dtype": rows.numerical.dtype.name,
        "ids_dtype": rows.ids.dtype.name,
        "platform": options.platform,
        "inputs": model_inputs(options, rows, export.raw),
        "output_kind": options.output_kind,
        "checkpoint": predictor.path.name,
        "dlrm_version": __version__,
    }
    if rows.lengths is not None:
        longest = None if predictor.transform is None else predictor.transform.longest
        facts["lists"] = {"weighted": rows.weights is not None, "longest": longest}
    return facts

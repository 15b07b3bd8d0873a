"""Writes an exported model into a Triton model repository, once it agrees with the checkpoint."""

import filecmp
import json
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
from dlrm.deployment.repository import seal, staged, write_backend
from dlrm.documents import read_json
from dlrm.files import check_replaceable
from dlrm.locks import unreplaced
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
from dlrm.serving.server.names import FACTS
from dlrm.serving.sources import check_dataset, inputs_of
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.version import __version__

ROWS_ON_DISK = ("split", "binary", "memmap", "parametric")
MAX_ROWS = 65536  # to compare an exported model on
MAX_DIFFERENCE = 1e-4  # of a score, relative to the greatest: float32 sums in another order
MAX_AUC_CHANGE = {"fp32": 1e-5, "fp16": 5e-4}  # by the precision of the tables
_BATCH = 4096  # rows scored at a time


class Export(NamedTuple):
    """A model, and the rows that it is compared on, with their logits by the checkpoint.

    Rows have the types that clients send. Generated ones have no dataset, and labels of 0.
    """

    options: ExportConfig
    predictor: Predictor
    tables: torch.Tensor
    transform: Path | None  # of raw rows; None takes ids only
    dataset: str | None
    split: str
    rows: Inputs
    labels: np.ndarray
    logits: np.ndarray


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
        report = _write_new(export, version)
    else:
        _check_like(newest, export)
        with staged(directory / str(version), options.save_dir) as place:
            report = _write_version(place, export)
    print(f"{directory / str(version)}: {options.platform}, {options.output_kind}")
    rows, judged = "generated rows, since the dataset of the training is not here (--dataset)", ""
    if report["dataset"] is not None:
        rows = "rows of {dataset} ({split})".format(**report)
        judged = (
            " AUC {auc:.6f} (change {auc_change:+.1e}), log loss {log_loss:.6f} "
            "({log_loss_change:+.1e}),".format(**report)
        )
    print(
        f"agreement: on {report['rows']:,} {rows},{judged} greatest difference of a score "
        f"{report['greatest_difference']:.1e}"
    )
    size, full = report["table_bytes"], report["table_bytes_fp32"]
    print(f"tables: {options.embedding_precision}, {size:,} bytes, {size / full:.3f} of fp32")


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
    dataset, split = str(named) if is_there else None, ""
    predictor = load(path, dataset, options.allow_other_transform, print, options.allow_links)
    try:
        if dataset is None:
            rows = _generated(predictor, options, f"{named or 'that of the training'} ({kind})")
            labels = np.zeros(MAX_ROWS, np.float32)
        else:
            split, rows, labels = _rows_of(dataset, kind, predictor, options)
        logits = predictor.logits_of(rows)
    except RowError as error:
        error.where = f"{dataset}: {split} row {error.row}"
        raise
    if rows.lengths is not None and options.triton_dyn_batching_delay:
        raise ValueError(
            f"--triton-dyn-batching-delay {options.triton_dyn_batching_delay}: expected none for a "
            "model of lists, whose requests the server does not batch"
        )
    tables = quantize_tables(predictor.model, options.embedding_precision)
    lengths = None if rows.lengths is None else rows.lengths.astype(np.int32)
    numerical = rows.numerical.astype("float16" if options.fp16 else "float32")
    sent = Inputs(numerical, rows.ids.astype(options.ids), lengths, rows.weights)
    fitted = None if options.no_raw else predictor.transform
    transform = None if fitted is None else fitted.directory
    return Export(options, predictor, tables, transform, dataset, split, sent, labels, logits)


def _generated(predictor: Predictor, options: ExportConfig, missing: str) -> Inputs:
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
    return Inputs(numerical, ids)


def _rows_of(
    dataset: str, kind: str, predictor: Predictor, options: ExportConfig
) -> tuple[str, Inputs, np.ndarray]:
    """Returns the first split with rows, the test split or else others, rows of it and labels."""
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
    return split, inputs_of(batch), batch.labels.numpy()


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
    fitted = export.predictor.transform
    if step.is_dir() and not (
        fitted and _same_files(max(step.glob(f"[0-9]*/{layout.TRANSFORM}")), fitted.directory)
    ):
        raise ValueError(
            f"{step}: expected the transform of the new version, got another: an ensemble cannot "
            "take a new transform and new tables at one instant, as --python does; use another "
            "--triton-model-name"
        )


def _same_files(one: Path, other: Path | None) -> bool:
    assert other is not None
    names = {path.name for folder in (one, other) for path in folder.iterdir()}
    return len(filecmp.cmpfiles(one, other, names, shallow=False)[0]) == len(names)


def _write_new(export: Export, version: int) -> dict:
    """Writes new models, all of them or none; returns the report."""
    report: dict = {}
    repository = export.options.save_dir
    with ExitStack() as published:  # the last first, and so parts before what uses them
        raw = export.transform is not None
        for name, config in model_configs(export.options, export.rows, raw).items():
            top = published.enter_context(staged(repository / name, repository))
            write_config(top, config)
            (top / str(version)).mkdir()
            if name == export.options.triton_model_name:
                report = _write_version(top / str(version), export)
            elif "backend" in config:
                _finish(top / str(version), export, script=True)
    return report


def _write_version(directory: Path, export: Export) -> dict:
    """Writes a version and compares it with the checkpoint; returns the report."""
    options, predictor, rows = export.options, export.predictor, export.rows
    platform, probable = PLATFORMS[options.platform], options.output_kind == "probability"
    network = Exportable(predictor.model, export.tables, probable, predictor.recalibration)
    platform.write(network, example_like(rows), directory)
    score = platform.open(directory)
    begins = range(0, len(rows.numerical), _BATCH)
    parts = [score(*rows.part(begin, begin + _BATCH).arrays) for begin in begins]
    report = _report(export, np.concatenate(parts)[:, 0])
    _write_json(directory / "report.json", report)
    _finish(directory, export, platform.takes_raw)
    return report


def _finish(directory: Path, export: Export, script: bool) -> None:
    """Adds the facts and, if a script scores, that and the transform of raw rows."""
    _write_json(directory / FACTS, _facts(export))
    if script:
        if export.transform is not None:
            shutil.copytree(export.transform, directory / layout.TRANSFORM)
        write_backend(directory)
    seal(directory)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _report(export: Export, scores: np.ndarray) -> dict:
    """Compares the scores of an export with those of the checkpoint.

    Raises:
        ValueError: they differ by more than the precision of the tables explains.
    """
    precision, probable = export.options.embedding_precision, export.options.output_kind != "logit"
    expected = probability(export.logits) if probable else export.logits
    difference = float(np.abs(scores - expected).max(initial=0))
    greatest = float(np.abs(expected).max(initial=0))
    exact, limit = precision == "fp32", MAX_DIFFERENCE * max(1.0, greatest)
    new, old = (_metrics(given, probable, export.labels) for given in (scores, expected))
    change, allowed = new["auc"] - old["auc"], MAX_AUC_CHANGE[precision]  # NaN for one class
    if (abs(change) if exact else -change) > allowed:
        raise ValueError(
            f"the exported model ranks otherwise than the checkpoint: AUC {new['auc']:.6f}, before "
            f"{old['auc']:.6f}; expected a change of {allowed:g} at most (--embedding-precision)"
        )
    if exact and not difference <= limit:
        raise ValueError(
            "the exported model scores otherwise than the checkpoint: a score differs by "
            f"{difference:g}, expected {limit:g} at most"
        )
    report = {
        "checkpoint": shown(str(export.predictor.path)),
        "dataset": export.dataset and shown(export.dataset),
        "split": export.split,
        "rows": len(scores),
        "greatest_difference": difference,
        "greatest_score": greatest,
        "embedding_precision": precision,
        "table_bytes": export.tables.nbytes,
        "table_bytes_fp32": 4 * export.tables.numel(),
    }
    for name in ("auc", "log_loss") if export.dataset is not None else ():
        report |= {name: new[name], f"{name}_before": old[name]}
        report[f"{name}_change"] = new[name] - old[name]
    return report


def _metrics(scores: np.ndarray, probable: bool, labels: np.ndarray) -> dict[str, float]:
    logits = torch.from_numpy(scores)
    logits = logits.double().logit(eps=1e-9) if probable else logits
    return click_metrics(logits, torch.from_numpy(labels))


def _facts(export: Export) -> dict:
    """Returns the content of `model.json`."""
    predictor, options, rows = export.predictor, export.options, export.rows
    config = predictor.model.config
    facts = {
        "num_numerical": config.num_numerical_features,
        "table_sizes": list(config.table_sizes),
        "hashed": config.hash_indices,
        "categorical_names": field_names(predictor)[1],
        "numerical_dtype": rows.numerical.dtype.name,
        "ids_dtype": rows.ids.dtype.name,
        "platform": options.platform,
        "inputs": model_inputs(options, rows, export.transform is not None),
        "output_kind": options.output_kind,
        "checkpoint": predictor.path.name,
        "dlrm_version": __version__,
    }
    if rows.lengths is not None:
        longest = None if predictor.transform is None else predictor.transform.longest
        facts["lists"] = {"weighted": rows.weights is not None, "longest": longest}
    return facts

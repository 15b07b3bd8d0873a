"""Judges models on rows, and writes and prints the results."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.command_line import say
from dlrm.documents import json_text
from dlrm.files import atomic_directory, check_replaceable
from dlrm.flags import Values
from dlrm.manifest import write_manifest
from dlrm.metrics.judged import Judgment, ScoredRows, judge, judge_slices
from dlrm.metrics.ranked import RankedRows
from dlrm.remote.uri import origin, shown
from dlrm.scripts.common.scoring import open_predictor, source_config
from dlrm.scripts.evaluate import EvaluateConfig
from dlrm.scripts.evaluate.page import lines_of, page_of
from dlrm.scripts.evaluate.rows import Collected, collect, find_columns, is_day
from dlrm.serving.importance import permutation_importance
from dlrm.serving.network.recalibration import (
    FittedRows,
    Recalibration,
    check_fitting,
    fit,
    of_sampling_rate,
    write_recalibrated,
)
from dlrm.serving.predictor import Predictor
from dlrm.serving.sources import check_source, reads_dataset
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.runs import different_flags, read_run
from dlrm.train.reports.roles import RECALIBRATED, SELECTION, Roles
from dlrm.version import __version__

HTML, JSON = "evaluation.html", "evaluation.json"
_KIND = "evaluation"  # kind in the manifest of a page
_NO_IMPORTANCE = "note: the {:,} rows of --importance have one class, so no field is measured"


def run(values: Values) -> None:
    """Runs the command: writes what was asked for, and then prints."""
    own = values.config(EvaluateConfig)
    sources = _sources(own, values["dataset"])
    checkpoints = [values["checkpoint"], *([own.against] if own.against else [])]
    models = [open_predictor(path, sources[0], values) for path in checkpoints]
    correction = _correction(models[0], own)
    found, split = _read(models, sources, own, values)
    rows, recalibration = found.rows, models[0].recalibration if own.recalibrate else correction
    if recalibration is not None:
        rows = replace(rows, logits=(recalibration.of(rows.logits[0]), *rows.logits[1:]))
    judgment = judge(rows, own.bootstrap, own.seed)
    facts: dict[str, Any] = {
        "dlrm_version": __version__,
        "checkpoint": shown(str(models[0].path)),
        "against": shown(str(models[1].path)) if len(models) > 1 else None,
        "sources": [shown(source) for source in sources],
        "split": split,
        "role": _role(models[0], sources, split),
        "values": found.shares.line(),
        "fields": found.shares.by_field(),
        "flags_changed": _flags_changed(models),
        "intervals": judgment.method,
        "notes": [shown(note) for note in _notes(models, found, judgment)],
        **judgment.to_json(),
        "slices": _judged_slices(rows, found, own),
    }
    if own.recalibrate:
        correction, after = _recalibrated(found.rows)
        correction.fitted_to = FittedRows.from_sources(sources, split)
        judged = judge(after, own.bootstrap, own.seed)
        facts["recalibration"] = {
            "judged": judged.to_json()["models"][0],
            "reliability": _curves(judged.ranked[0])["reliability"],
            "slices": _judged_slices(after, found, own),
        }
    if own.importance:
        facts["importance"] = _importance(models[0], found, own.seed)
        facts["importance_rows"] = len(found.sample[1])
        if not facts["importance"]:
            facts["notes"].append(_NO_IMPORTANCE.format(len(found.sample[1])))
    facts["curves"] = [_curves(ranked) for ranked in judgment.ranked]
    written = _write(facts, models[0], correction, own)
    if models[0].sampling_note and correction is None:
        say(models[0].sampling_note)
    for line in lines_of(facts):
        say(line, is_prose=True)
    for line in written:
        say(line)


def _write(
    facts: dict[str, Any], model: Predictor, correction: Recalibration | None, own: EvaluateConfig
) -> list[str]:
    """Writes the page and the recalibrated checkpoint, if requested; returns lines about them."""
    lines = []
    if own.output:
        with atomic_directory(own.output, replace=_KIND) as directory:
            (directory / JSON).write_text(json_text(facts, indent=1) + "\n", encoding="utf-8")
            (directory / HTML).write_text(page_of(facts), encoding="utf-8")
            write_manifest(directory, _KIND)
        lines.append(f"page: {own.output / HTML}")
    if correction is not None and (output := own.recalibrated_checkpoint):
        write_recalibrated(model.path, correction, output)
        lines.append(f"recalibrated checkpoint ({correction.kind}): {output}")
    return lines


def _sources(own: EvaluateConfig, dataset: str | None) -> list[str]:
    """Returns the sources of rows: the files of `--input`, or else the dataset."""
    if dataset is None and not own.input:
        raise ValueError("--dataset or --input: expected the rows to judge, got none")
    if own.output:
        check_replaceable(own.output.resolve(), replace=_KIND)
    sources = [dataset] if dataset is not None and not own.input else [*own.input]
    for source in sources:
        if check_source(source).is_dir() and len(sources) > 1:
            raise ValueError(f"--input {source}: expected files, or one dataset, got several")
    return sources


def _correction(model: Predictor, own: EvaluateConfig) -> Recalibration | None:
    """Returns the correction for the sampling of negatives, if requested."""
    if own.sampling_rate is not None and own.recalibrate:
        raise ValueError("--sampling_rate contradicts --recalibrate, which corrects for it as well")
    if own.sampling_rate is not None and model.recalibration is not None:
        raise ValueError(
            f"--sampling_rate: expected a checkpoint without a recalibration, got {model.path}, "
            f"which has one ({model.recalibration.kind}); name the one that it was made from"
        )
    if own.recalibrate:
        check_fitting()
    if own.recalibrated_checkpoint:
        if own.sampling_rate is None and not own.recalibrate:
            raise ValueError("--recalibrated_checkpoint needs --recalibrate or --sampling_rate")
        check_replaceable(own.recalibrated_checkpoint.resolve(), replace=False)
    return None if own.sampling_rate is None else of_sampling_rate(own.sampling_rate)


def _read(
    models: Sequence[Predictor], sources: Sequence[str], own: EvaluateConfig, values: Values
) -> tuple[Collected, str | None]:
    """Returns the scored rows, and the split that they are if they are a dataset's."""
    first = models[0]
    config = source_config(first, values.filled({"label": True}))
    split = config.split if reads_dataset(first, sources[0], config) else None
    fields = [name for name in dict.fromkeys(own.slices) if not is_day(first, name)]
    by_day = len(fields) < len({*own.slices})
    schema = first.transform.schema if first.transform and not first.transform.is_log else None
    where = Path(sources[0], split) if split else None
    columns = find_columns(where, schema, own.groups, own.weights, by_day)
    if own.recalibrate and first.recalibration is not None:  # a fit is to scores without one
        models = [first._with_recalibration(None), *models[1:]]
    return collect(models, sources, fields, config, columns, own.importance_rows), split


def _recalibrated(rows: ScoredRows) -> tuple[Recalibration, ScoredRows]:
    """Fits to all rows; returns each half of them as the fit to the other half maps its scores."""
    logits, labels, weights = rows.logits[0], rows.labels, rows.weights
    even = np.arange(len(labels)) % 2 == 0
    mapped = np.empty(len(labels), np.float32)
    for part in (even, ~even):
        other = None if weights is None else weights[~part]
        mapped[part] = fit(logits[~part], labels[~part], other).of(logits[part])
    return fit(logits, labels, weights), replace(rows, logits=(mapped,))


def _judged_slices(rows: ScoredRows, found: Collected, own: EvaluateConfig) -> list[dict[str, Any]]:
    return [
        {"by": name, "slices": judge_slices(rows, slices, own.bootstrap, own.seed)}
        for name, slices in found.divisions.items()
    ]


def _importance(model: Predictor, found: Collected, seed: int) -> list[dict[str, Any]]:
    """Returns the fields by descending importance, as JSON values; none without two classes."""
    if len(np.unique(found.sample[1])) < 2:
        return []
    return [
        {
            "field": one.field,
            "auc_lost": {"value": one.auc_lost, "low": one.low, "high": one.high, "p": one.p},
            "log_loss_gained": one.log_loss_gained,
        }
        for one in permutation_importance(model, *found.sample, seed)
    ]


def _flags_changed(models: Sequence[Predictor]) -> list[tuple[str, Any, Any]]:
    """Returns the flags in which the trainings of two models differ, with their values."""
    runs = [read_run(model.path) for model in models]
    return [(n, runs[0].flags.get(n), runs[-1].flags.get(n)) for n in different_flags(runs)]


def _role(model: Predictor, sources: Sequence[str], split: str | None) -> str | None:
    """Returns the role that the rows had in the model's training and recalibration."""
    role = None if split is None else _role_in_training(model, sources[0], split)
    fitted_to = model.recalibration.fitted_to if model.recalibration else None
    if fitted_to is None or not fitted_to.overlap(FittedRows.from_sources(sources, split)):
        return role
    return f"{SELECTION}, {RECALIBRATED}" if role == SELECTION else RECALIBRATED


def _role_in_training(model: Predictor, dataset: str, split: str) -> str | None:
    """Returns the role that the split had in the model's training, if it is of that dataset."""
    config = Checkpoint(model.path).config
    roles, trained = Roles.from_config(config), config.get("flags", {}).get("dataset")
    if roles is None or trained is None or origin(trained) != origin(dataset):
        return None
    return roles.of(split)


def _notes(models: Sequence[Predictor], found: Collected, judgment: Judgment) -> list[str]:
    rows, clicks = judgment.rows, judgment.clicks
    notes = [f"warning: {line}"] if (line := found.shares.unseen_values_warning()) else []
    if not 0 < clicks < rows:
        notes.append(
            f"note: all {rows:,} rows have the label {int(clicks > 0)}, so metrics of two classes "
            "are undefined"
        )
    for model, logits in zip(models, found.rows.logits, strict=True):
        if rows > 1 and (logits == logits[0]).all():
            notes.append(f"note: {model.path} gives all {rows:,} rows the same score")
    return notes


def _curves(ranked: RankedRows) -> dict[str, Any]:
    """Returns the curves of a model's scores, as JSON values."""
    return {
        name: {
            key: [round(float(v), 8) if math.isfinite(v) else None for v in values]
            for key, values in curve.items()
        }
        for name, curve in ranked.curves().items()
    }

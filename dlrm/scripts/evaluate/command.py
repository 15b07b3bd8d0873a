"""Evaluates models on rows, and prints and writes the results."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.command_line import say
from dlrm.files import atomic_directory, check_replaceable
from dlrm.flags import Values
from dlrm.manifest import write_manifest
from dlrm.metrics.judged import Judgment, ScoredRows, judge, judge_slices
from dlrm.metrics.slices import Slices, by_day, by_decile, by_source, by_unknown, by_value
from dlrm.remote.cache import origin_of, with_uris
from dlrm.scripts.common.scoring import open_predictor, source_config
from dlrm.scripts.evaluate.columns import Columns, of_dataset, of_files, of_table
from dlrm.scripts.evaluate.flags import EvaluateConfig
from dlrm.scripts.evaluate.lines import lines_of
from dlrm.scripts.evaluate.page import HTML, curves_of, reliability_of, write_files
from dlrm.scripts.evaluate.scored_rows import Collected, collect
from dlrm.serving.importance import permutation_importance
from dlrm.serving.network.recalibration import (
    FittedRows,
    Recalibration,
    check_fitting,
    fit,
    of_sampling_rate,
    write_recalibrated,
)
from dlrm.serving.predictor import Predictor, field_names
from dlrm.serving.sources import check_source, reads_dataset
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.runs import different_flags, read_run
from dlrm.train.reports.roles import CHOSEN, RECALIBRATED, Roles
from dlrm.version import __version__

_KIND = "evaluation"  # kind in the manifest of a page
_DAY = "day"  # in --slices
_NO_IMPORTANCE = "note: the {:,} rows of --importance have one class, so no field is measured"


def run(values: Values) -> None:
    """Runs the command."""
    own, split = values.config(EvaluateConfig), values["split"]
    sources = _sources(own, values["dataset"])
    checkpoints = [values["checkpoint"], *([own.against] if own.against else [])]
    models = [open_predictor(path, sources[0], values) for path in checkpoints]
    correction = _correction(models[0], own)
    if (note := models[0].sampling_note) and correction is None and not own.recalibrate:
        say(note)
    fields = [name for name in dict.fromkeys(own.slices) if not _is_day(models[0], name)]
    config = source_config(models[0], values.filled({"label": True}))
    is_dataset = reads_dataset(models[0], sources[0], config)
    columns = _columns(models[0], Path(sources[0], split) if is_dataset else None, own)
    scored = models
    if own.recalibrate and models[0].recalibration is not None:  # a fit is to scores without one
        correction = models[0].recalibration
        scored = [models[0]._with_recalibration(None), *models[1:]]
    found = collect(scored, sources, fields, config, columns.schema, own.importance_rows)
    fitted, times = _with_columns(found, columns)
    rows = fitted
    if correction is not None:
        rows = replace(rows, logits=(correction.of(rows.logits[0]), *rows.logits[1:]))
    judgment = judge(rows, own.bootstrap, own.seed)
    facts = _facts(models, found, judgment, split if is_dataset else None)
    divisions = _slices(models[0], found, times)
    facts["slices"] = _judged_slices(rows, divisions, own)
    if own.recalibrate:
        correction, after = _recalibrated(fitted)
        correction.fitted_to = FittedRows.from_sources(found.sources, facts["split"])
        facts["recalibration"] = _after(after, divisions, own)
    if own.importance:
        facts["importance"] = _importance(models[0], found, own.seed)
        facts["importance_rows"] = len(found.kept[1])
        if not facts["importance"]:
            facts["notes"].append(_NO_IMPORTANCE.format(len(found.kept[1])))
    facts["curves"] = [curves_of(ranked) for ranked in judgment.ranked]
    for line in lines_of(facts):
        say(line, is_prose=True)
    if own.output:
        _write(facts, own.output)
    if correction is not None and own.recalibrated_checkpoint:
        write_recalibrated(models[0].path, correction, own.recalibrated_checkpoint)
        say(f"recalibrated checkpoint ({correction.kind}): {own.recalibrated_checkpoint}")


def _write(facts: dict[str, Any], output: Path) -> None:
    with atomic_directory(output, replace=_KIND) as directory:
        write_files(directory, facts)
        write_manifest(directory, _KIND)
    say(f"page: {output / HTML}")


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


def _is_day(model: Predictor, name: str) -> bool:
    """Returns whether a name in `--slices` means days, which a field of this name hides."""
    return name == _DAY and not any(name in kind for kind in field_names(model))


def _columns(model: Predictor, split: Path | None, own: EvaluateConfig) -> Columns:
    """Returns the locations of the groups, weights and times that flags request."""
    transform = model.transform
    schema = transform.schema if transform and not transform.is_log else None
    times = any(_is_day(model, name) for name in own.slices)
    asked = own.groups, own.weights, times
    if split is not None:
        return of_dataset(split, schema, *asked)
    return of_table(schema, *asked) if schema else of_files(*asked)


def _with_columns(found: Collected, columns: Columns) -> tuple[ScoredRows, np.ndarray | None]:
    """Returns the rows with groups and weights, and the times of the rows."""
    count = len(found.rows.labels)
    groups, weights = (read(found.extra, count) for read in (columns.groups, columns.weights))
    rows = replace(found.rows, groups=groups, weights=weights)
    return rows, columns.times(found.extra, count)


def _recalibrated(rows: ScoredRows) -> tuple[Recalibration, ScoredRows]:
    """Fits to all rows; returns each half of them as the fit to the other half maps its scores."""
    logits, labels, weights = rows.logits[0], rows.labels, rows.weights
    even = np.arange(len(labels)) % 2 == 0
    mapped = np.empty(len(labels), np.float32)
    for part in (even, ~even):
        other = None if weights is None else weights[~part]
        mapped[part] = fit(logits[~part], labels[~part], other).of(logits[part])
    return fit(logits, labels, weights), replace(rows, logits=(mapped,))


def _after(
    rows: ScoredRows, divisions: list[tuple[str, Slices]], own: EvaluateConfig
) -> dict[str, Any]:
    """Returns the report on recalibrated rows, as JSON values."""
    judgment = judge(rows, own.bootstrap, own.seed)
    return {
        "judged": judgment.to_json()["models"][0],
        "reliability": reliability_of(judgment.ranked[0]),
        "slices": _judged_slices(rows, divisions, own),
    }


def _judged_slices(
    rows: ScoredRows, divisions: list[tuple[str, Slices]], own: EvaluateConfig
) -> list[dict[str, Any]]:
    return [
        {"by": name, "slices": judge_slices(rows, slices, own.bootstrap, own.seed)}
        for name, slices in divisions
    ]


def _importance(model: Predictor, found: Collected, seed: int) -> list[dict[str, Any]]:
    """Returns the fields by descending importance, as JSON values; none without two classes."""
    if len(np.unique(found.kept[1])) < 2:
        return []
    return [
        {
            "field": one.field,
            "auc_lost": {"value": one.auc_lost, "low": one.low, "high": one.high, "p": one.p},
            "log_loss_gained": one.log_loss_gained,
        }
        for one in permutation_importance(model, *found.kept, seed)
    ]


def _facts(
    models: Sequence[Predictor], found: Collected, judgment: Judgment, split: str | None
) -> dict[str, Any]:
    return {
        "dlrm_version": __version__,
        "checkpoint": with_uris(str(models[0].path)),
        "against": with_uris(str(models[1].path)) if len(models) > 1 else None,
        "sources": [with_uris(source) for source in found.sources],
        "split": split,
        "role": _role(models[0], found.sources, split),
        "values": found.shares.line(),
        "fields": found.shares.by_field(),
        "flags_changed": _flags_changed(models),
        "intervals": judgment.method,
        "notes": [with_uris(note) for note in _notes(models, found, judgment)],
        **judgment.to_json(),
    }


def _role(model: Predictor, sources: Sequence[str], split: str | None) -> str | None:
    """Returns the role that the rows had in the model's training and recalibration."""
    role = None if split is None else _role_in_training(model, sources[0], split)
    fitted_to = model.recalibration.fitted_to if model.recalibration else None
    if fitted_to is None or not fitted_to.overlap(FittedRows.from_sources(sources, split)):
        return role
    return f"{CHOSEN}, {RECALIBRATED}" if role == CHOSEN else RECALIBRATED


def _role_in_training(model: Predictor, dataset: str, split: str) -> str | None:
    """Returns the role that the split had in the model's training, if it is of that dataset."""
    config = read_config(model.path)
    roles, trained = Roles.from_config(config), config.get("flags", {}).get("dataset")
    if roles is None or trained is None:
        return None
    return roles.of(split) if origin_of(trained) == origin_of(dataset) else None


def _flags_changed(models: Sequence[Predictor]) -> list[tuple[str, Any, Any]]:
    """Returns the flags in which the runs of two models differ, with both values."""
    runs = [read_run(model.path) for model in models]
    return [(n, runs[0].flags.get(n), runs[-1].flags.get(n)) for n in different_flags(runs)]


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


def _slices(
    model: Predictor, found: Collected, times: np.ndarray | None
) -> list[tuple[str, Slices]]:
    """Returns the divisions of rows: files, days, unknown values, and the fields of `--slices`."""
    slices = []
    if len(found.sources) > 1:
        slices.append(("file", by_source(found.source, found.sources)))
    if times is not None:
        slices.append(("day (UTC)", by_day(times)))
    if found.unknown is not None:
        slices.append(("values without an id", by_unknown(found.unknown)))
    numerical, categorical = field_names(model)
    for name, values in found.fields.items():
        if name in found.lists:
            slices.append((f"ids of {name}", by_decile(values.astype(np.float64))))
        elif name in numerical:
            slices.append((name, by_decile(values.astype(np.float64))))
        else:
            slices.append((name, by_value(values, _value_names(model, categorical.index(name)))))
    return slices


def _value_names(model: Predictor, table: int) -> Any:
    transform = model.transform
    return lambda number: transform.value(table, number) if transform else f"id {number}"

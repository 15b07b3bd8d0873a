"""The rows of an evaluation: scored by one model or two, read once, and divided into slices.

Groups, weights and times are files of their own, or columns of a dataset or a table.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dlrm.data.schema.schema import Schema
from dlrm.metrics.judged import ScoredRows
from dlrm.metrics.ranked import check_weights
from dlrm.scripts.evaluate.slices import Slices, by_day, by_decile, by_unknown, by_value
from dlrm.serving.importance import Sample
from dlrm.serving.predictor import Predictor, field_names
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.rows.shares import Shares, shares_of
from dlrm.serving.sources import SourceBlock, SourceConfig, iter_scored_blocks

DAY = "day"  # in --slices
# Columns of a dataset: files, and those of their types that are no groups.
_FILES = {"groups": "group_*.bin", "weights": "weight.bin"}
_DTYPES: dict[str, np.dtype] = {"weight": np.dtype("<f4"), "time": np.dtype("<i8")}
_GROUP_DTYPE = np.dtype("<u8")
Columns = tuple[dict[str, Path], Schema | None]


@dataclass
class Collected:
    """Scored rows and their slices.

    Attributes:
        rows: scores of each model, labels, and weights and groups if they were requested.
        divisions: name of a division of the rows -> its slices: files, days, unknown values, and
            the fields of `--slices`.
        shares: shares of missing and unknown values of each field.
        sample: inputs of evenly spaced rows, and their labels.
    """

    rows: ScoredRows
    divisions: dict[str, Slices]
    shares: Shares
    sample: tuple[Inputs, np.ndarray]


def is_day(model: Predictor, name: str) -> bool:
    """Returns whether a name in `--slices` means days, which a field of this name hides."""
    return name == DAY and not any(name in kind for kind in field_names(model))


def find_columns(
    split: Path | None,
    schema: Schema | None,
    groups: str | None,
    weights: str | None,
    times: bool,
) -> Columns:
    """Returns the locations of the columns that flags name: each a file, or a column of the rows.

    Args:
        split: directory of a dataset's split; None for files of tables or logs.
        schema: schema of the model's tables; None for logs.
        weights: a file or a column; `weight` is the schema's, if it has one.

    Returns:
        "groups", "weights" or "times" -> their file; and for tables a schema that names the others.

    Raises:
        FileNotFoundError: neither a file nor a column of a dataset has that name.
        ValueError: the schema names no time, or the rows are of a log.
    """
    given = {"groups": groups, "weights": weights}
    names = {flag: name for flag, name in given.items() if name is not None}
    files = {flag: Path(name) for flag, name in names.items() if Path(name).is_file()}
    columns = {flag: name for flag, name in names.items() if flag not in files}
    if split is not None:
        files |= {f: _dataset_file(split, schema, f, name) for f, name in columns.items()}
        if times:
            files["times"] = split / "time.bin"
            if not files["times"].is_file():
                raise FileNotFoundError(f"--slices day: expected rows with a time, got {split}")
        return files, None
    for flag, name in columns.items():
        if schema is None or os.sep in name:
            raise FileNotFoundError(f"{name}: no such file (--{flag})")
    if times and (schema is None or schema.time is None):
        raise ValueError("--slices day: expected rows of a table whose schema names a time")
    if schema is None:
        return files, None
    weight = columns.get("weights")
    wanted = replace(
        schema,
        groups=(columns["groups"],) if "groups" in columns else (),
        weight=schema.weight if weight == "weight" and schema.weight else weight,
        time=schema.time if times else None,
    )
    return files, wanted


def _dataset_file(split: Path, schema: Schema | None, flag: str, name: str) -> Path:
    """Returns the file of a dataset's column; the weights also have their name in the schema."""
    is_weight = name == "weight" or (schema is not None and name == schema.weight)
    path = split / (f"group_{name}.bin" if flag == "groups" else "weight.bin")
    if path.is_file() and (flag == "groups" or is_weight):
        return path
    known = sorted(path.stem.removeprefix("group_") for path in split.glob(_FILES[flag]))
    has = f"has {', '.join(known) or 'none'}" if split.is_dir() else "does not exist"
    raise FileNotFoundError(f"--{flag} {name}: expected a file, or {flag} of {split}, which {has}")


def collect(
    models: Sequence[Predictor],
    sources: Sequence[str],
    fields: Sequence[str],
    config: SourceConfig,
    columns: Columns,
    most_kept: int,
) -> Collected:
    """Reads and scores all rows.

    Args:
        models: the first one's transform interprets the rows; the others take the same rows.
        sources: logs, CSVs or directories of datasets.
        fields: names of the fields whose values divide the rows.
        most_kept: maximum number of rows whose inputs are kept.

    Raises:
        ValueError: a row cannot be read or scored, rows have no labels, or the models do not take
            the same rows; the message names the row or the field.
    """
    first, (files, schema) = models[0], columns
    places = _places_of(models, fields)
    transform = first.transform
    shares, sample, lists = shares_of(transform), Sample(most_kept), set[str]()
    tables = slice(None) if transform is None else ~np.array(transform.of_ids, bool)
    found: dict[str, list[np.ndarray]] = defaultdict(list)

    def take(block: SourceBlock) -> int:
        if block.labels is None:
            raise ValueError(f"{source}: expected rows with labels, got none (--label)")
        for number, model in enumerate(models):
            read = block.inputs_of if number else None  # by its own dictionary
            inputs = read(model) if read else block.inputs
            found[f"model {number}"].append(model.logits_of(inputs))
        for name, place in places.items():
            column, is_list = _values(first, block.inputs, place)
            found[f"field {name}"].append(column.copy())
            lists.update([name] * is_list)
        sample.add(block.inputs, block.labels)
        found["label"].append(block.labels)
        found["unknown"].append(block.inputs.without_id()[:, tables].sum(1))
        for name, column in (block.extra or {}).items():
            found[name].append(column)
        return len(block.labels)

    counts = []
    for source in sources:
        counts.append(sum(iter_scored_blocks(first, source, config, shares, take, schema)))
    if not sum(counts):
        raise ValueError(f"{', '.join(sources)}: expected rows, got none")
    joined = {name: np.concatenate(parts) for name, parts in found.items()}
    weights, groups, times = _read_columns(files, joined, sum(counts))
    logits = tuple(joined[f"model {number}"] for number in range(len(models)))
    divisions = {}
    if len(sources) > 1:
        index = np.repeat(np.arange(len(sources)), counts)
        divisions["file"] = [(name, index == place) for place, name in enumerate(sources)]
    if times is not None:
        divisions["day (UTC)"] = by_day(times)
    if transform is not None:
        divisions["values without an id"] = by_unknown(joined["unknown"])
    for name, place in places.items():
        values, table = joined[f"field {name}"], place - len(field_names(first)[0])
        if table >= 0 and name not in lists:
            divisions[name] = _by_ids(first, table, values)
        else:
            shown = f"ids of {name}" if name in lists else name
            divisions[shown] = by_decile(values.astype(np.float64))
    rows = ScoredRows(logits, joined["label"], weights, groups)
    return Collected(rows, divisions, shares, sample.rows())


def _places_of(models: Sequence[Predictor], fields: Sequence[str]) -> dict[str, int]:
    """Returns field name -> index among the columns, which are those of all models."""
    names, *others = ([name for kind in field_names(model) for name in kind] for model in models)
    if unknown := [name for name in fields if name not in names]:
        raise ValueError(
            f"--slices {unknown[0]}: expected day, or a field of the model, one of "
            f"{', '.join(names)}"
        )
    for other, model in zip(others, models[1:], strict=True):
        if other != names:
            raise ValueError(
                f"--against {model.path}: expected a model of the same columns, {names}, got "
                f"{other}"
            )
    return {name: names.index(name) for name in fields}


def _values(model: Predictor, inputs: Inputs, field: int) -> tuple[np.ndarray, bool]:
    """Returns values to divide rows by, `[rows]`, and whether these are numbers of ids."""
    table = field - inputs.numerical.shape[1]
    if table < 0:
        return inputs.numerical[:, field], False
    if inputs.lengths is None:
        return inputs.ids[:, table], False
    if model.transform is None or table in model.transform.longest:
        return inputs.lengths[:, table], True
    ends = np.cumsum(inputs.lengths, dtype=np.int64).reshape(inputs.lengths.shape)
    return inputs.ids[ends[:, table] - 1], False


def _by_ids(model: Predictor, table: int, ids: np.ndarray) -> Slices:
    transform = model.transform
    return by_value(ids, lambda id: transform.value(table, id) if transform else f"id {id}")


def _read_columns(
    files: Mapping[str, Path], joined: Mapping[str, np.ndarray], rows: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Returns weights, groups and times of rows, from files or the columns of tables."""
    groups = next((joined[name] for name in joined if name.startswith("group_")), None)
    weights, times = joined.get("weight"), joined.get("time")
    if "groups" in files:
        groups = read_groups(files["groups"], rows)
    if "weights" in files:
        weights = read_weights(files["weights"], rows)
    if "times" in files:
        times = _read(files["times"], rows, "--slices day:")
    return weights, groups, times


def read_groups(path: Path, rows: int) -> np.ndarray:
    """Reads a group for each row, as integers; texts are numbered alphabetically.

    Args:
        path: `.npy` of integers or texts, or a dataset's file.

    Raises:
        ValueError: it has another number of rows, or no column of groups.
    """
    column = _read(path, rows, "--groups")
    if column.dtype.kind not in "iuU":
        raise ValueError(f"--groups {path}: expected integers or texts, got {column.dtype}")
    return np.unique(column, return_inverse=True)[1] if column.dtype.kind == "U" else column


def read_weights(path: Path, rows: int) -> np.ndarray:
    """Reads a weight for each row, float64.

    Args:
        path: `.npy` of numbers, or a dataset's file.

    Raises:
        ValueError: it has another number of rows, a row that is not a number of 0 or more, or
            weights that cannot be summed.
    """
    column = _read(path, rows, "--weights")
    if column.dtype.kind not in "iuf":
        raise ValueError(f"--weights {path}: expected numbers, got {column.dtype}")
    column = column.astype(np.float64)
    try:
        check_weights(column)
    except ValueError as error:
        raise ValueError(f"--weights {path}: {error}") from None
    return column


def _read(path: Path, rows: int, flag: str) -> np.ndarray:
    try:
        if path.suffix == ".bin":
            column = np.fromfile(path, _DTYPES.get(path.stem, _GROUP_DTYPE))
        else:
            column = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{flag} {path}: not a .npy file ({error})") from None
    if column.shape != (rows,):
        got = f"{len(column):,}" if column.ndim == 1 else str(list(column.shape))
        raise ValueError(f"{flag} {path}: expected one value for each of {rows:,} rows, got {got}")
    return column

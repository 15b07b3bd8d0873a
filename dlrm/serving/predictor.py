"""Scores rows in this process, given a checkpoint: `dlrm.load(DIR).predict(rows)`."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm.data.clicks import layout
from dlrm.data.clicks.batch import Batch, Dataset
from dlrm.data.tables.frames import is_frame, open_frame
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.lists import missing_features
from dlrm.files import MANIFEST, check_local, check_outside, staged_directory
from dlrm.locks import ReplacedError, in_use, unreplaced
from dlrm.manifest import check_listed, read_manifest
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.ensemble import Ensemble
from dlrm.serving.network.recalibration import Recalibration, load_recalibration
from dlrm.serving.rows.inputs import Inputs, RowError, check_inputs
from dlrm.serving.rows.raw import RowTransform, Text, text_of_fields
from dlrm.serving.rows.shares import Shares
from dlrm.serving.rows.tables import frame_of, labels_of, read_inputs, scoring_reader
from dlrm.torch_settings import own_settings
from dlrm.train.checkpoints.checkpoint import (
    Parameters,
    averaged,
    load_checkpoint,
    read_config,
    read_shape,
)
from dlrm.train.checkpoints.directory import checkpoint_in_use
from dlrm.train.checkpoints.ensemble import member_checkpoints
from dlrm.train.checkpoints.rows import STORES
from dlrm.train.checkpoints.saved_model import fill_saved, read_saved
from dlrm.train.checkpoints.state import MEMBERS
from dlrm.train.metrics import click_metrics, unscored_text

BATCH_SIZE = 32768  # the default of --test_batch_size
_ATTEMPTS = 100  # to load a checkpoint that is being replaced again and again


def load(
    checkpoint: str | os.PathLike,
    dataset: str | os.PathLike | None = None,
    allow_other_transform: bool = False,
    say: Callable[[str], object] = warnings.warn,
    allow_links: bool = False,
) -> "Predictor":
    """Loads a trained model to score rows with.

    Args:
        checkpoint: a checkpoint, or a run's directory of checkpoints, whose best one is used.
        dataset: dataset whose fitted transform to apply to raw rows if the checkpoint has none. A
            checkpoint trained on one of our datasets has its transform, and both must be the same.
        allow_other_transform: whether to accept different transforms, and use the checkpoint's.
        say: called with a line if they differ, or if the dataset has none.
        allow_links: whether the dataset's files may be symbolic links out of it.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or the dataset's transform differs; the message names up to three
            differing fields.
    """
    check_local(checkpoint, "checkpoint")
    check_local(dataset or "", "dataset")
    for _ in range(_ATTEMPTS):
        with (
            suppress(ReplacedError),
            checkpoint_in_use(checkpoint) as path,
            unreplaced(path),
            own_settings(),
        ):
            note = dataset and compare_transforms(
                path, dataset, allow_other_transform, allow_links=allow_links
            )
            model = load_model(path)
            transform = load_transform(path, model.config, dataset)
            recalibration = load_recalibration(path)
            break
    else:
        raise ReplacedError(f"{checkpoint}: replaced {_ATTEMPTS} times while it was read")
    if note:
        say(note)
    return Predictor(model, transform, path, recalibration=recalibration)


def _trained_rows(checkpoint: Path) -> int | None:
    """Returns the number of training rows; None if the checkpoint does not state it."""
    try:
        return int(read_config(checkpoint)["dataset"]["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class ScoreError(RowError):
    """A row whose score is not finite."""


class Predictor:
    """A model with the transform of its inputs.

    Args:
        model: the network, whose tables may be on any device.
        transform: transform of raw rows; None if the training data had none.
        path: the checkpoint.
        batch_size: rows scored at a time.
        recalibration: recalibration of the model's logits; None for none.

    Attributes:
        results: the summary of training, by name, if `dlrm.fit` made the model; otherwise empty.
    """

    def __init__(
        self,
        model: DLRM | Ensemble,
        transform: RowTransform | None,
        path: Path,
        batch_size: int = BATCH_SIZE,
        recalibration: Recalibration | None = None,
    ) -> None:
        self.model, self.transform, self.path = model.eval(), transform, path.absolute()
        self.batch_size, self.recalibration = batch_size, recalibration
        self.results: dict[str, Any] = {}

    def __repr__(self) -> str:
        config, results = self.model.config, self.results
        kinds = f"{config.num_numerical_features} numerical and {len(config.table_sizes)}"
        shown = f"Predictor({str(self.path)!r}: {kinds} categorical fields"
        if (rows := _trained_rows(self.path)) is not None:
            shown += f", trained on {rows:,} rows"
        role = "never_chosen_on" if "never_chosen_on" in results else "chosen_on"
        if f"{(name := results.get(role))}_auc" in results:
            auc, loss = results[f"{name}_auc"], results[f"{name}_log_loss"]
            shown += f"; {name} auc {auc:.4f}, log loss {loss:.4f} ({role.replace('_', ' ')})"
        return f"{shown})"

    def predict(self, rows: Any) -> np.ndarray:
        """Returns the probability of a click for each row, float32 `[rows]`; see `logits`."""
        return probability(self.logits(rows))

    def logits(self, rows: Any) -> np.ndarray:
        """Returns the model's logit for each row, with any recalibration, float32 `[rows]`.

        Args:
            rows: a table of pyarrow, Polars, pandas or DuckDB, from which only the columns of the
                training data are read. Or raw rows without label, each a line of text with tabs
                between fields, a sequence of fields (numerical ones first), or a mapping from
                column names to fields; or a mapping from names to columns. None, "" and NaN are
                missing values, except for NaN in tables other than those of pandas. A list field
                has a list, or its text as in CSV.

        Raises:
            ValueError: the model has no transform, a column is missing, or a row is unreadable; the
                message names it.
        """
        table, shares = self.row_transform.table, shares_of(self.row_transform)
        if table is None:
            parts = list(self._of_log(rows, shares))
        else:
            names = self.row_transform.names
            frame = rows if is_frame(rows) else frame_of(_fields(rows, names), table)
            parts = [logits for logits, _ in self._of_frame(frame, False, shares)]
        _warn(shares, 3)
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _of_log(self, rows: Any, shares: Shares) -> Iterator[np.ndarray]:
        """Yields the logits of rows of a log, some at a time."""
        names = self.row_transform.names
        fields = _fields(rows, names, _field)
        for begin in range(0, len(fields), self.batch_size):
            try:
                text = text_of_fields(fields[begin : begin + self.batch_size], len(names))
                inputs = self.row_transform(text)
                shares.add(text.starts == text.ends, inputs.without_id())
                yield self.logits_of(inputs)
            except RowError as error:
                raise type(error)(begin + error.row, error.problem) from None

    def evaluate(self, frame: Any) -> dict[str, float]:
        """Returns metrics of the model's predictions for a labelled table.

        Args:
            frame: a table that `logits` accepts, with the column of labels.

        Returns:
            `auc`; `log_loss` in nats; `normalized_entropy`, the log loss relative to that of always
            predicting the share of positive rows; `calibration`, predicted over observed positive
            rows. See `dlrm.train.metrics.click_metrics`.

        Raises:
            ValueError: the model was not trained on a table, the table has no rows, a column is
                missing, or a value is unreadable; the message names row and column.
        """
        table = self.row_transform.table
        if table is None or not table.label_known:
            raise ValueError(f"{self.path}: the model does not say which column has the labels")
        shares = shares_of(self.row_transform)
        parts = list(self._of_frame(frame, True, shares))
        _warn(shares, 2)
        logits = [logits for logits, _ in parts]
        labels = [labels for _, labels in parts if labels is not None]
        if not sum(map(len, logits)):
            raise ValueError("frame: expected rows to evaluate, got none")
        with own_settings():
            return click_metrics(
                torch.from_numpy(np.concatenate(logits)), torch.from_numpy(np.concatenate(labels))
            )

    def _of_frame(
        self, frame: Any, labelled: bool, shares: Shares
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yields logits and labels of a table in memory, some rows at a time."""
        table = self.row_transform.table
        assert table is not None
        reader, done = scoring_reader(table, labelled), 0
        for batch in open_frame(frame, reader.columns):
            for begin in range(0, batch.num_rows, self.batch_size):
                try:
                    part = batch.slice(begin, self.batch_size)
                    inputs, rows = read_inputs(table, reader, part)
                    absent = rows.numerical, rows.categorical, inputs.numerical.shape[1]
                    shares.add(missing_features(*absent), inputs.without_id())
                    yield self.logits_of(inputs), labels_of(rows)
                except RowError as error:
                    raise type(error)(done + begin + error.row, error.problem) from None
            done += batch.num_rows

    def save(self, directory: str | os.PathLike, overwrite: bool = False) -> None:
        """Copies the model's checkpoint, with the transform of raw rows, to a directory.

        Rows in a store (`--table_store`) are written into files, so that the copy needs no store;
        the optimizers' state is then left out. Members of an ensemble refer to their stores.

        `dlrm.load`, `dlrm.scripts.predict`, `triton/export.py` and the `--load_checkpoint_path` of
        `dlrm.scripts.main` read it.

        Args:
            directory: directory to write, which appears when it is complete.
            overwrite: whether to replace a checkpoint, or another directory that this package
                wrote.

        Raises:
            FileExistsError: `directory` exists and may not be replaced.
            FileNotFoundError: the checkpoint that the model was loaded from no longer exists.
            ValueError: `directory` is a URI, or is inside the checkpoint.
        """
        check_local(directory, "directory")
        check_outside(directory, self.path)
        if not overwrite and Path(directory, MANIFEST).is_file():
            raise FileExistsError(
                f"{directory}: exists and is not empty; overwrite=True replaces a checkpoint"
            )
        replace = "checkpoint" if overwrite else False
        with (
            staged_directory(directory, replace) as staging,
            in_use(self.path) as stays,
            unreplaced(self.path) if stays else nullcontext(),
        ):
            if not stays:
                raise FileNotFoundError(f"{self.path}: the model's checkpoint is gone")
            if read_config(self.path).get(STORES):
                fill_saved(read_saved(self.path), staging)
            else:
                shutil.copytree(self.path, staging, dirs_exist_ok=True)

    @property
    def row_transform(self) -> RowTransform:
        """The transform of raw rows.

        Raises:
            ValueError: there is none.
        """
        if self.transform is None:
            raise ValueError(
                f"{self.path}: has no fitted transform, so it cannot score raw rows; name the "
                "dataset it was trained on, or score a dataset"
            )
        return self.transform

    @property
    def sampling_note(self) -> str | None:
        """Returns a note that scores reflect sampled negatives, unless they were corrected."""
        table = self.transform.table if self.transform else None
        if table is None or table.keep_negatives == 1 or self.recalibration is not None:
            return None
        kept = table.keep_negatives
        return (
            f"note: {self.path} was trained on {kept:g} of the rows with label 0, so its "
            "probabilities are too high; `python -m dlrm.scripts.evaluate --sampling_rate "
            f"{kept:g} --recalibrated_checkpoint DIR` writes a model that corrects them"
        )

    def logits_of_text(self, text: Text) -> np.ndarray:
        """Returns the logits of rows of text."""
        return self.logits_of(self.row_transform(text))

    def logits_of(self, inputs: Inputs) -> np.ndarray:
        """Returns the logits of a model's inputs, float32 `[rows]`.

        Raises:
            ValueError: their shapes, types or values do not match the model.
            ScoreError: a row's logit is not finite.
        """
        config, device = self.model.config, next(self.model.parameters()).device
        check_model_inputs(inputs, config, self.transform)
        parts = []
        with own_settings(), torch.inference_mode():
            for begin in range(0, len(inputs.numerical), self.batch_size):
                numerical, ids, lengths, weights = (
                    None if array is None else torch.from_numpy(array).to(device)
                    for array in inputs.part(begin, begin + self.batch_size)
                )
                parts.append(self.model(numerical, ids, lengths, id_weights=weights).cpu())
            if self.recalibration is not None:
                parts = [self.recalibration(part) for part in parts]
            logits = torch.cat(parts).numpy() if parts else np.empty(0, np.float32)
        if not np.isfinite(logits).all():
            row = int(np.isfinite(logits).argmin())
            raise ScoreError(row, f": {unscored_text(float(logits[row]))}")
        return logits

    def score_batch(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits and labels of a dataset's batch.

        Raises:
            ValueError: it does not match the model.
        """
        return self.logits_of(inputs_of(batch)), batch.labels.cpu().numpy()


def inputs_of(batch: Batch) -> Inputs:
    """Returns the inputs of a dataset's batch."""
    lengths, weights = (
        None if tensor is None else tensor.cpu().numpy()
        for tensor in (batch.lengths, batch.id_weights)
    )
    return Inputs(batch.numerical.cpu().numpy(), batch.categorical.cpu().numpy(), lengths, weights)


def shares_of(transform: RowTransform) -> Shares:
    """Returns counters of the values that a transform knows."""
    names = transform.numerical_names, transform.categorical_names
    return Shares(*names, transform.have_ids)


def _warn(shares: Shares, level: int) -> None:
    """Warns of fields without a known value; `level` is that of the caller's caller."""
    if line := shares.strangers():
        warnings.warn(line, stacklevel=level + 1)


def field_names(predictor: Predictor) -> tuple[list[str], list[str]]:
    """Returns the names of a model's numerical and categorical fields."""
    if predictor.transform is not None:
        return predictor.transform.numerical_names, predictor.transform.categorical_names
    config = predictor.model.config
    return (
        [f"numerical {i}" for i in range(config.num_numerical_features)],
        [f"categorical {i}" for i in range(len(config.table_sizes))],
    )


def check_dataset(path: str | os.PathLike, dataset: Dataset, config: DLRMConfig) -> None:
    """Raises ValueError if the features of a dataset differ from those of the model."""
    found = (dataset.num_numerical, list(dataset.table_sizes))
    expected = (config.num_numerical_features, list(config.table_sizes))
    if found != expected:
        raise ValueError(
            f"{path}: the dataset of another model: expected {expected[0]} numerical features and "
            f"tables of {expected[1]} rows, got {found[0]} and {found[1]}"
        )


def check_model_inputs(inputs: Inputs, config: DLRMConfig, transform: RowTransform | None) -> None:
    """Raises ValueError if inputs do not match a model; with hashed ids, any id does."""
    names = transform.categorical_names if transform else []
    sizes = () if config.hash_indices else config.table_sizes
    if not sizes and not names:
        names = [str(index) for index in range(len(config.table_sizes))]
    longest = transform.longest if transform else None
    check_inputs(inputs, config.num_numerical_features, sizes, names, longest)


def probability(logits: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-logit)), float32: the same for equal logits."""
    # In float32 the last values of an array would be rounded otherwise, and equal rows differ.
    return torch.from_numpy(logits).double().sigmoid().float().numpy()


def load_model(path: Path, device: str = "cpu") -> DLRM | Ensemble:
    """Makes the network or networks that a checkpoint describes, and loads the weights."""
    if members := member_checkpoints(path):  # which compare the files of their own manifests
        read_manifest(path, "checkpoint", True, _is_of_ensemble)
        return Ensemble([load_one(member, device) for member in members]).eval()
    return load_one(path, device)


def _is_of_ensemble(name: str) -> bool:
    """Returns whether a file is the ensemble's own, or the manifest of a member."""
    return not name.startswith(f"{MEMBERS}/") or name.endswith(f"/{MANIFEST}")


def load_one(path: Path, device: str = "cpu") -> DLRM:
    """Makes the network of a checkpoint without an ensemble, and loads its weights."""
    model = DLRM(model_config(path)).to(device).eval()
    load_checkpoint(path, averaged(Parameters(model, model.table_parameters())))
    return model


def model_config(path: Path) -> DLRMConfig:
    """Reads the architecture from a checkpoint.

    Raises:
        ValueError: the checkpoint does not describe it.
    """
    config = read_config(path)
    try:
        saved = config["flags"]
        values: dict[str, Any] = {
            field.name: tuple(saved[field.name])
            if isinstance(saved[field.name], list)
            else saved[field.name]
            for field in fields(DLRMConfig)
            if field.name in saved
        }
        values["table_sizes"] = tuple(config["dataset"]["table sizes"])
        poolings = config["dataset"].get("poolings")
        values["table_poolings"] = None if poolings is None else tuple(poolings)
        values["num_numerical_features"] = _num_numerical(path)
        return DLRMConfig(**values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / 'config.json'}: not of a DLRM ({error!r})") from error


def _num_numerical(path: Path) -> int:
    path = next(iter(member_checkpoints(path)), path)
    shape = read_shape(path, "bottom_mlp.0.weight")
    if len(shape) != 2:
        raise ValueError(f"{path}: bottom_mlp.0.weight: expected a matrix, got {shape}")
    return shape[1]


def load_transform(
    path: Path, config: DLRMConfig, dataset: str | os.PathLike | None = None
) -> RowTransform | None:
    """Returns the transform of a checkpoint, or else of a dataset; None if neither has one.

    Raises:
        ValueError: it does not match the model, or is damaged.
    """
    sources = [path, *([Path(dataset)] if dataset else [])]
    source = next((one for one in sources if (one / layout.TRANSFORM).is_dir()), None)
    if source is None:
        return None
    check_listed(source, layout.TRANSFORM)
    transform = RowTransform.load(source)
    found = (len(transform.numerical_names), transform.table_sizes)
    expected = (config.num_numerical_features, list(config.table_sizes))
    if found != expected:
        raise ValueError(
            f"{source}: the transform of another model: expected {expected[0]} numerical features "
            f"and tables of {expected[1]} rows, got {found[0]} and {found[1]}"
        )
    return transform


def _fields(
    rows: Any, names: Sequence[str], field: Callable[[Any], Any] | None = None
) -> list[list[Any]]:
    """Returns the fields of rows of any kind that `Predictor.logits` takes, made by `field`."""
    if isinstance(rows, str | bytes):
        raise ValueError("rows: expected a list of rows, got one string; put it in a list")
    if isinstance(rows, Mapping) or hasattr(rows, "columns"):
        return _transposed(rows, names, field)
    if not isinstance(rows, Iterable):
        raise ValueError(f"rows: expected a list of rows, got {rows!r}")
    return [_row(index, row, names, field) for index, row in enumerate(rows)]


def _row(
    index: int, row: Any, names: Sequence[str], field: Callable[[Any], Any] | None
) -> list[Any]:
    if isinstance(row, bytes):
        row = row.decode()
    if isinstance(row, str):
        row = row.rstrip("\r\n").split("\t")
        row += [""] * (len(names) - len(row))  # fields absent at the end are missing
    elif isinstance(row, Mapping):
        row = _named(f"row {index}", row, names)
    elif not isinstance(row, Iterable):
        raise ValueError(f"row {index}: expected a line, fields or a mapping, got {row!r}")
    return list(row) if field is None else [field(value) for value in row]


def _transposed(
    columns: Any, names: Sequence[str], field: Callable[[Any], Any] | None
) -> list[list[Any]]:
    values = _named("rows", columns, names)
    for name, column in zip(names, values, strict=True):
        if isinstance(column, str | bytes) or not isinstance(column, Iterable):
            raise ValueError(f"rows: column {name!r}: expected values, got {column!r}")
    chosen = [
        list(column) if field is None else [field(value) for value in column] for column in values
    ]
    if len({len(column) for column in chosen}) > 1:
        lengths = dict(zip(names, map(len, chosen), strict=True))
        raise ValueError(f"rows: expected columns of one length, got {lengths}")
    return [list(row) for row in zip(*chosen, strict=True)]


def _named(what: str, mapping: Any, names: Sequence[str]) -> list[Any]:
    if missing := [name for name in names if name not in mapping]:
        raise ValueError(f"{what}: no column {missing[0]!r}; expected {', '.join(names)}")
    return [mapping[name] for name in names]


def _field(value: Any) -> bytes:
    """Returns a value as in a log: whole numbers without a point, missing ones empty."""
    if isinstance(value, bytes):
        return value
    if value is None or type(value).__name__ == "NAType":  # pandas.NA, which equals nothing
        return b""
    if isinstance(value, float | np.floating) and value != value:
        return b""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    return str(value).encode()

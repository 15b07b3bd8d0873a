"""A trained model that scores rows in this process: `dlrm.load(DIR).predict(rows)`."""

import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm.data.clicks.batch import Batch, Dataset
from dlrm.data.clicks.layout import field_names as default_field_names
from dlrm.data.sources.row_error import RowError
from dlrm.data.tables.frames import open_frame
from dlrm.data.transform.transform import Transform
from dlrm.files import MANIFEST, check_local, check_outside, staged_directory
from dlrm.locks import in_use, unreplaced
from dlrm.metrics.clicks import click_metrics, unscored_text
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.ensemble import Ensemble
from dlrm.serving.network.recalibration import Recalibration
from dlrm.serving.rows.config import BATCH_SIZE
from dlrm.serving.rows.inputs import FieldNames, Inputs, check_inputs
from dlrm.serving.rows.python_rows import frame_of
from dlrm.serving.rows.raw import Text, inputs_of_text
from dlrm.serving.rows.shares import Shares
from dlrm.serving.rows.tables import labels_of, read_inputs, scoring_reader
from dlrm.torch_settings import own_settings
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.saved_model import fill_saved, read_saved
from dlrm.train.checkpoints.saved_rows import STORES


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
        transform: Transform | None,
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
        shares = shares_of(self.row_transform)
        frame = frame_of(rows, self.row_transform)
        parts = [logits for logits, _ in self._of_frame(frame, False, shares)]
        _warn(shares, 3)
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def evaluate(self, frame: Any) -> dict[str, float]:
        """Returns metrics of the model's predictions for a labelled table.

        Args:
            frame: a table that `logits` accepts, with the column of labels.

        Returns:
            `auc`; `log_loss` in nats; `normalized_entropy`, the log loss relative to that of always
            predicting the share of positive rows; `calibration`, predicted over observed positive
            rows. See `dlrm.metrics.clicks.click_metrics`.

        Raises:
            ValueError: the model was not trained on a table, the table has no rows, a column is
                missing, or a value is unreadable; the message names row and column.
        """
        if not self.row_transform.label_known:
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
        fitted, done = self.row_transform, 0
        reader = scoring_reader(fitted, labelled)
        for batch in open_frame(frame, reader.columns):
            for begin in range(0, batch.num_rows, self.batch_size):
                try:
                    part = batch.slice(begin, self.batch_size)
                    inputs, rows = read_inputs(fitted, reader, part, shares)
                    yield self.logits_of(inputs), labels_of(rows)
                except RowError as error:
                    error.row += done + begin
                    raise
            done += batch.num_rows

    def save(self, directory: str | os.PathLike, overwrite: bool = False) -> None:
        """Copies the model's checkpoint, with the transform of raw rows, to a directory.

        Rows in a store (`--table_store`) are written into files, so that the copy needs no store;
        the optimizers' state is then left out. Members of an ensemble refer to their stores.

        `dlrm.load`, `dlrm predict`, `dlrm export` and the `--load_checkpoint_path` of `dlrm train`
        read it.

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
    def row_transform(self) -> Transform:
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
        kept = self.transform.keep_negatives if self.transform else 1.0
        if kept == 1 or self.recalibration is not None:
            return None
        return (
            f"note: {self.path} was trained on {kept:g} of the rows with label 0, so its "
            "probabilities are too high; `dlrm evaluate --sampling_rate "
            f"{kept:g} --recalibrated_checkpoint DIR` writes a model that corrects them"
        )

    def logits_of_text(self, text: Text) -> np.ndarray:
        """Returns the logits of rows of text."""
        return self.logits_of(inputs_of_text(self.row_transform, text))

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
            raise ScoreError(row, unscored_text(float(logits[row])))
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


def shares_of(transform: Transform | None) -> Shares:
    """Returns counters of the values that a transform knows."""
    if transform is None:
        return Shares((), ())
    names = transform.schema.numerical_names, transform.schema.categorical_names
    return Shares(*names, [ids > 0 for ids in transform.own_ids], transform.of_ids)


def _warn(shares: Shares, level: int) -> None:
    """Warns of fields without a known value; `level` is that of the caller's caller."""
    if line := shares.strangers():
        warnings.warn(line, stacklevel=level + 1)


def field_names(predictor: Predictor) -> FieldNames:
    """Returns the names of a model's numerical and categorical fields."""
    return _names_of(predictor.model.config, predictor.transform)


def _names_of(config: DLRMConfig, transform: Transform | None) -> FieldNames:
    if transform is not None:
        return transform.schema.numerical_names, transform.schema.categorical_names
    return default_field_names(config.num_numerical_features, len(config.table_sizes))


def check_dataset(path: str | os.PathLike, dataset: Dataset, config: DLRMConfig) -> None:
    """Raises ValueError if the features of a dataset differ from those of the model."""
    check_features(f"{path}: the dataset", dataset.num_numerical, dataset.table_sizes, config)


def check_features(
    what: str, num_numerical: int, table_sizes: Sequence[int], config: DLRMConfig
) -> None:
    """Raises ValueError if numbers or tables are not those of the model; `what` has them."""
    shape = (num_numerical, list(table_sizes))
    expected = (config.num_numerical_features, list(config.table_sizes))
    if shape != expected:
        raise ValueError(
            f"{what} of another model: expected {expected[0]} numerical features and tables of "
            f"{expected[1]} rows, got {shape[0]} and {shape[1]}"
        )


def check_model_inputs(inputs: Inputs, config: DLRMConfig, transform: Transform | None) -> None:
    """Raises ValueError if inputs do not match a model; with hashed ids, any id does."""
    sizes = () if config.hash_indices else config.table_sizes
    longest = transform.longest if transform else None
    check_inputs(inputs, _names_of(config, transform), sizes, longest)


def probability(logits: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-logit)), float32: the same for equal logits."""
    # In float32 the last values of an array would be rounded otherwise, and equal rows differ.
    return torch.from_numpy(logits).double().sigmoid().float().numpy()

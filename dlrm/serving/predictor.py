"""A trained model that scores rows in this process: `dlrm.load(DIR).predict(rows)`."""

import os
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dlrm.data.transform.transform import Transform
from dlrm.files import MANIFEST, check_outside
from dlrm.locks import in_use, unreplaced
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.remote.localize import output_at
from dlrm.remote.uri import shown
from dlrm.serving import judged
from dlrm.serving.judged import warn_of
from dlrm.serving.network.recalibration import Recalibration, texts_of
from dlrm.serving.rows.config import BATCH_SIZE
from dlrm.serving.rows.inputs import Inputs, check_inputs, check_scores
from dlrm.serving.rows.python_rows import frame_of
from dlrm.serving.rows.shares import shares_of
from dlrm.serving.scoring import Scorer, field_names as field_names, probability
from dlrm.serving.shown import html_of, lines_of, summary_of
from dlrm.serving.sources import frame_blocks, taken_from
from dlrm.serving.wording import in_python
from dlrm.torch_settings import own_settings
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.runs import read_results

if TYPE_CHECKING:
    from dlrm.data.tables.draft import Draft


class Predictor(Scorer):
    """A model with the transform of its inputs.

    `print(model)` shows its fields and the metrics of its training.

    Args:
        model: the network, whose tables may be on any device.
        transform: transform of raw rows; None if the training data had none.
        path: the checkpoint.
        batch_size: rows scored at a time.
        recalibration: recalibration of the model's logits; None for none.

    Attributes:
        results: the summary of the training by name, as far as the checkpoint has it; see
            `dlrm.fit`.
        draft: the draft of the schema, if `dlrm.fit` has just made one: `print(model.draft.text())`
            shows it with its reasons.
    """

    def __init__(
        self,
        model: DLRM,
        transform: Transform | None,
        path: Path,
        batch_size: int = BATCH_SIZE,
        recalibration: Recalibration | None = None,
    ) -> None:
        self.model, self.transform, self.path = model.eval(), transform, path.absolute()
        self.batch_size, self.recalibration = batch_size, recalibration
        self.draft: Draft | None = None

    @cached_property
    def results(self) -> dict[str, Any]:
        """The summary of the training; see the class."""
        return read_results(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"results": self.results}  # a copy may outlive the checkpoint

    def __str__(self) -> str:
        return "\n".join(lines_of(self))

    def _repr_html_(self) -> str:
        return html_of(self)

    def __repr__(self) -> str:
        return f"Predictor({shown(str(self.path))!r}: {'; '.join(summary_of(self))})"

    def predict(self, rows: Any) -> np.ndarray:
        """Returns the probability of a click for each row, float32 `[rows]`; see `logits`."""
        return probability(self.logits(rows))

    def logits(self, rows: Any) -> np.ndarray:
        """Returns the model's logit for each row, with any recalibration, float32 `[rows]`.

        Args:
            rows: a table of pyarrow, Polars, pandas or DuckDB, from which only the columns of the
                training data are read. Or raw rows without label, each a line of text with tabs
                between fields, a sequence of fields (numerical ones first), or a mapping from
                column names to fields; or a mapping from names to columns, beside which a single
                value counts for all rows. None, "" and NaN are missing values, except for NaN of
                numbers in tables other than those of pandas. A list field has a list, or its text
                as in CSV; a column of it is a list of lists. Numbers in text have the marks of the
                schema's `format`; those of tables have a decimal point.

        Raises:
            ValueError: the model has no transform, a column is missing, or a row is unreadable; the
                message names it.
        """
        shares = shares_of(self.row_transform)
        frame = frame_of(rows, self.row_transform)
        blocks = frame_blocks(self, frame, False, shares)
        parts = [*taken_from(blocks, lambda block: self.logits_of(block.inputs))]
        warn_of(shares)
        return np.concatenate([np.empty(0, np.float32), *parts])

    def save(self, directory: str | os.PathLike, overwrite: bool = False) -> None:
        """Copies the model's checkpoint, with the transform of raw rows, to a directory.

        `dlrm.load`, `dlrm predict`, `dlrm export` and the `--load_checkpoint_path` of `dlrm train`
        read it.

        Args:
            directory: directory to write, or a URI, which appears when it is complete.
            overwrite: whether to replace a checkpoint, or another directory that this package
                wrote.

        Raises:
            FileExistsError: `directory` exists and may not be replaced.
            FileNotFoundError: the checkpoint that the model was loaded from no longer exists.
            OSError: it cannot be written.
            ValueError: `directory` is a URI of an unknown scheme, or is inside the checkpoint.
        """
        replace = "checkpoint" if overwrite else False
        with in_python(), output_at(directory, "directory", replace) as path:
            check_outside(path, self.path)
            if not overwrite and Path(path, MANIFEST).is_file():
                raise FileExistsError(
                    f"{path}: exists and is not empty; overwrite=True replaces a checkpoint"
                )
            with in_use(self.path) as stays, unreplaced(self.path) if stays else nullcontext():
                if not stays:
                    raise FileNotFoundError(f"{self.path}: the model's checkpoint is gone")
                own = self.recalibration
                texts = {} if own is None else texts_of(self.path, own)
                Checkpoint(self.path).copy(path, texts, replace)

    @property
    def config(self) -> DLRMConfig:
        """The architecture of the network."""
        return self.model.config

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

    def logits_of(self, inputs: Inputs) -> np.ndarray:
        """Returns the logits of a model's inputs, float32 `[rows]`.

        Raises:
            ValueError: their shapes, types or values do not match the model.
            ScoreError: a row's logit is not finite.
        """
        device = next(self.model.parameters()).device
        sizes = () if self.config.hash_indices else self.config.table_sizes
        # The look-up knows no names of fields, and its rows are those of a part.
        longest = self.transform.longest if self.transform else None
        check_inputs(inputs, field_names(self), sizes, longest)
        with own_settings(), torch.inference_mode():
            parts = [torch.empty(0)]
            for begin in range(0, len(inputs.numerical), self.batch_size):
                numerical, ids, lengths, weights = (
                    None if array is None else torch.from_numpy(array).to(device)
                    for array in inputs.part(begin, begin + self.batch_size)
                )
                parts.append(self.model(numerical, ids, lengths, id_weights=weights).cpu())
            logits = torch.cat(parts)
            if self.recalibration is not None:
                logits = self.recalibration(logits)
        scores = logits.numpy()
        check_scores(scores)
        return scores

    evaluate, importance = judged.evaluate, judged.importance
    compare, recalibrate, plot = judged.compare, judged.recalibrate, judged.plot

"""Evaluates models on rows: dlrm evaluate --checkpoint RUN --dataset DIR"""

from dataclasses import dataclass
from pathlib import Path

from dlrm.settings import setting


@dataclass(frozen=True)
class EvaluateConfig:
    """The rows, and what is measured on them; field names are those of the flags."""

    input: tuple[str, ...] = setting(
        (), "Logs, tables or datasets to evaluate on, separated by commas", uri="read"
    )
    against: str | None = setting(
        None, "Checkpoint of a model to compare on the same rows", uri="read"
    )
    groups: str | None = setting(
        None,
        "Groups, such as users, for metrics by group: a column of the dataset or table, or a "
        "file, .npy, with one for each row",
        uri="read",
    )
    weights: str | None = setting(
        None,
        "Sample weights: `weight`, that of the schema, or a column of the table, or a file, .npy "
        "with a number for each row",
        uri="read",
    )
    slices: tuple[str, ...] = setting(
        (),
        "Fields to slice rows by: the most frequent values of categorical fields, the deciles of "
        "numerical ones; `day`: the day of the schema's time, in UTC",
    )
    bootstrap: int = setting(
        200, "Number of bootstrap replicates for confidence intervals; 0: no intervals", least=0
    )
    seed: int = setting(
        0, "Seed of the bootstrap replicates and of the permutations of --importance", least=0
    )
    sampling_rate: float | None = setting(
        None,
        "Share of the negatives that training kept, in (0,1]; corrects the scores of --checkpoint",
    )
    recalibrate: bool = setting(
        False,
        "Fit a recalibration to these rows, in place of that of the checkpoint, if it has one; "
        "its metrics come from fits to each half tested on the other",
    )
    recalibrated_checkpoint: Path | None = setting(
        None,
        "Directory for a new checkpoint: --checkpoint with the recalibration of --sampling_rate "
        "or --recalibrate, which predict, dlrm.load and the exporter apply",
        uri="write",
    )
    output: Path | None = setting(
        None,
        "Directory to write the page and the JSON to; an earlier one is replaced",
        uri="replace, plain, evaluation",
    )
    importance: bool = setting(
        False,
        "Measure the importance of each field: the loss in quality when its values are permuted "
        "among a sample of rows",
    )
    importance_rows: int = setting(
        100_000,
        "Maximum rows of the sample of --importance, which are evenly spaced",
        least=2,
    )
